//! `thunder bench gpu`, `thunder bench kernels --device` and a cluster's node on Mesa's software
//! driver.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The number of a software device, or a note that the test was skipped.
fn software_device(test: &str) -> Option<String> {
    let found = thunder_gpu::for_tests().filter(|found| !found.info.is_real());
    if found.is_none() {
        thunder_testing::skip(test, thunder_testing::NO_VULKAN);
    }
    found.map(|found| format!("gpu:{}", found.info.number))
}

fn json_of(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_thunder")).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_gpus_report_has_every_part() {
    let Some(device) = software_device("a_gpus_report_has_every_part") else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    // A part that fails is reported, and the others are there.
    let report = json_of(&[
        "bench",
        "gpu",
        "--device",
        &device,
        "--shapes",
        "qwen3-tiny",
        "--prompt",
        "8",
        "--folder",
        path,
        "--without",
        "conformance,operations",
    ]);
    assert!(report["device"]["name"].as_str().unwrap().contains("llvmpipe"), "{report}");
    assert!(report["exchanges"]["result"][0]["median_us"].as_f64().unwrap() > 0.0, "{report}");
    let model = &report["models"]["qwen3-tiny"];
    for what in ["decode", "prefill"] {
        assert!(model[what]["result"].is_object(), "{report}");
        assert!(model[what]["result"]["error"].is_null(), "{report}");
        assert!(model[what]["result"]["device"].as_str().unwrap().contains("llvmpipe"), "{report}");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "the model is still there");
}

#[test]
fn operations_of_a_gpu_are_measured() {
    let Some(device) = software_device("operations_of_a_gpu_are_measured") else { return };
    let report = json_of(&[
        "bench",
        "kernels",
        "--device",
        &device,
        "--op",
        "norm,router,4/64",
        "--rows",
        "1",
        "--time",
        "1",
        "--json",
    ]);
    let peaks = &report["peak_operations_per_s"];
    for (row, arithmetic) in report["rows"].as_array().unwrap().iter().zip(["f32", "f32", "bytes"]) {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(number("us") > 0.0 && number("peak_share") > 0.0, "{report}");
        assert_eq!(row["arithmetic"], arithmetic, "{report}");
        let share = number("operations_per_s") / peaks[arithmetic].as_f64().unwrap();
        assert!((number("peak_share") / share - 1.0).abs() < 1e-9, "{report}");
    }
}

#[test]
fn a_gpu_applies_penalties_as_a_processor_does() {
    let Some(device) = software_device("a_gpu_applies_penalties_as_a_processor_does") else { return };
    let text = |device: &str, penalty: &str| {
        let words = ["run", "builtin", "Describe a ring of three machines.", "--device", device, "--json"];
        let options = ["--temperature", "0", "--max-tokens", "24", "--repetition-penalty", penalty];
        json_of(&[words.as_slice(), &options].concat())["text"].as_str().unwrap().to_owned()
    };
    let penalized = text(&device, "4");
    assert_eq!(penalized, text("cpu", "4"));
    assert_ne!(penalized, text(&device, "1"), "the penalty changes the text");
}

/// A request's text does not depend on others that come and go and need changes of logits, or all
/// of them, also where steps were computed ahead for the first one.
#[test]
fn a_gpu_answers_alike_whatever_else_it_decodes() {
    let Some(device) = software_device("a_gpu_answers_alike_whatever_else_it_decodes") else { return };
    let request = |extra: Value| {
        let mut body = json!({
            "model": "builtin", "temperature": 0, "ignore_eos": true,
            "messages": [{"role": "user", "content": "Describe a ring of three machines."}],
        });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    // The first one decodes alone before, between and after the others.
    let requests = [
        request(json!({"max_tokens": 100})),
        request(json!({"max_tokens": 12, "repetition_penalty": 4})),
        request(json!({"max_tokens": 12, "logprobs": true, "top_logprobs": 2})),
        request(json!({"max_tokens": 8, "temperature": 1, "seed": 5, "logit_bias": {"40": -100}})),
    ];
    let answer = |server: &common::Server, request: &Value| {
        let (status, answer) = common::post(&server.url("/v1/chat/completions"), request);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let server = common::Server::start(&["builtin", "--device", &device]);
    let alone = requests.each_ref().map(|request| answer(&server, request));
    let together = std::thread::scope(|scope| {
        let first = scope.spawn(|| (answer(&server, &requests[0]), Instant::now()));
        let others = requests[1..].iter().map(|request| {
            std::thread::sleep(Duration::from_millis(15));
            answer(&server, request)
        });
        let others: Vec<_> = others.collect();
        let others_ended = Instant::now();
        let (first, ended) = first.join().unwrap();
        assert!(ended > others_ended, "the first answer ended before the others");
        [vec![first], others].concat()
    });
    assert_eq!(together, alone);
    assert_ne!(alone[1], alone[2], "the penalty changes the text");
}

#[test]
fn sums_between_gpu_ranks_are_measured() {
    let Some(device) = software_device("sums_between_gpu_ranks_are_measured") else { return };
    let report = json_of(&["bench", "comm", "--device", &device, "--ranks", "2", "--sizes", "64", "--json"]);
    assert_eq!(report["rows"][0]["ranks"], 2, "{report}");
    assert_eq!(report["rows"][0]["form"], "host", "{report}");
    assert!(report["rows"][0]["median_us"].as_f64().unwrap() > 0.0, "{report}");
}

#[test]
fn a_node_with_a_gpu_is_planned_by_it_and_its_ranks_take_it() {
    let test = "a_node_with_a_gpu_is_planned_by_it_and_its_ranks_take_it";
    let Some(device) = software_device(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    // Nobody takes a software driver without being told so.
    let node = |words: &[&str]| {
        let mut command = common::thunder(words);
        command
            .env("THUNDER_DATA", folder.path().join("node"))
            .env("THUNDER_DEVICE", &device)
            .env("RUST_LOG", "info");
        command
    };
    let text_of = |words: &[&str]| {
        let output = node(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let agent = ["up", "--name", "ant", "--listen", "127.0.0.1:0", "--port", "0", "--no-discovery"];
    let _agent = common::Ending(node(&agent).stderr(std::process::Stdio::null()).spawn().unwrap());
    let began = Instant::now();
    while !node(&["cluster", "status"]).output().unwrap().status.success() {
        assert!(began.elapsed().as_secs() < 30, "no agent");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(text_of(&["devices", "list"]).contains("not measured"));

    // Measured, reported, planned.
    let plan: Value = serde_json::from_str(&text_of(&["cluster", "plan", "builtin", "--json"])).unwrap();
    let planned = &plan["nodes"][0];
    let name = format!("{device} (llvmpipe");
    assert!(planned["device"].as_str().unwrap().starts_with(&name), "{plan}");
    let status: Value = serde_json::from_str(&text_of(&["cluster", "status", "--json"])).unwrap();
    let gpu = &status["members"][0]["report"]["speed"]["gpu"];
    let figures =
        ["memory_bytes_s", "weight_bytes_s", "decode_flops", "prompt_flops", "kernel_ns", "step_rows"];
    assert!(figures.iter().all(|figure| gpu[figure].as_u64().unwrap() > 0), "{gpu}");
    assert!(gpu["queue_way"].is_null() && gpu["host_way"]["bytes_s"].as_u64().unwrap() > 0, "{gpu}");
    let rate = |value: &Value| value.as_f64().unwrap();
    assert_eq!(rate(&planned["speed"]["memory_bytes_s"]), rate(&gpu["weight_bytes_s"]));
    assert!(rate(&planned["speed"]["exchange"]["short"]["latency_s"]) > 0.0, "{plan}");
    let quiet = node(&["devices", "list"]).env_remove("XDG_RUNTIME_DIR").output().unwrap();
    let said = String::from_utf8_lossy(&quiet.stderr);
    assert!(quiet.status.success() && !said.contains("XDG_RUNTIME_DIR"), "{said}");
    let shown = String::from_utf8_lossy(&quiet.stdout);
    assert!(shown.contains(" GB/s") && shown.contains(" Gop/s"), "{shown}");
    for shown in [text_of(&["devices", "list"]), text_of(&["cluster", "status"])] {
        assert!(shown.contains("llvmpipe"), "{shown}");
    }
    let by_processor = text_of(&["cluster", "plan", "builtin", "--device", "cpu", "--json"]);
    let by_processor: Value = serde_json::from_str(&by_processor).unwrap();
    assert_eq!(by_processor["nodes"][0]["device"], "cpu");
    assert!(by_processor["nodes"][0]["speed"]["exchange"].is_null(), "{by_processor}");
    let other = node(&["cluster", "plan", "builtin", "--device", "gpu:9"]).output().unwrap();
    let why = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && why.contains("ant has measured gpu:"), "{why}");

    // Loaded on it.
    text_of(&["model", "load", "builtin", "--wait", "120"]);
    let log = text_of(&["cluster", "logs"]);
    assert!(log.lines().any(|line| line.contains("group formed") && line.contains(&name)), "{log}");
    assert!(node(&["cluster", "stop"]).output().unwrap().status.success());
}
