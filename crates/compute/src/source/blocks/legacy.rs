//! Blocks of 32 columns with one f16 scale, and an f16 offset in the types that end in 1.

use super::{BlockFormat, GroupScale, Shape, half, nibbles, sized};

/// Columns of a block.
const COLUMNS: usize = 32;

const fn shape(bits: u32, bytes: usize) -> Shape {
    Shape { columns: COLUMNS, bytes, bits, group: COLUMNS }
}

/// Levels around a middle: `w = scale * (level − middle)`.
#[inline(always)]
fn symmetric(scale: f32, middle: f32) -> GroupScale {
    GroupScale { scale, offset: -middle * scale }
}

/// Sets bit 4 of 32 levels from 32 bits.
#[inline(always)]
fn fifth_bits(bits: &[u8], levels: &mut [u8; 32]) {
    let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    for (index, level) in levels.iter_mut().enumerate() {
        *level |= ((bits >> index & 1) as u8) << 4;
    }
}

/// Scale, nibbles.
pub(super) struct Q4_0;

impl BlockFormat for Q4_0 {
    const SHAPE: Shape = shape(4, 18);

    #[inline(always)]
    fn group(block: &[u8], _: usize, levels: &mut [u8]) -> GroupScale {
        nibbles(&block[2..18], levels);
        symmetric(half(block, 0), 8.0)
    }
}

/// Scale, offset, nibbles.
pub(super) struct Q4_1;

impl BlockFormat for Q4_1 {
    const SHAPE: Shape = shape(4, 20);

    #[inline(always)]
    fn group(block: &[u8], _: usize, levels: &mut [u8]) -> GroupScale {
        nibbles(&block[4..20], levels);
        GroupScale { scale: half(block, 0), offset: half(block, 2) }
    }
}

/// Scale, the levels' fifth bits, nibbles.
pub(super) struct Q5_0;

impl BlockFormat for Q5_0 {
    const SHAPE: Shape = shape(5, 22);

    #[inline(always)]
    fn group(block: &[u8], _: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<32>(levels);
        nibbles(&block[6..22], levels);
        fifth_bits(&block[2..6], levels);
        symmetric(half(block, 0), 16.0)
    }
}

/// Scale, offset, the levels' fifth bits, nibbles.
pub(super) struct Q5_1;

impl BlockFormat for Q5_1 {
    const SHAPE: Shape = shape(5, 24);

    #[inline(always)]
    fn group(block: &[u8], _: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<32>(levels);
        nibbles(&block[8..24], levels);
        fifth_bits(&block[4..8], levels);
        GroupScale { scale: half(block, 0), offset: half(block, 2) }
    }
}

/// Scale, signed bytes.
pub(super) struct Q8_0;

impl BlockFormat for Q8_0 {
    const SHAPE: Shape = shape(8, 34);

    #[inline(always)]
    fn group(block: &[u8], _: usize, levels: &mut [u8]) -> GroupScale {
        for (level, byte) in levels.iter_mut().zip(&block[2..34]) {
            *level = byte ^ 0x80;
        }
        symmetric(half(block, 0), 128.0)
    }
}
