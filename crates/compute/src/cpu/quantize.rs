//! Activations as integers: what byte dot products multiply packed weights with.

use std::ops::Range;

use super::grown;
use super::matrix::SendPtr;
use super::simd::{LANES, Simd};

/// How precisely activations enter products with quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// Two bytes each: bf16 where a matrix unit multiplies prompts, with about 0.2 % error in a product; integers as with `Int16`
    /// elsewhere.
    #[default]
    Auto,
    /// As `Auto`, but integers of one byte, with a scale for each of the weights' groups: half the arithmetic, about 1 % error in a
    /// product.
    Int8,
    /// Two bytes each, as two byte planes: about 0.01 % error, the same memory traffic, and the same bits on every
    /// instruction set.
    Int16,
    /// Plain floats, with weights made floats as well: many times slower on prompts, and what the others are held against.
    F32,
}

impl Activations {
    /// Whether prompts may be bf16.
    pub const fn allows_halves(self) -> bool {
        matches!(self, Self::Auto | Self::Int8)
    }

    /// Byte planes for each row of integers; none for floats.
    pub const fn planes(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Auto | Self::Int16 => 2,
            Self::F32 => 0,
        }
    }
}

/// Columns of a row that lie together: a cache line.
pub(super) const BLOCK: usize = 64;
/// The most rows of a tile, whose blocks lie together.
pub(super) const TILE_ROWS: usize = 16;

/// A row's columns in a block.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([i8; BLOCK]);

/// Quantized rows: `x = scale × Σ_planes 256^plane × q`, the high plane first. Integers of two bytes share a row's scale; single bytes
/// have one for each group, so that a large activation costs precision in its own group only.
#[derive(Debug, Default)]
pub(super) struct QuantRows {
    /// `[tile][block of 64 columns][plane][row of the tile]`.
    q: Vec<Line>,
    /// `[rows]`, or `[rows][groups]` for single bytes.
    scales: Vec<f32>,
    /// Sums of the integers of each group, `[rows][groups]`, times a group's own scale: what the weights' biases are multiplied with.
    sums: Vec<f32>,
    pub rows: usize,
    pub cols: usize,
    pub group: usize,
    pub planes: usize,
    /// Rows of a tile: all rows if they are few, else 16.
    pub tile_rows: usize,
}

impl QuantRows {
    /// Room for `rows` rows; allocates only when more is needed than ever before.
    pub fn shape(&mut self, rows: usize, cols: usize, group: usize, activations: Activations) {
        (self.rows, self.cols, self.group, self.planes) = (rows, cols, group, activations.planes());
        self.tile_rows = rows.min(TILE_ROWS);
        let lines = rows.div_ceil(self.tile_rows.max(1)) * self.tile_bytes() / BLOCK;
        let groups = rows * self.groups();
        grown(&mut self.q, lines, Line([0; BLOCK]));
        grown(&mut self.scales, if self.planes == 1 { groups } else { rows }, 0.0);
        grown(&mut self.sums, groups, 0.0);
    }

    /// What multiplies all of a row's result.
    pub fn scale(&self, row: usize) -> f32 {
        if self.planes == 1 { 1.0 } else { self.scales[row] }
    }

    /// The scales and sums of some rows' groups, to be read without checks.
    #[inline(always)]
    pub fn groups_from(&self, row: usize) -> Groups {
        let first = row * self.groups();
        let scales = if self.planes == 1 { self.scales[first..].as_ptr() } else { std::ptr::null() };
        Groups { scales, sums: self.sums[first..].as_ptr(), count: self.groups() }
    }

    pub fn groups(&self) -> usize {
        self.cols / self.group
    }

    /// Blocks of columns, the last of which may be half empty.
    pub fn blocks(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    /// Bytes of a block of a tile.
    pub fn block_bytes(&self) -> usize {
        self.planes * self.tile_rows * BLOCK
    }

    /// Bytes of a tile.
    pub fn tile_bytes(&self) -> usize {
        self.blocks() * self.block_bytes()
    }

    /// Where a row begins: its first block, in the high plane.
    pub fn offset(&self, row: usize) -> usize {
        row / self.tile_rows * self.tile_bytes() + row % self.tile_rows * BLOCK
    }

    /// The first byte of the first tile.
    pub fn bytes(&self) -> *const i8 {
        self.q.as_ptr().cast()
    }

    /// Pointers for threads that quantize different rows.
    pub fn writer(&mut self) -> RowWriter<'_> {
        let pointers = (
            SendPtr(self.q.as_mut_ptr().cast()),
            SendPtr(self.scales.as_mut_ptr()),
            SendPtr(self.sums.as_mut_ptr()),
        );
        RowWriter { q: pointers.0, scales: pointers.1, sums: pointers.2, to: self }
    }
}

/// Scales and sums of rows' groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Groups {
    scales: *const f32,
    sums: *const f32,
    count: usize,
}

/// What the sums of a group are multiplied with, if there is one for the group, and what its biases are.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupOfRow {
    pub scale: f32,
    pub sum: f32,
}

impl Groups {
    /// A group of a row, counted from the first.
    ///
    /// # Safety
    /// There are so many rows, of so many byte planes, and groups.
    #[inline(always)]
    pub unsafe fn get<const PLANES: usize>(&self, row: usize, group: usize) -> GroupOfRow {
        let index = row * self.count + group;
        // SAFETY: the caller's.
        unsafe {
            let scale = if PLANES == 1 { *self.scales.add(index) } else { 1.0 };
            GroupOfRow { scale, sum: *self.sums.add(index) }
        }
    }
}

/// Where rows of a [`QuantRows`] are written.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowWriter<'a> {
    q: SendPtr<i8>,
    scales: SendPtr<f32>,
    sums: SendPtr<f32>,
    to: &'a QuantRows,
}

impl RowWriter<'_> {
    /// Quantizes one row.
    ///
    /// # Safety
    /// `x` holds the columns; no other thread writes this row; the CPU has `S`.
    #[inline(always)]
    pub unsafe fn quantize<S: Simd>(self, row: usize, x: *const f32) {
        let to = self.to;
        // SAFETY: within the row, as the caller promises.
        unsafe {
            let groups = to.groups();
            let (start, plane) = (to.offset(row), to.tile_rows * BLOCK);
            let mut of_row = (1.0, 1.0);
            if to.planes != 1 {
                of_row = scales(largest::<S>(x, 0..to.cols), 127.0 * 256.0);
                *self.scales.at(row) = of_row.0;
            }
            for g in 0..groups {
                let columns = g * to.group..(g + 1) * to.group;
                let mut scale = 1.0;
                let mut inverse = of_row.1;
                if to.planes == 1 {
                    (scale, inverse) = scales(largest::<S>(x, columns.clone()), 127.0);
                    *self.scales.at(row * groups + g) = scale;
                }
                let mut sum = S::splat(0.0);
                for i in columns.step_by(LANES) {
                    let v = S::round(S::mul(S::load(x.add(i)), S::splat(inverse)));
                    sum = S::add(sum, v);
                    let q = self.q.at(start + i / BLOCK * to.block_bytes() + i % BLOCK);
                    if to.planes == 1 {
                        S::store_i8(q, v);
                    } else {
                        // Rounded so that the remainder is in −128..=127.
                        let high = S::round(S::mul(S::add(v, S::splat(0.5)), S::splat(1.0 / 256.0)));
                        S::store_i8(q, high);
                        S::store_i8(q.add(plane), S::fma(high, S::splat(-256.0), v));
                    }
                }
                // Integers below 2²⁴: exact.
                *self.sums.at(row * groups + g) = S::reduce_add(sum) * scale;
            }
        }
    }
}

/// The largest magnitude of these columns.
#[inline(always)]
unsafe fn largest<S: Simd>(x: *const f32, columns: Range<usize>) -> f32 {
    // SAFETY: the caller's: the columns are there, the CPU has `S`.
    unsafe {
        let mut max = S::splat(0.0);
        for i in columns.step_by(LANES) {
            max = S::max(max, S::abs(S::load(x.add(i))));
        }
        S::reduce_max(max)
    }
}

/// Scale and its inverse such that `max` becomes `limit`.
#[inline(always)]
fn scales(max: f32, limit: f32) -> (f32, f32) {
    let scale = max / limit;
    // Below this the inverse would overflow; such activations are zero for any purpose.
    if scale > 1e-37 { (scale, 1.0 / scale) } else { (0.0, 0.0) }
}
