//! `thunder bench serve` against a server of its own, another one, and none.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Server, run_json, thunder};

const SMALL: &[&str] = &["--requests", "4", "--tokens", "6", "--prompt", "5", "--shared", "10", "--json"];

fn check(report: &serde_json::Value, loads: usize) {
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), loads, "{report}");
    for row in rows {
        assert_eq!((row["answers"].as_u64(), row["tokens"].as_u64()), (Some(4), Some(24)), "{row}");
        assert_eq!(row["errors"], serde_json::json!({}), "{row}");
        let [p50, p99] = ["p50", "p99"].map(|name| row["time_to_first_token_ms"][name].as_f64().unwrap());
        assert!(0.0 < p50 && p50 <= p99, "{row}");
        assert!(row["tokens_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn a_model_is_served_and_measured() {
    let args = [&["bench", "serve", "builtin", "--clients", "1,2", "--threads", "1"], SMALL].concat();
    check(&run_json(&args), 2);
}

#[test]
fn a_running_server_is_measured_at_a_rate_and_its_errors_are_counted() {
    let server = Server::start(&["builtin", "--threads", "1", "--api-key", "k"]);
    let url = format!("http://{}", server.url(""));
    let at_rate = [&["bench", "serve", &url, "--rate", "50", "--api-key", "k"], SMALL].concat();
    check(&run_json(&at_rate), 1);
    let refused = thunder(&["bench", "serve", &url, "--api-key", "wrong"]).output().unwrap();
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("401"), "{error}");
}
