//! What is special of Gemma 4 in config.json: layers without a window, layers that read the keys
//! and values of others, and inputs of layers.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::spec::{AttentionShape, LayerInputsShape, MlpShape};

/// The fields of config.json, with the defaults of transformers' Gemma4TextConfig.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    #[serde(default = "global_head_dim")]
    global_head_dim: usize,
    num_global_key_value_heads: Option<usize>,
    #[serde(default)]
    attention_k_eq_v: bool,
    /// Transformers writes the heads of layers without a window here, by layer.
    per_layer_config: Option<BTreeMap<String, Layer>>,
    #[serde(default)]
    num_kv_shared_layers: usize,
    #[serde(default = "per_layer_input")]
    hidden_size_per_layer_input: usize,
    #[serde(default = "per_layer_vocab")]
    vocab_size_per_layer_input: usize,
    #[serde(default)]
    use_double_wide_mlp: bool,
    #[serde(default)]
    enable_moe_block: bool,
}

#[derive(Debug, Deserialize)]
struct Layer {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

fn global_head_dim() -> usize {
    512
}
fn per_layer_input() -> usize {
    256
}
fn per_layer_vocab() -> usize {
    262_144
}

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let mut config = Self::deserialize(text).map_err(|error| error.to_string())?;
        let mut layers = config.per_layer_config.iter().flat_map(BTreeMap::values);
        if let Some(first) = layers.next() {
            let same = |layer: &Layer| {
                layer.head_dim == first.head_dim && layer.num_key_value_heads == first.num_key_value_heads
            };
            if !layers.all(same) {
                return Err(
                    "per_layer_config differs from layer to layer: one kind of layers is supported".into()
                );
            }
            let (dim, heads) = (first.head_dim, first.num_key_value_heads);
            config.global_head_dim = dim.unwrap_or(config.global_head_dim);
            config.num_global_key_value_heads = heads.or(config.num_global_key_value_heads);
        }
        let (dim, heads) = (config.global_head_dim, config.num_global_key_value_heads.unwrap_or(1));
        if !(1..=1 << 14).contains(&dim) || !(1..=1 << 14).contains(&heads) {
            return Err(format!(
                "global_head_dim is {dim} and num_global_key_value_heads {heads}: both must be between 1 and 16384"
            ));
        }
        for (field, value, most) in [
            ("hidden_size_per_layer_input", config.hidden_size_per_layer_input, 1 << 14),
            ("vocab_size_per_layer_input", config.vocab_size_per_layer_input, 1 << 24),
        ] {
            if value > most {
                return Err(format!("{field} is {value}: it must be at most {most}"));
            }
        }
        Ok(config)
    }

    /// True if each layer has both experts and an MLP.
    pub const fn has_experts(&self) -> bool {
        self.enable_moe_block
    }

    /// Width of a head of a layer without a window.
    pub const fn head_dim(&self) -> usize {
        self.global_head_dim
    }

    /// The inputs of layers.
    pub fn inputs(&self) -> Option<LayerInputsShape> {
        let (width, vocab) = (self.hidden_size_per_layer_input, self.vocab_size_per_layer_input);
        (width > 0).then_some(LayerInputsShape { width, vocab })
    }

    /// The number of layers that have keys and values of their own, of `layers`.
    fn own_layers(&self, layers: usize) -> Result<usize, String> {
        layers.checked_sub(self.num_kv_shared_layers).filter(|own| *own > 0).ok_or_else(|| {
            format!(
                "num_kv_shared_layers is {}: it must be below num_hidden_layers, {layers}",
                self.num_kv_shared_layers
            )
        })
    }

    /// The layer whose keys and values layer `index` of `layers` reads, if it has none of its own:
    /// the last one before the sharing layers that has a window too, or has none either.
    pub fn keys_of(
        &self,
        index: usize,
        layers: usize,
        has_window: impl Fn(usize) -> Result<bool, String>,
    ) -> Result<Option<usize>, String> {
        let own = self.own_layers(layers)?;
        if index < own {
            return Ok(None);
        }
        let window = has_window(index)?;
        for source in (0..own).rev() {
            if has_window(source)? == window {
                return Ok(Some(source));
            }
        }
        Err(format!(
            "num_kv_shared_layers is {}: layer {index} needs an earlier layer of its kind with keys of its own",
            self.num_kv_shared_layers
        ))
    }

    /// The MLP of a layer, given the usual one.
    pub fn mlp(&self, index: usize, layers: usize, mlp: MlpShape) -> Result<MlpShape, String> {
        let is_wide = self.use_double_wide_mlp && index >= self.own_layers(layers)?;
        Ok(MlpShape { channels: if is_wide { 2 * mlp.channels } else { mlp.channels }, ..mlp })
    }

    /// The attention of a layer.
    pub fn shape(&self, shape: AttentionShape) -> Result<AttentionShape, String> {
        let shape = AttentionShape { scale: 1.0, value_norm: shape.keys_of.is_none(), ..shape };
        if shape.window.is_some() {
            return Ok(shape);
        }
        let kv_heads = match (self.attention_k_eq_v, self.num_global_key_value_heads) {
            (true, Some(heads)) => heads,
            _ => shape.kv_heads,
        };
        if !shape.heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_global_key_value_heads is {kv_heads}: it must divide the {} heads",
                shape.heads
            ));
        }
        let (head_dim, values_are_keys) = (self.global_head_dim, self.attention_k_eq_v);
        Ok(AttentionShape { head_dim, value_dim: head_dim, kv_heads, values_are_keys, ..shape })
    }
}
