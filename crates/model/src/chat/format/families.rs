//! The syntaxes of the families.

use super::{
    CallSyntax, Detector, HarmonyMarks, JsonCalls, NameStyle, NamedCalls, ParameterCalls, ParameterLayout,
};

impl Detector<'_> {
    pub(super) fn json(&self, open: &str, close: Option<&str>) -> CallSyntax {
        CallSyntax::Json(JsonCalls {
            open: self.mark(open),
            close: close.map(|close| self.mark(close)),
            list: false,
            bare: false,
            arguments: "arguments",
        })
    }

    pub(super) fn hermes(&self) -> CallSyntax {
        self.json("<tool_call>", Some("</tool_call>"))
    }

    pub(super) fn llama(&self) -> CallSyntax {
        CallSyntax::Json(JsonCalls {
            open: self.mark("<|python_tag|>"),
            close: None,
            list: false,
            bare: true,
            arguments: "parameters",
        })
    }

    pub(super) fn mistral(&self, has_arguments: bool, has_id: bool) -> CallSyntax {
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

    pub(super) fn deepseek(&self, fenced: bool) -> CallSyntax {
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

    pub(super) fn kimi(&self) -> CallSyntax {
        CallSyntax::Named(NamedCalls {
            open: self.mark("<|tool_calls_section_begin|>"),
            call_open: Some(self.mark("<|tool_call_begin|>")),
            separator: self.mark("<|tool_call_argument_begin|>"),
            call_close: Some(self.mark("<|tool_call_end|>")),
            close: Some(self.mark("<|tool_calls_section_end|>")),
            name: NameStyle::Indexed,
        })
    }

    pub(super) fn qwen_coder(&self) -> CallSyntax {
        CallSyntax::Parameters(Box::new(ParameterCalls {
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
        }))
    }

    pub(super) fn minimax(&self) -> CallSyntax {
        CallSyntax::Parameters(Box::new(ParameterCalls {
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
        }))
    }

    pub(super) fn glm(&self) -> CallSyntax {
        CallSyntax::Parameters(Box::new(ParameterCalls {
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
        }))
    }

    pub(super) fn deepseek_markup(&self) -> CallSyntax {
        CallSyntax::Parameters(Box::new(ParameterCalls {
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
        }))
    }

    pub(super) fn harmony(&self) -> CallSyntax {
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
