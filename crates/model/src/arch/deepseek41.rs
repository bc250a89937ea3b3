//! DeepSeek V4.1 in config.json: layers that share compressed tokens and the choice of them.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;
use thunder_compute::{Rope, SelectionBlocks};

use super::config;
use super::deepseek4::{COMPRESS_ROPE, Compression, MAIN_ROPE, check_counts, check_rotated, heads, ropes};
use crate::error::ModelError;
use crate::spec::{BlocksShape, CompressedShape, CompressionShape, SelectionShape, SourcesShape};

/// The fields of config.json.
#[derive(Debug, Deserialize)]
struct Fields {
    head_dim: usize,
    q_lora_rank: usize,
    qk_rope_head_dim: usize,
    sliding_window: usize,
    o_groups: usize,
    o_lora_rank: usize,
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    #[serde(default = "compress_rope_theta")]
    compress_rope_theta: f64,
    /// Tokens that become one, for each layer; 0 for layers that attend to a window only.
    compress_ratios: Vec<usize>,
    /// Layers that compress tokens, which the layers after them read.
    kv_source_layer_ids: BTreeSet<usize>,
    /// Layers that choose compressed tokens, also for the layers after them.
    index_source_layer_ids: BTreeSet<usize>,
    /// The layer that chooses the blocks within which later layers choose; a negative number: none.
    #[serde(default = "no_layer")]
    candidate_source_layer_id: i64,
    #[serde(default)]
    candidate_topk_blocks: usize,
    #[serde(default)]
    candidate_block_size: usize,
    gate_temp: Option<f64>,
    hc_pre_from_prev_sublayer: Option<bool>,
    q_head_norm: Option<bool>,
    num_hash_layers: Option<usize>,
}

const fn compress_rope_theta() -> f64 {
    160_000.0
}
const fn no_layer() -> i64 {
    -1
}

/// Attention of a model.
#[derive(Debug)]
pub(super) struct Config {
    fields: Fields,
}

impl Config {
    pub fn read(text: &Value) -> Result<Self, String> {
        let fields = Fields::deserialize(text).map_err(|error| error.to_string())?;
        check_counts([
            fields.q_lora_rank,
            fields.sliding_window,
            fields.o_groups,
            fields.o_lora_rank,
            fields.index_n_heads,
            fields.index_head_dim,
            fields.index_topk,
        ])?;
        // Cached vectors are rounded in groups of 32 columns.
        for (field, value) in [("head_dim", fields.head_dim), ("index_head_dim", fields.index_head_dim)] {
            if value % 32 != 0 {
                return Err(format!("{field} is {value}: a multiple of 32 is supported"));
            }
        }
        check_rotated(fields.qk_rope_head_dim, fields.head_dim.min(fields.index_head_dim))?;
        if let Some(ratio) = fields.compress_ratios.iter().find(|ratio| **ratio > 2) {
            return Err(format!("compress_ratios has {ratio}: 0, 1 and 2 are known"));
        }
        if fields.gate_temp.is_some_and(|temperature| temperature != 1.0) {
            return Err(format!("gate_temp is {:?}: 1 is supported", fields.gate_temp));
        }
        if fields.hc_pre_from_prev_sublayer == Some(false) || fields.q_head_norm == Some(true) {
            return Err(format!(
                "hc_pre_from_prev_sublayer is {:?} and q_head_norm {:?}: true and false are supported",
                fields.hc_pre_from_prev_sublayer, fields.q_head_norm
            ));
        }
        if fields.num_hash_layers.is_some_and(|layers| layers > 0) {
            return Err(format!("num_hash_layers is {:?}: 0 is supported", fields.num_hash_layers));
        }
        Ok(Self { fields })
    }

    /// A layer's attention.
    pub fn shape(&self, layer: usize, config: &config::Config) -> Result<CompressedShape, String> {
        let Fields { head_dim, q_lora_rank, qk_rope_head_dim, sliding_window, .. } = self.fields;
        let Fields { o_groups, o_lora_rank, .. } = self.fields;
        let heads = heads(config, o_groups)?;
        self.check_layers(config.num_hidden_layers)?;
        let compression = self.compression(layer)?;
        Ok(CompressedShape {
            heads,
            dim: head_dim,
            rotated: qk_rope_head_dim,
            query_rank: q_lora_rank,
            norm_eps: config.rms_norm_eps,
            query_norm: false,
            rounds: true,
            window: sliding_window,
            rope: if compression.is_none() { MAIN_ROPE } else { COMPRESS_ROPE },
            groups: o_groups,
            group_rank: o_lora_rank,
            compression,
        })
    }

    /// The rotations of layers that attend to a window only, and of the others.
    pub fn ropes(
        &self,
        config: &config::Config,
        malformed: &dyn Fn(String) -> ModelError,
    ) -> Result<Vec<Rope>, ModelError> {
        let Fields { qk_rope_head_dim, compress_rope_theta, .. } = self.fields;
        ropes(config, Compression { rotated: qk_rope_head_dim, theta: compress_rope_theta }, malformed)
    }

    /// Refuses lists that are too short for the layers, or name others.
    fn check_layers(&self, layers: usize) -> Result<(), String> {
        let Fields { compress_ratios, candidate_source_layer_id: blocks, .. } = &self.fields;
        let Fields { kv_source_layer_ids: kv, index_source_layer_ids: index, .. } = &self.fields;
        if compress_ratios.len() < layers {
            return Err(format!("compress_ratios has {} entries for {layers} layers", compress_ratios.len()));
        }
        let named = [
            ("kv_source_layer_ids", kv.last().copied()),
            ("index_source_layer_ids", index.last().copied()),
            ("candidate_source_layer_id", usize::try_from(*blocks).ok()),
        ];
        match named.into_iter().find_map(|(field, layer)| Some((field, layer.filter(|id| *id >= layers)?))) {
            None => Ok(()),
            Some((field, layer)) => Err(format!("{field} names layer {layer}: there are {layers} layers")),
        }
    }

    fn ratio(&self, layer: usize) -> usize {
        self.fields.compress_ratios.get(layer).copied().unwrap_or(0)
    }

    fn compression(&self, layer: usize) -> Result<Option<CompressionShape>, String> {
        let Fields { index_n_heads, index_head_dim, index_topk, .. } = self.fields;
        let Fields { kv_source_layer_ids: kv, index_source_layer_ids: index, .. } = &self.fields;
        let every = self.ratio(layer);
        if every == 0 {
            return match kv.contains(&layer) || index.contains(&layer) {
                false => Ok(None),
                true => {
                    Err(format!("layer {layer} compresses no tokens by compress_ratios, but is a source"))
                }
            };
        }
        let from = |what: &str, source: Option<&usize>| {
            let source = *source.ok_or_else(|| format!("layer {layer} has no {what} of a layer up to it"))?;
            match self.ratio(source) == every {
                true => Ok((source != layer).then_some(source)),
                false => Err(format!(
                    "layer {layer} reads {what} of layer {source}, whose entry of compress_ratios is another"
                )),
            }
        };
        let of_keys = kv.range(..=layer).rev().find(|source| index.contains(source));
        let sources = SourcesShape {
            entries: from("kv_source_layer_ids", kv.range(..=layer).next_back())?,
            keys: from("keys", of_keys)?,
            selection: from("index_source_layer_ids", index.range(..=layer).next_back())?,
            blocks: self.blocks(layer, every)?,
        };
        let selection = SelectionShape {
            heads: index_n_heads,
            dim: index_head_dim,
            chosen: index_topk,
            rope: Some(COMPRESS_ROPE),
            pool: 1,
            selects: sources.selection.is_none(),
        };
        Ok(Some(CompressionShape {
            every,
            overlaps: false,
            selection: Some(selection),
            sources: Some(sources),
        }))
    }

    /// The blocks that a layer chooses, or chooses within.
    fn blocks(&self, layer: usize, every: usize) -> Result<Option<BlocksShape>, String> {
        let Fields { candidate_source_layer_id, candidate_topk_blocks: chosen, .. } = self.fields;
        let Fields { candidate_block_size: keys, index_topk, .. } = self.fields;
        let source = usize::try_from(candidate_source_layer_id).ok().filter(|_| chosen > 0);
        let Some(source) = source else { return Ok(None) };
        let index = &self.fields.index_source_layer_ids;
        if layer < source || !index.contains(&layer) {
            return Ok(None);
        }
        if !index.contains(&source) || self.ratio(source) != every {
            return Err(format!(
                "candidate_source_layer_id is {source}: it must be one of index_source_layer_ids with as many \
                 tokens in one as layer {layer}"
            ));
        }
        // The newest block may have one key only.
        if !(1..=1 << 20).contains(&keys) || chosen > 1 << 20 || (chosen - 1) * keys < index_topk {
            return Err(format!(
                "candidate_topk_blocks is {chosen} and candidate_block_size {keys}: one block less must have \
                 {index_topk} keys (index_topk)"
            ));
        }
        let blocks = SelectionBlocks { keys, chosen };
        Ok(Some(BlocksShape { blocks, chooses: layer == source }))
    }
}
