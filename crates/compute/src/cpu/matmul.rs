//! Products of rows with packed matrices. For each output the additions happen in one order, whatever the number of
//! rows and whichever block of rows a row falls in: a sequence's numbers do not depend on what else is in the batch.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use super::dequantized;
use super::matrix::{Matrix, OCTET, STEP_BYTES, STEPS};
use super::quantize::QuantRows;
use super::simd::{LANES, Simd};
use crate::source::{Encoding, Float};

/// How far ahead of the arithmetic weights are asked for. The hardware's own prefetcher stops at each 4 KiB page.
const PREFETCH_BYTES: usize = 4096;

/// Where a panel's results go: row-major, `stride` floats from row to row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Output {
    pub data: *mut f32,
    pub stride: usize,
    pub rows: usize,
}

// SAFETY: only a pointer until it is written through, and each thread writes its own columns.
unsafe impl Sync for Output {}

impl Output {
    /// The same rows, from a column on.
    ///
    /// # Safety
    /// The rows have that many columns.
    pub(super) unsafe fn starting_at(&self, column: usize) -> Self {
        Self { data: self.data.add(column), ..*self }
    }
}

/// What a panel is multiplied with.
#[derive(Debug, Clone, Copy)]
pub(super) enum Input<'a> {
    /// Row-major floats, `stride` from row to row.
    Floats { data: *const f32, stride: usize },
    /// Quantized rows.
    Quantized(&'a QuantRows),
}

/// `out[r][panel's 16 columns] = x[r] · W` (+ bias) for all rows.
///
/// # Safety
/// The CPU has `S`; `x` and `out` hold `out.rows` rows of the matrix's shape; nobody else writes the panel's columns.
#[inline(always)]
pub(super) unsafe fn panel<S: Simd>(w: &Matrix, panel: usize, x: Input<'_>, out: Output) {
    let data = w.panels.as_ptr().add(panel * w.panel_bytes());
    match (w.encoding, x) {
        (Encoding::Float(float), Input::Floats { data: x, stride }) => match float {
            Float::F32 => floats::<S, F32>(w, panel, data, x, stride, out),
            Float::F16 => floats::<S, F16>(w, panel, data, x, stride, out),
            Float::BF16 => floats::<S, BF16>(w, panel, data, x, stride, out),
        },
        (Encoding::Affine { bits, .. }, Input::Quantized(x)) => match bits {
            2 => affine::<S, 2>(w, panel, data, x, out),
            3 => affine::<S, 3>(w, panel, data, x, out),
            4 => affine::<S, 4>(w, panel, data, x, out),
            5 => affine::<S, 5>(w, panel, data, x, out),
            6 => affine::<S, 6>(w, panel, data, x, out),
            _ => affine::<S, 8>(w, panel, data, x, out),
        },
        (Encoding::Affine { bits, .. }, Input::Floats { data: x, stride }) => match bits {
            2 => dequantized::panel::<S, 2>(w, panel, data, x, stride, out),
            3 => dequantized::panel::<S, 3>(w, panel, data, x, stride, out),
            4 => dequantized::panel::<S, 4>(w, panel, data, x, stride, out),
            5 => dequantized::panel::<S, 5>(w, panel, data, x, stride, out),
            6 => dequantized::panel::<S, 6>(w, panel, data, x, stride, out),
            _ => dequantized::panel::<S, 8>(w, panel, data, x, stride, out),
        },
        _ => unreachable!("the caller prepares the input that the encoding needs"),
    }
}

/// Adds the bias and stores 16 results of a row, fewer in the last panel.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd>(w: &Matrix, panel: usize, row: usize, acc: S::F, out: Output) {
    let first = panel * LANES;
    let count = LANES.min(w.rows - first);
    let to = out.data.add(row * out.stride + first);
    let mut lanes = [0.0; LANES];
    if count == LANES {
        let bias = if w.bias.is_empty() { S::splat(0.0) } else { S::load(w.bias.as_ptr().add(first)) };
        S::store(to, S::add(acc, bias));
    } else {
        S::store(lanes.as_mut_ptr(), acc);
        for (i, x) in lanes[..count].iter().enumerate() {
            *to.add(i) = x + w.bias.get(first + i).copied().unwrap_or(0.0);
        }
    }
}

trait Load {
    const BYTES: usize;
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
}
struct F32;
struct F16;
struct BF16;
impl Load for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load(p.cast())
    }
}
impl Load for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load_f16(p.cast())
    }
}
impl Load for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load_bf16(p.cast())
    }
}

#[inline(always)]
unsafe fn floats<S: Simd, L: Load>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    out: Output,
) {
    let mut row = 0;
    while row + 4 <= out.rows {
        float_rows::<S, L, 4>(w, panel, data, x, stride, row, out);
        row += 4;
    }
    while row < out.rows {
        float_rows::<S, L, 1>(w, panel, data, x, stride, row, out);
        row += 1;
    }
}

/// `M` rows. Four chains of additions a row hide the latency of the multiply-add.
#[inline(always)]
unsafe fn float_rows<S: Simd, L: Load, const M: usize>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    row: usize,
    out: Output,
) {
    const CHAINS: usize = 4;
    let mut acc = [[S::splat(0.0); CHAINS]; M];
    let whole = w.cols / CHAINS * CHAINS;
    for col in (0..whole).step_by(CHAINS) {
        for c in 0..CHAINS {
            let weights = L::load::<S>(data.add((col + c) * LANES * L::BYTES));
            for m in 0..M {
                let x = S::splat(*x.add((row + m) * stride + col + c));
                acc[m][c] = S::fma(weights, x, acc[m][c]);
            }
        }
    }
    for col in whole..w.cols {
        let weights = L::load::<S>(data.add(col * LANES * L::BYTES));
        for m in 0..M {
            acc[m][0] = S::fma(weights, S::splat(*x.add((row + m) * stride + col)), acc[m][0]);
        }
    }
    for (m, acc) in acc.into_iter().enumerate() {
        let sum = S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3]));
        finish::<S>(w, panel, row + m, sum, out);
    }
}

#[inline(always)]
unsafe fn affine<S: Simd, const BITS: u32>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: &QuantRows,
    out: Output,
) {
    let virtual_rows = out.rows * x.planes;
    let mut row = 0;
    while row + 8 <= virtual_rows {
        affine_rows::<S, BITS, 8>(w, panel, data, x, row, out);
        row += 8;
    }
    if row + 4 <= virtual_rows {
        affine_rows::<S, BITS, 4>(w, panel, data, x, row, out);
        row += 4;
    }
    if row + 2 <= virtual_rows {
        affine_rows::<S, BITS, 2>(w, panel, data, x, row, out);
        row += 2;
    }
    if row < virtual_rows {
        affine_rows::<S, BITS, 1>(w, panel, data, x, row, out);
    }
}

#[inline(always)]
pub(super) unsafe fn load_numbers<S: Simd>(float: Float, p: *const u8) -> S::F {
    match float {
        Float::F32 => F32::load::<S>(p),
        Float::F16 => F16::load::<S>(p),
        Float::BF16 => BF16::load::<S>(p),
    }
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

/// `M` virtual rows (rows × byte planes): integer sums over a group, then one scaled addition in floats for each group.
#[inline(always)]
unsafe fn affine_rows<S: Simd, const BITS: u32, const M: usize>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: &QuantRows,
    row: usize,
    out: Output,
) {
    let Encoding::Affine { group, scales, .. } = w.encoding else { unreachable!("chosen by the caller") };
    let number_bytes = scales.bytes();
    let (groups, per_group) = (w.cols / group, group / x.group);
    let x_groups = x.groups();
    let q = x.q.as_ptr().add(row * x.cols);
    let x_scales = x.scales.as_ptr().add(row * x_groups);
    let x_sums = x.sums.as_ptr().add(row * x_groups);
    let mut p = data;
    let mut acc = [S::splat(0.0); M];
    for g in 0..groups {
        let scale = load_numbers::<S>(scales, p);
        let bias = load_numbers::<S>(scales, p.add(LANES * number_bytes));
        p = p.add(2 * LANES * number_bytes);
        for part in 0..per_group {
            let x_group = g * per_group + part;
            let mut sums = [S::zero_i(); M];
            let mut col = x_group * x.group;
            for _ in 0..x.group / OCTET {
                // Later blocks of rows find the panel in the cache.
                if row == 0 {
                    for line in 0..BITS as usize {
                        S::prefetch(p.wrapping_add(PREFETCH_BYTES + line * STEP_BYTES));
                    }
                }
                let steps = octet::<S, BITS>(p);
                for (s, step) in steps.into_iter().enumerate() {
                    for m in 0..M {
                        sums[m] = S::dot4(sums[m], step, q.add(m * x.cols + col + 4 * s));
                    }
                }
                p = p.add(BITS as usize * STEP_BYTES);
                col += OCTET;
            }
            for m in 0..M {
                let product = S::mul(S::to_f(sums[m]), S::splat(*x_scales.add(m * x_groups + x_group)));
                acc[m] = S::fma(product, scale, acc[m]);
                acc[m] = S::fma(S::splat(*x_sums.add(m * x_groups + x_group)), bias, acc[m]);
            }
        }
    }
    if x.planes == 2 && M >= 2 {
        for m in 0..M / 2 {
            finish::<S>(w, panel, row / 2 + m, S::add(acc[2 * m], acc[2 * m + 1]), out);
        }
    } else {
        for (m, acc) in acc.into_iter().enumerate() {
            finish::<S>(w, panel, row + m, acc, out);
        }
    }
}
