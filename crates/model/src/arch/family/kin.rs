//! Families that are described as variants of other families, those of the parent module.

use super::{
    Convolutions, DEEPSEEK3, EXAONE4, Family, GEMMA2, GEMMA4, GLM4, LLAMA, OLMO2, QWEN2, QWEN3, Rotations,
    StateSpaces, Windows,
};
use crate::arch::experts::{FLINT, MINIMAX3, RENORMALISED_SOFTMAX, SIGMOID_CORRECTED, SOFTMAX};
use crate::spec::Norms;

const GLM4V_TEXT: Family = Family { name: "glm4v_text", ..GLM4 };
const GLM4V_MOE_TEXT: Family = Family {
    name: "glm4v_moe_text",
    defaults: r#"{ "partial_rotary_factor": 0.5, "first_k_dense_replace": 1 }"#,
    qkv_bias: true,
    out_bias: false,
    experts: Some(SIGMOID_CORRECTED),
    ..LLAMA
};

/// Gemma 4 12B's text model.
const GEMMA4_UNIFIED: Family = Family {
    name: "gemma4_unified_text",
    defaults: r#"{ "head_dim": 256, "max_position_embeddings": 262144, "sliding_window": 1024,
        "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true,
        "hidden_size_per_layer_input": 0, "rope_parameters": {
            "sliding_attention": { "rope_type": "default", "rope_theta": 10000.0 },
            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0 }
        } }"#,
    experts: None,
    ..GEMMA4
};

/// Granite with windows and sinks; layers may have bases of their own.
const GRANITE_SWA: Family = Family {
    name: "granite_swa",
    defaults: r#"{ "rms_norm_eps": 1e-5, "sliding_window": 128, "sliding_window_pattern": "GLLL",
        "tie_word_embeddings": true, "max_position_embeddings": 8192 }"#,
    sinks: true,
    ..LLAMA
};

/// Most layers have a gated short convolution in place of attention.
const LFM2: Family = Family {
    name: "lfm2",
    defaults: r#"{ "conv_L_cache": 3, "max_position_embeddings": 128000 }"#,
    qk_norm: true,
    convolutions: Convolutions::Adjusted,
    ..LLAMA
};

pub(super) static KIN: [Family; 43] = [
    Family {
        name: "gemma",
        defaults: r#"{ "head_dim": 256, "max_position_embeddings": 8192, "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": true }"#,
        norms: Norms::Before,
        ..GEMMA2
    },
    // Gemma 2 with norms before only.
    Family { name: "vaultgemma", norms: Norms::Before, ..GEMMA2 },
    // GLM-4 before April 2025.
    Family {
        name: "glm",
        defaults: r#"{ "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7, "head_dim": 128 }"#,
        qkv_bias: true,
        norms: Norms::Before,
        ..GLM4
    },
    GLM4V_TEXT,
    GLM4V_MOE_TEXT,
    Family { name: "helium", out_bias: false, interleaved: true, ..LLAMA },
    Family { name: "internlm3", ..LLAMA },
    Family { name: "iquestcoder", ..LLAMA },
    // AFM.
    Family { name: "arcee", ungated_mlp: true, ..LLAMA },
    Family {
        name: "cwm",
        defaults: r#"{ "sliding_window": 8192, "sliding_window_pattern": "GLLL", "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 } }"#,
        out_bias: false,
        ..LLAMA
    },
    // Their configs have the fields of Qwen2 on the outside, or in a `text_config`.
    Family { name: "qwen2_vl", ..QWEN2 },
    Family { name: "qwen2_vl_text", ..QWEN2 },
    Family { name: "qwen2_5_vl", ..QWEN2 },
    Family { name: "qwen2_5_vl_text", ..QWEN2 },
    Family { name: "exaone4_5_text", ..EXAONE4 },
    // K-EXAONE.
    Family {
        name: "exaone_moe",
        defaults: r#"{ "sliding_window": 4096, "sliding_window_pattern": 4, "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "num_shared_experts": 1 }"#,
        norms: Norms::Before,
        experts: Some(SIGMOID_CORRECTED),
        ..EXAONE4
    },
    Family {
        name: "dots1",
        defaults: r#"{ "norm_topk_prob": false }"#,
        experts: Some(SIGMOID_CORRECTED),
        ..QWEN3
    },
    Family {
        name: "solar_open",
        defaults: r#"{ "rms_norm_eps": 1e-5, "n_shared_experts": 1, "head_dim": 128 }"#,
        out_bias: false,
        experts: Some(SIGMOID_CORRECTED),
        ..LLAMA
    },
    // Hunyuan 3.
    Family {
        name: "hy_v3",
        defaults: r#"{ "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_shared_experts": 1 }"#,
        qk_norm: true,
        experts: Some(SIGMOID_CORRECTED),
        ..LLAMA
    },
    Family { name: "olmoe", norms: Norms::Before, experts: Some(SOFTMAX), ..OLMO2 },
    Family { name: "minicpm", minicpm: true, ..LLAMA },
    // Latent attention without experts.
    Family {
        name: "minicpm3",
        defaults: r#"{ "rope_interleave": false, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "scale_emb": 12,
            "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 64 }"#,
        minicpm: true,
        experts: None,
        ..DEEPSEEK3
    },
    Family { name: "telechat3", ..LLAMA },
    Family { name: "joyai_llm_flash", ..DEEPSEEK3 },
    // Gemma 4 12B: other encoders of images and sound, no experts.
    Family { name: "gemma4_unified", ..GEMMA4_UNIFIED },
    GEMMA4_UNIFIED,
    // OLMo 2 with experts.
    Family { name: "flex_olmo", experts: Some(SOFTMAX), ..OLMO2 },
    // Granite's factors.
    Family { name: "hyperclovax", norms: Norms::Around, multiplies_logits: true, ..LLAMA },
    GRANITE_SWA,
    Family {
        name: "granitemoe_swa",
        defaults: r#"{ "sliding_window": 128, "sliding_window_pattern": "GLLL" }"#,
        experts: Some(RENORMALISED_SOFTMAX),
        ..GRANITE_SWA
    },
    // Only layers with a window rotate.
    Family {
        name: "flint",
        defaults: r#"{ "norm_topk_prob": true, "mlp_only_layers": [0, 1], "sliding_window": 513 }"#,
        sinks: true,
        windows: Windows::WhereGiven,
        rotations: Rotations::InWindowsOnly,
        experts: Some(FLINT),
        ..QWEN3
    },
    Family {
        name: "sarvam_moe",
        defaults: r#"{ "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
            "use_qk_norm": true }"#,
        out_bias: false,
        experts: Some(SIGMOID_CORRECTED),
        ..LLAMA
    },
    Family { name: "granitemoe", experts: Some(RENORMALISED_SOFTMAX), ..LLAMA },
    Family { name: "granitemoeshared", experts: Some(RENORMALISED_SOFTMAX), ..LLAMA },
    // Granite 4. Some sizes have no state spaces, some no experts.
    Family {
        name: "granitemoehybrid",
        defaults: r#"{ "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024 }"#,
        state_spaces: StateSpaces::ForAttention,
        experts: Some(RENORMALISED_SOFTMAX),
        ..LLAMA
    },
    Family {
        name: "minimax_m3_vl_text",
        defaults: r#"{ "head_dim": 128, "partial_rotary_factor": 0.5,
            "num_local_experts": 128, "num_experts_per_tok": 4, "routed_scaling_factor": 2.0,
            "max_position_embeddings": 524288, "tie_word_embeddings": false }"#,
        qk_norm: true,
        norms_less_one: true,
        minimax3: true,
        experts: Some(MINIMAX3),
        ..LLAMA
    },
    // Each kind of layer has its own rotation.
    Family {
        name: "mellum",
        defaults: r#"{ "sliding_window": 1024, "sliding_window_pattern": 1 }"#,
        windows: Windows::WhereGiven,
        rotations: Rotations::UnscaledInWindows,
        experts: Some(RENORMALISED_SOFTMAX),
        ..QWEN3
    },
    Family { name: "sarvam_mla", ..DEEPSEEK3 },
    // Latent attention without experts.
    Family { name: "youtu", experts: None, ..DEEPSEEK3 },
    Family { name: "youtu_llm", experts: None, ..DEEPSEEK3 },
    LFM2,
    Family {
        name: "lfm2_moe",
        defaults: r#"{ "conv_L_cache": 3, "max_position_embeddings": 128000, "num_dense_layers": 2 }"#,
        convolutions: Convolutions::Some,
        experts: Some(SIGMOID_CORRECTED),
        ..LFM2
    },
    Family {
        name: "lfm3",
        defaults: r#"{ "conv_L_cache": 7, "max_position_embeddings": 128000, "head_dim": 128, "sliding_window": 256,
            "rope_parameters": {
                "sliding_attention": { "rope_type": "default", "rope_theta": 10000.0 },
                "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000000.0 }
            } }"#,
        convolutions: Convolutions::Some,
        head_gates: true,
        rotations: Rotations::UnscaledInWindows,
        norms: Norms::Around,
        ..LFM2
    },
];
