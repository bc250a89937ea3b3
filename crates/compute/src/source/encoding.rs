//! Formats of matrices: in files, and packed in memory.

use super::extent::{Extent, MatrixWindow};
use super::integers::{self, IntegerLayout};
use super::{Block, Float, e4m3, mxfp4, nvfp4};

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
    /// NVIDIA's NVFP4: 4-bit floats, 16 of which share an E4M3 scale that is stored apart.
    Nvfp4,
    /// OCP's MXFP8: E4M3 floats, 32 of which share a power of two that is stored apart.
    Mxfp8,
    /// E4M3 floats with a scale for each block, stored apart.
    Fp8 {
        /// Rows and columns of a block; 0 stands for all. Columns are a multiple of 32.
        block: [usize; 2],
        /// The format of scales.
        scales: Fp8Scales,
    },
    /// Integers with scales, and perhaps zeros, for each group of a row, stored apart.
    Integers {
        /// Where they are.
        layout: IntegerLayout,
        /// 4, or 8 where the layout allows.
        bits: u32,
        /// Columns of a group, a multiple of 32; 0 stands for all.
        group: usize,
        /// The format of scales.
        scales: Float,
    },
    /// One of GGUF's quantized types: blocks with scales of their own.
    Blocks(Block),
}

/// Types with 16 levels, which are stored as codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Table {
    /// E2M1 numbers: MXFP4, NVFP4.
    E2m1,
    /// IQ4_NL and IQ4_XS.
    Iq4,
}

/// The format of the scales of [`Encoding::Fp8`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Scales {
    /// Plain numbers.
    Float(Float),
    /// Powers of two, of which the exponent is stored (OCP's E8M0).
    Exponents,
}

impl Fp8Scales {
    /// Bytes of a scale.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Float(float) => float.bytes(),
            Self::Exponents => 1,
        }
    }

    /// The scale at `index`.
    pub(super) fn at(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Self::Float(float) => float.at(bytes, index),
            Self::Exponents => mxfp4::e8m0(bytes[index]),
        }
    }
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
            Self::Nvfp4 => PackedFormat::Affine { bits: mxfp4::LEVEL_BITS, group: nvfp4::GROUP },
            Self::Mxfp8 | Self::Fp8 { .. } => {
                PackedFormat::Affine { bits: e4m3::LEVEL_BITS, group: e4m3::GROUP }
            }
            Self::Integers { bits, group, .. } => {
                PackedFormat::Affine { bits, group: integers::packed_group(group) }
            }
            Self::Blocks(block) => block.packed(),
        }
    }

    /// Columns that cannot be divided: a quantization group, a block, or a single element.
    pub const fn column_unit(self) -> usize {
        match (self, self.packed()) {
            (Self::Blocks(block), _) => block.columns(),
            // Two groups of 16 share a block of the packed layout.
            (Self::Nvfp4, _) => 2 * nvfp4::GROUP,
            (Self::Fp8 { block: [_, cols], .. }, _) if cols > 0 => cols,
            (Self::Integers { group, .. }, _) if group > 0 => group,
            (_, PackedFormat::Float(_)) => 1,
            (_, PackedFormat::Affine { group, .. }) => group,
        }
    }

    /// Bytes of `cols` elements of a row, without what is stored apart.
    pub(super) const fn weight_bytes(self, cols: usize) -> usize {
        match self {
            Self::Float(float) => cols * float.bytes(),
            Self::Affine { bits, .. } | Self::Integers { bits, .. } => cols * bits as usize / 8,
            Self::Mxfp4 | Self::Nvfp4 => cols / 2,
            Self::Mxfp8 | Self::Fp8 { .. } => cols,
            Self::Blocks(block) => cols / block.columns() * block.bytes(),
        }
    }

    /// Bytes of the scales of `cols` elements of a row, for encodings in which each row has its own
    /// and groups of a fixed size; others say where their scales are in `extent.rs`.
    pub(super) const fn scale_bytes(self, cols: usize) -> usize {
        match self {
            Self::Affine { group, scales, .. } => cols / group * scales.bytes(),
            Self::Mxfp4 => cols / mxfp4::GROUP,
            Self::Nvfp4 => cols / nvfp4::GROUP,
            Self::Mxfp8 => cols / e4m3::GROUP,
            Self::Float(_) | Self::Blocks(_) | Self::Fp8 { .. } | Self::Integers { .. } => 0,
        }
    }

    /// True if scales are stored apart.
    pub const fn has_scales(self) -> bool {
        !matches!(self, Self::Float(_) | Self::Blocks(_))
    }

    /// True if offsets or zeros are stored apart.
    pub const fn has_offsets(self) -> bool {
        match self {
            Self::Affine { .. } => true,
            Self::Integers { layout, .. } => layout.has_zeros(),
            _ => false,
        }
    }

    /// True if the level `1 << (bits - 1)` stands for 0 in every group.
    pub(crate) const fn is_symmetric(self) -> bool {
        match self {
            Self::Float(_) | Self::Affine { .. } => false,
            Self::Mxfp4 | Self::Nvfp4 | Self::Mxfp8 | Self::Fp8 { .. } => true,
            Self::Integers { layout, .. } => !layout.has_zeros(),
            Self::Blocks(block) => block.is_symmetric(),
        }
    }

    /// True if 256 columns have a factor of their groups' scales and one of their offsets, which
    /// are integers of a byte in these units: see [`GroupReader::factors`].
    ///
    /// [`GroupReader::factors`]: super::GroupReader::factors
    pub(crate) const fn has_factors(self) -> bool {
        matches!(self, Self::Blocks(block) if block.has_factors())
    }

    /// The table of the 16 levels, if there are no others.
    pub(crate) const fn table(self) -> Option<Table> {
        match self {
            Self::Mxfp4 | Self::Nvfp4 | Self::Blocks(Block::Mxfp4) => Some(Table::E2m1),
            Self::Blocks(Block::Iq4Nl | Block::Iq4Xs) => Some(Table::Iq4),
            _ => None,
        }
    }

    /// True if the tensor of elements has a row for each row of the matrix.
    pub(crate) const fn has_weight_rows(self) -> bool {
        !matches!(self, Self::Integers { layout, .. } if !layout.has_rows())
    }

    /// Rows of the matrix that share a row of scales, and of offsets, if elements have rows.
    pub(crate) const fn rows_together(self) -> [usize; 2] {
        match self {
            Self::Fp8 { block: [0, _], .. } => [usize::MAX, 1],
            Self::Fp8 { block: [rows, _], .. } => [rows, 1],
            Self::Integers { layout: IntegerLayout::RowsWithZeros, bits, .. } => {
                [1, integers::per_word(bits)]
            }
            _ => [1, 1],
        }
    }

    /// Bytes of `rows × cols` elements in the file, scales and offsets included.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        let window = MatrixWindow { shape: [rows, cols], rows: 0..rows, cols: 0..cols };
        let of = |extent: Extent| extent.rows.len() * extent.bytes.len();
        let scales = if self.has_scales() { of(self.scale_extent(&window)) } else { 0 };
        let offsets = if self.has_offsets() { of(self.offset_extent(&window)) } else { 0 };
        of(self.weight_extent(&window)) + scales + offsets
    }
}
