//! GLM-5.3 in config.json: Kimi's delta rule and latent attention that rotates nothing.

use serde_json::{Value, json};

/// The config with the field names that other families' readers need. Missing fields have the
/// defaults of transformers' Glm5NextTextConfig.
pub(super) fn in_common_names(mut text: Value) -> Result<Value, String> {
    let linear = text.get("linear_attn_config").cloned().unwrap_or_default();
    let layers = text.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(1 << 12);
    let Some(fields) = text.as_object_mut() else { return Err("it is no object".into()) };
    let bound = linear.get("gate_lower_bound").or_else(|| fields.get("linear_lower_bound")).cloned();
    let bound = match bound {
        None => json!(-5.0),
        // Safe gates have the usual bound.
        Some(Value::Null) if linear.get("safe_gate").and_then(Value::as_bool).unwrap_or(false) => json!(-5.0),
        Some(bound) => bound,
    };
    fields.insert("linear_gate_lower_bound".into(), bound);
    // Transformers writes the width of what is rotated, 0.
    fields.remove("head_dim");
    let kind = |layer: u64| if layer % 4 == 3 { "full_attention" } else { "linear_attention" };
    let types = fields.entry("layer_types").or_insert_with(|| (0..layers).map(kind).collect());
    for kind in types.as_array_mut().into_iter().flatten() {
        if kind == "indexed_attention" {
            *kind = "full_attention".into();
        }
    }
    let dense = |layer: u64| if layer < 3 { "dense" } else { "sparse" };
    fields.entry("mlp_layer_types").or_insert_with(|| (0..layers).map(dense).collect());
    Ok(text)
}
