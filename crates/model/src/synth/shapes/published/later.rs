//! Shapes of models published in late 2025 and 2026.

use super::{DEEPSEEK_V3, GEMMA3, LLAMA};
use crate::synth::shapes::{Shape, Stretch};

/// Widths and counts are from MLX-LM's class and from SGLang's test (two tables of about 384
/// million rows). It is an assumption which layers compress, choose and have tables, and how long
/// n-grams are, because no package contains the published config. The count of numbers is that of
/// the tokenizer of these folders.
pub(super) const DEEPSEEK_V4_1_FLASH: Shape = Shape {
    name: "deepseek-v4.1-flash",
    model_type: "deepseek_v41",
    hidden: 5120,
    layers: 40,
    heads: 64,
    kv_heads: 1,
    head_dim: 512,
    channels: 2304,
    vocab: 129_280,
    context: 1_048_576,
    norm_eps: 1e-20,
    rope_theta: 10_000.0,
    more: r#"{ "q_lora_rank": 1280, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
        "n_routed_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 2304, "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus", "norm_topk_prob": true, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "index_topk": 512, "index_head_dim": 128, "index_n_heads": 32, "compress_rope_theta": 160000.0,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 20], "index_source_layer_ids": [2, 6, 10, 14, 18, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384002168, 384006332], "engram_max_ngram_size": 3,
        "engram_vocab_size": 24000000, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 129251,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rope_scaling": { "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
        "beta_slow": 1 } }"#,
    ..DEEPSEEK_V3
};

pub(super) const GEMMA4: Shape = Shape {
    name: "gemma4-31b",
    model_type: "gemma4_text",
    layers: 60,
    vocab: 262_144,
    context: 262_144,
    more: r#"{ "sliding_window": 1024, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": true,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0 }"#,
    head_dim: 256,
    ..GEMMA3
};

/// The text model, with the sizes that MLX-LM's `gemma4_text` has as defaults. Without the table of
/// the layers' inputs, its tensors add up to the published 2.3 billion weights.
pub(super) const GEMMA4_INPUTS: Shape = Shape {
    name: "gemma4-e2b",
    hidden: 1536,
    layers: 35,
    heads: 8,
    kv_heads: 1,
    channels: 6144,
    context: 131_072,
    more: r#"{ "sliding_window": 512, "sliding_window_pattern": 5, "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": true, "final_logit_softcapping": 30.0 }"#,
    ..GEMMA4
};

/// Its tensors add up to the published 25.2 billion weights, 3.8 billion of them active.
pub(super) const GEMMA4_EXPERTS: Shape = Shape {
    name: "gemma4-26b-a4b",
    hidden: 2816,
    layers: 30,
    heads: 16,
    kv_heads: 8,
    channels: 2112,
    more: r#"{ "sliding_window": 1024, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": true,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "enable_moe_block": true, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704 }"#,
    ..GEMMA4
};

/// All parts of Kimi K3, in small sizes, because its published config was not available.
pub(super) const KIMI_K3_TINY: Shape = Shape {
    name: "kimi-k3-tiny",
    model_type: "kimi_linear",
    hidden: 128,
    layers: 6,
    heads: 4,
    kv_heads: 4,
    channels: 384,
    vocab: 4096,
    context: 4096,
    norm_eps: 1e-5,
    stretch: Stretch::None,
    more: r#"{ "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 8.0, "attn_res_block_size": 4,
        "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "mla_use_nope": true,
        "mla_use_output_gate": true, "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 128,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": true, "linear_attn_config": { "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0, "use_full_rank_gate": true, "full_attn_layers": [4, 6], "kda_layers": [1, 2, 3, 5] } }"#,
    ..LLAMA
};

/// Its tensors add up to the published 309 billion weights.
pub(super) const MIMO_V2: Shape = Shape {
    name: "mimo-v2-flash",
    model_type: "mimo_v2_flash",
    layers: 48,
    heads: 64,
    kv_heads: 4,
    head_dim: 192,
    channels: 16384,
    vocab: 152_576,
    context: 262_144,
    norm_eps: 1e-5,
    rope_theta: 5_000_000.0,
    stretch: Stretch::None,
    more: r#"{ "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "norm_topk_prob": true, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "attention_value_scale": 0.707, "sliding_window_size": 128, "swa_rope_theta": 10000.0, "swa_num_key_value_heads": 8,
        "partial_rotary_factor": 0.334, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0,
        1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1] }"#,
    ..LLAMA
};

pub(super) const MISTRAL4: Shape = Shape {
    name: "mistral-small-4-119b",
    model_type: "mistral4",
    hidden: 4096,
    layers: 36,
    heads: 32,
    kv_heads: 32,
    channels: 12288,
    vocab: 131_072,
    context: 1_048_576,
    more: r#"{ "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
        "rope_parameters": { "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192 } }"#,
    ..DEEPSEEK_V3
};

/// Letters are layers: a state space, experts, attention, an MLP.
pub(super) const NEMOTRON: Shape = Shape {
    name: "nemotron3-nano-30b-a3b",
    model_type: "nemotron_h",
    hidden: 2688,
    layers: 52,
    kv_heads: 2,
    channels: 1856,
    vocab: 131_072,
    context: 262_144,
    stretch: Stretch::None,
    more: r#"{ "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": true,
        "mlp_hidden_act": "relu2", "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "n_group": 1, "topk_group": 1 }"#,
    ..LLAMA
};

/// What Granite 4's sizes share: four of 40 layers attend.
macro_rules! granite4 {
    ($own:literal) => {
        concat!(
            r#"{ "layer_types": [
            "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
            "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
            "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
            "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba"],
            "position_embedding_type": "nope", "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
            "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": true, "mamba_proj_bias": false,
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "#,
            $own,
            " }"
        )
    };
}

pub(super) const GRANITE4_SMALL: Shape = Shape {
    name: "granite4-h-small",
    model_type: "granitemoehybrid",
    layers: 40,
    channels: 768,
    vocab: 100_352,
    tied: true,
    rope_theta: 10_000.0,
    stretch: Stretch::None,
    more: granite4!(
        r#""mamba_n_heads": 128, "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536,
            "attention_multiplier": 0.0078125, "logits_scaling": 16.0"#
    ),
    ..LLAMA
};

pub(super) const GRANITE4_TINY: Shape = Shape {
    name: "granite4-h-tiny",
    hidden: 1536,
    heads: 12,
    kv_heads: 4,
    channels: 512,
    more: granite4!(
        r#""mamba_n_heads": 48, "num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024,
            "attention_multiplier": 0.0078125, "logits_scaling": 6.0"#
    ),
    ..GRANITE4_SMALL
};

/// Without experts.
pub(super) const GRANITE4_MICRO: Shape = Shape {
    name: "granite4-h-micro",
    hidden: 2048,
    head_dim: 64,
    channels: 8192,
    more: granite4!(
        r#""mamba_n_heads": 64, "num_local_experts": 0, "shared_intermediate_size": 8192,
            "attention_multiplier": 0.015625, "logits_scaling": 8.0"#
    ),
    ..GRANITE4_SMALL
};

/// Gated short convolutions, and attention in six layers.
pub(super) const LFM2: Shape = Shape {
    name: "lfm2-1.2b",
    model_type: "lfm2",
    hidden: 2048,
    layers: 16,
    head_dim: 64,
    channels: 8192,
    vocab: 65_536,
    context: 128_000,
    tied: true,
    rope_theta: 1_000_000.0,
    stretch: Stretch::None,
    more: r#"{ "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_auto_adjust_ff_dim": false }"#,
    ..LLAMA
};

pub(super) const LFM2_MOE: Shape = Shape {
    name: "lfm2-8b-a1b",
    model_type: "lfm2_moe",
    layers: 24,
    channels: 7168,
    more: r#"{ "conv_L_cache": 3, "full_attn_idxs": [2, 6, 10, 14, 18, 21], "num_dense_layers": 2, "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "norm_topk_prob": true }"#,
    ..LFM2
};

/// With the pattern of transformers' Lfm3Config.
pub(super) const LFM3: Shape = Shape {
    name: "lfm3-1.7b",
    model_type: "lfm3",
    layers: 24,
    heads: 16,
    kv_heads: 4,
    head_dim: 128,
    channels: 7680,
    vocab: 128_000,
    more: r#"{ "conv_L_cache": 7, "sliding_window": 256, "layer_types": [
        "conv", "conv", "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv", "sliding_attention", "conv",
        "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv", "sliding_attention", "conv",
        "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv"] }"#,
    ..LFM2
};
