//! Formats of plain numbers.

use half::bf16;

/// A floating-point format of stored numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper 16 bits of an [`Float::F32`].
    BF16,
}

impl Float {
    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// The number at `index` of little-endian numbers.
    #[inline]
    pub(super) fn at(self, bytes: &[u8], index: usize) -> f32 {
        let mut number = [0.0];
        self.decode(&bytes[index * self.bytes()..][..self.bytes()], &mut number);
        number[0]
    }

    /// Decodes little-endian numbers. `bytes` holds whole numbers.
    #[inline]
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = f16_to_f32(u16::from_le_bytes(*b));
                }
            }
            Self::BF16 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = bf16::from_le_bytes(*b).to_f32();
                }
            }
        }
    }
}

/// The value of f16 bits. `half::f16::to_f32` checks for the CPU's conversion instruction at each
/// call, which keeps loops from being vectorised.
#[inline(always)]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    // The exponents' biases differ by 112. Subnormals are integers in units of 2^-24: as floats
    // of that exponent they would cost the processor a hundred cycles each.
    let subnormal = (f32::from(bits & 0x3ff) * f32::from_bits((127 - 24) << 23)).to_bits();
    let finite = if rest < 1 << 23 { subnormal } else { rest + (112 << 23) };
    let special = rest | 0x7f80_0000;
    f32::from_bits(sign | if rest >= 0x0f80_0000 { special } else { finite })
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_f16_has_its_value() {
        for bits in 0..=u16::MAX {
            let mut decoded = [0.0];
            Float::F16.decode(&bits.to_le_bytes(), &mut decoded);
            let expected = f16::from_bits(bits).to_f32();
            let same =
                decoded[0].to_bits() == expected.to_bits() || (decoded[0].is_nan() && expected.is_nan());
            assert!(same, "{bits:#06x}: {} for {expected}", decoded[0]);
        }
    }
}
