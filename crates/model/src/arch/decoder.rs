//! Decoders: attention (of heads or latent) and a feed-forward (a gated MLP or experts) in every
//! layer.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::{Activation, Rope};

use super::TokenIds;
use super::experts::{self, ExpertFamily, GPT_OSS, RENORMALISED_SOFTMAX, SIGMOID_CORRECTED, SOFTMAX};
use super::latent;
use super::rope::{self, RopeParameters};
use crate::error::ModelError;
use crate::spec::{AttentionShape, FeedForwardSpec, GatedShape, LayerSpec, MixerSpec, ModelSpec};

/// What a family's config leaves unsaid.
#[derive(Clone, Copy)]
pub(super) struct Family {
    /// `model_type`.
    pub name: &'static str,
    /// Queries, keys and values have biases unless the config has `attention_bias`.
    qkv_bias: bool,
    /// `attention_bias` means the output projection, too.
    out_bias: bool,
    /// Query and key heads are normed unless the config has `use_qk_norm`.
    qk_norm: bool,
    /// Neighbouring columns are rotated together.
    interleaved: bool,
    /// Query heads have sinks.
    sinks: bool,
    windows: Windows,
    /// Attention is latent.
    latent: bool,
    /// Layers have experts, unless the config says otherwise.
    experts: Option<ExpertFamily>,
}

/// Which layers attend to a window only.
#[derive(Clone, Copy, PartialEq)]
enum Windows {
    /// All if the config has a `sliding_window`, except those that `layer_types` exempts.
    WhereGiven,
    /// Layers from `max_window_layers`, if `use_sliding_window` is set.
    AfterMaxWindowLayers,
}

const LLAMA: Family = Family {
    name: "llama",
    qkv_bias: false,
    out_bias: true,
    qk_norm: false,
    interleaved: false,
    sinks: false,
    windows: Windows::WhereGiven,
    latent: false,
    experts: None,
};
const QWEN2: Family =
    Family { name: "qwen2", qkv_bias: true, windows: Windows::AfterMaxWindowLayers, ..LLAMA };
const QWEN3: Family =
    Family { name: "qwen3", qk_norm: true, windows: Windows::AfterMaxWindowLayers, ..LLAMA };
const DEEPSEEK3: Family =
    Family { name: "deepseek_v3", latent: true, experts: Some(SIGMOID_CORRECTED), ..LLAMA };

pub(super) const FAMILIES: [Family; 18] = [
    LLAMA,
    Family { name: "mistral", ..LLAMA },
    Family { name: "ministral", ..LLAMA },
    Family { name: "ministral3", ..LLAMA },
    QWEN2,
    QWEN3,
    Family { name: "seed_oss", out_bias: false, ..LLAMA },
    Family { name: "smollm3", windows: Windows::AfterMaxWindowLayers, ..LLAMA },
    Family { name: "ernie4_5", interleaved: true, ..LLAMA },
    Family { name: "mixtral", experts: Some(RENORMALISED_SOFTMAX), ..LLAMA },
    Family { name: "qwen2_moe", experts: Some(SOFTMAX), ..QWEN2 },
    Family { name: "qwen3_moe", experts: Some(SOFTMAX), ..QWEN3 },
    Family { name: "glm4_moe", out_bias: false, experts: Some(SIGMOID_CORRECTED), ..LLAMA },
    Family { name: "gpt_oss", qkv_bias: true, sinks: true, experts: Some(GPT_OSS), ..LLAMA },
    Family { name: "glm4_moe_lite", ..DEEPSEEK3 },
    Family { name: "deepseek_v2", experts: Some(SOFTMAX), ..DEEPSEEK3 },
    DEEPSEEK3,
    Family { name: "kimi_k2", ..DEEPSEEK3 },
];

/// The config.json fields that all families share.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    pub num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeParameters>,
    rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    rope_traditional: bool,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    pub attention_bias: Option<bool>,
    use_qk_norm: Option<bool>,
    /// ERNIE's name of `attention_bias` and `mlp_bias`.
    use_bias: Option<bool>,
    attention_out_bias: Option<bool>,
    /// SmolLM3: 1 for layers that rotate, 0 for those that do not.
    no_rope_layers: Option<Vec<u8>>,
    #[serde(default)]
    mlp_bias: bool,
    sliding_window: Option<usize>,
    #[serde(default)]
    use_sliding_window: bool,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    #[serde(default = "default_activation")]
    hidden_act: String,
    eos_token_id: Option<TokenIds>,
}

fn default_eps() -> f32 {
    1e-6
}
fn default_context() -> usize {
    2048
}
fn default_activation() -> String {
    "silu".to_owned()
}

impl Config {
    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// True if a layer rotates queries and keys.
    fn rotates(&self, layer: usize) -> Result<bool, String> {
        match &self.no_rope_layers {
            None => Ok(true),
            Some(layers) => layers.get(layer).map(|rotates| *rotates != 0).ok_or_else(|| {
                format!("no_rope_layers has {} entries for {} layers", layers.len(), self.num_hidden_layers)
            }),
        }
    }

    pub(super) fn scaling(&self) -> Option<&RopeParameters> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }
}

/// The spec of a model. `text` is the config, `path` is for error texts.
pub(super) fn spec(text: &Value, family: &Family, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    let config = Config::deserialize(text).map_err(|error| malformed(error.to_string()))?;
    check_sizes(&config).map_err(malformed)?;
    check_supported(&config)?;
    let latent = match family.latent {
        true => Some(latent::Config::read(text).and_then(|latent| latent.shape(&config)).map_err(malformed)?),
        false => None,
    };
    let rope = match &latent {
        Some(latent) => Rope { interleaved: latent.interleaved, ..rotation(&config, latent.rotated, path)? },
        None => {
            let dims = rotated_dims(&config).map_err(malformed)?;
            Rope { interleaved: family.interleaved, ..rotation(&config, dims, path)? }
        }
    };
    let experts = match family.experts {
        Some(family) => Some(experts::Config::read(text, family).map_err(malformed)?),
        None => None,
    };
    let temperature = config.scaling().and_then(|scaling| {
        let original = scaling.original_max_position_embeddings.unwrap_or(config.max_position_embeddings);
        scaling.llama_4_scaling_beta.map(|beta| (beta, original))
    });
    let bias = config.attention_bias.or(config.use_bias);
    let attention = |index| {
        Ok::<_, String>(AttentionShape {
            heads: config.num_attention_heads,
            kv_heads: config.kv_heads(),
            head_dim: config.head_dim(),
            qkv_bias: bias.unwrap_or(family.qkv_bias),
            out_bias: config.attention_out_bias.unwrap_or(family.out_bias && bias.unwrap_or(false)),
            qk_norm: config.use_qk_norm.unwrap_or(family.qk_norm),
            window: window(&config, family.windows, index)?,
            sinks: family.sinks,
            rope: config.rotates(index)?.then_some(0),
            temperature,
        })
    };
    let layer = |index| {
        let mixer = match &latent {
            Some(latent) => MixerSpec::Latent(latent.shape.clone()),
            None => MixerSpec::Attention(attention(index)?),
        };
        let experts = match &experts {
            Some(experts) => experts.shape(index, config.intermediate_size)?,
            None => None,
        };
        let feed_forward = match experts {
            Some(shape) => FeedForwardSpec::Experts(shape),
            None => FeedForwardSpec::Gated(GatedShape {
                channels: config.intermediate_size,
                bias: config.mlp_bias || config.use_bias.unwrap_or(false),
                activation: Activation::Silu,
            }),
        };
        Ok(LayerSpec { mixer, feed_forward })
    };
    let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>().map_err(malformed)?;
    Ok(ModelSpec {
        family: config.model_type,
        hidden: config.hidden_size,
        vocab: config.vocab_size,
        context: config.max_position_embeddings,
        norm_eps: config.rms_norm_eps,
        tied: config.tie_word_embeddings,
        ropes: vec![rope],
        layers,
        eos: config.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
    })
}

/// Refuses sizes that would exhaust memory before any weight is read (lists are made of layers,
/// heads and dimensions), and an epsilon that would make NaN of a norm.
fn check_sizes(config: &Config) -> Result<(), String> {
    let (heads, kv_heads) = (config.num_attention_heads, config.kv_heads());
    for (field, value, most) in [
        ("hidden_size", config.hidden_size, 1 << 31),
        ("intermediate_size", config.intermediate_size, 1 << 31),
        ("num_hidden_layers", config.num_hidden_layers, 1 << 12),
        ("num_attention_heads", heads, 1 << 14),
        ("num_key_value_heads", kv_heads, 1 << 14),
        ("head_dim", config.head_dim(), 1 << 14),
        ("vocab_size", config.vocab_size, 1 << 31),
        ("max_position_embeddings", config.max_position_embeddings, 1 << 31),
    ] {
        if value == 0 || value > most {
            return Err(format!("{field} is {value}: it must be between 1 and {most}"));
        }
    }
    let eps = config.rms_norm_eps;
    if !(eps > 0.0 && eps < 1.0) {
        return Err(format!("rms_norm_eps is {eps}: it must be above 0 and below 1"));
    }
    match heads % kv_heads {
        0 => Ok(()),
        _ => Err(format!("num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}")),
    }
}

fn check_supported(config: &Config) -> Result<(), ModelError> {
    let unsupported = |field, value: &str, supported: &str| {
        Err(ModelError::Unsupported { field, value: value.to_owned(), supported: supported.to_owned() })
    };
    if !["silu", "swish"].contains(&config.hidden_act.as_str()) {
        return unsupported("hidden_act", &config.hidden_act, "silu is");
    }
    if config.rope_traditional {
        return unsupported("rope_traditional", "true", "pairs of dimensions i and i + head_dim / 2 are");
    }
    Ok(())
}

/// Columns of a head that are rotated.
fn rotated_dims(config: &Config) -> Result<usize, String> {
    let partial = config.scaling().and_then(|s| s.partial_rotary_factor).or(config.partial_rotary_factor);
    let partial = partial.unwrap_or(1.0);
    if !(partial > 0.0 && partial <= 1.0) {
        return Err(format!("partial_rotary_factor is {partial}: it must be above 0 and at most 1"));
    }
    Ok((config.head_dim() as f64 * partial) as usize)
}

/// The rotation that all layers share, of the first `dims` columns.
fn rotation(config: &Config, dims: usize, path: &Path) -> Result<Rope, ModelError> {
    let scaling = config.scaling();
    let theta = config.rope_theta.or(scaling.and_then(|s| s.rope_theta)).unwrap_or(10_000.0);
    if !(theta.is_finite() && theta > 1.0) {
        let reason = format!("rope_theta is {theta}: it must be above 1");
        return Err(ModelError::Malformed { path: path.to_owned(), reason });
    }
    rope::rope(theta, dims, scaling, config.max_position_embeddings)
}

/// The window of a layer; `None` if the layer attends to all tokens.
fn window(config: &Config, rule: Windows, layer: usize) -> Result<Option<usize>, String> {
    let Some(window) = config.sliding_window.filter(|&window| window > 0) else { return Ok(None) };
    if rule == Windows::AfterMaxWindowLayers && !config.use_sliding_window {
        return Ok(None);
    }
    if let Some(types) = &config.layer_types {
        return match types.get(layer).map(String::as_str) {
            Some("sliding_attention") => Ok(Some(window)),
            Some("full_attention") => Ok(None),
            Some(other) => Err(format!(
                "layer_types[{layer}] is {other:?}: full_attention and sliding_attention are known"
            )),
            None => Err(format!(
                "layer_types has {} entries for {} layers",
                types.len(),
                config.num_hidden_layers
            )),
        };
    }
    let first = match rule {
        Windows::WhereGiven => 0,
        Windows::AfterMaxWindowLayers => config.max_window_layers.unwrap_or(0),
    };
    Ok((layer >= first).then_some(window))
}
