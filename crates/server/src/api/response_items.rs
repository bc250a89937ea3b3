//! The items of a response, whole and as they grow.

use serde_json::{Value, json};

use crate::generate::What;
use crate::generate::choices::Call;
use crate::generate::reply::Head;

/// The item that grows in a stream.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Items {
    open: Option<Open>,
    /// Items so far.
    count: usize,
}

#[derive(Debug, PartialEq)]
enum Open {
    Text(String),
    Reasoning(String),
    Call(Call),
}

fn item_id(head: &Head, kind: &str, index: usize) -> String {
    format!("{kind}_{}_{index}", head.id)
}

pub(crate) fn text_item(head: &Head, index: usize, text: &str) -> Value {
    json!({
        "id": item_id(head, "msg", index), "type": "message", "role": "assistant", "status": "completed",
        "content": [text_part(text)],
    })
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

pub(crate) fn reasoning_item(head: &Head, index: usize, text: &str) -> Value {
    json!({
        "id": item_id(head, "rs", index), "type": "reasoning", "summary": [], "status": "completed",
        "content": [{"type": "reasoning_text", "text": text}],
    })
}

pub(crate) fn call_item(head: &Head, index: usize, call: &Call) -> Value {
    let status = if call.object().is_some() { "completed" } else { "incomplete" };
    json!({
        "id": item_id(head, "fc", index), "type": "function_call", "status": status, "call_id": call.id,
        "name": call.name, "arguments": call.arguments,
    })
}

impl Items {
    /// The events of an update.
    pub fn update(&mut self, head: &Head, what: &What) -> Vec<(&'static str, Value)> {
        let mut events = Vec::new();
        match what {
            What::Text { text, .. } => {
                if !matches!(self.open, Some(Open::Text(_))) {
                    self.begin(head, Open::Text(String::new()), &mut events);
                }
                let place = self.place(head, "msg");
                if let Some(Open::Text(so_far)) = &mut self.open {
                    so_far.push_str(text);
                    events.push((
                        "response.output_text.delta",
                        with(place, json!({"delta": text, "logprobs": []})),
                    ));
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

    /// Where the open item's content is.
    fn place(&self, head: &Head, kind: &str) -> Value {
        json!({"item_id": item_id(head, kind, self.count), "output_index": self.count, "content_index": 0})
    }

    fn begin(&mut self, head: &Head, open: Open, events: &mut Vec<(&'static str, Value)>) {
        self.end(head, events);
        let mut item = match &open {
            Open::Text(_) => text_item(head, self.count, ""),
            Open::Reasoning(_) => reasoning_item(head, self.count, ""),
            Open::Call(call) => call_item(head, self.count, call),
        };
        item["status"] = "in_progress".into();
        if item.get("content").is_some() {
            item["content"] = json!([]);
        }
        let is_text = matches!(open, Open::Text(_));
        events.push(("response.output_item.added", json!({"output_index": self.count, "item": item})));
        if is_text {
            let place = self.place(head, "msg");
            events.push(("response.content_part.added", with(place, json!({"part": text_part("")}))));
        }
        self.open = Some(open);
    }

    fn end(&mut self, head: &Head, events: &mut Vec<(&'static str, Value)>) {
        let Some(open) = self.open.take() else { return };
        let item = match open {
            Open::Text(text) => {
                let place = self.place(head, "msg");
                let done = json!({"text": text, "logprobs": []});
                events.push(("response.output_text.done", with(place.clone(), done)));
                events.push(("response.content_part.done", with(place, json!({"part": text_part(&text)}))));
                text_item(head, self.count, &text)
            }
            Open::Reasoning(text) => {
                let place = self.place(head, "rs");
                events.push(("response.reasoning_text.done", with(place, json!({"text": text}))));
                reasoning_item(head, self.count, &text)
            }
            Open::Call(call) => {
                let place = json!({"item_id": item_id(head, "fc", self.count), "output_index": self.count});
                let done = json!({"name": call.name, "arguments": call.arguments});
                events.push(("response.function_call_arguments.done", with(place, done)));
                call_item(head, self.count, &call)
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
