//! The selection of tokens and attention to them, against the plain reference.

use std::ops::Range;

use thunder_collectives::Group;
use thunder_compute::{Backend, ComputeError, Reference, SelectionSpec};

use super::families::{cache_shape, compared_rows, filled, format, last_rows, read, steps};
use super::latent::LatentShape;
use super::{Numbers, compare};
use crate::backend::GpuBackend;

/// The number of different keys. Later tokens have the same keys again, so some scores are equal.
const KEYS: usize = 170;

/// Keys of 64 columns that bytes hold exactly, because the largest number of each half is 127
/// units. A rounded key could change a selection.
pub(super) fn exact_keys(tokens: Range<usize>) -> Vec<f32> {
    let mut keys: Vec<f32> = Numbers(22).take(KEYS * 64).iter().map(|x| (x * 127.0).trunc() / 64.0).collect();
    keys.chunks_mut(32).for_each(|half| half[7] = 127.0 / 64.0);
    tokens.flat_map(|token| keys[token % KEYS * 64..][..64].to_vec()).collect()
}

/// Compares selections exactly, and results of attention within the cost of the cache's format.
pub(super) fn check(
    backend: &mut GpuBackend,
    shape: LatentShape,
    int8: bool,
) -> Result<Result<(), String>, ComputeError> {
    let found = run(backend, shape, int8)?;
    let expected = run(&mut Reference::new(Group::solo()), shape, int8)?;
    for ([selected, attended], [selected_by_cpu, attended_by_cpu]) in found.iter().zip(&expected) {
        let differs = selected.iter().zip(selected_by_cpu).position(|(found, expected)| found != expected);
        if let Some(at) = differs {
            let (found, expected) = (selected[at], selected_by_cpu[at]);
            return Ok(Err(format!("number {at} of a selection is {found}, not {expected}")));
        }
        let limit = if int8 { 3e-2 } else { 3e-3 };
        if let Err(reason) = compare(attended, attended_by_cpu, limit) {
            return Ok(Err(reason));
        }
    }
    Ok(Ok(()))
}

/// Selections and results of attention of each step.
pub(super) fn run<B: Backend>(
    backend: &mut B,
    of_latent: LatentShape,
    int8: bool,
) -> Result<Vec<[Vec<f32>; 2]>, ComputeError> {
    let mut numbers = Numbers(18);
    let spec = of_latent.spec(backend, (&mut numbers, None))?;
    let widths = of_latent.widths();
    let selection = SelectionSpec { heads: 5, dim: 64, chosen: 100, every: 1 };
    let mut shape = cache_shape(format(int8), spec.cache());
    shape.caches.push(selection.cache());
    let mut caches = backend.caches(&shape)?;
    let (mut results, mut first) = (Vec::new(), 0);
    for step in steps() {
        let count = step.rows();
        let of_step = exact_keys(first..first + count);
        first += count;
        let mut random = |width: usize| (numbers.take(count * width), width);
        let inputs = [
            random(widths[0]),
            random(widths[1]),
            random(widths[2]),
            random(5 * 64),
            random(5),
            (of_step, 64),
        ];
        let mut buffers = Vec::new();
        for (values, width) in &inputs {
            buffers.push(filled(backend, values, *width)?);
        }
        let Ok([absorbed, mut queries, mut latent, heads, weights, keys]) =
            <[B::Buffer; 6]>::try_from(buffers)
        else {
            unreachable!("there is a buffer for each width")
        };
        let mut selected = backend.buffer(count, selection.columns())?;
        let mut out = backend.buffer(count, widths[0])?;
        let rows = 0..count;
        backend.begin(&step, &[])?;
        backend.prepare_latent(&spec, &step, rows.clone(), &mut queries, &mut latent)?;
        backend.append_latent(&spec, &step, rows.clone(), &latent, (&mut caches, 0))?;
        backend.append_latent(&spec, &step, rows.clone(), &keys, (&mut caches, 1))?;
        let from = (&mut caches, 1);
        backend.select(&selection, &step, rows.clone(), (&heads, &weights), from, &mut selected)?;
        let inputs = [&absorbed, &queries, &selected];
        let rows = compared_rows(&step);
        backend.attend_selected(&spec, &step, rows, inputs, (&mut caches, 0), &mut out)?;
        // Columns that no token fills have arbitrary content.
        let all = read(backend, &selected, count)?;
        let of_row = |row: &[f32]| row[..=(row[0] as usize).min(selection.chosen)].to_vec();
        let selected = all.chunks(selection.columns()).flat_map(of_row).collect();
        results.push([selected, last_rows(backend, &out, &step)?]);
    }
    Ok(results)
}
