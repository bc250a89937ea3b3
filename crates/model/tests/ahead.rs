//! Layers that predict further tokens against an implementation in NumPy, on one rank and on
//! several. The fixtures and how they were made: tests/golden/README.md.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Step};
use thunder_model::model::shard_footprints;
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan, unread_tensors};

use common::{Golden, compare, golden, limits};

/// With both, rounding changes no choice of experts.
const EXACT: Activations = Activations::Int16;

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/ahead").join(name)
}

/// What a rank computes of a prompt, of its part of the vocabulary.
#[derive(Default)]
struct Predicted {
    /// What follows each token but the first, by the whole prompt at once.
    whole: Vec<f32>,
    /// What follows the last token, after the prompt was read in pieces.
    last: Vec<f32>,
    /// What follows the guess after it.
    further: Vec<f32>,
}

/// `argmax` is the guess of what follows the prompt.
fn predict(folder: &ModelFolder, plan: &ShardPlan, group: Group, tokens: &[u32], guess: u32) -> Predicted {
    let rank = group.rank();
    let mut backend = CpuBackend::new(&CpuConfig::new(1, Isa::detect().unwrap(), EXACT), group);
    let capacity = Capacity { rows: 70, logit_rows: 70, kv_blocks: 8, slots: 2, kv_format: KvFormat::F16 };
    let mut model =
        Model::load(folder, plan, rank, capacity, &mut backend, &mut |_, _| ControlFlow::Continue(()))
            .unwrap();
    assert!(model.predicts_ahead());
    let (count, hidden) = (tokens.len() - 1, folder.spec.hidden);
    let all = |tokens: &[u32], start: usize, blocks: &[u32]| {
        let mut step = Step::default();
        step.push(tokens, start, blocks, 0, false);
        step.logit_rows = (0..tokens.len() as u32).collect();
        step
    };
    let mut predicted = Predicted::default();
    // The whole prompt.
    let blocks = [7, 6, 5];
    let step = all(&tokens[..count], 0, &blocks);
    model.forward(&mut backend, &step, None).unwrap();
    let mut states = vec![0.0; count * hidden];
    model.read_normed(&mut backend, &step, &mut states).unwrap();
    model.predict(&mut backend, &all(&tokens[1..], 0, &blocks), &states).unwrap();
    model.read_logits(&mut backend, &step, &mut predicted.whole).unwrap();
    // In pieces, in other blocks. Of the last row only, the layer is asked afterwards.
    let blocks = [2, 1, 0];
    for start in (0..count).step_by(25) {
        let end = count.min(start + 25);
        let mut step = all(&tokens[start..end], start, &blocks);
        step.logit_rows = vec![(end - start - 1) as u32];
        model.forward(&mut backend, &step, None).unwrap();
        states.resize(hidden, 0.0);
        model.read_normed(&mut backend, &step, &mut states).unwrap();
        let mut next = tokens[start + 1..end].to_vec();
        next.push(if end == count { 0 } else { tokens[end] });
        model.read_ahead(&mut backend, &step, &next).unwrap();
    }
    let step = all(&tokens[count..], count - 1, &blocks);
    model.predict(&mut backend, &step, &states).unwrap();
    model.read_logits(&mut backend, &step, &mut predicted.last).unwrap();
    model.read_chained(&mut backend, &step, &mut states).unwrap();
    let step = all(&[guess], count, &blocks);
    model.predict(&mut backend, &step, &states).unwrap();
    model.read_logits(&mut backend, &step, &mut predicted.further).unwrap();
    predicted
}

/// The ranks' rows joined, each over the whole vocabulary.
fn joined(parts: &[Predicted], rows: usize, of: impl Fn(&Predicted) -> &Vec<f32>) -> Vec<f32> {
    let row = |row: usize| {
        parts.iter().map(&of).flat_map(move |part| {
            let width = part.len() / rows;
            part[row * width..][..width].to_vec()
        })
    };
    (0..rows).flat_map(row).collect()
}

fn error(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let off = square(&mut ours.iter().zip(expected).map(|(a, b)| a - b));
    (off / square(&mut expected.iter().copied())).sqrt()
}

#[test]
fn any_number_of_ranks_predicts_what_the_reference_does() {
    for name in ["deepseek_v3", "glm4_moe", "mimo"] {
        let path = case(name);
        let folder = ModelFolder::open(&path).unwrap();
        let prompts: Vec<Golden> = golden(&path.join("golden.safetensors"), "logits");
        let bytes = std::fs::read(path.join("golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let further = |index: usize| -> Vec<f32> {
            let tensor = file.tensor(&format!("further.{index}")).unwrap();
            tensor.data().as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
        };
        for weights in [&[1.0][..], &[1.0; 2], &[1.0; 3], &[3.0, 1.0]] {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            let mut whole = Vec::new();
            for (index, prompt) in prompts.iter().enumerate() {
                let (tokens, guess) = (&prompt.tokens, *prompt.argmax.last().unwrap());
                let parts = match weights.len() {
                    1 => vec![predict(&folder, &plan, Group::solo(), tokens, guess)],
                    ranks => local::run(ranks, TransportChoice::Shm, |group| {
                        predict(&folder, &plan, group, tokens, guess)
                    })
                    .unwrap(),
                };
                let (rows, vocab) = (tokens.len() - 1, folder.spec.vocab);
                whole.push(joined(&parts, rows, |part| &part.whole));
                let what = format!("{name}, {weights:?}, prompt {index}");
                let last = joined(&parts, 1, |part| &part.last);
                let expected = &prompt.logits[(rows - 1) * vocab..];
                let of_last = error(&last, expected);
                let of_further = error(&joined(&parts, 1, |part| &part.further), &further(index));
                println!("{what}: error of the last {of_last:.1e}, of the one after it {of_further:.1e}");
                assert!(of_last < 1e-3 && of_further < 1e-3, "{what}: {of_last:.1e}, {of_further:.1e}");
            }
            let (error, same) = compare(&prompts, &whole, false);
            println!("{name}, {weights:?}: relative error {error:.1e}");
            let (most, least) = limits(EXACT);
            assert!(error < most && same >= least, "{name}, {weights:?}: {error:.1e}, {same}");
        }
    }
}

#[test]
fn the_layer_is_counted_and_may_be_left_out() {
    for name in ["deepseek_v3", "glm4_moe", "mimo"] {
        let mut folder = ModelFolder::open(&case(name)).unwrap();
        for (parallel, ranks) in [(Parallelism::Tensor, 2), (Parallelism::Pipeline, 2)] {
            let plan = ShardPlan::new(&folder.spec, parallel, &vec![1.0; ranks]).unwrap();
            let with = shard_footprints(&folder, &plan, KvFormat::F16).unwrap();
            assert_eq!(unread_tensors(&folder), None, "{name}");
            let ahead = folder.spec.ahead.take();
            assert!(ahead.is_some());
            let without = shard_footprints(&folder, &plan, KvFormat::F16).unwrap();
            assert_eq!(unread_tensors(&folder), None, "{name}");
            folder.spec.ahead = ahead;
            for (rank, (with, without)) in with.iter().zip(&without).enumerate() {
                let has_it = parallel == Parallelism::Tensor || rank == 1;
                let extra = with.weight_bytes - without.weight_bytes;
                // The last stage of a pipeline also has the embedding.
                let embedding = match parallel {
                    Parallelism::Pipeline if has_it => (2 * folder.spec.vocab * folder.spec.hidden) as u64,
                    _ => 0,
                };
                assert_eq!(extra, with.ahead_bytes + embedding, "{name}, {parallel:?}, rank {rank}");
                assert_eq!(with.ahead_bytes > 0, has_it);
                let layers = without.layers.len() as u64;
                let kv = without.kv_bytes_per_token / layers * (layers + u64::from(has_it));
                assert_eq!(with.kv_bytes_per_token, kv, "{name}, {parallel:?}, rank {rank}");
            }
        }
    }
}
