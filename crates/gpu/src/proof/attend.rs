//! Attention that shares keys and values, on small data, as in [`super::families`].

use std::ops::Range;

use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    AttentionSpec, Backend, CacheShape, ComputeError, LatentSpec, Norm, QkNorm, Rope, Scoring, Step,
};

use super::Numbers;
use super::families::{filled, format, read};
use crate::backend::GpuBackend;
use crate::buffer::BLOCK_COLUMNS;
use crate::kernel::{AttendMany, Input, UNIT};

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

/// Results of the last of two steps with rows of two sequences. The first sequence has `before`
/// tokens in the cache, the second begins with its rows.
fn attended<B: Backend>(
    backend: &mut B,
    (spec, scoring): (AttentionSpec<Vec<f32>>, Scoring),
    int8: bool,
    (before, rows): (usize, [usize; 2]),
) -> Result<(B::Buffer, usize), ComputeError> {
    let spec = spec.try_map(&mut |values| backend.vector(&values))?;
    let is_interleaved = spec.qk_norm.is_none();
    // Not all columns are rotated.
    let inverse_frequencies = (1..spec.key_dim / 2).map(|i| 1.0 / i as f32).collect();
    let rope = Rope { inverse_frequencies, amplitude: 1.1, interleaved: is_interleaved };
    let blocks = (before + 2 * rows[0]).div_ceil(KV_BLOCK_TOKENS) as u32;
    let others = (2 * rows[1]).div_ceil(KV_BLOCK_TOKENS) as u32;
    // Blocks in no particular order.
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
    let all = rows[0] + rows[1];
    let outputs = spec.out_column + spec.heads() * spec.value_dim;
    let mut out = filled(backend, &vec![0.0; all * outputs], outputs)?;
    for turn in 0..2 {
        step.clear();
        step.push(&vec![1; rows[0]], before + turn * rows[0], &mine, 0, true);
        step.push(&vec![1; rows[1]], turn * rows[1], &other, 1, true);
        let mut qkv = filled(backend, &numbers.take(all * width), width)?;
        backend.begin(&step, std::slice::from_ref(&rope))?;
        attend(backend, (&spec, scoring), &step, &mut qkv, &mut caches, &mut out)?;
    }
    Ok((out, all))
}

/// Attention of all rows: in one operation if scores are the usual ones.
fn attend<B: Backend>(
    backend: &mut B,
    (spec, scoring): (&AttentionSpec<B::Vector>, Scoring),
    step: &Step,
    qkv: &mut B::Buffer,
    caches: &mut B::Caches,
    out: &mut B::Buffer,
) -> Result<(), ComputeError> {
    let rows = 0..step.rows();
    if scoring == Scoring::default() {
        return backend.attention(spec, step, rows, qkv, (caches, 0), out);
    }
    backend.prepare_heads(spec, step, rows.clone(), qkv)?;
    backend.append(spec, step, rows.clone(), qkv, (&mut *caches, 0))?;
    backend.attend_by(spec, scoring, step, rows, qkv, (caches, 0), out)
}

fn results<B: Backend>(
    backend: &mut B,
    spec: (AttentionSpec<Vec<f32>>, Scoring),
    int8: bool,
    rows: (usize, [usize; 2]),
) -> Result<Vec<f32>, ComputeError> {
    let (out, rows) = attended(backend, spec, int8, rows)?;
    read(backend, &out, rows)
}

/// Generated tokens, with all heads of a form and with one head less.
pub(super) fn many<B: Backend>(backend: &mut B, form: AttendMany) -> Result<Vec<Vec<f32>>, ComputeError> {
    let AttendMany { heads, units, int8, .. } = form;
    let (wide, narrow) = (units * UNIT, (units - 1) * UNIT);
    let queries_of = vec![0..heads, heads..(2 * heads - 1).max(heads + 1)];
    // Tokens after the start of a chunk take several splits.
    let scored = Scoring { cap: Some(0.3), chunk: Some(1500), after: 0 };
    let usual = Scoring::default();
    [([wide, narrow], None, usual), ([narrow, wide], Some(70), usual), ([wide; 2], None, scored)]
        .map(|(widths, window, scoring)| {
            let mut spec = spec(queries_of.clone(), widths, window);
            spec.rope = Some(0);
            if window.is_some() {
                let mut numbers = Numbers(8);
                let [query, key] = [(); 2].map(|()| numbers.take(widths[0]));
                spec.qk_norm = Some(QkNorm { query, key, eps: 1e-5 });
                spec.temperature = Some((0.3, 64));
            }
            results(backend, (spec, scoring), int8, (LONG, [1, 1]))
        })
        .into_iter()
        .collect()
}

/// Compares the levels that a form stores of its results with the bits of the kernel that rounds
/// rows.
pub(super) fn leaves(backend: &mut GpuBackend, form: AttendMany) -> Result<Result<(), String>, ComputeError> {
    let AttendMany { heads, units, int8, .. } = form;
    if !form.can_leave() {
        return Ok(Ok(()));
    }
    let width = units * UNIT;
    let widths = [width, (width - BLOCK_COLUMNS).max(BLOCK_COLUMNS)];
    let mut spec = spec(vec![0..heads, heads..2 * heads], widths, None);
    spec.out_column = 0;
    let (out, rows) = attended(backend, (spec, Scoring::default()), int8, (SHORT, [1, 1]))?;
    let Some(levels) = backend.levels[0].clone().filter(|_| backend.left.take().is_some()) else {
        return Ok(Err("no levels are left".to_owned()));
    };
    let blocks = out.stride() / BLOCK_COLUMNS;
    let words = |backend: &mut GpuBackend| {
        let (mut all, mut scales) = (Vec::new(), Vec::new());
        backend.device.read(&levels.levels, 0..rows * blocks * Input::Bytes.planes() * 4, &mut all)?;
        backend.device.read(&levels.scales, 0..rows * blocks * 4, &mut scales)?;
        all.append(&mut scales);
        Ok::<_, ComputeError>(all)
    };
    let found = words(backend)?;
    backend.quantized(&out, 0..rows, blocks, Input::Bytes, None)?;
    let expected = words(backend)?;
    Ok(match found.iter().zip(&expected).position(|(found, expected)| found != expected) {
        Some(at) => Err(format!("word {at} of levels is {:#010x}, not {:#010x}", found[at], expected[at])),
        None => Ok(()),
    })
}

/// Rows of prompts, more than a tile has. In the third case scores differ so much that few tokens
/// count, and later tokens keep having larger scores. In the fourth, scores have a cap, and a chunk
/// begins inside a tile. In the last two, tokens attend to some or all later ones.
pub(super) fn tiles<B: Backend>(
    backend: &mut B,
    widths: [usize; 2],
    int8: bool,
) -> Result<Vec<Vec<f32>>, ComputeError> {
    let [_, columns] = widths;
    let narrow = [columns, columns - UNIT];
    let (usual, scored) = (Scoring::default(), Scoring { cap: Some(0.3), chunk: Some(100), after: 0 });
    [
        (widths, None, 0.1, usual),
        (narrow, Some(50), 0.1, usual),
        ([columns; 2], None, 1.2, usual),
        (narrow, None, 0.1, scored),
        (widths, Some(50), 0.1, Scoring { after: 9, ..usual }),
        (narrow, None, 0.1, Scoring { after: usize::MAX, ..usual }),
    ]
    .map(|(widths, window, scale, scoring)| {
        let spec = AttentionSpec { scale, ..spec(vec![0..1, 1..3], widths, window) };
        results(backend, (spec, scoring), int8, (SHORT, [70, 5]))
    })
    .into_iter()
    .collect()
}

/// Prompts' rows that attend to compressed vectors, more than a tile has. In the second case scores
/// differ so much that few tokens count.
pub(super) fn latent_tiles<B: Backend>(
    backend: &mut B,
    columns: usize,
    int8: bool,
) -> Result<Vec<Vec<f32>>, ComputeError> {
    // Scores differ as much in each form.
    let large = (512.0 / columns as f32).sqrt();
    [([columns - UNIT, 8 * UNIT], 0.1), ([columns, 3 * UNIT], large)]
        .map(|(widths, scale)| latent_rows(backend, (widths, scale), int8))
        .into_iter()
        .collect()
}

/// Results of the second of two steps with rows of two sequences.
fn latent_rows<B: Backend>(
    backend: &mut B,
    ([rank, rotated], scale): ([usize; 2], f32),
    int8: bool,
) -> Result<Vec<f32>, ComputeError> {
    let norm = Norm { weight: Numbers(7).take(rank), eps: 1e-6 };
    let spec = LatentSpec { heads: 2, rank, rotated, plain: 20, scale, norm, rope: None };
    let spec = spec.try_map(&mut |values| backend.vector(&values))?;
    let blocks = (SHORT + 70).div_ceil(KV_BLOCK_TOKENS) as u32;
    // Blocks in no particular order.
    let mine: Vec<u32> = (0..blocks).map(|block| (block * 7 + 3) % blocks + 1).collect();
    let (format, caches) = (format(int8), vec![spec.cache()]);
    let mut caches = backend.caches(&CacheShape { format, caches, blocks: blocks as usize + 1, slots: 2 })?;
    let (mut numbers, mut step, mut found) = (Numbers(13), Step::default(), Vec::new());
    for (before, [first, second]) in [([0, 0], [SHORT, 5]), ([SHORT, 5], [70, 5])] {
        step.clear();
        step.push(&vec![1; first], before[0], &mine, 0, true);
        step.push(&vec![1; second], before[1], &[0], 1, true);
        let rows = 0..step.rows();
        let widths = [2 * rank, 2 * spec.query_dim(), rank + spec.rotated];
        let [mut absorbed, queries, latent] = widths.map(|width| numbers.take(rows.len() * width));
        // Models absorb queries that are scaled.
        absorbed.iter_mut().for_each(|x| *x *= scale);
        let absorbed = filled(backend, &absorbed, widths[0])?;
        let mut queries = filled(backend, &queries, widths[1])?;
        let mut latent = filled(backend, &latent, widths[2])?;
        let mut out = backend.buffer(rows.len(), widths[0])?;
        backend.begin(&step, &[])?;
        backend.prepare_latent(&spec, &step, rows.clone(), &mut queries, &mut latent)?;
        backend.append_latent(&spec, &step, rows.clone(), &latent, (&mut caches, 0))?;
        backend.attend_latent(&spec, &step, rows.clone(), &absorbed, &queries, (&mut caches, 0), &mut out)?;
        found = read(backend, &out, rows.len())?;
    }
    Ok(found)
}
