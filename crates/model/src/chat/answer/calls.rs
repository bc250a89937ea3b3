//! Reads the calls of all syntaxes but gpt-oss's.

use serde_json::Value;

use super::buffer::{Buffer, Found, Marker, Match};
use super::json::{CallHead, JsonScanner, Scanned, call_head};
use super::parameters::Parameters;
use super::parser::{AnswerPart, Progress};
use super::values::ToolSchemas;
use crate::chat::format::{CallSyntax, NameStyle, NamedCalls, ParameterCalls};

/// Maximum length of a tool's name. Longer text is not a call.
const MAX_NAME_BYTES: usize = 256;

/// The beginning of a call.
pub(super) enum Head {
    NeedsMore,
    /// Not a call.
    Other,
    Call(Begun),
}

/// The beginning of a call; its arguments follow at byte `end`.
pub(super) struct Begun {
    pub name: String,
    pub id: Option<String>,
    pub end: usize,
    /// The arguments, if they were read with the beginning: the call is over.
    pub known: Option<String>,
    pub reader: CallReader,
}

impl Begun {
    fn new(name: String, id: Option<String>, end: usize, kind: Kind) -> Self {
        let reader = CallReader { tool: name.clone(), kind, is_over: false };
        Self { name, id, end, known: None, reader }
    }
}

/// The marks that begin calls.
pub(super) fn opens(syntax: &CallSyntax) -> impl Iterator<Item = &Marker> {
    match syntax {
        CallSyntax::Json(calls) => Some(&calls.open),
        CallSyntax::Named(calls) => Some(&calls.open),
        CallSyntax::Parameters(calls) => Some(&calls.open),
        CallSyntax::Harmony(_) => None,
    }
    .into_iter()
}

/// The mark that ends a section of calls.
pub(super) fn close(syntax: &CallSyntax) -> Option<&Marker> {
    match syntax {
        CallSyntax::Json(calls) => calls.close.as_ref(),
        CallSyntax::Named(calls) => calls.close.as_ref(),
        CallSyntax::Parameters(calls) => calls.close.as_ref(),
        CallSyntax::Harmony(_) => None,
    }
}

/// Text that may separate two calls of a section, in addition to white space.
pub(super) fn separators(syntax: &CallSyntax) -> &'static [char] {
    match syntax {
        CallSyntax::Json(calls) if calls.list => &[',', ']'],
        CallSyntax::Json(calls) if calls.bare => &[';', ','],
        CallSyntax::Json(_) => &[','],
        _ => &[],
    }
}

/// True if several calls may follow one mark.
pub(super) fn has_sections(syntax: &CallSyntax) -> bool {
    match syntax {
        CallSyntax::Json(_) => true,
        CallSyntax::Named(calls) => calls.call_open.is_some(),
        CallSyntax::Parameters(calls) => calls.call_open.is_some(),
        CallSyntax::Harmony(_) => false,
    }
}

/// Reads the beginning of a call from byte `at`, after the section's mark.
pub(super) fn head(syntax: &CallSyntax, buffer: &Buffer, at: usize, last: bool) -> Head {
    let rest = &buffer.text()[at..];
    let at = at + rest.len() - rest.trim_start().len();
    let head = match syntax {
        _ if at == buffer.text().len() => Head::NeedsMore,
        CallSyntax::Json(calls) => json_head(calls.list, buffer.text(), at),
        CallSyntax::Named(calls) => named_head(calls, buffer, at, last),
        CallSyntax::Parameters(calls) => parameters_head(calls, buffer, at, last),
        CallSyntax::Harmony(_) => Head::Other,
    };
    if last && matches!(head, Head::NeedsMore) { Head::Other } else { head }
}

/// True if this may continue as a call's object: with its fields in the usual order, or as Llama
/// 3.1 writes it. Any other object is more likely an answer in JSON.
pub(super) fn may_begin_object(text: &str) -> bool {
    const TYPED: &str = "{\"type\":\"function\"";
    let bare: String = text.chars().filter(|c| !c.is_whitespace()).take(TYPED.len()).collect();
    call_head(text) == CallHead::NeedsMore || TYPED.starts_with(&bare)
}

fn json_head(is_list: bool, text: &str, mut at: usize) -> Head {
    if is_list && text[at..].starts_with('[') {
        at += 1;
        at += text[at..].len() - text[at..].trim_start().len();
    }
    let object = &text[at..];
    match object.chars().next() {
        None => return Head::NeedsMore,
        Some('{') => {}
        Some(_) => return Head::Other,
    }
    match call_head(object) {
        CallHead::NeedsMore => Head::NeedsMore,
        CallHead::Call { name, .. } if !is_name(&name) => Head::Other,
        CallHead::Call { name, arguments } => {
            let kind = Kind::Json { scanner: JsonScanner::default(), stage: Stage::Value, is_field: true };
            Head::Call(Begun::new(name, None, at + arguments, kind))
        }
        CallHead::Other => whole_object(object, at),
    }
}

/// A call with its fields in another order: it is read as a whole.
fn whole_object(object: &str, at: usize) -> Head {
    let Scanned::EndsAt(end) = JsonScanner::default().scan(object) else { return Head::NeedsMore };
    let Ok(value) = serde_json::from_str::<Value>(&object[..end]) else { return Head::Other };
    let arguments = [&value["arguments"], &value["parameters"]].into_iter().find(|value| !value.is_null());
    let arguments = match arguments {
        Some(Value::Object(fields)) => Value::Object(fields.clone()).to_string(),
        // Some models write the object as a string.
        Some(Value::String(text)) if text.trim_start().starts_with('{') => text.clone(),
        None => "{}".to_owned(),
        Some(_) => return Head::Other,
    };
    let Some(name) = value["name"].as_str().filter(|name| is_name(name)) else { return Head::Other };
    let id = value["id"].as_str().map(str::to_owned);
    let kind = Kind::Json { scanner: JsonScanner::default(), stage: Stage::AfterValue, is_field: true };
    let begun = Begun::new(name.to_owned(), id, at + end, kind);
    Head::Call(Begun { known: Some(arguments), ..begun })
}

fn named_head(calls: &NamedCalls, buffer: &Buffer, at: usize, last: bool) -> Head {
    let Ok(from) = after_open(calls.call_open.as_ref(), buffer, at) else { return Head::NeedsMore };
    let Some(from) = from else { return Head::Other };
    match buffer.find(from, &[&calls.separator], last) {
        Found::At { at: end, .. } => {
            let (name, id) = split_name(buffer.text()[from..end].trim(), calls.name);
            if !is_name(&name) {
                return Head::Other;
            }
            let kind = match &calls.call_close {
                Some(close) => Kind::Until { close: close.clone(), began: false },
                None => Kind::Json { scanner: JsonScanner::default(), stage: Stage::Value, is_field: false },
            };
            Head::Call(Begun::new(name, id, end + calls.separator.text.len(), kind))
        }
        Found::NotBefore(end) => undecided(&buffer.text()[from..end]),
    }
}

fn parameters_head(calls: &ParameterCalls, buffer: &Buffer, at: usize, last: bool) -> Head {
    let Ok(from) = after_open(calls.call_open.as_ref(), buffer, at) else { return Head::NeedsMore };
    let Some(from) = from else { return Head::Other };
    let ends: Vec<&Marker> = match &calls.name_end {
        Some(end) => vec![end],
        None => vec![&calls.key_open, &calls.call_close],
    };
    let (mut end, mut next) = match buffer.find(from, &ends, last) {
        Found::At { at, .. } if calls.name_end.is_none() => (at, Some(at)),
        Found::At { at, which } => (at, Some(at + ends[which].text.len())),
        Found::NotBefore(at) => (at, None),
    };
    if calls.name_end.is_none()
        && let Some(line) = buffer.text()[from..end].find('\n')
    {
        (end, next) = (from + line, Some(from + line));
    }
    let Some(next) = next else { return undecided(&buffer.text()[from..end]) };
    let name = buffer.text()[from..end].trim().to_owned();
    if !is_name(&name) {
        return Head::Other;
    }
    let kind = Kind::Parameters(Box::new(Parameters::new(calls)));
    Head::Call(Begun::new(name, None, next, kind))
}

/// The byte after a call's mark at `at`; `Ok(None)` if there is no mark, `Err` if more text is
/// needed to decide.
fn after_open(open: Option<&Marker>, buffer: &Buffer, at: usize) -> Result<Option<usize>, ()> {
    let Some(open) = open else { return Ok(Some(at)) };
    match buffer.matches(at, open) {
        Match::Yes => Ok(Some(at + open.text.len())),
        Match::Maybe => Err(()),
        Match::No => Ok(None),
    }
}

/// A name has no white space, and no letter that begins a mark or JSON.
fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name.contains(|c: char| c.is_whitespace() || c.is_control() || "<>{}\"".contains(c))
}

/// A name that may go on.
fn undecided(so_far: &str) -> Head {
    let so_far = so_far.trim_start();
    if so_far.is_empty() || is_name(so_far.trim_end()) { Head::NeedsMore } else { Head::Other }
}

fn split_name(name: &str, style: NameStyle) -> (String, Option<String>) {
    match style {
        NameStyle::Plain => (name.to_owned(), None),
        NameStyle::WithId => match name.split_once("[CALL_ID]") {
            Some((name, id)) => (name.trim().to_owned(), Some(id.trim().to_owned())),
            None => (name.to_owned(), None),
        },
        NameStyle::Indexed => {
            let bare = name.strip_prefix("functions.").unwrap_or(name);
            let bare = bare.rsplit_once(':').map_or(bare, |(bare, _)| bare);
            (bare.to_owned(), Some(name.to_owned()))
        }
    }
}

/// Reads the arguments of one call.
#[derive(Debug)]
pub(super) struct CallReader {
    tool: String,
    kind: Kind,
    is_over: bool,
}

#[derive(Debug)]
enum Kind {
    /// A JSON value; `is_field` if it is a field of an object that must end after it.
    Json {
        scanner: JsonScanner,
        stage: Stage,
        is_field: bool,
    },
    /// Text until a mark.
    Until {
        close: Marker,
        began: bool,
    },
    Parameters(Box<Parameters>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Value,
    /// After the value, before the end of the object around it.
    AfterValue,
    /// In other fields of the object.
    OtherFields,
}

impl CallReader {
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    pub fn step(
        &mut self,
        buffer: &mut Buffer,
        schemas: &ToolSchemas,
        parts: &mut Vec<AnswerPart>,
        last: bool,
    ) -> Progress {
        match &mut self.kind {
            Kind::Json { scanner, stage: stage @ Stage::Value, is_field } => {
                let end = match scanner.scan(buffer.text()) {
                    Scanned::GoesOn => None,
                    Scanned::EndsAt(end) => Some(end),
                };
                push_arguments(parts, buffer.take(end.unwrap_or(buffer.text().len())));
                if end.is_some() {
                    *stage = Stage::AfterValue;
                    self.is_over = !*is_field;
                }
                Progress::Some
            }
            Kind::Json { scanner, stage, .. } => {
                self.is_over = end_object(scanner, stage, buffer);
                if self.is_over { Progress::Some } else { Progress::NeedsMore }
            }
            Kind::Until { close, began } => {
                let (end, is_over) = match buffer.find(0, &[close], last) {
                    Found::At { at, .. } => (at, true),
                    Found::NotBefore(at) => (at, false),
                };
                let text = &buffer.text()[..end];
                let certain = text.trim_end().len();
                let lead = if *began { 0 } else { certain.min(text.len() - text.trim_start().len()) };
                *began |= certain > lead;
                push_arguments(parts, text[lead..certain].to_owned());
                if is_over {
                    if !*began {
                        push_arguments(parts, "{}".to_owned());
                    }
                    buffer.take(end + close.text.len());
                    self.is_over = true;
                    return Progress::Some;
                }
                buffer.take(if *began { certain } else { 0 });
                Progress::NeedsMore
            }
            Kind::Parameters(parameters) => {
                let (progress, is_over) = parameters.step(&self.tool, buffer, schemas, parts, last);
                self.is_over = is_over;
                progress
            }
        }
    }
}

pub(super) fn push_arguments(parts: &mut Vec<AnswerPart>, text: String) {
    if !text.is_empty() {
        parts.push(AnswerPart::Arguments(text));
    }
}

/// Skips the rest of the object after the arguments. True when the object has ended.
fn end_object(scanner: &mut JsonScanner, stage: &mut Stage, buffer: &mut Buffer) -> bool {
    if *stage == Stage::AfterValue {
        let white_space = buffer.text().len() - buffer.text().trim_start().len();
        buffer.take(white_space);
        match buffer.text().chars().next() {
            None => return false,
            Some('}') => {
                buffer.take(1);
                return true;
            }
            Some(',') => (*stage, *scanner) = (Stage::OtherFields, JsonScanner::inside()),
            // The object is malformed, but its call is known.
            Some(_) => return true,
        }
    }
    match scanner.scan(buffer.text()) {
        Scanned::GoesOn => {
            buffer.take(buffer.text().len());
            false
        }
        Scanned::EndsAt(end) => {
            buffer.take(end);
            true
        }
    }
}
