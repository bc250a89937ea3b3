//! Shapes of published models, from their config.json files.

mod published;

use serde_json::{Map, Value, json};

use published::shapes;

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
    /// True to include the layer that predicts further tokens, as in published checkpoints but not
    /// in most quantized ones. [`Shape::has_ahead`] says which models have one.
    pub ahead: bool,
    /// More fields, for experts and latent attention, as a JSON object.
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

/// Published checkpoints with the shape of an earlier one.
const RELEASES: [(&str, &str); 3] =
    [("deepseek-r1", "deepseek-v3"), ("deepseek-v3.1", "deepseek-v3"), ("kimi-k2.5", "kimi-k2")];

impl Shape {
    /// The shape of that name, or of a later release of it, in capitals or not.
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let release = RELEASES.iter().find(|(release, _)| *release == name);
        let name = release.map_or(name.as_str(), |(_, shape)| shape);
        shapes().find(|shape| shape.name == name)
    }

    /// The names.
    pub fn names() -> impl Iterator<Item = &'static str> {
        shapes().map(|shape| shape.name)
    }

    /// True if the model makes vectors of texts and writes none.
    pub fn is_encoder(&self) -> bool {
        ["bert", "xlm-roberta"].contains(&self.model_type)
    }

    /// True if published checkpoints have a layer that predicts further tokens.
    pub fn has_ahead(&self) -> bool {
        ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "qwen3_next", "qwen3_5_text"]
            .contains(&self.model_type)
    }

    /// Changes one of the fields of `more`. The new text is kept until the program ends.
    ///
    /// # Errors
    /// When the model has no such field.
    pub fn set(&mut self, field: &str, value: Value) -> Result<(), String> {
        let mut more: Map<String, Value> = serde_json::from_str(self.more).unwrap_or_default();
        let Some(found) = more.get_mut(field) else {
            let known: Vec<&str> = more.keys().map(String::as_str).collect();
            return Err(format!("{} has no such field; it has {}", self.name, known.join(", ")));
        };
        *found = value;
        self.more = Value::Object(more).to_string().leak();
        Ok(())
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
            "qwen2_moe" => "Qwen2MoeForCausalLM",
            "gpt_oss" => "GptOssForCausalLM",
            "glm4_moe_lite" => "Glm4MoeLiteForCausalLM",
            "qwen3_5_moe_text" => "Qwen3_5MoeForCausalLM",
            "seed_oss" => "SeedOssForCausalLM",
            "smollm3" => "SmolLM3ForCausalLM",
            "qwen3_next" => "Qwen3NextForCausalLM",
            "qwen3_5_text" => "Qwen3_5ForCausalLM",
            "minimax_m2" => "MiniMaxM2ForCausalLM",
            "ernie4_5_moe" => "Ernie4_5_MoeForCausalLM",
            "gemma2" => "Gemma2ForCausalLM",
            "cohere" => "CohereForCausalLM",
            "cohere2" => "Cohere2ForCausalLM",
            "hunyuan_v1_dense" => "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_moe" => "HunYuanMoEV1ForCausalLM",
            "llama4_text" => "Llama4ForCausalLM",
            "deepseek_v32" => "DeepseekV32ForCausalLM",
            "deepseek_v4" => "DeepseekV4ForCausalLM",
            "deepseek_v41" => "DeepseekV41ForCausalLM",
            "glm5_next_text" => "Glm5NextForConditionalGeneration",
            "glm_moe_dsa" => "GlmMoeDsaForCausalLM",
            "kimi_linear" => "KimiLinearForCausalLM",
            "gemma4_text" => "Gemma4ForCausalLM",
            "mistral4" => "Mistral4ForCausalLM",
            "nemotron_h" => "NemotronHForCausalLM",
            "mimo_v2_flash" => "MiMoV2FlashForCausalLM",
            "gemma3_text" => "Gemma3ForCausalLM",
            "phi3" => "Phi3ForCausalLM",
            "olmo2" => "Olmo2ForCausalLM",
            "olmo3" => "Olmo3ForCausalLM",
            "granite" => "GraniteForCausalLM",
            "lfm2" => "Lfm2ForCausalLM",
            "lfm2_moe" => "Lfm2MoeForCausalLM",
            "lfm3" => "Lfm3ForCausalLM",
            "granitemoehybrid" => "GraniteMoeHybridForCausalLM",
            "glm4" => "Glm4ForCausalLM",
            "exaone4" => "Exaone4ForCausalLM",
            "deepseek_v2" => "DeepseekV2ForCausalLM",
            "deepseek_v3" | "kimi_k2" => "DeepseekV3ForCausalLM",
            "ministral3" => "Ministral3ForCausalLM",
            "bert" => "BertModel",
            "xlm-roberta" => "XLMRobertaModel",
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
            cut_lists(config, self.layers);
            // A pattern has a letter for each layer; the shape may have fewer.
            if let Some(Value::String(letters)) = config.get_mut("hybrid_override_pattern") {
                letters.truncate(self.layers);
            }
        }
        if self.ahead {
            let field = match self.model_type {
                "qwen3_next" | "qwen3_5_text" => "mtp_num_hidden_layers",
                _ => "num_nextn_predict_layers",
            };
            config[field] = 1.into();
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

/// Restricts the layers with tables indexed by the last tokens, and the sources, to the first
/// layers: the shape may have fewer than the published model.
fn cut_lists(config: &mut Map<String, Value>, layers: usize) {
    let is_there = |id: &Value| id.as_u64().is_some_and(|id| id < layers as u64);
    for field in ["kv_source_layer_ids", "index_source_layer_ids"] {
        if let Some(Value::Array(ids)) = config.get_mut(field) {
            ids.retain(is_there);
        }
    }
    if config.get("candidate_source_layer_id").is_some_and(|id| !is_there(id)) {
        config.remove("candidate_source_layer_id");
    }
    let number = |field: &str| config.get(field).and_then(Value::as_u64);
    if let (Some(shared), Some(kinds)) = (number("num_kv_shared_layers"), number("sliding_window_pattern")) {
        // A layer of each kind must keep its keys.
        let shared = shared.min((layers as u64).saturating_sub(kinds));
        config.insert("num_kv_shared_layers".into(), shared.into());
    }
    let Some(Value::Array(ids)) = config.get_mut("engram_layer_ids") else { return };
    ids.retain(is_there);
    let kept = ids.len();
    if let Some(Value::Array(rows)) = config.get_mut("engram_num_embeddings") {
        rows.truncate(kept);
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
