//! Types whose nibbles are places in a table of 16 values. The values become levels of their own
//! range.

use super::{BlockFormat, GroupScale, Shape, half, nibbles, sized};
use crate::source::mxfp4;

/// Values of IQ4_NL and IQ4_XS, plus 128.
pub(crate) const LEVELS: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];
/// The level of 0.
const ZERO: f32 = 128.0;

/// The code of a level, by its place among them. Without branches: packing does this for vectors.
#[inline(always)]
pub(crate) fn code(level: u8) -> u8 {
    LEVELS[1..].iter().map(|least| u8::from(level >= *least)).sum()
}

/// 32 nibbles as levels of a table.
#[inline(always)]
fn looked_up(packed: &[u8], table: &[u8; 16], levels: &mut [u8; 32]) {
    nibbles(packed, levels);
    for level in levels {
        *level = table[usize::from(*level & 15)];
    }
}

/// Scale, nibbles.
pub(super) struct Iq4Nl;

impl BlockFormat for Iq4Nl {
    const SHAPE: Shape = Shape { columns: 32, bytes: 18, bits: 8, group: 32 };

    #[inline(always)]
    fn group(block: &[u8], _: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<32>(levels);
        looked_up(&block[2..18], &LEVELS, levels);
        let scale = half(block, 0);
        GroupScale { scale, offset: -ZERO * scale }
    }
}

/// The block's scale, the groups' scales' upper two bits (2 bytes) and lower four (4), nibbles.
pub(super) struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    const SHAPE: Shape = Shape { columns: 256, bytes: 136, bits: 8, group: 32 };
    const FACTORS: Option<[usize; 2]> = Some([0, 0]);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<32>(levels);
        looked_up(&block[8 + 16 * group..][..16], &LEVELS, levels);
        let high = (u16::from_le_bytes([block[2], block[3]]) >> (2 * group) & 3) as u8;
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
        let scale = half(block, 0) * (f32::from(low | high << 4) - 32.0);
        GroupScale { scale, offset: -ZERO * scale }
    }
}

/// Exponent, nibbles.
pub(super) struct Mxfp4;

impl BlockFormat for Mxfp4 {
    const SHAPE: Shape = Shape { columns: 32, bytes: 17, bits: mxfp4::LEVEL_BITS, group: mxfp4::GROUP };

    #[inline(always)]
    fn group(block: &[u8], _: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<32>(levels);
        looked_up(&block[1..17], &mxfp4::LEVELS, levels);
        mxfp4::scale(block[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_has_its_code() {
        for (index, level) in LEVELS.into_iter().enumerate() {
            assert_eq!(usize::from(code(level)), index);
        }
    }
}
