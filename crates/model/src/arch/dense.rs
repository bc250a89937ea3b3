//! Dense decoders: grouped-query attention and a gated MLP in every layer.

use std::path::Path;

use serde::Deserialize;
use thunder_compute::Rope;

use super::TokenIds;
use super::rope::{self, RopeParameters};
use crate::error::ModelError;
use crate::spec::{AttentionShape, FeedForwardSpec, GatedShape, LayerSpec, MixerSpec, ModelSpec};

/// What a dense family's config leaves unsaid.
pub(super) struct DenseFamily {
    /// `model_type`.
    pub name: &'static str,
    /// Queries, keys and values have biases unless the config has `attention_bias`.
    qkv_bias: bool,
    qk_norm: bool,
    windows: Windows,
}

/// Which layers attend to a window only.
#[derive(Clone, Copy, PartialEq)]
enum Windows {
    /// All if the config has a `sliding_window`, except those that `layer_types` exempts.
    WhereGiven,
    /// Layers from `max_window_layers`, if `use_sliding_window` is set.
    AfterMaxWindowLayers,
}

pub(super) const FAMILIES: [DenseFamily; 6] = [
    DenseFamily { name: "llama", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    DenseFamily { name: "mistral", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    DenseFamily { name: "ministral", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    DenseFamily { name: "ministral3", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    DenseFamily { name: "qwen2", qkv_bias: true, qk_norm: false, windows: Windows::AfterMaxWindowLayers },
    DenseFamily { name: "qwen3", qkv_bias: false, qk_norm: true, windows: Windows::AfterMaxWindowLayers },
];

/// The config.json fields of the dense families.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    pub model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
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
    attention_bias: Option<bool>,
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

    fn scaling(&self) -> Option<&RopeParameters> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }
}

/// The spec of a dense model; `path` is for error texts.
pub(super) fn spec(config: Config, family: &DenseFamily, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    check_sizes(&config).map_err(malformed)?;
    check_supported(&config)?;
    let rope = rotation(&config, path)?;
    let temperature = config.scaling().and_then(|scaling| {
        let original = scaling.original_max_position_embeddings.unwrap_or(config.max_position_embeddings);
        scaling.llama_4_scaling_beta.map(|beta| (beta, original))
    });
    let layer = |index| {
        Ok(LayerSpec {
            mixer: MixerSpec::Attention(AttentionShape {
                heads: config.num_attention_heads,
                kv_heads: config.kv_heads(),
                head_dim: config.head_dim(),
                qkv_bias: config.attention_bias.unwrap_or(family.qkv_bias),
                out_bias: config.attention_bias.unwrap_or(false),
                qk_norm: family.qk_norm,
                window: window(&config, family.windows, index)?,
                rope: Some(0),
                temperature,
            }),
            feed_forward: FeedForwardSpec::Gated(GatedShape {
                channels: config.intermediate_size,
                bias: config.mlp_bias,
            }),
        })
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

/// Refuses sizes that would exhaust memory before any weight is read: lists are made of layers,
/// heads and dimensions.
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

/// The rotation that all layers share.
fn rotation(config: &Config, path: &Path) -> Result<Rope, ModelError> {
    let malformed = |reason: String| Err(ModelError::Malformed { path: path.to_owned(), reason });
    let scaling = config.scaling();
    let theta = config.rope_theta.or(scaling.and_then(|s| s.rope_theta)).unwrap_or(10_000.0);
    let partial = scaling.and_then(|s| s.partial_rotary_factor).or(config.partial_rotary_factor);
    let partial = partial.unwrap_or(1.0);
    if !(theta.is_finite() && theta > 1.0) {
        return malformed(format!("rope_theta is {theta}: it must be above 1"));
    }
    if !(partial > 0.0 && partial <= 1.0) {
        return malformed(format!("partial_rotary_factor is {partial}: it must be above 0 and at most 1"));
    }
    let dims = (config.head_dim() as f64 * partial) as usize;
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
