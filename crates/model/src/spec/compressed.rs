//! Attention to compressed tokens, and several residual streams (DeepSeek V4).

use super::SelectionShape;

/// The residual streams of a model that has several: each layer part reads a weighted sum of them,
/// and its result is added to all of them, which are mixed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamsShape {
    /// Streams.
    pub count: usize,
    /// How often rows and columns of a mixture are divided by their sums.
    pub iterations: usize,
    /// Added to weights and to sums.
    pub eps: f32,
    /// The last norm reads a weighted sum of the streams, else their mean.
    pub weighted: bool,
}

/// Attention of a layer to the last tokens and to compressed ones, over all ranks. All heads share
/// one vector for each, which is key and value.
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
    /// Single tokens that a token attends to, itself included.
    pub window: usize,
    /// Index into [`super::ModelSpec::ropes`].
    pub rope: usize,
    /// Groups of heads, each of which has an output projection of its own.
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
}
