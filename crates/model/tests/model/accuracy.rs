//! The cost of quantized activations and of a quantized cache: next-token distributions of the
//! built-in model along its golden answers, compared with products in f32.

use serde_json::Value;
use thunder_collectives::Group;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Step};
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan};
use thunder_testing::{builtin_golden, builtin_model};

/// A prompt and its answer.
type Text = [Vec<u32>; 2];

/// Tokens that are computed as prompt tokens, in bf16 on a matrix unit.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Prompts {
    /// The tokens of the prompt, as in serving.
    Served,
    /// None: all products are integer products.
    None,
}

/// Logits after each token of each text, `[text][token × vocabulary]`.
fn logits(
    folder: &ModelFolder,
    texts: &[Text],
    activations: Activations,
    kv: KvFormat,
    prompts: Prompts,
) -> Vec<Vec<f32>> {
    let config = CpuConfig::new(1, Isa::detect().unwrap(), activations);
    let mut backend = CpuBackend::new(&config, Group::solo());
    let rows = texts.iter().map(|text| text.concat().len()).max().unwrap();
    let blocks: Vec<u32> = (0..rows.div_ceil(KV_BLOCK_TOKENS) as u32).collect();
    let capacity = Capacity { rows, logit_rows: rows, kv_blocks: blocks.len(), slots: 2, kv_format: kv };
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let mut model =
        Model::load(
            folder,
            &plan,
            0,
            capacity,
            &mut backend,
            &mut |_, _| std::ops::ControlFlow::Continue(()),
        )
        .unwrap();
    let mut step = Step::default();
    let mut of_text = |[prompt, answer]: &Text| {
        let (mut all, mut rows) = (Vec::new(), Vec::new());
        for (tokens, start, is_prompt) in
            [(prompt, 0, prompts == Prompts::Served), (answer, prompt.len(), false)]
        {
            step.clear();
            step.push(tokens, start, &blocks, 0, false);
            step.sequences[0].prompt = is_prompt;
            step.logit_rows = (0..tokens.len() as u32).collect();
            model.forward(&mut backend, &step, None).unwrap();
            model.read_logits(&mut backend, &step, &mut rows).unwrap();
            all.extend_from_slice(&rows);
        }
        all
    };
    texts.iter().map(&mut of_text).collect()
}

/// `log softmax`, in f64.
fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let best = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - best).exp()).sum();
    logits.iter().map(|x| f64::from(x - best) - sum.ln()).collect()
}

/// Kullback-Leibler divergence of `theirs` from `ours`, in nats: mean and largest over all tokens.
fn divergence(ours: &[Vec<f32>], theirs: &[Vec<f32>], vocab: usize) -> (f64, f64) {
    let (mut sum, mut largest, mut count) = (0.0, 0.0f64, 0);
    for (ours, theirs) in ours.iter().zip(theirs) {
        for (ours, theirs) in ours.chunks(vocab).zip(theirs.chunks(vocab)) {
            let (p, q) = (log_probabilities(ours), log_probabilities(theirs));
            let divergence = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            (sum, largest, count) = (sum + divergence, largest.max(divergence), count + 1);
        }
    }
    (sum / f64::from(count), largest)
}

/// `||theirs - ours|| / ||ours||` over all logits.
fn relative_error(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (ours, theirs) in ours.iter().flatten().zip(theirs.iter().flatten()) {
        error += f64::from(theirs - ours).powi(2);
        norm += f64::from(*ours).powi(2);
    }
    (error / norm).sqrt()
}

#[test]
fn next_tokens_equal_mlx_and_quantized_distributions_stay_near_f32() {
    let golden = std::fs::read(builtin_golden()).unwrap();
    let golden: Vec<Value> = serde_json::from_slice(&golden).unwrap();
    let ids = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let texts: Vec<Text> =
        golden.iter().map(|case| [ids(&case["prompt"]), ids(&case["completion"])]).collect();
    let folder = ModelFolder::open(&builtin_model()).unwrap();
    let exact = logits(&folder, &texts, Activations::F32, KvFormat::F16, Prompts::None);
    let mut positions = 0;
    let default = logits(&folder, &texts, Activations::default(), KvFormat::F16, Prompts::Served);
    for (case, logits) in golden.iter().zip(&default) {
        for (logits, top) in
            logits.chunks(folder.spec.vocab).zip(case["top"].as_array().into_iter().flatten())
        {
            let argmax = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            assert_eq!(argmax as u64, top.as_u64().unwrap(), "MLX chooses another token after {positions}");
            positions += 1;
        }
    }
    println!("the same argmax as MLX at {positions} positions");
    assert!(positions > 100, "the golden file has positions");
    for (activations, kv, prompts, limits) in [
        (Activations::Auto, KvFormat::F16, Prompts::Served, (1e-4, 1e-2)),
        (Activations::Auto, KvFormat::F16, Prompts::None, (1e-4, 1e-2)),
        (Activations::Bf16, KvFormat::F16, Prompts::Served, (1e-4, 1e-2)),
        (Activations::Int8, KvFormat::F16, Prompts::None, (1.5e-4, 2e-2)),
        (Activations::Int16, KvFormat::F16, Prompts::None, (1e-6, 1e-3)),
        (Activations::Int16, KvFormat::Int8, Prompts::None, (1e-3, 1e-2)),
        (Activations::Int8, KvFormat::Int8, Prompts::None, (2e-4, 2e-2)),
    ] {
        let theirs = logits(&folder, &texts, activations, kv, prompts);
        let (mean, largest) = divergence(&exact, &theirs, folder.spec.vocab);
        let error = relative_error(&exact, &theirs);
        println!(
            "{activations:?} activations, prompts {prompts:?}, {kv:?} cache: KL mean {mean:.1e}, largest {largest:.1e} nats; \
             relative error {error:.1e}"
        );
        assert!(
            mean < limits.0 && error < limits.1,
            "{activations:?} activations, {kv:?} cache: a mean KL of {mean:.2e}, logits {error:.2e} off"
        );
    }
}
