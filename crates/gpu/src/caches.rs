//! The caches of layers, in the device's memory.

use std::ops::Range;

use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{CacheKind, CachePart, CacheShape, ComputeError, KvFormat, MAX_DRAFT};

use crate::backend::GpuBackend;
use crate::buffer::Memory;
use crate::device::Device;
use crate::kernel::{MAX_KEY, MAX_VALUE};
use crate::slots::OTHER_STATES;

/// Vectors of tokens: `[blocks][heads][32 tokens][words]`, or fewer vectors that stand for several
/// tokens each.
#[derive(Debug)]
pub(crate) struct Vectors {
    /// Numbers in a vector.
    pub width: usize,
    pub words: usize,
    /// Tokens of a vector.
    pub every: usize,
    pub data: Memory,
    /// A scale for each vector, with [`KvFormat::Int8`].
    pub scales: Option<Memory>,
}

/// One cache.
#[derive(Debug)]
pub(crate) enum Cache {
    /// Keys and values of heads, or compressed vectors and rotated parts of a single head.
    Tokens { heads: usize, first: Vectors, second: Vectors },
    /// `[slots][numbers]`.
    State {
        numbers: usize,
        data: Memory,
        /// Inputs of each slot's last draft: of the convolution, of the recurrence. Made when they
        /// are first needed.
        kept: [Option<Memory>; 2],
    },
}

/// All caches of a rank.
#[derive(Debug)]
pub struct Caches {
    pub(crate) format: KvFormat,
    pub(crate) all: Vec<Cache>,
    /// States have places as in [`crate::slots`], otherwise that of their slot.
    pub(crate) alternates: bool,
}

fn fits(what: &'static str, value: usize, limit: usize, needs: &'static str) -> Result<(), ComputeError> {
    if value <= limit { Ok(()) } else { Err(ComputeError::Shape { what, value, backend: "GPU", needs }) }
}

impl Caches {
    pub(crate) fn new(
        shape: &CacheShape,
        alternates: bool,
        device: &mut Device,
    ) -> Result<Self, ComputeError> {
        let slots = shape.slots + if alternates { OTHER_STATES } else { 0 };
        let mut all = Vec::with_capacity(shape.caches.len());
        for kind in &shape.caches {
            all.push(match *kind {
                CacheKind::Heads { heads, key_dim, value_dim } => {
                    fits("the width of a key", key_dim, MAX_KEY, "at most 1024")?;
                    fits("the width of a value", value_dim, MAX_VALUE, "at most 512")?;
                    let first = vectors(shape, (heads, key_dim, 1), device)?;
                    Cache::Tokens { heads, first, second: vectors(shape, (heads, value_dim, 1), device)? }
                }
                CacheKind::Latent { rank, rotated, every } => {
                    fits("the width of a compressed vector", rank, MAX_VALUE, "at most 512")?;
                    fits("the width of a rotated part", rotated, MAX_KEY - MAX_VALUE, "at most 512")?;
                    let first = vectors(shape, (1, rank, every), device)?;
                    Cache::Tokens { heads: 1, first, second: vectors(shape, (1, rotated, every), device)? }
                }
                CacheKind::State { numbers } => {
                    let data = device.memory(slots * numbers * 4, "states")?;
                    Cache::State { numbers, data, kept: [None, None] }
                }
            });
        }
        Ok(Self { format: shape.format, all, alternates })
    }

    /// A cache of tokens.
    ///
    /// # Panics
    /// If the cache is of another kind. The model has created it for this layer.
    pub(crate) fn tokens(&self, cache: usize) -> (usize, &Vectors, &Vectors) {
        match &self.all[cache] {
            Cache::Tokens { heads, first, second } => (*heads, first, second),
            Cache::State { .. } => panic!("cache {cache} holds states, not tokens"),
        }
    }

    /// The words of a part of all caches.
    pub(crate) fn places(&self, part: CachePart) -> Vec<(&Memory, Range<usize>)> {
        let mut places = Vec::new();
        let mut add =
            |memory, index: usize, words: usize| places.push((memory, index * words..(index + 1) * words));
        for cache in &self.all {
            match (cache, part) {
                (Cache::Tokens { heads, first, second }, CachePart::Block(block)) => {
                    for vectors in [first, second] {
                        let count = heads * of_block(vectors.every);
                        add(&vectors.data, block, count * vectors.words);
                        if let Some(scales) = &vectors.scales {
                            add(scales, block, count);
                        }
                    }
                }
                (Cache::State { numbers, data, .. }, CachePart::Slot(slot)) => add(data, slot, *numbers),
                _ => {}
            }
        }
        places
    }

    /// Memory for `width` numbers of each row of a draft in each slot: what a convolution reads
    /// (`which` is 0), or what else a recurrence reads (1).
    ///
    /// # Panics
    /// As [`Self::states`].
    pub(crate) fn kept(
        &mut self,
        cache: usize,
        (which, width): (usize, usize),
        device: &mut Device,
    ) -> Result<Memory, ComputeError> {
        let Cache::State { numbers, data, kept } = &mut self.all[cache] else {
            panic!("cache {cache} holds tokens, not states")
        };
        let slots = data.bytes() as usize / (4 * (*numbers).max(1));
        let bytes = slots * MAX_DRAFT * width * 4;
        GpuBackend::grown(device, &mut kept[which], bytes, "drafts")
    }

    /// A cache of states, and the numbers in one state.
    ///
    /// # Panics
    /// If the cache is of another kind. The model has created it for this layer.
    pub(crate) fn states(&self, cache: usize) -> (&Memory, usize) {
        match &self.all[cache] {
            Cache::State { numbers, data, .. } => (data, *numbers),
            Cache::Tokens { .. } => panic!("cache {cache} holds tokens, not states"),
        }
    }
}

/// Vectors of a head in a block.
fn of_block(every: usize) -> usize {
    (KV_BLOCK_TOKENS / every).max(1)
}

fn vectors(
    shape: &CacheShape,
    (heads, width, every): (usize, usize, usize),
    device: &mut Device,
) -> Result<Vectors, ComputeError> {
    let words = (width * shape.format.bytes()).div_ceil(4);
    let count = shape.blocks * heads * of_block(every);
    let data = device.memory(count * words * 4, "the KV cache")?;
    let scales = match shape.format {
        KvFormat::F16 => None,
        KvFormat::Int8 => Some(device.memory(count * 4, "scales of the KV cache")?),
    };
    Ok(Vectors { width, words, every, data, scales })
}
