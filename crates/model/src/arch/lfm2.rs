//! LFM2 and LFM3 in config.json: most layers have a gated short convolution in place of attention.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::spec::GatedConvShape;

/// The name of layers with a convolution.
const CONV: &str = "conv";

/// Fields of published files.
#[derive(Debug, Deserialize)]
struct Published {
    num_hidden_layers: usize,
    norm_eps: Option<f64>,
    intermediate_size: Option<u64>,
    /// Old files' name of `intermediate_size`.
    block_ff_dim: Option<u64>,
    block_auto_adjust_ff_dim: Option<bool>,
    block_ffn_dim_multiplier: Option<f64>,
    block_multiple_of: Option<u64>,
    full_attn_idxs: Option<Vec<usize>>,
    layer_types: Option<Vec<String>>,
    tie_embedding: Option<bool>,
    num_dense_layers: Option<usize>,
    use_expert_bias: Option<bool>,
    use_sandwich_norm: Option<bool>,
}

/// Which layers have a convolution, and its shape.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    hidden_size: usize,
    #[serde(rename = "conv_L_cache")]
    kernel: usize,
    #[serde(default)]
    conv_bias: bool,
    layer_types: Vec<String>,
}

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let config = Self::deserialize(text).map_err(|error| error.to_string())?;
        if config.conv_bias {
            return Err("conv_bias is true: convolutions without biases are supported".into());
        }
        match (1..=64).contains(&config.kernel) {
            true => Ok(config),
            false => Err(format!("conv_L_cache is {}: it must be between 1 and 64", config.kernel)),
        }
    }

    /// The convolution of a layer; `None` if the layer attends.
    pub fn shape(&self, layer: usize) -> Result<Option<GatedConvShape>, String> {
        match self.layer_types.get(layer).map(String::as_str) {
            Some(CONV) => Ok(Some(GatedConvShape { channels: self.hidden_size, kernel: self.kernel })),
            Some(_) => Ok(None),
            None => {
                Err(format!("layer_types has {} entries: layer {layer} has none", self.layer_types.len()))
            }
        }
    }
}

/// The config with fields that the decoder's config needs. `adjusts`: channels of MLPs are made of
/// `intermediate_size` unless the config has `block_auto_adjust_ff_dim`, as in transformers'
/// Lfm2Config.
pub(super) fn in_common_names(mut text: Value, adjusts: bool) -> Result<Value, String> {
    let published = Published::deserialize(&text).map_err(|error| error.to_string())?;
    let Some(fields) = text.as_object_mut() else { return Err("it is no object".into()) };
    if published.use_expert_bias == Some(false) {
        return Err("use_expert_bias is false: true is supported".into());
    }
    if published.use_sandwich_norm == Some(false) {
        return Err("use_sandwich_norm is false: true is supported".into());
    }
    fields.entry("rms_norm_eps").or_insert(json!(published.norm_eps.unwrap_or(1e-5)));
    let tied = published.tie_embedding.or(fields.get("tie_word_embeddings").and_then(Value::as_bool));
    fields.insert("tie_word_embeddings".into(), tied.unwrap_or(true).into());
    // A base outside of rope_parameters would go before the one inside.
    if !fields.contains_key("rope_parameters") {
        fields.entry("rope_theta").or_insert_with(|| json!(1_000_000.0));
    }
    if let Some(dense) = published.num_dense_layers {
        fields.entry("first_k_dense_replace").or_insert(dense.into());
    }
    if let Some(size) = published.block_ff_dim.or(published.intermediate_size) {
        let mut channels = size;
        if adjusts && published.block_auto_adjust_ff_dim != Some(false) {
            channels = channels.saturating_mul(2) / 3;
            let multiple = published.block_multiple_of.unwrap_or(256).max(1);
            channels = (channels as f64 * published.block_ffn_dim_multiplier.unwrap_or(1.0)) as u64;
            channels = channels.div_ceil(multiple).saturating_mul(multiple);
        }
        fields.insert("intermediate_size".into(), channels.into());
    }
    if published.layer_types.is_none() {
        let Some(attends) = published.full_attn_idxs else {
            return Err("it has neither layer_types nor full_attn_idxs".into());
        };
        // Lists of layers are made before their number is checked.
        let count = published.num_hidden_layers.min(super::nemotron::MOST_LAYERS);
        let kind = |layer: usize| if attends.contains(&layer) { "full_attention" } else { CONV };
        fields.insert("layer_types".into(), (0..count).map(kind).collect());
    }
    Ok(text)
}
