//! Counters of the engine's work, shared by the engine loop and its handles.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::step_watch::StepWatch;

/// The engine's current and past work.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests that have a slot.
    pub running: AtomicUsize,
    /// Requests that wait for a slot.
    pub waiting: AtomicUsize,
    /// Blocks of the KV cache.
    pub kv_blocks: AtomicUsize,
    /// Blocks that running requests hold.
    pub kv_blocks_used: AtomicUsize,
    /// How often a sequence lost its slot to an older one because the KV cache was full. It starts
    /// over later.
    pub preempted: AtomicU64,
    /// Computed prompt tokens, without those that were in the cache.
    pub prompt_tokens: AtomicU64,
    /// Tokens of prompts that steps have taken: computed, or found in the cache. A token that is
    /// computed again after a preemption counts once.
    pub read_tokens: AtomicU64,
    /// Of these, tokens that were found in the cache.
    pub cached_tokens: AtomicU64,
    /// Tokens of answers.
    pub generated_tokens: AtomicU64,
    /// Prompt tokens that were read from disk instead of being computed.
    pub disk_tokens: AtomicU64,
    /// Bytes of all ranks in the prefix cache's disk tier. For ranks other than 0, this and the
    /// following counters are half a second old.
    pub disk_bytes: AtomicU64,
    /// Blocks and states that ranks have written to it, counted for each rank.
    pub disk_written: AtomicU64,
    /// Blocks and states that ranks have not written to it because their disks were behind or full.
    pub disk_dropped: AtomicU64,
    /// Its files that ranks found damaged and removed.
    pub disk_damaged: AtomicU64,
    /// Number of steps.
    pub steps: AtomicU64,
    /// Tokens of drafts that steps verified.
    pub drafted: AtomicU64,
    /// Those that were right.
    pub drafts_right: AtomicU64,
    /// Tokens of `drafted` that a draft model guessed.
    pub model_drafted: AtomicU64,
    /// Those that were right.
    pub model_drafts_right: AtomicU64,
    /// Time that rank 0 spent in steps, communication included, in nanoseconds.
    pub step_ns: AtomicU64,
    /// The part of `step_ns` spent in tensor-parallel reductions, including waits for other ranks.
    pub reduce_ns: AtomicU64,
    /// Times of single steps, while a client watches them.
    pub watch: StepWatch,
}

/// The step times of [`Counters`] at one moment.
#[derive(Debug, Clone, Copy)]
pub struct StepTimes {
    step_ns: u64,
    reduce_ns: u64,
}

impl Counters {
    /// The times up to now.
    pub fn times(&self) -> StepTimes {
        StepTimes {
            step_ns: self.step_ns.load(Ordering::Relaxed),
            reduce_ns: self.reduce_ns.load(Ordering::Relaxed),
        }
    }

    /// The reductions' share of rank 0's time since an earlier moment, 0 to 1.
    pub fn reduce_share_since(&self, before: StepTimes) -> f64 {
        let now = self.times();
        (now.reduce_ns - before.reduce_ns) as f64 / (now.step_ns - before.step_ns).max(1) as f64
    }
}
