//! What Prometheus reads.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use futures_util::StreamExt as _;
use serde_json::json;
use thunder_dashboard::{Answer, Ask, Extension};
use thunder_engine::FinishReason;
use thunder_server::{ServerConfig, router};
use tower::ServiceExt as _;

use crate::support::{MODEL, Slot, post_request, scripted, send};

/// Answers the first word of the prompt, or fails.
fn script(slot: Slot) {
    slot.count(2);
    slot.delta("Hello");
    match slot.request.max_tokens {
        Some(1) => slot.done(FinishReason::Length, 1),
        Some(2) => slot.fail("a rank was lost"),
        Some(3) => slot.fail_by_grammar("it is too complex"),
        _ => slot.done(FinishReason::Stop, 3),
    }
}

#[tokio::test]
async fn requests_are_counted_under_vllms_names() {
    let app = router(scripted(script), ServerConfig::default());
    let ask =
        |max_tokens: usize| json!({"model": MODEL, "prompt": "ab", "max_tokens": max_tokens}).to_string();
    for (max_tokens, status) in [
        (1, StatusCode::OK),
        (9, StatusCode::OK),
        (9, StatusCode::OK),
        (2, StatusCode::INTERNAL_SERVER_ERROR),
        (3, StatusCode::BAD_REQUEST),
    ] {
        let request = post_request("/v1/completions", ask(max_tokens));
        assert_eq!(send(app.clone(), request).await.status, status);
    }
    let reply = send(app, Request::get("/metrics").body(Body::empty()).unwrap()).await;
    assert_eq!(reply.status, StatusCode::OK);
    let value = |name: &str, labels: &str| value_of(&reply.text, name, labels);
    // As the engine counts them, of requests that failed too.
    assert_eq!(value("vllm:prompt_tokens_total", ""), 10.0);
    assert_eq!(value("vllm:generation_tokens_total", ""), 10.0);
    assert_eq!(value("vllm:request_success_total", ",finished_reason=\"abort\""), 0.0);
    assert_eq!(value("vllm:request_success_total", ",finished_reason=\"stop\""), 2.0);
    assert_eq!(value("vllm:request_success_total", ",finished_reason=\"length\""), 1.0);
    // Alarms use the first counter: a client's grammar must not raise one.
    assert_eq!(value("thunder:request_failures_total", ""), 1.0);
    assert_eq!(value("thunder:requests_wrong_total", ""), 1.0);
    assert_eq!(value("vllm:time_to_first_token_seconds_count", ""), 3.0);
    assert_eq!(value("vllm:inter_token_latency_seconds_count", ""), 2.0, "a request of one token has none");
    assert_eq!(value("vllm:request_decode_time_seconds_count", ""), 3.0);
    assert_eq!(value("vllm:request_prompt_tokens_sum", ""), 6.0);
    assert_eq!(value("vllm:request_generation_tokens_sum", ""), 7.0);
    assert_eq!(value("vllm:num_requests_running", ""), 0.0);
    assert_eq!(value("thunder:gateway_own_seconds_count", ""), 5.0);
    let own = value("thunder:gateway_own_seconds_sum", "");
    let computed = value("thunder:gateway_computed_seconds_sum", "");
    assert!(value("thunder:gateway_computed_seconds_count", "") == 5.0 && computed > 0.0, "{computed}");
    let parts = ["authorize", "switch", "prepare", "admit", "record", "wait"].map(|part| {
        let label = format!(",part=\"{part}\"");
        assert_eq!(value("thunder:gateway_own_part_seconds_count", &label), 5.0);
        value("thunder:gateway_own_part_seconds_sum", &label)
    });
    // It does not include the wait for other requests.
    assert!(own > 0.0 && (parts[..5].iter().sum::<f64>() - own).abs() < 1e-9, "{own} {parts:?}");
    let [authorize, switch, prepare, admit, record, wait] = parts;
    assert!(authorize > 0.0 && prepare > 0.0 && admit > 0.0, "{parts:?}");
    // Small requests are prepared where they arrive, and without a store nothing is recorded.
    assert_eq!((switch, record, wait), (0.0, 0.0, 0.0));
    assert!(reply.text.ends_with("# EOF\n"));
}

/// A metric's value in the answer to `/metrics`.
fn value_of(text: &str, name: &str, labels: &str) -> f64 {
    let start = format!("{name}{{model_name=\"{MODEL}\"{labels}}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(start.as_str()));
    line.unwrap_or_else(|| panic!("no {start} in\n{text}")).parse().unwrap()
}

/// As vLLM counts them: a cancelled request ends with `abort`, and its tokens count as soon as they
/// are made.
#[tokio::test]
async fn tokens_count_as_they_are_made_and_a_cancelled_request_ends_as_an_abort() {
    let (left, leave) = std::sync::mpsc::channel::<()>();
    let leave = std::sync::Mutex::new(leave);
    let engine = scripted(move |slot: Slot| {
        slot.count(3);
        slot.delta("Hel");
        // Neither an end nor more text until the client has left.
        let _ = leave.lock().unwrap().recv();
    });
    let app = router(engine, ServerConfig::default());
    let metrics = async |app: &axum::Router| {
        send(app.clone(), Request::get("/metrics").body(Body::empty()).unwrap()).await.text
    };
    let ask = json!({"model": MODEL, "prompt": "ab", "stream": true, "n": 1}).to_string();
    let response = app.clone().oneshot(post_request("/v1/completions", ask)).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    let first = body.next().await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&first).contains("Hel"));
    let text = metrics(&app).await;
    let finished = |text: &str| {
        let of = |reason: &str| {
            value_of(text, "vllm:request_success_total", &format!(",finished_reason=\"{reason}\""))
        };
        ["stop", "length", "abort"].map(of)
    };
    assert_eq!(value_of(&text, "vllm:prompt_tokens_total", ""), 2.0);
    assert_eq!(value_of(&text, "vllm:generation_tokens_total", ""), 3.0);
    assert_eq!(finished(&text), [0.0; 3], "it has not ended");
    drop(body);
    left.send(()).unwrap();
    assert_eq!(finished(&metrics(&app).await), [0.0, 0.0, 1.0]);
}

/// A lost engine fails all choices and texts of a request at once: none of them was cancelled.
#[tokio::test]
async fn a_request_that_fails_is_one_failure_and_no_abort() {
    let app = router(scripted(|slot| slot.fail("a rank was lost")), ServerConfig::default());
    let choices = json!({"model": MODEL, "prompt": "ab", "n": 4}).to_string();
    let texts = json!({"model": MODEL, "input": ["a", "b", "c"]}).to_string();
    for (path, body) in [("/v1/completions", choices), ("/v1/embeddings", texts)] {
        let status = send(app.clone(), post_request(path, body)).await.status;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{path}");
    }
    let text = send(app, Request::get("/metrics").body(Body::empty()).unwrap()).await.text;
    assert_eq!(value_of(&text, "thunder:request_failures_total", ""), 2.0);
    assert_eq!(value_of(&text, "vllm:request_success_total", ",finished_reason=\"abort\""), 0.0);
}

#[tokio::test]
async fn what_the_machine_draws_is_there_where_it_is_known() {
    #[derive(Debug)]
    struct Power(Option<f64>);
    impl Extension for Power {
        fn answer(&self, ask: &Ask<'_>) -> Option<Answer> {
            (ask.path == "/admin/energy").then(|| Answer::ok(json!({"joules": self.0, "watts": self.0})))
        }
    }
    for (known, lines) in [(Some(12.5), 2), (None, 0)] {
        let config = ServerConfig { extension: Some(Arc::new(Power(known))), ..ServerConfig::default() };
        let get = Request::get("/metrics").body(Body::empty()).unwrap();
        let text = send(router(scripted(script), config), get).await.text;
        let drawn = ["thunder:energy_joules_total{", "thunder:power_watts{"];
        let found = text
            .lines()
            .filter(|line| drawn.iter().any(|name| line.starts_with(name)) && line.ends_with(" 12.5"));
        assert_eq!(found.count(), lines, "{text}");
    }
}
