//! Keys and values of a rank's layers, in blocks of tokens that sequences are given one at a time.
//!
//! A block holds, for each KV head, its keys transposed in tiles of 16 tokens, `[tile][dimension][16]`, so that 16 scores
//! come out of a register without a sum across lanes; and its values as they come, `[token][dimension]`. Both in f16.

use half::f16;

use super::memory::Region;
use super::simd::LANES;
use crate::backend::{ComputeError, KvLayer, KvShape};
use crate::step::KV_BLOCK_TOKENS;

/// The largest head that the attention kernel keeps on its stack.
pub(super) const MAX_HEAD_DIM: usize = 256;

/// The cache of all layers.
#[derive(Debug)]
pub struct Kv {
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    keys: Region,
    values: Region,
    shape: KvLayer,
}

impl Kv {
    /// Reserves the address space; pages are taken from the system when blocks are first written.
    pub(super) fn new(shape: &KvShape) -> Result<Self, ComputeError> {
        let layer = |&layer: &KvLayer| {
            if layer.head_dim % LANES != 0 || layer.head_dim > MAX_HEAD_DIM {
                return Err(ComputeError::Shape {
                    what: "head_dim",
                    value: layer.head_dim,
                    backend: "CPU",
                    needs: "a multiple of 16 up to 256",
                });
            }
            let bytes = shape.blocks * layer.heads * KV_BLOCK_TOKENS * layer.head_dim * 2;
            let region = || {
                Region::zeroed(bytes).map_err(|error| ComputeError::Memory {
                    bytes,
                    what: "the KV cache",
                    reason: error.to_string(),
                })
            };
            Ok(Layer { keys: region()?, values: region()?, shape: layer })
        };
        Ok(Self { layers: shape.layers.iter().map(layer).collect::<Result<_, _>>()? })
    }

    /// Stores one token's key and value of one head.
    pub(super) fn append(
        &mut self,
        layer: usize,
        block: u32,
        slot: usize,
        head: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let Layer { keys, values, shape } = &mut self.layers[layer];
        let (at, len, dim) = (shape.offset(block, head), shape.len(), shape.head_dim);
        let keys = &mut keys[2 * at..2 * (at + len)];
        let (tile, lane) = (slot / LANES, slot % LANES);
        for (d, x) in key.iter().enumerate() {
            let index = (tile * dim + d) * LANES + lane;
            keys[2 * index..2 * index + 2].copy_from_slice(&f16::from_f32(*x).to_ne_bytes());
        }
        let values = &mut values[2 * (at + slot * dim)..][..2 * dim];
        for (bytes, x) in values.as_chunks_mut::<2>().0.iter_mut().zip(value) {
            *bytes = f16::from_f32(*x).to_ne_bytes();
        }
    }

    /// The keys and the values of one head in one block.
    pub(super) fn block(&self, layer: usize, block: u32, head: usize) -> (*const u16, *const u16) {
        let Layer { keys, values, shape } = &self.layers[layer];
        let at = shape.offset(block, head);
        let bytes = 2 * at..2 * (at + shape.len());
        (keys[bytes.clone()].as_ptr().cast(), values[bytes].as_ptr().cast())
    }
}

impl KvLayer {
    /// Numbers of one head in one block, of keys or values.
    fn len(self) -> usize {
        KV_BLOCK_TOKENS * self.head_dim
    }

    /// Offset of a head's part of a block, in numbers. A block past the end of the region is caught by its slice.
    fn offset(self, block: u32, head: usize) -> usize {
        (block as usize * self.heads + head) * self.len()
    }
}
