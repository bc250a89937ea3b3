//! The texts of a request and of its answer, where a policy keeps them.

use thunder_access::{KeptPart, KeptText};
use thunder_engine::ModelInfo;
use thunder_model::chat::{Message, Role, ToolCall};

use crate::generate::{Input, Prompt, What};

/// A part of an answer, if it has a text.
pub(crate) fn part(choice: usize, what: &What) -> Option<KeptPart> {
    let (role, text, begins) = match what {
        What::Text { text, .. } => ("assistant", text, false),
        What::Reasoning(text) => ("thinking", text, false),
        What::CallBegin { name, .. } => ("call", name, true),
        What::Arguments(text) => ("call", text, false),
        What::CallEnd | What::End { .. } | What::Failed(_) => return None,
    };
    Some(KeptPart { choice, role: role.to_owned(), text: text.clone(), begins })
}

/// The texts of a request's input. Tokens are kept as text, so that redaction works on them.
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
