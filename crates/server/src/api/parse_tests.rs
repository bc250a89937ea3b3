//! Any request body, even a malformed one, is either accepted or refused with a 400 that names the
//! field.

use axum::http::StatusCode;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use thunder_engine::Sampling;

use thunder_engine::Grammar;
use thunder_model::chat::{Message, Role, ToolCall};

use super::Api;
use super::chat::Chat;
use super::completions::Completions;
use super::messages::Messages;
use super::ollama::{OllamaChat, OllamaGenerate};
use super::responses::Responses;
use crate::error::ApiError;
use crate::generate::{Generation, Input, Prompt, ToolChoice};

const FIELDS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "n",
    "stop",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "logprobs",
    "top_logprobs",
    "user",
    "metadata",
    "store",
    "ignore_eos",
    "tools",
    "echo",
    "best_of",
    "suffix",
    "response_format",
    "modalities",
    "service_tier",
    "chat_template_kwargs",
    "tool_choice",
    "role",
    "content",
    "type",
    "text",
    "name",
    "include_usage",
    "add_generation_prompt",
    "system",
    "input",
    "instructions",
    "call_id",
    "arguments",
    "output",
    "thinking",
    "stop_sequences",
    "input_schema",
    "parameters",
    "function",
    "tool_calls",
    "tool_call_id",
    "tool_use_id",
    "options",
    "format",
    "think",
    "guided_choice",
    "guided_json",
    "schema",
    "json_schema",
];

fn field() -> impl Strategy<Value = String> {
    prop_oneof![8 => proptest::sample::select(FIELDS).prop_map(str::to_owned), 1 => ".{0,6}"]
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0..20).prop_map(Value::from),
        proptest::sample::select(&["user", "system", "tool", "text", "image_url", "auto", ""][..])
            .prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::vec((field(), inner), 0..8)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// A valid body with a few fields replaced, so that parsing gets past the first field.
fn body() -> impl Strategy<Value = Value> {
    let right = json!({
        "model": "default", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "prompt": "hi",
    });
    proptest::collection::vec((field(), json_value()), 0..4).prop_map(move |pairs| {
        let mut body = right.clone();
        if let Value::Object(fields) = &mut body {
            fields.extend(pairs);
        }
        body
    })
}

fn check<T>(result: Result<T, ApiError>) -> Result<(), TestCaseError> {
    if let Err(error) = result {
        prop_assert_eq!(error.status, StatusCode::BAD_REQUEST);
        prop_assert_eq!(error.error_type, "invalid_request_error");
        prop_assert!(!error.message.is_empty() && error.message.len() < 1000, "{}", error.message);
    }
    Ok(())
}

fn without(mut body: Value, field: &str) -> Value {
    if let Value::Object(fields) = &mut body {
        fields.remove(field);
    }
    body
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_json_is_accepted_or_refused_with_400(value in json_value()) {
        check(Chat::parse(value.clone(), &Sampling::default()))?;
        check(Completions::parse(value.clone(), &Sampling::default()))?;
        check(Messages::parse(value.clone(), &Sampling::default()))?;
        check(Responses::parse(value.clone(), &Sampling::default()))?;
        check(OllamaChat::parse(value.clone(), &Sampling::default()))?;
        check(OllamaGenerate::parse(value, &Sampling::default()))?;
    }

    #[test]
    fn nearly_valid_bodies_are_accepted_or_refused_with_400(body in body()) {
        check(Chat::parse(without(body.clone(), "prompt"), &Sampling::default()))?;
        check(Messages::parse(without(body.clone(), "prompt"), &Sampling::default()))?;
        check(OllamaChat::parse(without(body.clone(), "prompt"), &Sampling::default()))?;
        let mut response = without(without(body.clone(), "prompt"), "max_tokens");
        if let Some(messages) = response.as_object_mut().and_then(|fields| fields.remove("messages")) {
            response["input"] = messages;
        }
        check(Responses::parse(response, &Sampling::default()))?;
        check(Completions::parse(without(body, "messages"), &Sampling::default()))?;
    }

    /// No field is ignored: an unknown field is refused by name.
    #[test]
    fn unknown_fields_are_refused_by_name(name in "x_[a-z]{1,12}", value in json_value()) {
        prop_assume!(!value.is_null());
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], &name: value});
        let error = Chat::parse(body, &Sampling::default()).expect_err("the field is unknown");
        prop_assert_eq!(error.param, Some(name.clone()));
        prop_assert!(error.message.contains(&name));
    }
}

fn chat(extra: Value) -> Result<Generation, ApiError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    if let (Value::Object(fields), Value::Object(extra)) = (&mut body, extra) {
        fields.extend(extra);
    }
    let defaults = Sampling { temperature: 0.7, top_k: 20, ..Sampling::default() };
    Chat::parse(body, &defaults).map(|(generation, _)| generation)
}

#[test]
fn absent_fields_come_from_the_models_defaults() {
    let options = chat(json!({"top_k": -1, "min_p": 0.1, "temperature": null})).unwrap().options;
    assert_eq!(options.sampling, Sampling { temperature: 0.7, top_k: 0, min_p: 0.1, ..Sampling::default() });
    assert_eq!((options.n, options.max_tokens, options.stream), (1, None, false));
}

#[test]
fn every_sampling_field_reaches_the_engine() {
    let given = json!({
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"5": -100, "6": 1.5}, "seed": -1,
        "stop": ["a", "b"], "max_completion_tokens": 9, "ignore_eos": true, "logprobs": true, "top_logprobs": 3,
    });
    let parsed = chat(given).unwrap();
    let request = parsed.options.request(vec![1], 2, parsed.logprobs);
    let expected = Sampling {
        temperature: 0.5,
        top_p: 0.25,
        top_k: 7,
        min_p: 0.125,
        repetition_penalty: 1.5,
        presence_penalty: -1.0,
        frequency_penalty: 2.0,
        logit_bias: vec![(5, -100.0), (6, 1.5)],
        seed: Some(1),
    };
    assert_eq!(request.sampling, expected);
    assert_eq!((request.stop, request.max_tokens), (vec!["a".to_owned(), "b".to_owned()], Some(9)));
    assert!(request.ignore_eos);
    assert_eq!(request.logprobs, Some(3));
}

#[test]
fn unsupported_fields_are_refused_by_name() {
    let refused = json!({
        "tools": 1, "functions": [{}], "tool_choice": "perhaps", "function_call": {"name": "f"}, "audio": {},
        "parallel_tool_calls": "yes", "prediction": "x", "keep_alive": [], "reasoning_effort": 3, "service_tier": 1, "store": "x",
        "echo": true, "best_of": 2, "suffix": "x", "response_format": 1, "guided_choice": [], "guided_json": "x",
        "modalities": ["text", "audio"], "verbosity": 1, "web_search_options": {}, "add_generation_prompt": false,
        "n": 0, "top_logprobs": 2, "logprobs": 5, "stop": [""], "stream_options": {"include_usage": true},
        "seed": 0.5, "temperature": "hot", "logit_bias": {"word": 1}, "user": 7, "metadata": "x", "max_tokens": 0,
        "top_k": -2, "cache_prompt": 1, "max_completion_tokens": 0,
    });
    for (name, value) in refused.as_object().unwrap() {
        let error = chat(json!({name: value})).expect_err(name);
        assert_eq!(error.param.as_deref(), Some(name.as_str()), "{error}");
        assert!(error.message.contains(name.as_str()), "{error}");
    }
    let biases: Map<String, Value> = (0..5000).map(|id: u32| (id.to_string(), json!(1))).collect();
    for (name, value) in [("stop", json!("x".repeat(1025))), ("logit_bias", biases.into())] {
        assert_eq!(chat(json!({name: value})).expect_err(name).param.as_deref(), Some(name));
    }
}

#[test]
fn values_that_ask_for_the_default_behaviour_are_accepted() {
    let neutral = json!({
        "response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "auto", "store": true,
        "service_tier": "flex", "tools": [], "functions": [], "function_call": "none", "parallel_tool_calls": true,
        "verbosity": "low", "keep_alive": "5m",
        "cache_prompt": true, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "top_logprobs": 0, "logprobs": false, "user": "u", "metadata": {"a": "b"}, "stop": null,
    });
    assert_eq!(chat(neutral).unwrap(), chat(json!({})).unwrap());
    for (older, newer) in [(5, 9), (9, 5)] {
        let both = chat(json!({"max_tokens": older, "max_completion_tokens": newer})).unwrap();
        assert_eq!(both.options.max_tokens, Some(5), "the smaller limit holds");
    }
    let body = json!({"model": "m", "prompt": "p", "n": 2, "best_of": 2, "echo": false, "suffix": null});
    assert_eq!(Completions::parse(body, &Sampling::default()).unwrap().0.options.n, 2);
}

#[test]
fn messages_are_converted_to_a_role_and_one_text() {
    let messages = json!([
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": null, "tool_calls": [], "annotations": []},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
        ]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]);
    let arguments = Map::from_iter([("a".to_owned(), json!(1))]);
    let call = ToolCall { id: "1".into(), name: "f".into(), arguments };
    let expected = vec![
        Message { name: Some("boss".into()), ..Message::new(Role::System, "be brief") },
        Message::new(Role::User, "ab"),
        Message::new(Role::Assistant, "c"),
        Message { calls: vec![call], reasoning: Some("hm".into()), ..Message::new(Role::Assistant, "") },
        Message { call_id: Some("1".into()), ..Message::new(Role::Tool, "done") },
    ];
    assert_eq!(chat(json!({"messages": messages})).unwrap().input, Input::Chat(expected.clone()));

    let anthropic = json!({
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "be brief", "cache_control": {}}],
        "messages": [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "done"}]},
        ],
    });
    let mut same = expected;
    same[0].name = None;
    let (generation, _) = Messages::parse(anthropic, &Sampling::default()).unwrap();
    assert_eq!(generation.input, Input::Chat(same));
}

#[test]
fn tools_and_formats_reach_the_generation() {
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}});
    let named = json!({"type": "function", "function": {"name": "f"}});
    let parsed = chat(json!({"tools": [tool], "tool_choice": named, "parallel_tool_calls": false})).unwrap();
    assert_eq!((parsed.tools.choice, parsed.tools.parallel), (ToolChoice::Named("f".into()), false));
    let schema = json!({"type": "object", "properties": {"a": {}}});
    assert_eq!(parsed.tools.tools[0].parameters["properties"], schema["properties"]);
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
    let grammars = [
        (json!({"response_format": format}), Grammar::JsonSchema(schema.clone())),
        (json!({"response_format": {"type": "json_object"}}), Grammar::JsonSchema(json!({"type": "object"}))),
        (json!({"guided_json": schema.to_string()}), Grammar::JsonSchema(schema.clone())),
        (json!({"guided_regex": "a+"}), Grammar::Regex("a+".into())),
        (json!({"guided_choice": ["a", "b\n"]}), Grammar::Lark("start: \"a\" | \"b\\n\"".into())),
    ];
    for (given, expected) in grammars {
        let (field, grammar) = chat(given.clone()).unwrap().grammar.unwrap();
        assert_eq!(grammar, expected);
        assert!(given.get(field).is_some(), "{field} is not in {given}");
    }
    let bad = json!({"guided_regex": "a", "guided_choice": ["b"]});
    assert_eq!(chat(bad).unwrap_err().param.as_deref(), Some("guided_choice"));
    let ollama = json!({"model": "m:latest", "messages": [{"role": "user", "content": "x"}], "format": schema,
                        "options": {"num_predict": 7, "repeat_penalty": 1.5, "num_ctx": 99}, "think": false});
    let (ollama, _) = OllamaChat::parse(ollama, &Sampling::default()).unwrap();
    assert_eq!((ollama.options.model.as_str(), ollama.options.max_tokens), ("m", Some(7)));
    assert_eq!((ollama.options.sampling.repetition_penalty, ollama.options.stream), (1.5, true));
    assert_eq!(
        (ollama.thinking.enabled, ollama.grammar),
        (Some(false), Some(("format", Grammar::JsonSchema(schema))))
    );
}

#[test]
fn errors_in_tools_name_the_path() {
    let tool = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let cases = [
        (json!({"tools": [{}]}), "tools[0].type"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (tool(json!({})), "tools[0].function.name"),
        (tool(json!({"name": "a b"})), "tools[0].function.name"),
        (tool(json!({"name": "f", "parameters": 1})), "tools[0].function.parameters"),
        (tool(json!({"name": "f", "mood": 1})), "tools[0].function.mood"),
        (json!({"tools": vec![json!({"type": "function", "function": {"name": "f"}}); 2]}), "tools[1]"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
        (json!({"reasoning_effort": "huge"}), "reasoning_effort"),
    ];
    for (given, param) in cases {
        let error = chat(given).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
}

#[test]
fn errors_in_messages_name_the_path() {
    let cases = [
        (json!([]), "messages"),
        (vec![json!({"role": "user", "content": ""}); 5000].into(), "messages"),
        (json!("hi"), "messages"),
        (json!(["hi"]), "messages[0]"),
        (json!([{"content": "hi"}]), "messages[0].role"),
        (json!([{"role": "king", "content": "hi"}]), "messages[0].role"),
        (json!([{"role": "tool", "content": "hi"}]), "messages[0].tool_call_id"),
        (json!([{"role": "user", "content": "hi", "tool_call_id": "1"}]), "messages[0].tool_call_id"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (json!([{"role": "user", "content": []}]), "messages[0].content"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].type",
        ),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (json!([{"role": "user", "content": "hi", "mood": "good"}]), "messages[0].mood"),
        (json!([{"role": "assistant", "content": "x", "tool_calls": [{}]}]), "messages[0].tool_calls[0].id"),
    ];
    for (messages, param) in cases {
        let error = chat(json!({"messages": messages})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
}

#[test]
fn prompts_of_every_form_are_accepted_and_others_refused() {
    let parse = |prompt: Value| -> Result<Generation, ApiError> {
        let body = Map::from_iter([("model".to_owned(), json!("m")), ("prompt".to_owned(), prompt)]);
        Completions::parse(body.into(), &Sampling::default()).map(|(generation, _)| generation)
    };
    for (prompt, count) in
        [(json!("a"), 1), (json!(["a", "b"]), 2), (json!([1, 2]), 1), (json!([[1], [2], [3]]), 3)]
    {
        let parsed = parse(prompt).unwrap();
        let Input::Prompts(prompts) = &parsed.input else { panic!("no prompts") };
        assert!(prompts.iter().all(|prompt| matches!(prompt, Prompt::Text(_) | Prompt::Ids(_))));
        assert_eq!((prompts.len(), parsed.options.max_tokens), (count, Some(16)));
    }
    for (prompt, param) in [
        (json!(null), "prompt"),
        (json!([]), "prompt"),
        (json!(5), "prompt"),
        (json!([1, "a"]), "prompt[1]"),
        (json!([1, -1]), "prompt[1]"),
        (json!([4294967296u64]), "prompt[0]"),
        (json!(["a", 1]), "prompt[1]"),
        (json!([["a"]]), "prompt[0][0]"),
    ] {
        assert_eq!(parse(prompt).unwrap_err().param.as_deref(), Some(param));
    }
    let many = json!({"model": "m", "prompt": vec!["a"; 65], "n": 2});
    assert_eq!(Completions::parse(many, &Sampling::default()).unwrap_err().param.as_deref(), Some("n"));
}
