//! Blocks of 256 columns, whose groups have small integers as scales, in units of the block's f16.

use super::{Bits, BlockFormat, GroupScale, Shape, half, nibbles, sized};

const fn shape(bits: u32, bytes: usize, group: usize) -> Shape {
    Shape { columns: 256, bytes, bits, group }
}

/// Two bits of each of 16 levels. Four runs of 32 columns share 32 bytes.
#[inline(always)]
fn bit_pairs(packed: &[u8], group: usize, levels: &mut [u8; 16]) {
    let (half, run) = (group / 8, group % 8 / 2);
    let from = &packed[32 * half + 16 * (group % 2)..][..16];
    Bits { first: 2 * run, count: 2, to: 0 }.set(levels, from);
}

/// Scales and offsets as nibbles (16 bytes), levels (64), scale and offset of the block.
pub(super) struct Q2K;

impl BlockFormat for Q2K {
    const SHAPE: Shape = shape(2, 84, 16);
    const FACTORS: Option<[usize; 2]> = Some([80, 82]);

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
    const FACTORS: Option<[usize; 2]> = Some([108, 108]);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<16>(levels);
        bit_pairs(&block[32..96], group, levels);
        let (run, third_bits) = (group / 2, &block[16 * (group % 2)..][..16]);
        Bits { first: run, count: 1, to: 2 }.add(levels, third_bits);
        let scales = &block[96..108];
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let scale = half(block, 108) * (f32::from(low | high << 4) - 32.0);
        GroupScale { scale, offset: -4.0 * scale }
    }
}

/// Scales and offsets of the groups of Q4_K and Q5_K: 6 bits each, in 12 bytes after the block's
/// own. The first four groups have a byte for each scale, then one for each offset; the upper two
/// bits of these bytes, and nibbles of the last four, are the others'.
#[inline(always)]
fn six_bits(block: &[u8]) -> [GroupScale; 8] {
    let word = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    let (first_scales, first_offsets, last) = (word(4), word(8), word(12));
    let all = |first: u32, nibbles: u32| {
        let last = nibbles & 0x0f0f_0f0f | (first >> 6 & 0x0303_0303) << 4;
        (u64::from(first & 0x3f3f_3f3f) | u64::from(last) << 32).to_le_bytes()
    };
    let (scales, offsets) = (all(first_scales, last), all(first_offsets, last >> 4));
    let (scale, offset) = (half(block, 0), -half(block, 2));
    std::array::from_fn(|group| GroupScale {
        scale: scale * f32::from(scales[group]),
        offset: offset * f32::from(offsets[group]),
    })
}

/// Nibbles of a group of 32. Two groups share 32 bytes.
#[inline(always)]
fn group_nibbles(packed: &[u8], group: usize, levels: &mut [u8; 32]) {
    Bits::nibbles(4 * (group % 2)).set(levels, &packed[32 * (group / 2)..][..32]);
}

/// Nibbles of all groups.
#[inline(always)]
fn block_nibbles(packed: &[u8], levels: &mut [u8; 256]) {
    for (pair, packed) in levels.as_chunks_mut::<64>().0.iter_mut().zip(packed.as_chunks::<32>().0) {
        nibbles(packed, pair);
    }
}

/// Scale and offset of the block, scales and offsets, nibbles.
pub(super) struct Q4K;

impl BlockFormat for Q4K {
    const SHAPE: Shape = shape(4, 144, 32);
    const FACTORS: Option<[usize; 2]> = Some([0, 2]);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        group_nibbles(&block[16..144], group, sized(levels));
        six_bits(block)[group]
    }

    #[inline(always)]
    fn block(block: &[u8], levels: &mut [u8], scales: &mut [GroupScale]) {
        block_nibbles(&block[16..144], sized(levels));
        scales.copy_from_slice(&six_bits(block));
    }
}

/// Scale and offset of the block, scales and offsets, the levels' fifth bits (32 bytes), nibbles.
pub(super) struct Q5K;

impl Q5K {
    #[inline(always)]
    fn fifth_bits(block: &[u8], group: usize, levels: &mut [u8; 32]) {
        Bits { first: group, count: 1, to: 4 }.add(levels, &block[16..48]);
    }
}

impl BlockFormat for Q5K {
    const SHAPE: Shape = shape(5, 176, 32);
    const FACTORS: Option<[usize; 2]> = Some([0, 2]);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized(levels);
        group_nibbles(&block[48..176], group, levels);
        Self::fifth_bits(block, group, levels);
        six_bits(block)[group]
    }

    #[inline(always)]
    fn block(block: &[u8], levels: &mut [u8], scales: &mut [GroupScale]) {
        let levels = sized(levels);
        block_nibbles(&block[48..176], levels);
        for (group, levels) in levels.as_chunks_mut().0.iter_mut().enumerate() {
            Self::fifth_bits(block, group, levels);
        }
        scales.copy_from_slice(&six_bits(block));
    }
}

/// The levels' lower nibbles (128 bytes), their upper two bits (64), signed scales (16), the
/// block's scale.
pub(super) struct Q6K;

impl Q6K {
    /// Levels of lower nibbles and upper pairs, each from a bit on.
    #[inline(always)]
    fn levels(levels: &mut [u8], (nibbles, nibble): (&[u8], usize), (pairs, pair): (&[u8], usize)) {
        Bits::nibbles(nibble).set(levels, nibbles);
        Bits { first: pair, count: 2, to: 4 }.add(levels, pairs);
    }

    /// `unit` is the block's scale.
    #[inline(always)]
    fn scale(unit: f32, block: &[u8], group: usize) -> GroupScale {
        let scale = unit * f32::from(block[192 + group] as i8);
        GroupScale { scale, offset: -32.0 * scale }
    }
}

impl BlockFormat for Q6K {
    const SHAPE: Shape = shape(6, 210, 16);
    const FACTORS: Option<[usize; 2]> = Some([208, 208]);

    #[inline(always)]
    fn group(block: &[u8], group: usize, levels: &mut [u8]) -> GroupScale {
        let levels = sized::<16>(levels);
        // Each half of the columns is 8 groups: four in the lower nibbles of 64 bytes, four in the
        // upper ones.
        let (half_of, within) = (group / 8, group % 8);
        let nibbles = &block[64 * half_of + 16 * (within % 4)..][..16];
        let (nibble, pair) = (4 * (within / 4), 2 * (within / 2));
        let pairs = &block[128 + 32 * half_of + 16 * (within % 2)..][..16];
        Self::levels(levels, (nibbles, nibble), (pairs, pair));
        Self::scale(half(block, 208), block, group)
    }

    #[inline(always)]
    fn block(block: &[u8], levels: &mut [u8], scales: &mut [GroupScale]) {
        let halves = sized::<256>(levels).as_chunks_mut::<128>().0.iter_mut();
        let nibbles = block.as_chunks::<64>().0;
        let pairs = block[128..].as_chunks::<32>().0;
        for ((levels, nibbles), pairs) in halves.zip(nibbles).zip(pairs) {
            // Runs of two groups; the first two have lower nibbles.
            for (run, levels) in levels.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let (nibble, pair) = (4 * (run / 2), 2 * run);
                let nibbles = &nibbles[32 * (run % 2)..][..32];
                Self::levels(levels, (nibbles, nibble), (pairs, pair));
            }
        }
        // Once: it is often below the smallest normal f16, which takes the processor long.
        let unit = half(block, 208);
        for (group, scale) in scales.iter_mut().enumerate() {
            *scale = Self::scale(unit, block, group);
        }
    }
}
