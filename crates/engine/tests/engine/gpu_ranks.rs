//! Engines whose ranks compute on devices that exchange sums within their steps, each on a GPU of
//! its own, or on Mesa's software driver.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use thunder_collectives::Group;
use thunder_compute::{Activations, Backend as _};
use thunder_engine::{Engine, Limits, Request, Sampling};
use thunder_gpu::{Found, GpuBackend, GpuConfig, Mailboxes, SumForm};
use thunder_model::{ModelFolder, Parallelism};

use crate::common::{CONTEXT, read, with_engine_on};

/// A rank alone.
const ONE: (usize, SumForm) = (1, SumForm::None);

/// Devices for two ranks. Reports a skipped test if there are none.
fn devices(test: &str) -> Option<[Found; 2]> {
    let found = thunder_gpu::for_tests();
    let pair = match &found {
        // Software drivers have separate threads for each time that they are opened.
        Some(found) if !found.info.is_real() => thunder_gpu::for_tests().map(|other| [found.clone(), other]),
        Some(_) if thunder_gpu::real_count() > 1 => Some([0, 1].map(|turn| thunder_gpu::real(turn).unwrap())),
        _ => None,
    };
    if pair.is_none() {
        let reason = if found.is_some() { "there is one GPU" } else { thunder_testing::NO_VULKAN };
        thunder_testing::skip(test, reason);
    }
    pair
}

/// Requests whose tokens are the most probable ones, sampled ones, and chosen after changes of the
/// logits.
fn requests() -> Vec<Request> {
    let request = |sampling| Request {
        prompt: (40..52).collect(),
        sampling,
        max_tokens: Some(thunder_testing::runs(12, 20)),
        ignore_eos: true,
        ..Request::default()
    };
    let sampled = Sampling { temperature: 0.8, top_p: 0.9, seed: Some(3), ..Sampling::default() };
    let penalized = Sampling { repetition_penalty: 1.2, logit_bias: vec![(50, 2.0)], ..sampled.clone() };
    let mut all: Vec<Request> =
        [Sampling::default(), sampled.clone(), penalized].into_iter().map(request).collect();
    all.push(Request { logprobs: Some(3), ..request(sampled) });
    all
}

/// The answers one after the other, and then to all requests at once.
fn answers(engine: &Engine) -> Vec<String> {
    let submit = |request| engine.submit(request).unwrap();
    let mut all: Vec<String> = requests().into_iter().map(|request| read(submit(request)).unwrap()).collect();
    let together: Vec<_> = requests().into_iter().map(submit).collect();
    all.extend(together.into_iter().map(|stream| read(stream).unwrap()));
    all
}

/// The answers of an engine whose ranks compute on the first of these devices, and the number of
/// steps that the last rank's device got ahead. `form`: how sums over ranks travel.
fn answers_of(
    devices: &[Found; 2],
    (ranks, form): (usize, SumForm),
    model: &Path,
    draft: Option<&Path>,
) -> (Vec<String>, usize) {
    let ahead = AtomicUsize::new(0);
    let draft_rows = if draft.is_some() { 16 } else { 0 };
    let limits = Limits { sequences: 4, rows: 32, kv_blocks: 32, draft_rows, ..Limits::default() };
    let activations = Activations::F32;
    let mailboxes = if form == SumForm::Mailbox { Mailboxes::Host } else { Mailboxes::Always };
    let config = GpuConfig { activations, mailboxes, peers: true, remembers: true, ..GpuConfig::default() };
    let backend = |group: Group| {
        let backend = GpuBackend::new(&devices[group.rank()], config, group).unwrap();
        assert_eq!(backend.sum_form(), form);
        backend
    };
    let look = |backend: &GpuBackend| {
        assert!(form == SumForm::Mailbox || backend.gathers() > 2, "devices choose from all ranks' logits");
        println!("{form:?}: devices choose for up to {} requests", backend.gathers());
        ahead.store(backend.steps_ahead(), Ordering::Relaxed);
    };
    let folder = ModelFolder::open(model).unwrap();
    let mut all = Vec::new();
    let work = |engine: Engine| all = answers(&engine);
    let layout = (ranks, Parallelism::Tensor);
    with_engine_on((&backend, &look), folder, (draft, None), layout, limits, CONTEXT, work);
    (all, ahead.into_inner())
}

#[test]
fn two_devices_answer_like_one_and_compute_steps_ahead() {
    let test = "two_devices_answer_like_one_and_compute_steps_ahead";
    let Some(devices) = devices(test) else { return };
    let model = thunder_testing::builtin_model();
    let (one, _) = answers_of(&devices, ONE, &model, None);
    // Of greedy and of sampled requests.
    let fewest = [(8, 15), (5, 10)].map(|(short, long)| thunder_testing::runs(short, long));
    for (form, fewest) in [SumForm::Relay, SumForm::Mailbox].into_iter().zip(fewest) {
        let (two, ahead) = answers_of(&devices, (2, form), &model, None);
        assert_eq!(one, two, "{form:?}");
        assert!(ahead > fewest, "{form:?}: {ahead} steps were computed ahead");
    }
    // A draft model computes on rank 0 alone, so no rank computes steps ahead.
    assert_eq!((one, 0), answers_of(&devices, (2, SumForm::Relay), &model, Some(&model)));
}

/// States, several embeddings in a step, compressed keys and values, experts.
#[test]
fn two_devices_answer_like_one_with_other_families() {
    let test = "two_devices_answer_like_one_with_other_families";
    let Some(devices) = devices(test) else { return };
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases");
    let all = ["transformers-qwen3_next", "gemma4_inputs-4bit", "deepseek_v3-4bit-g32", "qwen3_moe-4bit"];
    for name in &all[..thunder_testing::runs(1, all.len())] {
        let model = cases.join(name);
        let (one, _) = answers_of(&devices, ONE, &model, None);
        let (two, ahead) = answers_of(&devices, (2, SumForm::Relay), &model, None);
        assert_eq!(one, two, "{name}");
        assert!(ahead > thunder_testing::runs(5, 10), "{name}: {ahead} steps were computed ahead");
    }
}
