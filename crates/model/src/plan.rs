//! The part of a model that each rank holds.
//!
//! Ranks form `stages` of consecutive layers (pipeline parallel), and the ranks of a stage split
//! each layer (tensor parallel). Splits follow the ranks' weights and need not be even. The units
//! of a split are KV-head groups, quantization groups of channels, and panels of vocabulary rows;
//! each rank takes consecutive units.

use std::ops::{Range, RangeInclusive};

use serde::{Deserialize, Serialize};

use crate::error::ModelError;
use crate::spec::{AttentionShape, ModelSpec};

/// How a model is divided among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Parallelism {
    /// Every layer is split over all ranks.
    #[default]
    Tensor,
    /// Every rank holds consecutive layers.
    Pipeline,
}

/// How the routed experts of a layer are divided among its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertSplit {
    /// By channels, unless an expert has so few indivisible units that ranks would have much less
    /// equal shares than with whole experts.
    #[default]
    Auto,
    /// Every rank holds some channels of every expert, so a rank's share of the work does not
    /// depend on the router's choice.
    Channels,
    /// Every rank holds some experts whole, and reads and computes those that tokens choose.
    Whole,
}

/// The parts of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardPlan {
    /// Layers of each stage.
    stages: Vec<Range<usize>>,
    /// Weight of each rank of a stage, the same in all stages.
    weights: Vec<f64>,
    experts: ExpertSplit,
}

/// Weights of a split. Any number of them has a sum that is exact enough to divide by.
const WEIGHTS: RangeInclusive<f64> = 1e-6..=1e6;

/// Experts are whole by default where the largest share of a rank would be over this many times as
/// large by channels. Smaller differences cost less than whole experts do: a token's choices are
/// spread unevenly. Of 8 of 128 experts, the busier of 2 ranks has 1.26 times its share on average,
/// and the busiest of 4 ranks 1.74 times.
const UNEVEN_CHANNELS: f64 = 1.25;

/// Vocabulary rows are divided in whole panels of the kernels.
const VOCAB_UNIT: usize = 16;

impl ShardPlan {
    /// A plan for as many ranks as there are weights.
    ///
    /// # Errors
    /// When a weight is not positive, or there are more stages than layers.
    pub fn new(spec: &ModelSpec, mode: Parallelism, weights: &[f64]) -> Result<Self, ModelError> {
        let stages = match mode {
            Parallelism::Tensor => 1,
            Parallelism::Pipeline => weights.len(),
        };
        Self::staged(spec, stages, weights)
    }

    /// A plan of `stages` stages; the number of weights is the total number of ranks. Consecutive
    /// ranks form a stage and split its layers. A stage gets layers in proportion to the sum of its
    /// weights. Ranks at the same place have the same share in all stages, in proportion to the sum
    /// of their weights.
    ///
    /// # Errors
    /// When a weight is not positive, the ranks cannot be divided among the stages, or there are
    /// more stages than layers.
    pub fn staged(spec: &ModelSpec, stages: usize, weights: &[f64]) -> Result<Self, ModelError> {
        check_weights(weights)?;
        let (ranks, layers) = (weights.len(), spec.layers.len());
        if stages == 0 || !ranks.is_multiple_of(stages) {
            return Err(ModelError::Plan(format!(
                "{ranks} ranks cannot be divided among {stages} stages: each stage needs as many ranks as the others"
            )));
        }
        if stages > layers {
            return Err(ModelError::Plan(format!(
                "{stages} pipeline ranks for {layers} layers: use at most one rank a layer, or --parallel tensor"
            )));
        }
        let size = ranks / stages;
        let of_stage: Vec<f64> = weights.chunks(size).map(|ranks| ranks.iter().sum()).collect();
        let at_place = |place: usize| weights.iter().skip(place).step_by(size).sum::<f64>();
        let places: Vec<f64> = (0..size).map(at_place).collect();
        Ok(Self {
            stages: split_at_least_one(layers, &of_stage),
            // The only rank of a stage holds all of it.
            weights: if size == 1 { vec![1.0] } else { places },
            experts: ExpertSplit::default(),
        })
    }

    /// The same plan with the experts divided so.
    #[must_use]
    pub fn with_experts(self, experts: ExpertSplit) -> Self {
        Self { experts, ..self }
    }

    /// World size.
    pub fn ranks(&self) -> usize {
        self.stages.len() * self.weights.len()
    }

    /// Ranks that split each layer among them.
    pub fn tensor_ranks(&self) -> usize {
        self.weights.len()
    }

    /// Stages of the pipeline.
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// The part of `rank`.
    ///
    /// # Panics
    /// When the rank is not below [`ShardPlan::ranks`].
    pub fn shard(&self, rank: usize) -> Shard<'_> {
        assert!(rank < self.ranks(), "rank {rank} of {}", self.ranks());
        Shard { plan: self, stage: rank / self.weights.len(), tensor_rank: rank % self.weights.len() }
    }
}

/// One rank's part.
#[derive(Debug, Clone, Copy)]
pub struct Shard<'a> {
    plan: &'a ShardPlan,
    /// The rank's stage of the pipeline.
    pub stage: usize,
    /// The rank's index among the ranks of the stage.
    pub tensor_rank: usize,
}

/// One rank's heads of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadShare {
    /// Query heads.
    pub queries: Range<usize>,
    /// KV heads that these query heads read.
    pub kv: Range<usize>,
    /// For each of these KV heads, the query heads that read it, counted from the rank's first.
    pub queries_of: Vec<Range<usize>>,
}

impl Shard<'_> {
    /// Layers of the stage.
    pub fn layers(&self) -> Range<usize> {
        self.plan.stages[self.stage].clone()
    }

    /// True if this rank embeds tokens.
    pub fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// True if this rank computes logits.
    pub fn is_last(&self) -> bool {
        self.stage + 1 == self.plan.stages.len()
    }

    /// True if this rank adds the bias of a product that is split by columns, which one rank must
    /// do.
    pub fn adds_once(&self) -> bool {
        self.tensor_rank == 0
    }

    fn share(&self, units: usize) -> Range<usize> {
        split(units, &self.plan.weights).swap_remove(self.tensor_rank)
    }

    /// Heads of an attention layer. Query heads that share a KV head stay together, unless there
    /// are more ranks than KV heads; then KV heads are replicated.
    pub fn heads(&self, shape: &AttentionShape) -> HeadShare {
        let group = shape.heads / shape.kv_heads;
        let unit = if self.plan.weights.len() > shape.kv_heads { 1 } else { group };
        let units = self.share(shape.heads / unit);
        let queries = units.start * unit..units.end * unit;
        let kv = if queries.is_empty() { 0..0 } else { queries.start / group..queries.end.div_ceil(group) };
        let queries_of = kv
            .clone()
            .map(|head| {
                let range = (head * group).max(queries.start)..((head + 1) * group).min(queries.end);
                range.start - queries.start..range.end - queries.start
            })
            .collect();
        HeadShare { queries, kv, queries_of }
    }

    /// Channels of an MLP, or heads that have no groups, in whole `unit`s.
    pub fn channels(&self, channels: usize, unit: usize) -> Range<usize> {
        let units = self.share(channels.div_ceil(unit));
        (units.start * unit).min(channels)..(units.end * unit).min(channels)
    }

    /// Routed experts that the rank holds channels of, and which channels of each; those are whole
    /// `unit`s.
    pub fn experts(&self, experts: usize, channels: usize, unit: usize) -> (Range<usize>, Range<usize>) {
        let ranks = self.plan.weights.len();
        let whole = match self.plan.experts {
            ExpertSplit::Channels => false,
            ExpertSplit::Whole => true,
            ExpertSplit::Auto => {
                let of_whole = self.largest_share(experts, 1);
                channels.div_ceil(unit) < ranks
                    || self.largest_share(channels, unit) > UNEVEN_CHANNELS * of_whole
            }
        };
        match whole && ranks > 1 {
            true => (self.share(experts), 0..channels),
            false => (0..experts, self.channels(channels, unit)),
        }
    }

    /// The largest share of a rank if `count` is divided in whole `unit`s, as a multiple of what
    /// the rank's weight entitles it to: 1 if all ranks have exactly that.
    fn largest_share(&self, count: usize, unit: usize) -> f64 {
        let weights = &self.plan.weights;
        let total: f64 = weights.iter().sum();
        let parts = split(count.div_ceil(unit), weights);
        let share = |(units, weight): (&Range<usize>, &f64)| {
            let held = (units.end * unit).min(count) - (units.start * unit).min(count);
            held as f64 / count as f64 * total / weight
        };
        parts.iter().zip(weights).map(share).fold(0.0, f64::max)
    }

    /// Rows of the vocabulary.
    pub fn vocab(&self, rows: usize) -> Range<usize> {
        self.channels(rows, VOCAB_UNIT)
    }
}

/// Divides `0..units` in proportion to the weights, with each boundary rounded to the nearest unit.
fn split(units: usize, weights: &[f64]) -> Vec<Range<usize>> {
    let total: f64 = weights.iter().sum();
    let mut sum = 0.0;
    let mut start = 0;
    weights
        .iter()
        .map(|weight| {
            sum += weight;
            let end = ((units as f64 * sum / total).round() as usize).clamp(start, units);
            let range = start..end;
            start = end;
            range
        })
        .collect()
}

fn check_weights(weights: &[f64]) -> Result<(), ModelError> {
    if weights.is_empty() {
        return Err(ModelError::Plan("a plan needs at least one rank".into()));
    }
    match weights.iter().find(|weight| !WEIGHTS.contains(weight)) {
        None => Ok(()),
        Some(bad) => Err(ModelError::Plan(format!(
            "a split has the weight {bad:?}: weights must be positive numbers, from {} to {}",
            WEIGHTS.start(),
            WEIGHTS.end()
        ))),
    }
}

/// Like [`split`], but each range has at least one unit. Needs at least as many units as weights.
fn split_at_least_one(units: usize, weights: &[f64]) -> Vec<Range<usize>> {
    let spare = split(units - weights.len(), weights);
    spare.into_iter().enumerate().map(|(i, range)| range.start + i..range.end + i + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use thunder_compute::Scoring;

    fn attention(heads: usize, kv_heads: usize) -> AttentionShape {
        AttentionShape {
            heads,
            kv_heads,
            head_dim: 64,
            value_dim: 64,
            value_scale: 1.0,
            qkv_bias: false,
            out_bias: false,
            qk_norm: None,
            scale: 0.125,
            output_gate: false,
            head_gates: false,
            window: None,
            rope: None,
            sinks: false,
            temperature: None,
            value_norm: false,
            values_are_keys: false,
            scoring: Scoring::default(),
            keys_of: None,
        }
    }

    fn tensor(weights: &[f64]) -> ShardPlan {
        ShardPlan { stages: vec![0..4], weights: weights.to_vec(), experts: ExpertSplit::default() }
    }

    #[test]
    fn stages_get_layers_and_their_ranks_get_parts_of_them() {
        let published = crate::synth::Shape::named("llama-1b").expect("a known shape");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model");
        crate::synth::outline(&published, None, 64, &path).expect("an outline");
        let spec = crate::ModelFolder::open(&path).expect("a model").spec;
        let plan = ShardPlan::staged(&spec, 2, &[3.0, 1.0, 2.0, 2.0]).expect("a plan");
        assert_eq!((plan.ranks(), plan.tensor_ranks(), plan.stages()), (4, 2, 2));
        // 16 layers by 4 and 4; within a stage 5 and 3.
        let layers: Vec<_> = (0..4).map(|rank| plan.shard(rank).layers()).collect();
        assert_eq!(layers, [0..8, 0..8, 8..16, 8..16]);
        assert_eq!(plan.weights, [5.0, 3.0]);
        for (stages, weights, why) in [(3, vec![1.0; 4], "among 3 stages"), (17, vec![1.0; 17], "16 layers")]
        {
            let error = ShardPlan::staged(&spec, stages, &weights).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn three_ranks_share_eight_kv_heads() {
        let plan = tensor(&[1.0; 3]);
        let kv: Vec<_> = (0..3).map(|rank| plan.shard(rank).heads(&attention(32, 8)).kv).collect();
        assert_eq!(kv, [0..3, 3..5, 5..8]);
    }

    #[test]
    fn weights_are_respected() {
        let plan = tensor(&[3.0, 1.0]);
        assert_eq!(plan.shard(0).heads(&attention(16, 8)).kv, 0..6);
        assert_eq!(plan.shard(1).channels(1024, 64), 768..1024);
    }

    #[test]
    fn experts_are_held_by_channels_or_whole() {
        let of = |plan: &ShardPlan, rank: usize| plan.shard(rank).experts(10, 96, 32);
        let plan = tensor(&[1.0; 3]);
        assert_eq!(of(&plan, 1), (0..10, 32..64));
        let whole = plan.with_experts(ExpertSplit::Whole);
        assert_eq!(
            [of(&whole, 0), of(&whole, 1), of(&whole, 2)],
            [(0..3, 0..96), (3..7, 0..96), (7..10, 0..96)]
        );
        // Three units of channels for four ranks.
        let four = tensor(&[1.0; 4]);
        assert_eq!(of(&four, 0), (0..3, 0..96));
        assert_eq!(of(&four.with_experts(ExpertSplit::Channels), 0), (0..10, 0..32));
    }

    /// Channels of experts in blocks of 256, as in GGUF's K types, may divide much worse than the
    /// experts.
    #[test]
    fn experts_are_whole_where_channels_divide_badly() {
        let is_whole = |weights: &[f64], (experts, channels, unit): (usize, usize, usize)| {
            let plan = tensor(weights);
            let parts = (0..weights.len()).map(|rank| plan.shard(rank).experts(experts, channels, unit));
            let whole: Vec<bool> = parts.map(|(_, part)| part == (0..channels)).collect();
            assert!(whole.iter().all(|is_whole| *is_whole == whole[0]), "all ranks or none");
            whole[0]
        };
        for (weights, shape, expected) in [
            // Qwen3-30B-A3B: 512 and 256 channels on 2 ranks, 256 each on 3.
            (vec![1.0; 2], (128, 768, 256), true),
            (vec![1.0; 3], (128, 768, 256), false),
            (vec![2.0, 1.0], (128, 768, 256), false),
            // Qwen3-235B-A22B and MiniMax M2: twice as many on two of 4 ranks.
            (vec![1.0; 4], (128, 1536, 256), true),
            (vec![1.0; 2], (128, 1536, 256), false),
            // Groups of 64 and 32 divide well enough, though not exactly.
            (vec![1.0; 5], (128, 768, 64), false),
            (vec![1.0; 4], (32, 2880, 32), false),
            // Two channels of three, or both experts.
            (vec![1.0; 2], (2, 96, 32), true),
            // As bad with experts as with channels.
            (vec![1.0; 2], (3, 96, 32), false),
        ] {
            assert_eq!(is_whole(&weights, shape), expected, "{shape:?} by {weights:?}");
        }
    }

    #[test]
    fn more_ranks_than_kv_heads_replicate_them() {
        let plan = tensor(&[1.0; 3]);
        let share = plan.shard(1).heads(&attention(8, 2));
        assert_eq!((share.queries, share.kv), (3..5, 0..2));
        assert_eq!(share.queries_of, [0..1, 1..2]);
    }

    proptest! {
        #[test]
        fn every_part_belongs_to_exactly_one_rank(
            weights in prop::collection::vec(0.1f64..10.0, 1..9),
            kv_heads in 1usize..12, group in 1usize..9, units in 1usize..40, vocab in 1usize..1000,
        ) {
            let plan = tensor(&weights);
            let shape = attention(kv_heads * group, kv_heads);
            let (mut query, mut channel, mut row) = (0, 0, 0);
            for rank in 0..weights.len() {
                let shard = plan.shard(rank);
                let heads = shard.heads(&shape);
                prop_assert_eq!(heads.queries.start, query);
                query = heads.queries.end;
                let owned: usize = heads.queries_of.iter().map(ExactSizeIterator::len).sum();
                prop_assert_eq!(owned, heads.queries.len());
                for (kv, queries) in heads.kv.clone().zip(&heads.queries_of) {
                    for q in queries.clone() {
                        prop_assert_eq!((heads.queries.start + q) / group, kv);
                    }
                }
                let channels = shard.channels(units * 32, 32);
                prop_assert_eq!((channels.start, channels.start % 32), (channel, 0));
                channel = channels.end;
                prop_assert_eq!(shard.vocab(vocab).start, row);
                row = shard.vocab(vocab).end;
            }
            prop_assert_eq!((query, channel, row), (kv_heads * group, units * 32, vocab));
        }

        #[test]
        fn every_stage_has_a_layer(weights in prop::collection::vec(0.01f64..10.0, 1..9), more in 0usize..60) {
            let stages = split_at_least_one(weights.len() + more, &weights);
            prop_assert!(stages.iter().all(|stage| !stage.is_empty()));
            prop_assert_eq!(stages.last().map(|stage| stage.end), Some(weights.len() + more));
        }
    }
}
