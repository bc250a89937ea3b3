//! The role of a tensor in a model, independent of its name in a file.

/// A tensor of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Embedding table, `[vocabulary, hidden]`.
    Embedding,
    /// Table of the layers' inputs, `[vocabulary, layers * width]`.
    LayerInputs,
    /// Projection from the embedding to the layers' inputs, `[layers * width, hidden]`.
    LayerInputsProjection,
    /// Norm of each layer's part of this projection, `[width]`.
    LayerInputsNorm,
    /// Norm before the output head, `[hidden]`.
    OutputNorm,
    /// Attention residuals before the output head, as [`LayerRole::MixerMixNorm`] and
    /// [`LayerRole::MixerMix`].
    OutputMixNorm,
    /// See [`Role::OutputMixNorm`].
    OutputMix,
    /// Output head, `[vocabulary, hidden]`; absent where the embedding serves.
    OutputHead,
    /// From several residual streams to their weights before the last norm.
    OutputStreams,
    /// Added to these weights' products, `[streams]`.
    OutputStreamsBase,
    /// Multiplies these products, `[1]`.
    OutputStreamsScale,
    /// Encoder: vectors of positions, `[positions, hidden]`.
    Positions,
    /// Encoder: vectors of token types, `[types, hidden]`.
    TokenTypes,
    /// Encoder: norm of the embedding, `[hidden]`.
    EmbeddingNorm,
    /// Encoder: added to the normed embedding, `[hidden]`.
    EmbeddingNormBias,
    /// Encoder that scores: the first product of a pair's vector, `[hidden, hidden]`.
    Pooler,
    /// Encoder that scores: the last one, `[scores, hidden]`.
    Classifier,
    /// A tensor of one layer.
    Layer(usize, LayerRole),
    /// A matrix of one routed expert.
    Expert {
        /// Its layer.
        layer: usize,
        /// Which of the expert's matrices.
        role: ExpertRole,
        /// The expert, below `count`.
        index: usize,
        /// Routed experts of the layer.
        count: usize,
    },
    /// A matrix of one head of latent attention, where `kv_b` is stored in its two parts, the first
    /// transposed (as MLX does).
    LatentHead {
        /// Its layer.
        layer: usize,
        /// Which of the head's matrices.
        role: LatentHeadRole,
        /// The head, below `count`.
        index: usize,
        /// Heads of the layer.
        count: usize,
    },
}

impl Role {
    /// Index and size of the stack that the files may keep this matrix in.
    pub(crate) fn in_stack(self) -> Option<(usize, usize)> {
        match self {
            Self::Expert { index, count, .. } | Self::LatentHead { index, count, .. } => Some((index, count)),
            _ => None,
        }
    }
}

/// A tensor of a layer. Matrices are `[outputs, inputs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerRole {
    /// Norm before the mixer, `[hidden]`.
    MixerNorm,
    /// Norm before the feed-forward, `[hidden]`.
    FeedForwardNorm,
    /// Multiplies the residual stream after the layer, `[1]`.
    LayerScale,
    /// Projection from the residual stream to the gate of the layer's input, `[width, hidden]`.
    InputGate,
    /// Projection from the gated input to the residual stream, `[hidden, width]`.
    InputOut,
    /// Norm of what the layer's input adds, `[hidden]`.
    InputPostNorm,
    /// Projections from several residual streams to the weights with which the mixer reads and
    /// writes them.
    MixerStreams,
    /// Added to the weights' products.
    MixerStreamsBase,
    /// Multiplies the products for reading, writing and mixing, `[3]`.
    MixerStreamsScale,
    /// The same of the feed-forward.
    FeedForwardStreams,
    /// The same of the feed-forward.
    FeedForwardStreamsBase,
    /// The same of the feed-forward.
    FeedForwardStreamsScale,
    /// Attention residuals: norm of the sums that are mixed into the mixer's input, `[hidden]`; may
    /// be in the scores' vector.
    MixerMixNorm,
    /// Attention residuals: the vector that the sums' norms are multiplied with to give scores,
    /// `[hidden]`.
    MixerMix,
    /// The feed-forward's [`LayerRole::MixerMixNorm`].
    FeedForwardMixNorm,
    /// The feed-forward's [`LayerRole::MixerMix`].
    FeedForwardMix,
    /// Norm of what the mixer adds, `[hidden]`.
    MixerPostNorm,
    /// Encoder: added after the norm [`LayerRole::MixerPostNorm`], `[hidden]`.
    MixerPostNormBias,
    /// Norm of what the feed-forward adds, `[hidden]`.
    FeedForwardPostNorm,
    /// The same of the feed-forward.
    FeedForwardPostNormBias,

    /// Attention: query, key and value projections in one.
    Qkv,
    /// Attention: query projection.
    Query,
    /// Attention: key projection.
    Key,
    /// Attention: value projection.
    Value,
    /// Attention: output projection.
    AttentionOut,
    /// Attention: norm of each query head, `[head_dim]`, or of all, `[heads * head_dim]`.
    QueryNorm,
    /// Attention: norm of each key head, `[head_dim]`, or of all, `[KV heads * head_dim]`.
    KeyNorm,

    /// Attention: a score of each query head that has no value, `[heads]`.
    AttentionSinks,

    /// Latent attention: from the residual stream to compressed queries (`q_a`).
    QueryDown,
    /// Latent attention: norm of the compressed queries, `[rank]`.
    QueryDownNorm,
    /// Latent attention: from compressed queries to heads (`q_b`).
    QueryUp,
    /// Latent attention: projection from the residual stream to the latent vector and the rotated
    /// key part (`kv_a`).
    KvDown,
    /// Latent attention: norm of the latent vector, `[rank]`.
    KvDownNorm,
    /// Latent attention: projection from the latent vector to keys and values of the heads
    /// (`kv_b`).
    KvUp,

    /// Attention to compressed tokens: projection from each group of heads to a narrower vector,
    /// group after group.
    OutGroups,
    /// Compression: from the residual stream to values.
    CompressedValues,
    /// Compression: from the residual stream to gates.
    CompressedGates,
    /// Compression: added to the gates, `[tokens, width]`.
    CompressedPlaces,
    /// Compression: norm of a compressed token.
    CompressedNorm,
    /// Compression of an indexer's keys: values.
    IndexValues,
    /// Compression of an indexer's keys: gates.
    IndexGates,
    /// Compression of an indexer's keys: added to the gates.
    IndexPlaces,

    /// Gated delta rule: queries, keys, values and output gates in one projection, one key head
    /// after the other.
    DeltaQkvz,
    /// Gated delta rule: write strengths and decays in one projection, one key head after the
    /// other.
    DeltaBa,
    /// Gated delta rule: queries, keys and values, where output gates are apart.
    DeltaQkv,
    /// Gated delta rule: output gates, if they are separate.
    DeltaGate,
    /// Gated delta rule: write strengths, if they are separate.
    DeltaBeta,
    /// Gated delta rule: decays, if they are separate.
    DeltaDecay,
    /// Delta rule, state space, gated convolution: weights of the causal convolution,
    /// `[channels, 1, taps]`.
    DeltaConvolution,
    /// Delta rule and state space: logarithm of each head's decay rate (`A_log`), `[value heads]`.
    DeltaLogRate,
    /// Delta rule and state space: bias of each head's time step (`dt_bias`), `[value heads]`.
    DeltaTimeBias,
    /// Delta rule: norm of each value head, `[value_dim]`. State space: norms of its groups.
    DeltaNorm,
    /// Delta rule, state space and gated convolution: output projection.
    DeltaOut,

    /// Gated convolution: gates of its inputs, gates of its results, and inputs in one projection.
    ConvIn,

    /// State space: gates, heads' inputs, groups' vectors and time steps in one projection.
    StateIn,
    /// State space: bias of the convolution, `[channels]`.
    ConvolutionBias,
    /// State space: how much of a head's input is added to its output (`D`), `[heads]`.
    StateSkip,

    /// Delta rule: convolution of queries, where each has its own, `[channels, 1, taps]`.
    QueryConvolution,
    /// Delta rule: convolution of keys.
    KeyConvolution,
    /// Delta rule: convolution of values.
    ValueConvolution,
    /// Delta rule: projection from the residual stream to the narrow vector from which decays are
    /// computed.
    DecayDown,
    /// Delta rule: decays of all channels.
    DecayUp,
    /// Delta rule: projection from the residual stream to the narrow vector from which output gates
    /// are computed.
    OutputGateDown,
    /// Delta rule: output gates.
    OutputGateUp,
    /// Delta rule and latent attention: output gates in one product. Attention: one for each head.
    OutputGate,

    /// Indexer: from compressed queries to its heads.
    IndexQuery,
    /// Indexer: a token's key.
    IndexKey,
    /// Indexer: norm of the key, `[dim]`.
    IndexNorm,
    /// Indexer: added to the normed key, `[dim]`.
    IndexNormBias,
    /// Indexer: weights of its heads.
    IndexWeights,

    /// Tables by the last tokens: all of a layer, one below the other.
    EngramTables,
    /// Tables indexed by the last tokens: projection from their vectors to a key for each residual
    /// stream and a value.
    EngramProduct,
    /// Tables indexed by the last tokens: multiplies the norms of streams, `[streams, hidden]`.
    EngramStreams,
    /// Tables indexed by the last tokens: multiplies the norms of keys, `[streams, hidden]`.
    EngramKeys,

    /// MLP: gate and up projections in one.
    GateUp,
    /// MLP: gate projection.
    Gate,
    /// MLP: up projection.
    Up,
    /// MLP: down projection.
    Down,

    /// Experts: projection from the residual stream to the narrower vector that routed experts
    /// read.
    ExpertsDown,
    /// Experts: from what routed experts write to the residual stream.
    ExpertsUp,
    /// Experts: norm of what routed experts write, `[width]`.
    ExpertsLatentNorm,
    /// Experts: router, `[experts, hidden]`.
    Router,
    /// Experts: added to the router's scores for the choice only, `[experts]`.
    RouterCorrection,
    /// Experts: the experts of each token id, `[vocabulary, chosen]`, integers.
    RouterTable,
    /// Experts in parallel with an MLP: the router's norm, `[hidden]`, times the root of its width.
    RouterNorm,
    /// Experts in parallel with an MLP: factors of the experts' weights, `[experts]`.
    RouterFactors,
    /// Experts in parallel with an MLP: norm before them, `[hidden]`.
    ExpertsNorm,
    /// Experts in parallel with an MLP: norm of their sum, `[hidden]`.
    ExpertsPostNorm,
    /// Experts in parallel with an MLP: norm of the MLP's result, `[hidden]`.
    MlpPostNorm,
    /// Shared expert: gate and up projections in one.
    SharedGateUp,
    /// Shared expert: gate projection.
    SharedGate,
    /// Shared expert: up projection.
    SharedUp,
    /// Shared expert: down projection.
    SharedDown,
    /// Shared expert: the gate of its whole output, `[1, hidden]`.
    SharedExpertGate,

    /// Layer that predicts further tokens: norm of the next token's embedding, `[hidden]`.
    AheadEmbeddingNorm,
    /// The same: norm of the hidden state, `[hidden]`.
    AheadHiddenNorm,
    /// The same: projection of both, `[hidden, 2 * hidden]`.
    AheadProjection,
    /// The same: norm before the output head, `[hidden]`.
    AheadOutputNorm,
}

impl LayerRole {
    /// This tensor in a layer.
    pub const fn of(self, layer: usize) -> Role {
        Role::Layer(layer, self)
    }
}

/// A matrix of a routed expert, `[outputs, inputs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertRole {
    /// Gate and up projections in one.
    GateUp,
    /// Gate projection.
    Gate,
    /// Up projection.
    Up,
    /// Down projection.
    Down,
}

/// A matrix of a head of latent attention, `[outputs, inputs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LatentHeadRole {
    /// Projection from the plain columns of a query to the compressed vector's columns, `[rank,
    /// plain]`.
    Absorb,
    /// From the compressed vector to the head's value, `[value_dim, rank]`.
    Expand,
}
