//! Unsupported fields and values that would change an answer are refused by name; accepted ones
//! take effect.

use axum::body::Body;
use axum::http::Request as HttpRequest;
use serde_json::{Value, json};
use thunder_engine::{Event, FinishReason, Predicted, Usage};
use thunder_server::{ServerConfig, router};

use crate::support::{Slot, anything, chat, get, hello, post, scripted_with_tools, send};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// A body of this endpoint, with the fields of `more`.
fn body(path: &str, more: Value) -> Value {
    let mut body = match path {
        RESPONSES | "/api/embed" => json!({"model": "default", "input": "hi"}),
        "/api/generate" => json!({"model": "default", "prompt": "hi", "stream": false}),
        "/api/chat" => {
            json!({"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": false})
        }
        _ => chat(json!({"max_tokens": 2000})),
    };
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn wrong_types_and_unknown_values_are_refused_by_name() {
    let edit = |edit: Value| json!({"context_management": {"edits": [edit]}});
    let cases = [
        (CHAT, json!({"prediction": {"foo": [1]}}), "prediction.type"),
        (CHAT, json!({"prediction": {"type": "content"}}), "prediction.content"),
        (CHAT, json!({"prediction": {"type": "content", "content": 5}}), "prediction.content"),
        (CHAT, json!({"prediction": {"type": "content", "content": "x", "foo": 1}}), "prediction.foo"),
        (CHAT, json!({"verbosity": "banana"}), "verbosity"),
        (CHAT, json!({"service_tier": "banana"}), "service_tier"),
        (CHAT, json!({"prompt_cache_retention": "1y"}), "prompt_cache_retention"),
        (CHAT, json!({"keep_alive": [1]}), "keep_alive"),
        (CHAT, json!({"tool_choice": {"type": "function", "name": "f", "foo": 1}}), "tool_choice.foo"),
        (RESPONSES, json!({"include": {"a": 1}}), "include"),
        (RESPONSES, json!({"include": ["banana"]}), "include"),
        (RESPONSES, json!({"top_logprobs": 2}), "top_logprobs"),
        (RESPONSES, json!({"stream": true, "stream_options": {"foo": 1}}), "stream_options.foo"),
        (RESPONSES, json!({"reasoning": {"summary": [1]}}), "reasoning.summary"),
        (RESPONSES, json!({"text": {"verbosity": "banana"}}), "text.verbosity"),
        (RESPONSES, json!({"service_tier": "banana"}), "service_tier"),
        (RESPONSES, json!({"tools": [{"type": "banana"}]}), "tools[0].type"),
        (RESPONSES, json!({"tool_choice": {"type": "web_search"}}), "tool_choice.type"),
        (RESPONSES, json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tool_choice"),
        (MESSAGES, edit(json!({"type": "clear_tool_uses_20250919"})), "context_management.edits[0].type"),
        (MESSAGES, json!({"context_management": {"foo": 1}}), "context_management.foo"),
        (MESSAGES, json!({"betas": 5}), "betas"),
        (MESSAGES, json!({"output_config": {"effort": "banana"}}), "output_config.effort"),
        (MESSAGES, json!({"temperature": 2}), "temperature"),
        (MESSAGES, json!({"thinking": {"type": "enabled", "budget_tokens": 1}}), "thinking.budget_tokens"),
        (MESSAGES, json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}), "thinking.budget_tokens"),
        (MESSAGES, json!({"thinking": {"type": "enabled", "display": 1}}), "thinking.display"),
        (MESSAGES, json!({"metadata": {"foo": 1}}), "metadata.foo"),
        (MESSAGES, json!({"service_tier": "flex"}), "service_tier"),
        (MESSAGES, json!({"cache_control": {"type": "eternal"}}), "cache_control.type"),
        ("/api/embed", json!({"options": {"bogus": 1}}), "options.bogus"),
        ("/api/embed", json!({"keep_alive": true}), "keep_alive"),
        ("/api/chat", json!({"options": {"num_ctx": "x"}}), "options.num_ctx"),
        ("/api/chat", json!({"options": {"num_ctx": 10_000_000}}), "options.num_ctx"),
        ("/api/chat", json!({"options": {"num_thread": "x"}}), "options.num_thread"),
        ("/api/chat", json!({"options": {"use_mmap": 2}}), "options.use_mmap"),
        ("/api/chat", json!({"keep_alive": "soon"}), "keep_alive"),
        (
            "/api/chat",
            json!({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}),
            "options.repeat_last_n",
        ),
        ("/api/generate", json!({"raw": true, "system": "be brief"}), "system"),
    ];
    let engine = scripted_with_tools(anything);
    for (path, more, name) in cases {
        let reply = post(&engine, path, body(path, more)).await;
        assert_eq!(reply.status, 400, "{path} {name}: {}", reply.text);
        assert!(reply.text.contains(&format!("`{name}`")), "{path} {name}: {}", reply.text);
        if path.starts_with("/v1/") && path != MESSAGES {
            assert_eq!(reply.error().2, name, "{}", reply.text);
        }
    }
}

#[tokio::test]
async fn what_official_clients_send_is_taken() {
    let cases = [
        (CHAT, json!({"verbosity": "low", "service_tier": "priority", "keep_alive": -1})),
        // Codex.
        (
            RESPONSES,
            json!({
                "include": ["reasoning.encrypted_content"], "store": false, "parallel_tool_calls": false,
                "prompt_cache_key": "k", "client_metadata": {"x": "y"}, "text": {"verbosity": "low"},
                "reasoning": {"effort": "medium", "summary": "auto"},
                "tools": [{"type": "web_search", "external_web_access": false}, {"type": "local_shell"}],
                "tool_choice": "auto",
            }),
        ),
        // Claude Code.
        (
            MESSAGES,
            json!({
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "thinking": {"type": "enabled", "budget_tokens": 1999}, "metadata": {"user_id": "u"},
                "temperature": 1, "output_config": {"effort": "medium"},
            }),
        ),
        ("/api/embed", json!({"options": {"num_ctx": 2048, "temperature": 0.5}, "keep_alive": "10m"})),
        (
            "/api/chat",
            json!({"options": {"repeat_last_n": 64, "num_predict": 0, "num_gpu": -1, "repeat_penalty": 1}}),
        ),
        ("/api/chat", json!({"keep_alive": "1h30m"})),
    ];
    let engine = scripted_with_tools(anything);
    for (path, more) in cases {
        let reply = post(&engine, path, body(path, more)).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text);
    }
}

#[tokio::test]
async fn a_prediction_reaches_the_engine_and_is_accounted_for() {
    let script = |slot: Slot| {
        let predicted: Vec<u8> = slot.request.predicted.iter().map(|&id| id as u8).collect();
        slot.delta(std::str::from_utf8(&predicted).unwrap());
        let predicted = (!predicted.is_empty()).then_some(Predicted { right: 3, wrong: 2 });
        let usage = Usage { completion_tokens: 5, predicted, ..Usage::default() };
        slot.send(Event::Done { reason: FinishReason::Stop, usage });
    };
    let engine = scripted_with_tools(script);
    let parts = json!([{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]);
    for content in [json!("hello"), parts] {
        let more = json!({"prediction": {"type": "content", "content": content}, "n": 2});
        let reply = post(&engine, CHAT, chat(more)).await.json();
        assert_eq!(reply["choices"][1]["message"]["content"], "hello");
        let expected = json!({"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4});
        assert_eq!(reply["usage"]["completion_tokens_details"], expected);
    }
    let reply = post(&engine, CHAT, chat(json!({}))).await.json();
    assert!(reply["usage"]["completion_tokens_details"].is_null(), "{reply}");
}

#[tokio::test]
async fn responses_give_log_probabilities_when_they_are_included() {
    let engine = scripted_with_tools(hello);
    let wanted = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let reply = post(&engine, RESPONSES, body(RESPONSES, wanted.clone())).await.json();
    let content = &reply["output"][0]["content"][0];
    let tokens = content["logprobs"].as_array().unwrap();
    let text: String = tokens.iter().take(5).map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!((text.as_str(), tokens[0]["top_logprobs"].as_array().map(Vec::len)), ("Hello", Some(2)));
    let mut streamed = body(RESPONSES, wanted);
    streamed["stream"] = true.into();
    let stream = post(&engine, RESPONSES, streamed).await.text;
    let events: Vec<Value> = stream
        .trim_end()
        .split("\n\n")
        .map(|event| serde_json::from_str(event.split_once("data: ").unwrap().1).unwrap())
        .collect();
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
    let in_deltas: usize = of("response.output_text.delta")
        .iter()
        .map(|event| event["logprobs"].as_array().unwrap().len())
        .sum();
    assert_eq!(in_deltas, tokens.len());
    assert_eq!(of("response.output_text.done")[0]["logprobs"], content["logprobs"]);
    let last = &of("response.completed")[0]["response"]["output"][0]["content"][0];
    assert_eq!(last["logprobs"], content["logprobs"]);
    let without = post(&engine, RESPONSES, body(RESPONSES, json!({}))).await.json();
    assert_eq!(without["output"][0]["content"][0]["logprobs"], json!([]));
}

#[tokio::test]
async fn thinking_of_earlier_turns_is_cleared_as_asked() {
    let said = |slot: Slot| {
        let prompt: Vec<u8> = slot.request.prompt.iter().map(|&id| id as u8).collect();
        slot.delta(&String::from_utf8_lossy(&prompt));
        slot.done(FinishReason::Stop, 1);
    };
    let template = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}";
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("tokenizer_config.json"),
        json!({"chat_template": template}).to_string(),
    )
    .unwrap();
    let template = thunder_model::chat::ChatTemplate::load(folder.path()).unwrap().map(std::sync::Arc::new);
    let info = thunder_engine::ModelInfo { chat_template: template, ..crate::support::info() };
    let engine = crate::support::scripted_with(info, said);
    let thought = |text: &str| json!({"type": "thinking", "thinking": text, "signature": ""});
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [thought("1"), {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
        {"role": "assistant", "content": [thought("2"), {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [thought("3"), {"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]);
    let turns = |value: u32| json!({"type": "thinking_turns", "value": value});
    for (keep, left) in [(json!("all"), "123"), (Value::Null, "3"), (turns(1), "3"), (turns(2), "123")] {
        let edits = json!([{"type": "clear_thinking_20251015", "keep": keep}]);
        let body = json!({"model": "default", "max_tokens": 9, "messages": messages,
                          "context_management": {"edits": edits}});
        let reply = post(&engine, MESSAGES, body).await.json();
        let text = reply["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}"));
        assert_eq!(text.replace("none", ""), left, "{reply}");
    }
}

#[tokio::test]
async fn malformed_paths_are_refused_in_the_apis_form() {
    let engine = scripted_with_tools(anything);
    for (method, path) in
        [("GET", "/v1/responses/%ff"), ("DELETE", "/v1/responses/%ff"), ("GET", "/v1/models/%ff")]
    {
        let request = HttpRequest::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let reply = send(router(engine.clone(), ServerConfig::default()), request).await;
        assert_eq!(reply.status, 400);
        assert_eq!(reply.error().3, "invalid_url", "{}", reply.text);
    }
}

#[tokio::test]
async fn models_are_described_in_each_apis_form() {
    let engine = scripted_with_tools(anything);
    let list = get(&engine, "/v1/models").await.json();
    let model = &list["data"][0];
    assert_eq!((&model["type"], &model["display_name"]), (&json!("model"), &model["id"]));
    assert!(model["created_at"].as_str().unwrap().ends_with('Z'), "{model}");
    assert_eq!((&list["has_more"], &list["first_id"]), (&json!(false), &model["id"]));
    for path in ["/api/tags", "/api/ps"] {
        let entry = get(&engine, path).await.json()["models"][0].clone();
        let details = &entry["details"];
        assert_eq!(entry["size"], 4_500_000_000u64);
        assert_eq!((&details["family"], &details["parameter_size"]), (&json!("qwen3"), &json!("8.0B")));
        assert_eq!(details["quantization_level"], "Q4");
    }
    for (path, prompt) in [("/api/chat", "messages"), ("/api/generate", "prompt")] {
        for (keep_alive, reason) in [(json!("5m"), "load"), (json!(0), "unload"), (json!("0s"), "unload")] {
            let mut body = body(path, json!({"keep_alive": keep_alive}));
            body.as_object_mut().unwrap().remove(prompt);
            let reply = post(&engine, path, body).await.json();
            assert_eq!(reply["done_reason"], reason, "{reply}");
        }
    }
}

#[tokio::test]
async fn ollama_gives_log_probabilities() {
    let engine = scripted_with_tools(hello);
    let reply =
        post(&engine, "/api/chat", body("/api/chat", json!({"logprobs": true, "top_logprobs": 1}))).await;
    let tokens = reply.json()["logprobs"].clone();
    assert_eq!(tokens[0]["token"], "H");
    assert_eq!(tokens[0]["top_logprobs"].as_array().map(Vec::len), Some(1));
    let streamed = json!({"logprobs": true, "stream": true});
    let reply = post(&engine, "/api/generate", body("/api/generate", streamed)).await;
    let first: Value = serde_json::from_str(reply.text.lines().next().unwrap()).unwrap();
    assert_eq!(first["logprobs"].as_array().map(Vec::len), Some(5), "{first}");
}
