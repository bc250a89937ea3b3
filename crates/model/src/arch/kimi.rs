//! Kimi Delta Attention in config.json (Kimi Linear, Kimi K3).

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::Decays;

use super::delta::UNIT_EPS;
use crate::spec::ChannelDeltaShape;

/// The fields of config.json. Published files have them in an object, with layers counted from 1;
/// transformers writes them outside the object.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    linear_attn_config: Option<Published>,
    #[serde(default = "heads")]
    linear_num_heads: usize,
    #[serde(default = "dim")]
    linear_head_dim: usize,
    #[serde(default = "kernel")]
    linear_conv_kernel_dim: usize,
    /// The published `gate_lower_bound` and `use_full_rank_gate`, for files that have no object.
    linear_gate_lower_bound: Option<f32>,
    #[serde(default)]
    linear_full_rank_gate: bool,
    layer_types: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Published {
    num_heads: usize,
    head_dim: usize,
    #[serde(default = "kernel")]
    short_conv_kernel_size: usize,
    #[serde(default)]
    kda_layers: Vec<usize>,
    #[serde(default)]
    full_attn_layers: Vec<usize>,
    /// Kimi K3: decays are bounded, and output gates are one product.
    gate_lower_bound: Option<f32>,
    #[serde(default)]
    use_full_rank_gate: bool,
}

fn heads() -> usize {
    32
}
fn dim() -> usize {
    128
}
fn kernel() -> usize {
    4
}

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let mut config = Self::deserialize(text).map_err(|error| error.to_string())?;
        if let Some(published) = &config.linear_attn_config {
            config.linear_num_heads = published.num_heads;
            config.linear_head_dim = published.head_dim;
            config.linear_conv_kernel_dim = published.short_conv_kernel_size;
            // GLM-5.3 has a bound by default, which is outside of the object.
            config.linear_gate_lower_bound = published.gate_lower_bound.or(config.linear_gate_lower_bound);
            config.linear_full_rank_gate = published.use_full_rank_gate;
        }
        for (field, value, most) in [
            ("linear_attn_config.num_heads", config.linear_num_heads, 1 << 14),
            ("linear_attn_config.head_dim", config.linear_head_dim, 1 << 10),
            ("linear_attn_config.short_conv_kernel_size", config.linear_conv_kernel_dim, 64),
        ] {
            if value == 0 || value > most {
                return Err(format!("{field} is {value}: it must be between 1 and {most}"));
            }
        }
        let bound = config.linear_gate_lower_bound;
        if let Some(bound) = bound.filter(|bound| !bound.is_finite() || *bound >= 0.0) {
            return Err(format!("linear_attn_config.gate_lower_bound is {bound}: it must be below 0"));
        }
        Ok(config)
    }

    /// The delta rule of a layer; `None` if the layer attends.
    pub fn shape(&self, layer: usize) -> Result<Option<ChannelDeltaShape>, String> {
        let attends = match (&self.layer_types, &self.linear_attn_config) {
            (Some(types), _) => match types.get(layer).map(String::as_str) {
                Some("full_attention") => true,
                Some("linear_attention") => false,
                other => {
                    return Err(format!(
                        "layer_types[{layer}] is {other:?}: full_attention and linear_attention are known"
                    ));
                }
            },
            (None, Some(published)) => {
                let listed = |layers: &[usize]| layers.contains(&(layer + 1));
                match (listed(&published.full_attn_layers), listed(&published.kda_layers)) {
                    (true, false) => true,
                    (false, true) => false,
                    _ => {
                        return Err(format!(
                            "layer {} must be in one of kda_layers and full_attn_layers",
                            layer + 1
                        ));
                    }
                }
            }
            (None, None) => layer > 0 && layer.is_multiple_of(4),
        };
        let lowest = self.linear_gate_lower_bound;
        Ok((!attends).then_some(ChannelDeltaShape {
            heads: self.linear_num_heads,
            dim: self.linear_head_dim,
            kernel: self.linear_conv_kernel_dim,
            unit_eps: UNIT_EPS,
            decays: lowest.map_or(Decays::Softplus, |lowest| Decays::Bounded { lowest }),
            whole_gates: self.linear_full_rank_gate,
        }))
    }
}
