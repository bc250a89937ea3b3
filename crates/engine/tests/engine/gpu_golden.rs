//! Compares logits on a GPU, or on Mesa's software driver, with MLX-LM's, on one rank and on
//! several; and the built-in model's greedy answers with the CPU's.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, Backend, CpuBackend, CpuConfig, Device, Isa, KvFormat, Largest, Step};
use thunder_gpu::{Found, GpuBackend, GpuConfig, Mailboxes, SumForm};
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan};

/// The device to test on: number `THUNDER_TEST_GPU` of `thunder devices list`, otherwise the
/// software driver. Reports a skipped test if there is none.
fn device(test: &str) -> Option<Found> {
    let found = thunder_gpu::for_tests();
    if found.is_none() {
        thunder_testing::skip(test, thunder_testing::NO_VULKAN);
    }
    found
}

fn gpu(found: &Found, activations: Activations, group: Group) -> GpuBackend {
    GpuBackend::new(found, GpuConfig { activations, remembers: true, ..GpuConfig::default() }, group).unwrap()
}

fn cpu(activations: Activations, group: Group) -> CpuBackend {
    CpuBackend::new(&CpuConfig::new(1, Isa::detect().unwrap(), activations), group)
}

/// A prompt of a fixture, and MLX-LM's logits at some of its positions.
struct Prompt {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    logits: Vec<f32>,
}

fn prompts(case: &Path) -> Vec<Prompt> {
    prompts_of(&case.join("golden.safetensors"))
}

fn prompts_of(file: &Path) -> Vec<Prompt> {
    let bytes = std::fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words =
        |name: String| -> Vec<[u8; 4]> { file.tensor(&name).unwrap().data().as_chunks::<4>().0.to_vec() };
    let ints = |name: String| -> Vec<u32> { words(name).into_iter().map(u32::from_le_bytes).collect() };
    let prompt = |i: usize| Prompt {
        tokens: ints(format!("tokens.{i}")),
        positions: ints(format!("positions.{i}")).into_iter().map(|p| p as usize).collect(),
        logits: words(format!("logits.{i}")).into_iter().map(f32::from_le_bytes).collect(),
    };
    (0..3).map(prompt).collect()
}

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases").join(name)
}

const CAPACITY: Capacity =
    Capacity { rows: 70, logit_rows: 70, kv_blocks: 8, slots: 2, kv_format: KvFormat::F16 };

/// A prompt's logits and residual stream, computed in pieces of `chunk` tokens on one rank, with
/// the folder's last adapter if it has one.
fn compute<B: Backend>(
    tokens: &[u32],
    (folder, plan, rank): (&ModelFolder, &ShardPlan, usize),
    mut backend: B,
    chunk: usize,
) -> (Vec<f32>, Vec<f32>) {
    let progress = &mut |_, _| ControlFlow::Continue(());
    let mut model = Model::load(folder, plan, rank, CAPACITY, &mut backend, progress).unwrap();
    let blocks: Vec<u32> = (0..tokens.len().div_ceil(KV_BLOCK_TOKENS) as u32).map(|i| 7 - i).collect();
    let (mut logits, mut hidden, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for (index, tokens) in tokens.chunks(chunk).enumerate() {
        let mut step = Step::default();
        step.push(tokens, index * chunk, &blocks, 0, false);
        step.sequences[0].adapter = folder.adapters.len() as u32;
        step.logit_rows = (0..tokens.len() as u32).collect();
        model.forward(&mut backend, &step, None).unwrap();
        model.read_logits(&mut backend, &step, &mut rows).unwrap();
        logits.extend_from_slice(&rows);
        model.read_hidden(&mut backend, &step, &mut rows).unwrap();
        hidden.extend_from_slice(&rows);
    }
    (logits, hidden)
}

/// `‖ours − expected‖ / ‖expected‖` over the fixture's positions.
fn error(ours: &[f32], prompt: &Prompt) -> f64 {
    let vocab = prompt.logits.len() / prompt.positions.len();
    let (mut error, mut norm) = (0.0, 0.0);
    for (position, expected) in prompt.positions.iter().zip(prompt.logits.chunks(vocab)) {
        for (a, b) in ours[position * vocab..][..vocab].iter().zip(expected) {
            error += f64::from(a - b).powi(2);
            norm += f64::from(*b).powi(2);
        }
    }
    (error / norm).sqrt()
}

/// Joins the logits of ranks, `[positions, vocabulary]`.
fn join(parts: &[Vec<f32>], positions: usize) -> Vec<f32> {
    let row = |row: usize| {
        parts
            .iter()
            .flat_map(move |part| part[row * (part.len() / positions)..][..part.len() / positions].to_vec())
    };
    (0..positions).flat_map(row).collect()
}

/// Cases for each kind of layer and width; all of them in `./test --long`.
fn cases() -> Vec<PathBuf> {
    let some = [
        "cohere-4bit",
        "deepseek_v3-4bit-g32",
        "deepseek_v32-4bit",
        "deepseek_v41-engram",
        "gemma2-4bit",
        "gemma4_inputs-4bit",
        "gpt_oss-mxfp4",
        "granitemoehybrid-4bit",
        "kimi_linear-4bit",
        "lfm2-4bit",
        "llama-3bit-g64",
        "llama-bf16-biases",
        "llama-mixed-bits",
        "llama4-4bit-wrapped",
        "ministral3-bf16",
        "mistral-4bit-window",
        "nemotron_h-4bit",
        "qwen3-4bit-5-kv-heads",
        "qwen3_moe-4bit",
        "qwen3_next-4bit",
        "transformers-cohere2",
        "transformers-deepseek_v4",
        "transformers-lfm3",
    ];
    if !thunder_testing::is_long() {
        return some.map(case).to_vec();
    }
    let all = std::fs::read_dir(case("")).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|case| case.join("golden.safetensors").exists()).collect()
}

#[test]
fn one_rank_agrees_with_mlx() {
    let Some(found) = device("one_rank_agrees_with_mlx") else { return };
    for case in cases() {
        let folder = ModelFolder::open(&case).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let prompt = &prompts(&case)[0];
        let backend = gpu(&found, Activations::F32, Group::solo());
        let (ours, _) = compute(&prompt.tokens, (&folder, &plan, 0), backend, 70);
        let error = error(&ours, prompt);
        println!("{:32} {error:.1e}", case.file_name().unwrap().display());
        assert!(error < 1e-3, "{}: relative error {error:.2e}", case.display());
    }
}

/// Generated tokens of layers with states have a kernel of their own.
#[test]
fn states_agree_token_by_token() {
    let Some(found) = device("states_agree_token_by_token") else { return };
    for name in [
        "granitemoehybrid-4bit",
        "kimi_linear-4bit",
        "lfm2-4bit",
        "nemotron_h-4bit",
        "qwen3_next-4bit",
        "transformers-lfm3",
    ] {
        let folder = ModelFolder::open(&case(name)).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let prompt = &prompts(&case(name))[0];
        let backend = gpu(&found, Activations::F32, Group::solo());
        let (ours, _) = compute(&prompt.tokens, (&folder, &plan, 0), backend, 1);
        let error = error(&ours, prompt);
        println!("{name:32} {error:.1e}");
        assert!(error < 1e-3, "{name}: relative error {error:.2e}");
    }
}

/// A decode step in which the host waits for the device more than once is slow.
#[test]
fn the_host_waits_once_a_decode_step() {
    let Some(found) = device("the_host_waits_once_a_decode_step") else { return };
    // LayerNorm, gates of heads, experts that are assigned by tokens, rounded vectors, states; and
    // whether steps are computed ahead.
    for (name, is_ahead) in [
        ("cohere-4bit", true),
        ("transformers-cohere2", true),
        ("transformers-lfm3", true),
        ("transformers-deepseek_v4", false),
        ("deepseek_v41-4bit", false),
        ("deepseek_v41-engram", false),
        ("granitemoehybrid-4bit", true),
        ("kimi_linear-4bit", true),
        ("lfm2-4bit", true),
        ("nemotron_h-4bit", true),
        ("qwen3_next-4bit", true),
    ] {
        let folder = ModelFolder::open(&case(name)).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let mut backend = gpu(&found, Activations::Auto, Group::solo());
        let progress = &mut |_, _| ControlFlow::Continue(());
        let mut model = Model::load(&folder, &plan, 0, CAPACITY, &mut backend, progress).unwrap();
        let (mut token, mut largest, mut before) = (1, Vec::new(), (0, 0));
        for position in 0..20 {
            // Kernels are proved in the first steps.
            if position == 8 {
                before = (backend.waits(), backend.steps_ahead());
            }
            let mut step = Step::default();
            step.push(&[token], position, &[0, 1], 0, true);
            model.forward(&mut backend, &step, None).unwrap();
            model.read_largest(&mut backend, &step, &mut largest).unwrap();
            token = largest[0].column;
        }
        let (waits, ahead) = (backend.waits() - before.0, backend.steps_ahead() - before.1);
        println!("{name:32} {waits} waits in 12 steps, {ahead} of them ahead");
        assert_eq!((waits, ahead), (12, if is_ahead { 12 } else { 0 }), "{name}");
    }
}

/// Hugging Face's formats and GGUF. The CPU's logits are compared with those of other libraries in
/// the tests of thunder-model.
#[test]
fn other_formats_have_the_cpus_logits() {
    let Some(found) = device("other_formats_have_the_cpus_logits") else { return };
    let folders = [
        "deepseek_v3-fp8",
        "deepseek_v4-fp8",
        "gpt_oss-mxfp4_blocks",
        "kimi_k2-int4-g32",
        "llama-gptq_v2-g64",
        "llama-int8-channel",
        "llama-mxfp8",
        "qwen3-awq-g32",
        "qwen3-nvfp4",
    ];
    let files = ["deepseek2-v3", "glm4moe-q8_0", "gpt-oss-mxfp4", "llama-iq4", "llama-q4_k_m"];
    let golden = case("").join("..");
    let folders = folders.map(|name| golden.join("formats/cases").join(name));
    let folders = folders.map(|folder| (folder.join("golden.safetensors"), folder));
    let files = files.map(|name| golden.join("gguf/cases").join(name));
    let files = files.map(|file| (file.with_extension("safetensors"), file.with_extension("gguf")));
    for (golden, model) in folders.into_iter().chain(files) {
        let folder = ModelFolder::open(&model).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let tokens = prompts_of(&golden).remove(0).tokens;
        let (activations, of) = (Activations::F32, (&folder, &plan, 0));
        let (logits, _) = compute(&tokens, of, cpu(activations, Group::solo()), 70);
        let (ours, _) = compute(&tokens, of, gpu(&found, activations, Group::solo()), 70);
        let error = error(&ours, &Prompt { positions: (0..tokens.len()).collect(), tokens, logits });
        println!("{:40} {error:.1e}", model.file_name().unwrap().display());
        assert!(error < 1e-3, "{}: relative error {error:.2e}", model.display());
    }
}

#[test]
fn bytes_of_activations_cost_one_percent_at_most() {
    let Some(found) = device("bytes_of_activations_cost_one_percent_at_most") else { return };
    for name in ["llama-4bit-g32", "qwen3-8bit-g128"] {
        let folder = ModelFolder::open(&case(name)).unwrap();
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
        let prompt = &prompts(&case(name))[0];
        let backend = gpu(&found, Activations::Auto, Group::solo());
        let (ours, _) = compute(&prompt.tokens, (&folder, &plan, 0), backend, 70);
        let error = error(&ours, prompt);
        assert!(error > 1e-5, "{name}: activations were not rounded at all");
        assert!(error < 1e-2, "{name}: relative error {error:.2e}");
    }
}

#[test]
fn adapters_agree_with_peft() {
    let Some(found) = device("adapters_agree_with_peft") else { return };
    let mut folder = ModelFolder::open(&case("llama-4bit-g32")).unwrap();
    let adapter = case("").join("../adapters/llama-all");
    folder.add_adapter("all", &adapter).unwrap();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let prompt = &prompts(&adapter)[0];
    let (ours, _) =
        compute(&prompt.tokens, (&folder, &plan, 0), gpu(&found, Activations::F32, Group::solo()), 70);
    let error = error(&ours, prompt);
    assert!(error < 1e-3, "relative error {error:.2e}");
}

#[test]
fn ranks_of_gpus_and_cpus_have_the_same_bits() {
    let Some(found) = device("ranks_of_gpus_and_cpus_have_the_same_bits") else { return };
    let case = case("qwen3-4bit-g64");
    let folder = ModelFolder::open(&case).unwrap();
    let prompt = &prompts(&case)[0];
    let (host, mailbox) = (Mailboxes::Never, Mailboxes::Always);
    // True stands for a GPU.
    for (ranks, mailboxes, peers) in [
        (&[true, true][..], host, false),
        (&[true, true][..], mailbox, false),
        (&[true, true][..], mailbox, true),
        (&[true, false][..], mailbox, false),
        (&[false, true, true][..], mailbox, false),
    ] {
        // On a shared GPU, the waiting kernel of one rank would block the other ranks. A software
        // driver has separate threads for each time that it is opened.
        let gpus = ranks.iter().filter(|is_gpu| **is_gpu).count();
        let (is_real, has_all) = (found.info.is_real(), gpus <= thunder_gpu::real_count());
        let mailboxes = if is_real && gpus > 1 && !has_all { host } else { mailboxes };
        let peers = peers && mailboxes == mailbox;
        let of_rank = |rank: usize| match (is_real, ranks[..rank].iter().filter(|is_gpu| **is_gpu).count()) {
            (false, _) => thunder_gpu::for_tests().unwrap(),
            (true, turn) if gpus > 1 && has_all => thunder_gpu::real(turn).unwrap(),
            (true, _) => found.clone(),
        };
        let weights = vec![1.0; ranks.len()];
        let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &weights).unwrap();
        let parts = local::run(ranks.len(), TransportChoice::Shm, |mut group| {
            let rank = group.rank();
            group.check().unwrap();
            let of = (&folder, &plan, rank);
            match ranks[rank] {
                true => {
                    let activations = Activations::F32;
                    let config =
                        GpuConfig { activations, mailboxes, peers, remembers: true, ..GpuConfig::default() };
                    let mut backend = GpuBackend::new(&of_rank(rank), config, group).unwrap();
                    assert_eq!(backend.has_mailbox(), mailboxes == mailbox);
                    assert_eq!(backend.sum_form() == SumForm::Relay, peers);
                    backend.tune(folder.spec.hidden, 1 << 20).unwrap();
                    compute(&prompt.tokens, of, backend, 70)
                }
                false => {
                    let mut backend = cpu(Activations::F32, group);
                    backend.tune(folder.spec.hidden, 1 << 20).unwrap();
                    compute(&prompt.tokens, of, backend, 70)
                }
            }
        });
        let (logits, hidden): (Vec<_>, Vec<_>) = parts.unwrap().into_iter().unzip();
        for (rank, hidden_of_rank) in hidden.iter().enumerate() {
            let same = hidden_of_rank.iter().zip(&hidden[0]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "rank {rank} of {ranks:?} has other bits than rank 0");
        }
        let error = error(&join(&logits, prompt.tokens.len()), prompt);
        assert!(error < 1e-3, "{ranks:?}: relative error {error:.2e}");
    }
}

#[test]
fn a_prompt_cut_into_pieces_gives_the_same_bits() {
    let Some(found) = device("a_prompt_cut_into_pieces_gives_the_same_bits") else { return };
    let case = case("qwen3-4bit-g64");
    let folder = ModelFolder::open(&case).unwrap();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let tokens = &prompts(&case)[0].tokens;
    let run =
        |chunk| compute(tokens, (&folder, &plan, 0), gpu(&found, Activations::Auto, Group::solo()), chunk).0;
    let whole = run(70);
    // No piece of a prompt is a single token, because that would be computed like a generated one,
    // with other arithmetic.
    for chunk in [13, 33].into_iter().filter(|chunk| tokens.len() % chunk != 1) {
        let same = run(chunk).iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "pieces of {chunk} tokens give other bits");
    }
}

/// The first tokens of a greedy answer.
fn greedy<B: Backend>(folder: &ModelFolder, mut backend: B, prompt: &[u32], count: usize) -> Vec<u32> {
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[1.0]).unwrap();
    let progress = &mut |_, _| ControlFlow::Continue(());
    let mut model = Model::load(folder, &plan, 0, CAPACITY, &mut backend, progress).unwrap();
    let (mut tokens, mut answer, mut start) = (prompt.to_vec(), Vec::new(), 0);
    let mut largest: Vec<Largest> = Vec::new();
    while answer.len() < count {
        let mut step = Step::default();
        step.push(&tokens, start, &[0, 1, 2, 3], 0, true);
        model.forward(&mut backend, &step, None).unwrap();
        model.read_largest(&mut backend, &step, &mut largest).unwrap();
        start += tokens.len();
        tokens = vec![largest[0].column];
        answer.push(largest[0].column);
    }
    answer
}

#[test]
fn the_built_in_model_answers_as_on_the_cpu() {
    let Some(found) = device("the_built_in_model_answers_as_on_the_cpu") else { return };
    let folder = ModelFolder::open(&thunder_testing::builtin_model()).unwrap();
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(thunder_testing::builtin_golden()).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let answers = golden.as_array().unwrap().iter().take(thunder_testing::runs(2, 100));
    for answer in answers {
        let (prompt, expected) = (ids(&answer["prompt"]), ids(&answer["completion"]));
        let count = expected.len().min(thunder_testing::runs(16, 60));
        for activations in [Activations::F32, Activations::Auto] {
            let found = greedy(&folder, gpu(&found, activations, Group::solo()), &prompt, count);
            assert_eq!(found, expected[..count], "{activations:?}");
            let of_cpu = greedy(&folder, cpu(activations, Group::solo()), &prompt, count);
            assert_eq!(found, of_cpu, "{activations:?}");
        }
    }
}
