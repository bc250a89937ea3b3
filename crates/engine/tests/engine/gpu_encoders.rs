//! Compares the vectors and scores of encoders on a GPU, or on Mesa's software driver, with the
//! CPU's, which `crates/model/tests/model/encoders.rs` compares with transformers'.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_collectives::Group;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, Backend, CpuBackend, CpuConfig, Isa, KvFormat, Step};
use thunder_gpu::{GpuBackend, GpuConfig};
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan};

/// Those whose tokens attend to all others, and those with windows to both sides.
const CASES: [&str; 6] =
    ["bert", "xlm-roberta", "embedding-gemma", "modernbert", "bert-rerank", "xlm-roberta-rerank"];

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/encoders").join(name)
}

/// The tokens of a fixture's texts, with their types.
fn texts(name: &str, vocab: usize) -> Vec<Vec<u32>> {
    let bytes = std::fs::read(case(name).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ints = |name: String| -> Vec<u32> {
        let words = file.tensor(&name).unwrap().data().as_chunks::<4>().0;
        words.iter().map(|word| u32::from_le_bytes(*word)).collect()
    };
    let text = |i: usize| {
        let typed = ints(format!("tokens.{i}")).into_iter().zip(ints(format!("types.{i}")));
        typed.map(|(token, kind)| kind * vocab as u32 + token).collect()
    };
    (0..3).map(text).collect()
}

/// The results of texts, in one step.
fn results<B: Backend>(model: &mut Model<B>, backend: &mut B, texts: &[&Vec<u32>], width: usize) -> Vec<f32> {
    let mut step = Step::default();
    let mut block = 0;
    for (slot, text) in texts.iter().enumerate() {
        let blocks = text.len().div_ceil(KV_BLOCK_TOKENS) as u32;
        let own: Vec<u32> = (block..block + blocks).rev().collect();
        step.push(text, 0, &own, slot, true);
        block += blocks;
    }
    model.forward(backend, &step, None).unwrap();
    let mut out = vec![0.0; texts.len() * width];
    model.read_normed(backend, &step, &mut out).unwrap();
    out
}

/// The results of all texts together, and of each alone.
fn all<B: Backend>(folder: &ModelFolder, texts: &[Vec<u32>], mut backend: B) -> [Vec<f32>; 2] {
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let capacity = Capacity { rows: 112, logit_rows: 3, kv_blocks: 8, slots: 3, kv_format: KvFormat::F16 };
    let progress = &mut |_, _| ControlFlow::Continue(());
    let mut model = Model::load(folder, &plan, 0, capacity, &mut backend, progress).unwrap();
    let width = folder.spec.result_width();
    let together: Vec<&Vec<u32>> = texts.iter().collect();
    let together = results(&mut model, &mut backend, &together, width);
    let alone = texts.iter().flat_map(|text| results(&mut model, &mut backend, &[text], width)).collect();
    [together, alone]
}

#[test]
fn encoders_have_the_cpus_results() {
    let Some(found) = thunder_gpu::for_tests() else {
        return thunder_testing::skip("encoders_have_the_cpus_results", thunder_testing::NO_VULKAN);
    };
    for name in CASES {
        let folder = ModelFolder::open(&case(name)).unwrap();
        let texts = texts(name, folder.spec.vocab);
        let activations = Activations::F32;
        let config = GpuConfig { activations, remembers: true, ..GpuConfig::default() };
        let gpu = GpuBackend::new(&found, config, Group::solo()).unwrap();
        let cpu = CpuBackend::new(&CpuConfig::new(1, Isa::detect().unwrap(), activations), Group::solo());
        let ([together, alone], [expected, _]) = (all(&folder, &texts, gpu), all(&folder, &texts, cpu));
        assert_eq!(together, alone, "{name}: a text's result does not depend on the others");
        let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
        let off = sum(&mut together.iter().zip(&expected).map(|(a, b)| a - b));
        let error = (off / sum(&mut expected.iter().copied())).sqrt();
        println!("{name}: {error:.1e}");
        assert!(error < 1e-4, "{name}: {error:.1e}");
    }
}
