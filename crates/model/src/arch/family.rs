//! The families of architectures: what their configs leave unsaid.

mod kin;

use super::experts::{
    DEEPSEEK4, DEEPSEEK41 as DEEPSEEK41_EXPERTS, ERNIE, ExpertFamily, GLM5_3 as GLM5_3_EXPERTS, GPT_OSS,
    LLAMA4, MISTRAL, NEMOTRON, RENORMALISED_SOFTMAX, SIGMOID_CORRECTED, SOFTMAX, TRANSPOSED,
};
use crate::spec::{Norms, QkNormWidth, StreamReading};

/// Properties of a family that its config does not contain.
#[derive(Clone, Copy)]
pub(super) struct Family {
    /// `model_type`.
    pub name: &'static str,
    /// Fields that a config may omit because they have the default of transformers' class, as a
    /// JSON object.
    pub defaults: &'static str,
    /// Queries, keys and values have biases unless the config has `attention_bias`.
    pub qkv_bias: bool,
    /// `attention_bias` means the output projection, too.
    pub out_bias: bool,
    /// How queries and keys are normed if they are.
    pub qk_norm_width: QkNormWidth,
    /// Queries and keys are normed unless the config has `use_qk_norm`.
    pub qk_norm: bool,
    /// Attention's output is gated unless the config has `attn_output_gate`.
    pub output_gate: bool,
    /// Each of attention's heads has a single gate, unless the config has `use_attention_gate`.
    pub head_gates: bool,
    /// Neighbouring columns are rotated together.
    pub interleaved: bool,
    /// Query heads have sinks.
    pub sinks: bool,
    pub windows: Windows,
    pub rotations: Rotations,
    pub norms: Norms,
    /// Norms of the residual stream subtract its mean first.
    pub centered: bool,
    /// Norm weights are stored less one.
    pub norms_less_one: bool,
    /// Embeddings are multiplied with the square root of their width, in bf16.
    pub scales_embedding: bool,
    /// Logits are multiplied with `logits_scaling`, not divided.
    pub multiplies_logits: bool,
    /// Layers without a window have other heads (Gemma 4).
    pub global_heads: bool,
    /// Keys and values have other widths, and layers with a window have other heads (MiMo V2).
    pub window_heads: bool,
    /// Attention is latent.
    pub latent: bool,
    /// An indexer selects the tokens of latent attention; whether it rotates neighbouring columns
    /// together.
    pub indexer: Option<bool>,
    /// Layers without attention have the gated delta rule.
    pub delta: bool,
    /// Layers without attention have Kimi's delta rule.
    pub channel_delta: bool,
    /// Attention is to compressed tokens, and whether layers share them (DeepSeek V4 and V4.1).
    pub compressed: Option<Sharing>,
    /// There are several residual streams, and how they are read.
    pub streams: Option<StreamReading>,
    /// The config has MiniCPM's fields.
    pub minicpm: bool,
    /// The config has MiniMax M3's fields.
    pub minimax3: bool,
    /// MLPs have no gates; their channels are `max(up, 0)²`.
    pub ungated_mlp: bool,
    /// Norms of compressed queries and vectors have the epsilon of the other norms, and the config
    /// has GLM-5.3's fields.
    pub glm53: bool,
    pub state_spaces: StateSpaces,
    pub convolutions: Convolutions,
    /// Layers have experts by default.
    pub experts: Option<ExpertFamily>,
    /// As in [`crate::spec::AheadSpec`].
    pub ahead_hidden_first: bool,
    pub ahead_chains_normed: bool,
    /// The files have a layer that predicts further tokens, but the config does not mention it.
    pub ahead_unannounced: bool,
}

/// Which layers attend to a window only.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Windows {
    /// All if the config has a `sliding_window`, except those that `layer_types` or
    /// `sliding_window_pattern` exempts.
    WhereGiven,
    /// Layers from `max_window_layers`, if `use_sliding_window` is set.
    AfterMaxWindowLayers,
}

/// Whether layers share compressed tokens.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Sharing {
    /// Each compresses its own.
    None,
    /// Some layers compress tokens, and some choose among them, for later ones (DeepSeek V4.1).
    Sources,
}

/// Which layers have a state space (Mamba-2).
#[derive(Clone, Copy, PartialEq)]
pub(super) enum StateSpaces {
    /// None.
    None,
    /// Each layer is a mixer or a feed-forward, by the config's pattern (Nemotron-H).
    Apart,
    /// Some have one in place of attention (Granite 4).
    ForAttention,
}

/// Whether some layers have a gated short convolution in place of attention.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Convolutions {
    /// No.
    None,
    /// Yes.
    Some,
    /// Yes, and by default channels of MLPs are computed from `intermediate_size` (LFM2).
    Adjusted,
}

/// How layers with a window rotate, in a model where others have none.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rotations {
    /// As the others.
    Alike,
    /// By `rope_local_base_freq` if there is one, and without scaling.
    UnscaledInWindows,
    /// The others do not rotate.
    InWindowsOnly,
    /// No layer rotates.
    Nowhere,
}

const LLAMA: Family = Family {
    name: "llama",
    defaults: "{}",
    qkv_bias: false,
    out_bias: true,
    qk_norm_width: QkNormWidth::Head,
    qk_norm: false,
    output_gate: false,
    head_gates: false,
    interleaved: false,
    sinks: false,
    windows: Windows::WhereGiven,
    rotations: Rotations::Alike,
    norms: Norms::Before,
    centered: false,
    norms_less_one: false,
    scales_embedding: false,
    multiplies_logits: false,
    global_heads: false,
    window_heads: false,
    latent: false,
    indexer: None,
    delta: false,
    channel_delta: false,
    compressed: None,
    streams: None,
    minicpm: false,
    minimax3: false,
    ungated_mlp: false,
    glm53: false,
    state_spaces: StateSpaces::None,
    convolutions: Convolutions::None,
    experts: None,
    ahead_hidden_first: false,
    ahead_chains_normed: false,
    ahead_unannounced: false,
};
const QWEN2: Family =
    Family { name: "qwen2", qkv_bias: true, windows: Windows::AfterMaxWindowLayers, ..LLAMA };
const QWEN3: Family =
    Family { name: "qwen3", qk_norm: true, windows: Windows::AfterMaxWindowLayers, ..LLAMA };
const QWEN3_MOE: Family = Family { name: "qwen3_moe", experts: Some(SOFTMAX), ..QWEN3 };
const DEEPSEEK3: Family =
    Family { name: "deepseek_v3", latent: true, experts: Some(SIGMOID_CORRECTED), ..LLAMA };
/// Qwen3.5, and families of the same shape.
const QWEN3_5: Family = Family {
    name: "qwen3_5",
    defaults: r#"{ "partial_rotary_factor": 0.25 }"#,
    output_gate: true,
    norms_less_one: true,
    delta: true,
    ahead_chains_normed: true,
    ahead_unannounced: true,
    ..QWEN3
};
const QWEN3_5_MOE: Family = Family { name: "qwen3_5_moe", experts: Some(RENORMALISED_SOFTMAX), ..QWEN3_5 };

const OLMO2: Family =
    Family { name: "olmo2", norms: Norms::After, qk_norm: true, qk_norm_width: QkNormWidth::All, ..LLAMA };
const GEMMA3: Family = Family {
    name: "gemma3_text",
    defaults: r#"{ "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true }"#,
    qk_norm: true,
    rotations: Rotations::UnscaledInWindows,
    norms: Norms::Around,
    norms_less_one: true,
    scales_embedding: true,
    ..LLAMA
};

/// Gemma 4's text models.
const GEMMA4: Family = Family {
    name: "gemma4_text",
    defaults: r#"{ "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 512,
        "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true,
        "rope_parameters": {
            "sliding_attention": { "rope_type": "default", "rope_theta": 10000.0 },
            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0 }
        } }"#,
    norms_less_one: false,
    global_heads: true,
    // If `enable_moe_block` is true.
    experts: Some(RENORMALISED_SOFTMAX),
    ..GEMMA3
};
/// Command R and R+.
const COHERE: Family = Family {
    name: "cohere",
    defaults: r#"{ "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": true }"#,
    qk_norm_width: QkNormWidth::Centered,
    interleaved: true,
    norms: Norms::Shared,
    centered: true,
    ..LLAMA
};
const HUNYUAN: Family = Family {
    name: "hunyuan_v1_dense",
    defaults: r#"{ "rms_norm_eps": 1e-5 }"#,
    qk_norm: true,
    qk_norm_width: QkNormWidth::Rotated,
    ..LLAMA
};
/// Hunyuan A13B; folders of MLX have its older name.
const HUNYUAN_EXPERTS: Family = Family {
    name: "hunyuan_v1_moe",
    defaults: r#"{ "rms_norm_eps": 1e-5, "num_shared_expert": 1 }"#,
    experts: Some(RENORMALISED_SOFTMAX),
    ..HUNYUAN
};
/// Llama 4's text model.
const LLAMA4_TEXT: Family = Family {
    name: "llama4_text",
    defaults: r#"{ "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": true,
        "rms_norm_eps": 1e-5, "num_local_experts": 16, "num_experts_per_tok": 1,
        "n_shared_experts": 1, "max_position_embeddings": 131072, "head_dim": 128 }"#,
    qk_norm: true,
    qk_norm_width: QkNormWidth::Unweighted,
    interleaved: true,
    experts: Some(LLAMA4),
    ..LLAMA
};

/// GLM-5.3's text model.
const GLM5_3: Family = Family {
    name: "glm5_next_text",
    defaults: r#"{ "rms_norm_eps": 1e-5, "qk_rope_head_dim": 0, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 1048576, "index_kpool": 16, "linear_num_heads": 64, "linear_head_dim": 128 }"#,
    rotations: Rotations::Nowhere,
    indexer: Some(false),
    channel_delta: true,
    streams: Some(StreamReading::Mean),
    glm53: true,
    experts: Some(GLM5_3_EXPERTS),
    ..DEEPSEEK3
};

const DEEPSEEK41: Family = Family {
    name: "deepseek_v41",
    defaults: r#"{ "num_key_value_heads": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-20 }"#,
    compressed: Some(Sharing::Sources),
    streams: Some(StreamReading::Carried),
    experts: Some(DEEPSEEK41_EXPERTS),
    ..LLAMA
};

const GEMMA2: Family = Family {
    name: "gemma2",
    defaults: r#"{ "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0 }"#,
    qk_norm: false,
    rotations: Rotations::Alike,
    ..GEMMA3
};
const GLM4: Family = Family {
    name: "glm4",
    defaults: r#"{ "partial_rotary_factor": 0.5 }"#,
    out_bias: false,
    interleaved: true,
    norms: Norms::Around,
    ..LLAMA
};
const EXAONE4: Family = Family {
    name: "exaone4",
    qk_norm: true,
    rotations: Rotations::InWindowsOnly,
    norms: Norms::After,
    ..LLAMA
};

/// All families.
pub(super) fn families() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().chain(&kin::KIN)
}

static FAMILIES: [Family; 58] = [
    LLAMA,
    Family { name: "mistral", ..LLAMA },
    Family { name: "ministral", ..LLAMA },
    Family { name: "ministral3", ..LLAMA },
    QWEN2,
    Family { name: "mimo", ahead_hidden_first: true, ahead_chains_normed: true, ..QWEN2 },
    QWEN3,
    Family {
        name: "mimo_v2_flash",
        defaults: r#"{ "head_dim": 192, "v_head_dim": 128, "partial_rotary_factor": 0.334, "num_key_value_heads": 4,
            "attention_value_scale": 0.707, "max_position_embeddings": 262144, "tie_word_embeddings": false }"#,
        out_bias: false,
        rotations: Rotations::UnscaledInWindows,
        window_heads: true,
        experts: Some(SIGMOID_CORRECTED),
        ..LLAMA
    },
    Family { name: "seed_oss", out_bias: false, ..LLAMA },
    Family { name: "smollm3", windows: Windows::AfterMaxWindowLayers, ..LLAMA },
    Family { name: "ernie4_5", interleaved: true, ..LLAMA },
    Family { name: "mixtral", experts: Some(RENORMALISED_SOFTMAX), ..LLAMA },
    Family { name: "qwen2_moe", experts: Some(SOFTMAX), ..QWEN2 },
    QWEN3_MOE,
    Family { name: "glm4_moe", out_bias: false, experts: Some(SIGMOID_CORRECTED), ..LLAMA },
    Family { name: "gpt_oss", qkv_bias: true, sinks: true, experts: Some(GPT_OSS), ..LLAMA },
    Family { name: "glm4_moe_lite", ..DEEPSEEK3 },
    Family { name: "deepseek_v2", experts: Some(SOFTMAX), ..DEEPSEEK3 },
    DEEPSEEK3,
    Family { name: "kimi_k2", ..DEEPSEEK3 },
    Family { name: "deepseek_v32", indexer: Some(false), ..DEEPSEEK3 },
    Family {
        name: "deepseek_v4",
        defaults: r#"{ "num_key_value_heads": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5 }"#,
        compressed: Some(Sharing::None),
        streams: Some(StreamReading::Weighted),
        experts: Some(DEEPSEEK4),
        ..LLAMA
    },
    DEEPSEEK41,
    Family { name: "deepseek_v41_text", ..DEEPSEEK41 },
    Family { name: "glm5_next", ..GLM5_3 },
    GLM5_3,
    Family { name: "glm_moe_dsa", indexer: Some(true), ..DEEPSEEK3 },
    Family {
        name: "kimi_linear",
        defaults: r#"{ "mla_use_nope": true, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5 }"#,
        channel_delta: true,
        ..DEEPSEEK3
    },
    Family { name: "qwen3_next", ..QWEN3_5_MOE },
    QWEN3_5,
    Family { name: "qwen3_5_text", ..QWEN3_5 },
    QWEN3_5_MOE,
    Family { name: "qwen3_5_moe_text", ..QWEN3_5_MOE },
    Family {
        name: "minimax_m2",
        qk_norm: true,
        qk_norm_width: QkNormWidth::All,
        experts: Some(SIGMOID_CORRECTED),
        ..LLAMA
    },
    Family { name: "ernie4_5_moe", interleaved: true, experts: Some(ERNIE), ..LLAMA },
    Family {
        name: "nemotron_h",
        defaults: r#"{ "attention_bias": false, "rms_norm_eps": 1e-5 }"#,
        rotations: Rotations::Nowhere,
        state_spaces: StateSpaces::Apart,
        ungated_mlp: true,
        experts: Some(NEMOTRON),
        ..LLAMA
    },
    Family { name: "qwen3_vl", ..QWEN3 },
    Family { name: "qwen3_vl_text", ..QWEN3 },
    Family { name: "gemma3", ..GEMMA3 },
    GEMMA3,
    Family { name: "phi3", ..LLAMA },
    OLMO2,
    Family {
        name: "olmo3",
        defaults: r#"{ "sliding_window_pattern": 4 }"#,
        rotations: Rotations::UnscaledInWindows,
        ..OLMO2
    },
    GEMMA2,
    Family { name: "gemma4", ..GEMMA4 },
    GEMMA4,
    COHERE,
    Family {
        name: "cohere2",
        defaults: r#"{ "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": true,
            "sliding_window": 4096, "sliding_window_pattern": 4 }"#,
        rotations: Rotations::InWindowsOnly,
        ..COHERE
    },
    HUNYUAN,
    HUNYUAN_EXPERTS,
    Family { name: "hunyuan", ..HUNYUAN_EXPERTS },
    Family {
        name: "mistral4",
        defaults: r#"{ "n_shared_experts": 1 }"#,
        experts: Some(MISTRAL),
        ..DEEPSEEK3
    },
    LLAMA4_TEXT,
    Family { name: "qwen3_vl_moe", experts: Some(TRANSPOSED), ..QWEN3 },
    Family { name: "qwen3_vl_moe_text", experts: Some(TRANSPOSED), ..QWEN3 },
    Family { name: "granite", ..LLAMA },
    GLM4,
    EXAONE4,
];
