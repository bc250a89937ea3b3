//! MLX's affine format, group by group. Packing for the CPU has a faster reader for whole panels.

use super::{Float, GroupReader, GroupScale, MatrixSource, Strided};

/// Rows of little-endian bit streams, with scales and offsets stored apart.
pub(super) struct AffineReader<'a> {
    bits: usize,
    group: usize,
    float: Float,
    weight: Strided<'a>,
    scales: [Strided<'a>; 2],
}

impl<'a> AffineReader<'a> {
    pub fn new(source: &MatrixSource<'a>, bits: u32, group: usize, float: Float) -> Self {
        let (Some(scales), Some(offsets)) = (source.scales, source.offsets) else {
            unreachable!("affine sources have scales and offsets");
        };
        Self { bits: bits as usize, group, float, weight: source.weight, scales: [scales, offsets] }
    }
}

impl GroupReader for AffineReader<'_> {
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let bytes = self.group * self.bits / 8;
        let stream = &self.weight.row(row)[group * bytes..][..bytes];
        for (index, level) in levels.iter_mut().enumerate() {
            let first = index * self.bits;
            // A level lies in at most two bytes.
            let word = u16::from_le_bytes([stream[first / 8], *stream.get(first / 8 + 1).unwrap_or(&0)]);
            *level = (word >> (first % 8)) as u8 & ((1u16 << self.bits) - 1) as u8;
        }
        let [scale, offset] = self.scales.map(|numbers| self.float.at(numbers.row(row), group));
        GroupScale { scale, offset }
    }
}
