//! Activations in bf16, in the layout that matrix units multiply.

use half::bf16;

use crate::cpu::layout::region::{Array, Zero};
use crate::cpu::pointers::SendPtr;

/// Rows of a bf16 tile.
pub(in crate::cpu) const TILE_ROWS: usize = 16;
/// Columns of a bf16 tile.
pub(in crate::cpu) const TILE_COLUMNS: usize = 32;
/// Column tiles of a chunk.
pub(in crate::cpu) const CHUNK_DEPTH: usize = 16;
/// Panels that a chunk of rows is multiplied with, one after another.
pub(in crate::cpu) const PANELS_TOGETHER: usize = 16;
/// Up to this many row tiles, a product waits for its weights, so each panel is read from first to
/// last byte.
pub(in crate::cpu) const FEW_TILES: usize = 2;

/// The columns of a row in one tile. Aligned: tiles whose rows straddle cache lines load at a
/// quarter of the speed.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Line([bf16; TILE_COLUMNS]);

// SAFETY: bf16 is a number for all bits.
unsafe impl Zero for Line {}

/// Rows in bf16: `[chunk of 16 column tiles][row tile][column tile][row of the tile]`.
///
/// So the activations for one chunk of weights are contiguous; with strides of whole pages they
/// would compete for the same sets of the second-level cache. Each four columns are in the order 0,
/// 2, 1, 3, in which weights are unpacked. The last column tile is padded with zeros; rows that the
/// last row tile lacks hold arbitrary numbers.
#[derive(Debug, Default)]
pub(in crate::cpu) struct Bf16Rows {
    lines: Array<Line>,
    pub rows: usize,
    cols: usize,
}

impl Bf16Rows {
    /// Sets the shape. Allocates only if more memory is needed than for any shape before.
    pub fn shape(&mut self, rows: usize, cols: usize) {
        (self.rows, self.cols) = (rows, cols);
        // One more tile: kernels load it ahead and do not use it.
        let lines = rows.next_multiple_of(TILE_ROWS) * self.depth() + TILE_ROWS;
        if self.lines.len() < lines {
            self.lines = Array::zeroed(lines);
        }
    }

    /// Number of column tiles. The last one may be partly empty.
    pub fn depth(&self) -> usize {
        self.cols.div_ceil(TILE_COLUMNS)
    }

    /// The first byte of a tile. The column tiles of a chunk follow each other.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
    pub fn tile(&self, row_tile: usize, column_tile: usize) -> *const u8 {
        self.lines.as_ptr().wrapping_add(self.line(row_tile * TILE_ROWS, column_tile)).cast()
    }

    /// The index of a row's line in a column tile.
    fn line(&self, row: usize, column_tile: usize) -> usize {
        let tiles = self.rows.div_ceil(TILE_ROWS);
        let chunk = column_tile / CHUNK_DEPTH;
        // The last chunk may be shorter.
        let of_chunk = CHUNK_DEPTH.min(self.depth() - chunk * CHUNK_DEPTH);
        let tile = chunk * CHUNK_DEPTH * tiles + row / TILE_ROWS * of_chunk + column_tile % CHUNK_DEPTH;
        tile * TILE_ROWS + row % TILE_ROWS
    }

    /// A handle that threads share; each writes its own rows.
    pub fn writer(&mut self) -> Bf16Writer<'_> {
        Bf16Writer { lines: SendPtr(self.lines.as_mut_ptr()), to: self }
    }
}

/// Writes rows of a [`Bf16Rows`].
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Bf16Writer<'a> {
    lines: SendPtr<Line>,
    to: &'a Bf16Rows,
}

#[cfg(target_arch = "x86_64")]
impl Bf16Writer<'_> {
    /// Rounds 16 columns of a row, those of one panel, as [`Bf16Writer::round`] does.
    ///
    /// # Safety
    /// The rows have this row and panel; no other thread writes them; the CPU has AVX-512 with
    /// bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512bf16")]
    pub unsafe fn store(self, row: usize, panel: usize, columns: std::arch::x86_64::__m512) {
        use std::arch::x86_64::*;

        use crate::cpu::simd::LANES;
        const PANELS: usize = TILE_COLUMNS / LANES;
        const { assert!(PANELS == 2) };
        // SAFETY: within the row, as the caller promises; a line is two panels.
        unsafe {
            let line = self.lines.at(self.to.line(row, panel / PANELS)).cast::<__m256i>();
            // Each four columns in the order 0, 2, 1, 3.
            let ordered = _mm512_permute_ps::<0b11_01_10_00>(columns);
            let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(ordered));
            _mm256_store_si256(line.add(panel % PANELS), rounded);
            // The last column tile may lack its second panel.
            if panel.is_multiple_of(PANELS) && (panel + 1) * LANES >= self.to.cols {
                _mm256_store_si256(line.add(1), _mm256_setzero_si256());
            }
        }
    }

    /// Rounds one row to the nearest bf16, ties to even. Subnormal numbers become zero.
    ///
    /// # Safety
    /// `x` holds the columns; no other thread writes this row; the CPU has AVX-512 with bf16.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn round(self, row: usize, x: *const f32) {
        use std::arch::x86_64::*;
        // Each four columns in the order 0, 2, 1, 3.
        const ORDER: [u16; TILE_COLUMNS] = {
            let mut order = [0; TILE_COLUMNS];
            let mut i = 0;
            while i < TILE_COLUMNS {
                order[i] = (i / 4 * 4 + [0, 2, 1, 3][i % 4]) as u16;
                i += 1;
            }
            order
        };
        // SAFETY: within the row, as the caller promises; a line is a vector.
        unsafe {
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            for tile in 0..self.to.depth() {
                let first = tile * TILE_COLUMNS;
                let present =
                    |from: usize| !(u32::MAX.unbounded_shl(self.to.cols.saturating_sub(from) as u32));
                let low = _mm512_maskz_loadu_ps(present(first) as u16, x.wrapping_add(first));
                let high = _mm512_maskz_loadu_ps(
                    (present(first) >> 16) as u16,
                    x.wrapping_add(first + TILE_COLUMNS / 2),
                );
                let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                let line = self.lines.at(self.to.line(row, tile));
                _mm512_store_si512(line.cast(), _mm512_permutexvar_epi16(order, rounded));
            }
        }
    }
}

/// Rounds a row to bf16.
///
/// # Safety
/// The CPU has instructions for bf16, `x` holds a row's columns, and no other thread writes that
/// row.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no matrix unit is used there"))]
pub(in crate::cpu) unsafe fn round_row(x: *const f32, row: usize, to: Bf16Writer<'_>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's conditions.
    unsafe {
        to.round(row, x);
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("no product takes bf16");
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn rounding_matches_the_half_crate() {
        if !is_x86_feature_detected!("avx512bf16") {
            return;
        }
        // All exponents and both signs; fractions below, at and above the middle of two bf16; the
        // row ends inside a tile.
        let mut numbers = Vec::new();
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                numbers.push(f32::from_bits(u32::from(high) << 16 | low));
            }
        }
        numbers.truncate(numbers.len() - 5);
        let mut rows = Bf16Rows::default();
        rows.shape(1, numbers.len());
        // SAFETY: the row's numbers, and the CPU has the instructions.
        unsafe { rows.writer().round(0, numbers.as_ptr()) };
        for (tile, numbers) in numbers.chunks(TILE_COLUMNS).enumerate() {
            let line = rows.lines[rows.line(0, tile)].0;
            for i in 0..TILE_COLUMNS {
                let x = numbers.get(i).copied().unwrap_or(0.0);
                let (ours, theirs) = (line[i / 4 * 4 + [0, 2, 1, 3][i % 4]], bf16::from_f32(x));
                let flushed = if x.is_subnormal() { bf16::ZERO.copysign(theirs) } else { theirs };
                assert!(ours.to_bits() == flushed.to_bits(), "{x:e} is {flushed}, not {ours}");
            }
        }
    }

    #[test]
    fn storing_by_panels_equals_storing_whole_rows() {
        use std::arch::x86_64::_mm512_loadu_ps;

        use crate::cpu::simd::LANES;
        if !is_x86_feature_detected!("avx512bf16") {
            return;
        }
        #[target_feature(enable = "avx512f,avx512vl,avx512bf16")]
        unsafe fn store(to: Bf16Writer<'_>, row: usize, panel: usize, columns: &[f32; LANES]) {
            // SAFETY: the caller's.
            unsafe { to.store(row, panel, _mm512_loadu_ps(columns.as_ptr())) };
        }
        for cols in [5, 16, 17, 32, 37, 64, 600] {
            let numbers: Vec<f32> = (0..cols).map(|i| (i as f32 - 7.3) * 1.7).collect();
            let mut rows = Bf16Rows::default();
            rows.shape(3, cols);
            rows.lines.iter_mut().for_each(|line| line.0.fill(bf16::ONE));
            let writer = rows.writer();
            // SAFETY: the rows and their panels, and the CPU has the instructions.
            unsafe {
                writer.round(1, numbers.as_ptr());
                for (panel, columns) in numbers.chunks(LANES).enumerate() {
                    let mut whole = [0.0; LANES];
                    whole[..columns.len()].copy_from_slice(columns);
                    store(writer, 2, panel, &whole);
                }
            }
            for tile in 0..rows.depth() {
                let [whole, panels] = [1, 2].map(|row| rows.lines[rows.line(row, tile)].0);
                assert_eq!(whole, panels, "column tile {tile} of {cols} columns");
            }
        }
    }
}
