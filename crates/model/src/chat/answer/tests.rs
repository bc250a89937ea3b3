//! Transcripts of every family, in any pieces.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod transcripts;

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::chat::{AnswerFormat, ChatTemplate};
use crate::tokenizer::Tokenizer;
use transcripts::{FAMILIES, Family};

/// A tokenizer with a token for each byte, and these special tokens.
fn tokenizer(special: &[&str]) -> Tokenizer {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256..;
    let mut vocab = Map::new();
    for byte in 0..256 {
        let code = if printable(byte) { Some(byte) } else { others.next() };
        vocab.insert(code.and_then(char::from_u32).unwrap().to_string(), byte.into());
    }
    let added = special.iter().zip(256..).map(|(text, id): (&&str, u32)| {
        json!({"id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false})
    });
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap()
}

/// A template that shows calls, and mentions what the family's own does.
fn template(mentions: &str) -> ChatTemplate {
    let source = format!(
        "{{# tools {mentions} #}}{{% for m in messages %}}{{{{ m.content }}}}{{% for c in m.tool_calls %}}\
         {{{{ c.function.name }}}}{{{{ c.function.arguments | tojson }}}}{{% endfor %}}{{% endfor %}}"
    );
    ChatTemplate::new("test", &Value::String(source), &json!({})).unwrap().unwrap()
}

fn format(family: &Family) -> Arc<AnswerFormat> {
    Arc::new(AnswerFormat::detect(Some(&template(family.template)), &tokenizer(family.special)))
}

fn schemas() -> Arc<ToolSchemas> {
    let city = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["c", "f"]},
        "tags": {"type": "array"}, "code": {"type": ["string", "null"]},
    }});
    Arc::new(ToolSchemas::new([("weather", &city), ("time", &json!({}))].into_iter()))
}

/// The pieces of a transcript: text, or a special token.
fn pieces<'a>(text: &'a str, special: &[&'a str]) -> Vec<(&'a str, bool)> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let next = special.iter().filter_map(|name| Some((rest.find(name)?, *name))).min();
        let Some((at, name)) = next else {
            pieces.push((rest, false));
            break;
        };
        pieces.extend([(&rest[..at], false), (&rest[at..at + name.len()], true)]);
        rest = &rest[at + name.len()..];
    }
    pieces
}

/// Parts in one line each, with neighbours of one kind joined.
fn describe(parts: Vec<AnswerPart>) -> String {
    let mut out = String::new();
    let mut kind = "";
    for part in parts {
        let (next, text) = match part {
            AnswerPart::Text { text, .. } => ("text", text),
            AnswerPart::Reasoning(text) => ("think", text),
            AnswerPart::CallBegin { name, id } => {
                ("call", id.map_or(name.clone(), |id| format!("{name}#{id}")))
            }
            AnswerPart::Arguments(text) => ("with", text),
            AnswerPart::CallEnd => ("end", String::new()),
        };
        if kind != next || next == "call" {
            let separator = if out.is_empty() { "" } else { "|" };
            out.push_str(&format!("{separator}{next}:"));
        }
        out.push_str(&text);
        kind = next;
    }
    out
}

/// What a client sees of an answer that arrives in these pieces.
fn parse(
    format: &Arc<AnswerFormat>,
    family: &Family,
    text: &str,
    opening: Opening,
    cuts: &[usize],
) -> String {
    let parser = AnswerParser::new(format.clone(), Some(schemas()), opening);
    parse_until(parser, family, text, cuts, Ending::Complete)
}

/// As [`parse`], by this parser, of an answer that ends so.
fn parse_until(
    mut parser: AnswerParser,
    family: &Family,
    text: &str,
    cuts: &[usize],
    ending: Ending,
) -> String {
    let (mut parts, mut at) = (Vec::new(), 0);
    for (piece, is_special) in pieces(text, family.special) {
        if is_special {
            parser.push_special(piece);
        } else {
            let mut from = 0;
            for cut in cuts.iter().filter_map(|cut| cut.checked_sub(at)) {
                if (from + 1..piece.len()).contains(&cut) && piece.is_char_boundary(cut) {
                    parser.push(&piece[from..cut]);
                    from = cut;
                }
            }
            parser.push(&piece[from..]);
        }
        parts.extend(parser.take());
        at += piece.len();
    }
    parser.finish(ending);
    parts.extend(parser.take());
    describe(parts)
}

/// If it was searched from its beginning for each piece, the value would take minutes.
#[test]
fn a_long_argument_is_searched_once() {
    let family = FAMILIES.iter().find(|family| family.name == "Qwen3-Coder").unwrap();
    let mut parser = AnswerParser::new(format(family), Some(schemas()), Opening::Fresh);
    let began = std::time::Instant::now();
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n");
    let pieces = 200_000;
    (0..pieces).for_each(|_| parser.push("a <b é\n"));
    parser.push("\n</parameter>\n</function>\n</tool_call>");
    parser.finish(Ending::Complete);
    let told = describe(parser.take());
    assert_eq!((told.matches("a <b é").count(), told.starts_with("call:weather|with:{")), (pieces, true));
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
}

#[test]
fn transcripts_are_split_alike_wherever_they_are_cut() {
    for family in FAMILIES {
        let format = format(family);
        for (text, expected) in family.transcripts {
            assert_eq!(
                parse(&format, family, text, Opening::Fresh, &[]),
                *expected,
                "{}: {text:?}",
                family.name
            );
            for cut in 0..text.len() {
                let parsed = parse(&format, family, text, Opening::Fresh, &[cut]);
                assert_eq!(parsed, *expected, "{} cut at {cut}: {text:?}", family.name);
            }
            let all: Vec<usize> = (0..text.len()).collect();
            let parsed = parse(&format, family, text, Opening::Fresh, &all);
            assert_eq!(parsed, *expected, "{} letter by letter: {text:?}", family.name);
        }
    }
}

/// If an answer is cut off, its text and its calls are prefixes of the whole answer's.
#[test]
fn an_answer_cut_off_anywhere_shows_no_part_of_a_mark() {
    for family in FAMILIES {
        let format = format(family);
        let with_calls = family.transcripts.iter().filter(|(_, expected)| expected.contains("call:"));
        for (text, _) in with_calls {
            let whole = parse(&format, family, text, Opening::Fresh, &[]);
            let whole_text = told(&whole, "text");
            let mut at = 0;
            for (piece, is_special) in pieces(text, family.special) {
                let ends: Vec<usize> = match is_special {
                    true => vec![at + piece.len()],
                    false => piece.char_indices().map(|(offset, c)| at + offset + c.len_utf8()).collect(),
                };
                at += piece.len();
                for end in ends {
                    let cut = &text[..end];
                    let parser = AnswerParser::new(format.clone(), Some(schemas()), Opening::Fresh);
                    let shown = parse_until(parser, family, cut, &[], Ending::CutOff);
                    let shown_text = told(&shown, "text");
                    assert!(whole_text.starts_with(&shown_text), "{}: {cut:?} gives {shown}", family.name);
                    assert!(
                        told(&whole, "with").starts_with(&told(&shown, "with")),
                        "{}: {cut:?} gives {shown}",
                        family.name
                    );
                    let all: Vec<usize> = (0..end).collect();
                    let parser = AnswerParser::new(format.clone(), Some(schemas()), Opening::Fresh);
                    assert_eq!(parse_until(parser, family, cut, &all, Ending::CutOff), shown, "{cut:?}");
                }
            }
        }
    }
}

/// The text of all parts of one kind.
fn told(parts: &str, kind: &str) -> String {
    let said = parts.split('|').filter_map(|part| part.strip_prefix(kind)?.strip_prefix(':'));
    said.collect::<Vec<_>>().concat().trim_end().to_owned()
}

#[test]
fn what_only_looks_like_a_mark_is_text_unless_the_answer_is_cut_off_there() {
    let family = &FAMILIES[0];
    let format = format(family);
    let shown = |text, ending, calls_only: bool| {
        let parser = AnswerParser::new(format.clone(), Some(schemas()), Opening::Fresh);
        parse_until(if calls_only { parser.calls_only() } else { parser }, family, text, &[], ending)
    };
    for (text, ending, calls_only, expected) in [
        ("a <tool", Ending::Complete, false, "text:a <tool"),
        ("a <tool", Ending::StopText, false, "text:a <tool"),
        ("a <tool", Ending::CutOff, false, "text:a"),
        ("a <tool box", Ending::CutOff, false, "text:a <tool box"),
        ("a <tool_call> b", Ending::CutOff, false, "text:a <tool_call> b"),
        ("a \n", Ending::CutOff, false, "text:a \n"),
        ("<tool_call>\n{\"", Ending::StopText, false, ""),
        ("<", Ending::StopText, true, ""),
        (
            "<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a",
            Ending::StopText,
            true,
            "call:time|with:{\"a|end:",
        ),
        (
            "<tool_call>{\"name\": \"time\", \"arguments\": {}}\n</tool_c",
            Ending::CutOff,
            false,
            "call:time|with:{}|end:",
        ),
    ] {
        assert_eq!(shown(text, ending, calls_only), expected, "{text:?} {ending:?}");
    }
}

#[test]
fn an_answer_may_begin_in_the_midst_of_thinking() {
    let family = &FAMILIES[0];
    let format = format(family);
    assert_eq!(format.opening("<|im_start|>assistant\n<think>\n"), Opening::Thinking);
    assert_eq!(format.opening("<think>\n\n</think>\n\n"), Opening::Fresh);
    let text = "\nLet me see.\n</think>\n\nYes.";
    assert_eq!(parse(&format, family, text, Opening::Thinking, &[]), "think:Let me see.|text:Yes.");
}

#[test]
fn without_tools_calls_are_text() {
    for family in FAMILIES.iter().filter(|family| family.name != "gpt-oss") {
        let format = format(family);
        let text = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call> \n";
        let mut parser = AnswerParser::new(format, None, Opening::Fresh);
        parser.push(text);
        parser.finish(Ending::Complete);
        assert_eq!(describe(parser.take()), format!("text:{text}"), "{}", family.name);
    }
}

#[test]
fn a_special_token_spelled_as_text_is_no_mark() {
    let family = FAMILIES.iter().find(|family| family.name == "Mistral").unwrap();
    let format = format(family);
    let text = r#"[TOOL_CALLS][{"name": "weather", "arguments": {}}]"#;
    let mut parser = AnswerParser::new(format, Some(schemas()), Opening::Fresh);
    parser.push(text);
    parser.finish(Ending::Complete);
    assert_eq!(describe(parser.take()), format!("text:{text}"));
}

#[test]
fn a_model_without_a_known_format_is_told_one() {
    let plain = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let plain = ChatTemplate::new("t", &Value::String(plain.into()), &json!({})).unwrap().unwrap();
    let format = AnswerFormat::detect(Some(&plain), &tokenizer(&[]));
    assert!(format.template_calls.is_none());
    use crate::chat::{Message, Role, Tool, ToolCall};
    let call = ToolCall { id: "1".into(), name: "weather".into(), arguments: Map::new() };
    let messages = [
        Message::new(Role::User, "hi"),
        Message { calls: vec![call], ..Message::new(Role::Assistant, "") },
        Message { call_id: Some("1".into()), ..Message::new(Role::Tool, "sunny") },
    ];
    let tool = Tool { name: "weather".into(), description: None, parameters: json!({}), strict: false };
    let (messages, variables) = format.template_input(&messages, &[tool]);
    let text = plain.render(&messages, &variables).unwrap();
    assert!(text.starts_with("system:You can call these tools:\n<tools>\n{\"name\":\"weather\""), "{text}");
    assert!(
        text.contains("assistant:<tool_call>\n{\"name\":\"weather\",\"arguments\":{}}\n</tool_call>;"),
        "{text}"
    );
    assert!(text.contains("user:<tool_response>\nsunny\n</tool_response>;"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any answer, composed of parts of the formats, is parsed in the same way in any pieces; text
    /// without a mark is not lost.
    #[test]
    fn any_answer_is_split_alike_in_any_pieces(
        family in 0..FAMILIES.len(),
        words in prop::collection::vec(prop_oneof![
            2 => "[a-z {}\\[\\]\"<>|:,\n]{0,6}", 3 => proptest::sample::select(transcripts::WORDS).prop_map(str::to_owned),
        ], 0..12),
        cuts in prop::collection::vec(0usize..160, 0..8),
    ) {
        let family = &FAMILIES[family];
        // Detecting renders templates: too slow for each case.
        thread_local! {
            static FORMATS: Vec<Arc<AnswerFormat>> = FAMILIES.iter().map(format).collect();
        }
        let at = FAMILIES.iter().position(|other| other.name == family.name).unwrap();
        let format = FORMATS.with(|formats| formats[at].clone());
        let text = words.concat();
        let mut cuts = cuts;
        cuts.sort_unstable();
        let whole = parse(&format, family, &text, Opening::Fresh, &[]);
        prop_assert_eq!(&parse(&format, family, &text, Opening::Fresh, &cuts), &whole);
        let all: Vec<usize> = (0..text.len()).collect();
        prop_assert_eq!(&parse(&format, family, &text, Opening::Fresh, &all), &whole);
    }
}
