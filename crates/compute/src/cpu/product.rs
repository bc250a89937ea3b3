//! Products: prepares activation rows for a matrix, then multiplies on all threads.

pub(super) mod affine;
#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod bf16;
mod dequantized;
pub(super) mod experts;
mod floats;
mod heads;
pub(super) mod input;
pub(super) mod matmul;
pub(super) mod numerics;
pub(super) mod output;
pub(super) mod quantize;
mod shared_blocks;

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use super::buffer::Buffer;
use super::isa::Isa;
use super::layout::bf16_rows::{Bf16Writer, FEW_TILES, PANELS_TOGETHER, TILE_ROWS};
use super::layout::matrix::{Linear, Matrix};
use super::layout::region::grown;
use super::pointers::SendPtr;
use super::rows::{gate_on, largest_on};
use super::scratch::Scratch;
use super::simd::LANES;
use super::threads::pool::{Pool, WorkQueue};
use crate::backend::{Activation, Largest, LinearInput};
use experts::ExpertSpace;
use heads::HeadSpace;
use input::{InputSpace, Inputs};
use matmul::{multiply_gated, multiply_on};
use numerics::Numerics;
use output::Output;

/// Without a step, at least this many rows count as a prompt.
pub(super) const MANY_ROWS: usize = 9;

/// Results of gate and up that a thread computes before it gates them. With up to 32 rows they stay
/// in its first-level cache; with more rows, a thread claims eight panels of each.
const RESULT_BYTES: usize = 32 << 10;

/// Memory that products reuse.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    inputs: InputSpace,
    /// The largest output of each row that each thread found, `[threads][rows]`.
    largest: Vec<Largest>,
    /// Results of gate and up, per thread.
    results: Vec<f32>,
    /// Hands out panels to threads.
    queue: WorkQueue,
    experts: ExpertSpace,
    heads: HeadSpace,
    /// One entry per thread.
    pub scratch: Vec<Scratch>,
}

impl Workspace {
    pub fn new(threads: usize) -> Self {
        let scratch = (0..threads).map(|_| Scratch::default()).collect();
        Self { scratch, queue: WorkQueue::new(threads), ..Self::default() }
    }
}

/// One product of rows with a matrix.
pub(super) struct Product<'a> {
    pub numerics: Numerics,
    pub pool: &'a mut Pool,
    pub space: &'a mut Workspace,
}

/// Where gated activations go.
#[derive(Debug, Clone, Copy)]
pub(super) enum GatedOutput<'a> {
    F32(Output),
    Bf16(Bf16Writer<'a>),
}

impl Product<'_> {
    /// True if gated activations are stored in bf16, the format that `next` needs.
    pub fn gates_in_bf16(&self, gate_up: &Linear, activation: Activation, next: &Linear) -> bool {
        let Self { numerics, .. } = self;
        activation == Activation::Silu
            && numerics.isa.has_matrix_unit()
            && numerics.bf16_only(gate_up)
            && numerics.bf16_only(next)
    }

    /// `out[r] = x[r] · Wᵀ + bias`, or adds that to `out`. With `largest`, each thread also
    /// searches its outputs for the largest of each row while they are in its cache.
    pub fn run(
        self,
        x: &LinearInput<'_, Buffer, Arc<[f32]>>,
        rows: Range<usize>,
        w: &Linear,
        out: Output,
        largest: Option<&mut [Largest]>,
    ) {
        let Some(cols) = w.parts.first().map(|part| part.cols) else { return };
        let (isa, count, threads) = (self.numerics.isa, rows.len(), self.pool.threads());
        let Workspace { inputs, scratch, largest: found, queue, .. } = self.space;
        let inputs = Inputs::prepare(self.numerics, self.pool, inputs, x, rows, (w, cols));
        let scratch = SendPtr(scratch.as_mut_ptr());
        let wanted = largest.as_ref().map_or(0, |largest| largest.len());
        let found = grown(found, threads * wanted, Largest::NONE);
        found.fill(Largest::NONE);
        let each = SendPtr(found.as_mut_ptr());
        let panel_bytes = w.parts.iter().map(Matrix::panel_bytes).max().unwrap_or(0);
        queue.reset(
            w.parts.iter().map(Matrix::panel_count).sum(),
            // Matrix units process panels in pairs.
            claims(min_claim(panel_bytes, count, PANELS_TOGETHER).next_multiple_of(2), count),
        );
        let queue = &*queue;
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            while let Some(claimed) = queue.next(thread) {
                for (part, panels, first_column) in within(w, claimed) {
                    let columns = panels.start * LANES..part.rows.min(panels.end * LANES);
                    // SAFETY: input and output have the part's shape; each panel's columns are
                    // written by one thread; each thread has its own entry of `found` for each row.
                    unsafe {
                        let out = out.starting_at(first_column);
                        multiply_on(isa, part, panels, inputs.of(part), out, scratch);
                        for row in 0..wanted {
                            let outputs = std::slice::from_raw_parts(
                                out.data.add(row * out.stride + columns.start),
                                columns.len(),
                            );
                            let first = (first_column + columns.start) as u32;
                            largest_on(isa, outputs, first, &mut *each.at(thread * wanted + row));
                        }
                    }
                }
            }
        });
        for (row, largest) in largest.into_iter().flatten().enumerate() {
            *largest =
                found.iter().skip(row).step_by(wanted).fold(Largest::NONE, |best, found| best.or(*found));
        }
    }

    /// `out[r] = activation(x[r] · Gᵀ + g, x[r] · Uᵀ + u)`. The parts of `w` are gate and up, of
    /// one shape. The results of gate and up stay in each thread's cache.
    pub fn run_gated(
        self,
        x: &LinearInput<'_, Buffer, Arc<[f32]>>,
        rows: Range<usize>,
        (w, activation): (&Linear, Activation),
        out: GatedOutput<'_>,
    ) {
        let Some([gate, up]) = gate_and_up(w) else { return };
        let (isa, count, threads) = (self.numerics.isa, rows.len(), self.pool.threads());
        let Workspace { inputs, scratch, results, queue, .. } = self.space;
        let inputs = Inputs::prepare(self.numerics, self.pool, inputs, x, rows, (w, gate.cols));
        let scratch = SendPtr(scratch.as_mut_ptr());
        let least = min_claim(gate.panel_bytes() + up.panel_bytes(), count, PANELS_TOGETHER / 2);
        let together = panels_together(count);
        let width = together * LANES;
        let of_thread = match out {
            GatedOutput::F32(_) => count * 2 * width,
            GatedOutput::Bf16(_) => 0,
        };
        let results = SendPtr(grown(results, threads * of_thread, 0.0).as_mut_ptr());
        queue.reset(gate.panel_count(), claims(least, count));
        let queue = &*queue;
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let (scratch, results) = unsafe { (&mut *scratch.at(thread), results.at(thread * of_thread)) };
            while let Some(claimed) = queue.next(thread) {
                let out = match out {
                    GatedOutput::F32(out) => out,
                    GatedOutput::Bf16(out) => {
                        // SAFETY: both parts take bf16; each panel's columns are written by one
                        // thread.
                        unsafe { multiply_gated([gate, up], claimed, inputs.bf16, out, scratch) };
                        continue;
                    }
                };
                for first in claimed.clone().step_by(together) {
                    let panels = first..claimed.end.min(first + together);
                    let results = GateResults { data: results, width, rows: count };
                    // SAFETY: the input has the parts' shape, the results have room for the panels,
                    // and each panel's columns of the output are written by one thread.
                    unsafe {
                        let gates = ([gate, up], Some(activation));
                        results.gate(isa, gates, panels, &inputs, out, scratch);
                    }
                }
            }
        });
    }
}

/// Memory of one thread for results of gate and up: `[rows][gate, up][width]`.
struct GateResults {
    data: *mut f32,
    width: usize,
    rows: usize,
}

impl GateResults {
    /// Multiplies the rows with panels of gate and of up, and stores their gated activations in
    /// `out`. Without an activation, gate and up are the same, and `max(up, 0)²` is stored.
    ///
    /// # Safety
    /// `isa` was detected; the input has the matrices' shape; `data` holds the panels' columns of
    /// gate and up for all rows; `out` holds them for gate; no other thread writes either.
    unsafe fn gate(
        self,
        isa: Isa,
        ([gate, up], activation): ([&Matrix; 2], Option<Activation>),
        panels: Range<usize>,
        inputs: &Inputs<'_>,
        out: Output,
        scratch: &mut Scratch,
    ) {
        let Self { data: results, width, rows } = self;
        let columns = panels.start * LANES..gate.rows.min(panels.end * LANES);
        let parts = [(gate, 0), (up, width)];
        for (part, place) in &parts[..if activation.is_some() { 2 } else { 1 }] {
            // Kernels count columns from the matrix's first panel on.
            let data = results.wrapping_add(*place).wrapping_sub(columns.start);
            let out = Output { data, stride: 2 * width, rows, adds: false };
            // SAFETY: the caller's.
            unsafe { multiply_on(isa, part, panels.clone(), inputs.of(part), out, scratch) };
        }
        for row in 0..rows {
            // SAFETY: the caller's.
            unsafe {
                let at = |place| {
                    let from = results.add(row * 2 * width + place);
                    std::slice::from_raw_parts(from, columns.len())
                };
                let to = out.data.add(row * out.stride + columns.start);
                let to = std::slice::from_raw_parts_mut(to, columns.len());
                match activation {
                    Some(activation) => gate_on(isa, activation, at(0), at(width), to),
                    None => to.iter_mut().zip(at(0)).for_each(|(to, x)| *to = x.max(0.0).powi(2)),
                }
            }
        }
    }
}

/// Gate and up; `None` if there are no channels.
fn gate_and_up(w: &Linear) -> Option<[&Matrix; 2]> {
    let [gate, up] = w.parts.as_slice() else {
        assert!(w.parts.is_empty(), "gate and up, or no channels");
        return None;
    };
    assert_eq!([gate.rows, gate.cols], [up.rows, up.cols], "gate and up have one shape");
    Some([gate, up])
}

/// Number of panels of gate and of up whose results for `rows` rows fit in a thread's cache. The
/// maximum is used, because long contiguous reads of the weights are the fastest.
fn panels_together(rows: usize) -> usize {
    (RESULT_BYTES / (rows * 2 * LANES * size_of::<f32>())).max(PANELS_TOGETHER / 2)
}

/// The parts that own some of the claimed panels: each part, its own panels, and its first output
/// column.
fn within(w: &Linear, claimed: Range<usize>) -> impl Iterator<Item = (&Matrix, Range<usize>, usize)> {
    let (mut first_panel, mut column) = (0, 0);
    w.parts.iter().filter_map(move |part| {
        let count = part.panel_count();
        let own = |panel: usize| panel.clamp(first_panel, first_panel + count) - first_panel;
        let (panels, first_column) = (own(claimed.start)..own(claimed.end), column);
        first_panel += count;
        column += part.rows;
        (!panels.is_empty()).then_some((part, panels, first_column))
    })
}

/// Minimum items a thread claims at once; `bytes` is one item's size. Returns `many` for large
/// batches.
fn min_claim(bytes: usize, rows: usize, many: usize) -> usize {
    /// For few rows: reading this takes some microseconds, so the cost of a call is negligible.
    const FEW_ROWS_BYTES: usize = 32 << 10;
    if rows > FEW_TILES * TILE_ROWS {
        return many;
    }
    (FEW_ROWS_BYTES / bytes.max(1)).max(1)
}

/// How many panels of a dense matrix a thread claims at once, if `least` are enough to share the
/// rows in the cache.
fn claims(least: usize, rows: usize) -> RangeInclusive<usize> {
    if rows > FEW_TILES * TILE_ROWS {
        // Fewer at the end: otherwise all threads wait for one whose core has other work too.
        return least / 4..=least;
    }
    least..=usize::MAX
}
