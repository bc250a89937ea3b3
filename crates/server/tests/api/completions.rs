//! Successful requests to /v1/completions.

use serde_json::{Value, json};
use thunder_engine::{Event, FinishReason, TokenLogprob};

use crate::support::{MODEL, completion, echo, hello, post, scripted};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_response_has_every_field_of_openais() {
    let mut body = post(&scripted(hello), PATH, completion(json!({}))).await.json();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    for field in ["id", "created", "system_fingerprint"] {
        assert!(body.as_object_mut().unwrap().remove(field).is_some());
    }
    let expected = json!({
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"text": "Hello, wörld", "index": 0, "logprobs": null, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}},
    });
    assert_eq!(body, expected);
}

#[tokio::test]
async fn choices_follow_the_order_of_the_prompts_in_every_form() {
    let cases = [
        (json!("ab"), vec!["ab"]),
        (json!([97, 98]), vec!["ab"]),
        (json!(["ab", "c"]), vec!["ab", "c"]),
        (json!([[97], [98, 99]]), vec!["a", "bc"]),
    ];
    for (prompt, prompts) in cases {
        let body = completion(json!({"prompt": prompt, "n": 2, "seed": 7}));
        let reply = post(&scripted(echo), PATH, body).await.json();
        let texts: Vec<_> =
            reply["choices"].as_array().unwrap().iter().map(|choice| choice["text"].clone()).collect();
        let expected: Vec<_> = prompts
            .iter()
            .flat_map(|text| [7, 8].map(|seed| Value::from(format!("Some({seed}) {text}"))))
            .collect();
        assert_eq!(texts, expected);
        assert_eq!(reply["usage"]["prompt_tokens"], prompts.concat().len());
    }
}

#[tokio::test]
async fn a_stream_ends_with_the_reason_and_done() {
    let body = completion(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let chunks = post(&scripted(hello), PATH, body).await.chunks();
    let texts: Vec<_> = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(texts, ["Hello", ", ", "wörld", ""]);
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks[4]["usage"]["total_tokens"], 6);
    assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion"));
}

#[tokio::test]
async fn logprob_offsets_count_characters_across_chunks() {
    let engine = scripted(|slot| {
        let token = |bytes: &[u8]| TokenLogprob {
            id: 0,
            bytes: bytes.to_vec(),
            logprob: -0.5,
            top: vec![(120, b"x".to_vec(), -0.75)],
        };
        slot.send(Event::Delta {
            text: "né".into(),
            logprobs: vec![token("né".as_bytes()), token(b"\xe2\x82")],
        });
        slot.send(Event::Delta { text: "€!x".into(), logprobs: vec![token(b"\xac!"), token(b"x")] });
        slot.done(FinishReason::Length, 4);
    });
    let expected = json!({
        "tokens": ["né", "bytes:\\xe2\\x82", "bytes:\\xac\\x21", "x"],
        "token_logprobs": [-0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [
            {"x": -0.75, "né": -0.5}, {"x": -0.75, "bytes:\\xe2\\x82": -0.5},
            {"x": -0.75, "bytes:\\xac\\x21": -0.5}, {"x": -0.5},
        ],
        "text_offset": [0, 2, 2, 4],
    });
    let whole = post(&engine, PATH, completion(json!({"logprobs": 1}))).await.json();
    assert_eq!(whole["choices"][0]["logprobs"], expected);
    let chunks = post(&engine, PATH, completion(json!({"logprobs": 1, "stream": true}))).await.chunks();
    assert_eq!(chunks[0]["choices"][0]["logprobs"]["text_offset"], json!([0, 2]));
    assert_eq!(chunks[1]["choices"][0]["logprobs"]["text_offset"], json!([2, 4]));
}

#[tokio::test]
async fn max_tokens_defaults_to_openais_16() {
    let engine = scripted(|slot| {
        slot.delta(&format!("{:?} {}", slot.request.max_tokens, slot.request.sampling.temperature));
        slot.done(FinishReason::Length, 1);
    });
    let text = |reply: Value| reply["choices"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(text(post(&engine, PATH, completion(json!({}))).await.json()), "Some(16) 0.6");
    let body = completion(json!({"max_tokens": 3, "temperature": 0}));
    assert_eq!(text(post(&engine, PATH, body).await.json()), "Some(3) 0");
}
