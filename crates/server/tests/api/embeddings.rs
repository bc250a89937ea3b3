//! Embeddings and reranking.

use axum::http::StatusCode;
use serde_json::{Value, json};
use thunder_engine::{Engine, Event, FinishReason, ModelInfo, Output};
use thunder_model::Pooling;

use crate::support::{Slot, info, post, scripted_with, scripted_with_tools};

/// Reports the prompt's length and last token. More exclamation marks make "yes" more likely.
fn numbers(slot: Slot) {
    let prompt = &slot.request.prompt;
    match &slot.request.output {
        Output::Text => slot.fail("text was asked for"),
        Output::Hidden => {
            let last = prompt[prompt.len() - 1] as f32;
            slot.send(Event::Hidden { values: vec![prompt.len() as f32, last, 0.0] });
        }
        Output::Likelihoods(ids) => {
            assert_eq!(ids, &[u32::from(b'y'), u32::from(b'n')]);
            let exclamations = prompt.iter().filter(|id| **id == u32::from(b'!')).count() as f32;
            slot.send(Event::Likelihoods { logprobs: vec![exclamations - 5.0, -3.0] });
        }
    }
    slot.done(FinishReason::Length, 0);
}

fn engine() -> Engine {
    scripted_with_tools(numbers)
}

fn close(numbers: &Value, expected: &[f64]) -> bool {
    let numbers: Vec<f64> = numbers.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    numbers.len() == expected.len() && numbers.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6)
}

#[tokio::test]
async fn every_form_of_input_gives_vectors_of_length_one_in_order() {
    let engine = engine();
    let ask = async |body: Value| post(&engine, "/v1/embeddings", body).await.json();
    let three: f64 = 3.0 / f64::from(3.0f32 * 3.0 + 98.0 * 98.0).sqrt();
    let one = ask(json!({"model": "default", "input": "aab"})).await;
    assert!(close(&one["data"][0]["embedding"], &[three, three * 98.0 / 3.0, 0.0]), "{one}");
    assert_eq!(one["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
    let ids = ask(json!({"model": "default", "input": [97, 97, 98]})).await;
    assert_eq!(ids["data"], one["data"]);
    let many: Vec<String> = (1..=100).map(|length| "x".repeat(length)).collect();
    let many = ask(json!({"model": "default", "input": many, "dimensions": 1})).await;
    let list = many["data"].as_array().unwrap();
    assert!(list.iter().zip(0..).all(|(entry, index)| entry["index"] == index));
    assert!(list.iter().all(|entry| close(&entry["embedding"], &[1.0])));
    assert_eq!(many["usage"]["total_tokens"], 5050);
    let coded = ask(json!({"model": "default", "input": "aab", "encoding_format": "base64"})).await;
    let text = coded["data"][0]["embedding"].as_str().unwrap();
    assert_eq!((text.len(), text.ends_with("AAAAA")), (16, true), "three floats, the last one 0: {text}");
}

#[tokio::test]
async fn what_cannot_be_embedded_is_refused_by_name() {
    let engine = engine();
    for (body, field) in [
        (json!({"model": "default"}), "input"),
        (json!({"model": "default", "input": []}), "input"),
        (json!({"model": "default", "input": ["a", 1]}), "input[1]"),
        (json!({"model": "default", "input": vec!["a"; 2049]}), "input"),
        (json!({"model": "default", "input": "x".repeat(5000)}), "input"),
        (json!({"model": "default", "input": "a", "dimensions": 4}), "dimensions"),
        (json!({"model": "default", "input": "a", "encoding_format": "int8"}), "encoding_format"),
    ] {
        let reply = post(&engine, "/v1/embeddings", body).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{field}: {}", reply.text);
        assert_eq!(reply.error().2, json!(field), "{}", reply.text);
    }
    let mean = ModelInfo { pooling: Pooling::Other("mean_tokens".into()), ..info() };
    let reply =
        post(&scripted_with(mean, numbers), "/v1/embeddings", json!({"model": "default", "input": "a"}))
            .await;
    assert_eq!(reply.status, StatusCode::BAD_REQUEST);
    assert!(reply.text.contains("mean_tokens"), "{}", reply.text);
}

#[tokio::test]
async fn ollama_cuts_what_is_too_long_unless_told_not_to() {
    let engine = engine();
    let long = "x".repeat(9000);
    let cut = post(&engine, "/api/embed", json!({"model": "default", "input": ["a", long]})).await.json();
    assert_eq!((cut["embeddings"].as_array().unwrap().len(), &cut["prompt_eval_count"]), (2, &json!(4096)));
    let body = json!({"model": "default", "input": long, "truncate": false});
    assert_eq!(post(&engine, "/api/embed", body).await.status, StatusCode::BAD_REQUEST);
    let one =
        post(&engine, "/api/embeddings", json!({"model": "default:latest", "prompt": "a"})).await.json();
    assert_eq!(one["embedding"].as_array().map(Vec::len), Some(3));
}

#[tokio::test]
async fn documents_are_ordered_by_their_answers() {
    let engine = engine();
    let body = json!({"model": "default", "query": "q", "documents": ["no", {"text": "yes!!"}, "maybe!"], "top_n": 2, "return_documents": true});
    for path in ["/v1/rerank", "/rerank"] {
        let reply = post(&engine, path, body.clone()).await.json();
        let results = reply["results"].as_array().unwrap();
        assert_eq!(results.iter().map(|result| &result["index"]).collect::<Vec<_>>(), [&json!(1), &json!(2)]);
        assert_eq!(results[0]["document"], json!({"text": "yes!!"}));
        assert_eq!(results[0]["relevance_score"], 0.5, "both answers are as likely");
        assert!(results[1]["relevance_score"].as_f64().unwrap() < 0.5);
    }
    for (body, field) in [
        (json!({"model": "default", "query": "q", "documents": []}), "documents"),
        (json!({"model": "default", "query": "q", "documents": ["a", 1]}), "documents[1]"),
        (json!({"model": "default", "query": "q", "documents": ["x".repeat(5000)]}), "documents"),
        (json!({"model": "default", "documents": ["a"]}), "query"),
    ] {
        let reply = post(&engine, "/v1/rerank", body).await;
        assert_eq!(
            (reply.status, reply.error().2),
            (StatusCode::BAD_REQUEST, json!(field)),
            "{}",
            reply.text
        );
    }
}
