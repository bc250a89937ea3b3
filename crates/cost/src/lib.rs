//! Predicts the time of a step of a sharded model from the speeds of its machines and links.
//!
//! Arithmetic only: no model files, no sockets, no clock. The planner (`thunder-capacity`) and the
//! placement of a cluster (`thunder-node`) use the same formulas, so they cannot disagree.
//!
//! A step waits for memory or for arithmetic, whichever takes longer, then for the reductions:
//!
//! ```text
//! rank   = fixed + layers x fixed of a layer + read(decode rows) + read(prompt rows)
//! read   = max(bytes / memory bandwidth, operations / arithmetic rate): of weights and, apart from
//!          them if its rate was measured, of a generated token's attention
//! stage  = slowest rank + reductions x (slowest exchange + link latency + bytes / link bandwidth)
//!        + divided norms x (the same with a number a row)
//! step   = sum of the stages + one transfer between each two
//! ```
//!
//! ```
//! use thunder_cost::{LinkSpeed, MachineSpeed, Parallel, RankLoad, Stage, StepRows};
//!
//! let machine = MachineSpeed {
//!     memory_bytes_s: 800e9,
//!     prompt_flops: 20e12,
//!     decode_flops: 10e12,
//!     attention_flops: None,
//!     fixed_s: 50e-6,
//!     layer_s: 0.0,
//!     exchange: None,
//! };
//! let half = RankLoad { weight_bytes: 20e9, flops_per_token: 70e9, ..RankLoad::default() };
//! let link = LinkSpeed { latency_s: 10e-6, bytes_s: 4e9 };
//! let ranks = vec![(machine, half); 2];
//! let stage = Stage { ranks, reductions: 160, divided_norms: 0, hidden: 8192, link };
//! let two = Parallel { stages: vec![stage], link: LinkSpeed::NONE };
//! let step = two.step_seconds(&StepRows { decode: 1, context: 1000.0, ..StepRows::default() });
//! assert!((0.025..0.030).contains(&step), "20 GB at 800 GB/s and 160 reductions: {step}");
//! ```

mod experts;
mod shared;

use serde::{Deserialize, Serialize};

pub use experts::idle_experts;
pub use shared::{SharedSpeed, memory_rates, speed_among};

/// Bytes of an activation on a link between ranks: reductions and transfers send f32.
const ACTIVATION_BYTES: f64 = 4.0;

/// Bytes of a sum at most that hosts relay between GPUs.
const MOST_RELAYED_BYTES: f64 = 256.0 * 1024.0;

/// Speeds of a machine, or of one rank's part of it. These are rates that are reached, not those of
/// a data sheet.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MachineSpeed {
    /// Bytes of memory a second.
    pub memory_bytes_s: f64,
    /// Operations a second on prompts. An addition and a multiplication count as two.
    pub prompt_flops: f64,
    /// Operations a second on generated tokens of several sequences.
    pub decode_flops: f64,
    /// Operations a second of a generated token's attention, which follows the products. `None` if
    /// it was not measured; then attention counts as part of the products.
    pub attention_flops: Option<f64>,
    /// Constant seconds of every step: launches, sampling, bookkeeping.
    pub fixed_s: f64,
    /// Constant seconds of every layer in a step: jobs of a thread pool, or the time of each GPU
    /// kernel in addition to reading.
    pub layer_s: f64,
    /// Times of a rank's sums to the host and back; `None` if the host computes.
    pub exchange: Option<Exchange>,
}

/// Time of a sum from a GPU to its host and back, in addition to the group's all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// For a generated token: while a kernel waits, if the device supports it.
    pub short: LinkSpeed,
    /// For a prompt: the host waits for the device, reads, and writes the sums.
    pub long: LinkSpeed,
    /// Of a generated token between GPUs of one host, whose hosts relay partial sums: the whole
    /// sum, without any link. `None` where ranks are not such, or that was not measured.
    pub relayed: Option<LinkSpeed>,
    /// The same of a prompt, in pieces that these GPUs read in the host's memory.
    pub pieces: Option<LinkSpeed>,
}

impl Exchange {
    /// Seconds of a sum by the faster way.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.short.seconds(bytes).min(self.long.seconds(bytes))
    }
}

/// A link between two machines.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkSpeed {
    /// Seconds of a short message.
    pub latency_s: f64,
    /// Bytes a second of a long one.
    pub bytes_s: f64,
}

impl LinkSpeed {
    /// The link between ranks that share memory, or of a single rank.
    pub const NONE: Self = Self { latency_s: 0.0, bytes_s: f64::INFINITY };

    /// Seconds of a message.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency_s + bytes / self.bytes_s
    }
}

/// The bytes and operations of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RankLoad {
    /// Number of layers that the rank computes, as a whole or in part.
    pub layers: f64,
    /// Bytes of its weights.
    pub weight_bytes: f64,
    /// Of these, bytes of routed experts.
    pub routed_bytes: f64,
    /// Routed experts of a layer; 0 if there are none.
    pub experts: f64,
    /// Experts that a token takes.
    pub chosen: f64,
    /// Bytes of KV cache for each token.
    pub kv_bytes_per_token: f64,
    /// Operations for each token without attention: two for each weight by which the token is
    /// multiplied.
    pub flops_per_token: f64,
    /// Operations of attention for each pair of a token and a token that it attends to.
    pub flops_per_pair: f64,
}

impl RankLoad {
    /// Bytes of weights that `rows` tokens read, on average.
    pub fn read_bytes(&self, rows: f64) -> f64 {
        self.weight_bytes - self.routed_bytes * idle_experts(self.experts, self.chosen, rows)
    }
}

/// The rows of a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepRows {
    /// Rows of generated tokens.
    pub decode: usize,
    /// Total tokens in the caches of these rows' sequences.
    pub context: f64,
    /// Rows of prompts.
    pub prompt: usize,
    /// Total pairs of a prompt row and a token that it attends to.
    pub prompt_pairs: f64,
    /// Total tokens in the caches of the prompts that are read.
    pub prompt_context: f64,
    /// Prompts that end in the step, so that their last rows give tokens.
    pub prompt_ends: usize,
}

/// Ranks that split each layer of a stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    /// Each rank's machine and load.
    pub ranks: Vec<(MachineSpeed, RankLoad)>,
    /// All-reduces of a step: two for each layer.
    pub reductions: usize,
    /// Additional all-reduces of one number for each row: norms of values that are divided among
    /// the ranks.
    pub divided_norms: usize,
    /// Activations of a row.
    pub hidden: usize,
    /// The slowest link between two ranks of the stage.
    pub link: LinkSpeed,
}

/// A model's layout: stages of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Parallel {
    /// The stages, in order.
    pub stages: Vec<Stage>,
    /// The slowest link between a stage and the next one.
    pub link: LinkSpeed,
}

impl Stage {
    /// Seconds of a step in this stage.
    pub fn seconds(&self, rows: &StepRows) -> f64 {
        let slowest = self.ranks.iter().map(|(machine, load)| rank_seconds(machine, load, rows));
        let slowest = slowest.fold(0.0, f64::max);
        let size = self.ranks.len() as f64;
        if size <= 1.0 {
            return slowest;
        }
        // One exchange for short messages; long ones cross each wire twice, in parts (mesh).
        let all_reduce = |width: usize| {
            let bytes = (rows.decode + rows.prompt) as f64 * width as f64 * ACTIVATION_BYTES;
            let one_shot = self.link.seconds(bytes * (size - 1.0));
            let exchanges = self.ranks.iter().filter_map(|(machine, _)| machine.exchange);
            let exchange = exchanges.map(|exchange| exchange.seconds(bytes)).fold(0.0, f64::max);
            let usual = exchange + one_shot.min(2.0 * self.link.seconds(bytes * (size - 1.0) / size));
            self.relayed_seconds(bytes).map_or(usual, |relayed| relayed.min(usual))
        };
        slowest + self.reductions as f64 * all_reduce(self.hidden) + self.divided_norms as f64 * all_reduce(1)
    }
}

impl Stage {
    /// Seconds of a sum that hosts relay between the ranks' GPUs, or that these read in the host's
    /// memory, if they can.
    fn relayed_seconds(&self, bytes: f64) -> Option<f64> {
        let received = bytes * (self.ranks.len() as f64 - 1.0);
        let of_rank = |(machine, _): &(MachineSpeed, RankLoad)| {
            let Exchange { relayed, pieces, .. } = machine.exchange?;
            let way = if bytes <= MOST_RELAYED_BYTES { relayed } else { pieces };
            Some(way?.seconds(received))
        };
        self.ranks.iter().map(of_rank).try_fold(0.0f64, |slowest, seconds| Some(slowest.max(seconds?)))
    }
}

/// Seconds of one rank. Prompts and generated tokens read the weights separately, because their
/// products differ.
fn rank_seconds(machine: &MachineSpeed, load: &RankLoad, rows: &StepRows) -> f64 {
    let part = |count: usize, context: f64, pairs: f64, rate: f64, attention_rate: Option<f64>| {
        if count == 0 {
            return 0.0;
        }
        let (weights, cache) = (load.read_bytes(count as f64), load.kv_bytes_per_token * context);
        let (products, attention) = (load.flops_per_token * count as f64, load.flops_per_pair * pairs);
        let seconds = |bytes: f64, seconds: f64| (bytes / machine.memory_bytes_s).max(seconds);
        match attention_rate {
            None => seconds(weights + cache, (products + attention) / rate),
            Some(own) => seconds(weights, products / rate) + seconds(cache, attention / own),
        }
    };
    machine.fixed_s
        + machine.layer_s * load.layers
        + part(rows.decode, rows.context, rows.context, machine.decode_flops, machine.attention_flops)
        + part(rows.prompt, rows.prompt_context, rows.prompt_pairs, machine.prompt_flops, None)
}

impl Parallel {
    /// Seconds of a step in a stage, including sending to the next stage.
    pub fn stage_seconds(&self, stage: usize, rows: &StepRows) -> f64 {
        let Some(here) = self.stages.get(stage) else { return 0.0 };
        let own = here.seconds(rows);
        let bytes = (rows.decode + rows.prompt) as f64 * here.hidden as f64 * ACTIVATION_BYTES;
        own + if stage + 1 < self.stages.len() { self.link.seconds(bytes) } else { 0.0 }
    }

    /// Seconds of a step through all stages.
    pub fn step_seconds(&self, rows: &StepRows) -> f64 {
        (0..self.stages.len()).map(|stage| self.stage_seconds(stage, rows)).sum()
    }

    /// Tokens a second of one sequence that has `context` tokens.
    pub fn decode_tokens_s(&self, context: f64) -> f64 {
        1.0 / self.step_seconds(&StepRows { decode: 1, context, ..StepRows::default() })
    }

    /// Seconds to read a prompt of `tokens` tokens in one step.
    pub fn prompt_seconds(&self, tokens: usize) -> f64 {
        let length = tokens as f64;
        let rows = StepRows {
            prompt: tokens,
            prompt_pairs: length * (length + 1.0) / 2.0,
            prompt_context: length,
            ..StepRows::default()
        };
        self.step_seconds(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: MachineSpeed = MachineSpeed {
        memory_bytes_s: 100e9,
        prompt_flops: 1e12,
        decode_flops: 1e12,
        attention_flops: None,
        fixed_s: 0.0,
        layer_s: 0.0,
        exchange: None,
    };

    fn load(weight_bytes: f64) -> RankLoad {
        RankLoad { weight_bytes, flops_per_token: weight_bytes * 2.0, ..RankLoad::default() }
    }

    fn layout(ranks: usize, link: LinkSpeed) -> Parallel {
        let ranks = vec![(MACHINE, load(10e9 / ranks as f64)); ranks];
        let stage = Stage { ranks, reductions: 64, divided_norms: 0, hidden: 4096, link };
        Parallel { stages: vec![stage], link }
    }

    #[test]
    fn one_token_waits_for_memory_and_a_prompt_for_arithmetic() {
        let one = layout(1, LinkSpeed::NONE);
        assert!((one.decode_tokens_s(0.0) - 10.0).abs() < 1e-9);
        // 1000 tokens of 20 GFLOP at 1 TFLOP/s.
        assert!((one.prompt_seconds(1000) - 20.0).abs() < 1e-9);
    }

    #[test]
    fn attention_with_a_rate_of_its_own_follows_the_products() {
        let pairs = RankLoad { kv_bytes_per_token: 1e5, flops_per_pair: 1e6, ..load(10e9) };
        let seconds = |attention_flops| {
            let machine = MachineSpeed { attention_flops, ..MACHINE };
            let rows = StepRows { decode: 1, context: 1000.0, ..StepRows::default() };
            rank_seconds(&machine, &pairs, &rows)
        };
        // 10 GB and 0.1 GB of cache at 100 GB/s; 1 GFLOP at 20 GFLOP/s.
        assert!((seconds(None) - 0.101).abs() < 1e-9, "{}", seconds(None));
        assert!((seconds(Some(2e10)) - 0.15).abs() < 1e-9);
        assert!((seconds(Some(1e15)) - 0.101).abs() < 1e-9, "the cache has to be read");
    }

    #[test]
    fn two_ranks_halve_the_step_until_the_link_takes_it_back() {
        let fast = layout(2, LinkSpeed { latency_s: 10e-6, bytes_s: 5e9 }).decode_tokens_s(0.0);
        let slow = layout(2, LinkSpeed { latency_s: 1e-3, bytes_s: 5e9 }).decode_tokens_s(0.0);
        assert!(fast > 19.0 && slow < 10.0, "{fast} {slow}");
    }

    #[test]
    fn a_norm_that_ranks_share_costs_a_short_message() {
        let link = LinkSpeed { latency_s: 1e-4, bytes_s: 1e9 };
        let (plain, mut shared) = (layout(2, link), layout(2, link));
        shared.stages[0].divided_norms = 10;
        let rows = StepRows { decode: 1, ..StepRows::default() };
        let more = shared.step_seconds(&rows) - plain.step_seconds(&rows);
        assert!((more - 10.0 * (1e-4 + 4e-9)).abs() < 1e-9, "{more}");
    }

    #[test]
    fn stages_add_up_and_more_rows_read_more_experts() {
        let stage = layout(1, LinkSpeed::NONE).stages.remove(0);
        let two =
            Parallel { stages: vec![stage.clone(), stage], link: LinkSpeed { latency_s: 0.1, bytes_s: 1e9 } };
        assert!((two.decode_tokens_s(0.0) - 1.0 / (0.1 + 0.1 + 0.1 + 16384e-9)).abs() < 1e-6);
        let sparse = RankLoad { routed_bytes: 8e9, experts: 64.0, chosen: 8.0, ..load(10e9) };
        assert_eq!(sparse.read_bytes(1.0), 3e9);
        assert!(sparse.read_bytes(16.0) > 7e9 && sparse.read_bytes(1e6) <= 10e9);
    }

    #[test]
    fn sums_that_hosts_relay_need_no_link() {
        let way = |latency_s, bytes_s| LinkSpeed { latency_s, bytes_s };
        let (short, long) = (way(1e-5, 1e9), way(1e-4, 1e10));
        let stage = |relayed: [Option<LinkSpeed>; 2]| {
            let mut layout = layout(2, way(1e-5, 1e9));
            for (rank, relayed) in layout.stages[0].ranks.iter_mut().zip(relayed) {
                rank.0.exchange = Some(Exchange { short, long, relayed, pieces: None });
            }
            layout.stages.remove(0)
        };
        let rows = StepRows { decode: 1, ..StepRows::default() };
        let reductions = stage([None; 2]).reductions as f64;
        let bytes = stage([None; 2]).hidden as f64 * 4.0;
        let usual = stage([None; 2]).seconds(&rows);
        let both = stage([Some(way(2e-6, 1e10)), Some(way(1e-6, 2e10))]).seconds(&rows);
        let saved = reductions * (2e-5 + 2.0 * bytes / 1e9 - (2e-6 + bytes / 1e10));
        assert!((usual - both - saved).abs() < 1e-9, "{usual} {both} {saved}");
        // One of them alone has nobody to relay with, and long sums go by the host.
        assert_eq!(stage([Some(way(1e-6, 1e10)), None]).seconds(&rows), usual);
        let prompt = StepRows { prompt: 512, ..StepRows::default() };
        let mut both = stage([Some(way(1e-6, 1e10)); 2]);
        let by_host = both.seconds(&prompt);
        assert_eq!(by_host, stage([None; 2]).seconds(&prompt));
        // Unless both GPUs read them in the host's memory.
        both.ranks.iter_mut().for_each(|(machine, _)| {
            machine.exchange.as_mut().unwrap().pieces = Some(way(1e-4, 1e11));
        });
        let bytes = 512.0 * bytes;
        let one_shot = 1e-5 + bytes / 1e9;
        let saved = reductions * (1e-4 + bytes / 1e10 + one_shot - (1e-4 + bytes / 1e11));
        assert!((by_host - both.seconds(&prompt) - saved).abs() < 1e-6 * saved);
    }

    #[test]
    fn a_gpu_pays_for_its_layers_and_for_the_way_of_sums_to_its_host() {
        let link = LinkSpeed { latency_s: 1e-5, bytes_s: 1e9 };
        let way = |latency_s, bytes_s| LinkSpeed { latency_s, bytes_s };
        let exchange =
            Some(Exchange { short: way(1e-5, 1e9), long: way(1e-4, 1e10), relayed: None, pieces: None });
        let (cpu, mut gpu) = (layout(2, link), layout(2, link));
        // A single GPU next to a processor is enough for this.
        gpu.stages[0].ranks[1].0 = MachineSpeed { layer_s: 1e-5, exchange, ..MACHINE };
        gpu.stages[0].ranks[1].1.layers = 32.0;
        let more = |rows: StepRows| gpu.step_seconds(&rows) - cpu.step_seconds(&rows);
        let one = more(StepRows { decode: 1, ..StepRows::default() });
        assert!((one - (32e-5 + 64.0 * (1e-5 + 16384e-9))).abs() < 1e-9, "{one}");
        // 16 MB at the rate of copies, after a wait.
        let prompt = more(StepRows { prompt: 1000, ..StepRows::default() });
        assert!((prompt - (32e-5 + 64.0 * (1e-4 + 16384e-7))).abs() < 1e-9, "{prompt}");
    }

    #[test]
    fn the_slowest_rank_counts() {
        let mut uneven = layout(2, LinkSpeed { latency_s: 0.0, bytes_s: 1e12 });
        uneven.stages[0].ranks[1].0.memory_bytes_s = 50e9;
        assert!((uneven.decode_tokens_s(0.0) - 10.0).abs() < 0.1);
    }
}
