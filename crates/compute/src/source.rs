//! Weights as they lie in a file, described so that a backend can take the rows and columns that are its own.

use half::bf16;
#[cfg(test)]
use half::f16;

/// A floating-point format of stored numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of a single.
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

    /// Reads little-endian numbers; `bytes` holds whole ones.
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
                    *x = half_to_single(u16::from_le_bytes(*b));
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

/// The value of an IEEE half. `f16::to_f32` asks for the CPU's instructions at each number, which no loop of it can be
/// vectorised with.
#[inline(always)]
fn half_to_single(half: u16) -> f32 {
    let (sign, rest) = (u32::from(half & 0x8000) << 16, u32::from(half & 0x7fff) << 13);
    // The exponent's bias differs by 112, which for subnormals is only right as a factor.
    let finite = (f32::from_bits(rest) * f32::from_bits((112 + 127) << 23)).to_bits();
    let special = rest | 0x7f80_0000;
    f32::from_bits(sign | if rest >= 0x0f80_0000 { special } else { finite })
}

/// How the elements of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Plain numbers.
    Float(Float),
    /// MLX's affine quantization: `w = q * scale + bias`, one scale and bias for each `group` elements of a row.
    /// A row is one little-endian bit stream of `bits` a element (see facts/mlx-format.md).
    Affine {
        /// 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// 32, 64 or 128.
        group: usize,
        /// The format of scales and biases.
        scales: Float,
    },
}

impl Encoding {
    /// Columns that cannot be divided: a quantization group, or a single element.
    pub const fn column_unit(self) -> usize {
        match self {
            Self::Float(_) => 1,
            Self::Affine { group, .. } => group,
        }
    }

    /// Bytes of `cols` elements of a row, without scales and biases that are stored apart.
    pub const fn weight_bytes(self, cols: usize) -> usize {
        match self {
            Self::Float(float) => cols * float.bytes(),
            Self::Affine { bits, .. } => cols * bits as usize / 8,
        }
    }

    /// Bytes of the scales of `cols` elements of a row, where scales are stored apart; biases take as many.
    pub const fn scale_bytes(self, cols: usize) -> usize {
        match self {
            Self::Float(_) => 0,
            Self::Affine { group, scales, .. } => cols / group * scales.bytes(),
        }
    }

    /// Bytes of `rows × cols` elements in the file, scales and biases included.
    pub const fn bytes(self, rows: usize, cols: usize) -> usize {
        rows * (self.weight_bytes(cols) + 2 * self.scale_bytes(cols))
    }
}

/// Rows of bytes at a constant distance, a window of a row-major matrix in a file.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Starts with the first row of the window.
    pub bytes: &'a [u8],
    /// From the beginning of one row to the next.
    pub stride: usize,
    /// Length of a row in the window.
    pub row_bytes: usize,
}

impl<'a> Strided<'a> {
    /// All bytes from the first of these rows to the last, those of other columns between them included.
    pub fn span(&self, rows: std::ops::Range<usize>) -> &'a [u8] {
        if rows.is_empty() || self.row_bytes == 0 {
            return &[];
        }
        &self.bytes[rows.start * self.stride..(rows.end - 1) * self.stride + self.row_bytes]
    }

    /// The bytes of a row.
    ///
    /// # Panics
    /// When the row lies outside of `bytes`.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.row_bytes]
    }
}

/// The part of one stored matrix `[rows, cols]` that a rank takes.
#[derive(Clone)]
pub struct MatrixSource<'a> {
    /// Output features.
    pub rows: usize,
    /// Input features; a multiple of the encoding's column unit.
    pub cols: usize,
    /// How the elements are stored.
    pub encoding: Encoding,
    /// The elements.
    pub weight: Strided<'a>,
    /// Scales and biases of the groups, for quantized encodings.
    pub scales: Option<(Strided<'a>, Strided<'a>)>,
    /// Added to the output, one for each row.
    pub bias: Option<Vec<f32>>,
    /// The file's pages, if `bytes` are a mapped file's.
    pub pages: Option<&'a dyn FilePages>,
}

impl MatrixSource<'_> {
    /// Bytes that are read from the file.
    pub fn bytes(&self) -> usize {
        self.encoding.bytes(self.rows, self.cols)
    }
}

/// Pages of mapped files, told of what is read of them. `bytes` is a part of one.
pub trait FilePages: Sync {
    /// All of `bytes` will be read now.
    fn need(&self, bytes: &[u8]);
    /// `bytes` were read and are needed no more: they can leave memory.
    fn release(&self, bytes: &[u8]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_decoded_as_they_should() {
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
