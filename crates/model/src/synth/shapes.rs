//! Shapes of published models, from their config.json files.

use serde_json::{Map, Value, json};

/// The config.json fields of a model that decide its size and speed.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Its name on the command line.
    pub name: &'static str,
    /// `model_type`.
    pub model_type: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Channels of the MLP.
    pub channels: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest context, in tokens.
    pub context: usize,
    /// True if the output head is the embedding.
    pub tied: bool,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Base of rotary position embedding.
    pub rope_theta: f64,
    /// How rotary position embedding is stretched.
    pub stretch: Stretch,
    /// More fields, those of experts and of latent attention, as a JSON object.
    pub more: &'static str,
}

/// How rotary position embedding is stretched to a longer context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stretch {
    /// Not at all.
    None,
    /// As in Llama 3.1 and later, from 8192 positions.
    Llama3 {
        /// Factor of the context.
        factor: f64,
    },
    /// As in the Ministral 3 family, from 4096 positions.
    Yarn {
        /// Factor of the context.
        factor: f64,
    },
}

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
    more: "{}",
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

#[rustfmt::skip]
const SHAPES: [Shape; 24] = [
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
    KIMI_K2,
    Shape { name: "qwen3-moe-tiny", hidden: 128, layers: 4, heads: 8, kv_heads: 4, head_dim: 32, channels: 384,
        vocab: 4096, context: 4096,
        more: r#"{ "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": true }"#,
        ..QWEN3_MOE },
    Shape { name: "qwen3-tiny", hidden: 128, layers: 4, heads: 8, kv_heads: 4, head_dim: 32, channels: 384,
        vocab: 4096, context: 4096, ..QWEN3 },
];

impl Shape {
    /// The shape of that name.
    pub fn named(name: &str) -> Option<Self> {
        SHAPES.into_iter().find(|shape| shape.name == name)
    }

    /// The names, by family and size.
    pub fn names() -> impl Iterator<Item = &'static str> {
        SHAPES.into_iter().map(|shape| shape.name)
    }

    /// Its config.json; `quantization` is bits and group.
    pub(super) fn config(&self, quantization: Option<(u32, usize)>, eos: u32) -> Value {
        let class = match self.model_type {
            "llama" => "LlamaForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            "qwen3" => "Qwen3ForCausalLM",
            "mixtral" => "MixtralForCausalLM",
            "qwen3_moe" => "Qwen3MoeForCausalLM",
            "glm4_moe" => "Glm4MoeForCausalLM",
            "deepseek_v2" => "DeepseekV2ForCausalLM",
            "deepseek_v3" | "kimi_k2" => "DeepseekV3ForCausalLM",
            "ministral3" => "Ministral3ForCausalLM",
            _ => "MistralForCausalLM",
        };
        let mut config = json!({
            "architectures": [class],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.channels,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "eos_token_id": eos,
        });
        self.stretch.write(self.rope_theta, &mut config);
        if let (Ok(Value::Object(more)), Some(config)) =
            (serde_json::from_str(self.more), config.as_object_mut())
        {
            config.extend(more);
        }
        if let Some((bits, group)) = quantization {
            let settings = json!({ "group_size": group, "bits": bits, "mode": "affine" });
            // Some readers look for one name, some for the other.
            config["quantization"] = settings.clone();
            config["quantization_config"] = settings;
        }
        config
    }
}

impl Stretch {
    fn write(self, theta: f64, config: &mut Value) {
        let mut set = |field: &str, value: Value| {
            config
                .as_object_mut()
                .map(|fields: &mut Map<String, Value>| fields.insert(field.to_owned(), value))
        };
        match self {
            Self::None => None,
            Self::Llama3 { factor } => set(
                "rope_scaling",
                json!({
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }),
            ),
            Self::Yarn { factor } => set(
                "rope_parameters",
                json!({
                    "rope_type": "yarn",
                    "rope_theta": theta,
                    "factor": factor,
                    "beta_fast": 4.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.0,
                    "llama_4_scaling_beta": 0.0,
                    "original_max_position_embeddings": 4096,
                }),
            ),
        };
    }
}
