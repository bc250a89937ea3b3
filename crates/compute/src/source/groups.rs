//! Quantized formats as groups: what a reader of a file format gives to a packer, or to anything
//! that wants the weights.

use super::affine::AffineReader;
use super::e4m3::{BlockScaledReader, Mxfp8Reader};
use super::integers::IntegerReader;
use super::mxfp4::Mxfp4Reader;
use super::nvfp4::Nvfp4Reader;
use super::{Encoding, MatrixSource, PackedFormat};
use crate::cpu::simd::widest::{Work, widest};

/// Most columns of a group.
const WIDEST_GROUP: usize = 128;

/// A group of a row: its weights are `scale * level + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GroupScale {
    /// The distance of two neighbouring levels.
    pub scale: f32,
    /// The weight of level 0.
    pub offset: f32,
}

/// Reads the groups of a quantized matrix. One implementation for each file format.
///
/// Rows are those of the file: see [`MatrixSource::stored_row`].
pub trait GroupReader {
    /// Writes the levels of group `group` of row `row`, one byte each, and returns their scale.
    /// `levels` has the length of a group, and levels have the bits that [`Encoding::packed`] says.
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale;

    /// Reads all groups of a row. Implementations are `#[inline(always)]`, so that [`Self::row`]
    /// compiles them for wider vectors.
    #[inline(always)]
    fn row_inlined(&mut self, row: usize, levels: &mut [u8], scales: &mut [GroupScale]) {
        let width = levels.len() / scales.len().max(1);
        for (group, scale) in scales.iter_mut().enumerate() {
            *scale = self.group(row, group, &mut levels[group * width..][..width]);
        }
    }

    /// Reads the scales of a row's groups, of `width` columns each, without their levels. Those of
    /// E4M3 numbers are as in the file: levels also have a power of two, by the group's largest.
    fn scales(&mut self, row: usize, width: usize, scales: &mut [GroupScale]) {
        let mut levels = [0; WIDEST_GROUP];
        for (group, scale) in scales.iter_mut().enumerate() {
            *scale = self.group(row, group, &mut levels[..width]);
        }
    }

    /// Reads the factors of the scales and of the offsets of a row's blocks, for encodings with
    /// [factors](Encoding::has_factors).
    fn factors(&mut self, _row: usize, _factors: &mut [[f32; 2]]) {}

    /// Reads all groups of a row with the widest vectors that the CPU has.
    fn row(&mut self, row: usize, levels: &mut [u8], scales: &mut [GroupScale]) {
        widest(RowOf { reader: self, row, levels, scales });
    }
}

/// [`GroupReader::row_inlined`].
struct RowOf<'a, R: ?Sized> {
    reader: &'a mut R,
    row: usize,
    levels: &'a mut [u8],
    scales: &'a mut [GroupScale],
}

impl<R: GroupReader + ?Sized> Work for RowOf<'_, R> {
    #[inline(always)]
    fn run(self) {
        self.reader.row_inlined(self.row, self.levels, self.scales);
    }
}

impl<'a> MatrixSource<'a> {
    /// A reader of the groups; `None` for plain numbers.
    pub fn groups(&self) -> Option<Box<dyn GroupReader + 'a>> {
        match self.encoding {
            Encoding::Float(_) => None,
            Encoding::Affine { bits, group, scales } => {
                Some(Box::new(AffineReader::new(self, bits, group, scales)))
            }
            Encoding::Mxfp4 => Some(Box::new(Mxfp4Reader::new(self))),
            Encoding::Mxfp8 => Some(Box::new(Mxfp8Reader::new(self))),
            Encoding::Nvfp4 => Some(Box::new(Nvfp4Reader::new(self))),
            Encoding::Fp8 { block, scales } => Some(Box::new(BlockScaledReader::new(self, block, scales))),
            Encoding::Integers { layout, bits, group, scales } => {
                Some(Box::new(IntegerReader::new(self, layout, bits, group, scales)))
            }
            Encoding::Blocks(block) => Some(block.reader(self.weight)),
        }
    }

    /// The values of one row, `[cols]`, without bias.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let row = self.stored_row(row);
        let group = match (self.encoding, self.encoding.packed()) {
            (Encoding::Float(float), _) => return float.decode(self.weight.row(row), out),
            (_, PackedFormat::Affine { group, .. }) => group,
            (_, PackedFormat::Float(_)) => unreachable!("quantized formats have levels"),
        };
        let Some(mut reader) = self.groups() else { unreachable!("quantized formats have groups") };
        let mut levels = vec![0; group];
        for (index, out) in out.chunks_exact_mut(group).enumerate() {
            let GroupScale { scale, offset } = reader.group(row, index, &mut levels);
            for (x, level) in out.iter_mut().zip(&levels) {
                *x = scale * f32::from(*level) + offset;
            }
        }
    }
}
