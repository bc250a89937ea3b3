//! The memory of each rank of a plan, from headers alone.

use std::ops::Range;

use thunder_compute::{Extra, KvFormat};
use thunder_cost::idle_experts;

use super::experts::held_experts;
use super::mlp::channel_unit;
use super::sources::Sources;
use crate::error::ModelError;
use crate::folder::ModelFolder;
use crate::plan::{Shard, ShardPlan};
use crate::spec::{FeedForwardSpec, MixerSpec};
use crate::weights::LayerRole;

/// The memory of one rank's part of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShardFootprint {
    /// Layers that the rank computes.
    pub layers: Range<usize>,
    /// Query heads of its first attention layer.
    pub queries: Range<usize>,
    /// KV heads of its first attention layer.
    pub kv: Range<usize>,
    /// Channels of its first feed-forward; for experts, those of each routed expert.
    pub channels: Range<usize>,
    /// Routed experts of its first layer with experts; 0 if no layer has some.
    pub experts: usize,
    /// Those that the rank holds.
    pub held_experts: Range<usize>,
    /// Number of routed experts that a token uses.
    pub chosen: usize,
    /// Vocabulary rows.
    pub vocab: Range<usize>,
    /// Bytes of weights in the files.
    pub file_bytes: u64,
    /// Bytes of weights in memory, as those that follow: some formats take more than in files.
    pub weight_bytes: u64,
    /// Bytes of the weights of routed experts.
    pub routed_bytes: u64,
    /// Bytes of the weights of the layer that predicts further tokens, if the rank has it.
    pub ahead_bytes: u64,
    /// Bytes of tables indexed by the last tokens; a token reads only a few rows.
    pub table_bytes: u64,
    /// Bytes of the embedding if it is not also the output head: a token reads only one row.
    pub lookup_bytes: u64,
    /// Bytes of KV cache for each token.
    pub kv_bytes_per_token: u64,
    /// Bytes of one token in the largest buffer of the KV cache.
    pub largest_kv_bytes_per_token: u64,
    /// Bytes of state for each sequence, whatever its length.
    pub state_bytes_per_sequence: u64,
    /// Operations that the rank needs and that some backends lack.
    pub needs: Vec<Extra>,
}

impl ShardFootprint {
    /// Average bytes of weights that a step of `tokens` sequences with one token each reads.
    /// Excludes the layer that predicts further tokens, and tables of which a token reads a few
    /// rows.
    pub fn read_bytes(&self, tokens: usize) -> u64 {
        let idle_share = idle_experts(self.experts as f64, self.chosen as f64, tokens as f64);
        let idle = self.routed_bytes as f64 * idle_share;
        self.weight_bytes - self.ahead_bytes - self.table_bytes - self.lookup_bytes - idle as u64
    }
}

/// The footprint of each rank of a plan, with the KV cache in this format. Reads headers only.
///
/// # Errors
/// When a tensor is missing or has another shape than the config implies.
pub fn shard_footprints(
    folder: &ModelFolder,
    plan: &ShardPlan,
    kv: KvFormat,
) -> Result<Vec<ShardFootprint>, ModelError> {
    (0..plan.ranks()).map(|rank| footprint(folder, plan.shard(rank), kv)).collect()
}

fn footprint(folder: &ModelFolder, shard: Shard<'_>, kv: KvFormat) -> Result<ShardFootprint, ModelError> {
    let sources = Sources::describe(folder, shard)?;
    let layers = || shard.layers().map(|index| (index, &folder.spec.layers[index]));
    let heads = layers().find_map(|(_, layer)| {
        let MixerSpec::Attention(attention) = &layer.mixer else { return None };
        Some(shard.heads(attention))
    });
    let channels = layers().find_map(|(index, layer)| match &layer.feed_forward {
        FeedForwardSpec::None => None,
        FeedForwardSpec::Mlp(mlp) => {
            let unit = channel_unit(&*folder.weights, LayerRole::Down.of(index));
            Some(unit.map(|unit| shard.channels(mlp.channels, unit)))
        }
        FeedForwardSpec::Experts(experts) => {
            Some(held_experts(&*folder.weights, shard, index, experts).map(|(_, channels)| channels))
        }
        FeedForwardSpec::Both(both) => {
            Some(held_experts(&*folder.weights, shard, index, &both.experts).map(|(_, channels)| channels))
        }
    });
    let channels = channels.transpose()?.unwrap_or(0..0);
    let experts_of = layers().find_map(|(index, layer)| Some((index, layer.feed_forward.experts()?)));
    let (experts, chosen) = experts_of.map_or((0, 0), |(_, shape)| (shape.experts, shape.chosen));
    let held_experts = match experts_of {
        Some((index, shape)) => held_experts(&*folder.weights, shard, index, shape)?.0,
        None => 0..0,
    };
    let (queries, kv_heads) = heads.map_or((0..0, 0..0), |heads| (heads.queries, heads.kv));
    let caches = sources.cache_shape(kv, 0, 0);
    Ok(ShardFootprint {
        layers: shard.layers(),
        queries,
        kv: kv_heads,
        channels,
        experts,
        held_experts,
        chosen,
        vocab: shard.vocab(folder.spec.vocab),
        file_bytes: sources.bytes(),
        weight_bytes: sources.held_bytes(),
        routed_bytes: sources.routed_bytes(),
        ahead_bytes: sources.ahead_bytes(),
        table_bytes: sources.table_bytes(),
        lookup_bytes: sources.lookup_bytes(),
        kv_bytes_per_token: caches.bytes_per_token() as u64,
        largest_kv_bytes_per_token: caches.largest_bytes_per_token() as u64,
        state_bytes_per_sequence: caches.bytes_per_slot() as u64,
        needs: sources.needs(),
    })
}
