//! Heads of MiMo V2 in a file's metadata, in config.json's words. Layers with a window have another
//! number of KV heads.

use serde_json::{Map, Value, json};

use super::super::values::Metadata;
use super::Key;
use super::global_heads::{kv_heads_of_kinds, slides};

/// Numbers of KV heads, the factor of values, and which layers have sinks. `has` says whether a
/// layer has a tensor.
pub(super) fn take(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let [in_windows, others] = kv_heads_of_kinds(metadata, key, config)?;
    if let Some(heads) = others.or(in_windows) {
        config.insert("num_key_value_heads".into(), heads.into());
    }
    if let Some(heads) = in_windows {
        config.insert("swa_num_key_value_heads".into(), heads.into());
    }
    let scale = metadata.float(&key("attention.value_scale"))?.filter(|scale| *scale != 0.0);
    config.insert("attention_value_scale".into(), json!(scale.unwrap_or(1.0)));
    let slides = slides(key, config)?;
    let sinks = [true, false].map(|kind| {
        let mut layers = (0..).zip(&slides).filter(|(_, slides)| **slides == kind).peekable();
        layers.peek().is_some() && layers.all(|(layer, _)| has(layer, "attn_sinks.weight"))
    });
    config.insert("add_swa_attention_sink_bias".into(), sinks[0].into());
    config.insert("add_full_attention_sink_bias".into(), sinks[1].into());
    Ok(())
}
