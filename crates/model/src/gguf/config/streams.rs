//! Several residual streams in a file's metadata, and what else GLM-5.3 and DeepSeek V4 have, in
//! config.json's words.

use serde_json::{Map, Value, json};

use super::super::values::{Metadata, Value as Stored};
use super::Key;

/// Keys of whole numbers that a file must have, and their fields.
type Numbers = [(&'static str, &'static str)];

fn take_numbers(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    numbers: &Numbers,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    for (suffix, field) in numbers {
        let name = key(suffix);
        let number = metadata.unsigned(&name)?.ok_or_else(|| format!("it has no {name}"))?;
        config.insert((*field).into(), number.into());
    }
    Ok(())
}

/// The streams, and the limit of gates.
pub(super) fn take(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let numbers = [
        ("hyper_connection.count", "hc_mult"),
        ("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
    ];
    take_numbers(metadata, key, &numbers, config)?;
    if let Some(eps) = metadata.float(&key("hyper_connection.epsilon"))? {
        config.insert("hc_eps".into(), json!(eps));
    }
    let name = key("swiglu_clamp_exp");
    if let Some(limit) = same_float(metadata, &name)? {
        let shared = key("swiglu_clamp_shexp");
        if let Some(other) = same_float(metadata, &shared)?.filter(|other| *other != limit) {
            return Err(format!("{shared} is {other} and {name} {limit}: one limit is supported"));
        }
        config.insert("swiglu_limit".into(), json!(limit));
    }
    Ok(())
}

/// GLM-5.3's keys of several tokens, and bound of decays.
pub(super) fn take_glm53(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    take_numbers(metadata, key, &[("attention.indexer.kpool", "index_kpool")], config)?;
    if let Some(tail) = metadata.bool(&key("attention.indexer.kpool_select_tail"))? {
        config.insert("index_kpool_always_select_tail".into(), tail.into());
    }
    // Null: decays have no bound.
    config.insert("linear_lower_bound".into(), json!(metadata.float(&key("kda.gate_lower_bound"))?));
    // That of another norm, which no file of this family changes.
    config.remove("layer_norm_eps");
    let number = |field: &str| config.get(field).and_then(Value::as_u64).unwrap_or_default();
    let (layers, dense) = (number("num_hidden_layers"), number("first_k_dense_replace"));
    let kinds = (0..layers).map(|layer| if layer < dense { "dense" } else { "sparse" }).collect();
    config.insert("mlp_layer_types".into(), kinds);
    Ok(())
}

/// DeepSeek V4's attention to compressed tokens, and layers whose experts a table gives.
pub(super) fn take_deepseek4(
    metadata: Metadata<'_>,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let numbers = [
        ("attention.q_lora_rank", "q_lora_rank"),
        ("rope.dimension_count", "qk_rope_head_dim"),
        ("attention.output_group_count", "o_groups"),
        ("attention.output_lora_rank", "o_lora_rank"),
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
        ("hash_layer_count", "num_hash_layers"),
    ];
    take_numbers(metadata, key, &numbers, config)?;
    if let Some(base) = metadata.float(&key("attention.compress_rope_freq_base"))? {
        config.insert("compress_rope_theta".into(), json!(base));
    }
    // Every layer has a window; what else they attend to, the ratios say.
    config.remove("layer_types");
    let name = key("attention.compress_ratios");
    let ratios = metadata.numbers(&name)?.ok_or_else(|| format!("it has no {name}"))?;
    let ratio = |item: Stored| match item {
        Stored::Unsigned(number) => Ok(number),
        Stored::Signed(number) => u64::try_from(number).map_err(|_| format!("{name} has {number}")),
        _ => Err(format!("{name} is no list of whole numbers")),
    };
    let ratios = ratios.map(ratio).collect::<Result<Value, String>>()?;
    config.insert("compress_ratios".into(), ratios);
    Ok(())
}

/// A number, or the one that a list has for every layer.
fn same_float(metadata: Metadata<'_>, key: &str) -> Result<Option<f64>, String> {
    let Ok(Some(mut list)) = metadata.numbers(key) else { return metadata.float(key) };
    let Some(Stored::Float(first)) = list.next() else { return Err(format!("{key} is no list of numbers")) };
    match list.find(|item| *item != Stored::Float(first)) {
        None => Ok(Some(first)),
        Some(other) => Err(format!("{key} has {first} and {}: one limit is supported", other.describe())),
    }
}
