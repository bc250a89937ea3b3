//! Grammars of answers that call tools, and of thinking before a constrained answer, in
//! llguidance's form of Lark.

use std::fmt::Write;

use serde_json::Value;

use super::answer::{Marker, Opening};
use super::conversation::Tool;
use super::format::{AnswerFormat, CallSyntax, JsonCalls, NameStyle, NamedCalls, ParameterCalls};
use crate::tokenizer::Tokenizer;

/// Which calls an answer may or must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallRule<'a> {
    /// More than one call is allowed.
    pub several: bool,
    /// Alternatives to calls in the answer.
    pub otherwise: Otherwise<'a>,
}

/// Alternatives to calls in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Otherwise<'a> {
    /// Calls are required.
    Nothing,
    /// Any text, also before calls.
    Text,
    /// This, as the right side of a rule.
    Body(&'a str),
}

impl AnswerFormat {
    /// The grammar of an answer with calls of these tools, whose arguments follow their schemas.
    /// `json_form` is added to each schema.
    pub fn call_grammar(
        &self,
        tokenizer: &Tokenizer,
        tools: &[&Tool],
        rule: CallRule<'_>,
        opening: Opening,
        json_form: &Value,
    ) -> String {
        let mut writer = Writer { tokenizer, json_form, rules: String::new(), count: 0 };
        let calls = match &self.calls {
            CallSyntax::Json(calls) => writer.json(calls, tools, rule),
            CallSyntax::Named(calls) => writer.named(calls, tools, rule),
            CallSyntax::Parameters(calls) => writer.parameters(calls, tools, rule),
            CallSyntax::Harmony(_) => writer.harmony(self, tools),
        };
        let before = writer.thinking(self, opening);
        let start = match rule.otherwise {
            Otherwise::Nothing => format!("start: {before} {}\n", calls.sections),
            Otherwise::Text => {
                // Text continues to the mark of a call, or to the end.
                let mut lead = calls.lead;
                if lead.is_empty() {
                    lead = calls.sections.clone();
                }
                format!("start: {before} ({lead} | TEXT)\n")
            }
            Otherwise::Body(body) => {
                let head = writer.body_head(self);
                format!("start: {before} ({} | {head} body)\nbody: {body}\n", calls.sections)
            }
        };
        format!("{start}{}TEXT: /(.|\\n)*/\n", writer.rules)
    }

    /// The grammar of an answer that is `body` (a rule's right side) after thinking. `None` if the
    /// model does not think, so that no grammar of thinking is needed.
    pub fn after_thinking(&self, tokenizer: &Tokenizer, opening: Opening, body: &str) -> Option<String> {
        if !self.thinks() {
            return None;
        }
        let mut writer = Writer { tokenizer, json_form: &Value::Null, rules: String::new(), count: 0 };
        let (before, head) = (writer.thinking(self, opening), writer.body_head(self));
        Some(format!("start: {before} {head} body\nbody: {body}\n{}TEXT: /(.|\\n)*/\n", writer.rules))
    }
}

/// The calls of an answer.
struct Calls {
    /// All calls, with their marks.
    sections: String,
    /// As `sections`, after free text.
    lead: String,
}

/// Writes rules.
struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    json_form: &'a Value,
    rules: String,
    count: usize,
}

fn write(out: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(what);
}

/// A text as Lark writes it.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression that matches this text.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match c {
            '\n' => out.push_str("\\n"),
            c if c.is_ascii_punctuation() => out.extend(['\\', c]),
            c => out.push(c),
        }
        out
    })
}

impl Writer<'_> {
    /// Adds a rule. Returns its name.
    fn rule(&mut self, attributes: &str, right: &str) -> String {
        self.count += 1;
        let name = format!("r{}", self.count);
        write(&mut self.rules, format_args!("{name}{attributes}: {right}\n"));
        name
    }

    /// A marker: special tokens by their numbers, the rest as text.
    fn mark(&self, marker: &Marker) -> String {
        let mut out = String::new();
        let mut rest = marker.text.as_str();
        for name in marker.special_names() {
            let Some((before, after)) = rest.split_once(name) else { continue };
            if !before.is_empty() {
                write(&mut out, format_args!("{} ", quoted(before)));
            }
            if let Some(id) = self.tokenizer.token_id(name) {
                write(&mut out, format_args!("<[{id}]> "));
            }
            rest = after;
        }
        if !rest.is_empty() {
            out.push_str(&quoted(rest));
        }
        out
    }

    /// Any text up to a marker, and the marker.
    fn text_until(&mut self, marker: &Marker) -> String {
        if marker.special_names().next().is_some() {
            return format!("TEXT {}", self.mark(marker));
        }
        let end = format!("[suffix={}]", quoted(&marker.text));
        self.rule(&end, "/(.|\\n)*/")
    }

    /// The part between an answer's thinking and its body.
    fn body_head(&self, format: &AnswerFormat) -> String {
        let CallSyntax::Harmony(marks) = &format.calls else { return String::new() };
        format!("{} \"final\" {}", self.mark(&marks.channel), self.mark(&marks.message))
    }

    fn thinking(&mut self, format: &AnswerFormat, opening: Opening) -> String {
        if let CallSyntax::Harmony(marks) = &format.calls {
            let [start, channel, message, end] =
                [&marks.start, &marks.channel, &marks.message, &marks.end].map(|mark| self.mark(mark));
            return format!("({channel} \"analysis\" {message} TEXT {end} {start} \"assistant\")?");
        }
        let Some(reasoning) = &format.reasoning else { return String::new() };
        let rest = self.text_until(&reasoning.close);
        let space = "/[ \\n]{0,2}/";
        match opening {
            Opening::Thinking => format!("{rest} {space}"),
            Opening::Fresh => format!("({} {rest} {space})?", self.mark(&reasoning.open)),
        }
    }

    /// JSON that follows a schema.
    fn schema(&mut self, schema: &Value) -> String {
        let mut schema = match schema {
            Value::Object(_) => schema.clone(),
            _ => serde_json::json!({"type": "object"}),
        };
        if let Some(fields) = schema.as_object_mut() {
            fields.insert("x-guidance".into(), self.json_form.clone());
        }
        self.rule("", &format!("%json {schema}"))
    }

    /// The schema of a tool's arguments, which are an object.
    fn arguments(&mut self, tool: &Tool) -> String {
        let mut schema = tool.parameters.clone();
        if let Some(fields) = schema.as_object_mut() {
            fields.insert("type".into(), "object".into());
        }
        self.schema(&schema)
    }

    /// `opening item closing`, once or several times, inside a section or including it.
    fn calls(&mut self, open: &Marker, close: Option<&Marker>, items: String, between: &str) -> Calls {
        let close = close.map(|close| self.mark(close)).unwrap_or_default();
        let section = format!("{items} {close}");
        let again = format!("({between} {} {section})*", self.mark(open));
        let lead = self.text_until(open);
        Calls {
            sections: format!("{} {section} {again}", self.mark(open)),
            lead: format!("{lead} {section} {again}"),
        }
    }

    fn json(&mut self, calls: &JsonCalls, tools: &[&Tool], rule: CallRule<'_>) -> Calls {
        let objects: Vec<String> = tools
            .iter()
            .map(|tool| {
                let arguments = self.arguments(tool);
                let head = format!("{{\"name\": {}, \"{}\": ", quoted(&tool.name), calls.arguments);
                format!("{} {arguments} \"}}\"", quoted(&head))
            })
            .collect();
        let object = self.rule("", &objects.join(" | "));
        if calls.list {
            let more = if rule.several { format!("(\", \" {object})*") } else { String::new() };
            let list = format!("\"[\" {object} {more} \"]\"");
            return Calls {
                sections: format!("{} {list}", self.mark(&calls.open)),
                lead: format!("{} {list}", self.text_until(&calls.open)),
            };
        }
        if calls.bare {
            let more = if rule.several { format!("(\"; \" {object})*") } else { String::new() };
            return Calls { sections: format!("{object} {more}"), lead: String::new() };
        }
        let items = format!("\"\\n\" {object} \"\\n\"");
        let all = self.calls(&calls.open, calls.close.as_ref(), items, "\"\\n\"");
        if rule.several { all } else { self.once(&calls.open, calls.close.as_ref(), &object, "\"\\n\"") }
    }

    /// One section with one item.
    fn once(&mut self, open: &Marker, close: Option<&Marker>, item: &str, space: &str) -> Calls {
        let close = close.map(|close| self.mark(close)).unwrap_or_default();
        let section = format!("{space} {item} {space} {close}");
        let lead = format!("{} {section}", self.text_until(open));
        Calls { sections: format!("{} {section}", self.mark(open)), lead }
    }

    fn named(&mut self, calls: &NamedCalls, tools: &[&Tool], rule: CallRule<'_>) -> Calls {
        let call_open = calls.call_open.as_ref().map(|open| self.mark(open)).unwrap_or_default();
        let call_close = calls.call_close.as_ref().map(|close| self.mark(close)).unwrap_or_default();
        let separator = self.mark(&calls.separator);
        let variants: Vec<String> = tools
            .iter()
            .map(|tool| {
                let arguments = self.arguments(tool);
                let name = match calls.name {
                    NameStyle::Plain | NameStyle::WithId => quoted(&tool.name),
                    NameStyle::Indexed => {
                        format!("{} /[0-9]{{1,2}}/", quoted(&format!("functions.{}:", tool.name)))
                    }
                };
                format!("{call_open} {name} {separator} {arguments} {call_close}")
            })
            .collect();
        let item = self.rule("", &variants.join(" | "));
        self.sections(&calls.open, calls.call_open.is_some(), calls.close.as_ref(), &item, "", rule)
    }

    /// Sections of items: several items in one section if it may have them.
    fn sections(
        &mut self,
        open: &Marker,
        holds_several: bool,
        close: Option<&Marker>,
        item: &str,
        space: &str,
        rule: CallRule<'_>,
    ) -> Calls {
        if rule.several && !holds_several {
            return self.calls(open, close, format!("{space} {item}"), "\"\\n\"?");
        }
        let more = if rule.several { format!("({item})*") } else { String::new() };
        self.once_with(open, close, &format!("{space} {item} {more}"))
    }

    fn once_with(&mut self, open: &Marker, close: Option<&Marker>, items: &str) -> Calls {
        self.once(open, close, items, "")
    }

    fn parameters(&mut self, calls: &ParameterCalls, tools: &[&Tool], rule: CallRule<'_>) -> Calls {
        let layout = calls.layout;
        let optional = |marker: &Option<Marker>, writer: &Self| {
            marker.as_ref().map(|marker| writer.mark(marker)).unwrap_or_default()
        };
        let text = |text: &str| if text.is_empty() { String::new() } else { quoted(text) };
        let (call_open, name_end) = (optional(&calls.call_open, self), optional(&calls.name_end, self));
        let call_close = self.mark(&calls.call_close);
        let variants: Vec<String> = tools
            .iter()
            .map(|tool| {
                let parameters = self.tool_parameters(calls, tool);
                format!(
                    "{call_open} {} {name_end} {} {parameters} {call_close} {}",
                    quoted(&tool.name),
                    text(layout.after_name),
                    text(layout.after_call)
                )
            })
            .collect();
        let item = self.rule("", &variants.join(" | "));
        let holds_several = calls.call_open.is_some() && calls.layout.before_value.is_empty();
        self.sections(&calls.open, holds_several, calls.close.as_ref(), &item, &text(layout.after_open), rule)
    }

    /// The parameters of a tool, in the order of its schema.
    fn tool_parameters(&mut self, calls: &ParameterCalls, tool: &Tool) -> String {
        let layout = calls.layout;
        let required: Vec<&str> =
            tool.parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let mut out = String::new();
        let properties = tool.parameters["properties"].as_object().into_iter().flatten();
        for (name, schema) in properties {
            let is_string = schema["type"] == "string" && schema.get("enum").is_none();
            let words = string_words(schema);
            let [flag, other] = layout.string_flag;
            let flag = if is_string || words.is_some() { flag } else { other };
            let mut key = format!("{} {}", self.mark(&calls.key_open), quoted(&format!("{name}{flag}")));
            write(&mut key, format_args!(" {}", self.mark(&calls.key_end)));
            for space in [layout.after_key] {
                if !space.is_empty() {
                    write(&mut key, format_args!(" {}", quoted(space)));
                }
            }
            if let Some(open) = &calls.value_open {
                write(&mut key, format_args!(" {}", self.mark(open)));
            }
            let before =
                if layout.before_value.is_empty() { String::new() } else { quoted(layout.before_value) };
            let close = self.mark(&calls.value_close);
            let after =
                if layout.after_value.is_empty() { String::new() } else { quoted(layout.after_value) };
            let value = if let Some(words) = words {
                format!("({words}) {after} {close}")
            } else if is_string {
                let end = format!("{}{}", layout.after_value, calls.value_close.text);
                self.rule(&format!("[suffix=/{}/]", escaped(&end)), "/(.|\\n)*/")
            } else {
                format!("{} {after} {close}", self.schema(schema))
            };
            let last = if layout.after_parameter.is_empty() {
                String::new()
            } else {
                quoted(layout.after_parameter)
            };
            let mark = if required.contains(&name.as_str()) { "" } else { "?" };
            write(&mut out, format_args!("({key} {before} {value} {last}){mark} "));
        }
        out
    }

    fn harmony(&mut self, format: &AnswerFormat, tools: &[&Tool]) -> Calls {
        let CallSyntax::Harmony(marks) = &format.calls else {
            return Calls { sections: String::new(), lead: String::new() };
        };
        let [channel, constrain, message, call, end] =
            [&marks.channel, &marks.constrain, &marks.message, &marks.call, &marks.end]
                .map(|mark| self.mark(mark));
        let variants: Vec<String> = tools
            .iter()
            .map(|tool| {
                let arguments = self.arguments(tool);
                let recipient = quoted(&format!("commentary to=functions.{} ", tool.name));
                format!("{channel} {recipient} {constrain} \"json\" {message} {arguments} {call}")
            })
            .collect();
        let item = self.rule("", &variants.join(" | "));
        let lead = format!("({item} | {channel} (\"final\" | \"commentary\") {message} TEXT {end}?)");
        Calls { sections: item, lead }
    }
}

/// The texts of a string's `enum`.
fn string_words(schema: &Value) -> Option<String> {
    let words: Option<Vec<String>> =
        schema["enum"].as_array()?.iter().map(|word| word.as_str().map(quoted)).collect();
    words.filter(|words| !words.is_empty()).map(|words| words.join(" | "))
}
