//! Measures the time of a layer's attention. Prints figures, for a person at a GPU.
//!
//! `THUNDER_TEST_GPU=0 cargo nextest run --release -p thunder-gpu --run-ignored only --no-capture
//! speed`

use std::time::Instant;

use thunder_collectives::Group;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    Activations, AttentionSpec, Backend, CacheShape, Device, KvFormat, LinearInput, QkNorm, Rope, Step,
};

use super::{backend, device};
use crate::GpuBackend;
use crate::kernel::{AttendMatrices, Kernel};
use crate::proof::{Family, Numbers};

/// Bytes of keys and values that the dispatches cycle through: more than any GPU's cache.
const MUCH_BYTES: usize = 256 << 20;

fn spec(kv_heads: usize, queries: usize, dim: usize) -> AttentionSpec<crate::Vector> {
    AttentionSpec {
        key_dim: dim,
        value_dim: dim,
        queries_of: (0..kv_heads).map(|kv| kv * queries..(kv + 1) * queries).collect(),
        scale: 0.1,
        window: None,
        qk_norm: None,
        rope: Some(0),
        sinks: None,
        temperature: None,
        out_column: 0,
    }
}

/// Prints the time of a layer's attention in µs: for sequences of some context with a generated
/// token each, or for one with a piece of a prompt.
fn measure(
    backend: &mut GpuBackend,
    spec: &AttentionSpec<crate::Vector>,
    format: KvFormat,
    ([sequences, context, tokens], much): ([usize; 3], bool),
) {
    let blocks = (context + tokens).div_ceil(KV_BLOCK_TOKENS);
    let mut shape =
        CacheShape { format, caches: vec![spec.cache()], blocks: sequences * blocks, slots: sequences };
    let bytes = shape.bytes_per_token() * sequences * (context + tokens);
    let layers = (MUCH_BYTES / bytes).clamp(1, 32);
    shape.caches = vec![spec.cache(); layers];
    let mut caches = backend.caches(&shape).unwrap();
    let mut step = Step::default();
    for slot in 0..sequences {
        let blocks: Vec<u32> = (0..blocks).map(|block| (slot + sequences * block) as u32).collect();
        step.push(&vec![0; tokens], context, &blocks, slot, false);
    }
    let rows = step.rows();
    let rope = Rope { inverse_frequencies: vec![0.5; spec.key_dim / 2], amplitude: 1.0, interleaved: false };
    let mut qkv = backend.buffer(rows, spec.qkv_width()).unwrap();
    backend.write(&Numbers(1).take(rows * spec.qkv_width()), &mut qkv).unwrap();
    let mut out = backend.buffer(rows, spec.heads() * spec.value_dim).unwrap();
    backend.begin(&step, &[rope]).unwrap();
    let work = 4 * rows * context.max(tokens / 2) * spec.heads() * spec.key_dim;
    let repeats = if much { (2_000_000_000_000 / work).clamp(4, 1500) } else { 4 };
    let mut time = |what: usize| {
        let mut run = |repeats: usize| {
            for i in 0..repeats {
                let cache = (&mut caches, i % layers);
                match what {
                    0 => backend.attention(spec, &step, 0..rows, &mut qkv, cache, &mut out).unwrap(),
                    1 => backend.attend(spec, &step, 0..rows, &qkv, cache, &mut out).unwrap(),
                    _ => {
                        backend.prepare_heads(spec, &step, 0..rows, &mut qkv).unwrap();
                        backend.append(spec, &step, 0..rows, &qkv, cache).unwrap();
                    }
                }
            }
            backend.device.submit().unwrap();
            backend.device.wait().unwrap();
        };
        run(repeats.div_ceil(10));
        let start = Instant::now();
        run(repeats);
        start.elapsed().as_secs_f64() * 1e6 / repeats as f64
    };
    let [all, attend, prepare] = [0, 1, 2].map(&mut time);
    println!(
        "{:?} heads {}/{} x {} | {sequences} x {tokens} after {context} | attention {all:.1} us, attend and combine {attend:.1}, plain prepare and append {prepare:.1} | {:.0} GB/s, {:.2} TFLOP/s",
        format,
        spec.heads(),
        spec.kv_heads(),
        spec.key_dim,
        bytes as f64 / attend / 1e3,
        work as f64 / attend / 1e6,
    );
}

#[test]
#[ignore = "prints figures"]
fn speed() {
    let Some(found) = device("speed") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    let real = !found.info.name.contains("llvmpipe");
    let llama = spec(8, 4, 128);
    let small = [[1, 512, 1], [4, 512, 1], [16, 512, 1], [1, 2048, 1]];
    let large = [
        [1, 8192, 1],
        [1, 32768, 1],
        [4, 32768, 1],
        [16, 32768, 1],
        [1, 0, 512],
        [1, 0, 2048],
        [1, 32256, 512],
    ];
    for case in small.into_iter().chain(large.into_iter().filter(|_| real)) {
        measure(&mut backend, &llama, KvFormat::F16, (case, real));
    }
    // A rank's share of a 70B on two ranks.
    measure(&mut backend, &spec(4, 8, 128), KvFormat::F16, ([1, 512, 1], real));
    for case in [[1, 512, 1], [1, 2048, 512]] {
        measure(&mut backend, &llama, KvFormat::Int8, (case, real));
        if real {
            measure(&mut backend, &spec(8, 8, 64), KvFormat::F16, (case, real));
        }
    }
}

/// Attention of generated tokens, by the number of workgroups from which each computes several
/// splits.
#[test]
#[ignore = "prints figures"]
fn speed_of_chains() {
    let Some(found) = device("speed_of_chains") else { return };
    let mut backend = backend(&found, Activations::F32, Group::solo());
    for busy_groups in [1_000_000, 2048, 1024, 512, 256] {
        backend.busy_groups = busy_groups;
        println!("{busy_groups} workgroups:");
        for case in [[1, 512, 1], [4, 512, 1], [16, 512, 1], [64, 512, 1], [4, 8192, 1], [16, 8192, 1]] {
            measure(&mut backend, &spec(8, 4, 128), KvFormat::F16, (case, found.info.is_real()));
        }
    }
}

/// Attention of prompts, by each form of matrices and by tiles.
#[test]
#[ignore = "prints figures"]
fn speed_of_prompts() {
    let Some(found) = device("speed_of_prompts") else { return };
    let forms = AttendMatrices::of([128; 2], false).map(Some).chain([None]);
    for form in forms {
        let mut backend = backend(&found, Activations::Auto, Group::solo());
        for other in AttendMatrices::all().filter(|other| Some(*other) != form) {
            backend.taken.insert(Family::Matrices(other), false);
        }
        println!("{form:?}:");
        for case in [[1, 0, 512], [1, 0, 2048], [1, 8192, 2048]] {
            measure(&mut backend, &spec(8, 4, 128), KvFormat::F16, (case, found.info.is_real()));
        }
        println!("{:?}", backend.refusals());
    }
}

/// Attention of a generated token as in a step: between other kernels, which read other bytes and
/// have more or less workgroup memory.
#[test]
#[ignore = "prints figures"]
fn attention_within_a_step() {
    let Some(found) = device("attention_within_a_step") else { return };
    for padded in [false, true] {
        let mut backend = backend(&found, Activations::Auto, Group::solo());
        if padded {
            // Never true, which the compiler cannot know.
            backend.device.sabotage = Some(|kernel, text| match kernel {
                Kernel::Product(_) | Kernel::Quantize { .. } => {
                    let unused = "if (THREAD_COUNT == 0xffffffffu) {
    padding[thread] = thread;
    workgroupBarrier();
    scales_or_out
}
";
                    pad(&text, unused)
                }
                _ => text,
            });
        }
        let all = super::speed::matrices(&mut backend, 4, 28672, 4096);
        let mut x = backend.buffer(1, 4096).unwrap();
        backend.write(&vec![0.5; 4096], &mut x).unwrap();
        let mut channels = backend.buffer(1, 28672).unwrap();
        for (kv_heads, queries, norms) in [(8, 4, false), (4, 8, true)] {
            let mut spec = spec(kv_heads, queries, 128);
            if norms {
                let [query, key] = [(); 2].map(|()| backend.vector(&[1.0; 128]).unwrap());
                spec.qk_norm = Some(QkNorm { query, key, eps: 1e-6 });
            }
            let blocks = 544_usize.div_ceil(KV_BLOCK_TOKENS);
            let layers = 16;
            let shape = CacheShape {
                format: KvFormat::F16,
                caches: vec![spec.cache(); layers],
                blocks: 100 * blocks,
                slots: 1,
            };
            let mut caches = backend.caches(&shape).unwrap();
            let mut step = Step::default();
            let table: Vec<u32> = (0..blocks as u32).collect();
            step.push(&[0], 530, &table, 0, false);
            let rope = Rope { inverse_frequencies: vec![0.5; 64], amplitude: 1.0, interleaved: false };
            let mut qkv = backend.buffer(1, spec.qkv_width()).unwrap();
            backend.write(&Numbers(1).take(spec.qkv_width()), &mut qkv).unwrap();
            let mut out = backend.buffer(1, spec.heads() * 128).unwrap();
            backend.begin(&step, &[rope]).unwrap();
            let mut time = |attends: bool, multiplies: bool, rounds: bool| {
                super::speed::time(&mut backend, |backend, i| {
                    if multiplies {
                        backend
                            .linear(LinearInput::Plain(&x), 0..1, &all[i % all.len()], &mut channels)
                            .unwrap();
                    }
                    if rounds {
                        backend.quantized(&x, 0..1, 128, crate::kernel::Input::Pairs, None).unwrap();
                    }
                    if attends {
                        let cache = (&mut caches, i % layers);
                        backend.attention(&spec, &step, 0..1, &mut qkv, cache, &mut out).unwrap();
                    }
                })
            };
            let [alone, product, rounding] =
                [(true, false, false), (false, true, false), (false, false, true)]
                    .map(|(a, m, r)| time(a, m, r));
            let [with_product, with_rounding] =
                [(true, true, false), (true, false, true)].map(|(a, m, r)| time(a, m, r));
            println!(
                "{kv_heads} KV heads of {queries}, norms {norms}, padded {padded}: attention alone {alone:.2} us, between products {:.2} ({product:.2} each), between roundings {:.2} ({rounding:.2} each)",
                with_product - product,
                with_rounding - rounding,
            );
        }
    }
}

/// A kernel's text with 22 KiB of workgroup memory that it does not use.
fn pad(text: &str, unused: &str) -> String {
    let begin = text.find("fn main(").unwrap();
    let body = begin + text[begin..].find("{\n").unwrap() + 2;
    let at = text.find("@compute").unwrap();
    let (count, out) = match text.contains("args.blocks") {
        true => ("args.blocks", "out[0] = f32(padding[thread ^ 1u]);"),
        false => ("args.x_blocks", "levels_out[0] = padding[thread ^ 1u];"),
    };
    let unused = unused.replace("THREAD_COUNT", count).replace("scales_or_out", out);
    format!(
        "{}var<workgroup> padding: array<u32, 5632>;\n{}{unused}{}",
        &text[..at],
        &text[at..body],
        &text[body..]
    )
}
