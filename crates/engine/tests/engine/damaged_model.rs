//! A model whose weights are damaged ends requests with an error, and serves no text.

use std::path::Path;

use crate::common::{PATIENCE, read, with_engine_of};
use thunder_engine::{Event, Limits, Request, Sampling};
use thunder_model::Parallelism;

/// A copy of a model in which these tensors' 16-bit floats are NaN, in all rows or in one.
fn damaged(model: &Path, tensors: &[&str], row: Option<usize>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    fill_with_nan(&folder.path().join("model.safetensors"), tensors, row);
    folder
}

fn fill_with_nan(path: &Path, tensors: &[&str], row: Option<usize>) {
    let mut bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let entries: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    for name in tensors {
        let number = |key: &str, index: usize| entries[*name][key][index].as_u64().unwrap() as usize;
        let [mut from, mut to] = [0, 1].map(|end| 8 + header + number("data_offsets", end));
        if let Some(row) = row {
            let row_bytes = (to - from) / number("shape", 0);
            (from, to) = (from + row * row_bytes, from + (row + 1) * row_bytes);
        }
        bytes[from..to].chunks_exact_mut(2).for_each(|number| number.copy_from_slice(&[0xff, 0x7f]));
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn logits_that_are_not_finite_end_a_request_with_an_error() {
    for (tensors, place) in [
        (&["model.layers.3.mlp.down_proj.scales"][..], "the feed-forward of layer 3,"),
        (&["model.layers.0.self_attn.v_proj.scales"], "the attention of layer 0,"),
        (&["model.layers.5.mlp.gate_proj.biases"], "the feed-forward of layer 5,"),
        (
            &["model.layers.5.mlp.up_proj.scales", "model.layers.4.self_attn.o_proj.biases"],
            "the attention of layer 4,",
        ),
        (&["model.embed_tokens.scales"], "the embedding"),
    ] {
        let folder = damaged(&thunder_testing::builtin_model(), tensors, None);
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
                        Some(Event::Failed { message, .. }) => {
                            assert!(message.contains("not finite"), "{message}");
                            assert!(message.contains(&format!("came out of {place}")), "{what}: {message}");
                        }
                        other => panic!("{what}: {other:?}"),
                    }
                    assert!(stream.next_within(PATIENCE).unwrap().is_none(), "{what}: nothing follows");
                }
            });
        }
    }
}

/// With several residual streams, all of them are checked for what a part has added.
#[test]
fn damage_is_found_in_several_residual_streams() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases");
    for (tensor, place) in [
        ("model.layers.2.attn.wo_b.weight", "the attention of layer 2,"),
        ("model.layers.1.ffn.shared_experts.w2.weight", "the feed-forward of layer 1,"),
    ] {
        let folder = damaged(&cases.join("transformers-deepseek_v4"), &[tensor], None);
        let limits =
            Limits { sequences: 4, rows: 32, kv_blocks: 32, snapshots: Some(2), ..Limits::default() };
        for (ranks, parallel) in
            [(1, Parallelism::Tensor), (2, Parallelism::Tensor), (2, Parallelism::Pipeline)]
        {
            with_engine_of(folder.path(), ranks, parallel, limits, |engine| {
                let request =
                    Request { prompt: vec![5, 9, 12, 3], max_tokens: Some(8), ..Request::default() };
                let mut stream = engine.submit(request).unwrap();
                let what = format!("{tensor}, {ranks} ranks, {parallel:?}");
                match stream.next_within(PATIENCE).unwrap() {
                    Some(Event::Failed { message, .. }) => {
                        assert!(message.contains("not finite"), "{what}: {message}");
                        assert!(message.contains(&format!("came out of {place}")), "{what}: {message}");
                    }
                    other => panic!("{what}: {other:?}"),
                }
            });
        }
    }
}

/// Locating the damage computes a step once more, including the rows of other requests.
#[test]
fn a_damaged_token_ends_its_requests_and_changes_no_other_answer() {
    const DAMAGED: usize = 77;
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases");
    // Keys and values are written again, but a state would advance twice.
    for (case, has_states) in [("mistral-4bit-window", false), ("qwen3_next-4bit", true)] {
        let folder = damaged(&cases.join(case), &["model.embed_tokens.scales"], Some(DAMAGED));
        let limits = Limits {
            sequences: 4,
            rows: 32,
            kv_blocks: 32,
            snapshots: has_states.then_some(2),
            ..Limits::default()
        };
        for (ranks, parallel) in
            [(1, Parallelism::Tensor), (2, Parallelism::Tensor), (2, Parallelism::Pipeline)]
        {
            with_engine_of(folder.path(), ranks, parallel, limits, |engine| {
                // Nothing generates the token.
                let sampling = Sampling {
                    temperature: 0.0,
                    logit_bias: vec![(DAMAGED as u32, -100.0)],
                    ..Sampling::default()
                };
                let submit = |prompt: &[u32], max_tokens| {
                    let prompt = prompt.to_vec();
                    let request = Request {
                        prompt,
                        sampling: sampling.clone(),
                        max_tokens: Some(max_tokens),
                        ignore_eos: true,
                        ..Request::default()
                    };
                    engine.submit(request).unwrap()
                };
                let what = format!("{case}, {ranks} ranks, {parallel:?}");
                let alone = read(submit(&[5, 9, 12, 3], 100));
                let mut located = 0;
                for _ in 0..5 {
                    let healthy = submit(&[5, 9, 12, 3], 100);
                    for mut damaged in [3, 4].map(|first| submit(&[first, DAMAGED as u32, 8], 4)) {
                        match damaged.next_within(PATIENCE).unwrap() {
                            Some(Event::Failed { message, .. }) => {
                                assert!(message.contains("not finite"), "{what}: {message}");
                                located += usize::from(message.contains("came out of the embedding"));
                            }
                            other => panic!("{what}: {other:?}"),
                        }
                    }
                    assert_eq!(read(healthy), alone, "{what}");
                }
                if parallel == Parallelism::Tensor && !has_states {
                    assert_eq!(located, 10, "{what}");
                }
            });
        }
    }
}
