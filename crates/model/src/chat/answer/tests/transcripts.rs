//! Answers as the families write them, and what clients see of them.

pub struct Family {
    pub name: &'static str,
    /// What the family's template mentions.
    pub template: &'static str,
    pub special: &'static [&'static str],
    pub transcripts: &'static [(&'static str, &'static str)],
}

/// Pieces of formats, for random answers.
pub const WORDS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"weather\", \"arguments\": ",
    "{\"city\": \"Rom\"}",
    "}",
    "\n",
    " ",
    "[TOOL_CALLS]",
    "[ARGS]",
    "weather",
    "<function=",
    ">",
    "<parameter=",
    "city",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|channel|>",
    "final",
    "analysis",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "assistant",
    " to=functions.weather",
    "<|call|>",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<minimax:tool_call>",
    "<invoke name=\"",
    "\">",
    "<parameter name=\"",
    "</invoke>",
    "</minimax:tool_call>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.weather:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "{\"name\": \"weather\", \"parameters\": {}}",
    "; ",
];

pub const FAMILIES: &[Family] = &[
    Family {
        name: "Hermes and Qwen",
        template: "<tool_call> </think>",
        special: &["<|im_end|>"],
        transcripts: &[
            ("Hello.", "text:Hello."),
            ("  Hello \n", "text:  Hello \n"),
            ("<think>\nHm.\n\nYes.\n</think>\n\nHello.", "think:Hm.\n\nYes.|text:Hello."),
            ("<think>\n\n</think>\n\nHi", "text:Hi"),
            (
                "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"}}\n</tool_call>",
                "call:weather|with:{\"city\": \"Rom\"}|end:",
            ),
            (
                "<think>\nLook.\n</think>\n\nI look.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \
                 \"a </tool_call> }\\\" b\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n\
                 </tool_call>\n",
                "think:Look.|text:I look.|call:weather|with:{\"city\": \"a </tool_call> }\\\" b\"}|end:|call:time|\
                 with:{}|end:",
            ),
            (
                "<tool_call>{\"arguments\": {\"city\": \"Rom\"}, \"name\": \"weather\"}</tool_call> Done.",
                "call:weather|with:{\"city\":\"Rom\"}|end:|text:Done.",
            ),
            // White space before a call separates the texts around it; if there is none, white
            // space after the call does.
            (
                "I look. <tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call> Done. ",
                "text:I look.|call:time|with:{}|end:|text: Done. ",
            ),
            (
                "One,<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>\n\ntwo",
                "text:One,|call:time|with:{}|end:|text:\n\ntwo",
            ),
            (
                "One\n\n<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>\n<tool_call>\n{\"name\": \
                 \"time\", \"arguments\": {}}\n</tool_call>two",
                "text:One|call:time|with:{}|end:|call:time|with:{}|end:|text:\n\ntwo",
            ),
            (
                "<tool_call>{\"name\": \"weather\", \"arguments\": \"{\\\"city\\\": 1}\"}</tool_call>",
                "call:weather|with:{\"city\": 1}|end:",
            ),
            // What is not a call stays text.
            ("The tag <tool_call> begins a call.", "text:The tag <tool_call> begins a call."),
            ("<tool_call>\n{\"city\": 1}\n</tool_call>", "text:<tool_call>\n{\"city\": 1}\n</tool_call>"),
            ("a < b <tool and <tool_cal", "text:a < b <tool and <tool_cal"),
            ("Use <think> for thinking.", "text:Use <think> for thinking."),
            // The model has ended these itself.
            ("<tool_call>\n{\"name\": \"weather\", \"arg", "text:<tool_call>\n{\"name\": \"weather\", \"arg"),
            ("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"ci", "call:weather|with:{\"ci|end:"),
            ("<think>Hm", "think:Hm"),
            // The object's own end is missing, or the arguments' end.
            (
                "<tool_call>{\"name\": \"time\", \"arguments\": {}</tool_call>x",
                "call:time|with:{}|end:|text:x",
            ),
            (
                "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": 1</tool_call>x",
                "call:time|with:{\"a\": 1|end:|text:x",
            ),
        ],
    },
    Family {
        name: "Qwen3-Coder",
        template: "<tool_call> <function=",
        special: &[],
        transcripts: &[
            (
                "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n<parameter=days>\n3\n\
                 </parameter>\n</function>\n</tool_call>",
                "text:I look.|call:weather|with:{\"city\": \"Rom\", \"days\": 3}|end:",
            ),
            (
                "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=code>\n\nif a < b:\n  \
                 \"x\"\n\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
                "call:weather|with:{\"city\": \"12\", \"code\": \"\\nif a < b:\\n  \\\"x\\\"\\n\"}|end:|call:time|\
                 with:{}|end:",
            ),
            (
                "<tool_call>\n<function=weather>\n<parameter=tags>\n[1, 2]\n</parameter>\n</tool_call>",
                "call:weather|with:{\"tags\": [1,2]}|end:",
            ),
            ("<tool_call> is a tag", "text:<tool_call> is a tag"),
            ("<function=weather>", "text:<function=weather>"),
        ],
    },
    Family {
        name: "Llama 3",
        template: "<|python_tag|>",
        special: &["<|python_tag|>", "<|eom_id|>"],
        transcripts: &[
            (
                "{\"name\": \"weather\", \"parameters\": {\"city\": \"Rom\"}}",
                "call:weather|with:{\"city\": \"Rom\"}|end:",
            ),
            (
                "<|python_tag|>{\"name\": \"weather\", \"parameters\": {}}; {\"name\": \"time\", \"parameters\": {}}",
                "call:weather|with:{}|end:|call:time|with:{}|end:",
            ),
            (
                "{\"type\": \"function\", \"name\": \"time\", \"parameters\": {\"a\": 1}}",
                "call:time|with:{\"a\":1}|end:",
            ),
            ("{\"city\": \"Rom\"}", "text:{\"city\": \"Rom\"}"),
            (
                "It is {\"name\": \"time\", \"parameters\": {}}",
                "text:It is {\"name\": \"time\", \"parameters\": {}}",
            ),
        ],
    },
    Family {
        name: "Mistral",
        template: "[TOOL_CALLS]",
        special: &["[TOOL_CALLS]"],
        transcripts: &[
            (
                "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"}, \"id\": \"abcdefghi\"}, {\"name\": \
                 \"time\", \"arguments\": {}}]",
                "call:weather|with:{\"city\": \"Rom\"}|end:|call:time|with:{}|end:",
            ),
            ("Hello [TOOL] x", "text:Hello [TOOL] x"),
        ],
    },
    Family {
        name: "Mistral since 2025",
        template: "[TOOL_CALLS] [ARGS] [CALL_ID] [/THINK]",
        special: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        transcripts: &[(
            "[THINK]Hm.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{\"city\": \"Rom\"}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{}",
            "think:Hm.|text:I look.|call:weather|with:{\"city\": \"Rom\"}|end:|call:time#abc|with:{}|end:",
        )],
    },
    Family {
        name: "DeepSeek V3 and R1",
        template: "<｜tool▁calls▁begin｜> ```json </think>",
        special: &[],
        transcripts: &[(
            "<think>Hm</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n\
                 {\"city\": \"Rom\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n\
                 ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "think:Hm|text:I look.|call:weather|with:{\"city\": \"Rom\"}|end:|call:time|with:{}|end:",
        )],
    },
    Family {
        name: "DeepSeek V3.1",
        template: "<｜tool▁calls▁begin｜>",
        special: &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
        ],
        transcripts: &[
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Rom\"}<｜tool▁call▁end｜>\
                 <｜tool▁calls▁end｜>",
                "call:weather|with:{\"city\": \"Rom\"}|end:",
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜><｜tool▁call▁end｜>x",
                "call:time|with:{}|end:|text:x",
            ),
        ],
    },
    Family {
        name: "DeepSeek V3.2",
        template: "<｜DSML｜",
        special: &[],
        transcripts: &[(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">5\
                 </｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">5</｜DSML｜parameter>\n\
                 </｜DSML｜invoke>\n</｜DSML｜function_calls>",
            "call:weather|with:{\"city\": \"5\", \"days\": 5}|end:",
        )],
    },
    Family {
        name: "Kimi K2",
        template: "<|tool_calls_section_begin|>",
        special: &[],
        transcripts: &[(
            "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
                 {\"city\": \"Rom\"}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}\
                 <|tool_call_end|><|tool_calls_section_end|>",
            "text:I look.|call:weather#functions.weather:0|with:{\"city\": \"Rom\"}|end:|call:time#functions.time:1|\
                 with:{}|end:",
        )],
    },
    Family {
        name: "GLM",
        template: "<tool_call> <arg_key> </think>",
        special: &[],
        transcripts: &[
            (
                "<think>Hm</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n\
                 <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
                "think:Hm|text:I look.|call:weather|with:{\"city\": \"Rom\", \"days\": 3}|end:",
            ),
            (
                "<tool_call>weather<arg_key>units</arg_key><arg_value>c</arg_value></tool_call><tool_call>time</tool_call>",
                "call:weather|with:{\"units\": \"c\"}|end:|call:time|with:{}|end:",
            ),
            ("<tool_call> is a tag\n", "text:<tool_call> is a tag\n"),
        ],
    },
    Family {
        name: "MiniMax M2",
        template: "<minimax:tool_call> </think>",
        special: &[],
        transcripts: &[(
            "<think>\nHm\n</think>\n\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Rom\
                 </parameter>\n<parameter name=\"tags\">[\"a\"]</parameter>\n</invoke>\n<invoke name=\"time\">\n</invoke>\n\
                 </minimax:tool_call>",
            "think:Hm|call:weather|with:{\"city\": \"Rom\", \"tags\": [\"a\"]}|end:|call:time|with:{}|end:",
        )],
    },
    Family {
        name: "MiniMax M1",
        template: "<tool_calls>",
        special: &[],
        transcripts: &[(
            "<tool_calls>\n{\"name\": \"weather\", \"arguments\": {}}\n{\"name\": \"time\", \"arguments\": {}}\n</tool_calls>",
            "call:weather|with:{}|end:|call:time|with:{}|end:",
        )],
    },
    Family {
        name: "gpt-oss",
        template: "",
        special: &[
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
        transcripts: &[
            (
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
                "think:Hm.|text:Hello.",
            ),
            (
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather \
                 <|constrain|>json<|message|>{\"city\": \"Rom\"}<|call|>",
                "think:Hm.|call:weather|with:{\"city\": \"Rom\"}|end:",
            ),
            (
                "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.time<|channel|>commentary\
                 <|message|><|call|>",
                "text:I look.|call:time|with:{}|end:",
            ),
            ("<|channel|>final<|message|>Hel", "text:Hel"),
            ("<|channel|>ana", ""),
            ("Hello.", "text:Hello."),
        ],
    },
];
