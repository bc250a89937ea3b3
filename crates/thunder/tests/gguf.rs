//! The program with GGUF files: the built-in model, converted, gives its golden answers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;

use common::converted::convert;
use common::run_json;
use serde_json::Value;

fn converted() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("thunderhead-F32.gguf");
    convert(&path);
    (folder, path)
}

#[test]
fn a_gguf_file_gives_the_golden_answers_on_any_ranks() {
    let golden: Vec<Value> =
        serde_json::from_slice(&std::fs::read(thunder_testing::builtin_golden()).unwrap()).unwrap();
    let (folder, path) = converted();
    // A folder with one GGUF file is that file.
    for (model, ranks) in [(path.as_path(), "1"), (folder.path(), "2"), (path.as_path(), "3")] {
        let ended = golden
            .iter()
            .filter(|case| case["completion"].as_array().unwrap().last() == Some(&Value::from(2)));
        for case in ended.take(3) {
            let question = case["messages"][0]["content"].as_str().unwrap();
            let model = model.to_str().unwrap();
            let answer =
                run_json(&["run", model, question, "--ranks", ranks, "--json", "--activations", "int16"]);
            assert_eq!(answer["text"], case["text"], "{question} on {ranks} ranks: {answer}");
        }
    }
}

#[test]
fn a_gguf_file_is_planned_and_described_like_a_folder() {
    let (_folder, path) = converted();
    let path = path.to_str().unwrap();
    let plan = run_json(&["plan", "--model", path, "--ranks", "2", "--json"]);
    assert_eq!((plan["family"].as_str(), plan["layers"].as_u64()), (Some("qwen3"), Some(6)));
    let ranks = plan["ranks"].as_array().unwrap();
    let bytes: Vec<u64> = ranks.iter().map(|rank| rank["weight_bytes"].as_u64().unwrap()).collect();
    let whole = plan["model_bytes"].as_u64().unwrap();
    assert!(bytes.iter().sum::<u64>() <= whole && bytes.iter().all(|bytes| *bytes > whole * 2 / 5), "{plan}");
    let found = run_json(&["model", "path", path, "--json"]);
    assert_eq!(found["model"], "thunderhead-F32");
    assert_eq!(found["bytes"].as_u64().unwrap(), std::fs::metadata(path).unwrap().len());
    let measured = run_json(&["bench", "decode", path, "--tokens", "4", "--threads", "1", "--json"]);
    assert!(measured.is_object(), "{measured}");
}
