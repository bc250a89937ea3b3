//! How a model family writes its thinking and its tool calls, found from the chat template and the
//! special tokens.

use crate::tokenizer::Tokenizer;

use super::answer::{Marker, Opening};
use super::conversation::CallForm;
use super::{ChatTemplate, conversation};

/// How a model's answers are to be read.
#[derive(Debug, Clone, PartialEq)]
pub struct AnswerFormat {
    /// The marks around thinking; `None` for a model that does not think.
    pub(crate) reasoning: Option<Reasoning>,
    /// How tool calls are written.
    pub(crate) calls: CallSyntax,
    /// How the template takes tool calls; `None` if it knows no tools: they are then described in
    /// the system message.
    pub(crate) template_calls: Option<CallForm>,
}

/// The marks around thinking.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reasoning {
    pub open: Marker,
    pub close: Marker,
}

/// How tool calls are written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CallSyntax {
    /// Objects with a name and arguments.
    Json(JsonCalls),
    /// A name and a JSON object, separated by marks.
    Named(NamedCalls),
    /// A name, and each argument between marks.
    Parameters(ParameterCalls),
    /// gpt-oss's channels.
    Harmony(HarmonyMarks),
}

/// `{"name": …, "arguments": {…}}`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JsonCalls {
    /// Begins one or several objects.
    pub open: Marker,
    /// Ends them; `None` if the end of the answer does.
    pub close: Option<Marker>,
    /// The objects are in a list.
    pub list: bool,
    /// An object at the very beginning of the answer is a call too.
    pub bare: bool,
    /// The arguments' field.
    pub arguments: &'static str,
}

/// `OPEN CALL_OPEN name SEPARATOR {…} CALL_CLOSE CLOSE`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NamedCalls {
    pub open: Marker,
    /// Begins each call; `None` if `open` does.
    pub call_open: Option<Marker>,
    pub separator: Marker,
    /// Ends a call's arguments; `None` if the end of the JSON value does.
    pub call_close: Option<Marker>,
    pub close: Option<Marker>,
    pub name: NameStyle,
}

/// What surrounds a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameStyle {
    Plain,
    /// `functions.NAME:INDEX`, which is the call's id.
    Indexed,
    /// `NAME[CALL_ID]ID`.
    WithId,
}

/// `OPEN CALL_OPEN name NAME_END (KEY_OPEN key KEY_END value VALUE_CLOSE)* CALL_CLOSE CLOSE`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ParameterCalls {
    pub open: Marker,
    /// Begins each call; `None` if `open` does.
    pub call_open: Option<Marker>,
    /// Ends the name; `None` if a line, the first key or the call's end does.
    pub name_end: Option<Marker>,
    pub key_open: Marker,
    pub key_end: Marker,
    /// Begins the value; `None` if the key's end does.
    pub value_open: Option<Marker>,
    pub value_close: Marker,
    pub call_close: Marker,
    pub close: Option<Marker>,
    /// How a call is written, for a grammar.
    pub layout: ParameterLayout,
}

/// White space that a family writes between marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParameterLayout {
    pub after_open: &'static str,
    pub after_name: &'static str,
    pub after_key: &'static str,
    pub before_value: &'static str,
    pub after_value: &'static str,
    pub after_parameter: &'static str,
    pub after_call: &'static str,
    /// Written inside of the key's mark for strings, and for other values.
    pub string_flag: [&'static str; 2],
}

/// The special tokens of gpt-oss's format.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HarmonyMarks {
    pub start: Marker,
    pub channel: Marker,
    pub constrain: Marker,
    pub message: Marker,
    pub end: Marker,
    pub call: Marker,
    pub finish: Marker,
}

impl AnswerFormat {
    /// The format of a model with this template and tokenizer.
    pub fn detect(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Self {
        let sources = template.map(ChatTemplate::sources).unwrap_or_default();
        let detector = Detector { sources, tokenizer };
        let reasoning = detector.reasoning();
        let form = template.and_then(conversation::call_form);
        let (calls, template_calls) = match detector.calls() {
            Some(calls) if form.is_some() => (calls, form),
            _ => (detector.hermes(), None),
        };
        Self { reasoning, calls, template_calls }
    }

    /// How an answer to a prompt with this end begins.
    pub fn opening(&self, prompt_tail: &str) -> Opening {
        match &self.reasoning {
            Some(reasoning) if prompt_tail.trim_end().ends_with(&reasoning.open.text) => Opening::Thinking,
            _ => Opening::Fresh,
        }
    }

    /// Special tokens that the engine has to report, because they are marks.
    pub fn special_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut ids: Vec<u32> = self
            .markers()
            .iter()
            .flat_map(|marker| marker.special_names())
            .filter_map(|name| tokenizer.token_id(name))
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn markers(&self) -> Vec<&Marker> {
        let mut markers = Vec::new();
        if let Some(Reasoning { open, close }) = &self.reasoning {
            markers.extend([open, close]);
        }
        match &self.calls {
            CallSyntax::Json(calls) => {
                markers.push(&calls.open);
                markers.extend(&calls.close);
            }
            CallSyntax::Named(calls) => {
                markers.extend([&calls.open, &calls.separator]);
                markers.extend(calls.call_open.iter().chain(&calls.call_close).chain(&calls.close));
            }
            CallSyntax::Parameters(calls) => {
                let ParameterCalls { open, key_open, key_end, value_close, call_close, .. } = calls;
                markers.extend([open, key_open, key_end, value_close, call_close]);
                markers.extend(calls.call_open.iter().chain(&calls.name_end));
                markers.extend(calls.value_open.iter().chain(&calls.close));
            }
            CallSyntax::Harmony(marks) => markers.extend(marks.all()),
        }
        markers
    }

    /// True if the model thinks before it answers.
    pub fn thinks(&self) -> bool {
        self.reasoning.is_some() || matches!(self.calls, CallSyntax::Harmony(_))
    }
}

impl HarmonyMarks {
    pub fn all(&self) -> [&Marker; 7] {
        [&self.start, &self.channel, &self.constrain, &self.message, &self.end, &self.call, &self.finish]
    }
}

/// What is known of a model.
struct Detector<'a> {
    sources: Vec<&'a str>,
    tokenizer: &'a Tokenizer,
}

impl Detector<'_> {
    fn mark(&self, text: &str) -> Marker {
        Marker::new(text, self.tokenizer)
    }

    fn mentions(&self, text: &str) -> bool {
        self.sources.iter().any(|source| source.contains(text))
    }

    /// True if the tokenizer has this token.
    fn has(&self, token: &str) -> bool {
        self.tokenizer.token_id(token).is_some()
    }

    fn reasoning(&self) -> Option<Reasoning> {
        const TAGS: [(&str, &str); 4] = [
            ("<think>", "</think>"),
            ("[THINK]", "[/THINK]"),
            ("<seed:think>", "</seed:think>"),
            ("<|START_THINKING|>", "<|END_THINKING|>"),
        ];
        let known = |close: &str| self.mentions(close) || self.has(close);
        let (open, close) = TAGS.into_iter().find(|(_, close)| known(close))?;
        Some(Reasoning { open: self.mark(open), close: self.mark(close) })
    }

    fn calls(&self) -> Option<CallSyntax> {
        if self.has("<|channel|>") && self.has("<|message|>") {
            return Some(self.harmony());
        }
        if !self.mentions("tools") && !self.mentions("tool_calls") {
            return None;
        }
        let mentions = |text: &str| self.mentions(text);
        let found = if mentions("｜DSML｜") {
            self.deepseek_markup()
        } else if mentions("<｜tool▁calls▁begin｜>") {
            self.deepseek(mentions("```json"))
        } else if mentions("<|tool_calls_section_begin|>") {
            self.kimi()
        } else if mentions("<minimax:tool_call>") {
            self.minimax()
        } else if mentions("<arg_key>") {
            self.glm()
        } else if mentions("<function=") {
            self.qwen_coder()
        } else if mentions("[TOOL_CALLS]") {
            self.mistral(mentions("[ARGS]"), mentions("[CALL_ID]"))
        } else if mentions("<tool_calls>") {
            self.json("<tool_calls>", Some("</tool_calls>"))
        } else if mentions("<tool_call>") {
            self.hermes()
        } else if mentions("<|python_tag|>") || self.has("<|python_tag|>") {
            self.llama()
        } else {
            return None;
        };
        Some(found)
    }

    fn json(&self, open: &str, close: Option<&str>) -> CallSyntax {
        CallSyntax::Json(JsonCalls {
            open: self.mark(open),
            close: close.map(|close| self.mark(close)),
            list: false,
            bare: false,
            arguments: "arguments",
        })
    }

    fn hermes(&self) -> CallSyntax {
        self.json("<tool_call>", Some("</tool_call>"))
    }

    fn llama(&self) -> CallSyntax {
        CallSyntax::Json(JsonCalls {
            open: self.mark("<|python_tag|>"),
            close: None,
            list: false,
            bare: true,
            arguments: "parameters",
        })
    }

    fn mistral(&self, has_arguments: bool, has_id: bool) -> CallSyntax {
        let open = self.mark("[TOOL_CALLS]");
        if !has_arguments {
            let arguments = "arguments";
            return CallSyntax::Json(JsonCalls { open, close: None, list: true, bare: false, arguments });
        }
        CallSyntax::Named(NamedCalls {
            open: open.clone(),
            call_open: None,
            separator: self.mark("[ARGS]"),
            call_close: None,
            close: None,
            name: if has_id { NameStyle::WithId } else { NameStyle::Plain },
        })
    }

    fn deepseek(&self, fenced: bool) -> CallSyntax {
        let (call_open, separator, call_close) = if fenced {
            ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")
        } else {
            ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
        };
        CallSyntax::Named(NamedCalls {
            open: self.mark("<｜tool▁calls▁begin｜>"),
            call_open: Some(self.mark(call_open)),
            separator: self.mark(separator),
            call_close: Some(self.mark(call_close)),
            close: Some(self.mark("<｜tool▁calls▁end｜>")),
            name: NameStyle::Plain,
        })
    }

    fn kimi(&self) -> CallSyntax {
        CallSyntax::Named(NamedCalls {
            open: self.mark("<|tool_calls_section_begin|>"),
            call_open: Some(self.mark("<|tool_call_begin|>")),
            separator: self.mark("<|tool_call_argument_begin|>"),
            call_close: Some(self.mark("<|tool_call_end|>")),
            close: Some(self.mark("<|tool_calls_section_end|>")),
            name: NameStyle::Indexed,
        })
    }

    fn qwen_coder(&self) -> CallSyntax {
        CallSyntax::Parameters(ParameterCalls {
            open: self.mark("<tool_call>"),
            call_open: Some(self.mark("<function=")),
            name_end: Some(self.mark(">")),
            key_open: self.mark("<parameter="),
            key_end: self.mark(">"),
            value_open: None,
            value_close: self.mark("</parameter>"),
            call_close: self.mark("</function>"),
            close: Some(self.mark("</tool_call>")),
            layout: ParameterLayout {
                after_open: "\n",
                after_name: "\n",
                before_value: "\n",
                after_value: "\n",
                after_parameter: "\n",
                after_call: "\n",
                ..PLAIN
            },
        })
    }

    fn minimax(&self) -> CallSyntax {
        CallSyntax::Parameters(ParameterCalls {
            open: self.mark("<minimax:tool_call>"),
            call_open: Some(self.mark("<invoke name=\"")),
            name_end: Some(self.mark("\">")),
            key_open: self.mark("<parameter name=\""),
            key_end: self.mark("\">"),
            value_open: None,
            value_close: self.mark("</parameter>"),
            call_close: self.mark("</invoke>"),
            close: Some(self.mark("</minimax:tool_call>")),
            layout: ParameterLayout {
                after_open: "\n",
                after_name: "\n",
                after_parameter: "\n",
                after_call: "\n",
                ..PLAIN
            },
        })
    }

    fn glm(&self) -> CallSyntax {
        CallSyntax::Parameters(ParameterCalls {
            open: self.mark("<tool_call>"),
            call_open: None,
            name_end: None,
            key_open: self.mark("<arg_key>"),
            key_end: self.mark("</arg_key>"),
            value_open: Some(self.mark("<arg_value>")),
            value_close: self.mark("</arg_value>"),
            call_close: self.mark("</tool_call>"),
            close: None,
            layout: ParameterLayout { after_name: "\n", after_key: "\n", after_parameter: "\n", ..PLAIN },
        })
    }

    fn deepseek_markup(&self) -> CallSyntax {
        CallSyntax::Parameters(ParameterCalls {
            open: self.mark("<｜DSML｜function_calls>"),
            call_open: Some(self.mark("<｜DSML｜invoke name=\"")),
            name_end: Some(self.mark("\">")),
            key_open: self.mark("<｜DSML｜parameter name=\""),
            key_end: self.mark("\">"),
            value_open: None,
            value_close: self.mark("</｜DSML｜parameter>"),
            call_close: self.mark("</｜DSML｜invoke>"),
            close: Some(self.mark("</｜DSML｜function_calls>")),
            layout: ParameterLayout {
                after_open: "\n",
                after_name: "\n",
                after_parameter: "\n",
                after_call: "\n",
                string_flag: ["\" string=\"true", "\" string=\"false"],
                ..PLAIN
            },
        })
    }

    fn harmony(&self) -> CallSyntax {
        CallSyntax::Harmony(HarmonyMarks {
            start: self.mark("<|start|>"),
            channel: self.mark("<|channel|>"),
            constrain: self.mark("<|constrain|>"),
            message: self.mark("<|message|>"),
            end: self.mark("<|end|>"),
            call: self.mark("<|call|>"),
            finish: self.mark("<|return|>"),
        })
    }
}

/// No white space.
const PLAIN: ParameterLayout = ParameterLayout {
    after_open: "",
    after_name: "",
    after_key: "",
    before_value: "",
    after_value: "",
    after_parameter: "",
    after_call: "",
    string_flag: ["", ""],
};
