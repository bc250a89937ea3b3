//! The common form of all APIs: a request to generate text, and the updates of its answer. Each API
//! translates its own bodies to and from this form.

use serde_json::{Map, Value};
use thunder_access::Outcome;
use thunder_engine::{FinishReason, Grammar, TokenLogprob, Usage};
use thunder_model::chat::{Message, Tool};

use crate::error::ApiError;
use crate::request::options::Options;

pub(crate) mod choices;
pub(crate) mod frames;
pub(crate) mod prepare;
pub(crate) mod relay;
pub(crate) mod relaying;
pub(crate) mod reply;
pub(crate) mod streams;
pub(crate) mod updates;
pub(crate) mod vectors;

/// A request to generate text, from any API.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Generation {
    pub options: Options,
    pub input: Input,
    pub tools: ToolUse,
    /// How much to think, if the request says.
    pub thinking: Thinking,
    /// Further variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    /// The format that the answer's text must follow, and the request's field for it.
    pub grammar: Option<(&'static str, Grammar)>,
    /// Alternatives to report per token; `None` for no logprobs.
    pub logprobs: Option<usize>,
    /// The predicted answer.
    pub predicted: Option<String>,
    /// The field that the prompt comes from, for errors.
    pub prompt_field: &'static str,
}

impl Generation {
    /// A request without tools and grammar.
    pub fn new(options: Options, input: Input, prompt_field: &'static str) -> Self {
        Self {
            options,
            input,
            tools: ToolUse::default(),
            thinking: Thinking::default(),
            template_kwargs: Map::new(),
            grammar: None,
            logprobs: None,
            predicted: None,
            prompt_field,
        }
    }
}

/// The input that the answer continues.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    Chat(Vec<Message>),
    Prompts(Vec<Prompt>),
}

/// A prompt without a chat template.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// The tools of a request, and whether they are to be called.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolUse {
    pub tools: Vec<Tool>,
    pub choice: ToolChoice,
    /// Several calls in one answer are allowed.
    pub parallel: bool,
}

impl Default for ToolUse {
    fn default() -> Self {
        Self { tools: Vec::new(), choice: ToolChoice::Auto, parallel: true }
    }
}

/// Whether tools are to be called.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ToolChoice {
    /// As the model wants.
    Auto,
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// How much the model thinks before it answers.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Thinking {
    /// Off or on; `None`: the template decides.
    pub enabled: Option<bool>,
    /// A level for templates that support it.
    pub effort: Option<String>,
}

/// An event of one choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Update {
    pub choice: usize,
    pub what: What,
}

/// The kind of event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum What {
    Text {
        text: String,
        logprobs: Vec<TokenLogprob>,
    },
    Reasoning(String),
    CallBegin {
        id: String,
        name: String,
    },
    /// More of the arguments' JSON.
    Arguments(String),
    CallEnd,
    /// Nothing of this choice follows.
    End {
        reason: EndReason,
        usage: Usage,
    },
    /// Nothing of any choice follows.
    Failed(ApiError),
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndReason {
    Stop,
    /// The request's stop text with this number.
    StopText(usize),
    Length,
    /// The model calls tools.
    Calls,
}

impl EndReason {
    /// How usage records name it.
    pub fn outcome(self) -> Outcome {
        match self {
            Self::Stop | Self::StopText(_) => Outcome::Stop,
            Self::Length => Outcome::Length,
            Self::Calls => Outcome::Calls,
        }
    }

    /// The reason why an answer with or without calls ended; `in_call`: it ended inside a call.
    pub fn of(reason: FinishReason, has_calls: bool, in_call: bool) -> Self {
        match reason {
            FinishReason::Stop if has_calls => Self::Calls,
            // An incomplete call must not be run.
            FinishReason::StopText(_) if has_calls && !in_call => Self::Calls,
            FinishReason::Stop => Self::Stop,
            FinishReason::StopText(number) => Self::StopText(number),
            FinishReason::Length => Self::Length,
        }
    }

    /// OpenAI's name for it.
    pub fn openai(self) -> &'static str {
        match self {
            Self::Stop | Self::StopText(_) => "stop",
            Self::Length => "length",
            Self::Calls => "tool_calls",
        }
    }
}
