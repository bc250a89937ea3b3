//! NVFP4: E2M1 numbers, 16 of which share an E4M3 scale. No weight changes, as with
//! [`mxfp4`](super::mxfp4).

use super::{GroupReader, GroupScale, MatrixSource, Strided, e4m3, mxfp4};

/// Numbers that share a scale.
pub(super) const GROUP: usize = 16;

/// Rows of nibbles, the earlier column in the lower one, with a row of E4M3 bytes apart.
pub(super) struct Nvfp4Reader<'a> {
    weight: Strided<'a>,
    scales: Strided<'a>,
}

impl<'a> Nvfp4Reader<'a> {
    pub fn new(source: &MatrixSource<'a>) -> Self {
        let Some(scales) = source.scales else { unreachable!("NVFP4 sources have scales") };
        Self { weight: source.weight, scales }
    }
}

impl GroupReader for Nvfp4Reader<'_> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        mxfp4::levels_of(&self.weight.row(row)[group * GROUP / 2..][..GROUP / 2], levels);
        mxfp4::halved(e4m3::value(self.scales.row(row)[group]))
    }

    fn scales(&mut self, row: usize, _width: usize, scales: &mut [GroupScale]) {
        for (to, bits) in scales.iter_mut().zip(self.scales.row(row)) {
            *to = mxfp4::halved(e4m3::value(*bits));
        }
    }
}
