//! Products with weights in groups of 16 columns. Two groups share a block. The sums, their order
//! and their rounding are those of `affine.rs`: only the places of headers and group ends differ.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::ops::Range;

use crate::cpu::layout::matrix::{BLOCK32, E2M1, Headers, Matrix, Record, block_bytes};
use crate::cpu::product::affine::{FEW_ROWS, GroupScales, GroupSums, ahead_of_lines, near_rows, scaled};
use crate::cpu::product::output::Output;
use crate::cpu::product::quantize::{GroupOfRow, LINE_COLUMNS, QuantRows};
use crate::cpu::simd::{Kernel, Simd};

/// [`crate::cpu::product::matmul::multiply`] for a matrix in groups of 16. Such groups exist for
/// the widths of GGUF's types and of NVFP4 only.
///
/// # Safety
/// As for that function.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd>(
    bits: u32,
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
) {
    match (bits, x.planes) {
        (2, 1) => row_blocks::<S, 1, 2>(w, panels, x, rows, out),
        (2, _) => row_blocks::<S, 2, 2>(w, panels, x, rows, out),
        (3, 1) => row_blocks::<S, 1, 3>(w, panels, x, rows, out),
        (3, _) => row_blocks::<S, 2, 3>(w, panels, x, rows, out),
        (E2M1, 1) => row_blocks::<S, 1, E2M1>(w, panels, x, rows, out),
        (E2M1, _) => row_blocks::<S, 2, E2M1>(w, panels, x, rows, out),
        (6, 1) => row_blocks::<S, 1, 6>(w, panels, x, rows, out),
        (6, _) => row_blocks::<S, 2, 6>(w, panels, x, rows, out),
        (bits, _) => unreachable!("no format has {bits}-bit levels in groups of 16"),
    }
}

/// Cuts each strip of rows into blocks, as `affine.rs` does, with fewer sizes of blocks.
#[inline(always)]
unsafe fn row_blocks<S: Simd, const PLANES: usize, const BITS: u32>(
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
                2..4 if S::HAS_2_AND_3_ROWS => enter::<S, PLANES, BITS, 2>(w, panels, x, row, out),
                ..4 => enter::<S, PLANES, BITS, 1>(w, panels, x, row, out),
                8.. if S::REGISTER_ROWS > 4 => enter::<S, PLANES, BITS, 8>(w, panels, x, row, out),
                _ => enter::<S, PLANES, BITS, 4>(w, panels, x, row, out),
            };
        }
    }
}

/// Multiplies `ROWS` rows. Returns `ROWS`.
#[inline(always)]
unsafe fn enter<S: Simd, const PLANES: usize, const BITS: u32, const ROWS: usize>(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    row: usize,
    out: Output,
) -> usize {
    S::enter(RowBlock::<PLANES, BITS, ROWS> { w, panels, x, row, out });
    ROWS
}

/// `ROWS` rows of a strip, from `row` on, times panels.
struct RowBlock<'a, const PLANES: usize, const BITS: u32, const ROWS: usize> {
    w: &'a Matrix,
    panels: Range<usize>,
    x: &'a QuantRows,
    row: usize,
    out: Output,
}

impl<const PLANES: usize, const BITS: u32, const ROWS: usize> Kernel for RowBlock<'_, PLANES, BITS, ROWS> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { w, panels, x, row, out } = self;
        let (line_stride, plane) = (x.line_stride(), x.strip_rows * LINE_COLUMNS);
        // What the compiler knows of headers saves instructions in each group.
        let headers = match BITS {
            E2M1 => Headers { factored: false, ..w.headers },
            _ => Headers { implied: BITS != 2, factored: true },
        };
        debug_assert_eq!(headers, w.headers);
        let of_record = Record::of(BITS, BLOCK32 / 2, headers);
        // Blocks of a record are a power of two.
        let within_record = of_record.columns / BLOCK32 - 1;
        // Panels are contiguous.
        let mut p = w.panels.as_ptr().add(panels.start * w.panel_bytes());
        for panel in panels {
            let mut acc = [S::splat(0.0); ROWS];
            let mut x_groups = x.groups_from(row);
            let mut q = x.bytes().wrapping_add(x.offset(row));
            // Bytes to the next block's columns: the second half of this line, or the start of the
            // next line.
            let mut on = BLOCK32;
            let mut record = p;
            for block in 0..x.cols / BLOCK32 {
                if block & within_record == 0 {
                    record = p;
                    p = p.add(of_record.header_bytes);
                    ahead_of_lines::<S>(record, of_record.header_bytes);
                }
                let group = 2 * (block & within_record);
                if ROWS > FEW_ROWS && on == BLOCK32 {
                    near_rows::<S, PLANES, ROWS>(q.wrapping_add(line_stride), plane);
                }
                let mut first = GroupSums::<S, PLANES, ROWS>::zero();
                first.add_pair::<BITS, 0>(p, q, plane);
                first.add_pair::<BITS, 1>(p, q, plane);
                let scales = GroupScales::<S>::of_record::<BITS>(record, group, headers);
                add::<S, PLANES, ROWS>(&mut acc, scales, first, x_groups);
                x_groups = x_groups.wrapping_add(x.strip_rows);
                let mut second = GroupSums::<S, PLANES, ROWS>::zero();
                second.add_pair::<BITS, 2>(p, q, plane);
                second.add_pair::<BITS, 3>(p, q, plane);
                let scales = GroupScales::<S>::of_record::<BITS>(record, group + 1, headers);
                add::<S, PLANES, ROWS>(&mut acc, scales, second, x_groups);
                x_groups = x_groups.wrapping_add(x.strip_rows);
                p = p.add(block_bytes(BITS));
                q = q.wrapping_add(on);
                on = line_stride - on;
            }
            for (m, acc) in acc.into_iter().enumerate() {
                scaled::<S>(w, panel, row + m, *x.scales.as_ptr().add(row + m), acc, out);
            }
        }
    }
}

/// Adds a group's sums, times its scales, to the results.
#[inline(always)]
unsafe fn add<S: Simd, const PLANES: usize, const ROWS: usize>(
    acc: &mut [S::F; ROWS],
    scales: GroupScales<S>,
    sums: GroupSums<S, PLANES, ROWS>,
    x_groups: *const GroupOfRow,
) {
    let sums = sums.total();
    for m in 0..ROWS {
        acc[m] = scales.add(acc[m], sums[m], *x_groups.add(m));
    }
}
