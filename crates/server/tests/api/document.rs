//! The description of the endpoints is true.

use axum::http::StatusCode;
use serde_json::{Value, json};
use thunder_engine::FinishReason;

use crate::support::{Slot, anything, get, post, scripted_with_tools};

#[tokio::test]
async fn every_endpoint_and_every_field_of_the_document_is_taken() {
    let engine = scripted_with_tools(anything);
    let document = get(&engine, "/openapi.json").await.json();
    let paths = document["paths"].as_object().unwrap();
    let mut fields = 0;
    // Those that need a store are asked in access.rs.
    let needs_store =
        |methods: &Value| methods.as_object().unwrap().values().any(|one| one["x-store"] == true);
    for (path, methods) in paths.iter().filter(|(_, methods)| !needs_store(methods)) {
        if let Some(operation) = methods.get("get") {
            let mut path = path.clone();
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let (name, example) =
                    (parameter["name"].as_str().unwrap(), parameter["example"].as_str().unwrap());
                path = path.replace(&format!("{{{name}}}"), example);
            }
            let reply = get(&engine, &path).await;
            assert_eq!(reply.status, StatusCode::OK, "{path}: {}", reply.text);
            if path != "/metrics" {
                reply.json();
            }
        }
        let Some(operation) = methods.get("post") else { continue };
        let content = &operation["requestBody"]["content"]["application/json"];
        let example = &content["example"];
        let reply = post(&engine, path, example.clone()).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {}", reply.text);
        for (name, schema) in content["schema"]["properties"].as_object().unwrap() {
            let mut body = example.clone();
            body[name] = schema["example"].clone();
            assert!(!body[name].is_null(), "{path} {name} has no example");
            let reply = post(&engine, path, body).await;
            assert_eq!(reply.status, StatusCode::OK, "{path} {name}: {}", reply.text);
            fields += 1;
        }
        for name in content["schema"]["required"].as_array().unwrap() {
            let mut body = example.clone();
            body.as_object_mut().unwrap().remove(name.as_str().unwrap());
            let reply = post(&engine, path, body).await;
            assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path} without {name}: {}", reply.text);
        }
        let mut unknown = example.clone();
        unknown["mood"] = json!(1);
        let reply = post(&engine, path, unknown).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path}: {}", reply.text);
        assert!(reply.text.contains("`mood`"), "{path}: {}", reply.text);
    }
    assert!(paths.len() > 15 && fields > 100, "{} paths, {fields} fields", paths.len());
}

#[tokio::test]
async fn responses_continue_earlier_ones() {
    let prompt = |slot: Slot| {
        let bytes: Vec<u8> = slot.request.prompt.iter().map(|&id| id as u8).collect();
        slot.delta(&String::from_utf8_lossy(&bytes));
        slot.done(FinishReason::Stop, 1);
    };
    let router = thunder_server::router(scripted_with_tools(prompt), thunder_server::ServerConfig::default());
    let ask = async |body: Value| {
        let request = crate::support::post_request("/v1/responses", body.to_string());
        crate::support::send(router.clone(), request).await
    };
    let first = ask(json!({"model": "default", "input": "one", "instructions": "x"})).await.json();
    assert_eq!((&first["tools"], &first["tool_choice"]), (&json!([]), &json!("auto")));
    let text = |body: &Value| body["output"][0]["content"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!((text(&first).as_str(), &first["status"]), ("s:x|u:one|", &json!("completed")));
    let body =
        json!({"model": "default", "input": "two", "previous_response_id": first["id"], "store": false});
    let second = ask(body).await.json();
    assert_eq!(text(&second), "u:one|a:s:x|u:one||u:two|", "earlier instructions do not go on");
    let body = json!({"model": "default", "input": "three", "previous_response_id": second["id"]});
    let third = ask(body).await;
    assert_eq!((third.status.as_u16(), third.error().2), (404, json!("previous_response_id")));
}

#[tokio::test]
async fn a_stream_of_a_response_has_its_events_in_order() {
    let engine = scripted_with_tools(anything);
    let reply =
        post(&engine, "/v1/responses", json!({"model": "default", "input": "hi", "stream": true})).await;
    let events: Vec<Value> = reply
        .text
        .trim_end()
        .split("\n\n")
        .map(|event| serde_json::from_str(event.split_once("data: ").unwrap().1).unwrap())
        .collect();
    let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(names, expected);
    assert!(events.iter().zip(0..).all(|(event, number)| event["sequence_number"] == number));
    assert_eq!(events[8]["response"]["output"][0]["content"][0]["text"], "Hello");
    assert_eq!(events[8]["response"]["usage"]["output_tokens"], 2);
}
