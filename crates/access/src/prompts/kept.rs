//! The texts of one request.

use serde::{Deserialize, Serialize};

use super::redact::Redactor;
use crate::time::Time;
use crate::usage::{Dimensions, Filter, Outcome};

/// Maximum bytes of a request's texts to keep; the rest is cut off.
pub(super) const MOST_BYTES: usize = 1 << 20;

/// A text of a request or of its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptText {
    /// Who says it: `system`, `user`, `assistant`, `tool`; `thinking` and `call` of the model;
    /// `prompt` without a conversation.
    pub role: String,
    /// The number of its answer, if there are several; for a prompt, its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<usize>,
    /// The text.
    pub text: String,
}

/// The prompt and the answer of one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPrompt {
    /// The response's id, as in its usage record.
    pub id: String,
    /// When it ended.
    pub time: Time,
    /// Name of its key.
    pub key: Option<String>,
    /// Id of its key.
    pub key_id: Option<String>,
    /// The key's owner.
    pub owner: Option<String>,
    /// The key's team.
    pub team: Option<String>,
    /// The model, by its full name.
    pub model: String,
    /// Path that it came by.
    pub api: String,
    /// How it ended.
    pub outcome: Outcome,
    /// The node that keeps it. It is not written, because the reader knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// What was asked.
    pub prompt: Vec<KeptText>,
    /// What was answered.
    pub answer: Vec<KeptText>,
    /// Texts were too long and are cut.
    #[serde(default)]
    pub is_cut: bool,
    /// Number of matches that were replaced before writing.
    #[serde(default)]
    pub redacted: u64,
}

impl KeptPrompt {
    pub(super) fn bytes(&self) -> usize {
        self.prompt.iter().chain(&self.answer).map(|text| text.text.len()).sum()
    }

    pub(super) fn fits(&self, filter: &Filter) -> bool {
        filter.holds(self.time)
            && filter.fits(&Dimensions {
                key: self.key.clone(),
                key_id: self.key_id.clone(),
                owner: self.owner.clone(),
                team: self.team.clone(),
                model: self.model.clone(),
                node: None,
                outcome: self.outcome,
            })
    }

    /// Redacts the texts, then cuts those that are too long.
    pub(super) fn cleaned(mut self, redactor: &Redactor) -> Self {
        let mut left = MOST_BYTES;
        for text in self.prompt.iter_mut().chain(&mut self.answer) {
            let (clean, count) = redactor.clean(&text.text);
            text.text = clean;
            self.redacted += count;
            let end = text.text.floor_char_boundary(left);
            self.is_cut |= end < text.text.len();
            text.text.truncate(end);
            left -= end;
        }
        self
    }
}
