//! What a model is, as far as computing it goes: the description that every architecture's config is read into.
//!
//! A decoder layer is a *mixer* (attention, today) and a *feed-forward* (a gated MLP, today), each behind a norm and added
//! to the residual stream. Families differ in which they use and in these shapes, not in code of their own.

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
    /// Whether the output projection is the embedding; `None` where the config does not say: then it is, unless the
    /// files hold an `lm_head`.
    pub tied: Option<bool>,
    /// The rotations that layers use.
    pub ropes: Vec<Rope>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Token ids that end a text.
    pub eos: Vec<u32>,
}

impl ModelSpec {
    /// Weights of the layers' products, over all ranks: what each token is multiplied with, apart from attention's scores and the head.
    pub fn layer_weights(&self) -> u64 {
        let of_layer = |layer: &LayerSpec| {
            let MixerSpec::Attention(attention) = &layer.mixer;
            let FeedForwardSpec::Gated(gated) = &layer.feed_forward;
            let heads = 2 * attention.heads + 2 * attention.kv_heads;
            self.hidden * (heads * attention.head_dim + 3 * gated.channels)
        };
        self.layers.iter().map(|layer| of_layer(layer) as u64).sum()
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
