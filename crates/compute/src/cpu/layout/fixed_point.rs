//! Quantized weights as integers: `w = unit × (scale × q + (bias << shift))`, one unit for each row of a matrix.
//!
//! A group's scale and bias take two bytes each and are numbers that any vector can make floats of. Measured from the largest weight
//! of its row, a weight moves by 2⁻¹⁵ at most, less with 5 bits and more: below what the file's 16-bit scales resolve.

use crate::cpu::simd::LANES;

/// Bytes of a group's header in a panel: 16 scales and 16 biases of 16 bits.
pub(in crate::cpu) const HEADER_BYTES: usize = 2 * LANES * size_of::<i16>();

/// One number for each row of a panel.
type Numbers = [f32; LANES];

/// How weights of some width become integers.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Fixed {
    /// The largest weight of a row in units.
    limit: f64,
    /// Biases are stored in multiples of `1 << shift`.
    pub shift: u32,
    /// The middle of the levels, about which scales are rounded.
    middle: f64,
    /// One over `1 << shift`.
    bias_units: f64,
}

impl Fixed {
    /// For levels of `bits` bits. Up to 4 bits, a weight fits 16 bits; above, the scale is what has to fit 16.
    pub const fn of(bits: u32) -> Self {
        let levels = ((1 << bits) - 1) as f64;
        if bits <= 4 {
            // Room for rounding: half a unit for each level from the middle, half for the bias.
            Self { limit: 32_750.0, shift: 0, middle: levels / 2.0, bias_units: 1.0 }
        } else {
            let shift = bits - 1;
            let bias_units = 1.0 / (1 << shift) as f64;
            Self { limit: 32_767.0 * levels / 2.0, shift, middle: levels / 2.0, bias_units }
        }
    }

    /// The units of 16 rows whose groups have these scales and biases; 0 if all weights of a row are 0.
    #[inline(always)]
    pub fn units<'a>(&self, groups: impl Iterator<Item = (&'a Numbers, &'a Numbers)>) -> Numbers {
        let levels = 2.0 * self.middle;
        let mut largest = [0.0f64; LANES];
        for (scales, biases) in groups {
            for lane in 0..LANES {
                let (scale, bias) = (f64::from(scales[lane]), f64::from(biases[lane]));
                let (first, last) = (bias.abs(), (scale * levels + bias).abs());
                // Not `f64::max`, which would lose a NaN: a file's garbage must show in the results.
                let here = if last > first || last.is_nan() { last } else { first };
                let before = largest[lane];
                largest[lane] = if before.is_nan() || here <= before { before } else { here };
            }
        }
        largest.map(|largest| {
            let unit = (largest / self.limit) as f32;
            // Upwards, so that the largest weight stays within the limit although the unit is rounded to f32.
            if unit < f32::MIN_POSITIVE { 0.0 } else { unit.next_up() }
        })
    }

    /// What [`Fixed::encode`] multiplies with instead of dividing by the units.
    #[inline(always)]
    pub fn inverse(units: &Numbers) -> [f64; LANES] {
        units.map(|unit| if unit == 0.0 { 0.0 } else { 1.0 / f64::from(unit) })
    }

    /// The scales and biases of a group of 16 rows in units.
    #[inline(always)]
    pub fn encode(&self, inverse: &[f64; LANES], scales: &Numbers, biases: &Numbers) -> [[i16; LANES]; 2] {
        // Added to a number, it leaves the nearest integer in the lowest bits, ties to even. (`f64::round_ties_even` is a call
        // where the instruction set has no such instruction, and casts that saturate are not vectorised.)
        const ROUNDING: f64 = 1.5 * (1u64 << 52) as f64;
        let mut encoded = [[0; LANES]; 2];
        for lane in 0..LANES {
            let (scale, bias) =
                (f64::from(scales[lane]) * inverse[lane], f64::from(biases[lane]) * inverse[lane]);
            let rounded = scale + ROUNDING;
            // What the scale lost is made up for in the middle of the levels, so that it weighs half.
            let bias = bias + (scale - (rounded - ROUNDING)) * self.middle;
            encoded[0][lane] = rounded.to_bits() as i16;
            encoded[1][lane] = (bias * self.bias_units + ROUNDING).to_bits() as i16;
        }
        encoded
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
                let (unit, s, b) = encoded(&fixed, [(scale, bias), (0.001, -0.004)]);
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
            assert_eq!(encoded(&fixed, [row, row]), (0.0, 0, 0));
        }
    }

    #[test]
    fn garbage_shows() {
        for garbage in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for row in [(garbage, 0.0), (0.1, garbage)] {
                for groups in [[row, (0.1, -0.8)], [(0.1, -0.8), row]] {
                    let (unit, ..) = encoded(&Fixed::of(4), groups);
                    assert!(!unit.is_finite(), "{groups:?}: {unit}");
                }
            }
        }
    }

    /// A row's unit, and its first group in it; the rows beside it are others.
    fn encoded(fixed: &Fixed, row: [(f32, f32); 2]) -> (f32, i16, i16) {
        const LANE: usize = 5;
        let lanes = |x: f32| std::array::from_fn(|lane| if lane == LANE { x } else { lane as f32 });
        let groups = row.map(|(scale, bias)| (lanes(scale), lanes(bias)));
        let units = fixed.units(groups.iter().map(|(scales, biases)| (scales, biases)));
        let [scales, biases] = fixed.encode(&Fixed::inverse(&units), &groups[0].0, &groups[0].1);
        (units[LANE], scales[LANE], biases[LANE])
    }
}
