//! Quantized formats as groups: what a reader of a file format gives to a packer, or to anything
//! that wants the weights.

use super::{Encoding, MatrixSource, affine::AffineReader, mxfp4::Mxfp4Reader, q4_0::Q4_0Reader};

/// A group of a row: its weights are `scale * level + offset`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupScale {
    /// The distance of two neighbouring levels.
    pub scale: f32,
    /// The weight of level 0.
    pub offset: f32,
}

/// Reads the groups of a quantized matrix. One implementation for each file format.
pub trait GroupReader {
    /// Writes the levels of group `group` of row `row`, one byte each, and returns their scale.
    /// `levels` has the length of a group, and levels have the bits that [`Encoding::packed`] says.
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale;
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
            Encoding::Q4_0 => Some(Box::new(Q4_0Reader::new(self))),
        }
    }

    /// The values of one row, `[cols]`, without bias.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let (Some(mut reader), unit) = (self.groups(), self.encoding.column_unit()) else {
            let Encoding::Float(float) = self.encoding else { unreachable!("other formats have groups") };
            return float.decode(self.weight.row(row), out);
        };
        let mut levels = vec![0; unit];
        for (group, out) in out.chunks_exact_mut(unit).enumerate() {
            let GroupScale { scale, offset } = reader.group(row, group, &mut levels);
            for (x, level) in out.iter_mut().zip(&levels) {
                *x = scale * f32::from(*level) + offset;
            }
        }
    }
}
