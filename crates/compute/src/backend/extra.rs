//! Operands of operations that few families need, and the list of those that a backend may lack.

use std::fmt;

use super::cache::CacheKind;

/// An operation that a backend may lack. A model that needs one is refused when it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extra {
    /// [`super::Backend::attend_by`] with a [`Scoring`] that is not the default.
    Scoring,
    /// [`Scoring::after`].
    LaterTokens,
    /// [`super::Backend::ungated_experts`].
    UngatedExperts,
    /// [`super::Backend::channel_delta_rule`].
    ChannelDeltaRule,
    /// [`super::Backend::state_space`].
    StateSpace,
    /// [`super::RareOperations::gated_conv`].
    GatedConv,
    /// [`super::Backend::select`] and [`super::Backend::attend_selected`].
    Selection,
    /// [`super::RareOperations::compress`] and [`super::RareOperations::attend_compressed`].
    Compression,
    /// [`super::RareOperations::pool`], [`super::RareOperations::select_blocks`] and
    /// [`super::RareOperations::select_within`].
    Pooling,
    /// [`super::RareOperations::recent_tokens`].
    RecentTokens,
}

impl fmt::Display for Extra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scoring => "attention with capped scores or in chunks",
            Self::LaterTokens => "attention to later tokens (encoders)",
            Self::UngatedExperts => "experts without gates",
            Self::ChannelDeltaRule => "the delta rule with a decay for each channel",
            Self::StateSpace => "state space layers (Mamba-2)",
            Self::GatedConv => "gated short convolutions (LFM2)",
            Self::Selection => "attention to selected tokens",
            Self::Compression => "attention to compressed tokens",
            Self::Pooling => "compressed tokens that layers share (DeepSeek V4.1)",
            Self::RecentTokens => "tables by the last tokens (engram)",
        })
    }
}

/// Properties of attention that only few families have.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Scoring {
    /// Scores become `cap * tanh(score / cap)` (Gemma 2).
    pub cap: Option<f32>,
    /// Tokens attend only to those of their own chunk of this many tokens (Llama 4), instead of a
    /// window.
    pub chunk: Option<usize>,
    /// Later tokens of the same text that a token attends to: none in decoders, `usize::MAX` for
    /// all (BERT). A step must hold such a text as a whole.
    pub after: usize,
}

impl Scoring {
    /// First position that a token at `position` attends to. `in_window` is the first without
    /// chunks.
    pub fn first_visible(&self, position: usize, in_window: usize) -> usize {
        self.chunk.map_or(in_window, |chunk| position - position % chunk)
    }

    /// End of the positions that a token at `position` attends to, in a sequence that has tokens
    /// before position `end`.
    pub fn end_visible(&self, position: usize, end: usize) -> usize {
        (position + 1).saturating_add(self.after).min(end)
    }

    /// A score by its definition.
    pub fn of(&self, score: f32) -> f32 {
        self.cap.map_or(score, |cap| cap * (score / cap).tanh())
    }
}

/// One layer's state space on this rank (Mamba-2, arXiv 2405.21060), with the short convolution
/// before it. The state of a sequence is the convolution's last inputs, `[kernel - 1, channels]`,
/// then for each head a matrix `[state_dim, head_dim]`.
#[derive(Debug, Clone)]
pub struct StateSpaceSpec<V> {
    /// Local heads, a multiple of `groups`: consecutive ones share a group.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Local groups: each has one input and one output vector.
    pub groups: usize,
    /// Width of these vectors.
    pub state_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// The taps, `[channels, kernel]`, the current token's last.
    pub taps: V,
    /// Added to the convolution's sums, `[channels]`.
    pub conv_bias: Option<V>,
    /// `A_log`, `[heads]`.
    pub rate: V,
    /// `dt_bias`, `[heads]`.
    pub time_bias: V,
    /// `D`, `[heads]`: how much of a head's input is added to its output.
    pub skip: V,
    /// Least and largest time step.
    pub time_limit: (f32, f32),
}

impl<V> StateSpaceSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<StateSpaceSpec<W>, E> {
        Ok(StateSpaceSpec {
            taps: f(self.taps)?,
            conv_bias: self.conv_bias.map(&mut *f).transpose()?,
            rate: f(self.rate)?,
            time_bias: f(self.time_bias)?,
            skip: f(self.skip)?,
            heads: self.heads,
            head_dim: self.head_dim,
            groups: self.groups,
            state_dim: self.state_dim,
            kernel: self.kernel,
            time_limit: self.time_limit,
        })
    }

    /// Columns of all heads.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns that the convolution works on: heads, then the groups' input and output vectors.
    pub fn channels(&self) -> usize {
        self.width() + 2 * self.groups * self.state_dim
    }

    /// Number of values in a sequence's state that the convolution keeps; the matrices follow.
    pub fn conv_numbers(&self) -> usize {
        (self.kernel - 1) * self.channels()
    }

    /// Numbers of a sequence's matrices.
    pub fn matrix_numbers(&self) -> usize {
        self.heads * self.state_dim * self.head_dim
    }

    /// The cache that this layer needs.
    pub fn cache(&self) -> CacheKind {
        CacheKind::State { numbers: self.conv_numbers() + self.matrix_numbers() }
    }
}

/// One layer's gated short convolution on this rank (LFM2). The state of a sequence is the
/// convolution's last inputs, `[kernel - 1, channels]`.
#[derive(Debug, Clone)]
pub struct GatedConvSpec<V> {
    /// Local channels.
    pub channels: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// The taps, `[channels, kernel]`, the current token's last.
    pub taps: V,
}

impl<V> GatedConvSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<GatedConvSpec<W>, E> {
        Ok(GatedConvSpec { taps: f(self.taps)?, channels: self.channels, kernel: self.kernel })
    }

    /// The cache that this layer needs.
    pub fn cache(&self) -> CacheKind {
        CacheKind::State { numbers: (self.kernel - 1) * self.channels }
    }
}

/// How a layer selects the tokens that it attends to (DeepSeek V3.2's indexer).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionSpec {
    /// Heads of the indexer; all ranks have all.
    pub heads: usize,
    /// Width of a head, and of a token's key: a multiple of 32.
    pub dim: usize,
    /// Most tokens that a token attends to.
    pub chosen: usize,
    /// Number of tokens that a key represents; usually 1.
    pub every: usize,
}

impl SelectionSpec {
    /// Columns of a selection: how many were selected, and their positions.
    pub const fn columns(&self) -> usize {
        1 + self.chosen
    }

    /// Number of keys that a token at `position` attends to: those with all their tokens present.
    pub const fn visible(&self, position: usize) -> usize {
        (position + 1) / self.every
    }

    /// The cache of the tokens' keys.
    pub const fn cache(&self) -> CacheKind {
        CacheKind::Latent { rank: self.dim / 2, rotated: self.dim / 2, every: self.every }
    }
}

/// Blocks of keys. One layer chooses some of them, for itself and for later layers (DeepSeek V4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionBlocks {
    /// Keys of a block.
    pub keys: usize,
    /// Most blocks that are chosen.
    pub chosen: usize,
}

impl SelectionBlocks {
    /// Columns of a choice: how many were chosen, and their numbers.
    pub const fn columns(&self) -> usize {
        1 + self.chosen
    }
}
