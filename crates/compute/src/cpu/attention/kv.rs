//! Keys and values of KV heads, in blocks of tokens that are assigned to sequences one at a time.
//!
//! A block holds, for each KV head, its keys transposed in tiles of 16 tokens,
//! `[tile][dimension][16]`, so that 16 scores come out of a register without a sum across lanes,
//! and its values by token, `[token][dimension]`. Numbers are f16, or int8 with a scale per token:
//! `[keys' 32 scales][values' 32 scales]` of each head.

use crate::backend::{ComputeError, KvFormat};
use crate::cpu::layout::region::{Region, cache_region};
use crate::cpu::pointers::SendPtr;
use crate::cpu::product::quantize::{largest, scales};
use crate::cpu::simd::{LANES, Simd};
use crate::step::KV_BLOCK_TOKENS;

/// Maximum width of a key or value in the attention kernels, which keep heads on the stack.
pub(in crate::cpu) const MAX_HEAD_DIM: usize = 512;

/// Heads of a cache and their widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) struct HeadShape {
    pub heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

/// Keys and values of one layer's heads.
#[derive(Debug)]
pub(in crate::cpu) struct HeadCache {
    keys: Region,
    values: Region,
    scales: Region,
    shape: HeadShape,
    format: KvFormat,
}

impl HeadCache {
    /// Reserves the address space; the system provides pages when blocks are first written.
    pub fn new(shape: HeadShape, format: KvFormat, blocks: usize) -> Result<Self, ComputeError> {
        for (what, value) in
            [("the width of a key", shape.key_dim), ("the width of a value", shape.value_dim)]
        {
            if !value.is_multiple_of(LANES) || value > MAX_HEAD_DIM {
                return Err(ComputeError::Shape {
                    what,
                    value,
                    backend: "CPU",
                    needs: "a multiple of 16 up to 512",
                });
            }
        }
        let tokens = blocks * shape.heads * KV_BLOCK_TOKENS;
        Ok(Self {
            keys: cache_region(tokens * shape.key_dim * format.bytes())?,
            values: cache_region(tokens * shape.value_dim * format.bytes())?,
            scales: cache_region(tokens * 2 * format.scale_bytes())?,
            shape,
            format,
        })
    }

    /// A block's keys, values and scales.
    pub fn block_bytes(&mut self, block: usize) -> [&mut [u8]; 3] {
        let Self { shape, format, .. } = *self;
        let tokens = shape.heads * KV_BLOCK_TOKENS;
        [
            (&mut self.keys, tokens * shape.key_dim * format.bytes()),
            (&mut self.values, tokens * shape.value_dim * format.bytes()),
            (&mut self.scales, tokens * 2 * format.scale_bytes()),
        ]
        .map(|(region, bytes)| &mut region[block * bytes..][..bytes])
    }

    /// Pointers for threads that write different tokens' heads, or read others.
    pub fn part(&mut self) -> KvPart {
        let of_block = self.shape.heads * KV_BLOCK_TOKENS * self.shape.key_dim * self.format.bytes();
        KvPart {
            blocks: self.keys.len() / of_block.max(1),
            keys: SendPtr(self.keys.as_mut_ptr()),
            values: SendPtr(self.values.as_mut_ptr()),
            scales: SendPtr(self.scales.as_mut_ptr().cast()),
            shape: self.shape,
            format: self.format,
        }
    }
}

/// Pointers into a [`HeadCache`].
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct KvPart {
    blocks: usize,
    keys: SendPtr<u8>,
    values: SendPtr<u8>,
    scales: SendPtr<f32>,
    pub shape: HeadShape,
    pub format: KvFormat,
}

/// One head's part of a block.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct KvBlock {
    pub keys: *mut u8,
    pub values: *mut u8,
    /// Of keys, then of values; dangling where the format has none.
    pub scales: *mut f32,
}

impl KvPart {
    /// One head's part of a block.
    ///
    /// # Panics
    /// When the cache has no such block or head.
    #[inline(always)]
    pub fn block(&self, block: u32, head: usize) -> KvBlock {
        assert!(
            (block as usize) < self.blocks && head < self.shape.heads,
            "block {block} is not in the cache"
        );
        let index = block as usize * self.shape.heads + head;
        let of_dim = index * KV_BLOCK_TOKENS * self.format.bytes();
        let scales = match self.format {
            KvFormat::F16 => 0,
            KvFormat::Int8 => index * 2 * KV_BLOCK_TOKENS,
        };
        // SAFETY: the regions hold `blocks × heads` parts of this size.
        unsafe {
            KvBlock {
                keys: self.keys.at(of_dim * self.shape.key_dim),
                values: self.values.at(of_dim * self.shape.value_dim),
                scales: self.scales.at(scales),
            }
        }
    }

    /// Stores one token's key and value of one head.
    ///
    /// # Safety
    /// The CPU has `S`; key and value have their widths; no other thread writes or reads this head
    /// of the token.
    #[inline(always)]
    pub unsafe fn write<S: Simd>(&self, block: u32, slot: usize, head: usize, key: &[f32], value: &[f32]) {
        let HeadShape { key_dim, value_dim, .. } = self.shape;
        debug_assert!(slot < KV_BLOCK_TOKENS && key.len() == key_dim && value.len() == value_dim);
        let to = self.block(block, head);
        let first = slot / LANES * key_dim * LANES + slot % LANES;
        // SAFETY: a part holds KV_BLOCK_TOKENS keys and values of these widths, and as many scales
        // of each.
        unsafe {
            match self.format {
                KvFormat::F16 => {
                    let mut numbers = [0u16; MAX_HEAD_DIM];
                    to_f16::<S>(key, numbers.as_mut_ptr());
                    let keys = to.keys.cast::<u16>().add(first);
                    for (d, x) in numbers[..key_dim].iter().enumerate() {
                        *keys.add(d * LANES) = *x;
                    }
                    to_f16::<S>(value, to.values.cast::<u16>().add(slot * value_dim));
                }
                KvFormat::Int8 => {
                    let mut bytes = [0i8; MAX_HEAD_DIM];
                    *to.scales.add(slot) = to_i8::<S>(key, bytes.as_mut_ptr());
                    let keys = to.keys.cast::<i8>().add(first);
                    for (d, x) in bytes[..key_dim].iter().enumerate() {
                        *keys.add(d * LANES) = *x;
                    }
                    let values = to.values.cast::<i8>().add(slot * value_dim);
                    *to.scales.add(KV_BLOCK_TOKENS + slot) = to_i8::<S>(value, values);
                }
            }
        }
    }
}

/// Stores f16.
///
/// # Safety
/// The CPU has `S`; `to` holds as many numbers as `from`, a multiple of 16.
#[inline(always)]
pub(super) unsafe fn to_f16<S: Simd>(from: &[f32], to: *mut u16) {
    for i in (0..from.len()).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe { S::store_f16(to.add(i), S::load(from.as_ptr().add(i))) };
    }
}

/// Stores int8 and returns their scale.
///
/// # Safety
/// As [`to_f16`].
#[inline(always)]
pub(super) unsafe fn to_i8<S: Simd>(from: &[f32], to: *mut i8) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let (scale, inverse) = scales(largest::<S>(from.as_ptr(), 0..from.len()), 127.0);
        for i in (0..from.len()).step_by(LANES) {
            S::store_i8(to.add(i), S::mul(S::load(from.as_ptr().add(i)), S::splat(inverse)));
        }
        scale
    }
}
