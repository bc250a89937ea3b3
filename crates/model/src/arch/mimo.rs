//! How MiMo V2's attention differs in config.json: values are narrower than keys, and layers with a
//! window have other heads.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::spec::AttentionShape;

/// The fields of config.json. The prefix `swa` marks those for layers with a window.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    v_head_dim: usize,
    /// Multiplies the values.
    attention_value_scale: Option<f32>,
    swa_num_attention_heads: Option<usize>,
    swa_num_key_value_heads: Option<usize>,
    swa_head_dim: Option<usize>,
    swa_v_head_dim: Option<usize>,
    #[serde(default = "yes")]
    add_swa_attention_sink_bias: bool,
    #[serde(default)]
    add_full_attention_sink_bias: bool,
}

const fn yes() -> bool {
    true
}

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let config = Self::deserialize(text).map_err(|error| error.to_string())?;
        for (field, value) in [
            ("v_head_dim", Some(config.v_head_dim)),
            ("swa_num_attention_heads", config.swa_num_attention_heads),
            ("swa_num_key_value_heads", config.swa_num_key_value_heads),
            ("swa_v_head_dim", config.swa_v_head_dim),
        ] {
            if value.is_some_and(|value| !(1..=1 << 14).contains(&value)) {
                return Err(format!("{field} is {}: it must be between 1 and 16384", value.unwrap_or(0)));
            }
        }
        let scale = config.attention_value_scale.unwrap_or(1.0);
        match scale.is_finite() && scale > 0.0 {
            true => Ok(config),
            false => Err(format!("attention_value_scale is {scale}: it must be a number above 0")),
        }
    }

    /// The attention of a layer.
    pub fn shape(&self, shape: AttentionShape) -> Result<AttentionShape, String> {
        let shape = AttentionShape {
            value_dim: self.v_head_dim,
            value_scale: self.attention_value_scale.unwrap_or(1.0),
            sinks: self.add_full_attention_sink_bias,
            ..shape
        };
        if shape.window.is_none() {
            return Ok(shape);
        }
        if self.swa_head_dim.is_some_and(|dim| dim != shape.head_dim) {
            return Err(format!("swa_head_dim is not head_dim, {}: one width is supported", shape.head_dim));
        }
        let heads = self.swa_num_attention_heads.unwrap_or(shape.heads);
        // By default, twice as many KV heads (transformers' MiMoV2FlashAttention).
        let kv_heads = self.swa_num_key_value_heads.unwrap_or(2 * shape.kv_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "layers with a window have {heads} heads, no multiple of {kv_heads} KV heads"
            ));
        }
        let value_dim = self.swa_v_head_dim.unwrap_or(self.v_head_dim);
        Ok(AttentionShape { heads, kv_heads, value_dim, sinks: self.add_swa_attention_sink_bias, ..shape })
    }
}

/// Fields of published files under the names that the decoder's config has.
#[derive(Debug, Deserialize)]
struct Published {
    /// 1 for layers with a window.
    hybrid_layer_pattern: Option<Vec<u8>>,
    /// 1 for layers with experts.
    moe_layer_freq: Option<Vec<u8>>,
    /// Tokens before a token that it attends to.
    sliding_window_size: Option<usize>,
    swa_rope_theta: Option<f64>,
    layernorm_epsilon: Option<f64>,
}

/// The config with the decoder's names.
pub(super) fn in_common_names(mut text: Value) -> Result<Value, String> {
    let published = Published::deserialize(&text).map_err(|error| error.to_string())?;
    let Some(fields) = text.as_object_mut() else { return Ok(text) };
    let kinds = |list: &[u8], [of_0, of_1]: [&str; 2]| {
        list.iter().map(|item| if *item == 0 { of_0 } else { of_1 }).collect::<Value>()
    };
    if let Some(list) = &published.hybrid_layer_pattern {
        fields.insert("layer_types".into(), kinds(list, ["full_attention", "sliding_attention"]));
    }
    if let Some(list) = &published.moe_layer_freq {
        fields.insert("mlp_layer_types".into(), kinds(list, ["dense", "sparse"]));
        fields.remove("moe_layer_freq");
    }
    if let Some(window) = published.sliding_window_size {
        fields.insert("sliding_window".into(), window.saturating_add(1).into());
    }
    if let Some(base) = published.swa_rope_theta {
        fields.insert("rope_local_base_freq".into(), base.into());
    }
    if let Some(eps) = published.layernorm_epsilon {
        fields.insert("rms_norm_eps".into(), eps.into());
    }
    take_rotated_part(fields);
    Ok(text)
}

/// The part of a head that is rotated, which transformers writes for each type of layer.
fn take_rotated_part(fields: &mut Map<String, Value>) {
    let part = fields.get("rope_parameters").and_then(|sets| sets.get("full_attention"));
    if let Some(part) = part.and_then(|set| set.get("partial_rotary_factor")).cloned() {
        fields.insert("partial_rotary_factor".into(), part);
    }
}
