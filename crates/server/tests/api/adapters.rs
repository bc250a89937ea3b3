//! Adapters: chosen by the model's name in every API, and listed.

use serde_json::{Value, json};
use thunder_engine::{AdapterInfo, Event, FinishReason, ModelInfo, Output};

use crate::support::{MODEL, Slot, get, info, post, scripted_with};

/// Answers with the name of the requested adapter.
fn adapter(slot: Slot) {
    let number = slot.request.adapter.map_or(0, |adapter| adapter + 1);
    match &slot.request.output {
        Output::Text => slot.delta(&format!("adapter {number}")),
        _ => slot.send(Event::Hidden { values: vec![number as f32, 1.0] }),
    }
    slot.done(FinishReason::Stop, 2);
}

#[tokio::test]
async fn adapters_are_chosen_by_the_models_name_and_listed() {
    let of = |name: &str| AdapterInfo { name: name.into(), digest: "a1".repeat(32), bytes: 1000 };
    let info = ModelInfo { adapters: vec![of("sql"), of("house/poems")], ..info() };
    let engine = scripted_with(info, adapter);
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (name, number) in [(MODEL, 0), ("default", 0), ("sql", 1), ("house/poems", 2)] {
        let served = if number == 0 { MODEL } else { name };
        for (path, body, text) in [
            ("/v1/chat/completions", json!({"messages": messages}), "/choices/0/message/content"),
            ("/v1/completions", json!({"prompt": "hi"}), "/choices/0/text"),
            ("/v1/responses", json!({"input": "hi"}), "/output/0/content/0/text"),
            ("/v1/messages", json!({"messages": messages, "max_tokens": 9}), "/content/0/text"),
            ("/api/chat", json!({"messages": messages, "stream": false}), "/message/content"),
            ("/api/generate", json!({"prompt": "hi", "stream": false}), "/response"),
        ] {
            let mut body = body;
            body["model"] = name.into();
            let reply = post(&engine, path, body).await.json();
            let said = reply.pointer(text).and_then(Value::as_str).map(str::to_owned);
            assert_eq!(said, Some(format!("adapter {number}")), "{path}: {reply}");
            assert_eq!(reply["model"], served, "{path}");
        }
        let reply = post(&engine, "/v1/embeddings", json!({"model": name, "input": "hi"})).await.json();
        let first = reply["data"][0]["embedding"][0].as_f64().unwrap();
        let number = f64::from(number);
        assert!((first - number / (number * number + 1.0).sqrt()).abs() < 1e-6, "{reply}");
        assert_eq!(reply["model"], served);
    }
    let list = get(&engine, "/v1/models").await.json();
    let ids: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, [MODEL, "sql", "house/poems"]);
    assert_eq!((&list["data"][0]["parent"], &list["data"][1]["parent"]), (&Value::Null, &json!(MODEL)));
    assert_eq!(get(&engine, "/v1/models/house/poems").await.json()["id"], "house/poems");
    let tags = get(&engine, "/api/tags").await.json();
    assert_eq!(
        (&tags["models"][1]["name"], tags["models"].as_array().map(Vec::len)),
        (&json!("sql"), Some(3))
    );
    let reply = post(&engine, "/v1/completions", json!({"model": "SQL", "prompt": "hi"})).await;
    assert_eq!(reply.status, 404);
}
