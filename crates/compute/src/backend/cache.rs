//! What layers keep for a sequence: keys and values, compressed vectors, or a state of fixed size.

use serde::{Deserialize, Serialize};

use crate::step::KV_BLOCK_TOKENS;

/// Number format of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// f16.
    #[default]
    F16,
    /// int8 with one f32 scale per token and head, for keys and values each. Takes little more than
    /// half of f16's memory, and of its bandwidth at long contexts.
    Int8,
}

impl KvFormat {
    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Bytes of the scale of one vector.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F16 => 0,
            Self::Int8 => size_of::<f32>(),
        }
    }

    const fn vector_bytes(self, numbers: usize) -> usize {
        numbers * self.bytes() + self.scale_bytes()
    }
}

/// The content of one cache. A layer may have several caches, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheKind {
    /// A key and a value per token and KV head, in blocks of tokens.
    Heads {
        /// KV heads on this rank.
        heads: usize,
        /// Width of a key.
        key_dim: usize,
        /// Width of a value.
        value_dim: usize,
    },
    /// One vector per token, or per several, in blocks of tokens, shared by all heads and without a
    /// value: a compressed vector, from which each head's key and value are computed, and a rotated
    /// part of the key.
    Latent {
        /// Width of the compressed vector.
        rank: usize,
        /// Width of the rotated part.
        rotated: usize,
        /// Number of tokens that share a vector; usually 1. It divides a block's tokens, or they
        /// divide it.
        every: usize,
    },
    /// A fixed number of f32 per sequence, whatever its length, in slots.
    State {
        /// Numbers per sequence.
        numbers: usize,
    },
}

impl CacheKind {
    /// Bytes per token.
    pub const fn bytes_per_token(self, format: KvFormat) -> usize {
        match self {
            Self::Heads { heads, key_dim, value_dim } => {
                heads * (format.vector_bytes(key_dim) + format.vector_bytes(value_dim))
            }
            Self::Latent { rank, rotated, every } => {
                let bytes = format.vector_bytes(rank) + format.vector_bytes(rotated);
                // A block has at least one vector.
                let most = KV_BLOCK_TOKENS;
                bytes.div_ceil(if every < most { every } else { most })
            }
            Self::State { .. } => 0,
        }
    }

    /// Bytes per token of the larger of its two buffers: keys and values, or compressed vectors and
    /// rotated parts.
    pub fn largest_bytes_per_token(self, format: KvFormat) -> usize {
        match self {
            Self::Heads { heads, key_dim, value_dim } => heads * format.vector_bytes(key_dim.max(value_dim)),
            Self::Latent { rank, rotated, .. } => format.vector_bytes(rank.max(rotated)),
            Self::State { .. } => 0,
        }
    }

    /// Bytes per sequence, in addition to those per token.
    pub const fn bytes_per_slot(self) -> usize {
        match self {
            Self::State { numbers } => numbers * size_of::<f32>(),
            Self::Heads { .. } | Self::Latent { .. } => 0,
        }
    }
}

/// A part of all caches that is copied to the host and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CachePart {
    /// A block of [`CacheKind::Heads`] and [`CacheKind::Latent`].
    Block(usize),
    /// A slot of [`CacheKind::State`].
    Slot(usize),
}

/// The caches of one rank and their capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheShape {
    /// Number format of [`CacheKind::Heads`] and [`CacheKind::Latent`].
    pub format: KvFormat,
    /// The caches. Operations name one by its index.
    pub caches: Vec<CacheKind>,
    /// Blocks of [`crate::step::KV_BLOCK_TOKENS`] tokens, which are assigned to sequences one at a
    /// time.
    pub blocks: usize,
    /// Maximum sequences with a state at the same time.
    pub slots: usize,
}

impl CacheShape {
    /// Bytes of one token in all caches.
    pub fn bytes_per_token(&self) -> usize {
        self.caches.iter().map(|cache| cache.bytes_per_token(self.format)).sum()
    }

    /// Bytes of one token in the largest of all buffers. A device binds a buffer as a whole.
    pub fn largest_bytes_per_token(&self) -> usize {
        let largest = self.caches.iter().map(|cache| cache.largest_bytes_per_token(self.format));
        largest.max().unwrap_or(0)
    }

    /// Bytes of one sequence in all caches, in addition to those of its tokens.
    pub fn bytes_per_slot(&self) -> usize {
        self.caches.iter().map(|cache| cache.bytes_per_slot()).sum()
    }
}
