//! The config.json fields that all families share.

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::{Activation, Scoring};

use super::TokenIds;
use super::family::{Family, Windows};
use super::rope::RopeParameters;
use crate::error::ModelError;
use crate::spec::Temperature;

/// The config.json fields that all families share.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    pub model_type: String,
    pub hidden_size: usize,
    /// Absent where all layers have experts of another width.
    intermediate_size: Option<usize>,
    pub num_hidden_layers: usize,
    /// Layers that predict further tokens; the first one is used.
    pub num_nextn_predict_layers: Option<usize>,
    pub num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    pub vocab_size: usize,
    #[serde(default = "default_eps")]
    pub rms_norm_eps: f32,
    /// Cohere's and Nemotron-H's names of `rms_norm_eps`.
    #[serde(alias = "layer_norm_epsilon")]
    layer_norm_eps: Option<f32>,
    #[serde(default = "default_context")]
    pub max_position_embeddings: usize,
    pub rope_theta: Option<f64>,
    rope_scaling: Option<RopeParameters>,
    rope_parameters: Option<RopeParameters>,
    /// Granite with windows: each layer's base; 0 for layers that do not rotate.
    layer_rope_theta: Option<Vec<f64>>,
    /// Base of layers with a window.
    pub rope_local_base_freq: Option<f64>,
    /// Of Phi's `longrope`, which keeps it outside of `rope_scaling`.
    pub original_max_position_embeddings: Option<usize>,
    #[serde(default)]
    rope_traditional: bool,
    partial_rotary_factor: Option<f64>,
    /// Columns of a head that are rotated.
    rotary_dim: Option<usize>,
    pub tie_word_embeddings: Option<bool>,
    pub attention_bias: Option<bool>,
    /// Sarvam's name of `attention_bias`.
    pub use_qkv_bias: Option<bool>,
    /// Hunyuan Large: some layers use keys and values of others.
    #[serde(default)]
    use_cla: bool,
    /// OLMoE: limits queries, keys and values.
    clip_qkv: Option<f32>,
    pub use_qk_norm: Option<bool>,
    /// ERNIE's name of `attention_bias` and `mlp_bias`.
    pub use_bias: Option<bool>,
    pub attention_out_bias: Option<bool>,
    pub attn_output_gate: Option<bool>,
    /// LFM3: each head has a gate.
    pub use_attention_gate: Option<bool>,
    /// 1 for layers that rotate, 0 for those that do not (SmolLM3, Llama 4).
    no_rope_layers: Option<Vec<u8>>,
    /// The last layer of each run of this length does not rotate.
    no_rope_layer_interval: Option<usize>,
    /// Llama 4: layers that rotate attend in chunks of this many tokens.
    attention_chunk_size: Option<usize>,
    /// Llama 4: layers that do not rotate have temperature tuning. In old files, a number.
    attn_temperature_tuning: Option<Value>,
    floor_scale: Option<usize>,
    attn_scale: Option<f32>,
    /// Llama 4: channels of layers without experts.
    intermediate_size_mlp: Option<usize>,
    #[serde(default)]
    mlp_bias: bool,
    pub sliding_window: Option<usize>,
    use_bidirectional_attention: Option<Value>,
    #[serde(default)]
    use_sliding_window: bool,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    sliding_window_pattern: Option<WindowPattern>,
    #[serde(default = "default_activation")]
    hidden_act: String,
    /// Gemma's name of `hidden_act`, which does not count where both are.
    hidden_activation: Option<String>,
    /// Gemma: the scores are divided by its square root.
    query_pre_attn_scalar: Option<f32>,
    attention_multiplier: Option<f32>,
    embedding_multiplier: Option<f32>,
    residual_multiplier: Option<f32>,
    logits_scaling: Option<f32>,
    /// Cohere's, which multiplies.
    logit_scale: Option<f32>,
    /// HyperCLOVA X: there are norms after attention and MLPs, too.
    pub use_post_norm: Option<bool>,
    /// Kimi K3: limits of SiTU's gates and ups. 0 stands for none.
    activation_situ_beta: Option<f32>,
    activation_situ_linear_beta: Option<f32>,
    /// Kimi K3: layers between those before which the residual stream is put aside.
    attn_res_block_size: Option<usize>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    pub eos_token_id: Option<TokenIds>,
}

/// Which layers have a window, without `layer_types`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum WindowPattern {
    /// All layers but the last one of each run of this length.
    Every(usize),
    /// A letter for each layer, over and over: L has one, G has none.
    Letters(String),
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
    /// Reads and checks the fields; those that `text` leaves out have the family's defaults.
    pub fn read(text: &Value) -> Result<Self, String> {
        let mut config = Self::deserialize(text).map_err(|error| error.to_string())?;
        config.rms_norm_eps = config.layer_norm_eps.unwrap_or(config.rms_norm_eps);
        config.check_sizes()?;
        Ok(config)
    }

    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Channels of gated MLPs.
    pub fn channels(&self) -> Result<usize, String> {
        self.intermediate_size.ok_or_else(|| "it has no intermediate_size".to_owned())
    }

    /// Channels of gated MLPs in a model that has experts in other layers.
    pub fn mlp_channels(&self) -> Result<usize, String> {
        self.intermediate_size_mlp.map_or_else(|| self.channels(), Ok)
    }

    /// True if the MLPs have biases.
    pub fn mlp_bias(&self) -> bool {
        self.mlp_bias || self.use_bias.unwrap_or(false)
    }

    /// True if a layer rotates queries and keys.
    pub fn rotates(&self, layer: usize) -> Result<bool, String> {
        match &self.no_rope_layers {
            None => {
                Ok(self.no_rope_layer_interval.is_none_or(|every| !(layer + 1).is_multiple_of(every.max(1))))
            }
            Some(layers) => layers.get(layer).map(|rotates| *rotates != 0).ok_or_else(|| {
                format!("no_rope_layers has {} entries for {} layers", layers.len(), self.num_hidden_layers)
            }),
        }
    }

    /// The bases of all layers' rotations, each once; `None` if layers do not have their own bases.
    pub fn layer_bases(&self) -> Option<Vec<f64>> {
        let mut bases: Vec<f64> = Vec::new();
        for base in self.layer_rope_theta.as_ref()?.iter().filter(|base| **base != 0.0) {
            if !bases.contains(base) {
                bases.push(*base);
            }
        }
        Some(bases)
    }

    /// The index of a layer's base in [`Self::layer_bases`]; `None` if it does not rotate.
    pub fn layer_base(&self, layer: usize) -> Result<Option<usize>, String> {
        let (layers, bases) = (self.layer_rope_theta.as_deref(), self.layer_bases());
        let (layers, bases) = (layers.unwrap_or_default(), bases.unwrap_or_default());
        let base = layers.get(layer).ok_or_else(|| {
            let (found, needed) = (layers.len(), self.num_hidden_layers);
            format!("layer_rope_theta has {found} entries for {needed} layers")
        })?;
        Ok(bases.iter().position(|known| known == base))
    }

    /// Rotary parameters, under the name of transformers 5 or an older one.
    pub fn scaling(&self) -> Option<&RopeParameters> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// Columns of a head that are rotated.
    pub fn rotated_dims(&self) -> Result<usize, String> {
        if let Some(dims) = self.rotary_dim {
            return Ok(dims);
        }
        let of_scaling = self.scaling().and_then(|s| s.partial_rotary_factor);
        let partial = of_scaling.or(self.partial_rotary_factor).unwrap_or(1.0);
        if !(partial > 0.0 && partial <= 1.0) {
            return Err(format!("partial_rotary_factor is {partial}: it must be above 0 and at most 1"));
        }
        Ok((self.head_dim() as f64 * partial) as usize)
    }

    /// Factor of the scores.
    pub fn score_scale(&self) -> Result<f32, String> {
        let divisor = positive("query_pre_attn_scalar", self.query_pre_attn_scalar)?;
        let scale = positive("attention_multiplier", self.attention_multiplier)?;
        Ok(scale.unwrap_or_else(|| 1.0 / divisor.unwrap_or(self.head_dim() as f32).sqrt()))
    }

    /// Factor of the embeddings.
    pub fn embedding_scale(&self, family: &Family) -> Result<f32, String> {
        // Transformers and MLX-LM both round the root to bf16.
        let root = half::bf16::from_f64((self.hidden_size as f64).sqrt()).to_f32();
        let scale = positive("embedding_multiplier", self.embedding_multiplier)?;
        Ok(scale.unwrap_or(if family.scales_embedding { root } else { 1.0 }))
    }

    /// Factor of what mixers and feed-forwards add to the residual stream.
    pub fn residual_scale(&self) -> Result<f32, String> {
        Ok(positive("residual_multiplier", self.residual_multiplier)?.unwrap_or(1.0))
    }

    /// Factor of the logits.
    pub fn logit_scale(&self, family: &Family) -> Result<f32, String> {
        let scale = positive("logit_scale", self.logit_scale)?.unwrap_or(1.0);
        let scaling = positive("logits_scaling", self.logits_scaling)?.unwrap_or(1.0);
        Ok(if family.multiplies_logits { scale * scaling } else { scale / scaling })
    }

    /// Limit of the logits.
    pub fn logit_cap(&self) -> Result<Option<f32>, String> {
        positive("final_logit_softcapping", self.final_logit_softcapping)
    }

    /// How a layer's scores differ from their usual form.
    pub fn scoring(&self, layer: usize) -> Result<Scoring, String> {
        let chunk = match self.attention_chunk_size {
            Some(0) => return Err("attention_chunk_size is 0".into()),
            // No context is longer than a chunk: all tokens are visible.
            Some(chunk) if chunk >= self.max_position_embeddings || !self.rotates(layer)? => None,
            chunk => chunk,
        };
        let cap = positive("attn_logit_softcapping", self.attn_logit_softcapping)?;
        let after = if self.is_encoder() { usize::MAX } else { 0 };
        Ok(Scoring { cap, chunk, after })
    }

    /// Temperature tuning of a layer.
    pub fn temperature(&self, layer: usize) -> Result<Option<Temperature>, String> {
        let on = match &self.attn_temperature_tuning {
            None => {
                let tuned = self.scaling().and_then(|s| s.temperature(self.max_position_embeddings));
                return Ok(tuned.map(|(beta, original)| Temperature { beta, original, first: 0 }));
            }
            Some(Value::Bool(on)) => *on,
            Some(Value::Number(number)) => number.as_f64() != Some(0.0),
            Some(Value::Null) => false,
            Some(other) => {
                return Err(format!("attn_temperature_tuning is {other}: true and false are known"));
            }
        };
        if !on || self.rotates(layer)? {
            return Ok(None);
        }
        let (original, beta) = (self.floor_scale.unwrap_or(8192), self.attn_scale.unwrap_or(0.1));
        match original > 0 && beta.is_finite() && beta >= 0.0 {
            true => Ok(Some(Temperature { beta, original, first: 1 })),
            false => Err(format!("floor_scale is {original} and attn_scale {beta}: both must be positive")),
        }
    }

    /// The activation of MLPs' gates.
    pub fn activation(&self) -> Result<Activation, ModelError> {
        let name = self.hidden_activation.as_ref().unwrap_or(&self.hidden_act);
        match name.as_str() {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" => Ok(Activation::Gelu),
            "situ" => {
                let limit = |limit: Option<f32>| limit.filter(|limit| limit.is_finite() && *limit > 0.0);
                let cap = limit(self.activation_situ_linear_beta);
                Ok(Activation::Situ { beta: limit(self.activation_situ_beta).unwrap_or(1.0), cap })
            }
            other => unsupported("hidden_act", other, "silu, gelu_pytorch_tanh and situ are"),
        }
    }

    /// Layers between those before which the residual stream is put aside.
    pub fn residual_block(&self) -> Result<Option<usize>, String> {
        match self.attn_res_block_size {
            Some(0) => Err("attn_res_block_size is 0".into()),
            size => Ok(size),
        }
    }

    /// True if tokens attend to later ones as well (EmbeddingGemma).
    pub fn is_encoder(&self) -> bool {
        self.use_bidirectional_attention == Some(Value::Bool(true))
    }

    /// The window of a layer; `None` if the layer attends to all tokens.
    pub fn window(&self, rule: Windows, layer: usize) -> Result<Option<usize>, String> {
        let Some(window) = self.sliding_window.filter(|&window| window > 0) else { return Ok(None) };
        if rule == Windows::AfterMaxWindowLayers && !self.use_sliding_window {
            return Ok(None);
        }
        if let Some(types) = &self.layer_types {
            return match types.get(layer).map(String::as_str) {
                Some("sliding_attention") => Ok(Some(window)),
                // Chunks are not windows, see `scoring`.
                Some("full_attention" | "chunked_attention") => Ok(None),
                Some(other) => Err(format!(
                    "layer_types[{layer}] is {other:?}: full_attention and sliding_attention are known"
                )),
                None => Err(format!(
                    "layer_types has {} entries for {} layers",
                    types.len(),
                    self.num_hidden_layers
                )),
            };
        }
        let has_window = match &self.sliding_window_pattern {
            Some(WindowPattern::Every(0)) => return Err("sliding_window_pattern is 0".into()),
            Some(WindowPattern::Every(layers)) => !(layer + 1).is_multiple_of(*layers),
            Some(WindowPattern::Letters(letters)) => {
                match letters.as_bytes().get(layer % letters.len().max(1)) {
                    Some(b'L') => true,
                    Some(b'G') => false,
                    _ => return Err(format!("sliding_window_pattern is {letters:?}: L and G are known")),
                }
            }
            None => match rule {
                Windows::WhereGiven => true,
                Windows::AfterMaxWindowLayers => layer >= self.max_window_layers.unwrap_or(0),
            },
        };
        Ok(has_window.then_some(window))
    }

    /// Refuses sizes [out of bounds](in_bounds), and an epsilon that would turn a norm into NaN.
    fn check_sizes(&self) -> Result<(), String> {
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        in_bounds(&[
            ("hidden_size", self.hidden_size, 1 << 31),
            ("intermediate_size", self.intermediate_size.unwrap_or(1), 1 << 31),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 12),
            ("num_attention_heads", heads, 1 << 14),
            ("num_key_value_heads", kv_heads, 1 << 14),
            ("head_dim", self.head_dim(), 1 << 14),
            ("intermediate_size_mlp", self.intermediate_size_mlp.unwrap_or(1), 1 << 31),
            ("vocab_size", self.vocab_size, 1 << 31),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 31),
        ])?;
        let eps = self.rms_norm_eps;
        if !(eps > 0.0 && eps < 1.0) {
            return Err(format!("rms_norm_eps is {eps}: it must be above 0 and below 1"));
        }
        if let Some(dims) = self.rotary_dim.filter(|dims| *dims > self.head_dim()) {
            return Err(format!("rotary_dim is {dims}: a head has {} columns", self.head_dim()));
        }
        match heads % kv_heads {
            0 => Ok(()),
            _ => {
                Err(format!("num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}"))
            }
        }
    }

    /// Refuses what no operation does.
    pub fn check_supported(&self) -> Result<(), ModelError> {
        if self.use_cla {
            return unsupported("use_cla", "true", "keys and values of each layer's own are");
        }
        if let Some(limit) = self.clip_qkv {
            return unsupported("clip_qkv", &limit.to_string(), "null is");
        }
        if self.rope_traditional {
            return unsupported("rope_traditional", "true", "pairs of dimensions i and i + head_dim / 2 are");
        }
        Ok(())
    }
}

/// Refuses sizes of 0, and sizes that would exhaust memory before any weight is read (there are
/// lists of layers, heads and dimensions): `(field, value, most)`.
pub(super) fn in_bounds(sizes: &[(&str, usize, usize)]) -> Result<(), String> {
    match sizes.iter().find(|(_, value, most)| *value == 0 || value > most) {
        Some((field, value, most)) => Err(format!("{field} is {value}: it must be between 1 and {most}")),
        None => Ok(()),
    }
}

fn unsupported<T>(field: &'static str, value: &str, supported: &str) -> Result<T, ModelError> {
    Err(ModelError::Unsupported { field, value: value.to_owned(), supported: supported.to_owned() })
}

/// Refuses factors that would make NaN or nothing of a model.
fn positive(field: &str, value: Option<f32>) -> Result<Option<f32>, String> {
    match value {
        Some(value) if !(value.is_finite() && value > 0.0) => {
            Err(format!("{field} is {value}: it must be a number above 0"))
        }
        value => Ok(value),
    }
}
