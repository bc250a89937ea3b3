//! Products: rows are brought into the form that a matrix is multiplied with, then all threads multiply.

pub(super) mod affine;
#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod bf16;
mod dequantized;
mod floats;
mod input;
pub(super) mod matmul;
pub(super) mod numerics;
pub(super) mod output;
pub(super) mod quantize;

use std::ops::Range;
use std::sync::Arc;

use super::buffer::Buffer;
use super::layout::bf16_rows::{FEW_TILES, HalfWriter, PANELS_TOGETHER, TILE_ROWS};
use super::layout::matrix::{Linear, Matrix};
use super::layout::region::grown;
use super::pointers::SendPtr;
use super::rows::{largest_on, swiglu_on};
use super::scratch::Scratch;
use super::simd::LANES;
use super::threads::pool::{Pieces, Pool};
use crate::backend::{Largest, LinearInput};
use input::{InputSpace, Inputs};
use matmul::{multiply_gated, multiply_on};
use numerics::Numerics;
use output::Output;

/// Without a step, so many rows are a prompt.
pub(super) const MANY_ROWS: usize = 9;

/// Results of gate and up that a thread makes before it makes them gated activations: what stays in its first-level cache with up to 32
/// rows. With more, it is the eight panels of each that prompts take together.
const RESULT_BYTES: usize = 32 << 10;

/// What products work in.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    inputs: InputSpace,
    /// What each thread found, `[threads][rows]`.
    largest: Vec<Largest>,
    /// Results of each thread that are made others of while they are in its cache.
    results: Vec<f32>,
    /// Which panels are taken.
    pieces: Pieces,
    /// One for each thread.
    pub scratch: Vec<Scratch>,
}

impl Workspace {
    pub fn new(threads: usize) -> Self {
        let scratch = (0..threads).map(|_| Scratch::default()).collect();
        Self { scratch, pieces: Pieces::new(threads), ..Self::default() }
    }
}

/// Rows times a matrix.
pub(super) struct Product<'a> {
    pub numerics: Numerics,
    pub pool: &'a mut Pool,
    pub space: &'a mut Workspace,
}

/// Where gated activations go.
#[derive(Debug, Clone, Copy)]
pub(super) enum GatedOutput<'a> {
    Floats(Output),
    Halves(HalfWriter<'a>),
}

impl Product<'_> {
    /// Whether gated activations are made in bf16 at once, as `next` takes them.
    pub fn gates_in_bf16(&self, gate_up: &Linear, next: &Linear) -> bool {
        let halves = |w| self.numerics.bf16_only(w);
        self.numerics.isa.has_matrix_unit() && halves(gate_up) && halves(next)
    }

    /// `out[r] = x[r] · Wᵀ + bias`, or adds that. Where it is asked for, each thread looks for the largest of its outputs while
    /// they are in its cache.
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
        let Workspace { inputs, scratch, largest: found, pieces, .. } = self.space;
        let inputs = Inputs::prepare(self.numerics, self.pool, inputs, x, rows, (w, cols));
        let scratch = SendPtr(scratch.as_mut_ptr());
        let wanted = largest.as_ref().map_or(0, |largest| largest.len());
        let found = grown(found, threads * wanted, Largest::NONE);
        found.fill(Largest::NONE);
        let each = SendPtr(found.as_mut_ptr());
        let panel_bytes = w.parts.iter().map(Matrix::panel_bytes).max().unwrap_or(0);
        pieces.reset(
            w.parts.iter().map(Matrix::panel_count).sum(),
            // Matrix units take panels in pairs.
            least_items(panel_bytes, count, PANELS_TOGETHER).next_multiple_of(2),
        );
        let pieces = &*pieces;
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            while let Some(piece) = pieces.next(thread) {
                for (part, panels, first_column) in within(w, piece) {
                    let columns = panels.start * LANES..part.rows.min(panels.end * LANES);
                    // SAFETY: input and output have the part's shape, each panel's columns are written by one thread, and a
                    // thread has places of its own for the largest of each row.
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

    /// `out[r] = silu(x[r] · Gᵀ + g) * (x[r] · Uᵀ + u)`, where the parts of `w` are gate and up, one as large as the other. What gate
    /// and up are never leaves a thread's cache.
    pub fn run_gated(
        self,
        x: &LinearInput<'_, Buffer, Arc<[f32]>>,
        rows: Range<usize>,
        w: &Linear,
        out: GatedOutput<'_>,
    ) {
        let [gate, up] = w.parts.as_slice() else {
            return assert!(w.parts.is_empty(), "gate and up, or no channels");
        };
        assert_eq!([gate.rows, gate.cols], [up.rows, up.cols], "gate and up have one shape");
        let (isa, count, threads) = (self.numerics.isa, rows.len(), self.pool.threads());
        let Workspace { inputs, scratch, results, pieces, .. } = self.space;
        let inputs = Inputs::prepare(self.numerics, self.pool, inputs, x, rows, (w, gate.cols));
        let scratch = SendPtr(scratch.as_mut_ptr());
        let least = least_items(gate.panel_bytes() + up.panel_bytes(), count, PANELS_TOGETHER / 2);
        // As many as may be, as weights are read best straight through.
        let together = (RESULT_BYTES / (count * 2 * LANES * size_of::<f32>())).max(PANELS_TOGETHER / 2);
        let width = together * LANES;
        let of_thread = match out {
            GatedOutput::Floats(_) => count * 2 * width,
            GatedOutput::Halves(_) => 0,
        };
        let results = SendPtr(grown(results, threads * of_thread, 0.0).as_mut_ptr());
        pieces.reset(gate.panel_count(), least);
        let pieces = &*pieces;
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let (scratch, results) = unsafe { (&mut *scratch.at(thread), results.at(thread * of_thread)) };
            while let Some(piece) = pieces.next(thread) {
                let out = match out {
                    GatedOutput::Floats(out) => out,
                    GatedOutput::Halves(out) => {
                        // SAFETY: both parts take halves; each panel's columns are written by one thread.
                        unsafe { multiply_gated([gate, up], piece, inputs.halves, out, scratch) };
                        continue;
                    }
                };
                for first in piece.clone().step_by(together) {
                    let panels = first..piece.end.min(first + together);
                    let columns = panels.start * LANES..gate.rows.min(panels.end * LANES);
                    for (part, place) in [(gate, 0), (up, width)] {
                        // Kernels count columns from the first panel on.
                        let data = results.wrapping_add(place).wrapping_sub(columns.start);
                        let out = Output { data, stride: 2 * width, rows: count, adds: false };
                        // SAFETY: the input has the part's shape, and the results have places for the panels.
                        unsafe { multiply_on(isa, part, panels.clone(), inputs.of(part), out, scratch) };
                    }
                    for row in 0..count {
                        // SAFETY: as above, and each panel's columns of the output are written by one thread.
                        unsafe {
                            let at = |place| {
                                let from = results.add(row * 2 * width + place);
                                std::slice::from_raw_parts(from, columns.len())
                            };
                            let to = out.data.add(row * out.stride + columns.start);
                            let to = std::slice::from_raw_parts_mut(to, columns.len());
                            swiglu_on(isa, at(0), at(width), to);
                        }
                    }
                }
            }
        });
    }
}

/// The parts that have some of the panels: which ones of theirs, and the part's first column.
fn within(w: &Linear, piece: Range<usize>) -> impl Iterator<Item = (&Matrix, Range<usize>, usize)> {
    let (mut first_panel, mut column) = (0, 0);
    w.parts.iter().filter_map(move |part| {
        let count = part.panel_count();
        let own = |panel: usize| panel.clamp(first_panel, first_panel + count) - first_panel;
        let (panels, first_column) = (own(piece.start)..own(piece.end), column);
        first_panel += count;
        column += part.rows;
        (!panels.is_empty()).then_some((part, panels, first_column))
    })
}

/// The least panels, or pairs of them, of so many bytes that a thread takes at a time; `many` with many rows.
fn least_items(bytes: usize, rows: usize, many: usize) -> usize {
    /// With few rows: what takes some microseconds to read, beside which a call is nothing.
    const FEW_ROWS_BYTES: usize = 32 << 10;
    if rows > FEW_TILES * TILE_ROWS {
        return many;
    }
    (FEW_ROWS_BYTES / bytes.max(1)).max(1)
}
