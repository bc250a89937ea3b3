//! A made-up model with every kind of cache, from files to logits.

use std::ops::ControlFlow;
use std::path::Path;

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    Activation, Activations, Backend, CpuBackend, CpuConfig, Curve, HeadSharing, Isa, KvFormat, Overlap,
    Reference, Rope, Scores, Scoring, Step,
};

use super::{Capacity, Model, shard_footprints};
use crate::folder::{GenerationConfig, ModelFolder};
use crate::plan::{Parallelism, ShardPlan};
use crate::spec::{
    AttentionShape, Correction, DeltaShape, ExpertsShape, FeedForwardSpec, LatentShape, LayerSpec, MixerSpec,
    MlpShape, ModelSpec, Norms, QkNormWidth, RouterShape, SharedShape,
};
use crate::synth;
use crate::weights::{HuggingFace, Quantization};

const VOCAB: usize = 96;
const SLOTS: usize = 3;
const BLOCKS_OF_SLOT: usize = 3;

/// A layer of keys and values, one of compressed vectors, two of states: there are more states than
/// token caches, so that confusing the index of a layer with that of a cache is detected.
fn spec() -> ModelSpec {
    let attention = MixerSpec::Attention(AttentionShape {
        value_scale: 1.0,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        value_dim: 32,
        qkv_bias: true,
        out_bias: false,
        qk_norm: Some(QkNormWidth::All),
        scale: 0.2,
        output_gate: true,
        head_gates: false,
        window: Some(40),
        rope: Some(0),
        sinks: true,
        temperature: None,
        value_norm: false,
        values_are_keys: false,
        scoring: Scoring::default(),
        keys_of: None,
    });
    let latent = |query_rank| {
        MixerSpec::Latent(LatentShape {
            heads: 6,
            query_rank,
            rank: 64,
            plain: 32,
            rotated: 16,
            value_dim: 32,
            scale: 0.15,
            norm_eps: 1e-6,
            rope: Some(1),
            temperature: None,
            selection: None,
            output_gate: false,
        })
    };
    let delta = MixerSpec::Delta(DeltaShape {
        key_heads: 3,
        value_heads: 6,
        sharing: HeadSharing::Grouped,
        key_dim: 32,
        value_dim: 32,
        kernel: 4,
        unit_eps: 1e-6,
    });
    let mixers = [delta.clone(), attention, latent(None), delta, latent(Some(64))];
    let mlp =
        MlpShape { channels: 192, bias: false, activation: Some(Activation::Silu), curve: Curve::default() };
    let router = |scores, correction| RouterShape {
        scores,
        bias: false,
        correction: if correction { Correction::Given } else { Correction::None },
        groups: None,
        renormalise: true,
        scale: 1.5,
        assigned: false,
    };
    let experts = |router, shared| ExpertsShape {
        // Rounded activations sometimes change the choice of the least important expert, which has
        // little effect.
        experts: 6,
        chosen: 5,
        channels: 128,
        bias: false,
        activation: Some(Activation::Silu),
        latent: None,
        latent_norm: false,
        router,
        shared,
        weighs_input: false,
        transposed: false,
    };
    let layer = |(index, mixer)| LayerSpec {
        mixer,
        feed_forward: match index {
            1 => FeedForwardSpec::Experts(experts(router(Scores::Softmax, false), None)),
            3 => {
                let shared = SharedShape { channels: 192, gated: true };
                FeedForwardSpec::Experts(experts(router(Scores::Sigmoid, true), Some(shared)))
            }
            _ => FeedForwardSpec::Mlp(mlp.clone()),
        },
        norms: match index {
            1 | 2 => Norms::Around,
            4 => Norms::After,
            _ => Norms::Before,
        },
        scaled: false,
    };
    let rope = |pairs: i32| Rope {
        inverse_frequencies: (0..pairs).map(|i| 0.5f32.powi(i)).collect(),
        amplitude: 1.0,
        interleaved: pairs == 8,
    };
    ModelSpec {
        family: "made up".into(),
        hidden: 128,
        vocab: VOCAB,
        context: 96,
        streams: None,
        engram: None,
        layer_inputs: None,
        norm_eps: 1e-5,
        norms_less_one: true,
        centered: false,
        embedding_scale: 3.0,
        residual_scale: 1.0,
        residual_block: None,
        logit_scale: 0.5,
        logit_cap: None,
        tied: Some(false),
        encoder: None,
        ropes: vec![rope(16), rope(8)],
        layers: mixers.into_iter().enumerate().map(layer).collect(),
        ahead: None,
        further: 0,
        eos: Vec::new(),
    }
}

fn folder(path: &Path, quantization: Option<(u32, usize)>) -> ModelFolder {
    let spec = spec();
    synth::write_weights(&spec, quantization, path).expect("written");
    let config = match quantization {
        Some((bits, group)) => serde_json::json!({ "quantization": { "bits": bits, "group_size": group } }),
        None => serde_json::json!({}),
    };
    let quantization = Quantization::read(&config, path).expect("quantization");
    let weights = Box::new(HuggingFace::open(path, quantization).expect("weights"));
    ModelFolder {
        path: path.to_owned(),
        spec,
        weights,
        adapters: Vec::new(),
        generation: GenerationConfig::default(),
        gguf: None,
    }
}

/// Tokens of a sequence, from a position on, in a slot.
struct Piece {
    slot: usize,
    start: usize,
    tokens: Vec<u32>,
}

fn text(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + seed * 11 + i * i) % VOCAB as u32).collect()
}

/// Logits of every row, step by step, on one rank of a plan.
fn logits<B: Backend>(
    folder: &ModelFolder,
    (plan, rank): (&ShardPlan, usize),
    backend: &mut B,
    steps: &[Vec<Piece>],
) -> Vec<Vec<f32>> {
    let capacity = Capacity {
        rows: 96,
        logit_rows: 96,
        kv_blocks: SLOTS * BLOCKS_OF_SLOT,
        slots: SLOTS,
        kv_format: KvFormat::F16,
    };
    let mut loaded = (0, 0);
    let mut progress = |done, total| {
        loaded = (done, total);
        ControlFlow::Continue(())
    };
    let mut model = Model::load(folder, plan, rank, capacity, backend, &mut progress).expect("it loads");
    assert_eq!(loaded.0, loaded.1, "progress ends at all bytes");
    assert!(model.bytes_per_reduction() > 0);
    let mut rows = Vec::new();
    steps
        .iter()
        .map(|pieces| {
            let mut step = Step::default();
            for Piece { slot, start, tokens } in pieces {
                let end = (start + tokens.len()).div_ceil(KV_BLOCK_TOKENS);
                let blocks: Vec<u32> = (0..end).map(|block| (block * SLOTS + slot) as u32).collect();
                step.push(tokens, *start, &blocks, *slot, false);
            }
            step.logit_rows = (0..step.rows() as u32).collect();
            model.forward(backend, &step, None).expect("it computes");
            model.read_logits(backend, &step, &mut rows).expect("it reads");
            rows.clone()
        })
        .collect()
}

/// All ranks' logits side by side, `[step][row][vocabulary]`.
fn sharded(folder: &ModelFolder, ranks: usize, overlap: Overlap, steps: &[Vec<Piece>]) -> Vec<Vec<f32>> {
    let weights: Vec<f64> = (0..ranks).map(|rank| 1.0 + rank as f64 / 2.0).collect();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &weights).expect("a plan");
    let parts = local::run(ranks, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let isa = Isa::detect().expect("an instruction set");
        let config = CpuConfig { overlap, ..CpuConfig::new(2, isa, Activations::F32) };
        logits(folder, (&plan, rank), &mut CpuBackend::new(&config, group), steps)
    })
    .expect("every rank ends");
    let widths: Vec<usize> = (0..ranks).map(|rank| plan.shard(rank).vocab(VOCAB).len()).collect();
    (0..steps.len())
        .map(|step| {
            let rows: usize = steps[step].iter().map(|piece| piece.tokens.len()).sum();
            let row = |row: usize| {
                let of = |rank: usize| parts[rank][step][row * widths[rank]..][..widths[rank]].to_vec();
                (0..ranks).flat_map(of).collect::<Vec<f32>>()
            };
            (0..rows).flat_map(row).collect()
        })
        .collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// Two sequences: prompts cut in pieces and mixed with generated tokens, then one that starts over
/// in the other's slot.
fn steps() -> Vec<Vec<Piece>> {
    let (a, b) = (text(1, 60), text(2, 70));
    let piece = |slot, text: &[u32], range: std::ops::Range<usize>| Piece {
        slot,
        start: range.start,
        tokens: text[range].to_vec(),
    };
    vec![
        vec![piece(0, &a, 0..33)],
        vec![piece(2, &b, 0..50), piece(0, &a, 33..35)],
        vec![piece(0, &a, 35..36), piece(2, &b, 50..51)],
        vec![piece(0, &a, 36..60)],
        vec![piece(0, &b, 0..51)],
        vec![piece(2, &b, 51..52), piece(0, &b, 51..52)],
    ]
}

/// The reference's logits for a whole text, `[token][vocabulary]`.
fn alone(folder: &ModelFolder, tokens: &[u32]) -> Vec<f32> {
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).expect("a plan");
    let whole = vec![vec![Piece { slot: 1, start: 0, tokens: tokens.to_vec() }]];
    logits(folder, (&plan, 0), &mut Reference::new(Group::solo()), &whole).remove(0)
}

#[test]
fn a_model_with_every_kind_of_cache_computes_alike_on_any_ranks_and_cuts() {
    let temporary = tempfile::tempdir().expect("a folder");
    for (name, quantization, limit) in [("bf16", None, 4e-3), ("4 bits", Some((4, 64)), 6e-3)] {
        let folder = folder(&temporary.path().join(name), quantization);
        let (a, b) = (alone(&folder, &text(1, 60)), alone(&folder, &text(2, 70)));
        let of =
            |all: &[f32], range: std::ops::Range<usize>| all[range.start * VOCAB..range.end * VOCAB].to_vec();
        let expected = [
            of(&a, 0..33),
            [of(&b, 0..50), of(&a, 33..35)].concat(),
            [of(&a, 35..36), of(&b, 50..51)].concat(),
            of(&a, 36..60),
            of(&b, 0..51),
            [of(&b, 51..52), of(&b, 51..52)].concat(),
        ];
        for (ranks, overlap) in
            [(1, Overlap::Auto), (2, Overlap::Never), (2, Overlap::Always), (3, Overlap::Auto)]
        {
            for (index, (found, expected)) in
                sharded(&folder, ranks, overlap, &steps()).iter().zip(&expected).enumerate()
            {
                let error = distance(found, expected);
                assert!(error < limit, "{name}, {ranks} ranks, {overlap:?}, step {index}: off by {error}");
            }
        }
    }
}

#[test]
fn a_footprint_counts_every_kind_of_cache() {
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = folder(&temporary.path().join("model"), None);
    let plan = |ranks| ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).expect("a plan");
    let one = &shard_footprints(&folder, &plan(1), KvFormat::F16).expect("a footprint")[0];
    // 2 KV heads of 32 + 32 numbers, and twice 64 + 16 compressed ones, in f16.
    assert_eq!(one.kv_bytes_per_token, 2 * (2 * 64 + 2 * 80));
    // Two layers of f32: 3 earlier inputs of 2 * 96 + 192 channels, and 6 matrices of 32 × 32.
    assert_eq!(one.state_bytes_per_sequence, 2 * 4 * (3 * 384 + 6 * 32 * 32));
    let three = shard_footprints(&folder, &plan(3), KvFormat::F16).expect("footprints");
    let states: u64 = three.iter().map(|rank| rank.state_bytes_per_sequence).sum();
    assert_eq!(states, one.state_bytes_per_sequence, "heads' states are divided");
}

#[test]
fn a_copied_state_goes_on_like_the_original() {
    let temporary = tempfile::tempdir().expect("a folder");
    let mut folder = folder(&temporary.path().join("model"), None);
    // The scheduler shares blocks of tokens and does not copy them, so only states matter here.
    folder.spec.layers.retain(|layer| matches!(layer.mixer, MixerSpec::Delta(_)));
    folder.spec.layers.truncate(1);
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).expect("a plan");
    let config = CpuConfig::new(1, Isa::detect().expect("an instruction set"), Activations::F32);
    let mut backend = CpuBackend::new(&config, Group::solo());
    let capacity = Capacity { rows: 96, logit_rows: 1, kv_blocks: 3, slots: 2, kv_format: KvFormat::F16 };
    let mut model =
        Model::load(&folder, &plan, 0, capacity, &mut backend, &mut |_, _| ControlFlow::Continue(()))
            .expect("it loads");
    let tokens = text(3, 41);
    let last =
        |model: &mut Model<CpuBackend>, backend: &mut CpuBackend, slot, range: std::ops::Range<usize>| {
            let mut step = Step::default();
            step.push(&tokens[range.clone()], range.start, &[0, 1], slot, true);
            model.forward(backend, &step, None).expect("it computes");
            let mut logits = Vec::new();
            model.read_logits(backend, &step, &mut logits).expect("it reads");
            logits
        };
    last(&mut model, &mut backend, 0, 0..40);
    model.copy_slot(&mut backend, 0, 1).expect("it copies");
    let original = last(&mut model, &mut backend, 0, 40..41);
    assert_eq!(last(&mut model, &mut backend, 1, 40..41), original);
    assert_ne!(last(&mut model, &mut backend, 1, 40..41), original, "the state has moved on");
}
