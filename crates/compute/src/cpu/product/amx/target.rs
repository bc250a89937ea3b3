//! Pairs of panels that are multiplied together, and where their sums go.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tiles::TileSums;
use super::unpack::{self, Panel};
use crate::cpu::layout::bf16_rows::{Bf16Writer, TILE_ROWS};
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::product::output::{Output, finish};
use crate::cpu::rows::{Gate, Silu};
use crate::cpu::simd::{LANES, avx512::Avx512};

/// Pairs of panels and the destination of their results.
pub(super) trait Target {
    /// Number of pairs.
    fn pairs(&self) -> usize;
    /// The panels of a pair; `None` after the last panel.
    fn pair(&self, index: usize) -> [Option<Panel<'_>>; 2];
    /// Converts a pair's sums to results and stores them. `rows.start` is the first row of `sums`.
    ///
    /// # Safety
    /// The CPU has AMX; the destination holds the rows.
    unsafe fn store(&self, pair: usize, rows: Range<usize>, sums: &TileSums);
}

/// Pairs of consecutive panels of one matrix.
pub(super) struct AdjacentPanels<'a> {
    pub w: &'a Matrix,
    pub panels: Range<usize>,
    pub out: Output,
}

impl Target for AdjacentPanels<'_> {
    #[inline(always)]
    fn pairs(&self) -> usize {
        self.panels.len().div_ceil(2)
    }

    #[inline(always)]
    fn pair(&self, index: usize) -> [Option<Panel<'_>>; 2] {
        let first = self.panels.start + 2 * index;
        [first, first + 1].map(|panel| (panel < self.panels.end).then_some((self.w, panel)))
    }

    /// Stores past the caches: with many rows, the output is larger than the caches, and normal
    /// stores would read each line first.
    #[inline(always)]
    unsafe fn store(&self, pair: usize, rows: Range<usize>, sums: &TileSums) {
        let Self { w, out, .. } = *self;
        for (side, (_, panel)) in self.pair(pair).into_iter().flatten().enumerate() {
            let units = units((w, panel));
            let to = out.data.wrapping_add(panel * LANES);
            let aligned = to.cast::<__m512>().is_aligned() && out.stride.is_multiple_of(LANES);
            let streams = aligned && w.bias.is_empty() && !out.adds && (panel + 1) * LANES <= w.rows;
            for (index, row) in rows.clone().enumerate() {
                let results = _mm512_mul_ps(sum(sums, index, side), units);
                if streams {
                    _mm512_stream_ps(to.wrapping_add(row * out.stride), results);
                } else {
                    finish::<Avx512>(w, panel, row, results, out);
                }
            }
        }
    }
}

/// Pairs of gate and up panels, stored as gated activations in bf16.
pub(super) struct GatedPanels<'a> {
    pub gate_up: [&'a Matrix; 2],
    pub panels: Range<usize>,
    pub out: Bf16Writer<'a>,
}

impl Target for GatedPanels<'_> {
    #[inline(always)]
    fn pairs(&self) -> usize {
        self.panels.len()
    }

    #[inline(always)]
    fn pair(&self, index: usize) -> [Option<Panel<'_>>; 2] {
        let panel = self.panels.start + index;
        self.gate_up.map(|w| (panel < self.panels.end).then_some((w, panel)))
    }

    #[inline(always)]
    unsafe fn store(&self, pair: usize, rows: Range<usize>, sums: &TileSums) {
        let panel = self.panels.start + pair;
        let [gate, up] = self.gate_up;
        let gate = (units((gate, panel)), bias((gate, panel)));
        let up = (units((up, panel)), bias((up, panel)));
        for (index, row) in rows.enumerate() {
            let gate = _mm512_fmadd_ps(sum(sums, index, 0), gate.0, gate.1);
            let up = _mm512_fmadd_ps(sum(sums, index, 1), up.0, up.1);
            // Divided exactly, as where gates and ups are summed separately (rows with adapters),
            // to get the same bits.
            self.out.store(row, panel, Silu.of::<Avx512>(gate, up));
        }
    }
}

/// The sums of a row and one panel of the pair.
#[inline(always)]
unsafe fn sum(sums: &TileSums, row: usize, side: usize) -> __m512 {
    _mm512_load_ps(sums[row / TILE_ROWS][side][row % TILE_ROWS].as_ptr())
}

/// The units of a panel's sums.
#[inline(always)]
unsafe fn units((w, panel): Panel<'_>) -> __m512 {
    let unit = _mm512_set1_ps(unpack::unit(w.format));
    if w.units.is_empty() {
        return unit;
    }
    _mm512_mul_ps(unit, _mm512_loadu_ps(w.units.as_ptr().add(panel * LANES)))
}

/// The bias of a panel's results.
#[inline(always)]
unsafe fn bias((w, panel): Panel<'_>) -> __m512 {
    if w.bias.is_empty() {
        return _mm512_setzero_ps();
    }
    let first = panel * LANES;
    let present = (1u32 << LANES.min(w.rows - first)) - 1;
    _mm512_maskz_loadu_ps(present as u16, w.bias.as_ptr().add(first))
}
