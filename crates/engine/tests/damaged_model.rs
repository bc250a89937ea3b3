//! A model whose weights are damaged ends requests with an error, and serves no text.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;

use common::{PATIENCE, with_engine_of};
use thunder_engine::{Event, Limits, Request, Sampling};
use thunder_model::Parallelism;

/// A copy of the built-in model in which these tensors' 16-bit floats are NaN.
fn damaged(tensors: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(thunder_testing::builtin_model()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    fill_with_nan(&folder.path().join("model.safetensors"), tensors);
    folder
}

fn fill_with_nan(path: &Path, tensors: &[&str]) {
    let mut bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let entries: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    for name in tensors {
        let offsets = &entries[*name]["data_offsets"];
        let [from, to] = [0, 1].map(|end| 8 + header + offsets[end].as_u64().unwrap() as usize);
        bytes[from..to].chunks_exact_mut(2).for_each(|number| number.copy_from_slice(&[0xff, 0x7f]));
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn logits_that_are_not_finite_end_a_request_with_an_error() {
    for tensors in [
        &["model.layers.3.mlp.down_proj.scales"][..],
        &["model.layers.0.self_attn.v_proj.scales"],
        &["model.layers.5.mlp.gate_proj.biases"],
    ] {
        let folder = damaged(tensors);
        let limits =
            Limits { sequences: 4, rows: 32, kv_blocks: 32, prefix_cache: true, ..Limits::default() };
        for (ranks, parallel) in
            [(1, Parallelism::Tensor), (2, Parallelism::Tensor), (2, Parallelism::Pipeline)]
        {
            with_engine_of(folder.path(), ranks, parallel, limits, |engine| {
                for (temperature, logprobs) in [(0.0, None), (1.0, None), (0.0, Some(2))] {
                    let request = Request {
                        prompt: engine.info().tokenizer.encode("What is a rank?", false).unwrap(),
                        sampling: Sampling { temperature, ..Sampling::default() },
                        max_tokens: Some(8),
                        stop: Vec::new(),
                        ignore_eos: true,
                        logprobs,
                        ..Request::default()
                    };
                    let mut stream = engine.submit(request).unwrap();
                    let what = format!("{tensors:?}, {ranks} ranks, {parallel:?}, temperature {temperature}");
                    match stream.next_within(PATIENCE).unwrap() {
                        Some(Event::Failed { message }) => {
                            assert!(message.contains("not finite"), "{message}")
                        }
                        other => panic!("{what}: {other:?}"),
                    }
                    assert!(stream.next_within(PATIENCE).unwrap().is_none(), "{what}: nothing follows");
                }
            });
        }
    }
}
