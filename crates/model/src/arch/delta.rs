//! The gated delta rule in config.json (Qwen3-Next and those after it).

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::HeadSharing;

use crate::spec::DeltaShape;

/// The fields of config.json.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    linear_num_key_heads: usize,
    linear_num_value_heads: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_conv_kernel_dim: usize,
    full_attention_interval: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// Of the gate after the rule.
    output_gate_type: Option<String>,
}

/// Epsilon of the unit vectors of delta rules, independent of `rms_norm_eps`: transformers' and
/// MLX-LM's Qwen3-Next, Qwen3.5 and Kimi Linear add it to the sum of squares. (llama.cpp uses the
/// epsilon of the model's norms.)
pub(super) const UNIT_EPS: f32 = 1e-6;

/// By default, one layer in four attends (transformers' Qwen3NextConfig).
const ATTENTION_INTERVAL: usize = 4;

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let config = Self::deserialize(text).map_err(|error| error.to_string())?;
        for (field, value, most) in [
            ("linear_num_key_heads", config.linear_num_key_heads, 1 << 14),
            ("linear_num_value_heads", config.linear_num_value_heads, 1 << 14),
            ("linear_key_head_dim", config.linear_key_head_dim, 1 << 10),
            ("linear_value_head_dim", config.linear_value_head_dim, 1 << 12),
            ("linear_conv_kernel_dim", config.linear_conv_kernel_dim, 64),
            ("full_attention_interval", config.full_attention_interval.unwrap_or(1), 1 << 12),
        ] {
            if value == 0 || value > most {
                return Err(format!("{field} is {value}: it must be between 1 and {most}"));
            }
        }
        let (keys, values) = (config.linear_num_key_heads, config.linear_num_value_heads);
        if !values.is_multiple_of(keys) {
            return Err(format!(
                "linear_num_value_heads is {values}, no multiple of linear_num_key_heads, {keys}"
            ));
        }
        if let Some(gate) =
            config.output_gate_type.as_deref().filter(|gate| !["swish", "silu"].contains(gate))
        {
            return Err(format!("output_gate_type is {gate:?}: swish is supported"));
        }
        Ok(config)
    }

    /// The delta rule of a layer; `None` if the layer attends.
    pub fn shape(&self, layer: usize) -> Result<Option<DeltaShape>, String> {
        let attends = match &self.layer_types {
            Some(types) => match types.get(layer).map(String::as_str) {
                Some("full_attention") => true,
                Some("linear_attention") => false,
                Some(other) => {
                    return Err(format!(
                        "layer_types[{layer}] is {other:?}: full_attention and linear_attention are known"
                    ));
                }
                None => {
                    return Err(format!("layer_types has {} entries: layer {layer} has none", types.len()));
                }
            },
            None => (layer + 1).is_multiple_of(self.full_attention_interval.unwrap_or(ATTENTION_INTERVAL)),
        };
        Ok((!attends).then_some(DeltaShape {
            key_heads: self.linear_num_key_heads,
            value_heads: self.linear_num_value_heads,
            sharing: HeadSharing::Grouped,
            key_dim: self.linear_key_head_dim,
            value_dim: self.linear_value_head_dim,
            kernel: self.linear_conv_kernel_dim,
            unit_eps: UNIT_EPS,
        }))
    }
}
