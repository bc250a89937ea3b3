//! Successful requests to /v1/chat/completions.

use serde_json::{Value, json};

use crate::support::{MODEL, chat, echo, hello, post, scripted};

const PATH: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_response_has_every_field_of_openais() {
    let reply = post(&scripted(hello), PATH, chat(json!({}))).await;
    assert_eq!(reply.status, 200);
    let mut body = reply.json();
    let id = body["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("chatcmpl-"), "{id}");
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    assert!(body["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    for field in ["id", "created", "system_fingerprint"] {
        body.as_object_mut().unwrap().remove(field);
    }
    let expected = json!({
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, wörld", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }],
        // "u:hi|" is five tokens.
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}},
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn response_ids_are_unique() {
    let router = thunder_server::router(scripted(hello), thunder_server::ServerConfig::default());
    let mut ids = Vec::new();
    for _ in 0..2 {
        let request = crate::support::post_request(PATH, chat(json!({})).to_string());
        ids.push(crate::support::send(router.clone(), request).await.json()["id"].clone());
    }
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test]
async fn messages_and_variables_reach_the_template() {
    let messages = json!([
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]},
    ]);
    let body = chat(json!({"messages": messages, "chat_template_kwargs": {"mood": "calm"}}));
    let reply = post(&scripted(echo), PATH, body).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "None s:be brief|u:héllo|calm");
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_short_model_name_or_default_is_accepted_and_the_full_name_returned() {
    for name in [MODEL, "tiny-model", "default"] {
        let reply = post(&scripted(hello), PATH, chat(json!({"model": name}))).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["model"]), (200, &Value::from(MODEL)));
    }
}

#[tokio::test]
async fn a_stream_begins_with_the_role_and_ends_with_the_reason_and_done() {
    let reply = post(&scripted(hello), PATH, chat(json!({"stream": true}))).await;
    assert_eq!(reply.status, 200);
    let chunks = reply.chunks();
    let choices: Vec<_> = chunks.iter().map(|chunk| chunk["choices"].clone()).collect();
    let choice = |delta: Value, reason: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}]);
    let expected = [
        choice(json!({"role": "assistant", "content": ""}), Value::Null),
        choice(json!({"content": "Hello"}), Value::Null),
        choice(json!({"content": ", "}), Value::Null),
        choice(json!({"content": "wörld"}), Value::Null),
        choice(json!({}), json!("stop")),
    ];
    assert_eq!(choices, expected);
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["model"], MODEL);
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk["created"], chunks[0]["created"]);
        assert!(chunk.get("usage").is_none());
    }
}

#[tokio::test]
async fn requested_usage_is_alone_in_the_last_chunk() {
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let mut chunks = post(&scripted(hello), PATH, body).await.chunks();
    let last = chunks.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(
        last["usage"],
        json!({"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}})
    );
    assert!(chunks.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
}

#[tokio::test]
async fn n_completions_have_different_seeds_and_count_the_prompt_once() {
    let body = chat(json!({"n": 3, "seed": 41}));
    let reply = post(&scripted(echo), PATH, body).await.json();
    for index in 0..3 {
        let choice = &reply["choices"][index];
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"]["content"], format!("Some({}) u:hi|", 41 + index));
    }
    assert_eq!(
        reply["usage"],
        json!({"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 0}})
    );
}

#[tokio::test]
async fn n_completions_stream_together_and_end_with_one_done() {
    let body = chat(json!({"n": 3, "seed": 0, "stream": true, "stream_options": {"include_usage": true}}));
    let chunks = post(&scripted(echo), PATH, body).await.chunks();
    for index in 0..3 {
        let chunks: Vec<_> = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index).collect();
        assert_eq!(chunks.len(), 3);
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(chunks[1]["choices"][0]["delta"]["content"], format!("Some({index}) u:hi|"));
        assert_eq!(chunks[2]["choices"][0]["finish_reason"], "length");
    }
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 9);
}

#[tokio::test]
async fn logprobs_have_the_chat_form_with_and_without_streaming() {
    let engine = scripted(|slot| {
        slot.delta("é!");
        slot.done(thunder_engine::FinishReason::Stop, 3);
    });
    let token = |token: &str, byte: u8| {
        let top = json!([{"token": "a", "logprob": -1.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]);
        json!({"token": token, "logprob": -0.25, "bytes": [byte], "top_logprobs": top})
    };
    let expected = json!({"content": [token("\\xc3", 0xc3), token("\\xa9", 0xa9), token("!", b'!')]});
    let asked = json!({"logprobs": true, "top_logprobs": 2});
    assert_eq!(post(&engine, PATH, chat(asked)).await.json()["choices"][0]["logprobs"], expected);
    let asked = json!({"logprobs": true, "top_logprobs": 2, "stream": true});
    assert_eq!(post(&engine, PATH, chat(asked)).await.chunks()[1]["choices"][0]["logprobs"], expected);
    let bare = post(&engine, PATH, chat(json!({"logprobs": true}))).await.json();
    assert_eq!(bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn special_tokens_have_names_and_impossible_tokens_a_finite_logprob() {
    let engine = scripted(|slot| {
        let end = thunder_engine::TokenLogprob {
            id: crate::support::END,
            bytes: Vec::new(),
            logprob: f32::NEG_INFINITY,
            top: Vec::new(),
        };
        slot.send(thunder_engine::Event::Delta { text: String::new(), logprobs: vec![end] });
        slot.done(thunder_engine::FinishReason::Stop, 1);
    });
    let reply = post(&engine, PATH, chat(json!({"logprobs": true}))).await.json();
    let expected = json!([{"token": "<|end|>", "logprob": -9999.0, "bytes": null, "top_logprobs": []}]);
    assert_eq!(reply["choices"][0]["logprobs"]["content"], expected);
}
