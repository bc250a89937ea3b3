//! Activations as bf16: what matrix units multiply.

use half::bf16;

use super::matrix::SendPtr;
use super::memory::prefer_huge_pages;

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// Columns of a block: what one tile is deep.
pub(super) const BLOCK: usize = 32;
/// Blocks of a chunk.
pub(super) const CHUNK: usize = 16;
/// A row's columns in a block. Aligned, because tiles whose rows straddle cache lines load at a quarter of the speed.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([bf16; BLOCK]);

/// Rows in bf16: `[chunk of 16 blocks][tile][block of 32 columns][row of the tile]`, so that what is multiplied with a chunk of
/// weights lies together: strides of whole pages would compete for the same places of the second-level cache. Of each four
/// columns, the order is 0, 2, 1, 3, which suits the unpacking of weights. The last block is filled up with zeros, the last tile
/// with anything.
#[derive(Debug, Default)]
pub(super) struct HalfRows {
    lines: Vec<Line>,
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
            self.lines = Vec::with_capacity(lines);
            prefer_huge_pages(self.lines.as_ptr(), lines * size_of::<Line>());
            self.lines.resize(lines, Line([bf16::ZERO; BLOCK]));
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
#[derive(Debug, Clone, Copy)]
pub(super) struct HalfWriter<'a> {
    lines: SendPtr<Line>,
    to: &'a HalfRows,
}

impl HalfWriter<'_> {
    /// Rounds one row.
    ///
    /// # Safety
    /// `x` holds the columns; no other thread writes this row.
    #[inline(always)]
    pub unsafe fn round(self, row: usize, x: *const f32) {
        // SAFETY: the caller's.
        let x = unsafe { std::slice::from_raw_parts(x, self.to.cols) };
        for (block, x) in x.chunks(BLOCK).enumerate() {
            // SAFETY: a line of the row.
            let line = unsafe { &mut *self.lines.at(self.to.line(row, block)) };
            let mut halves = [bf16::ZERO; BLOCK];
            for (half, x) in halves.iter_mut().zip(x) {
                *half = rounded(*x);
            }
            for (to, [a, b, c, d]) in line.0.as_chunks_mut::<4>().0.iter_mut().zip(halves.as_chunks::<4>().0)
            {
                *to = [*a, *c, *b, *d];
            }
        }
    }
}

/// To the nearest, ties to even, as `bf16::from_f32`, but without a branch.
#[inline(always)]
fn rounded(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    // Rounding could carry a NaN's fraction away.
    let quiet = (bits >> 16) as u16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { nearest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_the_half_crate() {
        // All exponents and both signs, with fractions below, at and above the middle between two bf16.
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (ours, theirs) = (rounded(x), bf16::from_f32(x));
                assert!(ours.to_bits() == theirs.to_bits(), "{x:e} is {theirs}, not {ours}");
            }
        }
    }
}
