//! Rounding of what caches keep to few bits, in groups of columns (DeepSeek V4.1).

/// How a group of columns is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To E4M3 floats; 32 of them have a power of two as their scale.
    E4m3,
    /// To E2M1 floats; 32 of them have a power of two as their scale.
    E2m1,
    /// To E2M1 floats; 16 of them have an E4M3 float as their scale.
    ScaledE2m1,
}

/// A format of floats.
struct Format {
    /// Bits of the mantissa that are stored.
    mantissa: i32,
    /// Exponent of the least number that is not subnormal.
    least_exponent: i32,
    /// The largest number.
    most: f32,
}

const E4M3: Format = Format { mantissa: 3, least_exponent: -6, most: 448.0 };
const E2M1: Format = Format { mantissa: 1, least_exponent: 0, most: 6.0 };

/// Minimum of a group's largest number for its scale, so that no scale is zero.
const LEAST_E4M3: f32 = 1e-4;
const LEAST_E2M1: f32 = 6.0 * f32::MIN_POSITIVE;
/// 6 times the least E4M3 float.
const LEAST_SCALED_E2M1: f32 = 6.0 / 512.0;

impl Format {
    /// The nearest number; of two, the even one.
    fn nearest(&self, x: f32) -> f32 {
        let exponent = ((x.to_bits() >> 23) & 0xFF) as i32 - 127;
        let step = power_of_two(exponent.max(self.least_exponent) - self.mantissa);
        ((x / step).round_ties_even() * step).clamp(-self.most, self.most)
    }
}

/// `2^exponent`, for exponents of normal floats.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The least power of two that is not below a positive number.
const fn power_above(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0x7F_FFFF) & 0xFF80_0000)
}

impl Rounding {
    /// Columns of a group.
    pub const fn group(self) -> usize {
        match self {
            Self::E4m3 | Self::E2m1 => 32,
            Self::ScaledE2m1 => 16,
        }
    }

    /// Rounds whole groups of columns in place.
    pub fn apply(self, columns: &mut [f32]) {
        for group in columns.chunks_exact_mut(self.group()) {
            let largest = group.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
            let (format, scale) = match self {
                Self::E4m3 => (E4M3, power_above(largest.max(LEAST_E4M3) / E4M3.most)),
                Self::E2m1 => (E2M1, power_above(largest.max(LEAST_E2M1) / E2M1.most)),
                Self::ScaledE2m1 => (E2M1, E4M3.nearest(largest.max(LEAST_SCALED_E2M1) / E2M1.most)),
            };
            group.iter_mut().for_each(|x| *x = format.nearest(*x / scale) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(rounding: Rounding, numbers: &[f32]) -> Vec<f32> {
        let mut columns = numbers.to_vec();
        columns.resize(rounding.group(), 0.0);
        rounding.apply(&mut columns);
        columns.truncate(numbers.len());
        columns
    }

    #[test]
    fn four_bits_have_eight_magnitudes_and_ties_go_to_even() {
        let numbers = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.26, -1.1];
        let expected = [6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.5, -1.0];
        assert_eq!(rounded(Rounding::E2m1, &numbers), expected);
        assert_eq!(rounded(Rounding::ScaledE2m1, &numbers), expected, "the scale is 1");
        // 6.1 needs a scale of 2.
        assert_eq!(rounded(Rounding::E2m1, &[6.1, 1.1]), [6.0, 1.0]);
    }

    #[test]
    fn a_scale_of_four_bits_is_itself_rounded() {
        // 7 / 6 is rounded to 1.125. Divided by that, 7 is 6.2, but the maximum is 6.
        assert_eq!(rounded(Rounding::ScaledE2m1, &[7.0, 1.7]), [6.75, 1.6875]);
        assert_eq!(rounded(Rounding::ScaledE2m1, &[1e-6, 0.0]), [0.0, 0.0]);
    }

    #[test]
    fn eight_bits_keep_three_after_the_first() {
        assert_eq!(
            rounded(Rounding::E4m3, &[448.0, 17.0, 19.0, 1.0625, -0.002]),
            [448.0, 16.0, 20.0, 1.0, -0.001_953_125]
        );
        assert_eq!(rounded(Rounding::E4m3, &[449.0]), [448.0], "the scale is 2, of which 224.5 is 224");
        assert!(rounded(Rounding::E4m3, &[f32::NAN, 1.0])[0].is_nan(), "what is no number stays none");
    }
}
