//! Blocks of 256 columns, whose groups have small integers as scales, in units of the block's f16.

use super::{BlockFormat, GroupScale, Shape, half, sized};

const fn shape(bits: u32, bytes: usize, group: usize) -> Shape {
    Shape { columns: 256, bytes, bits, group }
}

/// Two bits of each of 16 levels. Four runs of 32 columns share 32 bytes.
#[inline(always)]
fn bit_pairs(packed: &[u8], group: usize, levels: &mut [u8; 16]) {
    let (half, run) = (group / 8, group % 8 / 2);
    let from = &packed[32 * half + 16 * (group % 2)..][..16];
    for (level, byte) in levels.iter_mut().zip(from) {
        *level = byte >> (2 * run) & 3;
    }
}

/// Scales and offsets as nibbles (16 bytes), levels (64), scale and offset of the block.
pub(super) struct Q2K;

impl BlockFormat for Q2K {
    const SHAPE: Shape = shape(2, 84, 16);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<16>(levels);
        bit_pairs(&block[16..80], group, levels);
        let (scale, offset) = (block[group] & 15, block[group] >> 4);
        GroupScale { scale: half(block, 80) * f32::from(scale), offset: -half(block, 82) * f32::from(offset) }
    }
}

/// The levels' third bits (32 bytes), their lower bits (64), scales of 6 bits (12), the block's
/// scale.
pub(super) struct Q3K;

impl BlockFormat for Q3K {
    const SHAPE: Shape = shape(3, 110, 16);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<16>(levels);
        bit_pairs(&block[32..96], group, levels);
        let (run, third_bits) = (group / 2, &block[16 * (group % 2)..][..16]);
        for (level, byte) in levels.iter_mut().zip(third_bits) {
            *level |= (byte >> run & 1) << 2;
        }
        let scales = &block[96..108];
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let scale = half(block, 108) * (f32::from(low | high << 4) - 32.0);
        GroupScale { scale, offset: -4.0 * scale }
    }
}

/// Scale and offset of a group of Q4_K and Q5_K: 6 bits each, in 12 bytes after the block's own.
#[inline(always)]
fn six_bits(block: &[u8], group: usize) -> GroupScale {
    let packed = &block[4..16];
    let (scale, offset) = match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => (
            packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
            packed[group + 4] >> 4 | packed[group] >> 6 << 4,
        ),
    };
    GroupScale { scale: half(block, 0) * f32::from(scale), offset: -half(block, 2) * f32::from(offset) }
}

/// Nibbles of a group of 32. Two groups share 32 bytes.
#[inline(always)]
fn group_nibbles(packed: &[u8], group: usize, levels: &mut [u8; 32]) {
    let shift = 4 * (group % 2);
    for (level, byte) in levels.iter_mut().zip(&packed[32 * (group / 2)..][..32]) {
        *level = byte >> shift & 15;
    }
}

/// Scale and offset of the block, scales and offsets, nibbles.
pub(super) struct Q4K;

impl BlockFormat for Q4K {
    const SHAPE: Shape = shape(4, 144, 32);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<32>(levels);
        group_nibbles(&block[16..144], group, levels);
        six_bits(block, group)
    }
}

/// Scale and offset of the block, scales and offsets, the levels' fifth bits (32 bytes), nibbles.
pub(super) struct Q5K;

impl BlockFormat for Q5K {
    const SHAPE: Shape = shape(5, 176, 32);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<32>(levels);
        group_nibbles(&block[48..176], group, levels);
        for (level, byte) in levels.iter_mut().zip(&block[16..48]) {
            *level |= (byte >> group & 1) << 4;
        }
        six_bits(block, group)
    }
}

/// The levels' lower nibbles (128 bytes), their upper two bits (64), signed scales (16), the
/// block's scale.
pub(super) struct Q6K;

impl BlockFormat for Q6K {
    const SHAPE: Shape = shape(6, 210, 16);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<16>(levels);
        // Each half of the columns is 8 groups: four in the lower nibbles of 64 bytes, four in the
        // upper ones.
        let (half_of, within) = (group / 8, group % 8);
        let nibbles = &block[64 * half_of + 16 * (within % 4)..][..16];
        let (nibble, pair) = (4 * (within / 4), 2 * (within / 2));
        let pairs = &block[128 + 32 * half_of + 16 * (within % 2)..][..16];
        for ((level, low), high) in levels.iter_mut().zip(nibbles).zip(pairs) {
            *level = low >> nibble & 15 | (high >> pair & 3) << 4;
        }
        let scale = half(block, 208) * f32::from(block[192 + group] as i8);
        GroupScale { scale, offset: -32.0 * scale }
    }
}
