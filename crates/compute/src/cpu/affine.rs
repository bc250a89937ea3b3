//! Products of quantized rows with quantized panels, by byte dot products. All sums are exact integers: within a group in
//! 32 bits, over groups in the 53 bits of a double.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::ops::Range;

use super::fixed::{Fixed, HEADER_BYTES};
use super::matmul::{Output, finish, of_bits};
use super::matrix::{Matrix, OCTET, STEP_BYTES, STEPS};
use super::quantize::{BLOCK, QuantRows};
use super::simd::{LANES, Simd};

/// How far ahead of the arithmetic weights are asked for. The hardware's own prefetcher stops at each 4 KiB page.
pub(super) const PREFETCH_BYTES: usize = 4096;

/// As [`super::matmul::panel`], for a quantized matrix.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn panel<S: Simd>(
    bits: u32,
    w: &Matrix,
    panel: usize,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
) {
    of_bits!(bits, [blocks], [S], (w, panel, x, rows, out));
}

/// Cuts the rows into blocks, which divide a tile.
#[inline(always)]
unsafe fn blocks<S: Simd, const BITS: u32>(
    w: &Matrix,
    panel: usize,
    x: &QuantRows,
    range: Range<usize>,
    out: Output,
) {
    if x.planes == 1 {
        blocks_of_planes::<S, BITS, 1>(w, panel, x, range, out);
    } else {
        blocks_of_planes::<S, BITS, 2>(w, panel, x, range, out);
    }
}

#[inline(always)]
unsafe fn blocks_of_planes<S: Simd, const BITS: u32, const PLANES: usize>(
    w: &Matrix,
    panel: usize,
    x: &QuantRows,
    range: Range<usize>,
    out: Output,
) {
    let mut row = range.start;
    while row < range.end {
        let left = (range.end - row).min(x.tile_rows - row % x.tile_rows);
        row += match left {
            1 => rows::<S, BITS, PLANES, 1>(w, panel, x, row, out),
            2 | 3 => rows::<S, BITS, PLANES, 2>(w, panel, x, row, out),
            4..8 => rows::<S, BITS, PLANES, 4>(w, panel, x, row, out),
            _ if S::BLOCK_ROWS == 4 => rows::<S, BITS, PLANES, 4>(w, panel, x, row, out),
            12.. if PLANES == 1 => rows::<S, BITS, 1, 12>(w, panel, x, row, out),
            _ => rows::<S, BITS, PLANES, 8>(w, panel, x, row, out),
        };
    }
}

/// `ROWS` rows of a tile, from `row` on.
#[inline(always)]
unsafe fn rows<S: Simd, const BITS: u32, const PLANES: usize, const ROWS: usize>(
    w: &Matrix,
    panel: usize,
    x: &QuantRows,
    row: usize,
    out: Output,
) -> usize {
    let fixed = Fixed::of(BITS);
    let bias_unit = f64::from(1u32 << fixed.shift);
    let (groups, group, block_bytes, plane) = (x.groups(), x.group, x.block_bytes(), x.tile_rows * BLOCK);
    let q = x.bytes().add(x.offset(row));
    let x_sums = x.sums.as_ptr().add(row * groups);
    let mut p = w.panels.as_ptr().add(panel * w.panel_bytes());
    let mut acc = [[0.0f64; LANES]; ROWS];
    for g in 0..groups {
        let header = p.cast::<i16>();
        S::prefetch(p.wrapping_add(PREFETCH_BYTES));
        let (scales, biases) = (S::widen(header, 1.0), S::widen(header.add(LANES), bias_unit));
        p = p.add(HEADER_BYTES);
        let mut sums = [[S::zero_i(); PLANES]; ROWS];
        let mut more_sums = sums;
        for col in (g * group..(g + 1) * group).step_by(OCTET) {
            for line in 0..BITS as usize {
                S::prefetch(p.wrapping_add(PREFETCH_BYTES + line * STEP_BYTES));
            }
            let x = q.add(col / BLOCK * block_bytes + col % BLOCK);
            // Many rows come from the second-level cache; a prefetch past the last block does no harm.
            if ROWS >= 8 && col % BLOCK == 0 {
                for line in 0..ROWS * PLANES {
                    let (m, k) = (line % ROWS, line / ROWS);
                    S::prefetch_near(x.wrapping_add(block_bytes + k * plane + m * BLOCK).cast());
                }
            }
            let steps = octet::<S, BITS>(p);
            // A dot product takes as long as several begin, so that the sums of few rows come in two chains. Written out: the
            // compiler would keep sums that a loop indexes in memory.
            let others = if ROWS <= 4 { &mut more_sums } else { &mut sums };
            dots::<S, PLANES, ROWS>(others, steps[1], x.add(4), plane);
            dots::<S, PLANES, ROWS>(others, steps[3], x.add(12), plane);
            dots::<S, PLANES, ROWS>(others, steps[5], x.add(20), plane);
            dots::<S, PLANES, ROWS>(others, steps[7], x.add(28), plane);
            dots::<S, PLANES, ROWS>(&mut sums, steps[0], x, plane);
            dots::<S, PLANES, ROWS>(&mut sums, steps[2], x.add(8), plane);
            dots::<S, PLANES, ROWS>(&mut sums, steps[4], x.add(16), plane);
            dots::<S, PLANES, ROWS>(&mut sums, steps[6], x.add(24), plane);
            p = p.add(BITS as usize * STEP_BYTES);
        }
        for m in 0..ROWS {
            if ROWS <= 4 {
                for k in 0..PLANES {
                    sums[m][k] = S::add_i(sums[m][k], more_sums[m][k]);
                }
            }
            S::add_exactly(&mut acc[m], sums[m], &scales, &biases, *x_sums.add(m * groups + g));
        }
    }
    for (m, acc) in acc.iter().enumerate() {
        scaled::<S>(w, panel, row + m, *x.scales.as_ptr().add(row + m), acc, out);
    }
    ROWS
}

/// Adds a step's products with 4 columns of each row at `x`.
#[inline(always)]
unsafe fn dots<S: Simd, const PLANES: usize, const ROWS: usize>(
    sums: &mut [[S::I; PLANES]; ROWS],
    step: S::B,
    x: *const i8,
    plane: usize,
) {
    for m in 0..ROWS {
        for k in 0..PLANES {
            sums[m][k] = S::dot4(sums[m][k], step, x.add(k * plane + m * BLOCK));
        }
    }
}

/// Scales a row's 16 exact sums and finishes them.
///
/// # Safety
/// The output holds the row and the panel's columns; the CPU has `S`.
#[inline(always)]
pub(super) unsafe fn scaled<S: Simd>(
    w: &Matrix,
    panel: usize,
    row: usize,
    scale: f32,
    sums: &[f64; LANES],
    out: Output,
) {
    let units = &w.units[panel * LANES..(panel + 1) * LANES];
    let mut results = [0.0; LANES];
    for lane in 0..LANES {
        results[lane] = sums[lane] as f32 * units[lane] * scale;
    }
    finish::<S>(w, panel, row, S::load(results.as_ptr()), out);
}

/// The 8 steps of an octet, as bytes.
#[inline(always)]
pub(super) unsafe fn octet<S: Simd, const BITS: u32>(p: *const u8) -> [S::B; STEPS] {
    let line = |i: usize| S::load_b(p.add(i * STEP_BYTES));
    match BITS {
        2 => quarters::<S>([line(0), line(1)]),
        3 => {
            let (low, high) = (quarters::<S>([line(0), line(1)]), eighths::<S>(line(2)));
            std::array::from_fn(|s| S::or_shl::<2>(low[s], high[s]))
        }
        4 => halves::<S>([line(0), line(1), line(2), line(3)]),
        5 => {
            let (low, high) = (halves::<S>([line(0), line(1), line(2), line(3)]), eighths::<S>(line(4)));
            std::array::from_fn(|s| S::or_shl::<4>(low[s], high[s]))
        }
        6 => {
            let low = halves::<S>([line(0), line(1), line(2), line(3)]);
            let high = quarters::<S>([line(4), line(5)]);
            std::array::from_fn(|s| S::or_shl::<4>(low[s], high[s]))
        }
        _ => std::array::from_fn(line),
    }
}

#[inline(always)]
unsafe fn halves<S: Simd>(lines: [S::B; 4]) -> [S::B; STEPS] {
    std::array::from_fn(|s| match s % 2 {
        0 => S::bits::<0, 4>(lines[s / 2]),
        _ => S::bits::<4, 4>(lines[s / 2]),
    })
}

#[inline(always)]
unsafe fn quarters<S: Simd>(lines: [S::B; 2]) -> [S::B; STEPS] {
    std::array::from_fn(|s| match s % 4 {
        0 => S::bits::<0, 2>(lines[s / 4]),
        1 => S::bits::<2, 2>(lines[s / 4]),
        2 => S::bits::<4, 2>(lines[s / 4]),
        _ => S::bits::<6, 2>(lines[s / 4]),
    })
}

#[inline(always)]
unsafe fn eighths<S: Simd>(line: S::B) -> [S::B; STEPS] {
    [
        S::bits::<0, 1>(line),
        S::bits::<1, 1>(line),
        S::bits::<2, 1>(line),
        S::bits::<3, 1>(line),
        S::bits::<4, 1>(line),
        S::bits::<5, 1>(line),
        S::bits::<6, 1>(line),
        S::bits::<7, 1>(line),
    ]
}
