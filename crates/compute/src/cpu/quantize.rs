//! Activations as small integers: what byte dot products multiply packed weights with.

use super::matrix::SendPtr;
use super::simd::{LANES, Simd};

/// How precisely activations enter products with quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// One byte each: about 0.5 % error in a product.
    Int8,
    /// Two bytes each, as two byte planes: about 0.002 % error, twice the arithmetic, the same memory traffic.
    #[default]
    Int16,
    /// Plain floats, with weights made floats as well: many times slower on prompts, and what the others are held against.
    F32,
}

impl Activations {
    /// Byte planes for each row; none for floats.
    pub const fn planes(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Int16 => 2,
            Self::F32 => 0,
        }
    }
}

/// Quantized rows: `x ≈ Σ_planes scale * q`, one scale for each group of a row and plane.
#[derive(Debug, Default)]
pub(super) struct QuantRows {
    /// `[rows × planes][cols]`.
    pub q: Vec<i8>,
    /// `[rows × planes][groups]`.
    pub scales: Vec<f32>,
    /// `scale × Σ q`, `[rows × planes][groups]`: what the weights' biases are multiplied with.
    pub sums: Vec<f32>,
    pub cols: usize,
    pub group: usize,
    pub planes: usize,
}

impl QuantRows {
    /// Room for `rows` rows; allocates only when more is needed than ever before.
    pub fn shape(&mut self, rows: usize, cols: usize, group: usize, activations: Activations) {
        let planes = activations.planes();
        self.q.resize(rows * planes * cols, 0);
        self.scales.resize(rows * planes * cols / group, 0.0);
        self.sums.resize(rows * planes * cols / group, 0.0);
        (self.cols, self.group, self.planes) = (cols, group, planes);
    }

    pub fn groups(&self) -> usize {
        self.cols / self.group
    }

    /// Pointers for threads that quantize different rows.
    pub fn writer(&mut self) -> RowWriter {
        RowWriter {
            q: SendPtr(self.q.as_mut_ptr()),
            scales: SendPtr(self.scales.as_mut_ptr()),
            sums: SendPtr(self.sums.as_mut_ptr()),
            cols: self.cols,
            group: self.group,
            planes: self.planes,
        }
    }
}

/// Where rows of a [`QuantRows`] are written.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowWriter {
    q: SendPtr<i8>,
    scales: SendPtr<f32>,
    sums: SendPtr<f32>,
    cols: usize,
    group: usize,
    planes: usize,
}

impl RowWriter {
    /// Quantizes one row.
    ///
    /// # Safety
    /// `x` holds the columns; no other thread writes this row; the CPU has `S`.
    #[inline(always)]
    pub unsafe fn quantize<S: Simd>(self, row: usize, x: *const f32) {
        let groups = self.cols / self.group;
        for g in 0..groups {
            // SAFETY: within the row, as the caller promises.
            unsafe {
                let x = x.add(g * self.group);
                let mut max = S::splat(0.0);
                for i in (0..self.group).step_by(LANES) {
                    max = S::max(max, S::abs(S::load(x.add(i))));
                }
                let max = S::reduce_max(max);
                let first = row * self.planes;
                if self.planes == 1 {
                    let (scale, inverse) = scales(max, 127.0);
                    let q = self.q.at(first * self.cols + g * self.group);
                    let mut sum = S::splat(0.0);
                    for i in (0..self.group).step_by(LANES) {
                        let v = S::round(S::mul(S::load(x.add(i)), S::splat(inverse)));
                        S::store_i8(q.add(i), v);
                        sum = S::add(sum, v);
                    }
                    *self.scales.at(first * groups + g) = scale;
                    *self.sums.at(first * groups + g) = scale * S::reduce_add(sum);
                } else {
                    let (scale, inverse) = scales(max, 127.0 * 256.0);
                    let high = self.q.at(first * self.cols + g * self.group);
                    let low = self.q.at((first + 1) * self.cols + g * self.group);
                    let (mut high_sum, mut low_sum) = (S::splat(0.0), S::splat(0.0));
                    for i in (0..self.group).step_by(LANES) {
                        let v = S::round(S::mul(S::load(x.add(i)), S::splat(inverse)));
                        // Rounded so that the remainder is in −128..=127.
                        let h = S::round(S::mul(S::add(v, S::splat(0.5)), S::splat(1.0 / 256.0)));
                        let l = S::fma(h, S::splat(-256.0), v);
                        S::store_i8(high.add(i), h);
                        S::store_i8(low.add(i), l);
                        high_sum = S::add(high_sum, h);
                        low_sum = S::add(low_sum, l);
                    }
                    for (plane, scale, sum) in [(0, 256.0 * scale, high_sum), (1, scale, low_sum)] {
                        *self.scales.at((first + plane) * groups + g) = scale;
                        *self.sums.at((first + plane) * groups + g) = scale * S::reduce_add(sum);
                    }
                }
            }
        }
    }
}

/// Scale and its inverse such that `max` becomes `limit`.
#[inline(always)]
fn scales(max: f32, limit: f32) -> (f32, f32) {
    let scale = max / limit;
    // Below this the inverse would overflow; such activations are zero for any purpose.
    if scale > 1e-37 { (scale, 1.0 / scale) } else { (0.0, 0.0) }
}
