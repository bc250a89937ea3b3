//! The items of a response, whole and as they grow.

use serde_json::{Value, json};
use thunder_engine::TokenLogprob;

use super::response_tools::custom_input;
use crate::generate::What;
use crate::generate::choices::Call;
use crate::generate::reply::Head;
use crate::response::logprobs::ChatLogprobs;

/// The request's options for its items.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Form {
    /// Names of the tools whose calls have a text instead of arguments.
    pub custom: Vec<String>,
    /// Texts come with the log-probabilities of their tokens.
    pub logprobs: bool,
}

/// A text that has not begun.
const NO_TEXT: (&str, &[TokenLogprob]) = ("", &[]);

/// The item that grows in a stream.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Items {
    pub form: Form,
    open: Option<Open>,
    /// Items so far.
    count: usize,
}

#[derive(Debug, PartialEq)]
enum Open {
    Text(String, Vec<TokenLogprob>),
    Reasoning(String),
    Call(Call),
}

fn item_id(head: &Head, kind: &str, index: usize) -> String {
    format!("{kind}_{}_{index}", head.id)
}

impl Form {
    pub fn text_item(&self, head: &Head, index: usize, text: (&str, &[TokenLogprob])) -> Value {
        json!({
            "id": item_id(head, "msg", index), "type": "message", "role": "assistant", "status": "completed",
            "content": [self.text_part(head, text)],
        })
    }

    fn text_part(&self, head: &Head, (text, logprobs): (&str, &[TokenLogprob])) -> Value {
        let logprobs = self.logprobs(head, logprobs);
        json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
    }

    /// The text's log-probabilities; empty if the request does not want them.
    fn logprobs(&self, head: &Head, tokens: &[TokenLogprob]) -> Value {
        let tokens = if self.logprobs { tokens } else { &[] };
        json!(ChatLogprobs::new(tokens, &head.app.engine.info().tokenizer).content)
    }

    fn is_custom(&self, call: &Call) -> bool {
        self.custom.contains(&call.name)
    }

    pub fn call_item(&self, head: &Head, index: usize, call: &Call) -> Value {
        let id = self.call_id(head, index, call);
        let (id, call_id, name) = (&id, &call.id, &call.name);
        let status = |is_whole| if is_whole { "completed" } else { "incomplete" };
        if self.is_custom(call) {
            let input = custom_input(call);
            let status = status(input.is_some());
            let input = input.unwrap_or_default();
            return json!({
                "id": id, "type": "custom_tool_call", "status": status, "call_id": call_id, "name": name,
                "input": input,
            });
        }
        let status = status(call.object().is_some());
        json!({
            "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
            "arguments": call.arguments,
        })
    }

    fn call_id(&self, head: &Head, index: usize, call: &Call) -> String {
        item_id(head, if self.is_custom(call) { "ctc" } else { "fc" }, index)
    }
}

pub(crate) fn reasoning_item(head: &Head, index: usize, text: &str) -> Value {
    json!({
        "id": item_id(head, "rs", index), "type": "reasoning", "summary": [], "status": "completed",
        "content": [{"type": "reasoning_text", "text": text}],
    })
}

impl Items {
    /// No items yet.
    pub fn new(form: Form) -> Self {
        Self { form, ..Self::default() }
    }

    /// The events of an update.
    pub fn update(&mut self, head: &Head, what: &What) -> Vec<(&'static str, Value)> {
        let mut events = Vec::new();
        match what {
            What::Text { text, logprobs } => {
                if !matches!(self.open, Some(Open::Text(..))) {
                    self.begin(head, Open::Text(String::new(), Vec::new()), &mut events);
                }
                let place = self.place(head, "msg");
                if let Some(Open::Text(so_far, tokens)) = &mut self.open {
                    so_far.push_str(text);
                    tokens.extend(logprobs.iter().cloned());
                    let logprobs = self.form.logprobs(head, logprobs);
                    let delta = json!({"delta": text, "logprobs": logprobs});
                    events.push(("response.output_text.delta", with(place, delta)));
                }
            }
            What::Reasoning(text) => {
                if !matches!(self.open, Some(Open::Reasoning(_))) {
                    self.begin(head, Open::Reasoning(String::new()), &mut events);
                }
                let place = self.place(head, "rs");
                if let Some(Open::Reasoning(so_far)) = &mut self.open {
                    so_far.push_str(text);
                    events.push(("response.reasoning_text.delta", with(place, json!({"delta": text}))));
                }
            }
            What::CallBegin { id, name } => {
                let call = Call { id: id.clone(), name: name.clone(), arguments: String::new() };
                self.begin(head, Open::Call(call), &mut events);
            }
            What::Arguments(text) => {
                if let Some(Open::Call(call)) = &mut self.open {
                    call.arguments.push_str(text);
                    // The text of a custom tool is inside its arguments.
                    if self.form.is_custom(call) {
                        return events;
                    }
                    let place =
                        json!({"item_id": item_id(head, "fc", self.count), "output_index": self.count});
                    events.push((
                        "response.function_call_arguments.delta",
                        with(place, json!({"delta": text})),
                    ));
                }
            }
            What::CallEnd | What::End { .. } => self.end(head, &mut events),
            What::Failed(_) => {}
        }
        events
    }

    /// The place of the open item's content.
    fn place(&self, head: &Head, kind: &str) -> Value {
        json!({"item_id": item_id(head, kind, self.count), "output_index": self.count, "content_index": 0})
    }

    fn begin(&mut self, head: &Head, open: Open, events: &mut Vec<(&'static str, Value)>) {
        self.end(head, events);
        let mut item = match &open {
            Open::Text(..) => self.form.text_item(head, self.count, NO_TEXT),
            Open::Reasoning(_) => reasoning_item(head, self.count, ""),
            Open::Call(call) => self.form.call_item(head, self.count, call),
        };
        item["status"] = "in_progress".into();
        if item.get("content").is_some() {
            item["content"] = json!([]);
        }
        let is_text = matches!(open, Open::Text(..));
        events.push(("response.output_item.added", json!({"output_index": self.count, "item": item})));
        if is_text {
            let place = self.place(head, "msg");
            let part = self.form.text_part(head, NO_TEXT);
            events.push(("response.content_part.added", with(place, json!({"part": part}))));
        }
        self.open = Some(open);
    }

    fn end(&mut self, head: &Head, events: &mut Vec<(&'static str, Value)>) {
        let Some(open) = self.open.take() else { return };
        let item = match open {
            Open::Text(text, tokens) => {
                let (place, text) = (self.place(head, "msg"), (text.as_str(), tokens.as_slice()));
                let done = json!({"text": text.0, "logprobs": self.form.logprobs(head, text.1)});
                events.push(("response.output_text.done", with(place.clone(), done)));
                let part = self.form.text_part(head, text);
                events.push(("response.content_part.done", with(place, json!({"part": part}))));
                self.form.text_item(head, self.count, text)
            }
            Open::Reasoning(text) => {
                let place = self.place(head, "rs");
                events.push(("response.reasoning_text.done", with(place, json!({"text": text}))));
                reasoning_item(head, self.count, &text)
            }
            Open::Call(call) => {
                let id = self.form.call_id(head, self.count, &call);
                let place = json!({"item_id": id, "output_index": self.count});
                if self.form.is_custom(&call) {
                    let input = custom_input(&call).unwrap_or_default();
                    let delta = with(place.clone(), json!({"delta": input}));
                    events.push(("response.custom_tool_call_input.delta", delta));
                    let done = with(place, json!({"input": input}));
                    events.push(("response.custom_tool_call_input.done", done));
                } else {
                    let done = json!({"name": call.name, "arguments": call.arguments});
                    events.push(("response.function_call_arguments.done", with(place, done)));
                }
                self.form.call_item(head, self.count, &call)
            }
        };
        events.push(("response.output_item.done", json!({"output_index": self.count, "item": item})));
        self.count += 1;
    }
}

/// An object with the fields of both.
fn with(mut object: Value, more: Value) -> Value {
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}
