//! The description of a model, read from its config.json, for all architectures.
//!
//! A decoder layer is a *mixer* (attention, latent attention, delta rule, state space) and a
//! *feed-forward* (an MLP, experts), or one of them. Each has a norm before it, after it, or both,
//! and is added to the residual stream. Families differ in the mixers, feed-forwards and shapes
//! that they use, not in code.

mod ahead;
mod compressed;
mod encoder;
mod engram;
mod recurrent;

use std::ops::Range;

use thunder_compute::{Activation, Curve, ExpertGroups, Rope, Scores, Scoring};

pub use ahead::AheadSpec;
pub use compressed::{
    BlocksShape, CompressedShape, CompressionShape, SourcesShape, StreamReading, StreamsShape,
};
pub use encoder::{DenseFrom, DenseShape, EmbeddingNorm, EncoderSpec, PositionsShape};
pub use engram::{EngramLayer, EngramShape};
pub use recurrent::{ChannelDeltaShape, DeltaShape, GatedConvShape, StateSpaceShape};

/// A transformer: a decoder, or an encoder if [`ModelSpec::encoder`] is given.
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
    /// The residual streams, if there are several.
    pub streams: Option<StreamsShape>,
    /// Tables by the last tokens, if layers have some.
    pub engram: Option<EngramShape>,
    /// Inputs of each layer, in addition to the residual stream.
    pub layer_inputs: Option<LayerInputsShape>,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// True if Hugging Face's files contain norm weights minus one, for the norms of the residual
    /// stream and of query and key heads. [`crate::WeightSource::norms_less_one`] says whether a
    /// folder's files do.
    pub norms_less_one: bool,
    /// True if norms of the residual stream subtract its mean first (LayerNorm without bias).
    pub centered: bool,
    /// Multiplies the embedding's rows.
    pub embedding_scale: f32,
    /// Multiplies what mixers and feed-forwards add to the residual stream.
    pub residual_scale: f32,
    /// Multiplies the logits.
    pub logit_scale: f32,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// True if the output head is the embedding. `None` if the config does not say; then it is,
    /// unless the files contain an output head.
    pub tied: Option<bool>,
    /// Attention residuals (Kimi K3): the residual stream is put aside before each of this number
    /// of layers and restarts, and its readers read a mix of it and of those put aside.
    pub residual_block: Option<usize>,
    /// The model's parts as an encoder; `None` for a decoder.
    pub encoder: Option<EncoderSpec>,
    /// Rotary position embeddings that layers refer to.
    pub ropes: Vec<Rope>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The layer that predicts the token after the next one, if there is one and it is used.
    pub ahead: Option<AheadSpec>,
    /// Number of layers after [`ModelSpec::layers`] in the files that predict further tokens,
    /// according to the config.
    pub further: usize,
    /// Token ids that end a text.
    pub eos: Vec<u32>,
}

impl ModelSpec {
    /// A layer by its number. The layer that predicts further tokens comes after the others.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, number: usize) -> &LayerSpec {
        match &self.ahead {
            Some(ahead) if number == self.layers.len() => &ahead.layer,
            _ => &self.layers[number],
        }
    }

    /// Numbers of a token between two layers.
    pub fn stream_width(&self) -> usize {
        self.hidden * self.streams.map_or(1, |streams| streams.count)
    }

    /// Numbers in a prompt's result that is not a token: a hidden state, or an encoder's vector or
    /// score.
    pub fn result_width(&self) -> usize {
        let dense = self.encoder.as_ref().and_then(|encoder| encoder.dense.last());
        dense.map_or(self.hidden, |dense| dense.outputs)
    }

    /// Number of weights in the layers' products that each token is multiplied with, over all
    /// ranks. For experts, those that a token uses. Attention scores and the output head are not
    /// included.
    pub fn layer_weights(&self) -> u64 {
        let of_layer = |layer: &LayerSpec| {
            (layer.mixer.weights(self.hidden) + layer.feed_forward.weights(self.hidden)) as u64
        };
        let streams = self.streams.map_or(1, |streams| streams.count);
        let of_tables =
            self.engram.as_ref().map_or(0, |of| of.layers.len() * of.weights(streams, self.hidden));
        // The gate, the projection from it, and that from the embedding.
        let of_inputs =
            self.layer_inputs.map_or(0, |inputs| self.layers.len() * 3 * inputs.width * self.hidden);
        self.layers.iter().map(of_layer).sum::<u64>() + (of_tables + of_inputs) as u64
    }

    /// How many of these layers have tables by the last tokens.
    pub fn tables(&self, layers: &Range<usize>) -> usize {
        let in_layers = |of: &&EngramLayer| layers.contains(&of.layer);
        self.engram.as_ref().map_or(0, |of| of.layers.iter().filter(in_layers).count())
    }

    /// Number of sums of the residual stream that have been put aside before a layer, which is the
    /// number of earlier layers that put one aside.
    pub fn sums_before(&self, layer: usize) -> usize {
        self.residual_block.map_or(0, |layers| layer.div_ceil(layers))
    }
}

/// A vector that each layer gets for each token (Gemma 4 E2B and E4B): the sum of a part of the
/// token's row of a table, and of the norm of a projection of its embedding. The layer adds it to
/// the residual stream, multiplied with a gate of the stream, projected and normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerInputsShape {
    /// Numbers of a vector.
    pub width: usize,
    /// Rows of the table.
    pub vocab: usize,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Moves information between tokens.
    pub mixer: MixerSpec,
    /// Works on each token separately.
    pub feed_forward: FeedForwardSpec,
    /// Norms of the mixer, and of the feed-forward.
    pub norms: Norms,
    /// True if a number in the files multiplies the residual stream after the layer.
    pub scaled: bool,
}

impl LayerSpec {
    /// Number of its parts. Each ends with an all-reduce.
    pub fn parts(&self) -> usize {
        usize::from(self.mixer != MixerSpec::None) + usize::from(self.feed_forward != FeedForwardSpec::None)
    }

    /// All-reduces of a few numbers per row, in addition to those of its parts: sums of squares for
    /// norms over columns that are divided among all ranks.
    pub fn divided_norms(&self) -> usize {
        match &self.mixer {
            MixerSpec::Attention(shape) => usize::from(shape.qk_norm == Some(QkNormWidth::All)),
            MixerSpec::StateSpace(shape) => usize::from(shape.groups == 1),
            _ => 0,
        }
    }
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
    /// One norm for the layer: mixer and feed-forward read the same input, and both add to the
    /// stream.
    Shared,
    /// A LayerNorm with a bias of the residual stream, after each part was added (BERT).
    Sum,
    /// A norm of the feed-forward's input. The mixer reads the stream itself (the first layer of
    /// ModernBERT).
    BeforeFeedForward,
}

impl Norms {
    /// True if a part norms what it reads.
    pub const fn before(self) -> bool {
        matches!(self, Self::Before | Self::Around | Self::BeforeFeedForward)
    }

    /// True if a part norms what it adds.
    pub const fn after(self) -> bool {
        matches!(self, Self::After | Self::Around)
    }
}

/// A layer part that moves information between tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerSpec {
    /// None: the layer is a feed-forward (Nemotron-H).
    None,
    /// Grouped-query attention.
    Attention(AttentionShape),
    /// Latent attention (DeepSeek V2's MLA).
    Latent(LatentShape),
    /// Gated delta rule with a short convolution (Gated DeltaNet).
    Delta(DeltaShape),
    /// The same with a decay for each channel (Kimi Delta Attention).
    ChannelDelta(ChannelDeltaShape),
    /// State space with a short convolution (Mamba-2).
    StateSpace(StateSpaceShape),
    /// Gated short convolution (LFM2).
    GatedConv(GatedConvShape),
    /// Attention to the last tokens and to compressed ones (DeepSeek V4).
    Compressed(CompressedShape),
}

impl MixerSpec {
    /// Weights of its products.
    fn weights(&self, hidden: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Attention(shape) => {
                let gates = if shape.output_gate { shape.heads } else { 0 };
                let kv_heads = if shape.keys_of.is_some() { 0 } else { shape.kv_heads };
                let heads = shape.heads + kv_heads;
                let head_gates = if shape.head_gates { shape.heads } else { 0 };
                hidden * ((heads + gates) * shape.head_dim + heads * shape.value_dim + head_gates)
            }
            Self::Latent(shape) => {
                let queries = shape.heads * shape.query_dim();
                let query = match shape.query_rank {
                    Some(rank) => rank * (hidden + queries),
                    None => hidden * queries,
                };
                let heads = shape.rank * shape.heads * (shape.plain + shape.value_dim);
                let indexer = match (&shape.selection, shape.query_rank) {
                    (Some(of), Some(rank)) if of.selects => {
                        let pooled = if of.pool > 1 { of.dim } else { 0 };
                        of.heads * of.dim * rank + hidden * (of.dim + of.heads + pooled)
                    }
                    _ => 0,
                };
                let latent = hidden * (shape.rank + shape.rotated) + heads;
                let outputs = if shape.output_gate { 2 } else { 1 };
                query + latent + outputs * hidden * shape.heads * shape.value_dim + indexer
            }
            Self::Delta(shape) => {
                let values = shape.value_heads * shape.value_dim;
                hidden * (shape.channels() + 2 * values + 2 * shape.value_heads)
            }
            Self::ChannelDelta(shape) => {
                let width = shape.heads * shape.dim;
                let narrow = shape.dim * (hidden + width);
                let gates = if shape.whole_gates { hidden * width } else { narrow };
                hidden * (4 * width + shape.heads) + narrow + gates
            }
            Self::StateSpace(shape) => hidden * (shape.projected() + shape.width()),
            Self::GatedConv(shape) => 4 * hidden * shape.channels,
            Self::Compressed(shape) => shape.weights(hidden),
        }
    }
}

/// A layer part that works on each token separately.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForwardSpec {
    /// None: the layer is a mixer (Nemotron-H).
    None,
    /// `down(activation(gate(x), up(x)))`, or without a gate.
    Mlp(MlpShape),
    /// MLPs. A router chooses some of them for each token.
    Experts(ExpertsShape),
    /// An MLP and experts, each with its own norms.
    Both(Box<BothShape>),
}

impl FeedForwardSpec {
    /// Weights of its products that one token is multiplied with.
    fn weights(&self, hidden: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Mlp(shape) => shape.weights(hidden),
            Self::Experts(shape) => shape.weights(hidden),
            Self::Both(shape) => shape.mlp.weights(hidden) + shape.experts.weights(hidden),
        }
    }

    /// Its experts, if it has some.
    pub fn experts(&self) -> Option<&ExpertsShape> {
        match self {
            Self::None | Self::Mlp(_) => None,
            Self::Experts(shape) => Some(shape),
            Self::Both(shape) => Some(&shape.experts),
        }
    }

    /// Its MLP, if it has one that every token uses and that is not an expert.
    pub fn mlp(&self) -> Option<&MlpShape> {
        match self {
            Self::None | Self::Experts(_) => None,
            Self::Mlp(shape) => Some(shape),
            Self::Both(shape) => Some(&shape.mlp),
        }
    }
}

/// Matrices of an MLP.
fn matrices(activation: Option<Activation>) -> usize {
    if activation.is_some() { 3 } else { 2 }
}

/// Grouped-query attention of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a query's or key's head.
    pub head_dim: usize,
    /// Width of a value's head.
    pub value_dim: usize,
    /// Multiplies the values.
    pub value_scale: f32,
    /// True if queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// True if the output projection has a bias.
    pub out_bias: bool,
    /// How queries and keys are normed.
    pub qk_norm: Option<QkNormWidth>,
    /// True if each value head is normed, without weights.
    pub value_norm: bool,
    /// True if values are the products from which keys are computed; there is no value projection.
    pub values_are_keys: bool,
    /// Multiplies the scores, usually 1/√head_dim.
    pub scale: f32,
    /// True if the sigmoid of a projection multiplies each query head's result. The files store it
    /// with the query projection: for each head the query's rows, then the gate's.
    pub output_gate: bool,
    /// True if the sigmoid of a projection, a number for each head, multiplies the head's result
    /// (LFM3).
    pub head_gates: bool,
    /// Tokens that a token attends to, itself included. `None`: all tokens before it.
    pub window: Option<usize>,
    /// Index into [`ModelSpec::ropes`].
    pub rope: Option<usize>,
    /// True if each query head has a sink: a score in the softmax without a value.
    pub sinks: bool,
    /// Temperature tuning, by which queries grow with the position.
    pub temperature: Option<Temperature>,
    /// Other ways to compute scores.
    pub scoring: Scoring,
    /// The earlier layer whose keys and values this one attends to. This layer has queries only.
    pub keys_of: Option<usize>,
}

/// Temperature tuning: queries are multiplied with `1 + beta * ln(1 + ⌊(position + first) /
/// original⌋)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Temperature {
    /// How fast queries grow.
    pub beta: f32,
    /// Tokens of the original context.
    pub original: usize,
    /// The number of the first position: 0 or 1.
    pub first: usize,
}

/// The extent of a norm of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormWidth {
    /// Each head; all heads share the weights.
    Head,
    /// All query heads as one vector, and all key heads.
    All,
    /// Each head, after rotation; all heads share the weights.
    Rotated,
    /// Each head has its own weights, and its mean is subtracted first.
    Centered,
    /// Each head, without weights.
    Unweighted,
}

/// An MLP of a layer, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpShape {
    /// Outputs of the gate and up projections.
    pub channels: usize,
    /// True if the projections have biases.
    pub bias: bool,
    /// The activation of the gate. `None`: there is no gate.
    pub activation: Option<Activation>,
    /// Applied to channels without a gate.
    pub curve: Curve,
}

impl MlpShape {
    fn weights(&self, hidden: usize) -> usize {
        matrices(self.activation) * hidden * self.channels
    }
}

/// A feed-forward that consists of an MLP and of experts (Gemma 4). Both read the residual stream
/// through norms of their own, and so does the router. The results are normed separately and added;
/// the norm after the feed-forward is that of their sum. The files have a factor for each expert,
/// which multiplies its weight.
#[derive(Debug, Clone, PartialEq)]
pub struct BothShape {
    /// The part that every token uses.
    pub mlp: MlpShape,
    /// Without a shared expert.
    pub experts: ExpertsShape,
}

/// A feed-forward made of experts, over all ranks. Each expert is an MLP.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsShape {
    /// Routed experts.
    pub experts: usize,
    /// Number of routed experts that each token uses.
    pub chosen: usize,
    /// Channels of a routed expert.
    pub channels: usize,
    /// True if the experts' projections have biases.
    pub bias: bool,
    /// The activation of the experts' gates. `None`: they have no gates, and channels are `max(up,
    /// 0)²`.
    pub activation: Option<Activation>,
    /// Width of the vectors that routed experts read and write. Projections convert from the
    /// residual stream and back (Nemotron 3 Super).
    pub latent: Option<usize>,
    /// True if the sum of the routed experts is normed before it is led back.
    pub latent_norm: bool,
    /// How a token's experts are chosen.
    pub router: RouterShape,
    /// An expert that every token uses.
    pub shared: Option<SharedShape>,
    /// True if the weight of a token's only expert multiplies its input instead of its output.
    pub weighs_input: bool,
    /// True if files have stacks `[experts, inputs, outputs]`, for stacks whose shape is ambiguous.
    pub transposed: bool,
}

impl ExpertsShape {
    /// Width of what routed experts read and write.
    pub fn width(&self, hidden: usize) -> usize {
        self.latent.unwrap_or(hidden)
    }

    /// Weights that one token is multiplied with.
    fn weights(&self, hidden: usize) -> usize {
        let shared = hidden * self.shared.map_or(0, |shared| shared.channels);
        let routed = self.width(hidden) * self.chosen * self.channels;
        let narrow = 2 * hidden * self.latent.unwrap_or(0);
        hidden * self.experts + narrow + matrices(self.activation) * (routed + shared)
    }
}

/// How a router chooses experts and weighs them; `thunder_compute::RouterSpec` describes it.
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
    /// The files have a table of the experts of each token id, which are chosen regardless of the
    /// scores.
    pub assigned: bool,
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
    /// Temperature tuning, by which queries grow with the position.
    pub temperature: Option<Temperature>,
    /// The choice of the tokens that are attended to; `None`: all.
    pub selection: Option<SelectionShape>,
    /// True if the sigmoid of a projection multiplies each head's result.
    pub output_gate: bool,
}

/// How an indexer selects the tokens that a layer attends to (DeepSeek V3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionShape {
    /// Heads of the indexer.
    pub heads: usize,
    /// Width of a head and of a key.
    pub dim: usize,
    /// Most tokens that a token attends to.
    pub chosen: usize,
    /// Index into [`ModelSpec::ropes`]; `None`: nothing is rotated.
    pub rope: Option<usize>,
    /// Number of tokens that are compressed to one key: at most the tokens of `chosen / pool` keys
    /// are selected, and the last tokens, which have no key yet. 1: each token has a key.
    pub pool: usize,
    /// True if the layer has an indexer; otherwise it uses that of the last earlier layer that has
    /// one.
    pub selects: bool,
}

impl Temperature {
    /// Factor of queries at `position`.
    pub fn factor(&self, position: usize) -> f32 {
        1.0 + self.beta * (((position + self.first) / self.original) as f32).ln_1p()
    }
}

impl LatentShape {
    /// Columns of a query head.
    pub const fn query_dim(&self) -> usize {
        self.plain + self.rotated
    }
}
