//! The program as users run it: the built-in model over 1 to 5 ranks, shared memory and TCP, tensor
//! and pipeline.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "end_to_end/logs.rs"]
mod logs;
#[path = "end_to_end/reload.rs"]
mod reload;
#[path = "end_to_end/store.rs"]
mod store;

use std::process::{Command, Stdio};

use common::{Server, post, run_json, thunder};
use serde_json::{Value, json};

#[test]
fn every_number_of_ranks_gives_the_same_text() {
    let questions = ["What is tensor parallelism?", "Which machines can I use?", "tell me a joke about cats"];
    // Sums of shards differ in their last bits. After rounding to bf16 this decides near ties, such
    // as the second question's.
    let run = |question, options: &[&str]| {
        run_json(&[&["run", "builtin", question, "--json", "--activations", "int16"], options].concat())
    };
    for (number, question) in questions.into_iter().enumerate() {
        let alone = run(question, &[]);
        assert_eq!(alone["finish_reason"], "stop", "{alone}");
        let settings = ["2", "3", "4", "5"].into_iter().flat_map(|ranks| {
            ["tensor", "pipeline"]
                .into_iter()
                .flat_map(move |parallel| ["shm", "tcp"].map(|transport| [ranks, parallel, transport]))
        });
        for (index, [ranks, parallel, transport]) in settings.enumerate() {
            // Each setting with one of the questions; with all of them in `./test --long`.
            if index % questions.len() != number && !thunder_testing::is_long() {
                continue;
            }
            let options = ["--ranks", ranks, "--parallel", parallel, "--transport", transport];
            let sharded = run(question, &options);
            assert_eq!(alone["text"], sharded["text"], "{question} with {options:?}");
        }
        // One number of ranks more for each question, with a draft model that tries are for.
        let ranks = ["1", "4", "5"][number];
        let drafted = run(question, &["--ranks", ranks, "--draft", "builtin"]);
        assert_eq!(alone["text"], drafted["text"], "{question} with a draft model on {ranks} ranks");
        let both = run(question, &["--ranks", ["4", "4", "6"][number], "--stages", ["2", "2", "3"][number]]);
        assert_eq!(alone["text"], both["text"], "{question} on stages of two ranks");
        let uneven = run(question, &["--ranks", "4", "--stages", "2", "--split", "3,1,2,1"]);
        assert_eq!(alone["text"], uneven["text"], "{question} on uneven stages");
        let uneven = run(question, &["--ranks", "3", "--split", "3,1,0.5"]);
        assert_eq!(alone["text"], uneven["text"], "{question} on an uneven split");
    }
}

/// Every token that MLX-LM chose for the built-in model's questions, in f32.
#[test]
fn golden_answers_of_the_built_in_model() {
    let golden: Vec<Value> =
        serde_json::from_slice(&std::fs::read(thunder_testing::builtin_golden()).unwrap()).unwrap();
    assert!(golden.len() >= 20);
    for ranks in ["1", "2", "3"] {
        let server = Server::start(&["--model", "builtin", "--ranks", ranks]);
        for case in &golden {
            let body =
                json!({ "model": "builtin", "prompt": case["prompt"], "max_tokens": 96, "temperature": 0 });
            let (status, answer) = post(&server.url("/v1/completions"), &body);
            assert_eq!(status, 200, "{answer}");
            assert_eq!(
                answer["choices"][0]["text"], case["text"],
                "MLX answers otherwise: {}",
                case["messages"]
            );
            let tokens = case["completion"].as_array().unwrap().len();
            assert_eq!(answer["usage"]["completion_tokens"], tokens, "{}", case["messages"]);
        }
    }
}

#[test]
fn a_seeded_request_gives_the_same_text_whatever_else_runs() {
    let server = Server::start(&["--model", "builtin", "--ranks", "2"]);
    let ask = |seed: usize| {
        let messages = json!([{ "role": "user", "content": "What is an all-reduce?" }]);
        let body = json!({ "model": "builtin", "messages": messages, "temperature": 1.9, "seed": seed, "max_tokens": 60 });
        let (status, answer) = post(&server.url("/v1/chat/completions"), &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].clone()
    };
    let alone = [ask(1), ask(2)];
    assert_ne!(alone[0], alone[1], "seeds matter at this temperature");
    let crowd: Vec<Value> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..12).map(|i| scope.spawn(move || ask(1 + i % 2))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (i, text) in crowd.iter().enumerate() {
        assert_eq!(*text, alone[i % 2], "request {i} of the crowd");
    }
}

/// A stage that computes for longer than the stall limit does not count as stalled.
#[test]
fn a_long_prompt_goes_through_a_pipeline() {
    let prompt = "word ".repeat(700);
    let arguments = ["run", "builtin", &prompt, "--raw", "--max-tokens", "3", "--json", "--threads", "1"];
    let alone = run_json(&arguments);
    let options = ["--ranks", "2", "--parallel", "pipeline", "--split", "1,5"];
    let run = || {
        let mut sharded = thunder(&[&arguments[..], &options[..]].concat());
        sharded.env("THUNDER_STALL_LIMIT_MS", "30").output().unwrap()
    };
    // A busy machine may hold a rank up for so long, but not each time.
    let output = (0..4).map(|_| run()).find(|output| output.status.success()).unwrap_or_else(run);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sharded: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(alone["prompt_tokens"].as_u64().unwrap() > 512, "several steps");
    assert_eq!(alone["text"], sharded["text"]);
}

#[test]
fn the_demo_measures_one_and_two_ranks() {
    let demo = run_json(&["demo", "--json"]);
    assert_eq!(demo["outcomes"][0]["ranks"], 1);
    assert_eq!(demo["outcomes"][1]["ranks"], 2);
    assert!(demo["outcomes"][0]["answer"].as_str().unwrap().len() > 50);
    let rate = |index: usize| demo["outcomes"][index]["tokens_per_s"].as_f64().unwrap();
    assert!(rate(0) > 10.0 && rate(1) > 10.0, "a model of 12 million parameters is faster than that: {demo}");
    // A number may lose its last bit on the way through JSON.
    let speedup = demo["speedup"].as_f64().unwrap() / (rate(1) / rate(0));
    assert!((speedup - 1.0).abs() < 1e-12, "{demo}");
    let text = thunder(&["demo"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    for expected in ["KV heads", "tokens/s", "all-reduces took", "times as fast", "thunder chat"] {
        assert!(text.contains(expected), "{expected:?} is not in {text}");
    }
}

#[test]
fn collectives_are_measured() {
    let measured = run_json(&[
        "bench",
        "comm",
        "--ranks",
        "3",
        "--op",
        "all_reduce,barrier",
        "--sizes",
        "8,64K",
        "--algorithm",
        "mesh,ring",
        "--transport",
        "tcp",
        "--wire",
        "int8",
        "--dtype",
        "bf16",
        "--time",
        "1",
        "--json",
    ]);
    assert_eq!((&measured["dtype"], &measured["wire"]), (&"bf16".into(), &"int8".into()));
    let rows = measured["rows"].as_array().unwrap();
    let what = |row: &serde_json::Value| (row["algorithm"].clone(), row["bytes"].as_u64().unwrap());
    // Long all-reduces with rounding use the mesh, whichever algorithm is forced.
    let expected = [("mesh", 8), ("ring", 8), ("mesh", 65536)];
    let expected = expected.map(|(algorithm, bytes)| (algorithm.into(), bytes));
    assert_eq!(rows[..3].iter().map(what).collect::<Vec<_>>(), expected);
    assert_eq!(what(&rows[3]), (serde_json::Value::Null, 0));
    for row in rows {
        assert_eq!((&row["transport"], &row["ranks"]), (&"tcp".into(), &3.into()));
        let [low, middle, high] = ["min_us", "median_us", "p99_us"].map(|time| row[time].as_f64().unwrap());
        assert!(0.0 < low && low <= middle && middle <= high, "{row}");
    }
}

/// Ranks that this program starts, and ranks of a launcher.
#[test]
fn transports_are_measured_in_turn() {
    let bench = ["bench", "comm", "--op", "all_reduce,gather", "--sizes", "8,64K", "--time", "1", "--json"];
    let in_turn = ["--transport", "tcp,shm,tcp"];
    let (tcp, shm) = ("tcp", "shared memory");
    let launch = ["launch", "-n", "2", "--no-prefix", "--", env!("CARGO_BIN_EXE_thunder")];
    for (arguments, setting, expected) in [
        ([&bench[..], &in_turn].concat(), "shm", &[tcp, shm, tcp][..]),
        ([&launch[..], &bench, &in_turn].concat(), "shm", &[tcp, shm, tcp]),
        (bench.to_vec(), "tcp", &[tcp]),
        ([&launch[..], &bench].concat(), "shm", &[shm]),
    ] {
        let output = thunder(&arguments).env("THUNDER_TRANSPORT", setting).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        let measured: Value = serde_json::from_slice(&output.stdout).unwrap();
        let over = |rows: &Value, each: usize| -> Vec<String> {
            let rows = rows.as_array().unwrap().chunks(each);
            rows.map(|rows| {
                assert!(rows.iter().all(|row| row["transport"] == rows[0]["transport"]), "{rows:?}");
                rows[0]["transport"].as_str().unwrap().to_owned()
            })
            .collect()
        };
        assert_eq!(over(&measured["rows"], 4), expected, "{arguments:?}");
        assert_eq!(over(&measured["costs"], 5), expected, "{arguments:?}");
        for cost in measured["costs"].as_array().unwrap() {
            assert!(
                cost["us_per_kib"].as_f64().unwrap() + cost["fixed_us"].as_f64().unwrap() > 0.0,
                "{cost}"
            );
        }
        let first = measured["costs"].as_array().unwrap().iter().filter(|cost| cost["from_bytes"] == 1);
        assert_eq!(first.count(), expected.len(), "{measured}");
    }
    let text = thunder(&[&bench[..8], &in_turn].concat()).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    for expected in
        ["chosen from", "all_reduce: bus GB/s over bytes", "gather: bus", "● tcp\n", "○ shared memory\n"]
    {
        assert!(text.contains(expected), "{expected:?} is not in {text}");
    }
}

#[test]
fn kernels_are_measured() {
    let measured =
        run_json(&["bench", "kernels", "--op", "2/128,attention", "--rows", "1,20", "--time", "1", "--json"]);
    let rows = measured["rows"].as_array().unwrap();
    let best = rows.last().unwrap()["kernel"].as_str().unwrap();
    for (operation, step) in [("2/128", 1), ("2/128", 20), ("attention", 1), ("attention", 20)] {
        let row = rows
            .iter()
            .find(|row| row["kernel"] == best && row["operation"] == operation && row["rows"] == step)
            .unwrap_or_else(|| panic!("no {operation} with {step} rows in {measured}"));
        let number = |name: &str| row[name].as_f64().unwrap();
        let is_near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 1e-9;
        let bandwidth = measured["memory_bytes_per_s"].as_f64().unwrap();
        assert!(is_near(number("memory_share"), number("bytes_per_s") / bandwidth), "{row}");
        assert!(number("peak_share") > 0.0, "{row}");
        if operation == "2/128" {
            // Time times rate gives the matrix: 2 bits per weight, 2-byte scale and bias per 128
            // weights; a multiplication and an addition per weight and row.
            let weights = f64::from(8192 * 2048);
            let seconds = number("us") / 1e6;
            assert!(is_near(number("bytes_per_s") * seconds, weights * (2.0 + 32.0 / 128.0) / 8.0), "{row}");
            assert!(is_near(number("operations_per_s") * seconds, 2.0 * weights * f64::from(step)), "{row}");
        }
    }
    // Microseconds on an idle machine. A wrong unit, or a worker that always sleeps, would fail
    // this.
    let hand_over_us = measured["hand_over_us"].as_f64().unwrap();
    assert!(hand_over_us > 0.01 && hand_over_us < 10_000.0, "{hand_over_us} µs");
}

#[test]
fn chat_remembers_and_ends() {
    use std::io::Write;
    let mut child = thunder(&["chat", "builtin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let input = child.stdin.take();
    input.unwrap().write_all(b"What is a rank?\n/nonsense\n/clear\nhello\n/quit\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.to_lowercase().contains("rank") && text.contains("unknown command /nonsense"), "{text}");
}

#[test]
fn ranks_join_by_their_environment() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |rank: usize| {
        let mut command: Command =
            thunder(&["run", "builtin", "What is a rank?", "--json", "--transport", "tcp"]);
        command
            .env("THUNDER_RANK", rank.to_string())
            .env("THUNDER_WORLD_SIZE", "3")
            .env("THUNDER_COORDINATOR", format!("127.0.0.1:{port}"))
            .env("THUNDER_SECRET", "between us")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks: Vec<_> =
        [2, 0, 1].map(rank).into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(ranks.iter().all(|output| output.status.success()), "{ranks:?}");
    let answer: Value = serde_json::from_slice(&ranks[1].stdout).unwrap();
    assert_eq!(answer["ranks"], 3);
    assert_eq!(answer["text"], run_json(&["run", "builtin", "What is a rank?", "--json"])["text"]);
}

#[test]
fn a_log_names_its_rank_and_says_what_happened() {
    let run = |level: &str| {
        let mut command = thunder(&["run", "builtin", "What is RDMA?", "--ranks", "2", "--max-tokens", "3"]);
        let output = command.env("RUST_LOG", level).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let log = run("thunder=debug");
    for expected in ["rank 0 ", "rank 1 ", "group formed", "loaded", "an answer is complete"] {
        assert!(log.contains(expected), "{expected:?} is not in {log}");
    }
    // What a command says itself: the KV cache, and on a busy machine that it waits for a rank.
    let is_own = |line: &str| line.starts_with("KV cache: ") || line.contains(" of 2: ");
    let said = run("warn");
    assert!(said.lines().all(is_own), "nothing to warn of: {said}");
    assert!(run("thunder=loud").contains("RUST_LOG=thunder=loud"), "what cannot be understood is named");
}

#[test]
fn benchmarks_report_what_they_measured() {
    let decode = run_json(&[
        "bench", "decode", "--tokens", "20", "--repeat", "1", "--batch", "2,1", "--ranks", "2", "--device",
        "cpu", "--json",
    ]);
    let rows = &decode["rows"];
    assert_eq!((&decode["ranks"], &rows[0]["batch"], &rows[1]["batch"]), (&json!(2), &json!(2), &json!(1)));
    let number = |row: usize, name: &str| rows[row][name].as_f64().unwrap();
    let kept = number(1, "tokens_per_s") / (number(0, "tokens_per_s") / 2.0);
    assert!((number(1, "kept_per_sequence") / kept - 1.0).abs() < 1e-9, "{decode}");
    let prefill =
        run_json(&["bench", "prefill", "--prompt", "100", "--repeat", "1", "--device", "cpu", "--json"]);
    assert_eq!((&decode["device"], &prefill["device"]), (&json!("cpu"), &json!("cpu")));
    for (report, fields) in [
        (
            &rows[0],
            &[
                "tokens_per_s",
                "bytes_per_step",
                "memory_share",
                "peak_share",
                "time_to_first_token_s",
                "reduce_share",
            ][..],
        ),
        (&prefill, &["tokens_per_s", "time_to_first_token_s", "memory_share", "peak_share"][..]),
    ] {
        for field in fields {
            assert!(report[field].as_f64().unwrap_or(0.0) > 0.0, "{field} is not positive in {report}");
        }
        // With one round, the share is the ratio of the printed figures.
        let number = |name: &str| report[name].as_f64().unwrap();
        let bytes = report.get("bytes_per_s").map_or_else(
            || number("bytes_per_token") * number("tokens_per_s"),
            |bytes_per_s| bytes_per_s.as_f64().unwrap(),
        );
        let share = bytes / number("memory_bytes_per_s");
        assert!((number("memory_share") / share - 1.0).abs() < 1e-9, "{report}");
    }
    let memory = run_json(&["bench", "membw", "--mib", "64", "--threads", "2", "--json"]);
    let rates: Vec<f64> =
        memory["rows"].as_array().unwrap().iter().map(|row| row["bytes_per_s"].as_f64().unwrap()).collect();
    assert!(rates.len() == 2 && rates.iter().all(|rate| *rate > 1e8), "{memory}");
}

/// The embedding counts where it is also the head; of the other only a row is read for a token.
#[test]
fn plans_and_benchmarks_count_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model").to_str().unwrap().to_owned();
    let made =
        thunder(&["model", "synth", "--arch", "qwen3-moe-tiny", "--bits", "4", &path]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for model in [path.as_str(), "builtin"] {
        for layout in [&["--ranks", "1"][..], &["--ranks", "2", "--parallel", "pipeline"]] {
            let plan = run_json(&[&["plan", "--json", model], layout].concat());
            let sum = |field: &str| -> u64 {
                plan["ranks"].as_array().unwrap().iter().map(|rank| rank[field].as_u64().unwrap()).sum()
            };
            assert_eq!(sum("lookup_bytes") > 0, model != "builtin" || layout.len() > 2, "{plan}");
            let options = ["--tokens", "4", "--repeat", "1", "--threads", "1", "--json"];
            let measured = run_json(&[&["bench", "decode", model], layout, &options].concat());
            // A prompt of a block and two tokens, and half of the answer.
            let expected = sum("read_bytes_per_token") + sum("kv_bytes_per_token") * (32 + 2 + 2);
            assert_eq!(measured["rows"][0]["bytes_per_step"], expected, "{model}, {layout:?}: {plan}");
        }
    }
}

#[test]
fn a_plan_of_several_ranks_says_that_they_may_not_be_faster() {
    for (ranks, is_said) in [("1", false), ("2", true)] {
        let plan = thunder(&["plan", "builtin", "--ranks", ranks]).output().unwrap();
        let text = String::from_utf8_lossy(&plan.stdout);
        assert_eq!(text.contains("not always faster"), is_said, "{ranks} ranks: {text}");
    }
}

/// Requests that are read first must not wait, within the time that is measured, for the others to
/// be read.
#[test]
fn the_speed_of_a_batch_does_not_count_its_prompts() {
    let options = ["--batch", "1,16", "--prompt", "500", "--tokens", "8", "--repeat", "1", "--threads", "1"];
    let measured = run_json(&[&["bench", "decode", "builtin"], &options[..], &["--json"]].concat());
    for row in measured["rows"].as_array().unwrap() {
        assert_eq!(row["prompt_tokens_in_time"], 2, "{row}");
    }
}
