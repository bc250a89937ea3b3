//! Further sizes and families of models published until 2025. Their tensors add up to the published
//! numbers of weights.

use super::{DEEPSEEK_V2_LITE, GLM4_MOE, LLAMA, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE};
use crate::synth::shapes::{Shape, Stretch};

/// What gpt-oss's sizes share.
macro_rules! gpt_oss {
    ($experts:literal) => {
        concat!(
            r#"{ "num_local_experts": "#,
            $experts,
            r#", "num_experts_per_tok": 4, "swiglu_limit": 7.0, "attention_bias": true,
            "sliding_window": 128, "sliding_window_pattern": 2, "rope_scaling": { "rope_type": "yarn", "factor": 32.0,
            "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": false } }"#
        )
    };
}
const GPT_OSS: Shape = Shape {
    name: "gpt-oss-20b",
    model_type: "gpt_oss",
    hidden: 2880,
    layers: 24,
    heads: 64,
    head_dim: 64,
    channels: 2880,
    vocab: 201_088,
    rope_theta: 150_000.0,
    stretch: Stretch::None,
    more: gpt_oss!("32"),
    ..LLAMA
};

pub(super) const OTHERS: [Shape; 12] = [
    GPT_OSS,
    Shape { name: "gpt-oss-120b", layers: 36, more: gpt_oss!("128"), ..GPT_OSS },
    Shape {
        name: "qwen2-57b-a14b",
        model_type: "qwen2_moe",
        vocab: 151_936,
        more: r#"{ "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480, "norm_topk_prob": false }"#,
        ..QWEN2
    },
    Shape {
        name: "qwen3-coder-480b-a35b",
        hidden: 6144,
        layers: 62,
        heads: 96,
        kv_heads: 8,
        channels: 8192,
        context: 262_144,
        rope_theta: 10_000_000.0,
        more: r#"{ "num_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
            "norm_topk_prob": true }"#,
        ..QWEN3_MOE
    },
    Shape {
        name: "qwen3.5-35b-a3b",
        model_type: "qwen3_5_moe_text",
        hidden: 2048,
        layers: 40,
        heads: 16,
        kv_heads: 2,
        channels: 512,
        more: r#"{ "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4 }"#,
        ..QWEN3_5
    },
    Shape {
        name: "qwen3.5-397b-a17b",
        model_type: "qwen3_5_moe_text",
        hidden: 4096,
        layers: 60,
        heads: 32,
        kv_heads: 2,
        channels: 1024,
        more: r#"{ "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
            "linear_num_key_heads": 16, "linear_num_value_heads": 64, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4 }"#,
        ..QWEN3_5
    },
    // GLM-4.5, 4.6 and 4.7.
    Shape {
        name: "glm-4.6",
        hidden: 5120,
        layers: 92,
        channels: 12288,
        context: 202_752,
        rope_theta: 1_000_000.0,
        more: r#"{ "n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "n_shared_experts": 1,
            "first_k_dense_replace": 3, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "attention_bias": true,
            "use_qk_norm": true, "partial_rotary_factor": 0.5 }"#,
        ..GLM4_MOE
    },
    Shape {
        name: "glm-4.7-flash",
        model_type: "glm4_moe_lite",
        layers: 47,
        heads: 20,
        kv_heads: 20,
        channels: 10240,
        vocab: 154_880,
        context: 202_752,
        norm_eps: 1e-5,
        rope_theta: 1_000_000.0,
        more: r#"{ "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
            "routed_scaling_factor": 1.8 }"#,
        ..DEEPSEEK_V2_LITE
    },
    Shape {
        name: "deepseek-v2",
        hidden: 5120,
        layers: 60,
        heads: 128,
        kv_heads: 128,
        channels: 12288,
        more: r#"{ "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 160, "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
            "norm_topk_prob": false, "routed_scaling_factor": 16.0,
            "rope_scaling": { "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707 } }"#,
        ..DEEPSEEK_V2_LITE
    },
    Shape {
        name: "phi-3-mini",
        model_type: "phi3",
        hidden: 3072,
        kv_heads: 32,
        head_dim: 96,
        channels: 8192,
        vocab: 32_064,
        context: 4096,
        rope_theta: 10_000.0,
        stretch: Stretch::None,
        ..LLAMA
    },
    Shape {
        name: "seed-oss-36b",
        model_type: "seed_oss",
        hidden: 5120,
        layers: 64,
        heads: 80,
        channels: 27648,
        vocab: 155_136,
        context: 524_288,
        rope_theta: 10_000_000.0,
        more: r#"{ "attention_bias": true, "attention_out_bias": false }"#,
        ..QWEN3
    },
    Shape {
        name: "smollm3-3b",
        model_type: "smollm3",
        hidden: 2048,
        heads: 16,
        kv_heads: 4,
        channels: 11008,
        vocab: 128_256,
        context: 65_536,
        tied: true,
        rope_theta: 5_000_000.0,
        more: r#"{ "no_rope_layer_interval": 4 }"#,
        ..QWEN3
    },
];
