//! Attention to compressed tokens, and several residual streams (DeepSeek V4 and V4.1).

use thunder_compute::SelectionBlocks;

use super::SelectionShape;

/// The residual streams of a model with several: each layer part reads a weighted sum of them, and
/// its result is added to all of them, which are mixed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamsShape {
    /// Streams.
    pub count: usize,
    /// How often rows and columns of a mixture are divided by their sums.
    pub iterations: usize,
    /// Added to weights and to sums.
    pub eps: f32,
    /// How a part reads them, and what the last norm reads.
    pub reading: StreamReading,
}

/// How layer parts and the last norm read several residual streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamReading {
    /// By weights that the part computes from the streams. The last norm has its own weights.
    Weighted,
    /// By weights that the part computes from the streams. The last norm reads the streams' mean.
    Mean,
    /// By weights that the previous part computed from the streams. The last norm reads by those of
    /// the last part, and the first part reads the first stream (DeepSeek V4.1).
    Carried,
}

/// A layer's attention to the last tokens and to compressed ones, over all ranks. All heads share
/// one vector for each, which is both key and value.
#[derive(Debug, Clone, PartialEq)]
pub struct CompressedShape {
    /// Query heads.
    pub heads: usize,
    /// Width of a head, and of a token's vector.
    pub dim: usize,
    /// The last columns of these, which are rotated.
    pub rotated: usize,
    /// Width of compressed queries.
    pub query_rank: usize,
    /// Epsilon of the norms of queries and vectors.
    pub norm_eps: f32,
    /// True if each query head is normed.
    pub query_norm: bool,
    /// True if single tokens are rounded to 8 bits before they are kept.
    pub rounds: bool,
    /// Single tokens that a token attends to, itself included.
    pub window: usize,
    /// Index into [`super::ModelSpec::ropes`].
    pub rope: usize,
    /// Number of groups of heads. Each has its own output projection.
    pub groups: usize,
    /// Outputs of such a projection.
    pub group_rank: usize,
    /// How tokens are compressed; `None`: the layer attends to single tokens only.
    pub compression: Option<CompressionShape>,
}

/// How a layer compresses tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressionShape {
    /// Tokens that become one.
    pub every: usize,
    /// A compressed token is made of the tokens before its own as well.
    pub overlaps: bool,
    /// The choice of compressed tokens; `None`: all.
    pub selection: Option<SelectionShape>,
    /// The sources of the layer's input, if layers share it. Compressed tokens then have no biases
    /// for places, the keys of the choice are computed from them, and both are rounded to 4 bits.
    pub sources: Option<SourcesShape>,
}

/// The layers whose compressed tokens and choice a layer uses, by number; `None` for what it
/// computes itself (DeepSeek V4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourcesShape {
    /// Of compressed tokens.
    pub entries: Option<usize>,
    /// The source of the keys by which they are chosen.
    pub keys: Option<usize>,
    /// The source of the choice.
    pub selection: Option<usize>,
    /// The blocks that it chooses, or chooses within.
    pub blocks: Option<BlocksShape>,
}

/// Blocks of keys that restrict a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlocksShape {
    /// Their sizes.
    pub blocks: SelectionBlocks,
    /// True if the layer chooses them for later ones, and selects from all keys itself.
    pub chooses: bool,
}

impl CompressionShape {
    /// Columns of values, and of gates, for compressed tokens of this width.
    pub const fn width(&self, dim: usize) -> usize {
        if self.overlaps { 2 * dim } else { dim }
    }
}

impl CompressedShape {
    /// Weights of its products.
    pub(super) fn weights(&self, hidden: usize) -> usize {
        let all = self.heads * self.dim;
        let compression = self.compression.map_or(0, |of| {
            if let Some(sources) = of.sources {
                return self.shared_weights(hidden, &of, &sources);
            }
            let selection = of.selection.map_or(0, |selection| {
                hidden * (2 * of.width(selection.dim) + selection.heads)
                    + selection.heads * selection.dim * self.query_rank
            });
            2 * hidden * of.width(self.dim) + selection
        });
        let queries = self.query_rank * (hidden + all);
        let out = all * self.group_rank + self.groups * self.group_rank * hidden;
        queries + hidden * self.dim + out + compression
    }

    /// Weights of compression and choice, where layers share them.
    fn shared_weights(&self, hidden: usize, of: &CompressionShape, sources: &SourcesShape) -> usize {
        let own = |of: Option<usize>, weights: usize| if of.is_none() { weights } else { 0 };
        let gates = usize::from(of.every > 1);
        let entries = (1 + gates) * hidden * self.dim;
        let (keys, choice) = of.selection.map_or((0, 0), |of| {
            (self.dim * of.dim, of.heads * of.dim * self.query_rank + hidden * of.heads)
        });
        own(sources.entries, entries) + own(sources.keys, keys) + own(sources.selection, choice)
    }
}
