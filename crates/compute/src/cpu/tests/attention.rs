//! Attention against its definition, on every instruction set of this CPU.

use super::*;
use crate::backend::{AttentionSpec, CacheKind, CacheShape, KvFormat, QkNorm, Rope};

/// Attention by its definition, for one sequence that begins at position 0: `[row][head][dim]`.
fn plain_attention(
    spec: &AttentionSpec<std::sync::Arc<[f32]>>,
    rope: &Rope,
    qkv: &[f32],
    rows: usize,
) -> Vec<f32> {
    let (dim, heads, kv_heads, width) = (spec.key_dim, spec.heads(), spec.kv_heads(), spec.qkv_width());
    let head = |row: usize, index: usize| {
        let mut x = qkv[row * width + index * dim..][..dim].to_vec();
        if index >= heads + kv_heads {
            return x;
        }
        if let Some(norm) = &spec.qk_norm {
            let weight = if index < heads { &norm.query } else { &norm.key };
            let rms = (x.iter().map(|x| x * x).sum::<f32>() / dim as f32 + norm.eps).sqrt();
            x.iter_mut().zip(weight.iter()).for_each(|(x, w)| *x = *x / rms * w);
        }
        let half = rope.inverse_frequencies.len();
        for i in 0..half {
            let (sin, cos) = (row as f32 * rope.inverse_frequencies[i]).sin_cos();
            (x[i], x[i + half]) = (x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin);
        }
        x
    };
    let mut out = Vec::new();
    for row in 0..rows {
        for query in 0..heads {
            let kv = spec.queries_of.iter().position(|range| range.contains(&query)).unwrap();
            let first = spec.window.map_or(0, |window| (row + 1).saturating_sub(window));
            let q = head(row, query);
            let scores: Vec<f32> = (first..=row)
                .map(|t| q.iter().zip(head(t, heads + kv)).map(|(q, k)| q * k).sum::<f32>() * spec.scale)
                .collect();
            let best = scores.iter().copied().fold(f32::MIN, f32::max);
            let total: f32 = scores.iter().map(|s| (s - best).exp()).sum();
            let mut sum = vec![0.0; dim];
            for (t, score) in (first..=row).zip(&scores) {
                let v = head(t, heads + kv_heads + kv);
                sum.iter_mut().zip(v).for_each(|(s, v)| *s += (score - best).exp() / total * v);
            }
            out.extend(sum);
        }
    }
    out
}

#[test]
fn attention_matches_its_definition_however_the_prompt_is_cut() {
    let mut numbers = Random::new(5);
    let rows = 300;
    let rope = Rope {
        inverse_frequencies: (0..16).map(|i| 0.5f32.powi(i)).collect(),
        amplitude: 1.0,
        interleaved: false,
    };
    for (dim, window, norm, queries_of) in [
        (32, None, true, vec![0..4, 4..8]),
        (48, Some(20), false, vec![0..3]),
        (128, Some(133), true, vec![0..1, 1..2, 2..4]),
    ] {
        let spec = AttentionSpec::<std::sync::Arc<[f32]>> {
            key_dim: dim,
            value_dim: dim,
            queries_of,
            scale: 0.2,
            window,
            qk_norm: norm.then(|| QkNorm {
                query: numbers.floats(dim).into(),
                key: numbers.floats(dim).into(),
                eps: 1e-5,
            }),
            rope: Some(0),
            sinks: None,
            temperature: None,
            out_column: 0,
        };
        let values = numbers.floats(rows * spec.qkv_width());
        let expected = plain_attention(&spec, &rope, &values, rows);
        let caches = vec![spec.cache()];
        for (isa, (activations, format, limit)) in Isa::available().into_iter().flat_map(|isa| {
            [
                (Activations::Int16, KvFormat::F16, 1e-3),
                (Activations::Int16, KvFormat::Int8, 1e-2),
                (Activations::Bf16, KvFormat::F16, 8e-3),
                (Activations::Bf16, KvFormat::Int8, 1.5e-2),
            ]
            .map(|case| (isa, case))
        }) {
            let shape = CacheShape { caches: caches.clone(), blocks: 12, slots: 1, format };
            let mut whole = Vec::new();
            for cuts in [vec![300], vec![1, 131, 1, 167], vec![33, 20, 20, 2, 225]] {
                let mut backend = backend(isa, 2, activations);
                let mut kv = backend.caches(&shape).unwrap();
                let (mut start, mut result) = (0, Vec::new());
                for cut in cuts {
                    let mut step = Step::default();
                    step.push(&vec![0; cut], start, &[5, 2, 7, 1, 9, 11, 0, 3, 4, 6], 0, false);
                    let part = &values[start * spec.qkv_width()..][..cut * spec.qkv_width()];
                    let mut qkv = filled(&mut backend, part, spec.qkv_width());
                    let mut out = backend.buffer(cut, spec.heads() * dim).unwrap();
                    backend.begin(&step, std::slice::from_ref(&rope)).unwrap();
                    backend.attention(&spec, &step, 0..cut, &mut qkv, (&mut kv, 0), &mut out).unwrap();
                    result.extend(read(&mut backend, &out));
                    start += cut;
                }
                let error = distance(&result, &expected);
                let what = format!("{activations:?}, {format:?}, window {window:?} on {}", isa.name());
                println!("{what}: {error}");
                assert!(error < limit, "{what}: off by {error}");
                if activations == Activations::Bf16 {
                    continue;
                }
                if whole.is_empty() {
                    whole = result;
                } else {
                    assert_eq!(whole, result, "{what}: the cut changed the result");
                }
            }
        }
    }
}

#[test]
fn a_sequence_attends_alike_alone_and_among_others() {
    let mut numbers = Random::new(6);
    let (dim, context) = (48, 70);
    let spec = AttentionSpec::<std::sync::Arc<[f32]>> {
        key_dim: dim,
        value_dim: dim,
        queries_of: vec![0..2, 2..5],
        scale: 0.15,
        window: None,
        qk_norm: None,
        rope: None,
        sinks: None,
        temperature: Some((0.1, 16)),
        out_column: 0,
    };
    let caches = vec![spec.cache()];
    let prompts: Vec<_> = (0..3).map(|_| numbers.floats(context * spec.qkv_width())).collect();
    let generated: Vec<_> = (0..3).map(|_| numbers.floats(spec.qkv_width())).collect();
    let blocks = [[0, 4, 8], [7, 3, 5], [1, 2, 6]];
    for (isa, format) in Isa::available()
        .into_iter()
        .flat_map(|isa| [KvFormat::F16, KvFormat::Int8].map(|format| (isa, format)))
    {
        let attend = |which: &[usize]| {
            let mut backend = backend(isa, 3, Activations::Int16);
            let mut kv =
                backend.caches(&CacheShape { caches: caches.clone(), blocks: 9, slots: 3, format }).unwrap();
            [(&[0; 70][..], 0, &prompts), (&[0], 70, &generated)].map(|(tokens, start, from)| {
                let mut step = Step::default();
                which.iter().for_each(|i| step.push(tokens, start, &blocks[*i], *i, false));
                let rows: Vec<f32> = which.iter().flat_map(|i| from[*i].iter().copied()).collect();
                let mut qkv = filled(&mut backend, &rows, spec.qkv_width());
                let mut out = backend.buffer(step.rows(), spec.heads() * dim).unwrap();
                backend.begin(&step, &[]).unwrap();
                backend.attention(&spec, &step, 0..step.rows(), &mut qkv, (&mut kv, 0), &mut out).unwrap();
                read(&mut backend, &out)
            })
        };
        let together = attend(&[0, 1, 2]);
        let alone: Vec<_> = (0..3).map(|i| attend(&[i])).collect();
        for (step, together) in together.into_iter().enumerate() {
            let alone: Vec<f32> = alone.iter().flat_map(|steps| steps[step].iter().copied()).collect();
            assert_eq!(together, alone, "{format:?} on {}, step {step}", isa.name());
        }
    }
}

#[test]
fn a_head_too_wide_for_the_kernel_is_refused() {
    let mut backend = backend(Isa::Portable, 1, Activations::Int16);
    for head_dim in [40, 528] {
        let heads = CacheKind::Heads { heads: 1, key_dim: head_dim, value_dim: 64 };
        let shape = CacheShape { caches: vec![heads], blocks: 1, slots: 1, format: KvFormat::F16 };
        let error = backend.caches(&shape).unwrap_err().to_string();
        assert!(error.contains(&head_dim.to_string()) && error.contains("multiple of 16"), "{error}");
    }
}
