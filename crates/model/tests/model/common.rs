//! Logits of small models against a reference's.

use std::ops::ControlFlow;
use std::path::Path;

use safetensors::SafeTensors;
use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Overlap, Step};
use thunder_model::{Capacity, Model, ModelFolder, ShardPlan};

/// One prompt of a fixture, and the reference's results for it.
pub struct Golden {
    pub tokens: Vec<u32>,
    positions: Vec<usize>,
    pub logits: Vec<f32>,
    pub argmax: Vec<u32>,
}

/// The prompts in a file; the logits are the tensors `logits.0`, ….
pub fn golden(file: &Path, logits: &str) -> Vec<Golden> {
    let bytes = std::fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words =
        |name: String| -> Vec<[u8; 4]> { file.tensor(&name).unwrap().data().as_chunks::<4>().0.to_vec() };
    let ints = |name: String| -> Vec<u32> { words(name).into_iter().map(u32::from_le_bytes).collect() };
    (0..3)
        .map(|i| Golden {
            tokens: ints(format!("tokens.{i}")),
            positions: ints(format!("positions.{i}")).into_iter().map(|p| p as usize).collect(),
            logits: words(format!("{logits}.{i}")).into_iter().map(f32::from_le_bytes).collect(),
            argmax: ints(format!("argmax.{i}")),
        })
        .collect()
}

/// A prompt's logits on one rank, `[positions, local vocabulary]`, computed in pieces of `chunk`
/// tokens, with the folder's last adapter if it has one.
pub fn logits(
    golden: &[Golden],
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
    golden
        .iter()
        .map(|golden| {
            let blocks: Vec<u32> =
                (0..golden.tokens.len().div_ceil(KV_BLOCK_TOKENS) as u32).map(|i| 7 - i).collect();
            let (mut all, mut rows) = (Vec::new(), Vec::new());
            for (index, tokens) in golden.tokens.chunks(chunk).enumerate() {
                let mut step = Step::default();
                step.push(tokens, index * chunk, &blocks, 0, false);
                step.sequences[0].adapter = folder.adapters.len() as u32;
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
pub fn sharded_logits(
    golden: &[Golden],
    folder: &ModelFolder,
    plan: &ShardPlan,
    arithmetic: (Activations, Overlap),
    chunk: usize,
) -> Vec<Vec<f32>> {
    sharded_logits_of(golden, &|_| folder, plan, arithmetic, chunk)
}

/// As [`sharded_logits`], with a folder for each rank.
pub fn sharded_logits_of<'a>(
    golden: &[Golden],
    folder_of: &(dyn Fn(usize) -> &'a ModelFolder + Sync),
    plan: &ShardPlan,
    arithmetic: (Activations, Overlap),
    chunk: usize,
) -> Vec<Vec<f32>> {
    let parts = local::run(plan.ranks(), TransportChoice::Shm, |group| {
        logits(golden, folder_of(group.rank()), plan, group, arithmetic, chunk)
    })
    .unwrap();
    (0..3)
        .map(|prompt| {
            let rows = golden[prompt].tokens.len();
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

/// Relative error over all kept positions, or of the median position, and the share of positions
/// with the same most likely token.
///
/// The median is for models with a router whose activations are rounded: where two experts are
/// nearly equal, rounding changes the choice, and the position has other logits.
pub fn compare(golden: &[Golden], ours: &[Vec<f32>], median: bool) -> (f64, f64) {
    let (errors, same) = compare_positions(golden, ours);
    if median {
        let mut errors: Vec<f64> = errors.iter().map(|(error, norm)| (error / norm).sqrt()).collect();
        errors.sort_by(f64::total_cmp);
        return (errors[errors.len() / 2], same);
    }
    let (error, norm) = errors.iter().fold((0.0, 0.0), |(a, b), (error, norm)| (a + error, b + norm));
    ((error / norm).sqrt(), same)
}

/// Squares of error and norm of each kept position, and the share of positions with the same most
/// likely token.
fn compare_positions(golden: &[Golden], ours: &[Vec<f32>]) -> (Vec<(f64, f64)>, f64) {
    let (mut errors, mut same, mut positions) = (Vec::new(), 0, 0);
    for (golden, ours) in golden.iter().zip(ours) {
        let vocab = golden.logits.len() / golden.positions.len();
        for (position, expected) in golden.positions.iter().zip(golden.logits.chunks(vocab)) {
            let pairs = ours[position * vocab..][..vocab].iter().zip(expected);
            errors.push(pairs.fold((0.0, 0.0), |(error, norm), (a, b)| {
                (error + f64::from(a - b).powi(2), norm + f64::from(*b).powi(2))
            }));
        }
        for (row, expected) in ours.chunks(vocab).zip(&golden.argmax) {
            let best = (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            same += usize::from(best as u32 == *expected);
            positions += 1;
        }
    }
    (errors, same as f64 / positions as f64)
}

/// Largest relative error, and smallest share of positions with the same argmax.
pub fn limits(activations: Activations) -> (f64, f64) {
    match activations {
        Activations::Int16 | Activations::F32 => (1e-3, 0.995),
        // bf16 on matrix units.
        Activations::Bf16 => (1e-2, 0.98),
        Activations::Auto | Activations::Int8 => (1e-2, 0.95),
    }
}

pub fn check(case: &Path, what: &str, (error, same): (f64, f64), limits: (f64, f64)) {
    let name = case.file_name().unwrap().display();
    println!("{name:32} {what:12} relative error {error:.1e}, same argmax {:.1} %", same * 100.0);
    assert!(error < limits.0, "{name}, {what}: relative error {error:.2e}, allowed {:.0e}", limits.0);
    assert!(same >= limits.1, "{name}, {what}: same argmax on {same:.3}, required {}", limits.1);
}
