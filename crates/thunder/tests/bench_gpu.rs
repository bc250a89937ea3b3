//! `thunder bench gpu` and `thunder bench kernels --device` on Mesa's software driver.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

use serde_json::Value;

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
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "the model is still there");
}

#[test]
fn operations_of_a_gpu_are_measured() {
    let Some(device) = software_device("operations_of_a_gpu_are_measured") else { return };
    let report = json_of(&[
        "bench", "kernels", "--device", &device, "--op", "norm", "--rows", "1", "--time", "1", "--json",
    ]);
    assert!(report["rows"][0]["us"].as_f64().unwrap() > 0.0, "{report}");
    assert!(report["rows"][0]["peak_share"].as_f64().unwrap() > 0.0, "{report}");
}

#[test]
fn sums_between_gpu_ranks_are_measured() {
    let Some(device) = software_device("sums_between_gpu_ranks_are_measured") else { return };
    let report = json_of(&["bench", "comm", "--device", &device, "--ranks", "2", "--sizes", "64", "--json"]);
    assert_eq!(report["rows"][0]["ranks"], 2, "{report}");
    assert_eq!(report["rows"][0]["in_queue"], false, "{report}");
    assert!(report["rows"][0]["median_us"].as_f64().unwrap() > 0.0, "{report}");
}
