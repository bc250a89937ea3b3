//! Mixers whose memory of a sequence is a state of fixed size.

use thunder_compute::{Decays, HeadSharing};

/// Gated delta rule of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaShape {
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Which of them share a key head.
    pub sharing: HeadSharing,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// Added to the sums of squares of queries and keys, which become unit vectors.
    pub unit_eps: f32,
}

impl DeltaShape {
    /// Columns that the convolution works on: queries, keys, values.
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// Delta rule of a layer with a decay for each channel, over all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChannelDeltaShape {
    /// Heads.
    pub heads: usize,
    /// Width of queries, keys and values.
    pub dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// Added to the sums of squares of queries and keys, which become unit vectors.
    pub unit_eps: f32,
    /// How decays are made.
    pub decays: Decays,
    /// True if output gates are one product of the residual stream; otherwise they go through a
    /// narrow vector.
    pub whole_gates: bool,
}

/// Gated short convolution of a layer (LFM2), over all ranks. Its projection has the rows of the
/// inputs' gates, of the results' gates, and of the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedConvShape {
    /// Channels of each.
    pub channels: usize,
    /// Taps of the convolution.
    pub kernel: usize,
}

/// State space of a layer (Mamba-2), over all ranks. Its projection has the rows of gates, of the
/// heads' inputs, of the groups' input and output vectors, and of the heads' time steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateSpaceShape {
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Groups of heads that share an input and an output vector, and a norm; divides `heads`.
    pub groups: usize,
    /// Width of these vectors.
    pub state_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// True if the convolution has a bias.
    pub conv_bias: bool,
    /// Least and largest time step.
    pub time_limit: (f32, f32),
}

impl StateSpaceShape {
    /// Columns of all heads.
    pub const fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns that the convolution works on: heads, input vectors, output vectors.
    pub const fn channels(&self) -> usize {
        self.width() + 2 * self.groups * self.state_dim
    }

    /// Outputs of the projection.
    pub const fn projected(&self) -> usize {
        self.width() + self.channels() + self.heads
    }
}
