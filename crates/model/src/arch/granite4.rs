//! Granite 4 in config.json: most layers have a state space (Mamba-2) in place of attention.

use serde::Deserialize;
use serde_json::{Value, json};

use super::nemotron::MOST_LAYERS;

/// Fields of published files.
#[derive(Debug, Deserialize)]
struct Published {
    hidden_size: usize,
    num_hidden_layers: usize,
    layer_types: Option<Vec<String>>,
    layers_block_type: Option<Vec<String>>,
    mamba_n_heads: Option<usize>,
    mamba_n_groups: Option<usize>,
    mamba_d_state: Option<usize>,
    mamba_d_head: Option<Width>,
    mamba_d_conv: Option<usize>,
    mamba_expand: Option<usize>,
    mamba_conv_bias: Option<bool>,
    mamba_proj_bias: Option<bool>,
    position_embedding_type: Option<String>,
    shared_intermediate_size: Option<usize>,
}

/// A number, or "auto".
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Width {
    Number(usize),
    Named(String),
}

/// The config with the field names of Nemotron-H, which has the same state spaces. Missing fields
/// have the defaults of transformers' GraniteMoeHybridConfig.
pub(super) fn in_common_names(mut text: Value) -> Result<Value, String> {
    let published = Published::deserialize(&text).map_err(|error| error.to_string())?;
    let without_experts = !has_experts(&text);
    let Some(fields) = text.as_object_mut() else { return Err("it is no object".into()) };
    let heads = published.mamba_n_heads.unwrap_or(128);
    let head_dim = match published.mamba_d_head {
        Some(Width::Number(width)) => width,
        Some(Width::Named(name)) if name != "auto" => {
            return Err(format!("mamba_d_head is {name:?}: a number and \"auto\" are known"));
        }
        _ => published.mamba_expand.unwrap_or(2).saturating_mul(published.hidden_size) / heads.max(1),
    };
    for (field, value) in [
        ("mamba_num_heads", heads),
        ("mamba_head_dim", head_dim),
        ("n_groups", published.mamba_n_groups.unwrap_or(1)),
        ("ssm_state_size", published.mamba_d_state.unwrap_or(256)),
        ("conv_kernel", published.mamba_d_conv.unwrap_or(4)),
    ] {
        fields.insert(field.into(), value.into());
    }
    fields.insert("use_conv_bias".into(), published.mamba_conv_bias.unwrap_or(true).into());
    fields.insert("mamba_proj_bias".into(), published.mamba_proj_bias.unwrap_or(false).into());
    let types = published.layer_types.or(published.layers_block_type);
    match types.as_ref().map(Vec::len) {
        Some(count) if count < published.num_hidden_layers => {
            let layers = published.num_hidden_layers;
            return Err(format!("layer_types has {count} entries for {layers} layers"));
        }
        Some(_) => {}
        None => {
            fields.remove("layer_types");
            let letters = "M".repeat(published.num_hidden_layers.min(MOST_LAYERS));
            fields.insert("hybrid_override_pattern".into(), letters.into());
        }
    }
    match published.position_embedding_type.as_deref() {
        Some("rope") => {}
        // Every layer is the last one of a run of 1, which does not rotate.
        None | Some("nope") => drop(fields.insert("no_rope_layer_interval".into(), 1.into())),
        Some(other) => {
            return Err(format!("position_embedding_type is {other:?}: rope, nope and null are known"));
        }
    }
    // In a layer without experts, the fields of the shared expert describe its MLP.
    if let (true, Some(channels)) = (without_experts, published.shared_intermediate_size) {
        fields.insert("intermediate_size".into(), json!(channels));
    }
    Ok(text)
}

/// True unless the config says that there are no experts.
pub(super) fn has_experts(text: &Value) -> bool {
    text.get("num_local_experts").is_none_or(|count| *count != 0 && !count.is_null())
}
