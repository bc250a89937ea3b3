//! Logits against MLX-LM, for every architecture and weight format, on one rank and on several.
//!
//! The fixtures and how they were made: tests/golden/README.md.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Overlap, Step};
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan};

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases");
    let mut cases: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    assert!(cases.len() >= 30, "the fixtures are there");
    cases
}

/// One prompt of a fixture and MLX-LM's results for it.
struct Golden {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    logits: Vec<f32>,
    argmax: Vec<u32>,
}

fn golden(case: &Path) -> Vec<Golden> {
    let bytes = std::fs::read(case.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words =
        |name: String| -> Vec<[u8; 4]> { file.tensor(&name).unwrap().data().as_chunks::<4>().0.to_vec() };
    let ints = |name: String| -> Vec<u32> { words(name).into_iter().map(u32::from_le_bytes).collect() };
    (0..3)
        .map(|i| Golden {
            tokens: ints(format!("tokens.{i}")),
            positions: ints(format!("positions.{i}")).into_iter().map(|p| p as usize).collect(),
            logits: words(format!("logits.{i}")).into_iter().map(f32::from_le_bytes).collect(),
            argmax: ints(format!("argmax.{i}")),
        })
        .collect()
}

/// A prompt's logits on one rank, `[positions, local vocabulary]`, computed in pieces of `chunk`
/// tokens.
fn logits(
    folder: &ModelFolder,
    plan: &ShardPlan,
    group: Group,
    (activations, overlap): (Activations, Overlap),
    chunk: usize,
) -> Vec<Vec<f32>> {
    let rank = group.rank();
    let isa = Isa::detect().unwrap();
    let config = CpuConfig { packing_threads: 2, overlap, ..CpuConfig::new(1, isa, activations) };
    let mut backend = CpuBackend::new(&config, group);
    let capacity = Capacity { rows: 70, logit_rows: 70, kv_blocks: 8, slots: 2, kv_format: KvFormat::F16 };
    let mut model =
        Model::load(folder, plan, rank, capacity, &mut backend, &mut |_, _| ControlFlow::Continue(()))
            .unwrap();
    golden(&folder.path)
        .iter()
        .map(|golden| {
            let blocks: Vec<u32> =
                (0..golden.tokens.len().div_ceil(KV_BLOCK_TOKENS) as u32).map(|i| 7 - i).collect();
            let (mut all, mut rows) = (Vec::new(), Vec::new());
            for (index, tokens) in golden.tokens.chunks(chunk).enumerate() {
                let mut step = Step::default();
                step.push(tokens, index * chunk, &blocks, 0, false);
                // On matrix units prompts are bf16. Generated tokens are integers there too.
                let bytes = matches!(activations, Activations::Auto | Activations::Int8);
                step.sequences[0].prompt &= !(bytes && isa.name() == "amx");
                step.logit_rows = (0..tokens.len() as u32).collect();
                model.forward(&mut backend, &step, None).unwrap();
                model.read_logits(&mut backend, &step, &mut rows).unwrap();
                all.extend_from_slice(&rows);
            }
            all
        })
        .collect()
}

/// The logits of all ranks joined, `[positions, vocabulary]`.
fn sharded_logits(
    folder: &ModelFolder,
    plan: &ShardPlan,
    arithmetic: (Activations, Overlap),
    chunk: usize,
) -> Vec<Vec<f32>> {
    let parts = local::run(plan.ranks(), TransportChoice::Shm, |group| {
        logits(folder, plan, group, arithmetic, chunk)
    })
    .unwrap();
    (0..3)
        .map(|prompt| {
            let rows = golden(&folder.path)[prompt].tokens.len();
            (0..rows)
                .flat_map(|row| {
                    parts.iter().flat_map(move |part: &Vec<Vec<f32>>| {
                        let width = part[prompt].len() / rows;
                        part[prompt][row * width..][..width].to_vec()
                    })
                })
                .collect()
        })
        .collect()
}

/// Relative error over all kept positions, and the share of positions with the same most likely
/// token.
fn compare(case: &Path, ours: &[Vec<f32>]) -> (f64, f64) {
    let (mut error, mut norm, mut same, mut positions) = (0.0, 0.0, 0, 0);
    for (golden, ours) in golden(case).iter().zip(ours) {
        let vocab = golden.logits.len() / golden.positions.len();
        for (position, expected) in golden.positions.iter().zip(golden.logits.chunks(vocab)) {
            for (a, b) in ours[position * vocab..][..vocab].iter().zip(expected) {
                error += f64::from(a - b).powi(2);
                norm += f64::from(*b).powi(2);
            }
        }
        for (row, expected) in ours.chunks(vocab).zip(&golden.argmax) {
            let best = (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            same += usize::from(best as u32 == *expected);
            positions += 1;
        }
    }
    ((error / norm).sqrt(), same as f64 / positions as f64)
}

/// Largest relative error, and smallest share of positions with the same argmax.
fn limits(activations: Activations) -> (f64, f64) {
    match activations {
        Activations::Int16 | Activations::F32 => (1e-3, 0.995),
        // bf16 on matrix units.
        Activations::Bf16 => (1e-2, 0.98),
        Activations::Auto | Activations::Int8 => (1e-2, 0.95),
    }
}

fn check(case: &Path, what: &str, (error, same): (f64, f64), limits: (f64, f64)) {
    let name = case.file_name().unwrap().display();
    println!("{name:32} {what:12} relative error {error:.1e}, same argmax {:.1} %", same * 100.0);
    assert!(error < limits.0, "{name}, {what}: relative error {error:.2e}, allowed {:.0e}", limits.0);
    assert!(same >= limits.1, "{name}, {what}: same argmax on {same:.3}, required {}", limits.1);
}

#[test]
fn one_rank_agrees_with_mlx() {
    for case in cases() {
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        for (activations, what) in [
            (Activations::Auto, "auto"),
            (Activations::Bf16, "bf16"),
            (Activations::Int16, "int16"),
            (Activations::Int8, "int8"),
        ] {
            let ours = logits(&folder, &plan, Group::solo(), (activations, Overlap::Auto), 70);
            check(&case, what, compare(&case, &ours), limits(activations));
        }
    }
}

#[test]
fn token_by_token_gives_the_bits_of_the_whole_prompt() {
    for name in ["qwen3-4bit-g64", "mistral-bf16-window", "ministral3-bf16", "llama-6bit-g32"] {
        let case = cases().into_iter().find(|case| case.ends_with(name)).unwrap();
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let whole = logits(&folder, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), 70);
        for chunk in [1, 13] {
            assert_eq!(
                whole,
                logits(&folder, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), chunk),
                "{name} by {chunk}"
            );
        }
    }
}

#[test]
fn any_number_of_ranks_and_any_split_agree_with_mlx() {
    let splits: [&[f64]; 6] = [&[1.0; 2], &[3.0, 1.0], &[1.0; 3], &[1.0, 0.2, 2.0], &[1.0; 4], &[1.0; 5]];
    for (index, case) in cases().iter().enumerate() {
        let folder = ModelFolder::open(case).unwrap();
        // All cases with all splits would take minutes, so each case has two of the splits in turn.
        for weights in [splits[index % splits.len()], splits[(index + 3) % splits.len()]] {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            for activations in [Activations::Int16, Activations::Bf16, Activations::Auto] {
                let [ours, in_halves] = [Overlap::Never, Overlap::Always]
                    .map(|overlap| sharded_logits(&folder, &plan, (activations, overlap), 45));
                assert_eq!(ours, in_halves, "{}, {weights:?}: sums in the background", case.display());
                check(case, &format!("{weights:?}"), compare(case, &ours), limits(activations));
            }
        }
    }
}

/// Wrapped checkpoints put the text model under other prefixes, and some do not say whether the
/// head is the embedding.
#[test]
fn a_wrapped_checkpoint_finds_its_head() {
    let case = cases().into_iter().find(|case| case.ends_with("llama-f32")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(case.join("golden.safetensors"), dir.path().join("golden.safetensors")).unwrap();
    let config = std::fs::read_to_string(case.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(case.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert!(file.names().contains(&"lm_head.weight"), "the case is untied");
    let whole = ModelFolder::open(&case).unwrap();
    let plan = ShardPlan::new(&whole.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let expected = logits(&whole, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), 70);
    for (inner, head) in
        [("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head")]
    {
        let rename = |name: &str| match name.strip_prefix("model.") {
            Some(rest) => format!("{inner}{rest}"),
            None => name.replace("lm_head", head),
        };
        let renamed: Vec<_> = file.tensors().into_iter().map(|(name, view)| (rename(&name), view)).collect();
        safetensors::serialize_to_file(renamed, None, &dir.path().join("model.safetensors")).unwrap();
        let folder = ModelFolder::open(dir.path()).unwrap();
        let ours = logits(&folder, &plan, Group::solo(), (Activations::Int16, Overlap::Auto), 70);
        assert!(ours == expected, "{inner} and {head}");
    }
}
