//! Random numbers by position, so that any part of a tensor can be generated without the parts
//! before it.

/// Word `index` of a stream: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
/// generators, 2014). Its state grows by a constant, so the state at any step is a product.
pub(super) fn word(stream: u64, index: u64) -> u64 {
    let state = stream.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Number `index` of a fixed normally distributed sequence: the sum of twelve uniform numbers,
/// minus its mean. Odd indices mirror the number before them, so the mean of an even count is zero.
pub(super) fn normal(index: u64) -> f32 {
    let uniform = |i: u64| (word(NORMALS, 12 * (index / 2) + i) >> 40) as f32 / (1u64 << 24) as f32;
    let value = (0..12).map(uniform).sum::<f32>() - 6.0;
    if index.is_multiple_of(2) { value } else { -value }
}

/// The stream of [`normal`].
const NORMALS: u64 = 1;
