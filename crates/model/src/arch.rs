//! From config.json to a [`ModelSpec`].

mod rope;

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelError;
use crate::spec::{AttentionShape, FeedForwardSpec, GatedShape, LayerSpec, MixerSpec, ModelSpec};
use rope::RopeParameters;

/// What sets a dense family apart, where its config says nothing.
struct Dense {
    /// `model_type`.
    name: &'static str,
    /// Queries, keys and values have biases even if the config does not mention them.
    qkv_bias: bool,
    qk_norm: bool,
    windows: Windows,
}

/// Which layers look at a window only.
#[derive(Clone, Copy, PartialEq)]
enum Windows {
    /// All, if the config has a `sliding_window`; `layer_types` may exempt some.
    WhereGiven,
    /// Those from `max_window_layers` on, and only if `use_sliding_window` is set.
    AfterMaxWindowLayers,
}

const DENSE: [Dense; 6] = [
    Dense { name: "llama", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    Dense { name: "mistral", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    Dense { name: "ministral", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    Dense { name: "ministral3", qkv_bias: false, qk_norm: false, windows: Windows::WhereGiven },
    Dense { name: "qwen2", qkv_bias: true, qk_norm: false, windows: Windows::AfterMaxWindowLayers },
    Dense { name: "qwen3", qkv_bias: false, qk_norm: true, windows: Windows::AfterMaxWindowLayers },
];

/// The values of `model_type` that can be loaded. `mistral3` wraps one of the others under `text_config`.
pub const KNOWN: [&str; 7] = ["llama", "mistral", "ministral", "ministral3", "mistral3", "qwen2", "qwen3"];

/// The fields of config.json that the dense families share.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
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

/// One token id or a list of them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// Reads the architecture from a parsed config.json; `path` is for error texts.
///
/// # Errors
/// When the architecture is unknown, a field is missing, contradictory or not supported.
pub fn spec(config: &Value, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    let name = config.get("model_type").and_then(Value::as_str);
    let name = name.ok_or_else(|| malformed("it has no \"model_type\"".into()))?;
    if !KNOWN.contains(&name) {
        return Err(ModelError::UnknownArchitecture { name: name.to_owned() });
    }
    let text = config.get("text_config").unwrap_or(config);
    let mut text = text.clone();
    // A wrapped config may leave these to its outer one.
    for field in ["eos_token_id", "tie_word_embeddings", "model_type"] {
        if let (Some(inner), Some(value)) = (text.as_object_mut(), config.get(field)) {
            inner.entry(field).or_insert_with(|| value.clone());
        }
    }
    let config = Config::deserialize(&text).map_err(|error| malformed(error.to_string()))?;
    let family = DENSE.iter().find(|family| family.name == config.model_type);
    let family = family.ok_or_else(|| match text.get("model_type") == Some(&Value::from(name)) {
        true => {
            malformed(format!("a {name:?} needs a \"text_config\" with the model_type of its language model"))
        }
        false => ModelError::UnknownArchitecture { name: config.model_type.clone() },
    })?;
    dense(config, family, path)
}

fn dense(config: Config, family: &Dense, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    let (heads, kv_heads) =
        (config.num_attention_heads, config.num_key_value_heads.unwrap_or(config.num_attention_heads));
    let head_dim = config.head_dim.unwrap_or(config.hidden_size / heads.max(1));
    // Lists are made of layers, heads and the dimensions of a head, before any weight is looked at.
    for (field, value, most) in [
        ("hidden_size", config.hidden_size, 1 << 31),
        ("intermediate_size", config.intermediate_size, 1 << 31),
        ("num_hidden_layers", config.num_hidden_layers, 1 << 12),
        ("num_attention_heads", heads, 1 << 14),
        ("num_key_value_heads", kv_heads, 1 << 14),
        ("head_dim", head_dim, 1 << 14),
        ("vocab_size", config.vocab_size, 1 << 31),
        ("max_position_embeddings", config.max_position_embeddings, 1 << 31),
    ] {
        if value == 0 || value > most {
            return Err(malformed(format!("{field} is {value}: 1 to {most} can be")));
        }
    }
    if heads % kv_heads != 0 {
        return Err(malformed(format!(
            "num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}"
        )));
    }
    let unsupported = |field, value: String, supported: &str| {
        Err(ModelError::Unsupported { field, value, supported: supported.to_owned() })
    };
    if !["silu", "swish"].contains(&config.hidden_act.as_str()) {
        return unsupported("hidden_act", config.hidden_act, "silu is");
    }
    if config.rope_traditional {
        return unsupported("rope_traditional", "true".into(), "only halves paired with halves are");
    }
    let scaling = config.rope_parameters.as_ref().or(config.rope_scaling.as_ref());
    let theta = config.rope_theta.or(scaling.and_then(|s| s.rope_theta)).unwrap_or(10_000.0);
    let partial =
        scaling.and_then(|s| s.partial_rotary_factor).or(config.partial_rotary_factor).unwrap_or(1.0);
    if !(theta.is_finite() && theta > 1.0) {
        return Err(malformed(format!("rope_theta is {theta}: it must be above 1")));
    }
    if !(partial > 0.0 && partial <= 1.0) {
        return Err(malformed(format!(
            "partial_rotary_factor is {partial}: it must be above 0, and 1 at the most"
        )));
    }
    let rope =
        rope::rope(theta, (head_dim as f64 * partial) as usize, scaling, config.max_position_embeddings)?;
    let temperature = scaling.and_then(|s| {
        let original = s.original_max_position_embeddings.unwrap_or(config.max_position_embeddings);
        s.llama_4_scaling_beta.map(|beta| (beta, original))
    });
    let windows = (0..config.num_hidden_layers)
        .map(|layer| window(&config, family.windows, layer))
        .collect::<Result<Vec<_>, _>>()
        .map_err(malformed)?;
    let bias = config.attention_bias.unwrap_or(false);
    let layers = windows
        .into_iter()
        .map(|window| LayerSpec {
            mixer: MixerSpec::Attention(AttentionShape {
                heads,
                kv_heads,
                head_dim,
                qkv_bias: config.attention_bias.unwrap_or(family.qkv_bias),
                out_bias: bias,
                qk_norm: family.qk_norm,
                window,
                rope: Some(0),
                temperature,
            }),
            feed_forward: FeedForwardSpec::Gated(GatedShape {
                channels: config.intermediate_size,
                bias: config.mlp_bias,
            }),
        })
        .collect();
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

/// The window of a layer.
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
