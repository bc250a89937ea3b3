//! Compressed tokens, attention to them, and choices among blocks of keys.

use thunder_collectives::Group;
use thunder_compute::{
    Backend, CompressedSpec, CompressionSpec, ComputeError, LatentSpec, Norm, Reference, Rope,
    SelectionBlocks, SelectionSpec, Step,
};

use super::families::{cache_shape, compared_rows, filled, format, last_rows, read, steps};
use super::select::exact_keys;
use super::{Numbers, compare};
use crate::backend::GpuBackend;

/// What appends vectors of a cache. Only its widths matter.
fn appends<B: Backend>(
    backend: &mut B,
    [rank, rotated]: [usize; 2],
) -> Result<LatentSpec<B::Vector>, ComputeError> {
    let norm = Norm { weight: backend.vector(&vec![1.0; rank])?, eps: 1e-6 };
    Ok(LatentSpec { heads: 0, rank, rotated, plain: 0, scale: 1.0, norm, rope: None })
}

/// Every second compressed token that each row may attend to.
fn every_second(step: &Step, every: usize, columns: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for sequence in &step.sequences {
        for row in sequence.rows.clone() {
            let count = (sequence.position(row) + 1) / every / 2;
            let first = all.len();
            all.push(count as f32);
            all.extend((0..count).map(|entry| (2 * entry + 1) as f32));
            all.resize(first + columns, 0.0);
        }
    }
    all
}

/// Results of attention to all compressed tokens, and to every second one.
pub(super) fn run<B: Backend>(
    backend: &mut B,
    heads: usize,
    dim: usize,
    int8: bool,
) -> Result<Vec<Vec<f32>>, ComputeError> {
    let mut results = Vec::new();
    for (every, overlaps) in [(4, true), (64, false)] {
        let (mut numbers, rotated) = (Numbers(20), 8);
        let spec = CompressedSpec {
            heads,
            dim,
            rotated,
            window: 21,
            every: Some(every),
            sinks: backend.vector(&numbers.take(heads))?,
        };
        let width = if overlaps { 2 * dim } else { dim };
        let norm = match overlaps {
            true => Some(Norm { weight: backend.vector(&numbers.take(dim))?, eps: 1e-6 }),
            false => None,
        };
        let compression = CompressionSpec {
            dim,
            every,
            overlaps,
            place_bias: backend.vector(&numbers.take(every * width))?,
            norm,
            rope: Rope {
                inverse_frequencies: vec![1.0, 0.3, 0.1, 0.02],
                amplitude: 1.1,
                interleaved: overlaps,
            },
        };
        let single = appends(backend, [dim - rotated, rotated])?;
        let mut shape = cache_shape(format(int8), spec.cache());
        shape.caches.extend([compression.cache(), compression.state()]);
        let mut caches = backend.caches(&shape)?;
        for step in steps() {
            let count = step.rows();
            let mut inputs = Vec::new();
            for width in [heads * dim, dim, width, width] {
                inputs.push(filled(backend, &numbers.take(count * width), width)?);
            }
            let columns = 1 + 80;
            let selection = filled(backend, &every_second(&step, every, columns), columns)?;
            let rows = 0..count;
            backend.begin(&step, &[])?;
            backend.append_latent(&single, &step, rows.clone(), &inputs[1], (&mut caches, 0))?;
            let (values, gates) = (&inputs[2], &inputs[3]);
            backend.compress(&compression, &step, rows.clone(), (values, gates), (&mut caches, [2, 1]))?;
            for selection in [None, Some(&selection)] {
                let mut out = backend.buffer(count, heads * dim)?;
                let from = (&mut caches, [0, 1]);
                let inputs = (&inputs[0], selection);
                let rows = compared_rows(&step);
                backend.attend_compressed(&spec, &step, rows, inputs, from, &mut out)?;
                results.push(last_rows(backend, &out, &step)?);
            }
        }
    }
    Ok(results)
}

/// Compares means closely, and choices exactly.
pub(super) fn check_pools(backend: &mut GpuBackend, int8: bool) -> Result<Result<(), String>, ComputeError> {
    let found = pools(backend, int8)?;
    let expected = pools(&mut Reference::new(Group::solo()), int8)?;
    for ([means, chosen], [means_by_cpu, chosen_by_cpu]) in found.iter().zip(&expected) {
        if let Err(reason) = compare(means, means_by_cpu, 1e-4) {
            return Ok(Err(reason));
        }
        if chosen != chosen_by_cpu {
            return Ok(Err("keys of other blocks are chosen".to_owned()));
        }
    }
    Ok(Ok(()))
}

/// Means, and choices of blocks and within them, of each step.
fn pools<B: Backend>(backend: &mut B, int8: bool) -> Result<Vec<[Vec<f32>; 2]>, ComputeError> {
    let (mut numbers, every, dim) = (Numbers(21), 2, 64);
    let compression = CompressionSpec {
        dim,
        every,
        overlaps: false,
        place_bias: backend.vector(&numbers.take(every * dim))?,
        norm: None,
        rope: Rope { inverse_frequencies: Vec::new(), amplitude: 1.0, interleaved: true },
    };
    let spec = SelectionSpec { heads: 5, dim, chosen: 20, every };
    let blocks = SelectionBlocks { keys: 4, chosen: 8 };
    let append = appends(backend, [dim / 2; 2])?;
    let mut shape = cache_shape(format(int8), spec.cache());
    shape.caches.push(compression.state());
    let mut caches = backend.caches(&shape)?;
    let (mut results, mut first) = (Vec::new(), 0);
    for step in steps() {
        let count = step.rows();
        let keys = exact_keys(first..first + count);
        first += count;
        let mut inputs = vec![filled(backend, &keys, dim)?];
        for width in [dim, dim, spec.heads * dim, spec.heads] {
            inputs.push(filled(backend, &numbers.take(count * width), width)?);
        }
        let mut means = backend.buffer(count, dim)?;
        let mut chosen = backend.buffer(count, blocks.columns())?;
        let mut within = backend.buffer(count, spec.columns())?;
        let rows = 0..count;
        backend.begin(&step, &[])?;
        let (values, gates) = (&inputs[1], &inputs[2]);
        backend.pool(&compression, &step, rows.clone(), (values, gates), (&mut caches, 1), &mut means)?;
        backend.append_latent(&append, &step, rows.clone(), &inputs[0], (&mut caches, 0))?;
        let (queries, weights) = (&inputs[3], &inputs[4]);
        let from = (&mut caches, 0);
        backend.select_blocks(&spec, blocks, &step, rows.clone(), (queries, weights), from, &mut chosen)?;
        let inputs = [queries, weights, &chosen];
        backend.select_within(&spec, blocks, &step, rows, inputs, (&mut caches, 0), &mut within)?;
        let mut all = Vec::new();
        for (buffer, width) in [(&chosen, blocks.columns()), (&within, spec.columns())] {
            // Columns that nothing fills have arbitrary content.
            let of_row = |row: &[f32]| row[..=(row[0] as usize).min(width - 1)].to_vec();
            all.extend(read(backend, buffer, count)?.chunks(width).flat_map(of_row));
        }
        results.push([read(backend, &means, count)?, all]);
    }
    Ok(results)
}
