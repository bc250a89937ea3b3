//! Activations quantized to integers, for byte dot products with packed weights.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cpu::dispatch::entry;
use crate::cpu::layout::region::grown;
use crate::cpu::pointers::SendPtr;
use crate::cpu::simd::{LANES, Simd};

/// Precision of activations in products with quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// One byte, with a scale per group of weights, for activations of similar size: half the
    /// arithmetic of two bytes, about 0.6 % error in a product. Two bytes (`Int16`) where a few
    /// activations are far larger than the rest (after a gate). bf16 where a matrix unit multiplies
    /// prompts.
    #[default]
    Auto,
    /// Like `Auto`, but one byte everywhere: about 1 % error where a few activations are far larger
    /// than the rest.
    Int8,
    /// Two bytes everywhere: bf16 where a matrix unit multiplies prompts, else `Int16`.
    Bf16,
    /// 16-bit integers, stored as two byte planes: about 0.01 % error, the same weight traffic, and
    /// the same bits on every instruction set.
    Int16,
    /// f32, with weights dequantized to f32: many times slower on prompts; the reference for the
    /// other precisions.
    F32,
}

impl Activations {
    /// True if prompts may be bf16.
    pub const fn allows_bf16(self) -> bool {
        matches!(self, Self::Auto | Self::Int8 | Self::Bf16)
    }

    /// Byte planes of a quantized row; 0 for floats. `uneven`: a few activations may be far larger
    /// than the rest.
    pub const fn planes(self, uneven: bool) -> usize {
        match self {
            Self::Auto => 1 + uneven as usize,
            Self::Int8 => 1,
            Self::Bf16 | Self::Int16 => 2,
            Self::F32 => 0,
        }
    }
}

/// Columns in a line: one cache line of bytes.
pub(in crate::cpu) const LINE_COLUMNS: usize = 64;
/// Maximum rows of a strip: rows whose lines are stored together.
pub(in crate::cpu) const STRIP_ROWS: usize = 16;

/// 64 columns of a row in one byte plane.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Line([i8; LINE_COLUMNS]);

/// The scale and sum of a group of columns of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::cpu) struct GroupOfRow {
    /// Factor of the group's results: 1 for two byte planes.
    pub scale: f32,
    /// The sum of the group's integers, times the scale: the factor of the weights' biases.
    pub sum: f32,
}

/// Quantized rows: `x = scale × Σ_planes 256^plane × q`, the high plane first.
///
/// 16-bit integers have one scale per row. Single bytes have a scale per group, so a large
/// activation costs precision in its own group only.
#[derive(Debug, Default)]
pub(in crate::cpu) struct QuantRows {
    /// `[strip][line of 64 columns][plane][row of the strip]`.
    q: Vec<Line>,
    /// Factor of a row's results: 1 for a single plane.
    pub scales: Vec<f32>,
    /// `[strip][group][row of the strip]`.
    groups_of: Vec<GroupOfRow>,
    pub rows: usize,
    pub cols: usize,
    pub group: usize,
    pub planes: usize,
    /// Rows of a strip: all rows if there are fewer than 16, else 16.
    pub strip_rows: usize,
}

impl QuantRows {
    /// Sets the shape. Allocates only if it needs more memory than any earlier shape.
    pub fn shape(&mut self, rows: usize, cols: usize, group: usize, planes: usize) {
        (self.rows, self.cols, self.group, self.planes) = (rows, cols, group, planes);
        self.strip_rows = rows.min(STRIP_ROWS);
        let strips = rows.div_ceil(self.strip_rows.max(1));
        let lines = strips * self.strip_bytes() / LINE_COLUMNS;
        let groups = strips * self.strip_rows * self.groups();
        grown(&mut self.q, lines, Line([0; LINE_COLUMNS]));
        grown(&mut self.scales, rows, 0.0);
        grown(&mut self.groups_of, groups, GroupOfRow::default());
    }

    pub fn groups(&self) -> usize {
        self.cols / self.group
    }

    /// Lines of a row in one plane. The last one may be half empty.
    pub fn lines_of_row(&self) -> usize {
        self.cols.div_ceil(LINE_COLUMNS)
    }

    /// Bytes from one line of a row to the row's next line: all planes and rows of the strip.
    pub fn line_stride(&self) -> usize {
        self.planes * self.strip_rows * LINE_COLUMNS
    }

    /// Bytes of a strip.
    pub fn strip_bytes(&self) -> usize {
        self.lines_of_row() * self.line_stride()
    }

    /// Byte offset of a row's first line in the high plane.
    pub fn offset(&self, row: usize) -> usize {
        row / self.strip_rows * self.strip_bytes() + row % self.strip_rows * LINE_COLUMNS
    }

    /// Index of a row's first group. The row's next group is `strip_rows` further on.
    fn first_group(&self, row: usize) -> usize {
        row / self.strip_rows * self.groups() * self.strip_rows + row % self.strip_rows
    }

    /// Pointer to a row's first group. The first groups of the strip's next rows follow it, then
    /// the second groups of all rows.
    pub fn groups_from(&self, row: usize) -> *const GroupOfRow {
        self.groups_of.as_ptr().wrapping_add(self.first_group(row))
    }

    /// Pointer to the first byte of the first strip.
    pub fn bytes(&self) -> *const i8 {
        self.q.as_ptr().cast()
    }

    /// A handle that threads share; each quantizes its own rows.
    pub fn writer(&mut self) -> QuantWriter<'_> {
        let pointers = (
            SendPtr(self.q.as_mut_ptr().cast()),
            SendPtr(self.scales.as_mut_ptr()),
            SendPtr(self.groups_of.as_mut_ptr()),
        );
        QuantWriter { q: pointers.0, scales: pointers.1, groups: pointers.2, to: self }
    }
}

/// Writes rows of a [`QuantRows`].
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct QuantWriter<'a> {
    q: SendPtr<i8>,
    scales: SendPtr<f32>,
    groups: SendPtr<GroupOfRow>,
    to: &'a QuantRows,
}

impl QuantWriter<'_> {
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
            let (start, plane) = (to.offset(row), to.strip_rows * LINE_COLUMNS);
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
                    let q = self.q.at(start + i / LINE_COLUMNS * to.line_stride() + i % LINE_COLUMNS);
                    if to.planes == 1 {
                        S::store_i8(q, v);
                    } else {
                        // Rounded so that the low byte is in −128..=127.
                        let high = S::round(S::mul(S::add(v, S::splat(0.5)), S::splat(1.0 / 256.0)));
                        S::store_i8(q, high);
                        S::store_i8(q.add(plane), S::fma(high, S::splat(-256.0), v));
                    }
                }
                // Sums of integers below 2²⁴ are exact in f32.
                *self.groups.at(first_group + g * to.strip_rows) =
                    GroupOfRow { scale, sum: S::reduce_add(sum) * scale };
            }
        }
    }
}

entry! {
    /// Quantizes a row.
    pub(super) fn quantize_row_on(x: *const f32, row: usize, to: QuantWriter<'_>) = quantize_row
}

#[inline(always)]
unsafe fn quantize_row<S: Simd>(x: *const f32, row: usize, to: QuantWriter<'_>) {
    // SAFETY: the caller's conditions.
    unsafe { to.quantize::<S>(row, x) };
}

/// The largest magnitude among these columns; NaN if one of them is not finite.
///
/// # Safety
/// `x` holds the columns, which are whole vectors; the CPU has `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn largest<S: Simd>(x: *const f32, columns: Range<usize>) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let (zero, mut max, mut poison) = (S::splat(0.0), S::splat(0.0), S::splat(0.0));
        for i in columns.step_by(LANES) {
            let v = S::load(x.add(i));
            max = S::max(max, S::abs(v));
            // A maximum may lose a NaN. Zero times a number is zero unless it is not finite.
            poison = S::fma(v, zero, poison);
        }
        if S::reduce_add(poison) == 0.0 { S::reduce_max(max) } else { f32::NAN }
    }
}

/// The scale for which `max` becomes `limit`, and its inverse. The scale of NaN is NaN, so that the
/// results show it.
#[inline(always)]
pub(in crate::cpu) fn scales(max: f32, limit: f32) -> (f32, f32) {
    let scale = max / limit;
    // The inverse of a smaller scale would overflow; such activations count as zero.
    match scale {
        1e-37.. => (scale, 1.0 / scale),
        _ if scale.is_nan() => (scale, 0.0),
        _ => (0.0, 0.0),
    }
}
