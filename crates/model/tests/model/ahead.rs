//! Layers that predict further tokens against an implementation in NumPy, on one rank and on
//! several. The fixtures and how they were made: tests/golden/README.md.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Step};
use thunder_model::model::shard_footprints;
use thunder_model::spec::MixerSpec;
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan, unread_tensors};
use thunder_testing::gguf::Gguf;

use crate::common::{Golden, compare, golden, limits};

const CASES: [&str; 5] = ["deepseek_v3", "glm4_moe", "mimo", "qwen3_next", "qwen3_5"];

/// With both, rounding changes no choice of experts.
const EXACT: Activations = Activations::Int16;

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/ahead").join(name)
}

/// A rank's results for a prompt, for its part of the vocabulary.
#[derive(Default)]
struct Predicted {
    /// The prediction after each token except the first, from the whole prompt at once.
    whole: Vec<f32>,
    /// The prediction after the last token, from the prompt in pieces.
    last: Vec<f32>,
    /// The prediction after the guess that follows it.
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
    // In pieces, in other blocks. The layer predicts for the last row only, afterwards.
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

/// Compares what a model predicts with the golden numbers of a case.
fn check(name: &str, folder: &ModelFolder) {
    let path = case(name).join("golden.safetensors");
    let prompts: Vec<Golden> = golden(&path, "logits");
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for weights in [&[1.0][..], &[1.0; 2], &[1.0; 3], &[3.0, 1.0]] {
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
        let mut whole = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let (tokens, guess) = (&prompt.tokens, *prompt.argmax.last().unwrap());
            let parts = match weights.len() {
                1 => vec![predict(folder, &plan, Group::solo(), tokens, guess)],
                ranks => local::run(ranks, TransportChoice::Shm, |group| {
                    predict(folder, &plan, group, tokens, guess)
                })
                .unwrap(),
            };
            let (rows, vocab) = (tokens.len() - 1, folder.spec.vocab);
            whole.push(joined(&parts, rows, |part| &part.whole));
            let what = format!("{name}, {weights:?}, prompt {index}");
            let last = joined(&parts, 1, |part| &part.last);
            let of_last = error(&last, &prompt.logits[(rows - 1) * vocab..]);
            let further = floats(&file, &format!("further.{index}"));
            let of_further = error(&joined(&parts, 1, |part| &part.further), &further);
            println!("{what}: error of the last {of_last:.1e}, of the one after it {of_further:.1e}");
            assert!(of_last < 1e-3 && of_further < 1e-3, "{what}: {of_last:.1e}, {of_further:.1e}");
        }
        let (error, same) = compare(&prompts, &whole, false);
        println!("{name}, {weights:?}: relative error {error:.1e}");
        let (most, least) = limits(EXACT);
        assert!(error < most && same >= least, "{name}, {weights:?}: {error:.1e}, {same}");
    }
}

/// The numbers of a tensor.
fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    match tensor.dtype() {
        Dtype::BF16 => {
            let halves = tensor.data().as_chunks::<2>().0.iter();
            halves.map(|half| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16)).collect()
        }
        _ => tensor.data().as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
    }
}

#[test]
fn any_number_of_ranks_predicts_what_the_reference_does() {
    for name in CASES {
        check(name, &ModelFolder::open(&case(name)).unwrap());
    }
}

/// The case of GLM-4.5 as llama.cpp's converter names it, in F32.
fn glm_as_gguf() -> Gguf {
    const EXPERTS: usize = 6;
    let bytes = std::fs::read(case("glm4_moe").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut gguf = Gguf::default().text("general.architecture", "glm4moe");
    for (key, number) in [
        ("block_count", 3),
        ("nextn_predict_layers", 1),
        ("context_length", 256),
        ("embedding_length", 64),
        ("feed_forward_length", 64),
        ("attention.head_count", 6),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
        ("expert_group_count", 3),
        ("expert_group_used_count", 2),
        ("expert_feed_forward_length", 96),
        ("expert_shared_count", 1),
        ("expert_gating_func", 2),
        ("leading_dense_block_count", 1),
        ("rope.dimension_count", 16),
    ] {
        gguf = gguf.number(&format!("glm4moe.{key}"), number);
    }
    gguf = gguf
        .float("glm4moe.rope.freq_base", 10_000.0)
        .float("glm4moe.attention.layer_norm_rms_epsilon", 1e-5)
        .float("glm4moe.expert_weights_scale", 2.5)
        .bool("glm4moe.expert_weights_norm", true);
    let parts = [
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        ("mlp.gate.", "ffn_gate_inp."),
        ("shared_head.norm", "nextn.shared_head_norm"),
        ("shared_head.head", "nextn.shared_head_head"),
        (".embed_tokens", ".nextn.embed_tokens"),
        ("eh_proj", "nextn.eh_proj"),
        ("enorm", "nextn.enorm"),
        ("hnorm", "nextn.hnorm"),
        ("q_proj.", "q."),
        ("k_proj.", "k."),
        ("v_proj.", "v."),
    ];
    for name in file.names() {
        let shape = file.tensor(name).unwrap().shape().to_vec();
        let mut dimensions: Vec<u64> = shape.iter().rev().map(|size| *size as u64).collect();
        let mut numbers = floats(&file, name);
        let mut renamed = name.to_owned();
        if let Some((before, after)) = name.split_once("mlp.experts.") {
            // A stack in the place of the first expert's matrix.
            let Some(matrix) = after.strip_prefix("0.") else { continue };
            for expert in 1..EXPERTS {
                numbers.extend(floats(&file, &format!("{before}mlp.experts.{expert}.{matrix}")));
            }
            dimensions.push(EXPERTS as u64);
            renamed = format!("{before}ffn_{}", matrix.replace("_proj.", "_exps."));
        } else if let Some((before, matrix)) = name.split_once("mlp.shared_experts.") {
            renamed = format!("{before}ffn_{}", matrix.replace("_proj.", "_shexp."));
        } else if let Some((before, matrix)) =
            name.split_once("mlp.").filter(|(_, rest)| rest.contains("_proj"))
        {
            renamed = format!("{before}ffn_{}", matrix.replace("_proj.", "."));
        }
        let renamed = parts.iter().fold(renamed, |name, (from, to)| name.replace(from, to));
        gguf = gguf.floats(&renamed, &dimensions, &numbers);
    }
    gguf
}

#[test]
fn a_gguf_file_may_have_the_layer_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let (whole, layer) = (glm_as_gguf(), "blk.2.nextn.eh_proj.weight");
    std::fs::write(&path, whole.bytes()).unwrap();
    check("glm4_moe", &ModelFolder::open(&path).unwrap());
    std::fs::write(&path, whole.without_tensor(layer).bytes()).unwrap();
    assert_eq!(ModelFolder::open(&path).unwrap().spec.ahead, None);
}

#[test]
fn the_layer_is_counted_and_may_be_left_out() {
    for name in CASES {
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
                let has_state =
                    |layer: &usize| matches!(folder.spec.layers[*layer].mixer, MixerSpec::Delta(_));
                let layers = without.layers.clone().filter(|layer| !has_state(layer)).count() as u64;
                // This layer's attention may be the only one in a stage.
                if let Some(of_layer) = without.kv_bytes_per_token.checked_div(layers) {
                    let kv = of_layer * (layers + u64::from(has_it));
                    assert_eq!(with.kv_bytes_per_token, kv, "{name}, {parallel:?}, rank {rank}");
                }
                assert_eq!(with.state_bytes_per_sequence, without.state_bytes_per_sequence);
            }
        }
    }
}
