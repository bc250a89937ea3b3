//! GGUF's quantized types: a row is a sequence of blocks, and a block holds its own scales.
//!
//! | type | levels in memory | exact |
//! |---|---|---|
//! | Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 | 4, 4, 5, 5, 8 bits in groups of 32 | yes |
//! | Q2_K, Q3_K, Q6_K | 2, 3, 6 bits in groups of 16 | yes |
//! | Q4_K, Q5_K | 4, 5 bits in groups of 32 | yes |
//! | IQ4_NL, IQ4_XS | 8 bits in groups of 32: the 16 values of their table | yes |
//! | MXFP4 | 5 bits in groups of 32: multiples of half the scale | yes |
//!
//! Scales and offsets of groups are f32 here: products of a block's scale and a small integer.

mod k_quants;
mod legacy;
pub(crate) mod tables;

use std::marker::PhantomData;

use super::{GroupReader, GroupScale, PackedFormat, Strided};

/// A quantized type of GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names of GGUF's types; `Block::name` has their spelling")]
pub enum Block {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

/// Sizes of a type.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// Columns of a block.
    columns: usize,
    /// Bytes of a block.
    bytes: usize,
    /// Bits of a level in memory.
    bits: u32,
    /// Columns that share a scale and an offset.
    group: usize,
}

/// Reads one type's blocks.
trait BlockFormat {
    const SHAPE: Shape;
    /// Where a block has the f16 factors of its groups' scales and offsets, whose numbers fit a
    /// byte. Types whose middle level is 0 name the same place twice.
    const FACTORS: Option<[usize; 2]> = None;

    /// Writes the levels of a group of a block, and returns their scale. `levels` has the length of
    /// a group.
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale;

    /// Writes the levels of all columns of a block, and the scales of its groups. Four times as
    /// fast as group by group where groups share bytes.
    #[inline(always)]
    fn block(block: &[u8], levels: &mut [u8], scales: &mut [GroupScale]) {
        let levels = levels.chunks_exact_mut(Self::SHAPE.group);
        for (group, (levels, scale)) in levels.zip(scales).enumerate() {
            *scale = Self::group(block, group, levels);
        }
    }
}

/// Evaluates an expression with `$format` as the [`BlockFormat`] of a type.
macro_rules! with_format {
    ($block:expr, $format:ident => $value:expr) => {
        with_format!($block, $format => $value,
            Q4_0: legacy::Q4_0, Q4_1: legacy::Q4_1, Q5_0: legacy::Q5_0, Q5_1: legacy::Q5_1, Q8_0: legacy::Q8_0,
            Q2K: k_quants::Q2K, Q3K: k_quants::Q3K, Q4K: k_quants::Q4K, Q5K: k_quants::Q5K, Q6K: k_quants::Q6K,
            Iq4Nl: tables::Iq4Nl, Iq4Xs: tables::Iq4Xs, Mxfp4: tables::Mxfp4)
    };
    ($block:expr, $format:ident => $value:expr, $($name:ident: $type:path),*) => {
        match $block {
            $(Block::$name => {
                type $format = $type;
                $value
            })*
        }
    };
}

impl Block {
    /// All types.
    pub const ALL: [Self; 13] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
    ];

    const fn shape(self) -> Shape {
        with_format!(self, F => <F as BlockFormat>::SHAPE)
    }

    /// GGUF's name of the type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Columns of a block. A row is whole blocks.
    pub const fn columns(self) -> usize {
        self.shape().columns
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        self.shape().bytes
    }

    /// The format that a matrix of this type has once it is packed.
    pub(super) const fn packed(self) -> PackedFormat {
        let Shape { bits, group, .. } = self.shape();
        PackedFormat::Affine { bits, group }
    }

    /// True if the level `1 << (bits - 1)` stands for 0 in every group.
    pub(super) const fn is_symmetric(self) -> bool {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::Q3K | Self::Q6K => true,
            Self::Iq4Nl | Self::Iq4Xs | Self::Mxfp4 => true,
            Self::Q4_1 | Self::Q5_1 | Self::Q2K | Self::Q4K | Self::Q5K => false,
        }
    }

    /// True if a block has a factor for the scales of all of its groups, which are small integers.
    pub(super) const fn has_factors(self) -> bool {
        with_format!(self, F => <F as BlockFormat>::FACTORS.is_some())
    }

    /// A reader of rows of blocks.
    pub(super) fn reader<'a>(self, blocks: Strided<'a>) -> Box<dyn GroupReader + 'a> {
        with_format!(self, F => Box::new(BlockReader::<F> { blocks, format: PhantomData }))
    }
}

struct BlockReader<'a, F> {
    blocks: Strided<'a>,
    format: PhantomData<F>,
}

impl<F: BlockFormat> GroupReader for BlockReader<'_, F> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let Shape { columns, bytes, group: width, .. } = F::SHAPE;
        let groups = columns / width;
        let block = &self.blocks.row(row)[group / groups * bytes..][..bytes];
        F::group(block, group % groups, levels)
    }

    fn factors(&mut self, row: usize, factors: &mut [[f32; 2]]) {
        let Some([scale, offset]) = F::FACTORS else { return };
        for (block, to) in self.blocks.row(row).chunks_exact(F::SHAPE.bytes).zip(factors) {
            *to = [half(block, scale), -half(block, offset)];
        }
    }

    #[inline(always)]
    fn row_inlined(&mut self, row: usize, levels: &mut [u8], scales: &mut [GroupScale]) {
        let Shape { columns, bytes, group: width, .. } = F::SHAPE;
        let levels = levels.chunks_exact_mut(columns);
        let scales = scales.chunks_exact_mut(columns / width);
        let blocks = self.blocks.row(row).chunks_exact(bytes);
        for ((block, levels), scales) in blocks.zip(levels).zip(scales) {
            F::block(block, levels, scales);
        }
    }
}

/// The levels of a group, whose number the compiler then knows.
#[inline(always)]
fn sized<const N: usize>(levels: &mut [u8]) -> &mut [u8; N] {
    let Some(levels) = levels.first_chunk_mut() else { unreachable!("a group has {N} levels") };
    levels
}

/// The f16 at `at`.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    super::float::f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Some bits of each byte, and where they go.
#[derive(Debug, Clone, Copy)]
struct Bits {
    first: usize,
    count: usize,
    to: usize,
}

impl Bits {
    /// Nibbles at bit `first`.
    const fn nibbles(first: usize) -> Self {
        Self { first, count: 4, to: 0 }
    }

    /// Sets bytes to these bits of others, 16 at a time.
    #[inline(always)]
    fn set(self, to: &mut [u8], from: &[u8]) {
        self.each(to, from, |_, bits| bits);
    }

    /// As [`Self::set`]; the bytes keep their other bits.
    #[inline(always)]
    fn add(self, to: &mut [u8], from: &[u8]) {
        self.each(to, from, |present, bits| present | bits);
    }

    /// Words, not bytes: compilers unroll loops over 32 bytes and leave them byte by byte, and make
    /// scatters of 64 bits from loops over smaller words.
    #[inline(always)]
    fn each(self, to: &mut [u8], from: &[u8], of: impl Fn(u128, u128) -> u128) {
        let mask = u128::from_le_bytes([(1 << self.count) - 1; 16]);
        for (to, from) in to.as_chunks_mut::<16>().0.iter_mut().zip(from.as_chunks::<16>().0) {
            let bits = (u128::from_le_bytes(*from) >> self.first & mask) << self.to;
            *to = of(u128::from_le_bytes(*to), bits).to_le_bytes();
        }
    }
}

/// Lower nibbles are the first half of the columns, upper nibbles the second.
#[inline(always)]
fn nibbles(packed: &[u8], levels: &mut [u8]) {
    let (first, second) = levels.split_at_mut(packed.len());
    Bits::nibbles(0).set(first, packed);
    Bits::nibbles(4).set(second, packed);
}
