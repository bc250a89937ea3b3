//! Wrong options, models and environments: each gives an error that names the value and the remedy.
//! Malformed model folders are in `crates/model/tests/model/bad_folders.rs`, malformed requests in
//! `crates/server/tests`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::{Path, PathBuf};

use common::thunder;

/// Runs the program, which must fail with an error that contains all of `expected`.
fn refused(args: &[&str], environment: &[(&str, &str)], expected: &[&str]) {
    let output = thunder(args).envs(environment.iter().copied()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{args:?} {environment:?} was taken");
    assert!(!error.contains("panicked"), "{args:?}: {error}");
    for part in expected {
        assert!(error.contains(part), "{args:?} {environment:?}: {part:?} is not in: {error}");
    }
}

#[test]
fn wrong_options_are_named() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["run"], &["<MODEL>", "Usage"]),
        (&["frobnicate"], &["frobnicate", "Usage"]),
        (&["run", "builtin", "hi", "--ranks", "0"], &["--ranks", "0", "1..=256"]),
        (&["run", "builtin", "hi", "--ranks", "two"], &["--ranks", "two"]),
        (&["run", "builtin", "hi", "--ranks", "3", "--split", "1,2"], &["2 weights for 3 ranks"]),
        (&["run", "builtin", "hi", "--ranks", "2", "--split", "1,0"], &["weight 0", "positive"]),
        (&["run", "builtin", "hi", "--ranks", "2", "--split", "1,x"], &["--split", "x"]),
        (&["plan", "--split", "1e308,1e308"], &["weight 1e308", "positive", "to 1000000"]),
        (&["plan", "--split", "1,inf"], &["weight inf", "positive"]),
        (&["plan", "--split", "1,NaN"], &["weight NaN", "positive"]),
        (&["serve", "--memory", "8"], &["--memory", "8G"]),
        (&["run", "builtin", "hi", "--memory", "900000G"], &["memory is 878.9 TiB", "available now"]),
        (&["run", "builtin", "hi", "--memory", "1M"], &["does not fit", "1.0 MiB", "--memory"]),
        (&["serve", "--wait", "0"], &["--wait", "1"]),
        (&["serve", "--ports", "9-8"], &["--ports", "9-8", "42000-42063"]),
        (&["run", "builtin", "hi", "--parallel", "diagonal"], &["diagonal", "tensor, pipeline"]),
        (&["plan", "--ranks", "7", "--parallel", "pipeline"], &["7 pipeline ranks for 6 layers"]),
        (&["plan", "--ranks", "6", "--stages", "4"], &["6 ranks", "among 4 stages"]),
        (&["plan", "--ranks", "14", "--stages", "7"], &["7 pipeline ranks for 6 layers"]),
        (&["plan", "--stages", "2", "--parallel", "tensor"], &["--stages", "cannot be used with"]),
        (&["plan", "builtin", "--model", "builtin"], &["--model", "cannot be used with"]),
        (&["run", "builtin", "hi", "--threads", "0"], &["threads is 0, but must be 1 to 1024"]),
        (&["run", "builtin", "hi", "--context", "5"], &["context is 5 tokens", "at least 32"]),
        (&["run", "builtin", "hi", "--context", "99999999"], &["context is 99999999 tokens", "2048"]),
        (&["run", "builtin", ""], &["prompt is empty"]),
        (&["run", "builtin", "hi", "--draft", "no-such-model"], &["--draft", "no-such-model"]),
        (&["serve", "--draft", "builtin", "--no-speculation"], &["--draft", "cannot be used with"]),
        (&["bench", "prefill", "--draft", "builtin"], &["--draft", "leave it out"]),
        (&["bench", "report", "--draft", "builtin"], &["--draft", "leave it out"]),
        (&["run", "builtin", "hi", "--logit-bias", "x"], &["42=-100"]),
        (&["bench", "decode", "--batch", "0"], &["--batch"]),
        (&["run", "builtin", "hi", "--temperature", "-1"], &["temperature is -1", "between 0 and 2"]),
        (&["bench", "decode", "builtin", "--tokens", "5000"], &["--tokens 5000", "2048 tokens"]),
        (&["bench", "membw", "--mib", "0"], &["--mib"]),
        (&["bench", "membw", "--threads", "99999"], &["--threads", "1024"]),
        (&["demo", "--ranks", "5", "--split", "1,1"], &["2 weights for 5 ranks"]),
        (&["run", "builtin", "hi", "--transport", "pigeon"], &["pigeon", "shm"]),
        (&["run", "builtin", "hi", "--temperature", "9"], &["temperature is 9", "between 0 and 2"]),
        (&["run", "builtin", "hi", "--top-p", "0"], &["top_p is 0"]),
        (&["run", "builtin", "hi", "--max-tokens", "0"], &["max_tokens is 0"]),
        (&["run", "builtin", "hi", "--stop", ""], &["stop is \"\""]),
        (&["serve", "--host", "0.0.0.0", "--port", "0"], &["0.0.0.0", "API key", "127.0.0.1"]),
        (&["serve", "--port", "99999"], &["99999"]),
        (
            &["serve", "--host", "no.such.name.invalid", "--port", "0"],
            &["--host no.such.name.invalid", "address"],
        ),
        (&["serve", "--allow-origin", "chat.example", "--port", "0"], &["chat.example", "SCHEME://HOST"]),
        (&["up", "--allow-origin", "chat.example", "--port", "0"], &["chat.example", "SCHEME://HOST"]),
        (&["serve", "--otlp", "localhost:4318", "--port", "0"], &["--otlp", "localhost:4318", "http://127"]),
        (&["up", "--otlp", "http://host:0", "--port", "0"], &["--otlp", "http://host:0", "http://127"]),
        (&["capacity", "llama-8b", "--currency", "<b>"], &["money.currency is \"<b>\"", "EUR"]),
        (&["capacity", "llama-8b", "--price", "-1"], &["money.machine_price is -1", "between 0"]),
        (&["capacity", "llama-8b", "--users", "-1"], &["'-1'", "--users"]),
        (&["keys", "create", "x", "--tokens-per-day", "-1"], &["-1", "--tokens-per-day", "whole number"]),
        (&["bench", "comm", "--op", "juggle"], &["juggle", "all_reduce"]),
        (&["bench", "comm", "--transport", "shm,pigeon"], &["pigeon", "--transport", "shm, tcp or rdma"]),
        (&["bench", "comm", "--sizes", "64K,1Q"], &["1Q", "--sizes", "64KiB"]),
        (&["bench", "kernels", "--op", "7/64"], &["7/64", "BITS/GROUP"]),
        (&["bench", "kernels", "--kernel", "sse"], &["--kernel sse", "portable"]),
        (&["bench", "kernels", "--rows", "0"], &["--rows"]),
        (&["model", "synth", "--arch", "llama-9b", "/tmp/never"], &["llama-9b", "llama-8b"]),
        (
            &["model", "synth", "--arch", "qwen3-moe-tiny", "--set", "experts=4", "/tmp/never"],
            &["num_experts_per_tok"],
        ),
        (
            &["model", "synth", "--arch", "qwen3-moe-tiny", "--set", "num_experts", "/tmp/never"],
            &["FIELD=JSON"],
        ),
    ];
    for (args, expected) in cases {
        refused(args, &[], expected);
    }
}

#[test]
fn missing_models_are_named() {
    refused(&["run", "nobody/nothing-4bit", "hi"], &[], &["nobody/nothing-4bit", "thunder model pull"]);
    refused(&["plan", "/no/such/folder"], &[], &["/no/such/folder", "there is no such folder"]);
    refused(&["run", "buildin", "hi"], &[], &["buildin", "comes with thunder is \"builtin\""]);
    refused(&["model", "pull", "a/b/c"], &[], &["\"a/b/c\" is not a name of the form org/name", "slash"]);
    refused(&["serve", "--model", "/etc"], &[], &["/etc"]);
}

#[test]
fn a_port_in_use_is_named_once() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let port = address.port().to_string();
    refused(&["serve", "--port", &port], &[], &[&port, "--port"]);
    let member = [("THUNDER_RANK", "0"), ("THUNDER_WORLD_SIZE", "2")];
    let output = thunder(&["run", "builtin", "hi"])
        .envs(member)
        .env("THUNDER_COORDINATOR", address.to_string())
        .env("THUNDER_SECRET", "s")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(error.matches("in use").count(), 1, "{error}");
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let mut child = thunder(&["run", "builtin", "What is a rank?", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.lines().all(|line| line.starts_with("KV cache: ")), "{said}");
}

#[test]
fn wrong_variables_are_named() {
    let run = ["run", "builtin", "hi"];
    refused(&run, &[("THUNDER_KERNEL", "abacus")], &["THUNDER_KERNEL=abacus", "portable"]);
    refused(&run, &[("THUNDER_RANK", "0")], &["THUNDER_RANK", "THUNDER_WORLD_SIZE"]);
    refused(&run, &[("THUNDER_WORLD_SIZE", "2")], &["THUNDER_WORLD_SIZE", "THUNDER_RANK is not"]);
    let fifth = [("THUNDER_RANK", "5"), ("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "127.0.0.1:1")];
    refused(&["demo"], &[("MLX_RANK", "0"), ("MLX_HOSTFILE", "/none")], &["/none"]);
    let joined = [("THUNDER_RANK", "0"), ("THUNDER_WORLD_SIZE", "2"), ("THUNDER_COORDINATOR", "127.0.0.1:1")];
    refused(&["demo"], &joined, &["starts its own ranks"]);
    let two = ["run", "builtin", "hi", "--ranks", "3"];
    refused(&two, &joined, &["--ranks 3", "THUNDER_WORLD_SIZE=2"]);
    refused(&["bench", "comm", "--ranks", "3"], &joined, &["--ranks 3", "THUNDER_WORLD_SIZE=2"]);
    refused(&run, &fifth, &["5", "ranks of a group of 2"]);
}

/// A small model with random weights.
fn tiny(dir: &tempfile::TempDir) -> PathBuf {
    let folder = dir.path().join("model");
    let mut synth = thunder(&["model", "synth", "--arch", "qwen3-tiny", "--bits", "4"]);
    assert!(synth.arg(&folder).output().unwrap().status.success());
    folder
}

/// Changes a number in config.json.
fn configure(folder: &Path, field: &str, value: u32) {
    let path = folder.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[field] = value.into();
    std::fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn layers_that_the_config_leaves_out_are_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let folder = tiny(&dir);
    let name = folder.to_str().unwrap();
    configure(&folder, "num_hidden_layers", 1);
    for command in [&["plan", name][..], &["run", name, "hi", "--max-tokens", "1", "--ranks", "2"]] {
        let output = thunder(command).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        assert_eq!(error.matches("warning: ").count(), 1, "{command:?}: {error}");
        assert!(error.contains("config.json has 1 layers"), "{command:?}: {error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_models_path_need_not_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join(std::ffi::OsStr::from_bytes(b"mod\xe8le"));
    std::fs::rename(tiny(&dir), &folder).unwrap();
    let run = |before: &[&str], after: &[&str]| {
        let output = thunder(before).arg(&folder).args(after).output().unwrap();
        assert!(output.status.success(), "{before:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    run(&["plan"], &[]);
    run(&["run"], &["hi", "--max-tokens", "1", "--ranks", "2"]);
    assert_eq!(run(&["model", "path"], &[]), [folder.as_os_str().as_bytes(), b"\n"].concat());
}

#[test]
fn a_context_that_does_not_fit_in_memory_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let folder = tiny(&dir);
    let name = folder.to_str().unwrap();
    configure(&folder, "max_position_embeddings", 2_000_000_000);
    refused(
        &["run", name, "hi", "--context", "2000000000"],
        &[],
        &["does not fit", "together", "a tenth stays free", "--context"],
    );
}

/// What `thunder model` commands of the Hugging Face cache say, without a hub that answers.
#[test]
fn an_update_asks_the_hub_although_the_model_is_complete() {
    let cache = tempfile::tempdir().unwrap();
    let (commit, folder) = ("0".repeat(40), cache.path().join("models--Org--Tiny"));
    let snapshot = folder.join("snapshots").join(&commit);
    for path in [&snapshot, &folder.join("refs"), &folder.join(".thunder")] {
        std::fs::create_dir_all(path).unwrap();
    }
    std::fs::write(folder.join("refs/main"), &commit).unwrap();
    std::fs::write(folder.join(".thunder").join(&commit), "config.json\nmodel.safetensors").unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::write(snapshot.join(name), "{}").unwrap();
    }
    let cache = cache.path().to_str().unwrap();
    let environment = [
        ("HF_HUB_CACHE", cache),
        ("HF_ENDPOINT", "http://127.0.0.1:1"),
        ("HF_HUB_OFFLINE", "0"),
        ("NO_PROXY", "*"),
    ];
    let pulled = thunder(&["model", "pull", "Org/Tiny"]).envs(environment).output().unwrap();
    assert!(pulled.status.success(), "it is complete: {}", String::from_utf8_lossy(&pulled.stderr));
    let cannot = ["cannot reach http://127.0.0.1:1", "1 of 1 models could not be updated"];
    refused(&["model", "update", "Org/Tiny"], &environment, &cannot);
    refused(&["model", "update", "--all"], &environment, &cannot);
}

#[test]
fn the_built_in_model_is_part_of_the_program() {
    for (command, says) in
        [("pull", "nothing has to be pulled"), ("update", "updated"), ("verify", "checked")]
    {
        for rest in [&[][..], &["--nodes", "all"]] {
            let output = thunder(&["model", command, "builtin"]).args(rest).output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
            assert!(said.starts_with("builtin is part of the program: ") && said.contains(says), "{said}");
        }
    }
    refused(&["model", "remove", "builtin"], &[], &["builtin is part of the program: it cannot be removed"]);
}
