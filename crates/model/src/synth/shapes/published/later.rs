//! Shapes of models published in late 2025 and 2026.

use super::{DEEPSEEK_V3, GEMMA3, LLAMA};
use crate::synth::shapes::{Shape, Stretch};

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
