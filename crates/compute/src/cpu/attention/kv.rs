//! Keys and values of a rank's layers, in blocks of tokens that sequences are given one at a time.
//!
//! A block holds, for each KV head, its keys transposed in tiles of 16 tokens, `[tile][dimension][16]`, so that 16 scores
//! come out of a register without a sum across lanes; and its values as they come, `[token][dimension]`. As f16, or as bytes
//! with a scale for each token's key and each token's value: `[keys' 32 scales][values' 32 scales]` of each head.

use crate::backend::{ComputeError, KvFormat, KvLayer, KvShape};
use crate::cpu::layout::region::Region;
use crate::cpu::pointers::SendPtr;
use crate::cpu::product::quantize::{largest, scales};
use crate::cpu::simd::{LANES, Simd};
use crate::step::KV_BLOCK_TOKENS;

/// The largest head that the attention kernel keeps on its stack.
pub(in crate::cpu) const MAX_HEAD_DIM: usize = 256;

/// The cache of all layers.
#[derive(Debug)]
pub struct Kv {
    layers: Vec<Layer>,
    format: KvFormat,
}

#[derive(Debug)]
struct Layer {
    keys: Region,
    values: Region,
    scales: Region,
    shape: KvLayer,
}

impl Kv {
    /// Reserves the address space; pages are taken from the system when blocks are first written.
    pub(in crate::cpu) fn new(shape: &KvShape) -> Result<Self, ComputeError> {
        let format = shape.format;
        let layer = |&layer: &KvLayer| {
            if layer.head_dim % LANES != 0 || layer.head_dim > MAX_HEAD_DIM {
                return Err(ComputeError::Shape {
                    what: "head_dim",
                    value: layer.head_dim,
                    backend: "CPU",
                    needs: "a multiple of 16 up to 256",
                });
            }
            let tokens = shape.blocks * layer.heads * KV_BLOCK_TOKENS;
            let region = |bytes| {
                Region::zeroed(bytes).map_err(|error| ComputeError::Memory {
                    bytes,
                    what: "the KV cache",
                    reason: error.to_string(),
                })
            };
            let numbers = tokens * layer.head_dim * format.bytes();
            let scales = tokens * 2 * format.scale_bytes();
            Ok(Layer {
                keys: region(numbers)?,
                values: region(numbers)?,
                scales: region(scales)?,
                shape: layer,
            })
        };
        Ok(Self { layers: shape.layers.iter().map(layer).collect::<Result<_, _>>()?, format })
    }

    /// One layer, for threads that write different tokens' heads of it, or read others.
    pub(in crate::cpu) fn layer(&mut self, layer: usize) -> KvPart {
        let Layer { keys, values, scales, shape } = &mut self.layers[layer];
        let of_block = shape.heads * KV_BLOCK_TOKENS * shape.head_dim * self.format.bytes();
        KvPart {
            blocks: keys.len() / of_block.max(1),
            keys: SendPtr(keys.as_mut_ptr()),
            values: SendPtr(values.as_mut_ptr()),
            scales: SendPtr(scales.as_mut_ptr().cast()),
            shape: *shape,
            format: self.format,
        }
    }
}

/// Pointers into a layer's cache.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct KvPart {
    blocks: usize,
    keys: SendPtr<u8>,
    values: SendPtr<u8>,
    scales: SendPtr<f32>,
    shape: KvLayer,
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
        let at = index * KV_BLOCK_TOKENS * self.shape.head_dim * self.format.bytes();
        let scales = match self.format {
            KvFormat::F16 => 0,
            KvFormat::Int8 => index * 2 * KV_BLOCK_TOKENS,
        };
        // SAFETY: the regions hold `blocks × heads` parts of this size.
        unsafe {
            KvBlock { keys: self.keys.at(at), values: self.values.at(at), scales: self.scales.at(scales) }
        }
    }

    /// Stores one token's key and value of one head.
    ///
    /// # Safety
    /// The CPU has `S`; key and value have the head's width; nobody else writes or reads this head of the token.
    #[inline(always)]
    pub unsafe fn write<S: Simd>(&self, block: u32, slot: usize, head: usize, key: &[f32], value: &[f32]) {
        let dim = self.shape.head_dim;
        debug_assert!(slot < KV_BLOCK_TOKENS && key.len() == dim && value.len() == dim);
        let to = self.block(block, head);
        let first = slot / LANES * dim * LANES + slot % LANES;
        // SAFETY: a part holds KV_BLOCK_TOKENS keys and values of `dim` numbers, and as many scales.
        unsafe {
            match self.format {
                KvFormat::F16 => {
                    let mut halves = [0u16; MAX_HEAD_DIM];
                    to_f16::<S>(key, halves.as_mut_ptr());
                    let keys = to.keys.cast::<u16>().add(first);
                    for (d, x) in halves[..dim].iter().enumerate() {
                        *keys.add(d * LANES) = *x;
                    }
                    to_f16::<S>(value, to.values.cast::<u16>().add(slot * dim));
                }
                KvFormat::Int8 => {
                    let mut bytes = [0i8; MAX_HEAD_DIM];
                    *to.scales.add(slot) = to_i8::<S>(key, bytes.as_mut_ptr());
                    let keys = to.keys.cast::<i8>().add(first);
                    for (d, x) in bytes[..dim].iter().enumerate() {
                        *keys.add(d * LANES) = *x;
                    }
                    let values = to.values.cast::<i8>().add(slot * dim);
                    *to.scales.add(KV_BLOCK_TOKENS + slot) = to_i8::<S>(value, values);
                }
            }
        }
    }
}

/// # Safety
/// The CPU has `S`; `to` takes as many numbers as `from` has, a multiple of 16.
#[inline(always)]
unsafe fn to_f16<S: Simd>(from: &[f32], to: *mut u16) {
    for i in (0..from.len()).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe { S::store_f16(to.add(i), S::load(from.as_ptr().add(i))) };
    }
}

/// Stores bytes and returns their scale.
///
/// # Safety
/// As [`to_f16`].
#[inline(always)]
unsafe fn to_i8<S: Simd>(from: &[f32], to: *mut i8) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let (scale, inverse) = scales(largest::<S>(from.as_ptr(), 0..from.len()), 127.0);
        for i in (0..from.len()).step_by(LANES) {
            S::store_i8(to.add(i), S::mul(S::load(from.as_ptr().add(i)), S::splat(inverse)));
        }
        scale
    }
}
