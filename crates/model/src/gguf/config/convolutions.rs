//! Gated short convolutions in a file's metadata (LFM2), in config.json's words.

use serde_json::{Map, Value};

use super::super::values::Metadata;
use super::{Key, hybrid};

/// What the layers are. `has` says whether a layer has a tensor.
pub(super) fn take(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let kernel = key("shortconv.l_cache");
    let taps = metadata.unsigned(&kernel)?.ok_or_else(|| format!("it has no {kernel}"))?;
    config.insert("conv_L_cache".into(), taps.into());
    // The list has 0 for layers with a convolution.
    if let Some(heads) = hybrid::largest(metadata, &key("attention.head_count_kv"))? {
        config.insert("num_key_value_heads".into(), heads.into());
    }
    config.insert("block_auto_adjust_ff_dim".into(), false.into());
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or_default();
    let attention =
        if config.contains_key("sliding_window") { "sliding_attention" } else { "full_attention" };
    let kind = |layer: u64| if has(layer, "shortconv.in_proj.weight") { "conv" } else { attention };
    config.insert("layer_types".into(), (0..layers).map(kind).collect());
    Ok(())
}
