//! GGUF's Q4_0: blocks of 18 bytes, an f16 scale and 32 nibbles; `w = scale * (nibble − 8)`.

use super::float::f16_to_f32;
use super::{GroupReader, GroupScale, MatrixSource, Strided};

/// Columns of a block.
pub(super) const GROUP: usize = 32;
/// Bits of a level.
pub(super) const LEVEL_BITS: u32 = 4;
/// Bytes of a block.
pub(super) const BLOCK_BYTES: usize = 2 + GROUP / 2;

/// Rows of blocks.
pub(super) struct Q4_0Reader<'a> {
    blocks: Strided<'a>,
}

impl<'a> Q4_0Reader<'a> {
    pub fn new(source: &MatrixSource<'a>) -> Self {
        Self { blocks: source.weight }
    }
}

impl GroupReader for Q4_0Reader<'_> {
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let block = &self.blocks.row(row)[group * BLOCK_BYTES..][..BLOCK_BYTES];
        let (scale, nibbles) = block.split_at(2);
        // Lower nibbles are the first half of the columns, upper nibbles the second.
        let (first, second) = levels.split_at_mut(GROUP / 2);
        for ((byte, first), second) in nibbles.iter().zip(first).zip(second) {
            (*first, *second) = (byte & 15, byte >> 4);
        }
        let scale = f16_to_f32(u16::from_le_bytes([scale[0], scale[1]]));
        GroupScale { scale, offset: -8.0 * scale }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::source::Encoding;

    #[test]
    fn a_block_has_its_values() {
        let mut block = f16::from_f32(0.25).to_le_bytes().to_vec();
        block.extend((0..16u8).map(|i| i | (15 - i) << 4));
        let source = MatrixSource {
            rows: 1,
            cols: GROUP,
            encoding: Encoding::Q4_0,
            weight: Strided { bytes: &block, stride: BLOCK_BYTES, row_bytes: BLOCK_BYTES },
            scales: None,
            offsets: None,
            bias: None,
            pages: None,
        };
        let mut values = [0.0; GROUP];
        source.dequantize_row(0, &mut values);
        for i in 0..16 {
            assert_eq!(values[i], 0.25 * (i as f32 - 8.0));
            assert_eq!(values[16 + i], 0.25 * (7.0 - i as f32));
        }
    }
}
