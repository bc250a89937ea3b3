//! What a model is, as far as computing it goes: the description that every architecture's config
//! is read into.
//!
//! A decoder layer is a *mixer* (attention, today) and a *feed-forward* (a gated MLP, today), each
//! behind a norm and added to the residual stream. Families differ in which they use and in these
//! shapes, not in code of their own.

use thunder_compute::Rope;

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// `model_type` of the config.
    pub family: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Positions that the model was made for.
    pub context: usize,
    /// Epsilon of all norms of the residual stream.
    pub norm_eps: f32,
    /// Whether the output projection is the embedding; `None` where the config does not say: then
    /// it is, unless the files hold an `lm_head`.
    pub tied: Option<bool>,
    /// The rotations that layers use.
    pub ropes: Vec<Rope>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Token ids that end a text.
    pub eos: Vec<u32>,
}

impl ModelSpec {
    /// Weights of the layers' products, over all ranks: what each token is multiplied with, apart
    /// from attention's scores and the head.
    pub fn layer_weights(&self) -> u64 {
        let of_layer = |layer: &LayerSpec| {
            let FeedForwardSpec::Gated(gated) = &layer.feed_forward;
            (layer.mixer.weights(self.hidden) + 3 * self.hidden * gated.channels) as u64
        };
        self.layers.iter().map(of_layer).sum()
    }
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// What moves information between tokens.
    pub mixer: MixerSpec,
    /// What works on each token.
    pub feed_forward: FeedForwardSpec,
}

/// What moves information between tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerSpec {
    /// Grouped-query attention.
    Attention(AttentionShape),
    /// Latent attention (DeepSeek V2's MLA).
    Latent(LatentShape),
    /// Gated delta rule with a short convolution (Gated DeltaNet).
    Delta(DeltaShape),
}

impl MixerSpec {
    /// Weights of its products.
    fn weights(&self, hidden: usize) -> usize {
        match self {
            Self::Attention(shape) => hidden * 2 * (shape.heads + shape.kv_heads) * shape.head_dim,
            Self::Latent(shape) => {
                let queries = shape.heads * shape.query_dim();
                let query = match shape.query_rank {
                    Some(rank) => rank * (hidden + queries),
                    None => hidden * queries,
                };
                let heads = shape.rank * shape.heads * (shape.plain + shape.value_dim);
                query + hidden * (shape.rank + shape.rotated) + heads + hidden * shape.heads * shape.value_dim
            }
            Self::Delta(shape) => {
                let values = shape.value_heads * shape.value_dim;
                hidden * (shape.channels() + 2 * values + 2 * shape.value_heads)
            }
        }
    }
}

/// What works on each token.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForwardSpec {
    /// `down(silu(gate(x)) * up(x))`.
    Gated(GatedShape),
}

/// Grouped-query attention of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Whether query and key heads are normed before rotation.
    pub qk_norm: bool,
    /// Tokens that a token sees, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// Index into [`ModelSpec::ropes`].
    pub rope: Option<usize>,
    /// Growth of the queries with the position: beta and original context.
    pub temperature: Option<(f32, usize)>,
}

/// A gated MLP of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedShape {
    /// Channels between gate/up and down.
    pub channels: usize,
    /// Whether the three projections have biases.
    pub bias: bool,
}

/// Latent attention of a layer, over all ranks. Keys and values of all heads are products of one
/// compressed vector per token.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentShape {
    /// Query heads.
    pub heads: usize,
    /// Width of compressed queries; `None`: queries are a product of the residual stream.
    pub query_rank: Option<usize>,
    /// Width of the compressed vector.
    pub rank: usize,
    /// Columns of a query head that are not rotated.
    pub plain: usize,
    /// Columns of a query head that are rotated, and width of the rotated key part that all heads
    /// share.
    pub rotated: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Index into [`ModelSpec::ropes`].
    pub rope: Option<usize>,
}

impl LatentShape {
    /// Columns of a query head.
    pub const fn query_dim(&self) -> usize {
        self.plain + self.rotated
    }
}

/// Gated delta rule of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaShape {
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
}

impl DeltaShape {
    /// Columns that the convolution works on: queries, keys, values.
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}
