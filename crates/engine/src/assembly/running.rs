//! Ranks that have loaded their shards.

use std::thread::JoinHandle;
use std::time::Duration;

use thunder_compute::Backend;
use thunder_model::{ShardFootprint, ShardPlan};

use super::threads::ThreadCounts;
use crate::{Engine, EngineError, RankWorker};

/// A follower that has lost a peer keeps its links open this long. If it left at once, other ranks
/// might report it as lost, instead of the rank that was lost first.
const LAST_TO_LEAVE: Duration = Duration::from_millis(300);

/// A rank that has loaded its shard.
pub enum RunningRank {
    /// Rank 0, which takes requests.
    Head(Box<RunningEngine>),
    /// Any other rank, which follows rank 0 once [`Follower::follow`] is called.
    Follower(Follower),
}

/// Rank 0: an engine and the thread of its scheduler.
pub struct RunningEngine {
    /// Takes requests.
    pub engine: Engine,
    /// How the model is split.
    pub plan: ShardPlan,
    /// What each rank holds.
    pub footprints: Vec<ShardFootprint>,
    /// The device that rank 0 computes on, for people.
    pub device: String,
    /// Transports between rank 0 and the others, for people.
    pub transport: String,
    /// Compute threads of the group.
    pub threads: ThreadCounts,
    /// Maximum prompt tokens that are read together.
    pub step_rows: usize,
    pub(super) scheduler: JoinHandle<Result<(), EngineError>>,
}

impl RunningEngine {
    /// Waits until all requests are answered and all other handles are dropped, then ends all
    /// ranks.
    ///
    /// # Errors
    /// Why the engine had stopped before.
    pub fn close(self) -> Result<(), EngineError> {
        let Self { engine, scheduler, .. } = self;
        drop(engine);
        scheduler.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// A rank other than 0.
pub struct Follower {
    pub(super) rank: Box<dyn Follow>,
}

/// A rank on any backend that follows rank 0.
pub(super) trait Follow: Send {
    fn follow(&mut self) -> Result<(), EngineError>;
}

impl<B: Backend> Follow for RankWorker<B>
where
    RankWorker<B>: Send,
{
    fn follow(&mut self) -> Result<(), EngineError> {
        RankWorker::follow(self)
    }
}

impl Follower {
    /// Computes the steps that rank 0 sends, until rank 0 ends.
    ///
    /// # Errors
    /// When a peer was lost or a step cannot be computed.
    pub fn follow(mut self) -> Result<(), EngineError> {
        let followed = self.rank.follow();
        if followed.is_err() {
            std::thread::sleep(LAST_TO_LEAVE);
        }
        followed
    }
}
