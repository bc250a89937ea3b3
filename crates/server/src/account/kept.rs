//! The texts of a request that a policy keeps, gathered until its end.

use thunder_access::{Access, Keeping, KeptPrompt, KeptText, UsageRecord};
use thunder_engine::ModelInfo;
use thunder_model::chat::{Message, Role, ToolCall};

use crate::generate::{Input, Prompt, What};

/// Bytes of an answer that are gathered. More is not kept anyway.
const MOST_BYTES: usize = 2 << 20;

/// A request whose texts are kept.
#[derive(Debug)]
pub(crate) struct Kept {
    keeping: Keeping,
    prompt: Vec<KeptText>,
    answer: Vec<KeptText>,
    answer_bytes: usize,
    is_cut: bool,
}

impl Kept {
    pub fn new(keeping: Keeping, prompt: Vec<KeptText>) -> Self {
        Self { keeping, prompt, answer: Vec::new(), answer_bytes: 0, is_cut: false }
    }

    /// Notes a part of an answer. Parts of one kind that follow each other are one text, so that
    /// nothing to redact is cut into pieces.
    pub fn note(&mut self, choice: usize, what: &What) {
        let (role, text, begins) = match what {
            What::Text { text, .. } => ("assistant", text, false),
            What::Reasoning(text) => ("thinking", text, false),
            What::CallBegin { name, .. } => ("call", name, true),
            What::Arguments(text) => ("call", text, false),
            What::CallEnd | What::End { .. } | What::Failed(_) => return,
        };
        if self.answer_bytes + text.len() > MOST_BYTES {
            self.is_cut = true;
            return;
        }
        self.answer_bytes += text.len();
        let last = self.answer.iter_mut().rfind(|one| one.choice == Some(choice));
        match last.filter(|last| !begins && last.role == role) {
            // A call's name stands before its arguments.
            Some(last) if matches!(what, What::Arguments(_)) && !last.text.contains(' ') => {
                last.text.push(' ');
                last.text.push_str(text);
            }
            Some(last) => last.text.push_str(text),
            None => {
                self.answer.push(KeptText {
                    role: role.to_owned(),
                    choice: Some(choice),
                    text: text.clone(),
                });
            }
        }
    }

    /// Hands the texts over, with what the usage record says of the request.
    pub fn keep(self, access: &Access, record: &UsageRecord, key: Option<&thunder_access::Key>) {
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
            prompt: self.prompt,
            answer: self.answer,
            is_cut: self.is_cut,
            redacted: 0,
        };
        access.keep(&self.keeping, kept);
    }
}

/// The texts of a request's input. Tokens are kept as their text, in which a redaction finds what
/// it looks for.
pub(crate) fn texts(input: &Input, info: &ModelInfo) -> Vec<KeptText> {
    let text = |role: &str, choice, text| KeptText { role: role.to_owned(), choice, text };
    match input {
        Input::Chat(messages) => messages.iter().flat_map(texts_of).collect(),
        Input::Prompts(prompts) => {
            let prompts = prompts.iter().map(|prompt| match prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Ids(ids) => info.tokenizer.decode(ids, false),
            });
            prompts.enumerate().map(|(place, prompt)| text("prompt", Some(place), prompt)).collect()
        }
    }
}

fn texts_of(message: &Message) -> Vec<KeptText> {
    let text =
        |role: &str, text: &str| KeptText { role: role.to_owned(), choice: None, text: text.to_owned() };
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let mut texts: Vec<KeptText> =
        message.reasoning.iter().map(|thought| text("thinking", thought)).collect();
    if !message.content.is_empty() {
        texts.push(text(role, &message.content));
    }
    let call = |call: &ToolCall| {
        let arguments = serde_json::to_string(&call.arguments).unwrap_or_default();
        text("call", &format!("{} {arguments}", call.name))
    };
    texts.extend(message.calls.iter().map(call));
    texts
}
