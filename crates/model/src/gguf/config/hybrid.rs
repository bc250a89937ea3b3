//! Layers of models with state spaces in a file's metadata, in config.json's words.

use serde_json::{Map, Value, json};

use super::super::values::{Metadata, Value as Stored};
use super::families::StateSpaces;
use super::{Key, MOST_LAYERS};

/// Keys with a list that has 0 for layers without this part.
pub(super) const DIFFERS: [&str; 2] = ["feed_forward_length", "attention.head_count_kv"];

/// Whole numbers that a file must have. Of Mamba-2 the last one is the number of heads.
const NUMBERS: [&str; 4] = ["ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"];

/// Nemotron-H's names of these, and of the width of heads.
const NEMOTRON: [&str; 5] =
    ["conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"];
/// Granite 4's.
const GRANITE: [&str; 5] =
    ["mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head"];

/// What the layers are, and the shape of state spaces. `has` says whether a layer has a tensor.
pub(super) fn take(
    metadata: Metadata<'_>,
    spaces: StateSpaces,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let needed =
        |name: &str| metadata.unsigned(&key(name))?.ok_or_else(|| format!("it has no {}", key(name)));
    let [fields @ .., head_dim] = if spaces == StateSpaces::Apart { NEMOTRON } else { GRANITE };
    for (suffix, field) in NUMBERS.into_iter().zip(fields) {
        config.insert(field.into(), needed(suffix)?.into());
    }
    let (inner, heads) = (needed("ssm.inner_size")?, needed("ssm.time_step_rank")?);
    if heads == 0 || !inner.is_multiple_of(heads) {
        return Err(format!("{} is {inner}, no multiple of the {heads} heads", key("ssm.inner_size")));
    }
    config.insert(head_dim.into(), (inner / heads).into());
    let all = needed("block_count")?;
    let further = metadata.unsigned(&key("nextn_predict_layers"))?.unwrap_or(0);
    let layers = all.saturating_sub(further);
    if !(1..=MOST_LAYERS).contains(&layers) {
        return Err(format!("{} is {all}: 1 to {MOST_LAYERS} layers must be left", key("block_count")));
    }
    for (suffix, field) in [
        ("attention.head_count_kv", "num_key_value_heads"),
        ("feed_forward_length", "intermediate_size"),
        ("moe_latent_size", "moe_latent_size"),
    ] {
        if let Some(number) = largest(metadata, &key(suffix))?.filter(|number| *number > 0) {
            config.insert(field.into(), json!(number));
        }
    }
    match spaces {
        StateSpaces::ForAttention => take_granite(metadata, (key, layers), has, config),
        StateSpaces::None | StateSpaces::Apart => take_pattern(layers, has, config),
    }
}

/// Nemotron-H's pattern: a letter for each layer.
fn take_pattern(
    layers: u64,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let letter = |layer: u64| match () {
        () if has(layer, "ssm_in.weight") => Ok("M"),
        () if has(layer, "attn_q.weight") => Ok("*"),
        () if has(layer, "ffn_gate_inp.weight") => Ok("E"),
        () if has(layer, "ffn_up.weight") => Ok("-"),
        () => Err(format!("layer {layer} has no ssm_in, attn_q, ffn_gate_inp or ffn_up")),
    };
    let pattern = (0..layers).map(letter).collect::<Result<String, _>>()?;
    config.insert("hybrid_override_pattern".into(), pattern.into());
    Ok(())
}

/// The mixers of Granite 4's layers, and its experts, if there are some.
fn take_granite(
    metadata: Metadata<'_>,
    (key, layers): (&Key<'_>, u64),
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let kind = |layer: u64| match () {
        () if has(layer, "ssm_in.weight") => Ok("mamba"),
        () if has(layer, "attn_q.weight") => Ok("attention"),
        () => Err(format!("layer {layer} has no ssm_in and no attn_q")),
    };
    let kinds = (0..layers).map(kind).collect::<Result<Value, String>>()?;
    config.insert("layer_types".into(), kinds);
    // Unless the file says that nothing rotates.
    config.insert("position_embedding_type".into(), "rope".into());
    // In Granite's own word, since it has a default.
    let experts = config.remove("num_experts").unwrap_or_else(|| 0.into());
    config.insert("num_local_experts".into(), experts);
    if let Some(channels) = metadata.unsigned(&key("expert_shared_feed_forward_length"))? {
        config.insert("shared_intermediate_size".into(), channels.into());
    }
    Ok(())
}

/// A number, or the one of a list that is not 0.
pub(super) fn largest(metadata: Metadata<'_>, key: &str) -> Result<Option<u64>, String> {
    let Ok(Some(list)) = metadata.numbers(key) else { return metadata.unsigned(key) };
    let mut found = None;
    for item in list {
        let number = match item {
            Stored::Unsigned(number) => number,
            Stored::Signed(number) => u64::try_from(number).map_err(|_| format!("{key} has {number}"))?,
            _ => return Err(format!("{key} is no list of whole numbers")),
        };
        match found {
            _ if number == 0 => {}
            Some(other) if other != number => {
                return Err(format!("{key} has {other} and {number}: layers of one width are supported"));
            }
            _ => found = Some(number),
        }
    }
    Ok(found)
}
