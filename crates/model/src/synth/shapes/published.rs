//! Shapes of published models. A family's first shape has what the others share.

mod later;
mod others;

use super::{Shape, Stretch};
use later::{
    DEEPSEEK_V4_1_FLASH, GEMMA4, GEMMA4_EXPERTS, GEMMA4_INPUTS, GRANITE4_MICRO, GRANITE4_SMALL,
    GRANITE4_TINY, KIMI_K3_TINY, LFM2, LFM2_MOE, LFM3, MIMO_V2, MISTRAL4, NEMOTRON,
};
use others::OTHERS;

const LLAMA: Shape = Shape {
    name: "llama-8b",
    model_type: "llama",
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    channels: 14336,
    vocab: 128_256,
    context: 131_072,
    tied: false,
    norm_eps: 1e-5,
    rope_theta: 500_000.0,
    stretch: Stretch::Llama3 { factor: 8.0 },
    ahead: false,
    more: "{}",
};

const QWEN3: Shape = Shape {
    name: "qwen3-8b",
    model_type: "qwen3",
    hidden: 4096,
    layers: 36,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    channels: 12288,
    vocab: 151_936,
    context: 40_960,
    tied: false,
    norm_eps: 1e-6,
    rope_theta: 1_000_000.0,
    stretch: Stretch::None,
    ahead: false,
    more: "{}",
};

/// BAAI/bge-base-en-v1.5.
const BGE: Shape = Shape {
    name: "bge-base",
    model_type: "bert",
    hidden: 768,
    layers: 12,
    heads: 12,
    kv_heads: 12,
    head_dim: 64,
    channels: 3072,
    vocab: 30_522,
    context: 512,
    tied: true,
    norm_eps: 1e-12,
    rope_theta: 10_000.0,
    stretch: Stretch::None,
    ahead: false,
    more: r#"{"hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12}"#,
};

/// BAAI/bge-m3.
const BGE_M3: Shape = Shape {
    name: "bge-m3",
    model_type: "xlm-roberta",
    hidden: 1024,
    layers: 24,
    heads: 16,
    kv_heads: 16,
    channels: 4096,
    vocab: 250_002,
    context: 8194,
    more: r#"{"hidden_act": "gelu", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}"#,
    ..BGE
};

const QWEN2: Shape = Shape {
    name: "qwen2.5-7b",
    model_type: "qwen2",
    hidden: 3584,
    layers: 28,
    heads: 28,
    kv_heads: 4,
    channels: 18944,
    vocab: 152_064,
    context: 32_768,
    ..QWEN3
};

const MISTRAL: Shape = Shape {
    name: "mistral-7b",
    model_type: "mistral",
    vocab: 32_768,
    context: 32_768,
    rope_theta: 1_000_000.0,
    stretch: Stretch::None,
    ..LLAMA
};

const MIXTRAL: Shape = Shape {
    name: "mixtral-8x7b",
    model_type: "mixtral",
    vocab: 32_000,
    more: r#"{ "num_local_experts": 8, "num_experts_per_tok": 2 }"#,
    ..MISTRAL
};

const QWEN3_MOE: Shape = Shape {
    name: "qwen3-30b-a3b",
    model_type: "qwen3_moe",
    hidden: 2048,
    layers: 48,
    kv_heads: 4,
    channels: 6144,
    more: r#"{ "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true }"#,
    ..QWEN3
};

const GLM4_MOE: Shape = Shape {
    name: "glm-4.5-air",
    model_type: "glm4_moe",
    layers: 46,
    heads: 96,
    channels: 10944,
    vocab: 151_552,
    context: 131_072,
    norm_eps: 1e-5,
    more: r#"{ "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": true, "attention_bias": true, "partial_rotary_factor": 0.5 }"#,
    ..QWEN3
};

const DEEPSEEK_V2_LITE: Shape = Shape {
    name: "deepseek-v2-lite",
    model_type: "deepseek_v2",
    hidden: 2048,
    layers: 27,
    heads: 16,
    kv_heads: 16,
    channels: 10944,
    vocab: 102_400,
    context: 163_840,
    rope_theta: 10_000.0,
    more: r#"{ "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": false, "routed_scaling_factor": 1.0,
        "rope_scaling": { "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707 } }"#,
    ..QWEN3
};

const DEEPSEEK_V3: Shape = Shape {
    name: "deepseek-v3",
    model_type: "deepseek_v3",
    hidden: 7168,
    layers: 61,
    heads: 128,
    kv_heads: 128,
    channels: 18432,
    vocab: 129_280,
    more: r#"{ "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "rope_scaling": { "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0 } }"#,
    ..DEEPSEEK_V2_LITE
};

const KIMI_K2: Shape = Shape {
    name: "kimi-k2",
    model_type: "kimi_k2",
    heads: 64,
    kv_heads: 64,
    vocab: 163_840,
    context: 131_072,
    rope_theta: 50_000.0,
    more: r#"{ "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 2.827, "rope_scaling": { "type": "yarn", "factor": 32,
        "original_max_position_embeddings": 4096, "beta_fast": 1, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0 } }"#,
    ..DEEPSEEK_V3
};

const QWEN3_NEXT: Shape = Shape {
    name: "qwen3-next-80b-a3b",
    model_type: "qwen3_next",
    heads: 16,
    kv_heads: 2,
    head_dim: 256,
    channels: 5120,
    context: 262_144,
    rope_theta: 10_000_000.0,
    more: r#"{ "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": true, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4 }"#,
    ..QWEN3_MOE
};

/// Qwen3.5, 3.6 and 3.8.
const QWEN3_5: Shape = Shape {
    name: "qwen3.5-27b",
    model_type: "qwen3_5_text",
    hidden: 5120,
    layers: 64,
    heads: 24,
    kv_heads: 4,
    channels: 17408,
    vocab: 248_320,
    more: r#"{ "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4 }"#,
    ..QWEN3_NEXT
};

const MINIMAX_M2: Shape = Shape {
    name: "minimax-m2",
    model_type: "minimax_m2",
    hidden: 3072,
    layers: 62,
    heads: 48,
    channels: 1536,
    vocab: 200_064,
    context: 196_608,
    rope_theta: 5_000_000.0,
    more: r#"{ "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "rotary_dim": 64,
        "use_qk_norm": true }"#,
    ..QWEN3
};

const ERNIE: Shape = Shape {
    name: "ernie-4.5-21b-a3b",
    model_type: "ernie4_5_moe",
    hidden: 2560,
    layers: 28,
    heads: 20,
    kv_heads: 4,
    channels: 12288,
    vocab: 103_424,
    context: 131_072,
    tied: true,
    norm_eps: 1e-5,
    rope_theta: 500_000.0,
    more: r#"{ "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "use_bias": false }"#,
    ..QWEN3
};

const GEMMA3: Shape = Shape {
    name: "gemma3-27b",
    model_type: "gemma3_text",
    hidden: 5376,
    layers: 62,
    kv_heads: 16,
    channels: 21504,
    vocab: 262_208,
    context: 131_072,
    tied: true,
    more: r#"{ "query_pre_attn_scalar": 168, "sliding_window": 1024, "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
        "rope_scaling": { "rope_type": "linear", "factor": 8.0 } }"#,
    ..QWEN3
};

/// Command R+.
const COHERE: Shape = Shape {
    name: "command-r-plus",
    model_type: "cohere",
    hidden: 12288,
    layers: 64,
    heads: 96,
    channels: 33792,
    vocab: 256_000,
    tied: true,
    rope_theta: 75_000_000.0,
    stretch: Stretch::None,
    more: r#"{ "layer_norm_eps": 1e-5, "use_qk_norm": true, "logit_scale": 0.8333333333333334 }"#,
    ..LLAMA
};

const LLAMA4_SCOUT: Shape = Shape {
    name: "llama4-scout",
    model_type: "llama4_text",
    hidden: 5120,
    layers: 48,
    heads: 40,
    channels: 8192,
    vocab: 202_048,
    context: 10_485_760,
    stretch: Stretch::Llama3 { factor: 16.0 },
    more: r#"{ "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "use_qk_norm": true }"#,
    ..LLAMA
};

const DEEPSEEK_V3_2: Shape = Shape {
    name: "deepseek-v3.2",
    model_type: "deepseek_v32",
    more: r#"{ "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
        "rope_scaling": { "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0 } }"#,
    ..DEEPSEEK_V3
};

/// The first three layers' experts are routed, not given by a table.
const DEEPSEEK_V4_FLASH: Shape = Shape {
    name: "deepseek-v4-flash",
    model_type: "deepseek_v4",
    hidden: 4096,
    layers: 43,
    heads: 64,
    kv_heads: 1,
    head_dim: 512,
    channels: 2048,
    context: 1_048_576,
    rope_theta: 10_000.0,
    more: r#"{ "q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus", "norm_topk_prob": true, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "num_hash_layers": 0, "index_topk": 512, "index_head_dim": 128, "index_n_heads": 64, "compress_rope_theta": 160000.0,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rope_scaling": { "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
        "beta_slow": 1 } }"#,
    ..DEEPSEEK_V3
};

const GLM5: Shape = Shape {
    name: "glm-5",
    model_type: "glm_moe_dsa",
    hidden: 6144,
    layers: 78,
    heads: 64,
    kv_heads: 64,
    channels: 12288,
    vocab: 154_880,
    context: 202_752,
    norm_eps: 1e-5,
    rope_theta: 1_000_000.0,
    more: r#"{ "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32 }"#,
    ..DEEPSEEK_V3
};

const GLM5_3_FLASH: Shape = Shape {
    name: "glm-5.3-flash",
    model_type: "glm5_next_text",
    hidden: 4096,
    layers: 45,
    heads: 64,
    kv_heads: 64,
    channels: 12288,
    vocab: 154_880,
    context: 1_048_576,
    norm_eps: 1e-5,
    more: r#"{ "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
        "n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16,
        "linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6 }"#,
    ..DEEPSEEK_V3
};

const KIMI_LINEAR: Shape = Shape {
    name: "kimi-linear-48b-a3b",
    model_type: "kimi_linear",
    hidden: 2304,
    layers: 27,
    heads: 32,
    kv_heads: 32,
    channels: 9216,
    vocab: 163_840,
    context: 1_048_576,
    norm_eps: 1e-5,
    more: r#"{ "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts": 256, "num_experts_per_token": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "mla_use_nope": true,
        "linear_attn_config": { "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26] } }"#,
    ..DEEPSEEK_V2_LITE
};

/// All shapes.
pub(super) fn shapes() -> impl Iterator<Item = Shape> {
    SHAPES.into_iter().chain(OTHERS)
}

#[rustfmt::skip]
const SHAPES: [Shape; 68] = [
    Shape { name: "llama-1b", hidden: 2048, layers: 16, head_dim: 64, channels: 8192, tied: true,
        stretch: Stretch::Llama3 { factor: 32.0 }, ..LLAMA },
    Shape { name: "llama-3b", hidden: 3072, layers: 28, heads: 24, channels: 8192, tied: true,
        stretch: Stretch::Llama3 { factor: 32.0 }, ..LLAMA },
    LLAMA,
    Shape { name: "llama-70b", hidden: 8192, layers: 80, heads: 64, channels: 28672, ..LLAMA },
    Shape { name: "qwen3-0.6b", hidden: 1024, layers: 28, heads: 16, channels: 3072, tied: true, ..QWEN3 },
    Shape { name: "qwen3-1.7b", hidden: 2048, layers: 28, heads: 16, channels: 6144, tied: true, ..QWEN3 },
    Shape { name: "qwen3-4b", hidden: 2560, channels: 9728, tied: true, ..QWEN3 },
    QWEN3,
    Shape { name: "qwen3-14b", hidden: 5120, layers: 40, heads: 40, channels: 17408, ..QWEN3 },
    Shape { name: "qwen3-32b", hidden: 5120, layers: 64, heads: 64, channels: 25600, ..QWEN3 },
    QWEN2,
    Shape { name: "qwen2.5-72b", hidden: 8192, layers: 80, heads: 64, kv_heads: 8, channels: 29568, ..QWEN2 },
    MISTRAL,
    Shape { name: "mistral-small-24b", hidden: 5120, layers: 40, channels: 32768, vocab: 131_072,
        rope_theta: 100_000_000.0, ..MISTRAL },
    Shape { name: "devstral-123b", model_type: "ministral3", hidden: 12288, layers: 88, heads: 96, channels: 28672,
        vocab: 131_072, context: 262_144, stretch: Stretch::Yarn { factor: 64.0 }, ..MISTRAL },
    MIXTRAL,
    QWEN3_MOE,
    Shape { name: "qwen3-235b-a22b", hidden: 4096, layers: 94, heads: 64, channels: 12288,
        more: r#"{ "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": true }"#,
        ..QWEN3_MOE },
    GLM4_MOE,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V3_2,
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_1_FLASH,
    GLM5,
    GLM5_3_FLASH,
    KIMI_K2,
    KIMI_LINEAR,
    QWEN3_NEXT,
    QWEN3_5,
    MINIMAX_M2,
    ERNIE,
    LLAMA4_SCOUT,
    Shape { name: "llama4-maverick", context: 1_048_576, stretch: Stretch::None,
        more: r#"{ "intermediate_size_mlp": 16384, "num_local_experts": 128, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 8192, "use_qk_norm": false }"#, ..LLAMA4_SCOUT },
    COHERE,
    Shape { name: "command-a", model_type: "cohere2", channels: 36864, rope_theta: 50_000.0,
        more: r#"{ "layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4 }"#,
        ..COHERE },
    Shape { name: "hunyuan-7b", model_type: "hunyuan_v1_dense", channels: 14336, vocab: 128_167, context: 32_768, tied: true,
        rope_theta: 10_000.0, stretch: Stretch::None,
        more: r#"{ "rope_scaling": { "type": "dynamic", "alpha": 1000.0, "factor": 1.0 } }"#, ..LLAMA },
    Shape { name: "hunyuan-a13b", model_type: "hunyuan_v1_moe", channels: 3072, vocab: 128_167, context: 32_768, tied: true,
        rope_theta: 10_000.0, stretch: Stretch::None,
        more: r#"{ "num_experts": 64, "moe_topk": 8, "rope_scaling": { "type": "dynamic", "alpha": 1000.0,
            "factor": 1.0 } }"#, ..LLAMA },
    Shape { name: "gemma2-27b", model_type: "gemma2", hidden: 4608, layers: 46, heads: 32, channels: 36864, vocab: 256_000,
        context: 8192, rope_theta: 10_000.0,
        more: r#"{ "query_pre_attn_scalar": 144, "sliding_window": 4096, "sliding_window_pattern": 2,
            "hidden_activation": "gelu_pytorch_tanh" }"#, ..GEMMA3 },
    Shape { name: "gemma3-4b", hidden: 2560, layers: 34, heads: 8, kv_heads: 4, head_dim: 256, channels: 10240,
        more: r#"{ "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
            "rope_scaling": { "rope_type": "linear", "factor": 8.0 } }"#, ..GEMMA3 },
    GEMMA3,
    Shape { name: "phi-4", model_type: "phi3", hidden: 5120, layers: 40, heads: 40, kv_heads: 10, channels: 17920,
        vocab: 100_352, context: 16_384, rope_theta: 250_000.0, stretch: Stretch::None, ..LLAMA },
    Shape { name: "olmo2-32b", model_type: "olmo2", hidden: 5120, layers: 64, heads: 40, channels: 27648, vocab: 100_352,
        context: 4096, norm_eps: 1e-6, stretch: Stretch::None, ..LLAMA },
    Shape { name: "olmo3-32b", model_type: "olmo3", hidden: 5120, layers: 64, heads: 40, channels: 27648, vocab: 100_278,
        context: 65_536, norm_eps: 1e-6, stretch: Stretch::None,
        more: r#"{ "sliding_window": 4096, "rope_scaling": { "rope_type": "yarn", "factor": 8.0,
            "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836 } }"#, ..LLAMA },
    Shape { name: "granite-8b", model_type: "granite", layers: 40, channels: 12800, vocab: 49_159, tied: true,
        rope_theta: 10_000_000.0, stretch: Stretch::None,
        more: r#"{ "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
            "logits_scaling": 16.0 }"#, ..LLAMA },
    GRANITE4_SMALL,
    GRANITE4_TINY,
    GRANITE4_MICRO,
    Shape { name: "glm4-9b", model_type: "glm4", layers: 40, kv_heads: 2, channels: 13696, vocab: 151_552,
        context: 32_768, rope_theta: 10_000.0, stretch: Stretch::None, more: r#"{ "attention_bias": true }"#, ..LLAMA },
    Shape { name: "exaone4-32b", model_type: "exaone4", hidden: 5120, layers: 64, heads: 40, channels: 27392,
        vocab: 102_400, rope_theta: 1_000_000.0, stretch: Stretch::Llama3 { factor: 16.0 },
        more: r#"{ "sliding_window": 4096, "sliding_window_pattern": "LLLG" }"#, ..LLAMA },
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_INPUTS,
    KIMI_K3_TINY,
    LFM2,
    LFM2_MOE,
    LFM3,
    MIMO_V2,
    MISTRAL4,
    NEMOTRON,
    Shape { name: "nemotron-nano-9b-v2", hidden: 4480, layers: 56, heads: 40, kv_heads: 8, channels: 15680, context: 131_072,
        more: r#"{ "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
            "use_conv_bias": true, "mlp_hidden_act": "relu2" }"#, ..NEMOTRON },
    Shape { name: "nemotron-tiny", hidden: 128, layers: 4, heads: 8, kv_heads: 4, head_dim: 32, channels: 128, vocab: 4096,
        context: 4096,
        more: r#"{ "hybrid_override_pattern": "ME*-", "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 4,
            "ssm_state_size": 32, "conv_kernel": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 256, "moe_latent_size": 64 }"#,
        ..NEMOTRON },
    BGE,
    BGE_M3,
    Shape { name: "bge-tiny", hidden: 128, layers: 2, heads: 4, kv_heads: 4, head_dim: 32, channels: 384, vocab: 4096, ..BGE },
    Shape { name: "qwen3-next-tiny", hidden: 128, layers: 4, heads: 8, kv_heads: 4, head_dim: 32, channels: 384,
        vocab: 4096, context: 4096,
        more: r#"{ "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128, "norm_topk_prob": true, "partial_rotary_factor": 0.25,
            "full_attention_interval": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4 }"#, ..QWEN3_NEXT },
    Shape { name: "qwen3-moe-tiny", hidden: 128, layers: 4, heads: 8, kv_heads: 4, head_dim: 32, channels: 384,
        vocab: 4096, context: 4096,
        more: r#"{ "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": true }"#,
        ..QWEN3_MOE },
    Shape { name: "qwen3-tiny", hidden: 128, layers: 4, heads: 8, kv_heads: 4, head_dim: 32, channels: 384,
        vocab: 4096, context: 4096, ..QWEN3 },
];
