//! How a model family writes its thinking and its tool calls, found from the chat template and the
//! special tokens.

mod families;

use crate::tokenizer::Tokenizer;

use super::answer::{Marker, Opening};
use super::conversation::CallForm;
use super::{ChatTemplate, conversation};

/// How a model's answers are to be read.
#[derive(Debug, Clone, PartialEq)]
pub struct AnswerFormat {
    /// The marks around thinking; `None` for a model that does not think.
    pub(crate) reasoning: Option<Reasoning>,
    /// How tool calls are written.
    pub(crate) calls: CallSyntax,
    /// The form in which the template expects tool calls; `None` if it does not support tools,
    /// which are then described in the system message.
    pub(crate) template_calls: Option<CallForm>,
}

/// The marks around thinking.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reasoning {
    pub open: Marker,
    pub close: Marker,
}

/// How tool calls are written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CallSyntax {
    /// Objects with a name and arguments.
    Json(JsonCalls),
    /// A name and a JSON object, separated by marks.
    Named(NamedCalls),
    /// A name, and each argument between marks.
    Parameters(Box<ParameterCalls>),
    /// gpt-oss's channels.
    Harmony(HarmonyMarks),
}

/// `{"name": …, "arguments": {…}}`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JsonCalls {
    /// Begins one or several objects.
    pub open: Marker,
    /// Ends them; `None` if the end of the answer does.
    pub close: Option<Marker>,
    /// The objects are in a list.
    pub list: bool,
    /// An object at the very beginning of the answer is a call too.
    pub bare: bool,
    /// The arguments' field.
    pub arguments: &'static str,
}

/// `OPEN CALL_OPEN name SEPARATOR {…} CALL_CLOSE CLOSE`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NamedCalls {
    pub open: Marker,
    /// Begins each call; `None` if `open` does.
    pub call_open: Option<Marker>,
    pub separator: Marker,
    /// Ends a call's arguments; `None` if the end of the JSON value does.
    pub call_close: Option<Marker>,
    pub close: Option<Marker>,
    pub name: NameStyle,
}

/// What surrounds a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameStyle {
    Plain,
    /// `functions.NAME:INDEX`, which is the call's id.
    Indexed,
    /// `NAME[CALL_ID]ID`.
    WithId,
}

/// `OPEN CALL_OPEN name NAME_END (KEY_OPEN key KEY_END value VALUE_CLOSE)* CALL_CLOSE CLOSE`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ParameterCalls {
    pub open: Marker,
    /// Begins each call; `None` if `open` does.
    pub call_open: Option<Marker>,
    /// Ends the name; `None` if a line, the first key or the call's end does.
    pub name_end: Option<Marker>,
    pub key_open: Marker,
    pub key_end: Marker,
    /// Begins the value; `None` if the key's end does.
    pub value_open: Option<Marker>,
    pub value_close: Marker,
    pub call_close: Marker,
    pub close: Option<Marker>,
    /// How a call is written, for a grammar.
    pub layout: ParameterLayout,
}

/// White space that a family writes between marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParameterLayout {
    pub after_open: &'static str,
    pub after_name: &'static str,
    pub after_key: &'static str,
    pub before_value: &'static str,
    pub after_value: &'static str,
    pub after_parameter: &'static str,
    pub after_call: &'static str,
    /// Written inside of the key's mark for strings, and for other values.
    pub string_flag: [&'static str; 2],
}

/// The special tokens of gpt-oss's format.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HarmonyMarks {
    pub start: Marker,
    pub channel: Marker,
    pub constrain: Marker,
    pub message: Marker,
    pub end: Marker,
    pub call: Marker,
    pub finish: Marker,
}

impl AnswerFormat {
    /// The format of a model with this template and tokenizer.
    pub fn detect(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Self {
        let sources = template.map(ChatTemplate::sources).unwrap_or_default();
        let detector = Detector { sources, tokenizer };
        let reasoning = detector.reasoning();
        let form = template.and_then(conversation::call_form);
        let (calls, template_calls) = match detector.calls() {
            Some(calls) if form.is_some() => (calls, form),
            _ => (detector.hermes(), None),
        };
        Self { reasoning, calls, template_calls }
    }

    /// How an answer to a prompt with this end begins.
    pub fn opening(&self, prompt_tail: &str) -> Opening {
        match &self.reasoning {
            Some(reasoning) if prompt_tail.trim_end().ends_with(&reasoning.open.text) => Opening::Thinking,
            _ => Opening::Fresh,
        }
    }

    /// Special tokens that the engine must report, because they are marks.
    pub fn special_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut ids: Vec<u32> = self
            .markers()
            .iter()
            .flat_map(|marker| marker.special_names())
            .filter_map(|name| tokenizer.token_id(name))
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn markers(&self) -> Vec<&Marker> {
        let mut markers = Vec::new();
        if let Some(Reasoning { open, close }) = &self.reasoning {
            markers.extend([open, close]);
        }
        match &self.calls {
            CallSyntax::Json(calls) => {
                markers.push(&calls.open);
                markers.extend(&calls.close);
            }
            CallSyntax::Named(calls) => {
                markers.extend([&calls.open, &calls.separator]);
                markers.extend(calls.call_open.iter().chain(&calls.call_close).chain(&calls.close));
            }
            CallSyntax::Parameters(calls) => {
                let ParameterCalls { open, key_open, key_end, value_close, call_close, .. } = calls.as_ref();
                markers.extend([open, key_open, key_end, value_close, call_close]);
                markers.extend(calls.call_open.iter().chain(&calls.name_end));
                markers.extend(calls.value_open.iter().chain(&calls.close));
            }
            CallSyntax::Harmony(marks) => markers.extend(marks.all()),
        }
        markers
    }

    /// True if the model thinks before it answers.
    pub fn thinks(&self) -> bool {
        self.reasoning.is_some() || matches!(self.calls, CallSyntax::Harmony(_))
    }
}

impl HarmonyMarks {
    pub fn all(&self) -> [&Marker; 7] {
        [&self.start, &self.channel, &self.constrain, &self.message, &self.end, &self.call, &self.finish]
    }
}

/// The available information about a model.
struct Detector<'a> {
    sources: Vec<&'a str>,
    tokenizer: &'a Tokenizer,
}

impl Detector<'_> {
    fn mark(&self, text: &str) -> Marker {
        Marker::new(text, self.tokenizer)
    }

    fn mentions(&self, text: &str) -> bool {
        self.sources.iter().any(|source| source.contains(text))
    }

    /// True if the tokenizer has this token.
    fn has(&self, token: &str) -> bool {
        self.tokenizer.token_id(token).is_some()
    }

    fn reasoning(&self) -> Option<Reasoning> {
        const TAGS: [(&str, &str); 4] = [
            ("<think>", "</think>"),
            ("[THINK]", "[/THINK]"),
            ("<seed:think>", "</seed:think>"),
            ("<|START_THINKING|>", "<|END_THINKING|>"),
        ];
        let known = |close: &str| self.mentions(close) || self.has(close);
        let (open, close) = TAGS.into_iter().find(|(_, close)| known(close))?;
        Some(Reasoning { open: self.mark(open), close: self.mark(close) })
    }

    fn calls(&self) -> Option<CallSyntax> {
        if self.has("<|channel|>") && self.has("<|message|>") {
            return Some(self.harmony());
        }
        if !self.mentions("tools") && !self.mentions("tool_calls") {
            return None;
        }
        let mentions = |text: &str| self.mentions(text);
        let found = if mentions("｜DSML｜") {
            self.deepseek_markup()
        } else if mentions("<｜tool▁calls▁begin｜>") {
            self.deepseek(mentions("```json"))
        } else if mentions("<|tool_calls_section_begin|>") {
            self.kimi()
        } else if mentions("<minimax:tool_call>") {
            self.minimax()
        } else if mentions("<arg_key>") {
            self.glm()
        } else if mentions("<function=") {
            self.qwen_coder()
        } else if mentions("[TOOL_CALLS]") {
            self.mistral(mentions("[ARGS]"), mentions("[CALL_ID]"))
        } else if mentions("<tool_calls>") {
            self.json("<tool_calls>", Some("</tool_calls>"))
        } else if mentions("<tool_call>") {
            self.hermes()
        } else if mentions("<|python_tag|>") || self.has("<|python_tag|>") {
            self.llama()
        } else {
            return None;
        };
        Some(found)
    }
}
