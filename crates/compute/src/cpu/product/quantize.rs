//! Activations as integers: what byte dot products multiply packed weights with.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cpu::dispatch::entry;
use crate::cpu::layout::region::grown;
use crate::cpu::pointers::SendPtr;
use crate::cpu::simd::{LANES, Simd};

/// How precisely activations enter products with quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// Integers of one byte, with a scale for each of the weights' groups, where activations are of one size, which is half the
    /// arithmetic at about 0.6 % error in a product; of two bytes as with `Int16` where a few are far larger than the others. bf16
    /// where a matrix unit multiplies prompts.
    #[default]
    Auto,
    /// As `Auto`, but of one byte everywhere: about 1 % error where a few are far larger than the others.
    Int8,
    /// Two bytes everywhere: bf16 where a matrix unit multiplies prompts, else integers as with `Int16`.
    Bf16,
    /// Two bytes each, as two byte planes: about 0.01 % error, the same memory traffic, and the same bits on every
    /// instruction set.
    Int16,
    /// Plain floats, with weights made floats as well: many times slower on prompts, and what the others are held against.
    F32,
}

impl Activations {
    /// Whether prompts may be bf16.
    pub const fn allows_bf16(self) -> bool {
        matches!(self, Self::Auto | Self::Int8 | Self::Bf16)
    }

    /// Byte planes for each row of integers, of which a few may be far larger than the others; none for floats.
    pub const fn planes(self, uneven: bool) -> usize {
        match self {
            Self::Auto => 1 + uneven as usize,
            Self::Int8 => 1,
            Self::Bf16 | Self::Int16 => 2,
            Self::F32 => 0,
        }
    }
}

/// Columns of a row that lie together: a cache line.
pub(in crate::cpu) const BLOCK: usize = 64;
/// The most rows of a tile, whose blocks lie together.
pub(in crate::cpu) const TILE_ROWS: usize = 16;

/// A row's columns in a block.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Line([i8; BLOCK]);

/// A group of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cpu) struct GroupOfRow {
    /// What multiplies the group's results: 1 for integers of two bytes.
    pub scale: f32,
    /// The sum of its integers, times the scale: what the weights' biases are multiplied with.
    pub sum: f32,
}

/// Quantized rows: `x = scale × Σ_planes 256^plane × q`, the high plane first. Integers of two bytes share a row's scale; single bytes
/// have one for each group, so that a large activation costs precision in its own group only.
#[derive(Debug, Default)]
pub(in crate::cpu) struct QuantRows {
    /// `[tile][block of 64 columns][plane][row of the tile]`.
    q: Vec<Line>,
    /// What multiplies all of a row's result: 1 for single bytes.
    pub scales: Vec<f32>,
    /// `[tile][group][row of the tile]`.
    groups_of: Vec<GroupOfRow>,
    pub rows: usize,
    pub cols: usize,
    pub group: usize,
    pub planes: usize,
    /// Rows of a tile: all rows if they are few, else 16.
    pub tile_rows: usize,
}

impl QuantRows {
    /// Room for `rows` rows; allocates only when more is needed than ever before.
    pub fn shape(&mut self, rows: usize, cols: usize, group: usize, planes: usize) {
        (self.rows, self.cols, self.group, self.planes) = (rows, cols, group, planes);
        self.tile_rows = rows.min(TILE_ROWS);
        let tiles = rows.div_ceil(self.tile_rows.max(1));
        let lines = tiles * self.tile_bytes() / BLOCK;
        let groups = tiles * self.tile_rows * self.groups();
        grown(&mut self.q, lines, Line([0; BLOCK]));
        grown(&mut self.scales, rows, 0.0);
        grown(&mut self.groups_of, groups, GroupOfRow::default());
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

    /// Where a row's first group is in the groups' numbers; its next one is as many further on as the tile has rows.
    fn first_group(&self, row: usize) -> usize {
        row / self.tile_rows * self.groups() * self.tile_rows + row % self.tile_rows
    }

    /// A row's first group, behind which are those of the tile's next rows, and then the next groups of them all.
    pub fn groups_from(&self, row: usize) -> *const GroupOfRow {
        self.groups_of.as_ptr().wrapping_add(self.first_group(row))
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
            SendPtr(self.groups_of.as_mut_ptr()),
        );
        RowWriter { q: pointers.0, scales: pointers.1, groups: pointers.2, to: self }
    }
}

/// Where rows of a [`QuantRows`] are written.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct RowWriter<'a> {
    q: SendPtr<i8>,
    scales: SendPtr<f32>,
    groups: SendPtr<GroupOfRow>,
    to: &'a QuantRows,
}

impl RowWriter<'_> {
    /// Quantizes one row.
    ///
    /// # Safety
    /// `x` holds the columns; no other thread writes this row; the CPU has `S`.
    #[inline(always)]
    unsafe fn quantize<S: Simd>(self, row: usize, x: *const f32) {
        let to = self.to;
        // SAFETY: within the row, as the caller promises.
        unsafe {
            let groups = to.groups();
            let (start, plane) = (to.offset(row), to.tile_rows * BLOCK);
            let first_group = to.first_group(row);
            let of_row = match to.planes {
                1 => (1.0, 1.0),
                _ => scales(largest::<S>(x, 0..to.cols), 127.0 * 256.0),
            };
            *self.scales.at(row) = of_row.0;
            for g in 0..groups {
                let columns = g * to.group..(g + 1) * to.group;
                let (scale, inverse) = match to.planes {
                    1 => scales(largest::<S>(x, columns.clone()), 127.0),
                    _ => (1.0, of_row.1),
                };
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
                *self.groups.at(first_group + g * to.tile_rows) =
                    GroupOfRow { scale, sum: S::reduce_add(sum) * scale };
            }
        }
    }
}

entry! {
    /// Quantizes a row.
    pub(super) fn quantize_row_on(x: *const f32, row: usize, to: RowWriter<'_>) = quantize_row
}

#[inline(always)]
unsafe fn quantize_row<S: Simd>(x: *const f32, row: usize, to: RowWriter<'_>) {
    // SAFETY: the caller's conditions.
    unsafe { to.quantize::<S>(row, x) };
}

/// The largest magnitude of these columns, whole vectors of them.
///
/// # Safety
/// The columns are there, the CPU has `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn largest<S: Simd>(x: *const f32, columns: Range<usize>) -> f32 {
    // SAFETY: the caller's.
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
pub(in crate::cpu) fn scales(max: f32, limit: f32) -> (f32, f32) {
    let scale = max / limit;
    // Below this the inverse would overflow; such activations are zero for any purpose.
    if scale > 1e-37 { (scale, 1.0 / scale) } else { (0.0, 0.0) }
}
