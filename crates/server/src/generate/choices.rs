//! Builds choices from their updates.

use serde_json::{Map, Value};
use thunder_engine::{Predicted, TokenLogprob, Usage};

use super::{EndReason, Update, What};
use crate::error::ApiError;

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Call {
    pub id: String,
    pub name: String,
    /// JSON, as the model wrote it.
    pub arguments: String,
}

impl Call {
    /// The object of the arguments; `None` if it is incomplete.
    pub fn object(&self) -> Option<Value> {
        serde_json::from_str(&self.arguments).ok().filter(Value::is_object)
    }

    /// The object of the arguments in an answer with this end. `None` if the answer was cut off
    /// inside them, because an incomplete call must not be run. Malformed arguments that the model
    /// completed become an empty object.
    pub fn object_after(&self, reason: EndReason) -> Option<Value> {
        let is_cut = matches!(reason, EndReason::Length | EndReason::StopText(_));
        let malformed = || (!is_cut).then(|| Value::Object(Map::new()));
        self.object().or_else(malformed)
    }
}

/// A whole choice.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    pub text: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
    pub logprobs: Vec<TokenLogprob>,
    pub end: Option<(EndReason, Usage)>,
}

impl Choice {
    /// Why the choice ended.
    pub fn reason(&self) -> EndReason {
        self.end.map_or(EndReason::Stop, |(reason, _)| reason)
    }
}

/// The choices of an answer.
#[derive(Debug, Default)]
pub(crate) struct Choices(pub Vec<Choice>);

impl Choices {
    /// This many empty choices.
    pub fn new(count: usize) -> Self {
        Self(std::iter::repeat_with(Choice::default).take(count).collect())
    }

    /// Adds an update; an error if it is a failure.
    pub fn absorb(&mut self, update: Update) -> Result<(), ApiError> {
        let Some(choice) = self.0.get_mut(update.choice) else { return Ok(()) };
        match update.what {
            What::Text { text, logprobs } => {
                choice.text.push_str(&text);
                choice.logprobs.extend(logprobs);
            }
            What::Reasoning(text) => choice.reasoning.push_str(&text),
            What::CallBegin { id, name } => choice.calls.push(Call { id, name, ..Call::default() }),
            What::Arguments(text) => {
                if let Some(call) = choice.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
            What::CallEnd => {}
            What::End { reason, usage } => choice.end = Some((reason, usage)),
            What::Failed(error) => return Err(error),
        }
        Ok(())
    }

    /// What all choices used.
    pub fn used(&self) -> Tally {
        let mut used = Tally::default();
        self.0.iter().filter_map(|choice| choice.end).for_each(|(_, usage)| used.add(&usage));
        used
    }
}

/// The usage of all choices of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Tokens generated.
    pub generated: usize,
    /// The fewest prompt tokens that a choice found in the cache: the first choice computes the
    /// prompt for the others.
    cached: Option<usize>,
    /// Tokens of the prediction that were accepted and rejected, over all choices.
    pub predicted: Option<Predicted>,
}

impl Tally {
    /// Adds an ended choice.
    pub fn add(&mut self, usage: &Usage) {
        self.generated += usage.completion_tokens;
        if let Some(Predicted { right, wrong }) = usage.predicted {
            let sum = self.predicted.get_or_insert_default();
            (sum.right, sum.wrong) = (sum.right + right, sum.wrong + wrong);
        }
        self.cached = Some(self.cached.map_or(usage.cached_tokens, |least| least.min(usage.cached_tokens)));
    }

    /// Prompt tokens from the cache.
    pub fn cached(&self) -> usize {
        self.cached.unwrap_or(0)
    }
}
