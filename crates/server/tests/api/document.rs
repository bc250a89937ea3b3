//! The description of the endpoints is correct.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use serde_json::{Value, json};
use thunder_engine::FinishReason;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::support::{Slot, anything, post, post_request, scripted_with_tools, send};

/// Stands for the id of a stored response in the document's examples.
const STORED: &str = "RESPONSE_ID";

/// The fields that the server has read, each with the path of its object: `messages[]`, `content`.
type Names = BTreeSet<(String, String)>;

/// Notes the fields that are read on this thread, where bodies as small as a test's are read.
#[derive(Clone, Default)]
struct Readings(Arc<Mutex<Names>>);

impl<S: tracing::Subscriber> Layer<S> for Readings {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "thunder_server::fields" {
            let mut reading = Reading::default();
            event.record(&mut reading);
            self.0.lock().unwrap().insert((reading.path, reading.field));
        }
    }
}

#[derive(Default)]
struct Reading {
    path: String,
    field: String,
}

impl Visit for Reading {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "path" => self.path = without_numbers(value),
            _ => self.field = value.to_owned(),
        }
    }

    fn record_debug(&mut self, field: &Field, _: &dyn std::fmt::Debug) {
        assert_eq!(field.name(), "message", "only texts are expected");
    }
}

/// A path without the places in lists: `messages[2].content` becomes `messages[].content`.
fn without_numbers(path: &str) -> String {
    path.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// Adds the fields that a schema at `path` lists.
fn list(document: &Value, schema: &Value, path: &str, names: &mut Names) {
    if let Some(reference) = schema["$ref"].as_str() {
        let schema = document.pointer(&reference[1..]).unwrap_or_else(|| panic!("no {reference}"));
        list(document, schema, path, names);
    }
    for part in ["oneOf", "allOf"].iter().filter_map(|kind| schema[kind].as_array()).flatten() {
        list(document, part, path, names);
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        names.insert((path.to_owned(), name.clone()));
        let inner = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        list(document, field, &inner, names);
    }
    if schema["items"].is_object() {
        list(document, &schema["items"], &format!("{path}[]"), names);
    }
}

/// The document's bodies for an endpoint: its examples, and its first one with each further field.
pub(crate) fn bodies(content: &Value) -> Vec<Value> {
    let example = &content["example"];
    let examples = content["examples"].as_object().into_iter().flatten();
    let mut bodies: Vec<Value> = examples.map(|(_, example)| example["value"].clone()).collect();
    let whole = bodies.len();
    for (name, schema) in content["schema"]["properties"].as_object().unwrap() {
        assert!(!schema["example"].is_null(), "{name} has no example");
        if bodies[..whole].iter().all(|body| body[name].is_null()) {
            let mut body = example.clone();
            body[name] = schema["example"].clone();
            bodies.push(body);
        }
    }
    bodies.push(example.clone());
    bodies
}

/// Replaces the placeholder with the id of a stored response.
fn with_stored(text: &str, id: &str) -> String {
    text.replace(STORED, id)
}

#[tokio::test]
async fn every_endpoint_and_every_field_of_the_document_is_taken_and_no_other() {
    let readings = Readings::default();
    let _guard = tracing_subscriber::registry().with(readings.clone()).set_default();
    let engine = scripted_with_tools(anything);
    let router = thunder_server::router(engine, thunder_server::ServerConfig::default());
    let post =
        async |path: &str, body: &Value| send(router.clone(), post_request(path, body.to_string())).await;
    let ask = async |method: &str, path: &str| {
        let request = axum::http::Request::builder().method(method).uri(path);
        send(router.clone(), request.body(axum::body::Body::empty()).unwrap()).await
    };
    let document = ask("GET", "/openapi.json").await.json();
    let paths = document["paths"].as_object().unwrap();
    let stored = post("/v1/responses", &json!({"model": "default", "input": "hi"})).await.json();
    let stored = stored["id"].as_str().unwrap();
    let mut fields = 0;
    // access.rs tests the endpoints that need a store. Those of nodes and of the program around the
    // server are tested there: `crates/node/src/agent/admin.rs`, `crates/thunder/src/admin.rs`.
    let needs_store = |methods: &Value| {
        let others = |one: &Value| ["x-store", "x-node", "x-program"].iter().any(|kind| one[*kind] == true);
        methods.as_object().unwrap().values().any(others)
    };
    for (path, methods) in paths.iter().filter(|(_, methods)| !needs_store(methods)) {
        let Some(operation) = methods.get("post") else { continue };
        let content = &operation["requestBody"]["content"]["application/json"];
        readings.0.lock().unwrap().clear();
        for body in bodies(content) {
            let body: Value = serde_json::from_str(&with_stored(&body.to_string(), stored)).unwrap();
            let reply = post(path, &body).await;
            assert_eq!(reply.status, StatusCode::OK, "{path} {body}: {}", reply.text);
        }
        let mut listed = Names::new();
        list(&document, &content["schema"], "", &mut listed);
        let read = readings.0.lock().unwrap().clone();
        let [unlisted, unread] =
            [(&read, &listed), (&listed, &read)].map(|(these, those)| these.difference(those));
        let (unlisted, unread): (Vec<_>, Vec<_>) = (unlisted.collect(), unread.collect());
        assert!(unlisted.is_empty(), "{path} reads fields that the document does not list: {unlisted:?}");
        assert!(unread.is_empty(), "{path} never reads fields that the document lists: {unread:?}");
        fields += listed.len();
        let example = &content["example"];
        for name in content["schema"]["required"].as_array().unwrap() {
            let mut body = example.clone();
            body.as_object_mut().unwrap().remove(name.as_str().unwrap());
            let reply = post(path, &body).await;
            assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path} without {name}: {}", reply.text);
        }
        let mut unknown = example.clone();
        unknown["mood"] = json!(1);
        let reply = post(path, &unknown).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{path}: {}", reply.text);
        assert!(reply.text.contains("`mood`"), "{path}: {}", reply.text);
    }
    for method in ["get", "delete"] {
        for (path, methods) in paths.iter().filter(|(_, methods)| !needs_store(methods)) {
            let Some(operation) = methods.get(method) else { continue };
            let mut path = path.clone();
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let text = |field: &str| parameter[field].as_str().unwrap();
                path = path.replace(&format!("{{{}}}", text("name")), &with_stored(text("example"), stored));
            }
            let reply = ask(&method.to_uppercase(), &path).await;
            assert_eq!(reply.status, StatusCode::OK, "{method} {path}: {}", reply.text);
            if path != "/metrics" {
                reply.json();
            }
        }
    }
    assert!(paths.len() > 15 && fields > 300, "{} paths, {fields} fields", paths.len());
}

/// The paths in the strings of a source file, without its tests.
fn paths_in(source: &str) -> BTreeSet<String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(source);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let code = text.split("#[cfg(test)]").next().unwrap();
    let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let quoted =
        code.flat_map(|line| line.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>());
    let is_path = |text: &String| {
        text.len() > 1
            && text.starts_with('/')
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/_.{}*".contains(c))
    };
    quoted.filter(is_path).collect()
}

#[test]
fn the_document_has_every_path_of_a_server_and_of_a_node() {
    let document = include_str!("../../src/api/openapi.json");
    let document: Value = serde_json::from_str(document).unwrap();
    let known: Vec<&String> = document["paths"].as_object().unwrap().keys().collect();
    let mut found = 0;
    for (source, roots) in [
        // A server's routes are nested below these.
        ("server/src/routes.rs", &["", "/v1", "/api"][..]),
        ("server/src/dashboard.rs", &[""]),
        ("server/src/administer.rs", &["/admin"]),
        ("node/src/agent/gateway.rs", &[""]),
        ("node/src/agent/gateway/question.rs", &[""]),
        ("node/src/agent/gateway/callers.rs", &[""]),
        ("node/src/agent/admin.rs", &[""]),
        ("thunder/src/admin.rs", &[""]),
        ("thunder/src/signin.rs", &[""]),
    ] {
        let paths = paths_in(source);
        assert!(!paths.is_empty(), "{source}");
        for path in paths {
            // `{*id}` and `{id}` are the same; a node lists some paths by their prefix.
            let path = path.replace("{*", "{").replace("/default", "/{id}");
            let fits = |known: &&&String| {
                let begins = known.strip_prefix(path.as_str());
                roots.iter().any(|root| ***known == format!("{root}{path}"))
                    || begins.is_some_and(|rest| path.ends_with('/') || rest.starts_with('/'))
            };
            let is_root = ["/v1", "/api", "/admin"].contains(&path.trim_end_matches('/'));
            assert!(is_root || known.iter().any(|known| fits(&known)), "{source}: {path} is not described");
            found += 1;
        }
    }
    assert!(found > 60, "{found}");
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
