//! Formats of matrices: in files, and packed in memory.

use super::{Block, Float, mxfp4};

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
    /// One of GGUF's quantized types: blocks with scales of their own.
    Blocks(Block),
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
        /// 16, 32, 64 or 128.
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
            Self::Blocks(block) => block.packed(),
        }
    }

    /// Columns that cannot be divided: a quantization group, a block, or a single element.
    pub const fn column_unit(self) -> usize {
        match (self, self.packed()) {
            (Self::Blocks(block), _) => block.columns(),
            (_, PackedFormat::Float(_)) => 1,
            (_, PackedFormat::Affine { group, .. }) => group,
        }
    }

    /// Bytes of `cols` elements of a row, without what is stored apart.
    pub const fn weight_bytes(self, cols: usize) -> usize {
        match self {
            Self::Float(float) => cols * float.bytes(),
            Self::Affine { bits, .. } => cols * bits as usize / 8,
            Self::Mxfp4 => cols / 2,
            Self::Blocks(block) => cols / block.columns() * block.bytes(),
        }
    }

    /// Bytes of the scales of `cols` elements of a row, if they are stored apart; offsets take as
    /// many.
    pub const fn scale_bytes(self, cols: usize) -> usize {
        match self {
            Self::Affine { group, scales, .. } => cols / group * scales.bytes(),
            Self::Mxfp4 => cols / mxfp4::GROUP,
            Self::Float(_) | Self::Blocks(_) => 0,
        }
    }

    /// Bytes of `rows × cols` elements in the file, scales and offsets included.
    pub const fn bytes(self, rows: usize, cols: usize) -> usize {
        let with_offsets = matches!(self, Self::Affine { .. });
        let apart = self.scale_bytes(cols) * if with_offsets { 2 } else { 1 };
        rows * (self.weight_bytes(cols) + apart)
    }
}
