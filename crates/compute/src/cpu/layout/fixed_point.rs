//! Quantized weights as integers: `w = unit × (scale × level + (offset << shift))`, with one unit
//! for each row of a matrix.
//!
//! A group's scale and offset take two bytes each, in a format that every instruction set converts
//! to floats. Packing moves a weight by less than 2⁻¹² of the largest weight of its row: below the
//! resolution of the file's 16-bit scales.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::cpu::layout::matrix::level_bits;
use crate::cpu::simd::LANES;

/// Bytes of a group's header in a panel: 16 scales and 16 offsets of 16 bits.
pub(in crate::cpu) const HEADER_BYTES: usize = 2 * LANES * size_of::<i16>();

/// One number for each row of a panel.
type Numbers = [f32; LANES];

/// How weights with levels of one width become integers.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct FixedPoint {
    /// Bits of a level.
    pub bits: u32,
    /// The largest weight of a row in units.
    limit: f64,
    /// Offsets are stored in multiples of `1 << shift`.
    pub shift: u32,
    /// The middle level. Rounding a scale moves the weights symmetrically around it.
    middle: f64,
    /// One over `1 << shift`.
    offset_units: f64,
    /// The offset of a group whose level `1 << (bits - 1)` is 0, for each unit of its scale.
    symmetric: i16,
}

impl FixedPoint {
    /// For levels of `bits` bits. Up to 4 bits, a weight fits 16 bits; above, only the scale does.
    pub const fn of(bits: u32) -> Self {
        let bits = level_bits(bits);
        let (levels, zero) = (((1 << bits) - 1) as f64, 1 << (bits - 1));
        if bits <= 4 {
            // Room for rounding: half a unit for each level from the middle, half for the offset.
            let (limit, middle) = (32_750.0, levels / 2.0);
            Self { bits, limit, shift: 0, middle, offset_units: 1.0, symmetric: -zero }
        } else {
            let shift = bits - 1;
            let offset_units = 1.0 / (1 << shift) as f64;
            let symmetric = -(zero >> shift);
            let (limit, middle) = (32_767.0 * levels / 2.0, levels / 2.0);
            Self { bits, limit, shift, middle, offset_units, symmetric }
        }
    }

    /// The units of 16 rows whose groups have these scales and offsets; 0 if all weights of a row
    /// are 0.
    #[inline(always)]
    pub fn units<'a>(&self, groups: impl Iterator<Item = (&'a Numbers, &'a Numbers)>) -> Numbers {
        let levels = 2.0 * self.middle;
        let mut largest = [0.0f64; LANES];
        for (scales, offsets) in groups {
            for lane in 0..LANES {
                let (scale, offset) = (f64::from(scales[lane]), f64::from(offsets[lane]));
                let (first, last) = (offset.abs(), (scale * levels + offset).abs());
                // `f64::max` would lose a NaN. Garbage in a file must show in the results.
                let here = if last > first || last.is_nan() { last } else { first };
                let before = largest[lane];
                largest[lane] = if before.is_nan() || here <= before { before } else { here };
            }
        }
        largest.map(|largest| {
            let unit = (largest / self.limit) as f32;
            // Rounded up, so that the largest weight stays within the limit.
            if unit < f32::MIN_POSITIVE { 0.0 } else { unit.next_up() }
        })
    }

    /// Reciprocal units, for [`FixedPoint::encode`]; 0 for a unit of 0.
    #[inline(always)]
    pub fn inverse(units: &Numbers) -> [f64; LANES] {
        units.map(|unit| if unit == 0.0 { 0.0 } else { 1.0 / f64::from(unit) })
    }

    /// The scales and offsets of a group of 16 rows in units.
    #[inline(always)]
    pub fn encode(&self, inverse: &[f64; LANES], scales: &Numbers, offsets: &Numbers) -> [[i16; LANES]; 2] {
        // Adding this leaves the nearest integer in the lowest bits, ties to even.
        // (`f64::round_ties_even` is a function call on instruction sets without such an
        // instruction, and saturating casts are not vectorised.)
        const ROUNDING: f64 = 1.5 * (1u64 << 52) as f64;
        let mut encoded = [[0; LANES]; 2];
        for lane in 0..LANES {
            let (scale, offset) =
                (f64::from(scales[lane]) * inverse[lane], f64::from(offsets[lane]) * inverse[lane]);
            let rounded = scale + ROUNDING;
            // The offset corrects the scale's rounding error at the middle level, which halves the
            // largest error.
            let offset = offset + (scale - (rounded - ROUNDING)) * self.middle;
            encoded[0][lane] = rounded.to_bits() as i16;
            encoded[1][lane] = (offset * self.offset_units + ROUNDING).to_bits() as i16;
        }
        encoded
    }

    /// The scales and offsets of a group of 16 rows whose level `1 << (bits - 1)` is 0.
    #[inline(always)]
    pub fn encode_symmetric(&self, inverse: &[f64; LANES], scales: &Numbers) -> [[i16; LANES]; 2] {
        let [scales, _] = self.encode(inverse, scales, &[0.0; LANES]);
        [scales, scales.map(|scale| self.symmetric_offset(scale))]
    }

    /// The offset of a group whose level `1 << (bits - 1)` is 0.
    #[inline(always)]
    pub const fn symmetric_offset(&self, scale: i16) -> i16 {
        // Garbage in a file leaves a scale that is any number.
        scale.wrapping_mul(self.symmetric)
    }

    /// These units as powers of two, by which factors can be divided without rounding.
    #[inline(always)]
    pub fn powers_of_two(units: Numbers) -> Numbers {
        const FRACTION: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
        units.map(|unit| match unit.is_finite() {
            true => f32::from_bits((unit.to_bits() + FRACTION) & !FRACTION),
            false => unit,
        })
    }

    /// The factors of 16 rows in units: those of scales, and those of offsets in multiples of
    /// `1 << shift`. A factor of numbers that are all 0 may be too large for f16.
    pub fn encode_factors(&self, inverse: &[f64; LANES], factors: &[Numbers; 2]) -> [[f16; LANES]; 2] {
        let limit = f16::MAX.to_f32();
        let mut encoded = [[f16::ZERO; LANES]; 2];
        for ((to, factors), unit) in encoded.iter_mut().zip(factors).zip([1.0, self.offset_units]) {
            let in_units: Numbers = std::array::from_fn(|lane| {
                ((f64::from(factors[lane]) * inverse[lane] * unit) as f32).clamp(-limit, limit)
            });
            to.convert_from_f32_slice(&in_units);
        }
        encoded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_fit_their_bits_and_stay_near_their_value() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let fixed = FixedPoint::of(bits);
            let last = (1u16 << bits) as f32 - 1.0;
            for (scale, offset) in
                [(0.01, -0.08), (-0.02, 0.16), (0.003, 0.0), (1e-3, 7.0), (2.0 / last, -1.0)]
            {
                let (unit, s, b) = encoded(&fixed, [(scale, offset), (0.001, -0.004)]);
                for q in 0..=(last as u8) {
                    let weight = i32::from(q) * i32::from(s) + (i32::from(b) << fixed.shift);
                    let room = 1 << (15 + fixed.shift);
                    assert!((-room..room).contains(&weight), "{bits} bits: {weight}");
                    let (value, expected) = (
                        f64::from(weight) * f64::from(unit),
                        f64::from(q) * f64::from(scale) + f64::from(offset),
                    );
                    let largest = f64::from(unit) * fixed.limit;
                    let error = (value - expected).abs() / largest;
                    assert!(
                        error < 2e-4,
                        "{bits} bits, scale {scale}, offset {offset}: level {q} is off by {error}"
                    );
                }
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_subnormals_are_zero() {
        let fixed = FixedPoint::of(4);
        for row in [(0.0, 0.0), (1e-42, -1e-42)] {
            assert_eq!(encoded(&fixed, [row, row]), (0.0, 0, 0));
        }
    }

    #[test]
    fn nan_and_infinity_show_in_the_unit() {
        for garbage in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for row in [(garbage, 0.0), (0.1, garbage)] {
                for groups in [[row, (0.1, -0.8)], [(0.1, -0.8), row]] {
                    let (unit, ..) = encoded(&FixedPoint::of(4), groups);
                    assert!(!unit.is_finite(), "{groups:?}: {unit}");
                }
            }
        }
    }

    /// The unit, scale and offset of the first group of a row; the panel's other rows have other
    /// values.
    fn encoded(fixed: &FixedPoint, row: [(f32, f32); 2]) -> (f32, i16, i16) {
        const LANE: usize = 5;
        let lanes = |x: f32| std::array::from_fn(|lane| if lane == LANE { x } else { lane as f32 });
        let groups = row.map(|(scale, offset)| (lanes(scale), lanes(offset)));
        let units = fixed.units(groups.iter().map(|(scales, offsets)| (scales, offsets)));
        let [scales, offsets] = fixed.encode(&FixedPoint::inverse(&units), &groups[0].0, &groups[0].1);
        (units[LANE], scales[LANE], offsets[LANE])
    }
}
