//! The state machine that splits an answer.

use std::sync::Arc;

use super::buffer::{Buffer, Found, Marker, Match};
use super::calls::{self, Begun, CallReader, Head};
use super::harmony::Harmony;
use super::values::ToolSchemas;
use crate::chat::format::{AnswerFormat, CallSyntax, Reasoning};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPart {
    /// More text for the user.
    Text {
        /// The text.
        text: String,
        /// Where it begins in the whole answer, in bytes.
        at: usize,
    },
    /// More of the model's thinking.
    Reasoning(String),
    /// A tool call begins. The calls of an answer follow each other.
    CallBegin {
        /// The tool.
        name: String,
        /// The call's id, if the model writes one.
        id: Option<String>,
    },
    /// More of the call's arguments, which are JSON.
    Arguments(String),
    /// The call has ended.
    CallEnd,
}

/// How the answer begins, given the end of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Opening {
    /// With thinking or text.
    #[default]
    Fresh,
    /// In the midst of thinking, which the prompt has begun.
    Thinking,
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The model has ended it.
    Complete,
    /// With a text that the request wants it to end before.
    StopText,
    /// It has as many tokens as it may have.
    CutOff,
}

/// Splits one answer. Pass in the text as it arrives, then call [`AnswerParser::finish`].
#[derive(Debug)]
pub struct AnswerParser {
    format: Arc<AnswerFormat>,
    /// Calls are looked for only if the request has tools.
    has_tools: bool,
    /// The answer consists of calls, so anything that could begin one is not text.
    calls_only: bool,
    schemas: Arc<ToolSchemas>,
    buffer: Buffer,
    state: State,
    parts: Vec<AnswerPart>,
    /// The answer has text.
    has_text: bool,
    /// White space around a call, and its position. It counts as text if more text follows.
    gap: Option<(String, usize)>,
}

#[derive(Debug)]
enum State {
    /// White space, then maybe thinking.
    Start,
    /// Thinking; `began` once it has a letter.
    Reasoning {
        began: bool,
    },
    /// White space before text is dropped.
    BeforeText,
    Text,
    Call(Box<CallReader>),
    /// After a call: another one, or the end of the section.
    Between,
    Harmony(Box<Harmony>),
}

/// Whether a step of the machine did something.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Some,
    /// More text decides.
    NeedsMore,
}

impl AnswerParser {
    /// A parser for one answer. `schemas` are those of the request's tools; `None` if it has no
    /// tools.
    pub fn new(format: Arc<AnswerFormat>, schemas: Option<Arc<ToolSchemas>>, opening: Opening) -> Self {
        let has_tools = schemas.is_some();
        let state = match (&format.calls, opening) {
            (CallSyntax::Harmony(_), _) => State::Harmony(Box::default()),
            (_, Opening::Thinking) if format.reasoning.is_some() => State::Reasoning { began: false },
            _ => State::Start,
        };
        let schemas = schemas.unwrap_or_default();
        Self {
            format,
            has_tools,
            calls_only: false,
            schemas,
            buffer: Buffer::default(),
            state,
            parts: Vec::new(),
            has_text: false,
            gap: None,
        }
    }

    /// Says that a grammar makes the whole answer calls.
    pub fn calls_only(self) -> Self {
        Self { calls_only: true, ..self }
    }

    /// True if a parser may do more than pass the text on.
    pub fn is_needed(format: &AnswerFormat, has_tools: bool) -> bool {
        has_tools || format.thinks()
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str) {
        self.buffer.push(text);
        self.run(false);
    }

    /// Takes a special token, by its name.
    pub fn push_special(&mut self, name: &str) {
        self.buffer.push_special(name);
        self.run(false);
    }

    /// The answer has ended: what was held back is decided.
    pub fn finish(&mut self, ending: Ending) {
        if ending != Ending::Complete && self.is_unfinished_mark(ending) {
            self.buffer.take(self.buffer.text().len());
        }
        self.run(true);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Call(_) => self.parts.push(AnswerPart::CallEnd),
            State::Harmony(mut harmony) => {
                let is_cut = ending != Ending::Complete;
                harmony.finish(&mut self.buffer, &mut self.parts, is_cut);
            }
            _ => {}
        }
    }

    /// True within a call: an answer that ends here has it in part.
    pub fn is_in_call(&self) -> bool {
        match &self.state {
            State::Call(_) => true,
            State::Harmony(harmony) => harmony.is_in_call(),
            _ => false,
        }
    }

    /// True if the text held back at an abnormal end of an answer begins a mark or a call. After a
    /// stop text, a partial mark is text, because the answer may be complete.
    fn is_unfinished_mark(&self, ending: Ending) -> bool {
        let at = self.white_space();
        let rest = &self.buffer.text()[at..];
        let may_be = |marker: &Marker, wanted: Match| self.buffer.matches(at, marker) == wanted;
        let is_bare = matches!(&self.format.calls, CallSyntax::Json(calls) if calls.bare);
        match &self.state {
            State::Call(_) | State::Between => true,
            State::Harmony(harmony) => ending == Ending::CutOff && harmony.is_in_body(),
            State::Reasoning { .. } => ending == Ending::CutOff,
            _ if rest.is_empty() => false,
            _ if self.calls_only => true,
            State::Start if self.has_tools && is_bare && calls::may_begin_object(rest) => true,
            State::Start | State::BeforeText | State::Text => {
                let reasoning = self.format.reasoning.as_ref().map(|reasoning| &reasoning.open);
                let mut marks: Vec<&Marker> =
                    calls::opens(&self.format.calls).filter(|_| self.has_tools).collect();
                let is_call = marks.iter().any(|mark| may_be(mark, Match::Yes));
                marks.extend(reasoning);
                let is_part = || marks.iter().any(|mark| may_be(mark, Match::Maybe));
                is_call || ending == Ending::CutOff && is_part()
            }
        }
    }

    /// The parts since the last call.
    pub fn take(&mut self) -> Vec<AnswerPart> {
        std::mem::take(&mut self.parts)
    }

    fn run(&mut self, last: bool) {
        while !self.buffer.text().is_empty() && self.step(last) == Progress::Some {}
    }

    fn step(&mut self, last: bool) -> Progress {
        match &mut self.state {
            State::Start => self.start(last),
            State::Reasoning { .. } => self.reasoning(last),
            State::BeforeText => self.before_text(last),
            State::Text => self.text(last),
            State::Between => self.between(last),
            State::Call(call) => {
                let progress = call.step(&mut self.buffer, &self.schemas, &mut self.parts, last);
                if call.is_over() {
                    self.parts.push(AnswerPart::CallEnd);
                    self.state = State::Between;
                    return Progress::Some;
                }
                progress
            }
            State::Harmony(harmony) => {
                let CallSyntax::Harmony(marks) = &self.format.calls else { return Progress::NeedsMore };
                harmony.step(marks, &mut self.buffer, &mut self.parts, last)
            }
        }
    }

    fn white_space(&self) -> usize {
        let text = self.buffer.text();
        text.len() - text.trim_start().len()
    }

    fn before_text(&mut self, last: bool) -> Progress {
        let at = self.white_space();
        if at == self.buffer.text().len() && !last {
            return Progress::NeedsMore;
        }
        self.take_gap(at);
        self.state = State::Text;
        Progress::Some
    }

    /// Takes this many bytes of white space next to a call. Of the spaces before and after a call,
    /// the first is kept.
    fn take_gap(&mut self, bytes: usize) {
        let place = self.buffer.place();
        let gap = self.buffer.take(bytes);
        if self.has_text && self.gap.is_none() && !gap.is_empty() {
            self.gap = Some((gap, place));
        }
    }

    fn start(&mut self, last: bool) -> Progress {
        let at = self.white_space();
        if at == self.buffer.text().len() && !last {
            return Progress::NeedsMore;
        }
        if let Some(Reasoning { open, .. }) = &self.format.reasoning {
            match self.buffer.matches(at, open) {
                Match::Yes => {
                    self.buffer.take(at + open.text.len());
                    self.state = State::Reasoning { began: false };
                    return Progress::Some;
                }
                Match::Maybe if !last => return Progress::NeedsMore,
                _ => {}
            }
        }
        let is_bare = matches!(&self.format.calls, CallSyntax::Json(calls) if calls.bare);
        if self.has_tools && is_bare && self.buffer.text()[at..].starts_with('{') {
            return self.begin_call(0, at, last);
        }
        self.state = State::Text;
        Progress::Some
    }

    fn reasoning(&mut self, last: bool) -> Progress {
        let Some(Reasoning { close, .. }) = &self.format.reasoning else { return Progress::NeedsMore };
        let (end, next) = match self.buffer.find(0, &[close], last) {
            Found::At { at, .. } => (at, Some(close.text.len())),
            Found::NotBefore(at) => (at, None),
        };
        let State::Reasoning { began } = &mut self.state else { return Progress::NeedsMore };
        let text = &self.buffer.text()[..end];
        let lead = if *began { 0 } else { text.len() - text.trim_start().len() };
        // White space at the end is part of the thinking only if more of it follows.
        let certain = text.trim_end().len().max(lead);
        if certain > lead {
            *began = true;
            let part = text[lead..certain].to_owned();
            self.parts.push(AnswerPart::Reasoning(part));
        }
        match next {
            Some(mark) => {
                self.buffer.take(end + mark);
                self.state = State::BeforeText;
                Progress::Some
            }
            None if certain > 0 => {
                self.buffer.take(certain);
                Progress::Some
            }
            None => Progress::NeedsMore,
        }
    }

    fn text(&mut self, last: bool) -> Progress {
        if !self.has_tools {
            self.emit_text(self.buffer.text().len());
            return Progress::NeedsMore;
        }
        let opens: Vec<&Marker> = calls::opens(&self.format.calls).collect();
        match self.buffer.find(0, &opens, last) {
            Found::At { at, which } => {
                let head = at + opens[which].text.len();
                self.begin_call(at, head, last)
            }
            Found::NotBefore(at) => {
                // White space before a call is not text.
                let certain = if last { at } else { self.buffer.text()[..at].trim_end().len() };
                self.emit_text(certain);
                Progress::NeedsMore
            }
        }
    }

    /// Begins the call that has its mark at byte `at` and continues at byte `head`, if it is a
    /// call.
    fn begin_call(&mut self, at: usize, head: usize, last: bool) -> Progress {
        let before = self.buffer.text()[..at].trim_end().len();
        match calls::head(&self.format.calls, &self.buffer, head, last) {
            Head::NeedsMore => {
                self.emit_text(before);
                return Progress::NeedsMore;
            }
            Head::Other => {
                self.emit_text(head);
                self.state = State::Text;
            }
            Head::Call(begun) => {
                self.emit_text(before);
                self.take_gap(at - before);
                self.buffer.take(begun.end - at);
                self.enter_call(begun);
            }
        }
        Progress::Some
    }

    fn enter_call(&mut self, begun: Begun) {
        let Begun { name, id, known, reader, .. } = begun;
        self.parts.push(AnswerPart::CallBegin { name, id });
        self.state = match known {
            Some(arguments) => {
                self.parts.extend([AnswerPart::Arguments(arguments), AnswerPart::CallEnd]);
                State::Between
            }
            None => State::Call(Box::new(reader)),
        };
    }

    fn between(&mut self, last: bool) -> Progress {
        let separators = calls::separators(&self.format.calls);
        let text = self.buffer.text();
        let rest = text.trim_start_matches(|c: char| c.is_whitespace() || separators.contains(&c));
        let at = text.len() - rest.len();
        if rest.is_empty() {
            if last {
                self.buffer.take(at);
            }
            return Progress::NeedsMore;
        }
        if let Some(close) = calls::close(&self.format.calls) {
            match self.buffer.matches(at, close) {
                Match::Yes => {
                    self.buffer.take(at + close.text.len());
                    self.state = State::BeforeText;
                    return Progress::Some;
                }
                Match::Maybe if !last => return Progress::NeedsMore,
                _ => {}
            }
        }
        if calls::has_sections(&self.format.calls) {
            match calls::head(&self.format.calls, &self.buffer, at, last) {
                Head::NeedsMore => return Progress::NeedsMore,
                Head::Call(begun) => {
                    self.buffer.take(begun.end);
                    self.enter_call(begun);
                    return Progress::Some;
                }
                Head::Other => {}
            }
        }
        self.state = State::BeforeText;
        Progress::Some
    }

    /// Passes on the first `bytes` as text.
    fn emit_text(&mut self, bytes: usize) {
        if bytes > 0 {
            if let Some((text, at)) = self.gap.take() {
                self.parts.push(AnswerPart::Text { text, at });
            }
            self.has_text = true;
            let at = self.buffer.place();
            let text = self.buffer.take(bytes);
            self.parts.push(AnswerPart::Text { text, at });
        }
    }
}
