//! Experts and latent attention of a file's metadata, in config.json's words.

use serde_json::{Map, Value, json};

use super::super::values::{Metadata, Value as Stored};
use super::{Family, Key};

/// Whole numbers, and their fields.
const NUMBERS: [(&str, &str); 8] = [
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("expert_shared_count", "n_shared_experts"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
];

/// What a router makes of its logits, by the numbers in `expert_gating_func`.
const GATING: [(u64, &str); 4] = [(1, "softmax"), (2, "sigmoid"), (3, "softmax"), (4, "sqrtsoftplus")];

/// Adds what a file says of its experts. `corrected`: the files have a correction of the choice.
pub(super) fn take_experts(
    metadata: Metadata<'_>,
    family: &Family,
    key: &Key<'_>,
    corrected: bool,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    for (suffix, field) in NUMBERS {
        if let Some(number) = metadata.same_everywhere(&key(suffix))? {
            config.insert(field.into(), number.into());
        }
    }
    if family.plain_shared
        && let Some(channels) = config.remove("shared_expert_intermediate_size")
    {
        config.insert("moe_shared_expert_intermediate_size".into(), channels);
    }
    if let Some(step) = metadata.unsigned(&key("interleave_moe_layer_step"))?.filter(|step| *step > 0) {
        config.insert("interleave_moe_layer_step".into(), step.into());
    }
    if config.get("n_group") == Some(&json!(1)) {
        config.remove("n_group");
    }
    // 0 stands for no factor.
    if let Some(scale) = metadata.float(&key("expert_weights_scale"))?.filter(|scale| *scale != 0.0) {
        config.insert("routed_scaling_factor".into(), json!(scale));
    }
    if let Some(renormalise) = family.renormalise {
        let found = metadata.bool(&key("expert_weights_norm"))?.unwrap_or(renormalise);
        config.insert("norm_topk_prob".into(), found.into());
    }
    let name = key("expert_gating_func");
    let gating =
        match metadata.unsigned(&name)? {
            // 0 stands for unsaid: then `model_type` says it. Of DeepSeek's routers, only those
            // with a sigmoid have corrections.
            None | Some(0) => (corrected && family.latent).then_some("sigmoid"),
            Some(number) => {
                let found = GATING.iter().find(|(known, _)| *known == number).map(|(_, name)| *name);
                Some(found.ok_or_else(|| {
                    format!("{name} is {number}: 1 (softmax), 2 (sigmoid), 3 and 4 are known")
                })?)
            }
        };
    if let Some(gating) = gating {
        config.insert("scoring_func".into(), gating.into());
    }
    Ok(())
}

/// The layers before the first one that has experts, in files that do not say how many they are.
pub(super) fn take_first_experts(has: &dyn Fn(u64, &str) -> bool, config: &mut Map<String, Value>) {
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or_default();
    if let Some(first) = (0..layers).find(|layer| has(*layer, "ffn_gate_inp.weight")) {
        config.insert("first_k_dense_replace".into(), first.into());
    }
}

/// Tokens of the context from which on files of GLM-5 that do not say which layers select are
/// those of version 5.2, where few do (llama.cpp's glm-dsa.cpp).
const FEW_SELECT_CONTEXT: u64 = 1 << 20;

/// Adds how an indexer selects tokens.
pub(super) fn take_indexer(
    metadata: Metadata<'_>,
    family: &Family,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    for (suffix, field) in [
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
    ] {
        let name = key(suffix);
        let number = metadata.unsigned(&name)?.ok_or_else(|| format!("it has no {name}"))?;
        config.insert(field.into(), number.into());
    }
    let context = config.get("max_position_embeddings").and_then(Value::as_u64).unwrap_or(0);
    let types = metadata.numbers(&key("attention.indexer.types"))?;
    match types {
        Some(types) => {
            let kind = |selects: bool| if selects { "full" } else { "shared" };
            let types = types.map(|item| kind(matches!(item, Stored::Bool(true) | Stored::Unsigned(1..))));
            config.insert("indexer_types".into(), types.collect());
        }
        None if family.model_type == "glm_moe_dsa" && context >= FEW_SELECT_CONTEXT => {
            config.insert("index_topk_freq".into(), 4.into());
            config.insert("index_skip_topk_offset".into(), 3.into());
        }
        None => {}
    }
    Ok(())
}

/// Adds the widths of latent attention.
pub(super) fn take_latent(
    metadata: Metadata<'_>,
    family: &Family,
    key: &Key<'_>,
    config: &mut Map<String, Value>,
) -> Result<(), String> {
    let number = |name: &str| metadata.unsigned(&key(name));
    let needed = |name: &str| number(name)?.ok_or_else(|| format!("it has no {}", key(name)));
    // Files that store `kv_b` whole give the heads' widths under the usual keys.
    let given = |name: &str| match number(&format!("attention.{name}_length_mla"))? {
        Some(width) => Ok(Some(width)),
        None => number(&format!("attention.{name}_length")),
    };
    let width = |name: &str| {
        given(name)?.ok_or_else(|| format!("it has no {}", key(&format!("attention.{name}_length"))))
    };
    let (heads, rotated) = (width("key")?, needed("rope.dimension_count")?);
    let values = match family.model_type {
        // Files of MiniCPM 3 leave it unsaid (llama.cpp's `n_embd_head_v`).
        "minicpm3" => {
            given("value")?.unwrap_or(needed("embedding_length")? / needed("attention.head_count")?.max(1))
        }
        _ => width("value")?,
    };
    let plain = heads.checked_sub(rotated).filter(|plain| *plain > 0);
    let plain = plain
        .ok_or_else(|| format!("{} is {rotated}, but heads are {heads} wide", key("rope.dimension_count")))?;
    for (field, value) in [
        ("kv_lora_rank", needed("attention.kv_lora_rank")?),
        ("qk_nope_head_dim", plain),
        ("qk_rope_head_dim", rotated),
        ("v_head_dim", values),
    ] {
        config.insert(field.into(), value.into());
    }
    if let Some(rank) = number("attention.q_lora_rank")?.filter(|rank| *rank > 0) {
        config.insert("q_lora_rank".into(), rank.into());
    }
    // All heads share the compressed vector, which the key calls one KV head.
    config.remove("num_key_value_heads");
    config.remove("head_dim");
    Ok(())
}
