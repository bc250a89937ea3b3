//! Delta rules in a file's metadata, in config.json's words.

use serde_json::{Map, Value, json};

use super::super::values::{Metadata, Value as Stored};
use super::Key;

/// Whole numbers of the gated delta rule that a file must have, and their fields.
const GATED: [(&str, &str); 4] = [
    ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ("ssm.state_size", "linear_key_head_dim"),
    ("ssm.group_count", "linear_num_key_heads"),
    ("ssm.time_step_rank", "linear_num_value_heads"),
];

fn needed(metadata: Metadata<'_>, key: &Key<'_>, name: &str) -> Result<u64, String> {
    metadata.unsigned(&key(name))?.ok_or_else(|| format!("it has no {}", key(name)))
}

/// The shape of the gated delta rule, and which layers have it.
pub(super) fn take_gated(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    for (suffix, field) in GATED {
        config.insert(field.into(), needed(metadata, key, suffix)?.into());
    }
    let (inner, heads) =
        (needed(metadata, key, "ssm.inner_size")?, needed(metadata, key, "ssm.time_step_rank")?);
    if heads == 0 || !inner.is_multiple_of(heads) {
        return Err(format!("{} is {inner}, no multiple of the {heads} value heads", key("ssm.inner_size")));
    }
    config.insert("linear_value_head_dim".into(), (inner / heads).into());
    let name = key("attention.recurrent_layers");
    let is_recurrent = |item: Stored| matches!(item, Stored::Bool(true) | Stored::Unsigned(1..));
    let recurrent = metadata.numbers(&name)?.map(|list| list.map(is_recurrent));
    match recurrent {
        Some(recurrent) => take_kinds(&name, recurrent, config),
        None => {
            if let Some(every) = metadata.unsigned(&key("full_attention_interval"))? {
                config.insert("full_attention_interval".into(), every.into());
            }
            Ok(())
        }
    }
}

/// The shape of the delta rule with a decay for each channel. It has as many heads as attention.
/// Its layers have no KV heads.
pub(super) fn take_channels(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    for (suffix, field) in [
        ("attention.head_count", "linear_num_heads"),
        ("kda.head_dim", "linear_head_dim"),
        ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ] {
        config.insert(field.into(), needed(metadata, key, suffix)?.into());
    }
    take_kimi_k3(metadata, key, has, config)?;
    let name = key("attention.head_count_kv");
    let list = metadata.numbers(&name)?.ok_or_else(|| format!("it has no {name}"))?;
    take_kinds(&name, list.map(|item| matches!(item, Stored::Unsigned(0) | Stored::Signed(0))), config)
}

/// What Kimi K3 has and Kimi Linear has not. `has` says whether a layer has a tensor.
fn take_kimi_k3(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    for (suffix, field) in [
        ("kda.gate_lower_bound", "linear_gate_lower_bound"),
        ("activation.situ_beta", "activation_situ_beta"),
        ("activation.situ_linear_beta", "activation_situ_linear_beta"),
    ] {
        if let Some(number) = metadata.float(&key(suffix))? {
            config.insert(field.into(), json!(number));
        }
    }
    if config.contains_key("activation_situ_beta") {
        config.insert("hidden_act".into(), "situ".into());
    }
    for (suffix, field) in [
        ("attn_res.block_size", "attn_res_block_size"),
        ("expert_latent_length", "routed_expert_hidden_size"),
    ] {
        if let Some(number) = metadata.unsigned(&key(suffix))?.filter(|number| *number > 0) {
            config.insert(field.into(), number.into());
        }
    }
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or_default();
    for (tensor, field) in [
        ("ssm_g.weight", "linear_full_rank_gate"),
        ("attn_gate.weight", "mla_use_output_gate"),
        ("ffn_routed_norm.weight", "latent_moe_use_norm"),
    ] {
        config.insert(field.into(), (0..layers).any(|layer| has(layer, tensor)).into());
    }
    Ok(())
}

/// `layer_types`, from a list that says which layers do not attend.
fn take_kinds(
    name: &str,
    recurrent: impl ExactSizeIterator<Item = bool>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or_default() as usize;
    if recurrent.len() < layers {
        return Err(format!("{name} has {} items for {layers} layers", recurrent.len()));
    }
    let kind = |recurrent: bool| if recurrent { "linear_attention" } else { "full_attention" };
    config.insert("layer_types".into(), recurrent.take(layers).map(kind).collect());
    Ok(())
}
