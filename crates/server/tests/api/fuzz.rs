//! Arbitrary requests and disconnections of clients never cause a server error.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use futures_util::StreamExt;
use serde_json::{Value, json};
use thunder_server::{ServerConfig, router};
use thunder_testing::{Random, runs};
use tower::ServiceExt;

use crate::document::bodies;
use crate::support::{anything, get, scripted_with_tools};

/// A request that takes longer than this hangs.
const LIMIT: Duration = Duration::from_secs(30);
const LONGEST_ANSWER_BYTES: usize = 64 << 20;

fn text(random: &mut Random) -> String {
    let length = [0, 1, 7, 60, 3000, 100_000][random.below(6) as usize];
    let letters = ['a', ' ', '"', '\\', '\u{0}', 'ö', '😀', '<', '|', '{', '\n', '\u{200f}'];
    (0..length).map(|_| letters[random.below(letters.len() as u64) as usize]).collect()
}

fn value(random: &mut Random, depth: u64) -> Value {
    match random.below(if depth == 0 { 8 } else { 11 }) {
        0 => Value::Null,
        1 => json!(random.below(2) == 0),
        2 => json!(random.below(5)),
        3 => json!(-(random.below(1000) as i64)),
        4 => json!(random.bits()),
        5 => json!([1e308, -1e-308, 0.5, f64::MAX][random.below(4) as usize]),
        6 => json!(["user", "auto", "json_object", "function", "builtin", "text"][random.below(6) as usize]),
        7 => text(random).into(),
        8 => (0..[0, 1, 3, 2000][random.below(4) as usize]).map(|_| value(random, 0)).collect(),
        9 => {
            let names = ["type", "role", "content", "text", "", "max_tokens", "schema", "anyOf", "$ref"];
            let name = |random: &mut Random| names[random.below(names.len() as u64) as usize].to_owned();
            Value::Object((0..random.below(4)).map(|_| (name(random), value(random, depth - 1))).collect())
        }
        // Deeper than JSON parsers allow.
        _ => (0..[5, 100, 300][random.below(3) as usize]).fold(json!(1), |inner, _| json!([inner])),
    }
}

/// Changes one place of a body: replaces, adds or removes a value, or copies another place.
fn change(random: &mut Random, body: &mut Value) {
    let deeper = random.below(4) > 0;
    match body {
        Value::Object(fields) if deeper && !fields.is_empty() => {
            let nth = random.below(fields.len() as u64) as usize;
            let name = fields.keys().nth(nth).cloned().unwrap();
            if random.below(6) == 0 {
                fields.remove(&name);
            } else {
                change(random, &mut fields[&name]);
            }
        }
        Value::Array(values) if deeper && !values.is_empty() => {
            let nth = random.below(values.len() as u64) as usize;
            match random.below(6) {
                0 => drop(values.remove(nth)),
                1 => values.push(values[nth].clone()),
                _ => change(random, &mut values[nth]),
            }
        }
        other => *other = value(random, 2),
    }
}

/// Text that is not JSON, or different JSON.
fn damage(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() as u64 + 1) as usize;
        match random.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.bits() as u8),
            2 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            _ => bytes.splice(at..at, bytes.clone()).for_each(drop),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_body_is_answered_and_any_client_may_leave() {
    let engine = scripted_with_tools(anything);
    let service = router(engine.clone(), ServerConfig::default());
    let document = get(&engine, "/openapi.json").await.json();
    let mut asked: Vec<(String, Vec<Value>)> = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let Some(post) = methods.get("post") else { continue };
        if ["x-store", "x-node", "x-program"].iter().all(|kind| post[*kind].is_null()) {
            asked.push((path.clone(), bodies(&post["requestBody"]["content"]["application/json"])));
        }
    }
    assert!(asked.len() > 12, "{asked:?}");
    let (mut answered, mut refused) = (0, 0);
    for seed in 0..runs(1500, 50_000) as u64 {
        let random = &mut Random::new(seed);
        let (path, bodies) = &asked[random.below(asked.len() as u64) as usize];
        let mut body = bodies[random.below(bodies.len() as u64) as usize].clone();
        for _ in 0..random.below(4) {
            change(random, &mut body);
        }
        if let Some(fields) = body.as_object_mut().filter(|_| random.below(2) == 0) {
            fields.insert("stream".to_owned(), true.into());
        }
        let mut bytes = body.to_string().into_bytes();
        if random.below(5) == 0 {
            damage(random, &mut bytes);
        }
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(2000)]).into_owned();
        let request = Request::post(path).header("content-type", "application/json").body(Body::from(bytes));
        let response = tokio::time::timeout(LIMIT, service.clone().oneshot(request.unwrap())).await;
        let response = response.unwrap_or_else(|_| panic!("seed {seed}: {path} hangs: {shown}")).unwrap();
        let status = response.status().as_u16();
        assert!(status < 500, "seed {seed}: {path} {status}: {shown}");
        if status < 300 {
            answered += 1
        } else {
            refused += 1
        }
        let mut body = response.into_body();
        if random.below(3) == 0 {
            // The client disconnects during the answer, or before it.
            let mut parts = body.into_data_stream();
            for _ in 0..random.below(3) {
                let _ = tokio::time::timeout(LIMIT, parts.next()).await;
            }
            continue;
        }
        let whole =
            tokio::time::timeout(LIMIT, to_bytes(std::mem::take(&mut body), LONGEST_ANSWER_BYTES)).await;
        let whole = whole.unwrap_or_else(|_| panic!("seed {seed}: {path} does not end: {shown}")).unwrap();
        let whole = String::from_utf8_lossy(&whole);
        for fault in ["\"server_error\"", "\"api_error\"", "engine_failed"] {
            assert!(!whole.contains(fault), "seed {seed}: {path} {shown}: {whole}");
        }
    }
    assert!(answered > 100 && refused > 100, "{answered} answered, {refused} refused");
    assert_eq!(get(&engine, "/health").await.status, 200);
    assert_eq!(engine.load(), (0, 0), "no slot is held");
}
