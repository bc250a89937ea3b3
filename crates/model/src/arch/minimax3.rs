//! MiniMax M3 in config.json.

use serde::Deserialize;
use serde_json::{Value, json};

/// Fields of published files, and those that transformers 5 writes in place of the nested ones.
#[derive(Debug, Deserialize)]
struct Published {
    dense_intermediate_size: Option<u64>,
    shared_intermediate_size: Option<u64>,
    /// 1 for layers with experts.
    moe_layer_freq: Option<Vec<u8>>,
    sparse_attention_config: Option<Sparse>,
    index_block_size: Option<u64>,
    index_topk_blocks: Option<u64>,
    layer_types: Option<Vec<String>>,
    max_position_embeddings: Option<u64>,
    #[serde(default = "yes")]
    use_gemma_norm: bool,
}

#[derive(Debug, Default, Deserialize)]
struct Sparse {
    sparse_block_size: Option<u64>,
    sparse_topk_blocks: Option<u64>,
    /// 1 for layers that attend to selected blocks of tokens.
    sparse_attention_freq: Option<Vec<u8>>,
}

const fn yes() -> bool {
    true
}

/// The config with the field names that other families' readers need. Missing fields have the
/// defaults of transformers' MiniMaxM3VLTextConfig.
///
/// The context ends where a selection of blocks would begin to leave tokens out: up to there, each
/// token attends to all before it, so no indexer is needed.
pub(super) fn in_common_names(mut text: Value) -> Result<Value, String> {
    let published = Published::deserialize(&text).map_err(|error| error.to_string())?;
    if !published.use_gemma_norm {
        return Err("use_gemma_norm is false: true is supported".into());
    }
    let Some(fields) = text.as_object_mut() else { return Err("it is no object".into()) };
    let dense = published.dense_intermediate_size.unwrap_or(12_288);
    fields.insert("intermediate_size_mlp".into(), dense.into());
    let shared = published.shared_intermediate_size.unwrap_or(3072);
    fields.insert("moe_shared_expert_intermediate_size".into(), shared.into());
    // A base outside of rope_parameters would go before the one inside.
    if !fields.contains_key("rope_parameters") {
        fields.entry("rope_theta").or_insert_with(|| json!(5_000_000.0));
    }
    // The activation's parameters are elsewhere, and transformers uses another name than published
    // files.
    fields.insert("hidden_act".into(), "silu".into());
    if let Some(list) = &published.moe_layer_freq {
        fields.remove("moe_layer_freq");
        let kinds = list.iter().map(|item| if *item == 0 { "dense" } else { "sparse" });
        fields.entry("mlp_layer_types").or_insert_with(|| kinds.collect());
    }
    let sparse = published.sparse_attention_config.unwrap_or_default();
    let selects = match (&published.layer_types, &sparse.sparse_attention_freq) {
        (Some(types), _) => types.iter().any(|kind| kind != "full_attention"),
        (None, Some(layers)) => layers.contains(&1),
        (None, None) => false,
    };
    fields.remove("layer_types");
    if selects {
        let block = sparse.sparse_block_size.or(published.index_block_size).unwrap_or(128);
        let chosen = sparse.sparse_topk_blocks.or(published.index_topk_blocks).unwrap_or(16);
        let whole = block.saturating_mul(chosen);
        let context = published.max_position_embeddings.unwrap_or(u64::MAX).min(whole);
        fields.insert("max_position_embeddings".into(), json!(context));
    }
    Ok(text)
}
