//! MXFP4 of the OCP Microscaling specification 1.0: E2M1 numbers, 32 of which share an E8M0 scale.
//!
//! E2M1 numbers are multiples of 1/2 from −6 to 6. They become the levels 4 to 28, with half of the
//! scale, so that no weight changes. The middle level is 0, so that no offset is needed.

use super::{GroupReader, GroupScale, MatrixSource, Strided};

/// Numbers that share a scale.
pub(super) const GROUP: usize = 32;
/// Bits of a level.
pub(crate) const LEVEL_BITS: u32 = 5;
/// The level of 0.
const ZERO: u8 = 1 << (LEVEL_BITS - 1);

/// Levels of the 16 codes: bit 3 is the sign, bits 1 and 2 the exponent, bit 0 the fraction. Twice
/// 0, ½, 1, 1½, 2, 3, 4, 6.
pub(crate) const LEVELS: [u8; 16] = {
    let doubled = [0, 1, 2, 3, 4, 6, 8, 12];
    let mut levels = [0; 16];
    let mut code = 0;
    while code < 8 {
        levels[code] = ZERO + doubled[code];
        levels[code + 8] = ZERO - doubled[code];
        code += 1;
    }
    levels
};

/// The code of a level.
#[inline(always)]
pub(crate) const fn code(level: u8) -> u8 {
    let distance = level.wrapping_sub(ZERO);
    let size = if level < ZERO { distance.wrapping_neg() } else { distance };
    // 6, 8 and 12 have the codes 5, 6 and 7. Without branches: packing does this for vectors.
    let code = size - (size > 4) as u8 - (size > 6) as u8 - 3 * (size > 8) as u8;
    code | ((level < ZERO) as u8) << 3
}

/// Rows of nibbles, the earlier column in the lower one, with a row of E8M0 bytes apart.
pub(super) struct Mxfp4Reader<'a> {
    weight: Strided<'a>,
    scales: Strided<'a>,
}

impl<'a> Mxfp4Reader<'a> {
    pub fn new(source: &MatrixSource<'a>) -> Self {
        let Some(scales) = source.scales else { unreachable!("MXFP4 sources have scales") };
        Self { weight: source.weight, scales }
    }
}

impl GroupReader for Mxfp4Reader<'_> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let codes = &self.weight.row(row)[group * GROUP / 2..][..GROUP / 2];
        levels_of(codes, levels);
        scale(self.scales.row(row)[group])
    }

    fn scales(&mut self, row: usize, _width: usize, scales: &mut [GroupScale]) {
        for (to, bits) in scales.iter_mut().zip(self.scales.row(row)) {
            *to = scale(*bits);
        }
    }
}

/// The levels of pairs of codes, the earlier one in the lower nibble.
#[inline(always)]
pub(super) fn levels_of(codes: &[u8], levels: &mut [u8]) {
    for (pair, code) in levels.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = [LEVELS[usize::from(code & 15)], LEVELS[usize::from(code >> 4)]];
    }
}

/// The scale of a group whose E8M0 scale is `bits`.
#[inline(always)]
pub(super) fn scale(bits: u8) -> GroupScale {
    halved(e8m0(bits))
}

/// The scale of a group whose numbers are multiplied by `scale`: levels are twice the numbers.
#[inline(always)]
pub(super) fn halved(scale: f32) -> GroupScale {
    let scale = scale / 2.0;
    GroupScale { scale, offset: -f32::from(ZERO) * scale }
}

/// `2^(bits − 127)`; 255 is NaN.
pub(super) fn e8m0(bits: u8) -> f32 {
    match bits {
        // 2^-127 is subnormal in f32.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(bits) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Encoding, RowOrder};

    /// The values of the 16 codes, from the table in the specification.
    const VALUES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

    #[test]
    fn every_level_has_its_code() {
        for (index, level) in LEVELS.into_iter().enumerate() {
            // 8 is -0, whose level is that of 0.
            assert_eq!(usize::from(code(level)), if index == 8 { 0 } else { index });
        }
    }

    #[test]
    fn every_code_and_scale_has_its_value() {
        for exponent in [1, 100, 127, 128, 250] {
            let codes: Vec<u8> = (0..16).map(|i| (2 * i % 16) | (((2 * i + 1) % 16) << 4)).collect();
            let scales = [exponent];
            let source = MatrixSource {
                rows: 1,
                cols: 32,
                encoding: Encoding::Mxfp4,
                weight: Strided { bytes: &codes, stride: 16, row_bytes: 16 },
                scales: Some(Strided { bytes: &scales, stride: 1, row_bytes: 1 }),
                offsets: None,
                row_order: RowOrder::AsStored,
                first_row: 0,
                bias: None,
                pages: None,
            };
            let mut values = [0.0; 32];
            source.dequantize_row(0, &mut values);
            let scale = 2f32.powi(i32::from(exponent) - 127);
            let expected: Vec<f32> = VALUES.iter().chain(&VALUES).map(|value| value * scale).collect();
            assert_eq!(values[..], expected, "scale {exponent}");
        }
        assert_eq!(e8m0(0), 2f32.powi(-127));
        assert!(e8m0(255).is_nan());
    }
}
