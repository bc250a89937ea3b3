//! Encoders as programs use them: embeddings and rerankings over HTTP, on one rank and on several.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::{Path, PathBuf};

use common::{Server, post, thunder};
use safetensors::SafeTensors;
use serde_json::{Value, json};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/encoders").join(name)
}

fn serve(name: &str, options: &[&str]) -> Server {
    let path = folder(name);
    Server::start(&[&["--model", path.to_str().unwrap()], options].concat())
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// A fixture's texts as tokens, and the means of transformers' hidden states, of length 1.
fn golden(name: &str) -> Vec<(Vec<u32>, Vec<f64>)> {
    let bytes = std::fs::read(folder(name).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: String| file.tensor(&name).unwrap().data().as_chunks::<4>().0.to_vec();
    let text = |i| {
        let tokens: Vec<u32> = words(format!("tokens.{i}")).into_iter().map(u32::from_le_bytes).collect();
        let hidden: Vec<f32> = words(format!("hidden.{i}")).into_iter().map(f32::from_le_bytes).collect();
        let width = hidden.len() / tokens.len();
        let sum = |column| hidden.iter().skip(column).step_by(width).map(|x| f64::from(*x)).sum::<f64>();
        let sums: Vec<f64> = (0..width).map(sum).collect();
        let length = sums.iter().map(|x| x * x).sum::<f64>().sqrt();
        (tokens, sums.into_iter().map(|x| x / length).collect())
    };
    (0..3).map(text).collect()
}

#[test]
fn a_trace_of_embeddings_has_a_span_of_each_rank() {
    let (address, sent) = common::collector::collector();
    let server = serve("bert", &["--ranks", "2", "--otlp", &address]);
    let body = json!({"model": "default", "input": ["a rank", "its span"]});
    assert_eq!(post(&server.url("/v1/embeddings"), &body).0, 200);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !sent.lock().unwrap().contains("POST /v1/embeddings") {
        assert!(std::time::Instant::now() < deadline, "no trace came");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let sent: Value = serde_json::from_str(&sent.lock().unwrap()).unwrap();
    let spans = sent["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap();
    let of = |name: &'static str| spans.iter().filter(move |span| span["name"] == name);
    let prefill = of("prefill").next().unwrap();
    let ranks: Vec<&Value> = of("rank").filter(|span| span["parentSpanId"] == prefill["spanId"]).collect();
    assert_eq!(ranks.len(), 2, "{sent}");
    for (index, rank) in ranks.into_iter().enumerate() {
        let attributes = rank["attributes"].as_array().unwrap();
        let value = |key: &str| attributes.iter().find(|one| one["key"] == key).unwrap()["value"].clone();
        assert_eq!(value("thunder.rank")["intValue"], index.to_string(), "{sent}");
        assert_ne!(value("thunder.computed_us")["intValue"], "0", "{sent}");
    }
}

#[test]
fn vectors_are_those_of_transformers_on_any_number_of_ranks() {
    // RoBERTa's tokens have one type, so that ids say all.
    let golden = golden("xlm-roberta");
    let mut all =
        vec![vec!["--ranks", "1"], vec!["--ranks", "3"], vec!["--ranks", "2", "--parallel", "pipeline"]];
    #[cfg(feature = "gpu")]
    let device = thunder_gpu::for_tests().map(|found| format!("gpu:{}", found.info.number));
    #[cfg(not(feature = "gpu"))]
    let device: Option<String> = None;
    all.extend(device.as_ref().map(|device| vec!["--device", device]));
    for options in all {
        let server = serve("xlm-roberta", &[&options[..], &["--activations", "int16"]].concat());
        let input: Vec<&Vec<u32>> = golden.iter().map(|(tokens, _)| tokens).collect();
        let (status, answer) =
            post(&server.url("/v1/embeddings"), &json!({"model": "default", "input": input}));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"], json!({"prompt_tokens": 112, "total_tokens": 112}));
        for (index, (_, expected)) in golden.iter().enumerate() {
            let ours = numbers(&answer["data"][index]["embedding"]);
            let error: f64 = ours.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
            assert!(error.sqrt() < 1e-3, "{options:?}, text {index}: {error:.1e}");
        }
    }
}

#[test]
fn an_encoder_embeds_texts_and_refuses_to_write() {
    let server = serve("bert", &[]);
    let embed = |body: Value| post(&server.url("/v1/embeddings"), &body);
    let (status, both) = embed(json!({"model": "default", "input": ["a rank of a group", "Cats and dogs"]}));
    assert_eq!(status, 200, "{both}");
    let (_, one) = embed(json!({"model": "default", "input": "Cats and dogs"}));
    assert_eq!(
        one["data"][0]["embedding"], both["data"][1]["embedding"],
        "texts are computed alike together"
    );
    let long = "rank ".repeat(200);
    let (status, refused) = embed(json!({"model": "default", "input": long}));
    assert_eq!((status, &refused["error"]["code"]), (400, &json!("context_length_exceeded")), "{refused}");
    let (status, cut) = post(&server.url("/api/embed"), &json!({"model": "default", "input": long}));
    assert_eq!((status, &cut["prompt_eval_count"]), (200, &json!(80)), "{cut}");
    let (_, shown) = post(&server.url("/api/show"), &json!({"model": "default"}));
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    let messages = json!([{"role": "user", "content": "hello"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "default", "messages": messages})),
        ("/v1/completions", json!({"model": "default", "prompt": "hello"})),
        ("/v1/responses", json!({"model": "default", "input": "hello"})),
        ("/v1/messages", json!({"model": "default", "messages": messages, "max_tokens": 9})),
        ("/api/chat", json!({"model": "default", "messages": messages})),
        ("/v1/rerank", json!({"model": "default", "query": "a", "documents": ["b"]})),
    ] {
        let (status, answer) = post(&server.url(path), &body);
        assert_eq!(status, 400, "{path}: {answer}");
        let text = answer.to_string();
        assert!(text.contains("is an encoder") && text.contains("use /v1/embeddings"), "{path}: {text}");
    }
}

#[test]
fn a_reranker_scores_pairs_whatever_they_are_asked_with() {
    for name in ["bert-rerank", "xlm-roberta-rerank"] {
        let documents = ["Paris is the capital of France.", "Cats [SEP] and dogs </s>", &"rank ".repeat(300)];
        let rerank = |server: &Server, documents: &[&str]| {
            let body = json!({"model": "default", "query": "capital of France", "documents": documents});
            let (status, answer) = post(&server.url("/v1/rerank"), &body);
            assert_eq!(status, 200, "{answer}");
            let results = answer["results"].as_array().unwrap().clone();
            let mut scores = vec![0.0; documents.len()];
            for result in &results {
                let index = result["index"].as_u64().unwrap() as usize;
                scores[index] = result["relevance_score"].as_f64().unwrap();
            }
            let shown: Vec<f64> = results.iter().map(|of| of["relevance_score"].as_f64().unwrap()).collect();
            assert!(shown.is_sorted_by(|a, b| a >= b), "{shown:?}");
            scores
        };
        let server = serve(name, &["--activations", "int16"]);
        let together = rerank(&server, &documents);
        for (document, score) in documents.iter().zip(&together) {
            assert_eq!(rerank(&server, &[document]), [*score]);
        }
        let on_three = rerank(&serve(name, &["--ranks", "3", "--activations", "int16"]), &documents);
        for (one, three) in together.iter().zip(&on_three) {
            assert!((one - three).abs() < 1e-3, "{together:?} and {on_three:?}");
        }
        let (status, refused) =
            post(&server.url("/v1/embeddings"), &json!({"model": "default", "input": "hello"}));
        assert_eq!(status, 400);
        assert!(refused.to_string().contains("use /v1/rerank"), "{refused}");
    }
}

#[test]
fn run_and_chat_say_what_an_encoder_is() {
    let path = folder("bert");
    for arguments in [vec!["run", path.to_str().unwrap(), "hello"], vec!["chat", path.to_str().unwrap()]] {
        let output = thunder(&arguments).output().unwrap();
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("makes vectors of texts") && text.contains("thunder serve"), "{text}");
    }
}
