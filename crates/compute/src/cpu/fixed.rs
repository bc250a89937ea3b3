//! Quantized weights as integers: `w = unit × (scale × q + (bias << shift))`, one unit for each row of a matrix.
//!
//! Every product is then one sum of integers. It is exact, so no order of additions, no batch, no instruction set changes
//! a bit of it, and matrix units can add up a whole row without a stop at each group. Measured from the largest weight
//! of its row, a weight moves by 2⁻¹⁵ at most, less with 5 bits and more: below what the file's 16-bit scales resolve.

use super::simd::LANES;

/// Bytes of a group's header in a panel: 16 scales and 16 biases of 16 bits.
pub(super) const HEADER_BYTES: usize = 2 * LANES * size_of::<i16>();

/// How weights of some width become integers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fixed {
    /// The largest weight of a row in units.
    limit: f64,
    /// Biases are stored in multiples of `1 << shift`.
    pub shift: u32,
    /// The middle of the levels, about which scales are rounded.
    middle: f64,
}

impl Fixed {
    /// For levels of `bits` bits. Up to 4 bits, a weight fits 16 bits; above, the scale is what has to fit 16.
    pub const fn of(bits: u32) -> Self {
        let levels = ((1 << bits) - 1) as f64;
        if bits <= 4 {
            // Room for rounding: half a unit for each level from the middle, half for the bias.
            Self { limit: 32_750.0, shift: 0, middle: levels / 2.0 }
        } else {
            Self { limit: 32_767.0 * levels / 2.0, shift: bits - 1, middle: levels / 2.0 }
        }
    }

    /// The unit of a row whose groups have these scales and biases; 0 if all weights are 0.
    pub fn unit(&self, groups: impl Iterator<Item = (f32, f32)>) -> f32 {
        let levels = 2.0 * self.middle;
        let largest = groups
            .map(|(scale, bias)| {
                let (first, last) = (f64::from(bias), f64::from(scale).mul_add(levels, f64::from(bias)));
                first.abs().max(last.abs())
            })
            // Not `f64::max`, which would lose a NaN: a file's garbage must show in the results.
            .fold(0.0, |a: f64, b| if a.is_nan() || b <= a { a } else { b });
        let unit = (largest / self.limit) as f32;
        // Upwards, so that the largest weight stays within the limit although the unit is rounded to f32.
        if unit < f32::MIN_POSITIVE { 0.0 } else { unit.next_up() }
    }

    /// A group's scale and bias in units.
    pub fn encode(&self, unit: f32, scale: f32, bias: f32) -> (i16, i16) {
        if unit == 0.0 {
            return (0, 0);
        }
        let (scale, bias) = (f64::from(scale) / f64::from(unit), f64::from(bias) / f64::from(unit));
        let rounded = scale.round_ties_even();
        // What the scale lost is made up for in the middle of the levels, so that it weighs half.
        let bias = (bias + (scale - rounded) * self.middle) / f64::from(1 << self.shift);
        (rounded as i16, bias.round_ties_even() as i16)
    }

    /// The weight that level `q` stands for, in units.
    pub fn weight(&self, q: u8, scale: i16, bias: i16) -> i32 {
        i32::from(q) * i32::from(scale) + (i32::from(bias) << self.shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_fit_their_bits_and_are_near_their_value() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let fixed = Fixed::of(bits);
            let last = (1u16 << bits) as f32 - 1.0;
            for (scale, bias) in [(0.01, -0.08), (-0.02, 0.16), (0.003, 0.0), (1e-3, 7.0), (2.0 / last, -1.0)]
            {
                let unit = fixed.unit([(scale, bias), (0.001, -0.004)].into_iter());
                let (s, b) = fixed.encode(unit, scale, bias);
                for q in 0..=(last as u8) {
                    let weight = fixed.weight(q, s, b);
                    let room = 1 << (15 + fixed.shift);
                    assert!((-room..room).contains(&weight), "{bits} bits: {weight}");
                    let (value, expected) = (
                        f64::from(weight) * f64::from(unit),
                        f64::from(q) * f64::from(scale) + f64::from(bias),
                    );
                    let largest = f64::from(unit) * fixed.limit;
                    let error = (value - expected).abs() / largest;
                    assert!(
                        error < 2e-4,
                        "{bits} bits, scale {scale}, bias {bias}: level {q} is off by {error}"
                    );
                }
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_of_nearly_nothing_are_zero() {
        let fixed = Fixed::of(4);
        for row in [(0.0, 0.0), (1e-42, -1e-42)] {
            let unit = fixed.unit([row].into_iter());
            assert_eq!((unit, fixed.encode(unit, row.0, row.1)), (0.0, (0, 0)));
        }
    }
}
