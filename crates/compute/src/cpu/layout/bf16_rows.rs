//! Activations as bf16: what matrix units multiply.

use half::bf16;

use crate::cpu::layout::region::{Array, Zero};
use crate::cpu::pointers::SendPtr;

/// Rows of a tile.
pub(in crate::cpu) const TILE_ROWS: usize = 16;
/// Columns of a block: what one tile is deep.
pub(in crate::cpu) const BLOCK: usize = 32;
/// Blocks of a chunk.
pub(in crate::cpu) const CHUNK: usize = 16;
/// Panels that a chunk of rows meets one after the other.
pub(in crate::cpu) const PANELS_TOGETHER: usize = 16;
/// Row tiles up to which the weights are what is waited for: then they are read straight through.
pub(in crate::cpu) const FEW_TILES: usize = 2;
/// A row's columns in a block. Aligned, because tiles whose rows straddle cache lines load at a quarter of the speed.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Line([bf16; BLOCK]);

// SAFETY: numbers.
unsafe impl Zero for Line {}

/// Rows in bf16: `[chunk of 16 blocks][tile][block of 32 columns][row of the tile]`, so that what is multiplied with a chunk of
/// weights lies together: strides of whole pages would compete for the same places of the second-level cache. Of each four
/// columns, the order is 0, 2, 1, 3, which suits the unpacking of weights. The last block is filled up with zeros, the last tile
/// with anything.
#[derive(Debug, Default)]
pub(in crate::cpu) struct HalfRows {
    lines: Array<Line>,
    pub rows: usize,
    cols: usize,
}

impl HalfRows {
    /// Room for `rows` rows; allocates only when more is needed than ever before.
    pub fn shape(&mut self, rows: usize, cols: usize) {
        (self.rows, self.cols) = (rows, cols);
        // One tile more, which is loaded ahead and not used.
        let lines = rows.next_multiple_of(TILE_ROWS) * self.blocks() + TILE_ROWS;
        if self.lines.len() < lines {
            self.lines = Array::zeroed(lines);
        }
    }

    /// Blocks of columns, the last of which may be partly empty.
    pub fn blocks(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    /// Where a tile's part of a block begins. The blocks of a chunk follow each other.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
    pub fn tile(&self, tile: usize, block: usize) -> *const u8 {
        self.lines.as_ptr().wrapping_add(self.line(tile * TILE_ROWS, block)).cast()
    }

    /// The index of a row's line.
    fn line(&self, row: usize, block: usize) -> usize {
        let tiles = self.rows.div_ceil(TILE_ROWS);
        let chunk = block / CHUNK;
        // The last chunk may be shorter.
        let of_chunk = CHUNK.min(self.blocks() - chunk * CHUNK);
        let tile = chunk * CHUNK * tiles + row / TILE_ROWS * of_chunk + block % CHUNK;
        tile * TILE_ROWS + row % TILE_ROWS
    }

    /// For threads that convert different rows.
    pub fn writer(&mut self) -> HalfWriter<'_> {
        HalfWriter { lines: SendPtr(self.lines.as_mut_ptr()), to: self }
    }
}

/// Where rows of a [`HalfRows`] are written.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct HalfWriter<'a> {
    lines: SendPtr<Line>,
    to: &'a HalfRows,
}

#[cfg(target_arch = "x86_64")]
impl HalfWriter<'_> {
    /// Rounds a row's 16 columns of a panel as [`HalfWriter::round`] does.
    ///
    /// # Safety
    /// The row and the panel are there, no other thread writes them; the CPU has AVX-512 with bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512bf16")]
    pub unsafe fn store(self, row: usize, panel: usize, columns: std::arch::x86_64::__m512) {
        use std::arch::x86_64::*;

        use crate::cpu::simd::LANES;
        const PANELS: usize = BLOCK / LANES;
        const { assert!(PANELS == 2) };
        // SAFETY: within the row, as the caller promises; a line is two panels.
        unsafe {
            let line = self.lines.at(self.to.line(row, panel / PANELS)).cast::<__m256i>();
            // Of each four columns 0, 2, 1, 3.
            let ordered = _mm512_permute_ps::<0b11_01_10_00>(columns);
            let halves: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(ordered));
            _mm256_store_si256(line.add(panel % PANELS), halves);
            // The last block may lack a panel.
            if panel.is_multiple_of(PANELS) && (panel + 1) * LANES >= self.to.cols {
                _mm256_store_si256(line.add(1), _mm256_setzero_si256());
            }
        }
    }

    /// Rounds one row to the nearest bf16, ties to even; numbers below the smallest normal one become zero.
    ///
    /// # Safety
    /// `x` holds the columns; no other thread writes this row; the CPU has AVX-512 with bf16.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn round(self, row: usize, x: *const f32) {
        use std::arch::x86_64::*;
        // The order of columns: 0, 2, 1, 3 of each four.
        const ORDER: [u16; BLOCK] = {
            let mut order = [0; BLOCK];
            let mut i = 0;
            while i < BLOCK {
                order[i] = (i / 4 * 4 + [0, 2, 1, 3][i % 4]) as u16;
                i += 1;
            }
            order
        };
        // SAFETY: within the row, as the caller promises; a line is a vector.
        unsafe {
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            for block in 0..self.to.blocks() {
                let first = block * BLOCK;
                let there = |from: usize| !(u32::MAX.unbounded_shl(self.to.cols.saturating_sub(from) as u32));
                let low = _mm512_maskz_loadu_ps(there(first) as u16, x.wrapping_add(first));
                let high =
                    _mm512_maskz_loadu_ps((there(first) >> 16) as u16, x.wrapping_add(first + BLOCK / 2));
                let halves: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                let line = self.lines.at(self.to.line(row, block));
                _mm512_store_si512(line.cast(), _mm512_permutexvar_epi16(order, halves));
            }
        }
    }
}

/// Rounds a row to bf16.
///
/// # Safety
/// The CPU has instructions for bf16, `x` holds a row's columns, and no other thread writes that row.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no matrix unit is used there"))]
pub(in crate::cpu) unsafe fn round_row(x: *const f32, row: usize, to: HalfWriter<'_>) {
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
    fn rounding_is_that_of_the_half_crate() {
        if !is_x86_feature_detected!("avx512bf16") {
            return;
        }
        // All exponents and both signs, with fractions below, at and above the middle between two bf16; an end within a block.
        let mut numbers = Vec::new();
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                numbers.push(f32::from_bits(u32::from(high) << 16 | low));
            }
        }
        numbers.truncate(numbers.len() - 5);
        let mut rows = HalfRows::default();
        rows.shape(1, numbers.len());
        // SAFETY: the row's numbers, and the CPU has the instructions.
        unsafe { rows.writer().round(0, numbers.as_ptr()) };
        for (block, numbers) in numbers.chunks(BLOCK).enumerate() {
            let line = rows.lines[rows.line(0, block)].0;
            for i in 0..BLOCK {
                let x = numbers.get(i).copied().unwrap_or(0.0);
                let (ours, theirs) = (line[i / 4 * 4 + [0, 2, 1, 3][i % 4]], bf16::from_f32(x));
                let flushed = if x.is_subnormal() { bf16::ZERO.copysign(theirs) } else { theirs };
                assert!(ours.to_bits() == flushed.to_bits(), "{x:e} is {flushed}, not {ours}");
            }
        }
    }

    #[test]
    fn panels_are_stored_as_whole_rows_are() {
        use std::arch::x86_64::_mm512_loadu_ps;

        use crate::cpu::simd::LANES;
        if !is_x86_feature_detected!("avx512bf16") {
            return;
        }
        #[target_feature(enable = "avx512f,avx512vl,avx512bf16")]
        unsafe fn store(to: HalfWriter<'_>, row: usize, panel: usize, columns: &[f32; LANES]) {
            // SAFETY: the caller's.
            unsafe { to.store(row, panel, _mm512_loadu_ps(columns.as_ptr())) };
        }
        for cols in [5, 16, 17, 32, 37, 64, 600] {
            let numbers: Vec<f32> = (0..cols).map(|i| (i as f32 - 7.3) * 1.7).collect();
            let mut rows = HalfRows::default();
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
            for block in 0..rows.blocks() {
                let [whole, panels] = [1, 2].map(|row| rows.lines[rows.line(row, block)].0);
                assert_eq!(whole, panels, "block {block} of {cols} columns");
            }
        }
    }
}
