//! gpt-oss's format: messages on channels, some of them to tools.

use super::buffer::{Buffer, Found};
use super::parser::{AnswerPart, Progress};
use crate::chat::format::HarmonyMarks;

/// Maximum length of a message's header. Longer text is plain text.
const MAX_HEADER_BYTES: usize = 512;

/// The state between the pieces of an answer.
#[derive(Debug, Default)]
pub(super) struct Harmony {
    body: Option<Body>,
    /// The body has text.
    began: bool,
    /// A mark was read: the answer has the format.
    is_marked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Reasoning,
    Text,
    Call,
}

impl Harmony {
    pub fn is_in_body(&self) -> bool {
        self.body.is_some()
    }

    pub fn is_in_call(&self) -> bool {
        self.body == Some(Body::Call)
    }

    pub fn step(
        &mut self,
        marks: &HarmonyMarks,
        buffer: &mut Buffer,
        parts: &mut Vec<AnswerPart>,
        last: bool,
    ) -> Progress {
        let Some(body) = self.body else { return self.header(marks, buffer, parts, last) };
        let ends = [&marks.end, &marks.call, &marks.finish, &marks.start, &marks.channel];
        let (end, mark) = match buffer.find(0, &ends, last) {
            Found::At { at, which } => (at, Some(which)),
            Found::NotBefore(at) => (at, None),
        };
        let place = buffer.place();
        let text = buffer.take(end);
        self.began |= !text.is_empty();
        push(body, text, place, parts);
        let Some(mark) = mark else { return Progress::NeedsMore };
        // A channel's mark begins the next header.
        if mark < 4 {
            buffer.take(ends[mark].text.len());
        }
        self.end(parts, false);
        Progress::Some
    }

    fn header(
        &mut self,
        marks: &HarmonyMarks,
        buffer: &mut Buffer,
        parts: &mut Vec<AnswerPart>,
        last: bool,
    ) -> Progress {
        let ends = [&marks.message, &marks.end, &marks.call, &marks.finish, &marks.start];
        let (at, which) = match buffer.find(0, &ends, last) {
            Found::At { at, which } => (at, which),
            Found::NotBefore(at) if at > MAX_HEADER_BYTES => {
                self.body = Some(Body::Text);
                return Progress::Some;
            }
            Found::NotBefore(_) => return Progress::NeedsMore,
        };
        self.is_marked = true;
        let header = buffer.take(at);
        buffer.take(ends[which].text.len());
        if which == 0 {
            let word = |rest: &str| rest.split([' ', '<', '\n']).next().unwrap_or_default().to_owned();
            let after = |mark: &str| header.split_once(mark).map(|(_, rest)| word(rest));
            let body = match (after("to="), after(&marks.channel.text)) {
                (Some(recipient), _) => {
                    let name = recipient.strip_prefix("functions.").unwrap_or(&recipient).to_owned();
                    parts.push(AnswerPart::CallBegin { name, id: None });
                    Body::Call
                }
                (None, Some(channel)) if channel == "analysis" => Body::Reasoning,
                _ => Body::Text,
            };
            self.body = Some(body);
        }
        Progress::Some
    }

    /// The body has ended; `is_cut`: the answer did, within it.
    fn end(&mut self, parts: &mut Vec<AnswerPart>, is_cut: bool) {
        if self.body.take() == Some(Body::Call) {
            if !self.began && !is_cut {
                parts.push(AnswerPart::Arguments("{}".to_owned()));
            }
            parts.push(AnswerPart::CallEnd);
        }
        self.began = false;
    }

    /// The answer has ended. A header without marks was plain text.
    pub fn finish(&mut self, buffer: &mut Buffer, parts: &mut Vec<AnswerPart>, is_cut: bool) {
        let (is_header, place) = (self.body.is_none(), buffer.place());
        let rest = buffer.take(buffer.text().len());
        if is_header && !self.is_marked && !rest.contains("<|") {
            push(Body::Text, rest, place, parts);
        }
        self.end(parts, is_cut);
    }
}

fn push(body: Body, text: String, at: usize, parts: &mut Vec<AnswerPart>) {
    if text.is_empty() {
        return;
    }
    parts.push(match body {
        Body::Reasoning => AnswerPart::Reasoning(text),
        Body::Text => AnswerPart::Text { text, at },
        Body::Call => AnswerPart::Arguments(text),
    });
}
