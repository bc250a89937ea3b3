//! Chat templates against transformers' output (tests/fixtures/text/make_chats.py).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{fs, path::Path, time::Duration};

use serde_json::{Map, Value, json};
use thunder_model::chat::{ChatError, ChatTemplate};

fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn template(source: &str) -> ChatTemplate {
    let folder = folder_with(&[("chat_template.jinja", source)]);
    ChatTemplate::load(folder.path()).unwrap().unwrap()
}

fn hello() -> Vec<Value> {
    vec![json!({"role": "user", "content": "hi"})]
}

fn render(source: &str) -> Result<String, ChatError> {
    template(source).render(&hello(), &Map::new())
}

fn refusal(source: &str) -> String {
    match render(source) {
        Err(ChatError::Render(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

fn load_error(files: &[(&str, &str)]) -> String {
    ChatTemplate::load(folder_with(files).path()).unwrap_err().to_string()
}

#[test]
fn prompts_and_refusals_equal_those_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text/chats.json");
    let file: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let config = json!({"bos_token": file["tokens"]["bos_token"],
        "eos_token": {"__type": "AddedToken", "content": file["tokens"]["eos_token"]}});
    let runs = file["runs"].as_array().unwrap();
    assert!(runs.len() >= 19);
    for (index, run) in runs.iter().enumerate() {
        let name = run["template"].as_str().unwrap();
        let source = file["templates"][name].as_str().unwrap();
        let folder =
            folder_with(&[("chat_template.jinja", source), ("tokenizer_config.json", &config.to_string())]);
        let template = ChatTemplate::load(folder.path()).unwrap().unwrap();
        let rendered =
            template.render(run["messages"].as_array().unwrap(), run["extra"].as_object().unwrap());
        match (rendered, run["text"].as_str()) {
            (Ok(text), Some(expected)) => assert_eq!(text, expected, "run {index}, {name}"),
            (Err(ChatError::Render(reason)), None) => {
                assert_eq!(reason, run["refusal"], "run {index}, {name}")
            }
            (rendered, expected) => panic!("run {index}, {name}: {rendered:?} against {expected:?}"),
        }
    }
}

#[test]
fn a_template_is_found_in_each_of_its_places() {
    let text = |files: &[(&str, &str)]| {
        let template = ChatTemplate::load(folder_with(files).path()).unwrap();
        template.map(|template| template.render(&hello(), &Map::new()).unwrap())
    };
    assert_eq!(text(&[]), None);
    assert_eq!(text(&[("tokenizer_config.json", r#"{"bos_token": "<s>"}"#)]), None);
    let config =
        ("tokenizer_config.json", r#"{"bos_token": "<s>", "chat_template": "{{ bos_token }}config"}"#);
    assert_eq!(text(&[config]).unwrap(), "<s>config");
    let json = ("chat_template.json", r#"{"chat_template": "{{ bos_token }}json"}"#);
    assert_eq!(text(&[config, json]).unwrap(), "<s>json");
    assert_eq!(text(&[("chat_template.json", r#""bare""#)]).unwrap(), "bare");
    let jinja = ("chat_template.jinja", "{{ bos_token }}jinja");
    assert_eq!(text(&[config, json, jinja]).unwrap(), "<s>jinja");
    assert_eq!(text(&[jinja]).unwrap(), "jinja", "without tokenizer_config.json the tokens are undefined");
}

#[test]
fn requests_with_tools_use_the_template_for_tools() {
    let config = json!({"chat_template": [
        {"name": "tool_use", "template": "with {{ tools | length }}"}, {"name": "default", "template": "plain"}]});
    let folder = folder_with(&[("tokenizer_config.json", &config.to_string())]);
    let template = ChatTemplate::load(folder.path()).unwrap().unwrap();
    assert_eq!(template.render(&hello(), &Map::new()).unwrap(), "plain");
    let tools = json!({"tools": [{"name": "a"}]});
    assert_eq!(template.render(&hello(), tools.as_object().unwrap()).unwrap(), "with 1");

    let error =
        load_error(&[("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": ""}]}"#)]);
    assert!(error.contains("tokenizer_config.json") && error.contains("it has rag"), "{error}");
}

#[test]
fn malformed_files_are_named() {
    let error = load_error(&[("chat_template.jinja", "a\n{% if x %}")]);
    assert!(error.contains("chat_template.jinja") && error.contains("line 2"), "{error}");
    let error = load_error(&[("chat_template.json", "{")]);
    assert!(error.contains("chat_template.json") && error.contains("not JSON"), "{error}");
    let error = load_error(&[("tokenizer_config.json", r#"{"chat_template": 7}"#)]);
    assert!(error.contains("neither a string nor a list: 7"), "{error}");
}

#[test]
fn failures_say_where_and_why() {
    assert_eq!(
        refusal("{% macro f() %}{{ raise_exception('no ' ~ 'way') }}{% endmacro %}{{ f() }}"),
        "no way"
    );
    let reason = refusal("one\n{{ messages[0].nothing.more }}");
    assert!(reason.contains("undefined") && reason.contains("line 2"), "{reason}");
    let reason = refusal("{{ 'x' | nofilter }}");
    assert!(reason.contains("nofilter"), "{reason}");
}

#[test]
fn a_template_cannot_run_for_ever() {
    let started = std::time::Instant::now();
    let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}";
    let reason = refusal(nested);
    assert!(reason.contains("steps"), "{reason}");
    let reason = refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}");
    assert!(reason.contains("recursion"), "{reason}");
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn templates_can_ask_for_the_time() {
    let text = render("{{ strftime_now('%Y|%d %b %Y|%H:%M') }}").unwrap();
    let parts: Vec<&str> = text.split('|').collect();
    let year: u32 = parts[0].parse().unwrap();
    assert!((2025..2200).contains(&year), "{text}");
    assert!(parts[1].ends_with(parts[0]) && parts[1].split(' ').count() == 3, "{text}");
    assert_eq!(parts[2].len(), 5, "{text}");
    let reason = refusal("{{ strftime_now('%') }}");
    assert!(reason.contains("strftime_now"), "{reason}");
}

#[test]
fn training_marks_leave_the_white_space_around_them() {
    assert_eq!(render("a {%- generation -%} b {%- endgeneration %} c").unwrap(), "ab c");
    assert_eq!(render("a {%generation%}b{% endgeneration %} c").unwrap(), "a b c");
    assert_eq!(
        render("{% set generation = 1 %}{% if generation %}{{ generation }}{% endif %}").unwrap(),
        "1"
    );
}
