//! Many clients at the limits of their keys. `bench/keys.py` does the same to a whole server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use serde_json::json;
use thunder_access::{Access, Actor, By, Filter, NewKey, Now, Retention};
use thunder_engine::FinishReason;
use thunder_server::{ServerConfig, router};

use crate::support::{MODEL, Slot, post_request, scripted, send};

const CLIENTS: usize = 200;
const KEYS: usize = 20;
/// Tokens of a prompt and its answer.
const TOKENS: u64 = 2 + 8;
/// Refusals of each key, after which its limit was under pressure.
const REFUSALS: u64 = 50;

/// What the clients of a key have got.
#[derive(Default)]
struct Got {
    answers: AtomicU64,
    refusals: AtomicU64,
}

/// Requests a minute that a key may send; half of the keys have a limit of tokens instead.
fn rate(key: usize) -> u64 {
    20 + 5 * key as u64
}

fn new_key(nth: usize) -> NewKey {
    let (name, value) = match nth.is_multiple_of(2) {
        true => ("requests_per_minute", rate(nth)),
        false => ("tokens_per_minute", rate(nth) * TOKENS),
    };
    serde_json::from_value(json!({"name": format!("key-{nth}"), "limits": {name: value}})).unwrap()
}

/// Asks again and again until `until`, or until all keys have been refused often.
async fn client(app: Router, secret: String, key: usize, got: Arc<Vec<Got>>, until: Option<Instant>) {
    let body = json!({"model": MODEL, "prompt": "ab", "max_tokens": TOKENS - 2}).to_string();
    let is_over = || match until {
        Some(until) => Instant::now() >= until,
        None => got.iter().all(|of| of.refusals.load(Ordering::Relaxed) >= REFUSALS),
    };
    while !is_over() {
        let mut request = post_request("/v1/completions", body.clone());
        let bearer = format!("Bearer {secret}").parse().unwrap();
        request.headers_mut().insert("authorization", bearer);
        let reply = send(app.clone(), request).await;
        let of_key = || reply.error().2.as_str().is_some_and(|limit| limit.starts_with("key."));
        match reply.status {
            StatusCode::OK => got[key].answers.fetch_add(1, Ordering::Relaxed),
            StatusCode::TOO_MANY_REQUESTS if of_key() => got[key].refusals.fetch_add(1, Ordering::Relaxed),
            other => panic!("{other}: {}", reply.text),
        };
        // Five minutes of the shorter pause would only use the processor.
        tokio::time::sleep(Duration::from_millis(if until.is_some() { 250 } else { 20 })).await;
    }
}

/// Within a minute every key gets exactly its limit; in `./test --long`, five times that in five
/// minutes. Every answer and every refusal is in the usage report.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_exact_under_two_hundred_clients_and_no_record_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path(), Retention::default(), None).unwrap();
    let secrets: Vec<String> = (0..KEYS)
        .map(|nth| access.create_key(new_key(nth), &Actor::local(), Now::read().time).unwrap().1)
        .collect();
    let config = ServerConfig {
        access: Some(access.clone()),
        // Only the keys' limits refuse.
        max_waiting: Some(2 * CLIENTS),
        ..ServerConfig::default()
    };
    let engine = scripted(|slot: Slot| {
        slot.delta("Hello");
        slot.done(FinishReason::Length, TOKENS as usize - 2);
    });
    let app = router(engine, config);
    let got: Arc<Vec<Got>> = Arc::new((0..KEYS).map(|_| Got::default()).collect());
    let began = Instant::now();
    let (minutes, until) = match thunder_testing::is_long() {
        // The sixth minute must not begin.
        true => (5, Some(began + Duration::from_secs(298))),
        false => (1, None),
    };
    let clients = (0..CLIENTS).map(|nth| {
        let key = nth % KEYS;
        tokio::spawn(client(app.clone(), secrets[key].clone(), key, got.clone(), until))
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(60 * minutes), "{took:?}: the limits may have let more in");
    let count = |of: fn(&Got) -> &AtomicU64, key: usize| of(&got[key]).load(Ordering::Relaxed);
    for key in 0..KEYS {
        let (answers, exact) = (count(|of| &of.answers, key), rate(key) * minutes);
        let off = answers as f64 / exact as f64 - 1.0;
        assert!(off.abs() <= 0.02, "key {key}: {answers} answers in {took:?}, its limit allows {exact}");
    }
    // Sums are by the key's name.
    let sums = access.sums(&Filter::default(), &[By::Key]).unwrap();
    for key in 0..KEYS {
        let totals = sums[&vec![Some(format!("key-{key}"))]].totals();
        let (answers, refusals) = (count(|of| &of.answers, key), count(|of| &of.refusals, key));
        assert_eq!((totals.requests, totals.refused), (answers, refusals), "key {key}");
        assert_eq!(totals.prompt_tokens + totals.completion_tokens, answers * TOKENS, "key {key}");
    }
}
