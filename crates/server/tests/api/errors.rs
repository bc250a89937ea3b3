//! Refused requests and failing engines.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request as HttpRequest;
use serde_json::{Value, json};
use thunder_server::{ServerConfig, router};

use crate::support::{
    CONTEXT, MODEL, Slot, chat, completion, get, hello, info, post, post_request, scripted,
    scripted_with_tools, send, silent,
};
use crate::tools::{anthropic, tools};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn errors_name_the_wrong_field() {
    let cases = [
        (CHAT, chat(json!({"functions": [{}]})), "functions", json!("unsupported_parameter")),
        (CHAT, chat(json!({"colour": 1})), "colour", json!("unknown_parameter")),
        (CHAT, chat(json!({"model": null})), "model", json!("missing_required_parameter")),
        (
            CHAT,
            chat(json!({"response_format": {"type": "xml"}})),
            "response_format.type",
            json!("unsupported_value"),
        ),
        // The engine makes the following checks.
        (CHAT, chat(json!({"temperature": 3})), "temperature", Value::Null),
        (CHAT, chat(json!({"top_p": 1e300})), "top_p", Value::Null),
        (CHAT, chat(json!({"logit_bias": {"257": 1}})), "logit_bias", Value::Null),
        (COMPLETIONS, completion(json!({"prompt": ""})), "prompt", Value::Null),
        (COMPLETIONS, completion(json!({"prompt": [257]})), "prompt", Value::Null),
        (COMPLETIONS, completion(json!({"echo": true})), "echo", json!("unsupported_value")),
        (COMPLETIONS, completion(json!({"logprobs": true})), "logprobs", json!("invalid_value")),
    ];
    let engine = scripted(hello);
    for (path, body, param, code) in cases {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = stream.into();
            let reply = post(&engine, path, body).await;
            let (message, kind, given, given_code) = reply.error();
            assert_eq!((reply.status.as_u16(), kind.as_str()), (400, "invalid_request_error"), "{message}");
            assert_eq!((given, given_code), (param.into(), code.clone()), "{message}");
        }
    }
}

#[tokio::test]
async fn a_prompt_that_fills_the_context_is_refused() {
    let long = "x".repeat(CONTEXT);
    let body = chat(json!({"messages": [{"role": "user", "content": long}]}));
    for (path, body, param) in
        [(CHAT, body, "messages"), (COMPLETIONS, completion(json!({"prompt": long})), "prompt")]
    {
        let reply = post(&scripted(hello), path, body).await;
        let (message, _, given, code) = reply.error();
        assert_eq!(
            (reply.status.as_u16(), given, code),
            (400, param.into(), json!("context_length_exceeded"))
        );
        assert!(message.contains("64"), "{message}");
    }
}

#[tokio::test]
async fn an_unknown_model_is_not_found() {
    let engine = scripted(hello);
    for reply in
        [post(&engine, CHAT, chat(json!({"model": "gpt-9"}))).await, get(&engine, "/v1/models/gpt-9").await]
    {
        let (message, _, param, code) = reply.error();
        assert_eq!((reply.status.as_u16(), param, code), (404, json!("model"), json!("model_not_found")));
        assert!(message.contains(MODEL), "{message}");
    }
}

#[tokio::test]
async fn chat_is_refused_for_a_model_without_a_template() {
    let (engine, _inbox) =
        thunder_engine::Engine::channel(thunder_engine::ModelInfo { chat_template: None, ..info() }, 1);
    let reply = post(&engine, CHAT, chat(json!({}))).await;
    let (message, _, param, _) = reply.error();
    assert_eq!((reply.status.as_u16(), param), (400, json!("messages")));
    assert!(message.contains("/v1/completions"), "{message}");
}

#[tokio::test]
async fn an_error_in_json_names_line_and_column() {
    let service = router(scripted(hello), ServerConfig::default());
    let deep = "[".repeat(100_000);
    for body in ["", "{", "{\"model\": }", "\u{0}", "[1, 2", "nul", "{\"a\": 1e999}", &deep] {
        let reply = send(service.clone(), post_request(CHAT, body.to_owned())).await;
        let (message, kind, ..) = reply.error();
        assert_eq!((reply.status.as_u16(), kind.as_str()), (400, "invalid_request_error"));
        assert!(message.contains("line 1 column"), "{message}");
    }
    let reply = send(service.clone(), post_request(CHAT, vec![b'"', 0xff, b'"'])).await;
    assert_eq!(reply.status, 400);
    let reply = send(service, post_request(CHAT, "[]")).await;
    assert!(reply.error().0.contains("must be a JSON object"));
}

#[tokio::test]
async fn bodies_too_large_of_another_type_or_too_slow_are_refused() {
    let config = ServerConfig {
        body_limit_bytes: 1000,
        read_timeout: Duration::from_millis(50),
        ..ServerConfig::default()
    };
    let service = router(scripted(hello), config);
    let reply = send(service.clone(), post_request(CHAT, " ".repeat(1001))).await;
    assert_eq!(reply.status, 413);
    assert!(reply.error().0.contains("1000 bytes"));

    let form = HttpRequest::post(CHAT).header("content-type", "text/plain").body(Body::from("{}")).unwrap();
    let reply = send(service.clone(), form).await;
    assert_eq!(reply.status, 415);
    assert!(reply.error().0.contains("application/json"));

    // Without a type, a body is accepted from a program, but not from a page.
    for (header, status) in [("user-agent", 200), ("origin", 415), ("sec-fetch-site", 415)] {
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}]}).to_string();
        let untyped = HttpRequest::post(CHAT).header(header, "null").body(Body::from(body)).unwrap();
        assert_eq!(send(service.clone(), untyped).await.status, status, "{header}");
    }

    let never = futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>();
    let reply = send(service, post_request(CHAT, Body::from_stream(never))).await;
    assert_eq!(reply.status, 408);
    reply.error();
}

#[tokio::test]
async fn unknown_paths_and_methods_have_openais_errors() {
    let engine = scripted(hello);
    for path in ["/v1", "/v1/", "/v1/images", "/v2/models", "/v1//models"] {
        let reply = get(&engine, path).await;
        assert_eq!((reply.status.as_u16(), reply.error().3), (404, json!("unknown_url")), "{path}");
    }
    for (path, method) in [(CHAT, "POST"), (COMPLETIONS, "POST")] {
        let reply = get(&engine, path).await;
        assert_eq!((reply.status.as_u16(), reply.error().3), (405, json!("method_not_allowed")), "{path}");
        assert!(reply.headers["allow"].to_str().unwrap().contains(method));
    }
    assert_eq!(post(&engine, "/health", json!({})).await.status, 405);
}

#[tokio::test]
async fn a_full_queue_says_when_to_retry() {
    let (engine, _inbox) = silent(0);
    for stream in [false, true] {
        let reply = post(&engine, CHAT, chat(json!({"stream": stream}))).await;
        assert_eq!((reply.status.as_u16(), reply.error().3), (429, json!("rate_limit_exceeded")));
        assert_eq!(reply.headers["retry-after"], "1");
    }
}

#[tokio::test]
async fn a_server_without_a_store_has_the_queue_that_is_set() {
    let (engine, _inbox) = silent(1000);
    for (most, n, status) in [(0, 1, 429), (2, 3, 429)] {
        let config = ServerConfig { max_waiting: Some(most), ..ServerConfig::default() };
        let body = chat(json!({"n": n})).to_string();
        let reply = send(router(engine.clone(), config), post_request(CHAT, body)).await;
        assert_eq!(reply.status, status, "{most} may wait, {n} came");
    }
}

#[tokio::test]
async fn if_one_completion_does_not_fit_the_queue_all_are_cancelled() {
    let (engine, mut inbox) = silent(2);
    assert_eq!(post(&engine, CHAT, chat(json!({"n": 3}))).await.status, 429);
    for _ in 0..2 {
        assert!(inbox.submissions.try_recv().unwrap().events.is_closed());
    }
}

#[tokio::test]
async fn a_stopped_engine_is_unavailable_and_health_says_why() {
    let (engine, inbox) = silent(4);
    inbox.stopped.set("rank 1 was lost".into()).unwrap();
    let reply = post(&engine, CHAT, chat(json!({}))).await;
    assert_eq!((reply.status.as_u16(), reply.error().3), (503, json!("engine_stopped")));
    assert!(reply.error().0.contains("rank 1 was lost"));
    let health = get(&engine, "/health").await;
    assert_eq!(health.status, 503);
    assert_eq!(health.json()["status"], "stopped");
    assert_eq!(health.json()["reason"], "rank 1 was lost");
}

#[tokio::test]
async fn a_failure_before_the_first_token_has_an_error_status() {
    let engine = scripted(|slot| slot.fail("rank 1 was lost"));
    for stream in [false, true] {
        let reply = post(&engine, CHAT, chat(json!({"stream": stream}))).await;
        let (message, kind, ..) = reply.error();
        assert_eq!((reply.status.as_u16(), kind.as_str()), (500, "server_error"));
        assert_eq!(message, "rank 1 was lost");
    }
}

#[tokio::test]
async fn a_failure_in_a_stream_ends_it_with_an_error_and_without_done() {
    let engine = scripted(|slot| {
        slot.delta("Hel");
        slot.fail("rank 1 was lost");
    });
    let reply = post(&engine, CHAT, chat(json!({"stream": true}))).await;
    assert_eq!(reply.status, 200);
    let last: Value = serde_json::from_str(reply.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["message"], "rank 1 was lost");
    assert_eq!(last["error"]["type"], "server_error");
    assert!(!reply.text.contains("[DONE]"));
    let whole = post(&engine, CHAT, chat(json!({}))).await;
    assert_eq!(whole.status, 500);
}

#[tokio::test]
async fn an_engine_that_drops_a_request_is_an_error() {
    let engine = scripted(|slot| slot.delta("Hel"));
    let reply = post(&engine, COMPLETIONS, completion(json!({"stream": true}))).await;
    assert!(reply.events().last().unwrap().starts_with("{\"error\":"));
    assert!(!reply.text.contains("[DONE]"));
    assert_eq!(post(&engine, COMPLETIONS, completion(json!({}))).await.status, 500);
}

#[tokio::test]
async fn one_failed_choice_of_several_ends_the_stream() {
    let engine = scripted(|slot| match slot.request.sampling.seed {
        Some(0) => slot.fail("rank 1 was lost"),
        _ => {
            slot.delta("x");
            while !slot.events.is_closed() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    // This returns only if the running choices are cancelled.
    let reply = post(&engine, CHAT, chat(json!({"n": 3, "seed": 0}))).await;
    assert_eq!(reply.status, 500);
}

#[tokio::test]
async fn a_tool_whose_arguments_are_no_object_is_refused() {
    let engine = scripted_with_tools(hello);
    for kind in [json!("array"), json!("string"), json!(["string", "null"])] {
        let schema = json!({"type": kind});
        let of_openai = json!([{"type": "function", "function": {"name": "list", "parameters": schema}}]);
        let flat = json!([{"type": "function", "name": "list", "parameters": schema}]);
        let of_anthropic = json!([{"name": "list", "input_schema": schema}]);
        let messages = json!([{"role": "user", "content": "hi"}]);
        for (path, body) in [
            (CHAT, chat(json!({"tools": of_openai}))),
            ("/v1/responses", json!({"model": MODEL, "input": "hi", "tools": flat})),
            ("/v1/messages", anthropic(json!({"tools": of_anthropic}))),
            ("/api/chat", json!({"model": MODEL, "messages": messages, "tools": of_openai})),
        ] {
            let reply = post(&engine, path, body).await;
            assert_eq!(reply.status, 400, "{path}: {}", reply.text);
            let told = reply.text.contains("the tool \\\"list\\\"") && reply.text.contains("`properties`");
            assert!(told, "{path}: {}", reply.text);
        }
    }
    // One of the types is an object, which the calls use.
    let tool =
        json!([{"type": "function", "function": {"name": "a", "parameters": {"type": ["object", "null"]}}}]);
    assert_eq!(post(&engine, CHAT, chat(json!({"tools": tool}))).await.status, 200);
}

#[tokio::test]
async fn messages_name_the_field_and_the_limit() {
    let long = "a".repeat(129);
    let named = json!([{"type": "function", "function": {"name": long}}]);
    let cases = [
        (CHAT, chat(json!({"tools": named})), "tools[0].function.name", "1 to 128 letters"),
        (
            CHAT,
            chat(json!({"response_format": {"type": "json_schema"}})),
            "response_format.json_schema.schema",
            "response_format.json_schema.schema",
        ),
        (
            CHAT,
            chat(json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}})),
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            CHAT,
            chat(json!({"tools": tools(), "tool_choice": "required", "logprobs": true})),
            "logprobs",
            "without text",
        ),
        ("/v1/embeddings", json!({"model": MODEL, "input": [9999]}), "input", "input is 9999"),
    ];
    for (path, body, param, told) in cases {
        let (message, _, given, _) = post(&scripted_with_tools(hello), path, body).await.error();
        assert_eq!(given, param, "{message}");
        assert!(message.contains(told), "{message}");
    }
}

/// A grammar that cannot continue is an error of the client, in each API's own form.
#[tokio::test]
async fn an_answer_that_its_grammar_ends_is_an_error_of_the_request() {
    let silent = scripted_with_tools(|slot: Slot| slot.fail_by_grammar("it is too complex"));
    let speaking = scripted_with_tools(|slot: Slot| {
        slot.delta("Hel");
        slot.fail_by_grammar("it is too complex");
    });
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        (CHAT, chat(json!({}))),
        (COMPLETIONS, completion(json!({}))),
        ("/v1/responses", json!({"model": MODEL, "input": "hi"})),
        ("/v1/messages", json!({"model": MODEL, "max_tokens": 9, "messages": messages})),
        ("/api/chat", json!({"model": MODEL, "messages": messages})),
    ] {
        for (stream, engine, status) in
            [(false, &silent, 400), (false, &speaking, 400), (true, &silent, 400), (true, &speaking, 200)]
        {
            let mut body = body.clone();
            body["stream"] = stream.into();
            let reply = post(engine, path, body).await;
            assert_eq!(reply.status, status, "{path} {stream}: {}", reply.text);
            assert!(reply.text.contains("it is too complex"), "{path} {stream}: {}", reply.text);
            assert!(
                !reply.text.contains("server_error") && !reply.text.contains("api_error"),
                "{path}: {}",
                reply.text
            );
        }
    }
}
