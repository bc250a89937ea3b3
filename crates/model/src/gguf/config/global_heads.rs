//! Heads of Gemma 4 in a file's metadata, in config.json's words, and MLPs. Layers without a window
//! have wider and fewer heads. The last layers may read the keys and values of others, and then
//! have wider MLPs.

use serde_json::{Map, Value, json};

use super::super::values::{Metadata, Value as Stored, whole};
use super::Key;

/// Base of the rotation in windows unless the file says otherwise (llama.cpp's `llama_hparams`).
const WINDOW_BASE: f64 = 10_000.0;

/// Widths and numbers of heads, and rotations. `has` says whether a layer has a tensor.
pub(super) fn take(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    for (kind, field) in [("", "global_head_dim"), ("_swa", "head_dim")] {
        let width = |what: &str| {
            let name = key(&format!("{what}{kind}"));
            metadata.unsigned(&name)?.ok_or_else(|| format!("it has no {name}"))
        };
        let heads = width("attention.key_length")?;
        for what in ["attention.value_length", "rope.dimension_count"] {
            let found = width(what)?;
            if found != heads {
                let name = key(&format!("{what}{kind}"));
                return Err(format!("{name} is {found} and heads are {heads} wide: both must be equal"));
            }
        }
        config.insert(field.into(), heads.into());
    }
    for (suffix, field) in [
        ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        ("attention.shared_kv_layers", "num_kv_shared_layers"),
    ] {
        config.insert(field.into(), metadata.unsigned(&key(suffix))?.unwrap_or(0).into());
    }
    if let Some(vocab) = config.get("vocab_size").cloned() {
        config.insert("vocab_size_per_layer_input".into(), vocab);
    }
    let number = |name: &str| config.get(name).and_then(Value::as_f64);
    let sets = json!({
        "full_attention": { "rope_type": "default", "rope_theta": number("rope_theta").unwrap_or(WINDOW_BASE) },
        "sliding_attention": { "rope_type": "default", "rope_theta": number("rope_local_base_freq").unwrap_or(WINDOW_BASE) },
    });
    config.insert("rope_parameters".into(), sets);
    take_kv_heads(metadata, key, has, config)
}

/// How many of `layers`, the first ones, have keys and values of their own.
fn own_layers(metadata: Metadata<'_>, key: &Key<'_>, layers: usize) -> Result<usize, String> {
    let shared = metadata.unsigned(&key("attention.shared_kv_layers"))?.unwrap_or(0);
    Ok(layers.saturating_sub(usize::try_from(shared).unwrap_or(usize::MAX)))
}

/// Channels of the MLPs: of all layers, or of each.
pub(super) fn take_channels(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let name = key("feed_forward_length");
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0) as usize;
    let mut channels = metadata.unsigned(&name).ok().flatten();
    if let Ok(Some(list)) = metadata.numbers(&name) {
        let counts = list.map(|count| whole(&count)).collect::<Option<Vec<u64>>>().unwrap_or_default();
        let own = own_layers(metadata, key, layers)?;
        let usual = counts.first().copied().unwrap_or(0);
        let is_wide = counts.get(own) == usual.checked_mul(2).as_ref();
        let later = if is_wide { 2 * usual } else { usual };
        let mut expected = (0..layers).map(|layer| if layer < own { usual } else { later });
        if counts.len() != layers || counts.iter().any(|count| expected.next() != Some(*count)) {
            return Err(format!(
                "{name} differs from layer to layer: only layers without keys of their own may have twice the channels"
            ));
        }
        config.insert("use_double_wide_mlp".into(), is_wide.into());
        channels = Some(usual);
    }
    if let Some(channels) = channels {
        config.insert("intermediate_size".into(), channels.into());
    }
    Ok(())
}

/// KV heads of both kinds of layers.
fn take_kv_heads(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    has: &dyn Fn(u64, &str) -> bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let [in_windows, global] = kv_heads_of_kinds(metadata, key, config)?;
    let (name, slides) = (key("attention.head_count_kv"), slides(key, config)?);
    let own = own_layers(metadata, key, slides.len())?;
    let layers = (0u64..).zip(&slides[..own]).filter(|(_, slides)| !**slides);
    let with_values = layers.clone().filter(|(layer, _)| has(*layer, "attn_v.weight")).count();
    if with_values > 0 && with_values < layers.count() {
        return Err("some layers without a window have an attn_v and some have none: all or none must".into());
    }
    if with_values > 0 && global != in_windows && in_windows.is_some() {
        return Err(format!(
            "{name} differs from layer to layer: layers without a window must have no attn_v then"
        ));
    }
    config.insert("attention_k_eq_v".into(), (with_values == 0).into());
    if let Some(heads) = in_windows.or(global) {
        config.insert("num_key_value_heads".into(), heads.into());
    }
    if let Some(heads) = global {
        config.insert("num_global_key_value_heads".into(), heads.into());
    }
    Ok(())
}

/// KV heads of layers with a window, and of the others.
pub(super) fn kv_heads_of_kinds(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    config: &Map<String, Value>,
) -> Result<[Option<u64>; 2], String> {
    let slides = slides(key, config)?;
    let name = key("attention.head_count_kv");
    let counts: Vec<Stored> = match metadata.numbers(&name) {
        Ok(Some(list)) if list.len() >= slides.len() => list.take(slides.len()).collect(),
        Ok(Some(list)) => return Err(format!("{name} has {} items for {} layers", list.len(), slides.len())),
        _ => {
            let all = metadata.unsigned(&name)?.ok_or_else(|| format!("it has no {name}"))?;
            vec![Stored::Unsigned(all); slides.len()]
        }
    };
    let of_kind = |slide: bool| -> Result<Option<u64>, String> {
        let mut found =
            slides.iter().zip(&counts).filter(|(slides, _)| **slides == slide).map(|(_, count)| count);
        let Some(first) = found.next() else { return Ok(None) };
        if let Some(other) = found.find(|other| *other != first) {
            let (first, other) = (first.describe(), other.describe());
            return Err(format!(
                "{name} has {first} and {other} for layers of one kind: one number is supported"
            ));
        }
        whole(first)
            .map(Some)
            .ok_or_else(|| format!("{name} has {}, no whole number of at least 0", first.describe()))
    };
    Ok([of_kind(true)?, of_kind(false)?])
}

/// Which layers have a window.
pub(super) fn slides(key: &Key<'_>, config: &Map<String, Value>) -> Result<Vec<bool>, String> {
    match config.get("layer_types") {
        Some(Value::Array(kinds)) => Ok(kinds.iter().map(|kind| kind == "sliding_attention").collect()),
        _ => Err(format!("it has no {}", key("attention.sliding_window"))),
    }
}
