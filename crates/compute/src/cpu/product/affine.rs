//! Products of quantized rows with quantized panels, by byte dot products.
//!
//! Within a group, sums are exact integers. Groups are added in floats, in order and with the same
//! rounding everywhere, so every instruction set gives the same bits.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::ops::Range;

use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::block32::{STEP_PAIRS, unpack_pair};
use crate::cpu::layout::fixed_point::{FixedPoint, HEADER_BYTES};
use crate::cpu::layout::matrix::{
    BLOCK32, FACTOR_BYTES, Headers, IQ4, Matrix, Record, STEP_BYTES, block_bytes, block_lines, level_bits,
    shares_block, table,
};
use crate::cpu::product::output::{Output, finish};
use crate::cpu::product::quantize::{GroupOfRow, LINE_COLUMNS, QuantRows};
use crate::cpu::product::shared_blocks;
use crate::cpu::simd::{Kernel, LANES, Simd};

/// Prefetch distance of weights, from memory into the second-level cache. The hardware prefetcher
/// stops at each 4 KiB page.
pub(in crate::cpu) const PREFETCH_BYTES: usize = 8192;
/// Prefetch distance of weights, from the second-level cache into the first.
/// A third of this costs a single row 3 % on a machine with fast memory.
const NEAR_BYTES: usize = 3456;
/// Up to this many rows, one call takes all panels: the rows stay in the first-level cache, unless
/// they have two planes and many columns.
pub(super) const FEW_ROWS: usize = 4;

/// [`crate::cpu::product::matmul::multiply`] for a quantized matrix.
///
/// # Safety
/// As for that function.
#[inline(always)]
pub(in crate::cpu) unsafe fn multiply<S: Simd>(
    bits: u32,
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
) {
    if shares_block(x.group) {
        return shared_blocks::multiply::<S>(bits, w, panels, x, rows, out);
    }
    if w.headers.factored {
        return factored::<S>(bits, w, panels, x, rows, out);
    }
    if x.planes == 1 {
        of_bits!(bits, [row_blocks], [S, 1, false], (w, panels, x, rows, out));
    } else {
        of_bits!(bits, [row_blocks], [S, 2, false], (w, panels, x, rows, out));
    }
}

/// [`multiply`] for headers with factors. Kernels of their own: other matrices would lose 4 % of a
/// token's time.
#[inline(always)]
unsafe fn factored<S: Simd>(
    bits: u32,
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
) {
    match (bits, x.planes) {
        (4, 1) => row_blocks::<S, 1, true, 4>(w, panels, x, rows, out),
        (4, _) => row_blocks::<S, 2, true, 4>(w, panels, x, rows, out),
        (5, 1) => row_blocks::<S, 1, true, 5>(w, panels, x, rows, out),
        (5, _) => row_blocks::<S, 2, true, 5>(w, panels, x, rows, out),
        (IQ4, 1) => row_blocks::<S, 1, true, IQ4>(w, panels, x, rows, out),
        (IQ4, _) => row_blocks::<S, 2, true, IQ4>(w, panels, x, rows, out),
        (bits, _) => unreachable!("no format has {bits}-bit levels in groups of 32 with factors"),
    }
}

/// Cuts each strip of rows into blocks. A panel is multiplied with all blocks before the next panel
/// is.
#[inline(always)]
unsafe fn row_blocks<S: Simd, const PLANES: usize, const FACTORED: bool, const BITS: u32>(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
) {
    let together = if rows.len() <= FEW_ROWS { panels.len().max(1) } else { 1 };
    for first in panels.clone().step_by(together) {
        let panels = first..panels.end.min(first + together);
        let mut row = rows.start;
        while row < rows.end {
            let left = (rows.end - row).min(x.strip_rows - row % x.strip_rows);
            let panels = panels.clone();
            row += match left {
                2 if S::HAS_2_AND_3_ROWS => enter::<S, PLANES, FACTORED, BITS, 2>(w, panels, x, row, out),
                3 if S::HAS_2_AND_3_ROWS => enter::<S, PLANES, FACTORED, BITS, 3>(w, panels, x, row, out),
                ..4 => enter::<S, PLANES, FACTORED, BITS, 1>(w, panels, x, row, out),
                4..8 => enter::<S, PLANES, FACTORED, BITS, 4>(w, panels, x, row, out),
                _ if S::REGISTER_ROWS == 4 => enter::<S, PLANES, FACTORED, BITS, 4>(w, panels, x, row, out),
                16.. if PLANES == 1 => enter::<S, PLANES, FACTORED, BITS, 16>(w, panels, x, row, out),
                12.. if PLANES == 1 => enter::<S, PLANES, FACTORED, BITS, 12>(w, panels, x, row, out),
                _ => enter::<S, PLANES, FACTORED, BITS, 8>(w, panels, x, row, out),
            };
        }
    }
}

/// Multiplies `ROWS` rows. Returns `ROWS`.
#[inline(always)]
unsafe fn enter<S: Simd, const PLANES: usize, const FACTORED: bool, const BITS: u32, const ROWS: usize>(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    row: usize,
    out: Output,
) -> usize {
    S::enter(RowBlock::<PLANES, FACTORED, BITS, ROWS> { w, panels, x, row, out });
    ROWS
}

/// `ROWS` rows of a strip, from `row` on, times panels.
struct RowBlock<'a, const PLANES: usize, const FACTORED: bool, const BITS: u32, const ROWS: usize> {
    w: &'a Matrix,
    panels: Range<usize>,
    x: &'a QuantRows,
    row: usize,
    out: Output,
}

impl<const PLANES: usize, const FACTORED: bool, const BITS: u32, const ROWS: usize> Kernel
    for RowBlock<'_, PLANES, FACTORED, BITS, ROWS>
{
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { w, panels, x, row, out } = self;
        let (line_stride, plane) = (x.line_stride(), x.strip_rows * LINE_COLUMNS);
        // What the compiler knows of headers saves instructions in each group.
        let (blocks_of_group, headers) = match FACTORED {
            true => (1, Headers { implied: table(BITS).is_some(), factored: true }),
            false => (x.group / BLOCK32, Headers { factored: false, ..w.headers }),
        };
        debug_assert_eq!(headers, w.headers);
        let of_record = Record::of(BITS, blocks_of_group * BLOCK32, headers);
        // Groups of a record are a power of two.
        let within_record = of_record.columns / (blocks_of_group * BLOCK32) - 1;
        let header_bytes = if FACTORED { of_record.header_bytes } else { HEADER_BYTES };
        // Panels are contiguous.
        let mut p = w.panels.as_ptr().add(panels.start * w.panel_bytes());
        for panel in panels {
            let mut acc = [S::splat(0.0); ROWS];
            let mut x_groups = x.groups_from(row);
            // Pointers only advance: computing the address of each block's columns would cost too
            // much arithmetic.
            let mut q = x.bytes().wrapping_add(x.offset(row));
            // Bytes to the next block's columns: the second half of this line, or the start of the
            // next line.
            let mut on = BLOCK32;
            let mut record = p;
            for group in 0..x.groups() {
                if group & within_record == 0 {
                    record = p;
                    p = p.add(header_bytes);
                    ahead_of_lines::<S>(record, header_bytes);
                }
                let mut sums = GroupSums::<S, PLANES, ROWS>::zero();
                for _ in 0..blocks_of_group {
                    if ROWS > FEW_ROWS && on == BLOCK32 {
                        near_rows::<S, PLANES, ROWS>(q.wrapping_add(line_stride), plane);
                    }
                    sums.add_block32::<BITS>(p, q, plane);
                    p = p.add(block_bytes(BITS));
                    q = q.wrapping_add(on);
                    on = line_stride - on;
                }
                let scales = GroupScales::<S>::of_record::<BITS>(record, group & within_record, headers);
                let sums = sums.total();
                for m in 0..ROWS {
                    acc[m] = scales.add(acc[m], sums[m], *x_groups.add(m));
                }
                x_groups = x_groups.wrapping_add(x.strip_rows);
            }
            for (m, acc) in acc.into_iter().enumerate() {
                scaled::<S>(w, panel, row + m, *x.scales.as_ptr().add(row + m), acc, out);
            }
        }
    }
}

/// Prefetches the weights after a line: from memory, and closer ones into the first-level cache.
#[inline(always)]
pub(in crate::cpu) unsafe fn ahead<S: Simd>(line: *const u8) {
    S::prefetch(line.wrapping_add(PREFETCH_BYTES));
    S::prefetch_near(line.wrapping_add(NEAR_BYTES));
}

/// Prefetches the weights after some lines.
#[inline(always)]
pub(super) unsafe fn ahead_of_lines<S: Simd>(first: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(STEP_BYTES) {
        ahead::<S>(first.wrapping_add(line));
    }
}

/// Prefetches the weights after a block, one part per pair of steps: many prefetches at once delay
/// the loads.
#[inline(always)]
pub(in crate::cpu) unsafe fn ahead_of_pair<S: Simd, const BITS: u32>(block: *const u8, pair: usize) {
    let lines = block_lines(BITS);
    for line in pair * lines / STEP_PAIRS..(pair + 1) * lines / STEP_PAIRS {
        ahead::<S>(block.wrapping_add(line * STEP_BYTES));
    }
}

/// Prefetches a line of each row from the second-level cache. After the last line the address does
/// not matter.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn near_rows<S: Simd, const PLANES: usize, const ROWS: usize>(x: *const i8, plane: usize) {
    for k in 0..PLANES {
        for m in 0..ROWS {
            S::prefetch_near(x.wrapping_add(k * plane + m * LINE_COLUMNS).cast());
        }
    }
}

/// Sums of a group: 16 weight rows, for each activation row and byte plane.
pub(super) struct GroupSums<S: Simd, const PLANES: usize, const ROWS: usize> {
    even: [[S::I; PLANES]; ROWS],
    /// Sums of every other step, if the rows are so few that their dot products would wait for each
    /// other.
    odd: [[S::I; PLANES]; ROWS],
}

impl<S: Simd, const PLANES: usize, const ROWS: usize> GroupSums<S, PLANES, ROWS> {
    /// True if the sums fit the registers twice.
    const IN_TURN: bool = 2 * ROWS <= S::REGISTER_ROWS;

    /// # Safety
    /// The CPU has `S`.
    #[inline(always)]
    pub unsafe fn zero() -> Self {
        let zero = [[S::zero_i(); PLANES]; ROWS];
        Self { even: zero, odd: zero }
    }

    /// Adds the products of a block with 32 columns of each row.
    #[inline(always)]
    unsafe fn add_block32<const BITS: u32>(&mut self, p: *const u8, x: *const i8, plane: usize) {
        // Unrolled: the compiler would keep sums that a loop indexes in memory.
        self.add_pair::<BITS, 0>(p, x, plane);
        self.add_pair::<BITS, 1>(p, x, plane);
        self.add_pair::<BITS, 2>(p, x, plane);
        self.add_pair::<BITS, 3>(p, x, plane);
    }

    /// Adds the products of two steps of a block, each with 4 columns of each row, and finishes
    /// them before anything else.
    ///
    /// With no prefetch between the two, the compiler folds the load of a row's bytes into the dot
    /// product's instruction, which leaves the processor more room to run ahead.
    ///
    /// # Safety
    /// `block` points to a block of `BITS` bits, `x` to its columns of `ROWS` rows and `PLANES`
    /// planes; the CPU has `S`.
    #[inline(always)]
    pub unsafe fn add_pair<const BITS: u32, const PAIR: usize>(
        &mut self,
        block: *const u8,
        x: *const i8,
        plane: usize,
    ) {
        ahead_of_pair::<S, BITS>(block, PAIR);
        let [even, odd] = unpack_pair::<S, BITS, PAIR>(block);
        let x = x.add(8 * PAIR);
        Self::add_step(&mut self.even, even, x, plane);
        let sums = if Self::IN_TURN { &mut self.odd } else { &mut self.even };
        Self::add_step(sums, odd, x.add(4), plane);
        for m in 0..ROWS {
            for k in 0..PLANES {
                self.even[m][k] = S::done(self.even[m][k]);
                if Self::IN_TURN {
                    self.odd[m][k] = S::done(self.odd[m][k]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn add_step(sums: &mut [[S::I; PLANES]; ROWS], step: S::B, x: *const i8, plane: usize) {
        for m in 0..ROWS {
            for k in 0..PLANES {
                sums[m][k] = S::dot4(sums[m][k], step, x.add(k * plane + m * LINE_COLUMNS));
            }
        }
    }

    /// # Safety
    /// The CPU has `S`.
    #[inline(always)]
    pub unsafe fn total(mut self) -> [[S::I; PLANES]; ROWS] {
        if Self::IN_TURN {
            for m in 0..ROWS {
                for k in 0..PLANES {
                    self.even[m][k] = S::add_i(self.even[m][k], self.odd[m][k]);
                }
            }
        }
        self.even
    }
}

/// The scales and biases of a group of 16 weight rows.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct GroupScales<S: Simd> {
    pub scales: S::F,
    pub biases: S::F,
}

impl<S: Simd> GroupScales<S> {
    /// Those of group `index` of a record, which has these headers.
    ///
    /// # Safety
    /// `record` points to a record; the CPU has `S`.
    #[inline(always)]
    pub unsafe fn of_record<const BITS: u32>(record: *const u8, index: usize, headers: Headers) -> Self {
        let header = record.add(headers.place(index));
        let scales = match headers.factored {
            true => S::mul(S::load_i8(header.cast()), S::load_f16(record.cast())),
            false => S::load_i16(header.cast()),
        };
        let bias_unit = (1u32 << FixedPoint::of(BITS).shift) as f32;
        let biases = match headers {
            Headers { implied: true, .. } => {
                S::mul(scales, S::splat(-((1u32 << (level_bits(BITS) - 1)) as f32)))
            }
            Headers { factored: true, .. } => {
                let factors = S::load_f16(record.add(FACTOR_BYTES / 2).cast());
                let biases = S::mul(S::load_i8(header.add(LANES).cast()), factors);
                S::mul(biases, S::splat(bias_unit))
            }
            _ => S::mul(S::load_i16(header.cast::<i16>().add(LANES)), S::splat(bias_unit)),
        };
        Self { scales, biases }
    }

    /// Adds a group to 16 results of a row. `sums` has one entry per byte plane, the high one
    /// first. With a single plane, the row has a scale per group.
    ///
    /// # Safety
    /// The CPU has `S`.
    #[inline(always)]
    pub unsafe fn add<const PLANES: usize>(&self, acc: S::F, sums: [S::I; PLANES], x: GroupOfRow) -> S::F {
        let sums = match PLANES {
            1 => S::mul(S::to_f(sums[0]), S::splat(x.scale)),
            _ => S::to_f(S::join(sums[0], sums[1])),
        };
        S::fused(self.scales, sums, S::fused(self.biases, S::splat(x.sum), acc))
    }

    /// The weights of 16 levels, one per weight row.
    ///
    /// # Safety
    /// The CPU has `S`.
    #[inline(always)]
    pub unsafe fn weights(&self, levels: S::F) -> S::F {
        S::fma(levels, self.scales, self.biases)
    }
}

/// Scales 16 results of a row, adds the bias and stores them.
///
/// # Safety
/// The output holds the row and the panel's columns; the CPU has `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn scaled<S: Simd>(
    w: &Matrix,
    panel: usize,
    row: usize,
    scale: f32,
    results: S::F,
    out: Output,
) {
    let units = S::load(w.units.as_ptr().add(panel * LANES));
    finish::<S>(w, panel, row, S::mul(S::mul(results, units), S::splat(scale)), out);
}
