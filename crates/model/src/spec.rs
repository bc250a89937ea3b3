//! The description of a model that its config.json is read into, whatever the architecture.
//!
//! A decoder layer is a *mixer* (attention, latent attention, delta rule) and a *feed-forward* (a
//! gated MLP, experts). Each has a norm before it, after it, or both, and is added to the residual
//! stream. Families differ in the mixers, feed-forwards and shapes that they use, not in code.

use thunder_compute::{Activation, ExpertGroups, Rope, Scores};

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// `model_type` of the config.
    pub family: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Longest context that the model was trained for, in tokens.
    pub context: usize,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// True if Hugging Face's files hold norm weights less one: those of the residual stream and
    /// of query and key heads. Whether a folder's files do, [`crate::WeightSource::norms_less_one`]
    /// says.
    pub norms_less_one: bool,
    /// Multiplies the embedding's rows.
    pub embedding_scale: f32,
    /// Multiplies what mixers and feed-forwards add to the residual stream.
    pub residual_scale: f32,
    /// Multiplies the logits.
    pub logit_scale: f32,
    /// True if the output head is the embedding. `None` if the config does not say: then it is,
    /// unless the files have an output head.
    pub tied: Option<bool>,
    /// Rotary position embeddings that layers refer to.
    pub ropes: Vec<Rope>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Token ids that end a text.
    pub eos: Vec<u32>,
}

impl ModelSpec {
    /// Number of weights in the layers' products that each token is multiplied with, over all
    /// ranks: of experts, those that a token takes. Attention scores and the output head are not
    /// included.
    pub fn layer_weights(&self) -> u64 {
        let of_layer = |layer: &LayerSpec| {
            (layer.mixer.weights(self.hidden) + layer.feed_forward.weights(self.hidden)) as u64
        };
        self.layers.iter().map(of_layer).sum()
    }
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Moves information between tokens.
    pub mixer: MixerSpec,
    /// Works on each token by itself.
    pub feed_forward: FeedForwardSpec,
    /// Norms of the mixer, and of the feed-forward.
    pub norms: Norms,
}

/// Where a layer part has norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// Of what it reads from the residual stream.
    Before,
    /// Of what it adds to the residual stream.
    After,
    /// Both.
    Around,
}

impl Norms {
    /// True if a part norms what it reads.
    pub const fn before(self) -> bool {
        matches!(self, Self::Before | Self::Around)
    }

    /// True if a part norms what it adds.
    pub const fn after(self) -> bool {
        matches!(self, Self::After | Self::Around)
    }
}

/// A layer part that moves information between tokens.
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
            Self::Attention(shape) => {
                let gates = if shape.output_gate { shape.heads } else { 0 };
                hidden * (2 * (shape.heads + shape.kv_heads) + gates) * shape.head_dim
            }
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

/// A layer part that works on each token by itself.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForwardSpec {
    /// `down(activation(gate(x), up(x)))`.
    Gated(GatedShape),
    /// Gated MLPs. A router chooses some of them for each token.
    Experts(ExpertsShape),
}

impl FeedForwardSpec {
    /// Weights of its products that one token is multiplied with.
    fn weights(&self, hidden: usize) -> usize {
        match self {
            Self::Gated(shape) => 3 * hidden * shape.channels,
            Self::Experts(shape) => {
                let shared = shape.shared.map_or(0, |shared| shared.channels);
                hidden * (shape.experts + 3 * (shape.chosen * shape.channels + shared))
            }
        }
    }
}

/// Grouped-query attention of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// True if queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// True if the output projection has a bias.
    pub out_bias: bool,
    /// What queries and keys are normed by before rotation.
    pub qk_norm: Option<QkNormWidth>,
    /// Multiplies the scores, usually 1/√head_dim.
    pub scale: f32,
    /// True if the sigmoid of a projection multiplies each query head's result. The files keep it
    /// with the query projection: of each head, the query's rows, then the gate's.
    pub output_gate: bool,
    /// Tokens that a token attends to, itself included. `None`: all tokens before it.
    pub window: Option<usize>,
    /// Index into [`ModelSpec::ropes`].
    pub rope: Option<usize>,
    /// True if each query head has a sink: a score that takes part in the softmax, without a value.
    pub sinks: bool,
    /// Temperature tuning, by which queries grow with the position: beta and original context.
    pub temperature: Option<(f32, usize)>,
}

/// What a norm of queries and keys goes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormWidth {
    /// Each head; all heads share the weights.
    Head,
    /// All query heads as one vector, and all key heads.
    All,
}

/// A gated MLP of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedShape {
    /// Outputs of the gate and up projections.
    pub channels: usize,
    /// True if the three projections have biases.
    pub bias: bool,
    /// What the gate does.
    pub activation: Activation,
}

/// A feed-forward made of experts, over all ranks. Each expert is a gated MLP.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsShape {
    /// Routed experts.
    pub experts: usize,
    /// Routed experts that each token takes.
    pub chosen: usize,
    /// Channels of a routed expert.
    pub channels: usize,
    /// True if the experts' projections have biases.
    pub bias: bool,
    /// What the experts' gates do.
    pub activation: Activation,
    /// How a token's experts are chosen.
    pub router: RouterShape,
    /// An expert that every token takes.
    pub shared: Option<SharedShape>,
}

/// How a router chooses experts and weighs them; `thunder_compute::RouterSpec` has the meaning.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterShape {
    /// From logits to scores.
    pub scores: Scores,
    /// True if the router's projection has a bias.
    pub bias: bool,
    /// A correction that counts for the choice only.
    pub correction: Correction,
    /// Restricts the choice to some groups of experts.
    pub groups: Option<ExpertGroups>,
    /// Divides the weights by their sum.
    pub renormalise: bool,
    /// Multiplies the weights.
    pub scale: f32,
}

/// Whether the files have a correction of the router's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Correction {
    /// No.
    None,
    /// They must.
    Given,
    /// Some do: MLX-LM's conversion of ERNIE drops it.
    IfGiven,
}

/// The shared expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedShape {
    /// Its channels.
    pub channels: usize,
    /// True if the sigmoid of a projection weighs it.
    pub gated: bool,
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
    /// Epsilon of the norms of compressed queries and of the compressed vector.
    pub norm_eps: f32,
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
