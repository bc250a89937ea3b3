//! Attention to compressed vectors: rows of prompts in tiles, and heads of generated tokens
//! together, which share what they read.

use std::time::Instant;

use thunder_collectives::Group;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, Backend, CacheShape, Device, KvFormat, LatentSpec, Norm, Step};

use super::{backend, device};
use crate::GpuBackend;
use crate::kernel::{AttendLatent, AttendLatentMatrices, AttendShared, Attended, Kernel};
use crate::proof::{Family, Numbers};

const TOKENS: usize = 150;
const HEADS: usize = 20;

fn spec(backend: &mut GpuBackend, heads: usize, rank: usize) -> LatentSpec<crate::Vector> {
    let norm = Norm { weight: backend.vector(&vec![1.0; rank]).unwrap(), eps: 1e-6 };
    LatentSpec { heads, rank, rotated: 64, plain: 128, scale: 0.1, norm, rope: None }
}

/// Results of all tokens of a sequence, computed in steps of these lengths.
fn attended(backend: &mut GpuBackend, format: KvFormat, steps: &[usize]) -> Vec<f32> {
    let spec = spec(backend, HEADS, 120);
    let blocks: Vec<u32> = (0..TOKENS.div_ceil(KV_BLOCK_TOKENS) as u32).rev().collect();
    let shape = CacheShape { format, caches: vec![spec.cache()], blocks: blocks.len(), slots: 1 };
    let mut caches = backend.caches(&shape).unwrap();
    let widths = [HEADS * 120, HEADS * spec.query_dim(), 120 + 64];
    let mut numbers = Numbers(5);
    let all = widths.map(|width| numbers.take(TOKENS * width));
    let (mut found, mut start) = (Vec::new(), 0);
    for &tokens in steps {
        let mut step = Step::default();
        step.push(&vec![0; tokens], start, &blocks, 0, false);
        let rows = 0..tokens;
        let [absorbed, mut queries, mut latent] = std::array::from_fn(|i| {
            let mut buffer = backend.buffer(tokens, widths[i]).unwrap();
            backend.write(&all[i][start * widths[i]..][..tokens * widths[i]], &mut buffer).unwrap();
            buffer
        });
        let mut out = backend.buffer(tokens, widths[0]).unwrap();
        backend.begin(&step, &[]).unwrap();
        backend.prepare_latent(&spec, &step, rows.clone(), &mut queries, &mut latent).unwrap();
        backend.append_latent(&spec, &step, rows.clone(), &latent, (&mut caches, 0)).unwrap();
        let cache = (&mut caches, 0);
        backend.attend_latent(&spec, &step, rows.clone(), &absorbed, &queries, cache, &mut out).unwrap();
        let mut values = vec![0.0; tokens * widths[0]];
        backend.read(&out, rows, &mut values).unwrap();
        found.extend(values);
        start += tokens;
    }
    found
}

#[test]
fn a_row_attends_to_compressed_vectors_alike_however_a_prompt_is_cut() {
    let Some(found) = device("a_row_attends_to_compressed_vectors_alike_however_a_prompt_is_cut") else {
        return;
    };
    for format in [KvFormat::F16, KvFormat::Int8] {
        let mut backend = backend(&found, Activations::F32, Group::solo());
        let whole = attended(&mut backend, format, &[TOKENS]);
        assert_eq!(whole, attended(&mut backend, format, &[70, 7, 33, 40]), "{format:?}");
        let form = AttendLatent::of([120, 64], format == KvFormat::Int8).unwrap();
        assert_eq!(backend.taken.get(&Family::LatentTiles(form)), Some(&true));
    }
}

#[test]
fn wrong_tiles_of_compressed_vectors_are_refused_and_rows_attend_one_by_one() {
    let test = "wrong_tiles_of_compressed_vectors_are_refused_and_rows_attend_one_by_one";
    let Some(found) = device(test) else { return };
    let right = attended(&mut backend(&found, Activations::F32, Group::solo()), KvFormat::F16, &[TOKENS]);
    let mut wrong = backend(&found, Activations::F32, Group::solo());
    wrong.device.sabotage = Some(|kernel, text| match kernel {
        // The sums of earlier blocks are not made smaller.
        Kernel::AttendLatent(_) => text.replace("acc0_3 = acc0_3 * shrink3;", ""),
        _ => text,
    });
    let others = attended(&mut wrong, KvFormat::F16, &[TOKENS]);
    assert!(wrong.refusals().iter().any(|it| it.contains("LatentTiles")), "{:?}", wrong.refusals());
    let most = right.iter().zip(&others).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(most < 1e-4, "off by {most}");
}

#[test]
fn wrong_matrices_of_compressed_vectors_are_refused_and_tiles_taken() {
    let test = "wrong_matrices_of_compressed_vectors_are_refused_and_tiles_taken";
    let Some(found) = device(test) else { return };
    let mut right = backend(&found, Activations::Auto, Group::solo());
    if !right.has_attention_matrices() {
        thunder_testing::skip(test, "the device has no matrices of 16 columns");
        return;
    }
    for format in [KvFormat::F16, KvFormat::Int8] {
        let matrices = attended(&mut right, format, &[TOKENS]);
        assert!(matrices == attended(&mut right, format, &[70, 7, 33, 40]), "{format:?}: a cut changes bits");
        let form = AttendLatentMatrices::of([120, 64], format == KvFormat::Int8).unwrap();
        assert_eq!(right.taken.get(&Family::LatentMatrices(form)), Some(&true), "{:?}", right.refusals());
        let mut wrong = backend(&found, Activations::Auto, Group::solo());
        wrong.device.sabotage = Some(|kernel, text| match kernel {
            // The second half of each score's columns is missing.
            Kernel::AttendLatentMatrices(_) => text.replace("scores[at] + scores[other]", "scores[at]"),
            _ => text,
        });
        let tiles = attended(&mut wrong, format, &[TOKENS]);
        assert!(wrong.refusals().iter().any(|it| it.contains("LatentMatrices")), "{:?}", wrong.refusals());
        let most = matrices.iter().zip(&tiles).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-2, "{format:?}: off by {most}");
    }
}

#[test]
fn heads_of_a_generated_token_that_attend_together_agree_with_those_that_do_not() {
    let test = "heads_of_a_generated_token_that_attend_together_agree_with_those_that_do_not";
    let Some(found) = device(test) else { return };
    for format in [KvFormat::F16, KvFormat::Int8] {
        let form = AttendShared::of(Attended::All, [120, 64], format == KvFormat::Int8).unwrap();
        let steps = [vec![TOKENS - 5], vec![1; 5]].concat();
        let mut right = backend(&found, Activations::F32, Group::solo());
        let together = attended(&mut right, format, &steps);
        assert_eq!(right.taken.get(&Family::Shared(form)), Some(&true), "{format:?}");
        right.busy_groups = 0;
        assert!(together == attended(&mut right, format, &steps), "{format:?}: more heads have other bits");
        let mut wrong = backend(&found, Activations::F32, Group::solo());
        wrong.device.sabotage = Some(|kernel, text| match kernel {
            // A quarter of each score is missing.
            Kernel::AttendShared(_) => text.replace("part < 4u; part++) { four", "part < 3u; part++) { four"),
            _ => text,
        });
        let alone = attended(&mut wrong, format, &steps);
        assert!(wrong.refusals().iter().any(|it| it.contains("Shared")), "{:?}", wrong.refusals());
        let most = together.iter().zip(&alone).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-4, "{format:?}: off by {most}");
    }
}

/// `THUNDER_TEST_GPU=0 cargo nextest run --release -p thunder-gpu --run-ignored only --no-capture
/// speed_of_shared`
#[test]
#[ignore = "prints figures"]
fn speed_of_shared_vectors() {
    let Some(found) = device("speed_of_shared_vectors") else { return };
    let (times, contexts) = if found.info.is_real() { (50, vec![512, 4096, 32768]) } else { (1, vec![512]) };
    for heads in [16, 128] {
        for (name, least) in [("rows alone", None), ("8 heads", Some(usize::MAX)), ("most", Some(0))] {
            let mut backend = backend(&found, Activations::Auto, Group::solo());
            backend.busy_groups = least.unwrap_or(0);
            for form in AttendShared::all().filter(|_| least.is_none()) {
                backend.taken.insert(Family::Shared(form), false);
            }
            let spec = spec(&mut backend, heads, 512);
            for &tokens in &contexts {
                // More do not fit into a buffer that a device binds.
                for rows in [1, 16, 64].into_iter().filter(|rows| rows * tokens <= 1 << 20) {
                    let of_row = tokens / KV_BLOCK_TOKENS + 1;
                    let (format, caches) = (KvFormat::F16, vec![spec.cache()]);
                    let shape = CacheShape { format, caches, blocks: rows * of_row, slots: rows };
                    let mut caches = backend.caches(&shape).unwrap();
                    let mut step = Step::default();
                    for row in 0..rows {
                        let blocks: Vec<u32> =
                            (row * of_row..(row + 1) * of_row).map(|it| it as u32).collect();
                        step.push(&[0], tokens, &blocks, row, true);
                    }
                    let [absorbed, queries, mut out] = [heads * 512, heads * spec.query_dim(), heads * 512]
                        .map(|width| backend.buffer(rows, width).unwrap());
                    let mut attend = |backend: &mut GpuBackend| {
                        let start = Instant::now();
                        backend.begin(&step, &[]).unwrap();
                        for _ in 0..times {
                            let cache = (&mut caches, 0);
                            backend
                                .attend_latent(&spec, &step, 0..rows, &absorbed, &queries, cache, &mut out)
                                .unwrap();
                        }
                        backend.device.submit().unwrap();
                        backend.device.wait().unwrap();
                        start.elapsed().as_secs_f64() * 1e6 / times as f64
                    };
                    // Kernels are proved meanwhile.
                    attend(&mut backend);
                    let best = (0..3).map(|_| attend(&mut backend)).fold(f64::INFINITY, f64::min);
                    println!("{heads} heads, {rows} rows of {tokens} tokens, {name}: {best:.1} µs");
                }
            }
        }
    }
}

/// `THUNDER_TEST_GPU=0 cargo nextest run --release -p thunder-gpu --run-ignored only --no-capture
/// speed_of_compressed`
#[test]
#[ignore = "prints figures"]
fn speed_of_compressed_vectors() {
    let Some(found) = device("speed_of_compressed_vectors") else { return };
    let (heads, times) = if found.info.is_real() { (128, 5) } else { (2, 1) };
    let matrices = Family::LatentMatrices(AttendLatentMatrices::of([512, 64], false).unwrap());
    let tiles = Family::LatentTiles(AttendLatent::of([512, 64], false).unwrap());
    for (name, without) in [("matrices", &[][..]), ("tiles", &[matrices]), ("rows", &[matrices, tiles])] {
        let mut backend = backend(&found, Activations::Auto, Group::solo());
        let spec = spec(&mut backend, heads, 512);
        backend.taken.extend(without.iter().map(|family| (*family, false)));
        for before in [0, 4096] {
            let tokens = 512;
            let blocks: Vec<u32> = (0..((before + tokens) / KV_BLOCK_TOKENS) as u32).collect();
            let (format, caches) = (KvFormat::F16, vec![spec.cache()]);
            let shape = CacheShape { format, caches, blocks: blocks.len(), slots: 1 };
            let mut caches = backend.caches(&shape).unwrap();
            let mut step = Step::default();
            step.push(&vec![0; tokens], before, &blocks, 0, false);
            let [absorbed, queries, mut out] = [heads * 512, heads * spec.query_dim(), heads * 512]
                .map(|width| backend.buffer(tokens, width).unwrap());
            backend.begin(&step, &[]).unwrap();
            let mut attend = |backend: &mut GpuBackend| {
                let start = Instant::now();
                let cache = (&mut caches, 0);
                backend.attend_latent(&spec, &step, 0..tokens, &absorbed, &queries, cache, &mut out).unwrap();
                backend.device.submit().unwrap();
                backend.device.wait().unwrap();
                start.elapsed().as_secs_f64() * 1e3
            };
            // Kernels are proved meanwhile.
            attend(&mut backend);
            let best = (0..times).map(|_| attend(&mut backend)).fold(f64::INFINITY, f64::min);
            println!("{heads} heads, {tokens} rows after {before} tokens, {name}: {best:.2} ms");
        }
    }
}
