//! Any request body, however malformed, is accepted or refused with a 400 that names the field.

use axum::http::StatusCode;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use thunder_engine::Sampling;

use super::GenerateRequest;
use super::chat::ChatRequest;
use super::completions::CompletionRequest;
use crate::error::ApiError;

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
        "model": "default", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "prompt": "hi",
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
        check(ChatRequest::parse(value.clone(), &Sampling::default()))?;
        check(CompletionRequest::parse(value, &Sampling::default()))?;
    }

    #[test]
    fn nearly_valid_bodies_are_accepted_or_refused_with_400(body in body()) {
        check(ChatRequest::parse(without(body.clone(), "prompt"), &Sampling::default()))?;
        check(CompletionRequest::parse(without(body, "messages"), &Sampling::default()))?;
    }

    /// No field is ignored: an unknown field is refused by name.
    #[test]
    fn unknown_fields_are_refused_by_name(name in "x_[a-z]{1,12}", value in json_value()) {
        prop_assume!(!value.is_null());
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], &name: value});
        let error = ChatRequest::parse(body, &Sampling::default()).expect_err("the field is unknown");
        prop_assert_eq!(error.param, Some(name.clone()));
        prop_assert!(error.message.contains(&name));
    }
}

fn chat(extra: Value) -> Result<ChatRequest, ApiError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    if let (Value::Object(fields), Value::Object(extra)) = (&mut body, extra) {
        fields.extend(extra);
    }
    ChatRequest::parse(body, &Sampling { temperature: 0.7, top_k: 20, ..Sampling::default() })
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
        "tools": [{}], "functions": [{}], "tool_choice": "required", "function_call": {"name": "f"}, "audio": {},
        "parallel_tool_calls": "yes", "prediction": "x", "reasoning_effort": 3, "service_tier": 1, "store": "x",
        "echo": true, "best_of": 2, "suffix": "x", "response_format": {"type": "json_object"},
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
        "reasoning_effort": "high", "verbosity": "low", "prediction": {"type": "content"}, "keep_alive": "5m",
        "cache_prompt": true, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "top_logprobs": 0, "logprobs": false, "user": "u", "metadata": {"a": "b"}, "stop": null,
    });
    assert_eq!(chat(neutral).unwrap(), chat(json!({})).unwrap());
    for (older, newer) in [(5, 9), (9, 5)] {
        let both = chat(json!({"max_tokens": older, "max_completion_tokens": newer})).unwrap();
        assert_eq!(both.options.max_tokens, Some(5), "the smaller limit holds");
    }
    let body = json!({"model": "m", "prompt": "p", "n": 2, "best_of": 2, "echo": false, "suffix": null});
    assert_eq!(CompletionRequest::parse(body, &Sampling::default()).unwrap().options.n, 2);
}

#[test]
fn messages_are_converted_to_a_role_and_one_text() {
    let messages = json!([
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": null, "tool_calls": [], "annotations": []},
    ]);
    let plain = json!([
        {"role": "system", "content": "be brief", "name": "boss"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]);
    assert_eq!(Value::from(chat(json!({"messages": messages})).unwrap().messages), plain);
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
        (json!([{"role": "tool", "content": "hi", "tool_call_id": "1"}]), "messages[0].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (json!([{"role": "user", "content": []}]), "messages[0].content"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].type",
        ),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (json!([{"role": "user", "content": "hi", "mood": "good"}]), "messages[0].mood"),
        (json!([{"role": "assistant", "content": "x", "tool_calls": [{}]}]), "messages[0].tool_calls"),
    ];
    for (messages, param) in cases {
        let error = chat(json!({"messages": messages})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
}

#[test]
fn prompts_of_every_form_are_accepted_and_others_refused() {
    let parse = |prompt: Value| {
        let body = Map::from_iter([("model".to_owned(), json!("m")), ("prompt".to_owned(), prompt)]);
        CompletionRequest::parse(body.into(), &Sampling::default())
    };
    for (prompt, count) in
        [(json!("a"), 1), (json!(["a", "b"]), 2), (json!([1, 2]), 1), (json!([[1], [2], [3]]), 3)]
    {
        let parsed = parse(prompt).unwrap();
        assert_eq!((parsed.prompts.len(), parsed.options.max_tokens), (count, Some(16)));
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
    assert_eq!(CompletionRequest::parse(many, &Sampling::default()).unwrap_err().param.as_deref(), Some("n"));
}
