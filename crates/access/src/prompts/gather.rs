//! The texts of a request that a policy keeps, gathered until its end.

use serde::{Deserialize, Serialize};

use super::{Keeping, KeptPrompt, KeptText};
use crate::access::Access;
use crate::key::Key;
use crate::usage::{Outcome, UsageRecord};

/// Maximum bytes of an answer to gather. More is never kept.
const MOST_BYTES: usize = 2 << 20;
/// Role of a call: its name, then its arguments.
const CALL: &str = "call";

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPart {
    /// The answer, if there are several.
    pub choice: usize,
    /// As [`KeptText::role`].
    pub role: String,
    /// More text.
    pub text: String,
    /// The part begins a new text: a call's name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub begins: bool,
}

/// A request whose texts are kept.
#[derive(Debug)]
pub struct Gathering {
    keeping: Keeping,
    prompt: Option<Vec<KeptText>>,
    pub(super) answer: Vec<KeptText>,
    answer_bytes: usize,
    is_cut: bool,
}

impl Gathering {
    /// For a request that this policy covers.
    pub fn new(keeping: Keeping) -> Self {
        Self { keeping, prompt: None, answer: Vec::new(), answer_bytes: 0, is_cut: false }
    }

    /// Notes what was asked.
    pub fn note_prompt(&mut self, prompt: Vec<KeptText>) {
        self.prompt = Some(prompt);
    }

    /// Notes a part of an answer. Parts of one kind that follow each other are one text, so that
    /// nothing to redact is cut into pieces.
    pub fn note(&mut self, part: KeptPart) {
        let KeptPart { choice, role, text, begins } = part;
        if self.answer_bytes + text.len() > MOST_BYTES {
            self.is_cut = true;
            return;
        }
        self.answer_bytes += text.len();
        let last = self.answer.iter_mut().rfind(|one| one.choice == Some(choice));
        match last.filter(|last| !begins && last.role == role) {
            Some(last) => {
                if role == CALL && !last.text.contains(' ') {
                    last.text.push(' ');
                }
                last.text.push_str(&text);
            }
            None => self.answer.push(KeptText { role, choice: Some(choice), text }),
        }
    }

    /// Hands the texts over, with the request's data from its usage record. Requests that a limit
    /// refused have no answer and are not kept.
    pub fn keep(self, access: &Access, record: &UsageRecord, key: Option<&Key>) {
        let Some(prompt) = self.prompt else {
            if matches!(record.outcome, Outcome::Stop | Outcome::Length | Outcome::Calls) {
                access.lose_prompt("the server that answered is of a version that does not tell the texts");
            }
            return;
        };
        if record.outcome == Outcome::Refused {
            return;
        }
        let kept = KeptPrompt {
            id: record.id.clone(),
            time: record.time,
            key: key.map(|key| key.name.clone()),
            key_id: key.map(|key| key.id.clone()),
            owner: key.and_then(|key| key.owner.clone()),
            team: key.and_then(|key| key.team.clone()),
            model: record.model.clone(),
            api: record.api.clone(),
            outcome: record.outcome,
            node: None,
            prompt,
            answer: self.answer,
            is_cut: self.is_cut,
            redacted: 0,
        };
        access.keep(&self.keeping, kept);
    }
}
