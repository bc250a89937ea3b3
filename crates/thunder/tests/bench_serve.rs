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

/// Tokens a second of each workload, measured and simulated, and the same of the times that 95 % of
/// first tokens keep, in milliseconds.
fn verified(table: &str) -> Vec<[f64; 4]> {
    let rows = table.lines().filter(|line| line.contains("client(s)") || line.contains("random times"));
    let number = |cell: &str| cell.trim().trim_end_matches(" ms").trim().parse::<f64>().unwrap();
    let of_row = |row: &str| {
        // The columns "off by" repeat what the others say.
        let words: Vec<&str> = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let cells: Vec<&str> = words.iter().copied().filter(|cell| cell.parse::<f64>().is_ok()).collect();
        let times: Vec<&str> = words.iter().copied().filter(|cell| cell.ends_with(" ms")).collect();
        assert_eq!((cells.len(), times.len()), (2, 2), "{row}");
        [cells[0], cells[1], times[0], times[1]].map(number)
    };
    rows.map(of_row).collect()
}

/// The planner's simulation against the engine itself, loosely: tests share their machine with
/// others. `thunder bench report builtin --verify` on a quiet machine is the exact comparison.
#[test]
fn what_the_planner_simulates_is_near_what_the_engine_does() {
    let (workloads, attempts) = (if thunder_testing::is_long() { "10" } else { "3" }, 6);
    let args = ["bench", "report", "builtin", "--context", "1024", "--threads", "1", "--max-batch", "8"];
    for attempt in 1..=attempts {
        let output = thunder(&args).args(["--verify", "--workloads", workloads]).output().unwrap();
        let table = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{table}");
        let rows = verified(&table);
        assert_eq!(rows.len().to_string(), workloads, "{table}");
        // Workloads differ: a simulation that always says the same cannot be near all of them.
        let measured = rows.iter().map(|row| row[0]);
        let (least, most) = (measured.clone().fold(f64::MAX, f64::min), measured.fold(0.0, f64::max));
        let near = |real: f64, simulated: f64| (0.5..=1.5).contains(&(simulated / real));
        // Of the times to first tokens, which one interruption of the processor changes, most.
        let are_near = rows.iter().filter(|row| near(row[2], row[3])).count() * 3 >= rows.len() * 2;
        if most > 1.6 * least && are_near && rows.iter().all(|row| near(row[0], row[1])) {
            return;
        }
        assert!(attempt < attempts, "{table}");
    }
}
