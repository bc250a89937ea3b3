//! ModernBERT: an encoder with layers like a decoder's, with rotations, and with windows in most
//! layers.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use thunder_compute::{Activation, Curve, Rope, Scoring};

use super::config::in_bounds;
use super::encoder::{to_all_tokens, unsupported, without_layers};
use crate::error::ModelError;
use crate::spec::{
    AttentionShape, EmbeddingNorm, EncoderSpec, FeedForwardSpec, LayerSpec, MixerSpec, MlpShape, ModelSpec,
    Norms,
};

/// `model_type`.
pub(super) const NAME: &str = "modernbert";

/// Index of the rotation of layers without a window.
const GLOBAL: usize = 0;
/// Index of the rotation of layers with a window.
const LOCAL: usize = 1;

/// Fields of config.json, with the defaults of transformers' class.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Config {
    architectures: Option<Vec<String>>,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    norm_eps: f32,
    norm_bias: bool,
    attention_bias: bool,
    mlp_bias: bool,
    hidden_activation: String,
    global_rope_theta: f64,
    local_rope_theta: f64,
    /// Transformers 5 has the bases here, by the kind of layer.
    rope_parameters: Option<Map<String, Value>>,
    local_attention: usize,
    global_attn_every_n_layers: usize,
    layer_types: Option<Vec<String>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            architectures: None,
            hidden_size: 768,
            num_hidden_layers: 22,
            num_attention_heads: 12,
            intermediate_size: 1152,
            vocab_size: 50_368,
            max_position_embeddings: 8192,
            norm_eps: 1e-5,
            norm_bias: false,
            attention_bias: false,
            mlp_bias: false,
            hidden_activation: "gelu".into(),
            global_rope_theta: 160_000.0,
            local_rope_theta: 10_000.0,
            rope_parameters: None,
            local_attention: 128,
            global_attn_every_n_layers: 3,
            layer_types: None,
        }
    }
}

impl Config {
    fn check(&self) -> Result<(), ModelError> {
        let biases = [
            ("norm_bias", self.norm_bias),
            ("attention_bias", self.attention_bias),
            ("mlp_bias", self.mlp_bias),
        ];
        if let Some((field, _)) = biases.into_iter().find(|(_, is_set)| *is_set) {
            return Err(unsupported(field, "true", "false is"));
        }
        match self.architectures.as_ref().and_then(|all| all.first()) {
            Some(class) if !["Model", "ForMaskedLM"].iter().any(|end| class.ends_with(end)) => {
                Err(unsupported("architectures", class, "ModernBertModel and ModernBertForMaskedLM are"))
            }
            _ => Ok(()),
        }
    }

    fn activation(&self) -> Result<Activation, ModelError> {
        match self.hidden_activation.as_str() {
            "gelu" => Ok(Activation::ExactGelu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::Gelu),
            "silu" => Ok(Activation::Silu),
            other => Err(unsupported("hidden_activation", other, "gelu, gelu_new and silu are")),
        }
    }

    /// True if a layer attends to a window only.
    fn is_local(&self, layer: usize) -> Result<bool, String> {
        match &self.layer_types {
            None => Ok(!layer.is_multiple_of(self.global_attn_every_n_layers.max(1))),
            Some(types) => match types.get(layer).map(String::as_str) {
                Some("sliding_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                other => Err(format!(
                    "layer_types[{layer}] is {other:?}: full_attention and sliding_attention are known"
                )),
            },
        }
    }

    fn rope(&self, kind: &str, usual: f64, head_dim: usize) -> Result<Rope, String> {
        let given = self.rope_parameters.as_ref().and_then(|all| all.get(kind)?.get("rope_theta")?.as_f64());
        let theta = given.unwrap_or(usual);
        if !(theta.is_finite() && theta > 1.0) {
            return Err(format!("rope_theta of {kind} is {theta}: it must be above 1"));
        }
        let frequency = |pair: usize| theta.powf(-2.0 * pair as f64 / head_dim as f64) as f32;
        let inverse_frequencies = (0..head_dim / 2).map(frequency).collect();
        Ok(Rope { inverse_frequencies, amplitude: 1.0, interleaved: false })
    }
}

/// The spec of a ModernBERT.
pub(super) fn spec(config: &Value, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    let config = Config::deserialize(config).map_err(|error| malformed(error.to_string()))?;
    config.check()?;
    let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
    in_bounds(&[
        ("hidden_size", hidden, 1 << 31),
        ("num_attention_heads", heads, 1 << 14),
        ("num_hidden_layers", config.num_hidden_layers, 1 << 12),
        ("intermediate_size", config.intermediate_size, 1 << 31),
        ("vocab_size", config.vocab_size, 1 << 31),
        ("max_position_embeddings", config.max_position_embeddings, 1 << 31),
    ])
    .map_err(malformed)?;
    if !hidden.is_multiple_of(2 * heads) {
        return Err(malformed(format!("hidden_size {hidden} does not divide into {heads} heads of pairs")));
    }
    let head_dim = hidden / heads;
    in_bounds(&[("hidden_size / num_attention_heads", head_dim, 1 << 14)]).map_err(malformed)?;
    let attention = |is_local: bool| {
        let side = config.local_attention / 2;
        AttentionShape {
            window: is_local.then_some(side + 1),
            rope: Some(if is_local { LOCAL } else { GLOBAL }),
            scoring: Scoring { after: if is_local { side } else { usize::MAX }, ..Scoring::default() },
            ..to_all_tokens(heads, head_dim)
        }
    };
    let mlp = MlpShape {
        channels: config.intermediate_size,
        bias: false,
        activation: Some(config.activation()?),
        curve: Curve::default(),
    };
    let layer = |index: usize| {
        Ok(LayerSpec {
            mixer: MixerSpec::Attention(attention(config.is_local(index)?)),
            feed_forward: FeedForwardSpec::Mlp(mlp.clone()),
            // The embedding is normed already.
            norms: if index == 0 { Norms::BeforeFeedForward } else { Norms::Before },
            scaled: false,
        })
    };
    let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>().map_err(malformed)?;
    let ropes =
        [("full_attention", config.global_rope_theta), ("sliding_attention", config.local_rope_theta)]
            .map(|(kind, usual)| config.rope(kind, usual, head_dim));
    let encoder = EncoderSpec { embedding_norm: EmbeddingNorm::Plain, ..EncoderSpec::of_decoder() };
    Ok(ModelSpec {
        hidden,
        vocab: config.vocab_size,
        context: config.max_position_embeddings,
        norm_eps: config.norm_eps,
        centered: true,
        ropes: ropes.into_iter().collect::<Result<_, _>>().map_err(malformed)?,
        layers,
        ..without_layers(NAME, encoder)
    })
}
