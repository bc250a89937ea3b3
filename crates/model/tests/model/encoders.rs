//! Vectors and scores of encoders against transformers.
//!
//! The fixtures and how they were made: tests/golden/README.md.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Overlap, Step};
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, Pooling, ShardPlan};

use crate::common::limits;

const EMBEDDERS: [&str; 4] = ["bert", "xlm-roberta", "embedding-gemma", "modernbert"];
const RERANKERS: [&str; 2] = ["bert-rerank", "xlm-roberta-rerank"];

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/encoders").join(name)
}

/// A text of a fixture and transformers' results for it.
struct Golden {
    tokens: Vec<u32>,
    /// Hidden states, `[tokens, hidden]`.
    hidden: Vec<f32>,
    /// The score, of rerankers.
    scores: Vec<f32>,
}

fn golden(name: &str, vocab: usize) -> Vec<Golden> {
    let bytes = std::fs::read(case(name).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: String| -> Vec<[u8; 4]> {
        file.tensor(&name).map_or(Vec::new(), |tensor| tensor.data().as_chunks::<4>().0.to_vec())
    };
    let ints = |name: String| -> Vec<u32> { words(name).into_iter().map(u32::from_le_bytes).collect() };
    let floats = |name: String| -> Vec<f32> { words(name).into_iter().map(f32::from_le_bytes).collect() };
    let text = |i| {
        let types = ints(format!("types.{i}"));
        let typed = ints(format!("tokens.{i}")).into_iter().zip(types);
        Golden {
            tokens: typed.map(|(token, kind)| kind * vocab as u32 + token).collect(),
            hidden: floats(format!("hidden.{i}")),
            scores: floats(format!("scores.{i}")),
        }
    };
    (0..3).map(text).collect()
}

fn folder(name: &str, pooling: Pooling) -> ModelFolder {
    let mut folder = ModelFolder::open(&case(name)).unwrap();
    if let Some(encoder) = folder.spec.encoder.as_mut().filter(|encoder| !encoder.scores) {
        encoder.pooling = pooling;
    }
    folder
}

/// The expected result of a text.
fn expected(golden: &Golden, hidden: usize, pooling: &Pooling) -> Vec<f32> {
    let rows = || golden.hidden.chunks_exact(hidden);
    match pooling {
        _ if !golden.scores.is_empty() => golden.scores.clone(),
        Pooling::FirstToken => rows().next().unwrap().to_vec(),
        Pooling::LastToken => rows().next_back().unwrap().to_vec(),
        _ => (0..hidden).map(|i| rows().map(|row| row[i]).sum::<f32>() / rows().len() as f32).collect(),
    }
}

/// A step of whole texts.
fn step<'a>(texts: impl Iterator<Item = &'a Golden>) -> Step {
    let mut step = Step::default();
    let mut block = 0;
    for (slot, text) in texts.enumerate() {
        let blocks = text.tokens.len().div_ceil(KV_BLOCK_TOKENS) as u32;
        let own: Vec<u32> = (block..block + blocks).rev().collect();
        step.push(&text.tokens, 0, &own, slot, true);
        block += blocks;
    }
    step
}

fn load(
    folder: &ModelFolder,
    plan: &ShardPlan,
    rank: usize,
    group: Group,
    (activations, overlap): (Activations, Overlap),
) -> (Model<CpuBackend>, CpuBackend) {
    let isa = Isa::detect().unwrap();
    let config = CpuConfig { packing_threads: 2, overlap, ..CpuConfig::new(2, isa, activations) };
    let mut backend = CpuBackend::new(&config, group);
    let capacity = Capacity { rows: 112, logit_rows: 3, kv_blocks: 8, slots: 3, kv_format: KvFormat::F16 };
    let go_on = &mut |_, _| ControlFlow::Continue(());
    (Model::load(folder, plan, rank, capacity, &mut backend, go_on).unwrap(), backend)
}

/// The results of a step's texts, by a rank's model.
fn results(model: &mut Model<CpuBackend>, backend: &mut CpuBackend, step: &Step, width: usize) -> Vec<f32> {
    model.forward(backend, step, None).unwrap();
    let mut out = vec![0.0; step.logit_rows.len() * width];
    model.read_normed(backend, step, &mut out).unwrap();
    out
}

/// Relative error of vectors. Scores are sums of about 1 in which terms cancel: the largest
/// absolute error.
fn error(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len());
    if ours.len() == 3 {
        return ours.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    }
    let sums = ours.iter().zip(expected).fold((0.0, 0.0), |(error, norm), (a, b)| {
        (error + f64::from(a - b).powi(2), norm + f64::from(*b).powi(2))
    });
    (sums.0 / sums.1).sqrt()
}

#[test]
fn one_rank_agrees_with_transformers_text_by_text_and_together() {
    for (name, pooling) in [
        ("bert", Pooling::Mean),
        ("bert", Pooling::FirstToken),
        ("bert", Pooling::LastToken),
        ("xlm-roberta", Pooling::Mean),
        ("embedding-gemma", Pooling::Mean),
        ("modernbert", Pooling::Mean),
        ("bert-rerank", Pooling::FirstToken),
        ("xlm-roberta-rerank", Pooling::FirstToken),
    ] {
        let folder = folder(name, pooling.clone());
        let (hidden, width) = (folder.spec.hidden, folder.spec.result_width());
        let golden = golden(name, folder.spec.vocab);
        let all: Vec<f32> = golden.iter().flat_map(|text| expected(text, hidden, &pooling)).collect();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        for activations in [Activations::Auto, Activations::Bf16, Activations::Int16, Activations::Int8] {
            let arithmetic = (activations, Overlap::Auto);
            let (mut model, mut backend) = load(&folder, &plan, 0, Group::solo(), arithmetic);
            let together = results(&mut model, &mut backend, &step(golden.iter()), width);
            let alone: Vec<f32> = golden
                .iter()
                .flat_map(|text| results(&mut model, &mut backend, &step([text].into_iter()), width))
                .collect();
            assert_eq!(together, alone, "{name}: a text's result does not depend on the others");
            let error = error(&together, &all);
            println!("{name} {pooling} {activations:?}: {error:.1e}");
            assert!(error < limits(activations).0, "{name}, {pooling}, {activations:?}: {error:.1e}");
        }
    }
}

/// A copy of a case, to change.
fn copied(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(case(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// EmbeddingGemma and LaBSE have such products after the pooling.
#[test]
fn dense_layers_follow_the_pooling() {
    let copy = copied("embedding-gemma");
    let at = |name: &str| copy.path().join(name);
    let module = |kind: &str, path: &str| serde_json::json!({"path": path, "type": format!("sentence_transformers.models.{kind}")});
    let modules = [module("Transformer", ""), module("Pooling", "1_Pooling"), module("Dense", "2_Dense")];
    std::fs::write(at("modules.json"), serde_json::json!(modules).to_string()).unwrap();
    std::fs::create_dir(at("2_Dense")).unwrap();
    let dense = serde_json::json!({
        "in_features": 48, "out_features": 20, "bias": true, "activation_function": "torch.nn.modules.activation.Tanh"
    });
    std::fs::write(at("2_Dense/config.json"), dense.to_string()).unwrap();
    let weights: Vec<f32> = (0..20 * 48).map(|i| ((i * 37 % 101) as f32 - 50.0) / 200.0).collect();
    let bias: Vec<f32> = (0..20).map(|i| i as f32 / 40.0 - 0.25).collect();
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (of_weights, of_bias) = (bytes(&weights), bytes(&bias));
    let view = |shape, bytes| safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes);
    let tensors = [
        ("linear.weight", view(vec![20, 48], &of_weights).unwrap()),
        ("linear.bias", view(vec![20], &of_bias).unwrap()),
    ];
    safetensors::serialize_to_file(tensors, None, &at("2_Dense/model.safetensors")).unwrap();
    let folder = ModelFolder::open(copy.path()).unwrap();
    let golden = golden("embedding-gemma", folder.spec.vocab);
    let product = |vector: Vec<f32>| {
        let row = |(row, bias): (&[f32], &f32)| {
            (row.iter().zip(&vector).map(|(w, x)| w * x).sum::<f32>() + bias).tanh()
        };
        weights.chunks_exact(48).zip(&bias).map(row).collect::<Vec<f32>>()
    };
    let all: Vec<f32> = golden.iter().flat_map(|text| product(expected(text, 48, &Pooling::Mean))).collect();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let arithmetic = (Activations::Int16, Overlap::Auto);
    let (mut model, mut backend) = load(&folder, &plan, 0, Group::solo(), arithmetic);
    let error = error(&results(&mut model, &mut backend, &step(golden.iter()), 20), &all);
    assert!(error < 1e-3, "{error:.1e}");
}

/// A window holds as many tokens on both sides as half of `sliding_window`.
#[test]
fn windows_have_two_sides() {
    let errors = [14, 16, 18].map(|window| {
        let copy = copied("embedding-gemma");
        let config = std::fs::read_to_string(copy.path().join("config.json")).unwrap();
        let field = |window| format!("\"sliding_window\": {window},");
        std::fs::write(copy.path().join("config.json"), config.replace(&field(16), &field(window))).unwrap();
        let folder = ModelFolder::open(copy.path()).unwrap();
        let golden = golden("embedding-gemma", folder.spec.vocab);
        let hidden = folder.spec.hidden;
        let all: Vec<f32> = golden.iter().flat_map(|text| expected(text, hidden, &Pooling::Mean)).collect();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let arithmetic = (Activations::Int16, Overlap::Auto);
        let (mut model, mut backend) = load(&folder, &plan, 0, Group::solo(), arithmetic);
        error(&results(&mut model, &mut backend, &step(golden.iter()), hidden), &all)
    });
    assert!(errors[1] < 1e-3 && errors[0] > 1e-2 && errors[2] > 1e-2, "{errors:?}");
}

#[test]
fn any_number_of_ranks_agrees_with_transformers() {
    for name in EMBEDDERS.into_iter().chain(RERANKERS) {
        let folder = folder(name, Pooling::Mean);
        let (hidden, width) = (folder.spec.hidden, folder.spec.result_width());
        let golden = golden(name, folder.spec.vocab);
        let all: Vec<f32> = golden.iter().flat_map(|text| expected(text, hidden, &Pooling::Mean)).collect();
        for weights in [&[1.0; 2][..], &[3.0, 1.0], &[1.0; 3], &[1.0; 4]] {
            let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, weights).unwrap();
            for overlap in [Overlap::Never, Overlap::Always] {
                let of_ranks = local::run(weights.len(), TransportChoice::Shm, |group| {
                    let rank = group.rank();
                    let arithmetic = (Activations::Int16, overlap);
                    let (mut model, mut backend) = load(&folder, &plan, rank, group, arithmetic);
                    results(&mut model, &mut backend, &step(golden.iter()), width)
                })
                .unwrap();
                assert!(
                    of_ranks.iter().all(|ours| *ours == of_ranks[0]),
                    "{name}: all ranks have the result"
                );
                let error = error(&of_ranks[0], &all);
                assert!(error < 1e-3, "{name}, {weights:?}, {overlap:?}: {error:.1e}");
            }
        }
    }
}

#[test]
fn the_stages_of_a_pipeline_compute_the_whole_encoder() {
    for name in EMBEDDERS.into_iter().chain(RERANKERS) {
        let folder = folder(name, Pooling::Mean);
        let width = folder.spec.result_width();
        let golden = golden(name, folder.spec.vocab);
        let step = step(golden.iter());
        let arithmetic = (Activations::Int16, Overlap::Auto);
        let whole = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let (mut model, mut backend) = load(&folder, &whole, 0, Group::solo(), arithmetic);
        let expected = results(&mut model, &mut backend, &step, width);
        let plan = ShardPlan::new(&folder.spec, Parallelism::Pipeline, &[1.0; 2]).unwrap();
        let (mut first, mut backend) = load(&folder, &plan, 0, Group::solo(), arithmetic);
        first.forward(&mut backend, &step, None).unwrap();
        let mut hidden = Vec::new();
        first.read_hidden(&mut backend, &step, &mut hidden).unwrap();
        let (mut last, mut backend) = load(&folder, &plan, 1, Group::solo(), arithmetic);
        last.forward(&mut backend, &step, Some(&hidden)).unwrap();
        let mut ours = vec![0.0; expected.len()];
        last.read_normed(&mut backend, &step, &mut ours).unwrap();
        assert_eq!(ours, expected, "{name}");
    }
}
