//! Layers of Nemotron-H in a file's metadata, in config.json's words.

use serde_json::{Map, Value, json};

use super::super::values::{Metadata, Value as Stored};
use super::{Key, MOST_LAYERS};

/// Keys with a list that has 0 for layers without this part.
pub(super) const DIFFERS: [&str; 2] = ["feed_forward_length", "attention.head_count_kv"];

/// Whole numbers that a file must have, and their fields.
const NUMBERS: [(&str, &str); 4] = [
    ("ssm.conv_kernel", "conv_kernel"),
    ("ssm.state_size", "ssm_state_size"),
    ("ssm.group_count", "n_groups"),
    // Of Mamba-2 this is the number of heads.
    ("ssm.time_step_rank", "mamba_num_heads"),
];

/// The pattern of layers, and the shape of state spaces. `has` says whether a layer has a tensor.
pub(super) fn take_blocks(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let needed =
        |name: &str| metadata.unsigned(&key(name))?.ok_or_else(|| format!("it has no {}", key(name)));
    for (suffix, field) in NUMBERS {
        config.insert(field.into(), needed(suffix)?.into());
    }
    let (inner, heads) = (needed("ssm.inner_size")?, needed("ssm.time_step_rank")?);
    if heads == 0 || !inner.is_multiple_of(heads) {
        return Err(format!("{} is {inner}, no multiple of the {heads} heads", key("ssm.inner_size")));
    }
    config.insert("mamba_head_dim".into(), (inner / heads).into());
    let all = needed("block_count")?;
    let further = metadata.unsigned(&key("nextn_predict_layers"))?.unwrap_or(0);
    let layers = all.saturating_sub(further);
    if !(1..=MOST_LAYERS).contains(&layers) {
        return Err(format!("{} is {all}: 1 to {MOST_LAYERS} layers must be left", key("block_count")));
    }
    let letter = |layer: u64| match () {
        () if has(layer, "ssm_in.weight") => Ok("M"),
        () if has(layer, "attn_q.weight") => Ok("*"),
        () if has(layer, "ffn_gate_inp.weight") => Ok("E"),
        () if has(layer, "ffn_up.weight") => Ok("-"),
        () => Err(format!("layer {layer} has no ssm_in, attn_q, ffn_gate_inp or ffn_up")),
    };
    let pattern = (0..layers).map(letter).collect::<Result<String, _>>()?;
    config.insert("hybrid_override_pattern".into(), pattern.into());
    for (suffix, field) in [
        ("attention.head_count_kv", "num_key_value_heads"),
        ("feed_forward_length", "intermediate_size"),
        ("moe_latent_size", "moe_latent_size"),
    ] {
        if let Some(number) = largest(metadata, &key(suffix))?.filter(|number| *number > 0) {
            config.insert(field.into(), json!(number));
        }
    }
    Ok(())
}

/// A number, or the one of a list that is not 0.
fn largest(metadata: Metadata<'_>, key: &str) -> Result<Option<u64>, String> {
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
