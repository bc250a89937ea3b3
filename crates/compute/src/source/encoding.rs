//! Formats of matrices: in files, and packed in memory.

use super::{Float, mxfp4, q4_0};

/// How a file stores the elements of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Plain numbers.
    Float(Float),
    /// MLX's affine quantization: `w = scale * level + offset`, with a scale and an offset for each
    /// `group` elements of a row. A row is one little-endian bit stream with `bits` an element.
    Affine {
        /// 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// 32, 64 or 128.
        group: usize,
        /// The format of scales and offsets.
        scales: Float,
    },
    /// OCP's MXFP4: 4-bit floats, 32 of which share a power of two that is stored apart.
    Mxfp4,
    /// GGUF's Q4_0: blocks of an f16 scale and 32 elements of 4 bits.
    Q4_0,
}

/// How a packed matrix keeps its elements in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// Plain numbers.
    Float(Float),
    /// Unsigned levels with a scale and an offset for each `group` elements of a row.
    Affine {
        /// Bits of a level: 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// 32, 64 or 128.
        group: usize,
    },
}

impl Encoding {
    /// The format that a matrix of this encoding has once it is packed.
    pub const fn packed(self) -> PackedFormat {
        match self {
            Self::Float(float) => PackedFormat::Float(float),
            Self::Affine { bits, group, .. } => PackedFormat::Affine { bits, group },
            Self::Mxfp4 => PackedFormat::Affine { bits: mxfp4::LEVEL_BITS, group: mxfp4::GROUP },
            Self::Q4_0 => PackedFormat::Affine { bits: q4_0::LEVEL_BITS, group: q4_0::GROUP },
        }
    }

    /// Columns that cannot be divided: a quantization group, or a single element.
    pub const fn column_unit(self) -> usize {
        match self.packed() {
            PackedFormat::Float(_) => 1,
            PackedFormat::Affine { group, .. } => group,
        }
    }

    /// Bytes of `cols` elements of a row, without what is stored apart.
    pub const fn weight_bytes(self, cols: usize) -> usize {
        match self {
            Self::Float(float) => cols * float.bytes(),
            Self::Affine { bits, .. } => cols * bits as usize / 8,
            Self::Mxfp4 => cols / 2,
            Self::Q4_0 => cols / q4_0::GROUP * q4_0::BLOCK_BYTES,
        }
    }

    /// Bytes of the scales of `cols` elements of a row, if they are stored apart; offsets take as
    /// many.
    pub const fn scale_bytes(self, cols: usize) -> usize {
        match self {
            Self::Affine { group, scales, .. } => cols / group * scales.bytes(),
            Self::Mxfp4 => cols / mxfp4::GROUP,
            Self::Float(_) | Self::Q4_0 => 0,
        }
    }

    /// Bytes of `rows × cols` elements in the file, scales and offsets included.
    pub const fn bytes(self, rows: usize, cols: usize) -> usize {
        let with_offsets = matches!(self, Self::Affine { .. });
        let apart = self.scale_bytes(cols) * if with_offsets { 2 } else { 1 };
        rows * (self.weight_bytes(cols) + apart)
    }
}
