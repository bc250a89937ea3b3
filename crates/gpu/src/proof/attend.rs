//! Attention that shares keys and values, on small data, as [`super::families`].

use std::ops::Range;

use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{AttentionSpec, Backend, CacheShape, ComputeError, Step};

use super::Numbers;
use super::families::{filled, format, read};
use crate::kernel::{AttendMany, AttendTiles, UNIT};

/// Tokens before a generated one: more than the smallest splits hold.
const LONG: usize = 2130;
/// Tokens before a prompt's.
const SHORT: usize = 200;

fn spec(queries_of: Vec<Range<usize>>, widths: [usize; 2], window: Option<usize>) -> AttentionSpec<Vec<f32>> {
    let heads = queries_of.last().map_or(0, |range| range.end);
    AttentionSpec {
        key_dim: widths[0],
        value_dim: widths[1],
        queries_of,
        scale: 0.1,
        window,
        qk_norm: None,
        rope: None,
        sinks: window.map(|_| Numbers(6).take(heads)),
        temperature: None,
        out_column: 3,
    }
}

/// Results of steps of rows of two sequences, the first of which has `before` tokens in the cache.
/// The second begins with its rows.
fn attended<B: Backend>(
    backend: &mut B,
    spec: AttentionSpec<Vec<f32>>,
    int8: bool,
    (before, rows): (usize, [usize; 2]),
) -> Result<Vec<f32>, ComputeError> {
    let spec = spec.try_map(&mut |values| backend.vector(&values))?;
    let blocks = (before + rows[0]).div_ceil(KV_BLOCK_TOKENS) as u32;
    let others = rows[1].div_ceil(KV_BLOCK_TOKENS) as u32;
    // Blocks in no order.
    let mine: Vec<u32> = (0..blocks).map(|block| (block * 7 + 3) % blocks + others).collect();
    let other: Vec<u32> = (0..others).collect();
    let shape = CacheShape {
        format: format(int8),
        caches: vec![spec.cache()],
        blocks: (blocks + others) as usize,
        slots: 2,
    };
    let mut caches = backend.caches(&shape)?;
    let mut numbers = Numbers(12);
    let width = spec.qkv_width();
    let mut step = Step::default();
    step.push(&vec![1; before], 0, &mine, 0, false);
    let qkv = filled(backend, &numbers.take(before * width), width)?;
    backend.begin(&step, &[])?;
    backend.append(&spec, &step, 0..before, &qkv, (&mut caches, 0))?;
    step.clear();
    step.push(&vec![1; rows[0]], before, &mine, 0, true);
    step.push(&vec![1; rows[1]], 0, &other, 1, true);
    let all = step.rows();
    let mut qkv = filled(backend, &numbers.take(all * width), width)?;
    let outputs = spec.out_column + spec.heads() * spec.value_dim;
    let mut out = filled(backend, &vec![0.0; all * outputs], outputs)?;
    backend.begin(&step, &[])?;
    backend.attention(&spec, &step, 0..all, &mut qkv, (&mut caches, 0), &mut out)?;
    read(backend, &out, all)
}

/// Generated tokens, with all heads of a form and with one less.
pub(super) fn many<B: Backend>(backend: &mut B, form: AttendMany) -> Result<Vec<Vec<f32>>, ComputeError> {
    let AttendMany { heads, units, int8 } = form;
    let (wide, narrow) = (units * UNIT, (units - 1) * UNIT);
    let queries_of = vec![0..heads, heads..(2 * heads - 1).max(heads + 1)];
    [([wide, narrow], None), ([narrow, wide], Some(70))]
        .map(|(widths, window)| {
            attended(backend, spec(queries_of.clone(), widths, window), int8, (LONG, [1, 1]))
        })
        .into_iter()
        .collect()
}

/// Rows of prompts: more than a tile's.
pub(super) fn tiles<B: Backend>(backend: &mut B, form: AttendTiles) -> Result<Vec<Vec<f32>>, ComputeError> {
    let AttendTiles { columns, int8 } = form;
    [([72, columns], None), ([columns, columns - UNIT], Some(50))]
        .map(|(widths, window)| {
            attended(backend, spec(vec![0..1, 1..3], widths, window), int8, (SHORT, [70, 5]))
        })
        .into_iter()
        .collect()
}
