//! The work of a model's ranks for a request: spans below those of prefill and decoding.

use serde::{Deserialize, Serialize};

use crate::document::{Attribute, Stage};

/// Time of one rank, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTime {
    /// Computing, for any requests.
    pub computed_us: u64,
    /// Waiting for other ranks within steps.
    pub waited_us: u64,
}

/// A part of a request's time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Steps of all ranks in this time.
    pub steps: u64,
    /// By rank.
    pub ranks: Vec<RankTime>,
}

/// The ranks' work for a request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Time until the request's turn, in microseconds.
    #[serde(default)]
    pub queued_us: u64,
    /// Ranks of each stage of the pipeline.
    pub stage_ranks: usize,
    /// Until the first token.
    pub prefill: Phase,
    /// From then on.
    pub decode: Phase,
}

impl Work {
    /// Adds the ranks' spans to those of prefill and decoding, which have this many tokens. `nodes`
    /// are the ranks' nodes in a cluster.
    pub fn add_to(&self, stages: &mut [Stage], tokens: [u64; 2], nodes: &[String]) {
        for (name, phase, tokens) in
            [("prefill", &self.prefill, tokens[0]), ("decode", &self.decode, tokens[1])]
        {
            if let Some(stage) = stages.iter_mut().find(|stage| stage.name == name) {
                stage.parts = self.spans(phase, (stage.begin, stage.end), tokens, nodes);
            }
        }
    }

    fn spans(
        &self,
        phase: &Phase,
        (begin, end): (std::time::Duration, std::time::Duration),
        tokens: u64,
        nodes: &[String],
    ) -> Vec<Stage> {
        let span = |name, attributes, parts| Stage { name, begin, end, attributes, parts };
        let rank = |(rank, time): (usize, &RankTime)| {
            let mut attributes = vec![
                Attribute::Integer("thunder.rank", rank as u64),
                Attribute::Integer("thunder.steps", phase.steps),
                Attribute::Integer("thunder.tokens", tokens),
                Attribute::Integer("thunder.computed_us", time.computed_us),
                Attribute::Integer("thunder.waited_us", time.waited_us),
            ];
            attributes.extend(nodes.get(rank).map(|node| Attribute::Text("thunder.node", node.clone())));
            span("rank", attributes, Vec::new())
        };
        let ranks: Vec<Stage> = phase.ranks.iter().enumerate().map(rank).collect();
        if self.stage_ranks == 0 || ranks.len() <= self.stage_ranks {
            return ranks;
        }
        let stages = ranks.chunks(self.stage_ranks).zip(0..).map(|(ranks, stage)| {
            span("stage", vec![Attribute::Integer("thunder.stage", stage)], ranks.to_vec())
        });
        stages.collect()
    }
}
