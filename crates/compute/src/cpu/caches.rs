//! All caches of a rank's layers, by kind.

use std::ops::Range;

use super::attention::kv::{HeadCache, HeadShape};
use super::attention::latent::LatentCache;
use super::layout::region::{Region, cache_region};
use crate::backend::{CacheKind, CachePart, CacheShape, ComputeError};
use crate::step::StepSequence;

/// The caches of one rank.
#[derive(Debug)]
pub struct Caches {
    caches: Vec<Cache>,
}

#[derive(Debug)]
enum Cache {
    Heads(HeadCache),
    Latent(LatentCache),
    State(States),
}

/// States of all sequences in one layer.
#[derive(Debug)]
pub(super) struct States {
    /// f32, `[slots][numbers]`.
    data: Region,
    numbers: usize,
    drafts: Drafts,
}

/// Inputs of drafts' rows in one layer, until it is known which of them are right. They are far
/// smaller than the states after each row.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    of_slots: Vec<Option<DraftInputs>>,
    /// Memory that another slot used.
    spare: Vec<DraftInputs>,
}

/// Inputs of one sequence's last draft.
#[derive(Debug, Default)]
pub(super) struct DraftInputs {
    /// `[rows][channels]`, before the convolution.
    pub conv: Vec<f32>,
    /// `[rows][numbers]`: what the recurrence reads besides them.
    pub gates: Vec<f32>,
    /// `[rows][channels]`: convolved inputs of the previous draft, of its right rows only.
    pub accepted: Vec<f32>,
}

impl Drafts {
    /// The inputs that a slot's sequence has kept, which are none for most.
    pub fn of(&mut self, slot: usize) -> &mut DraftInputs {
        if slot >= self.of_slots.len() {
            self.of_slots.resize_with(slot + 1, || None);
        }
        let spare = &mut self.spare;
        self.of_slots[slot].get_or_insert_with(|| spare.pop().unwrap_or_default())
    }

    /// Forgets what a slot has kept.
    pub fn forget(&mut self, slot: usize) {
        let Some(mut inputs) = self.of_slots.get_mut(slot).and_then(Option::take) else { return };
        [&mut inputs.conv, &mut inputs.gates, &mut inputs.accepted].into_iter().for_each(Vec::clear);
        self.spare.push(inputs);
    }
}

impl Caches {
    pub(super) fn new(shape: &CacheShape) -> Result<Self, ComputeError> {
        let cache = |&kind: &CacheKind| {
            Ok(match kind {
                CacheKind::Heads { heads, key_dim, value_dim } => {
                    let heads = HeadShape { heads, key_dim, value_dim };
                    Cache::Heads(HeadCache::new(heads, shape.format, shape.blocks)?)
                }
                CacheKind::Latent { rank, rotated, every } => {
                    Cache::Latent(LatentCache::new([rank, rotated], every, shape.format, shape.blocks)?)
                }
                CacheKind::State { numbers } => Cache::State(States {
                    data: cache_region(shape.slots * numbers * size_of::<f32>())?,
                    numbers,
                    drafts: Drafts::default(),
                }),
            })
        };
        Ok(Self { caches: shape.caches.iter().map(cache).collect::<Result<_, ComputeError>>()? })
    }

    /// A cache of heads.
    ///
    /// # Panics
    /// When the cache is of another kind: the model uses it wrongly.
    pub(super) fn heads(&mut self, cache: usize) -> &mut HeadCache {
        match &mut self.caches[cache] {
            Cache::Heads(heads) => heads,
            other => panic!("cache {cache} is {}, not heads", other.name()),
        }
    }

    /// A cache of compressed vectors.
    ///
    /// # Panics
    /// As [`Self::heads`].
    pub(super) fn latent(&mut self, cache: usize) -> &mut LatentCache {
        match &mut self.caches[cache] {
            Cache::Latent(latent) => latent,
            other => panic!("cache {cache} is {}, not latent", other.name()),
        }
    }

    /// A cache of states.
    ///
    /// # Panics
    /// As [`Self::heads`].
    pub(super) fn states(&mut self, cache: usize) -> &mut States {
        match &mut self.caches[cache] {
            Cache::State(states) => states,
            other => panic!("cache {cache} is {}, not a state", other.name()),
        }
    }

    /// Copies all states of a slot to another.
    pub(super) fn copy_slot(&mut self, from: usize, to: usize) {
        for cache in &mut self.caches {
            if let Cache::State(states) = cache {
                let bytes = states.numbers * size_of::<f32>();
                states.data.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
            }
        }
    }

    /// Appends the bytes of a part, cache by cache.
    pub(super) fn read(&mut self, part: CachePart, out: &mut Vec<u8>) {
        self.caches
            .iter_mut()
            .flat_map(|cache| cache.part(part))
            .for_each(|bytes| out.extend_from_slice(bytes));
    }

    /// Writes bytes of [`Caches::read`] to a part. Returns false if their number is wrong.
    pub(super) fn write(&mut self, part: CachePart, mut from: &[u8]) -> bool {
        let parts: Vec<&mut [u8]> = self.caches.iter_mut().flat_map(|cache| cache.part(part)).collect();
        if parts.iter().map(|bytes| bytes.len()).sum::<usize>() != from.len() {
            return false;
        }
        for bytes in parts {
            let (first, rest) = from.split_at(bytes.len());
            bytes.copy_from_slice(first);
            from = rest;
        }
        true
    }
}

impl Cache {
    /// The bytes of a part. The unused ones of three are empty.
    fn part(&mut self, part: CachePart) -> [&mut [u8]; 3] {
        match (self, part) {
            (Self::Heads(heads), CachePart::Block(block)) => heads.block_bytes(block),
            (Self::Latent(latent), CachePart::Block(block)) => {
                let [numbers, scales] = latent.block_bytes(block);
                [numbers, scales, &mut []]
            }
            (Self::State(states), CachePart::Slot(slot)) => {
                let bytes = states.numbers * size_of::<f32>();
                [&mut states.data[slot * bytes..][..bytes], &mut [], &mut []]
            }
            _ => [&mut [], &mut [], &mut []],
        }
    }

    const fn name(&self) -> &'static str {
        match self {
            Self::Heads(_) => "heads",
            Self::Latent(_) => "latent",
            Self::State(_) => "a state",
        }
    }
}

impl States {
    /// Inputs of drafts' rows.
    pub(super) fn drafts(&mut self) -> &mut Drafts {
        &mut self.drafts
    }

    /// A part of a sequence's state, which is cleared if `row` is at position 0.
    ///
    /// # Panics
    /// When the slot is not in the cache.
    pub(super) fn of(&mut self, sequence: &StepSequence, row: usize, part: Range<usize>) -> &mut [f32] {
        let bytes = self.numbers * size_of::<f32>();
        let state = &mut self.data[sequence.slot * bytes..][..bytes];
        // SAFETY: every bit pattern is an f32, and regions begin at cache lines, so all numbers are
        // aligned.
        let (before, state, after) = unsafe { state.align_to_mut::<f32>() };
        debug_assert!(before.is_empty() && after.is_empty());
        let state = &mut state[part];
        if sequence.position(row) == 0 {
            state.fill(0.0);
        }
        state
    }
}
