//! The group, as its users see it.

mod arguments;
mod memory;
mod operations;
mod pending;
mod reduction;
mod split;
mod transfer;
mod tune;

pub use memory::SharedMemory;
pub use pending::Pending;
pub(crate) use tune::PROBE_BYTES;

use std::io;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::algorithm;
use crate::core::{Core, WaitPolicy};
use crate::cost::{Cost, CostModel};
use crate::header::OperationKind;
use crate::rendezvous::{self, Endpoint};
use crate::world::{self, BoundEndpoint};
use crate::{Algorithm, CommError, Config, DType, InitError, Op, Transport, Wire};

/// With more local ranks than cores, a wait sleeps almost at once.
const OVERSUBSCRIBED_SPIN: Duration = Duration::from_micros(20);
const SPIN: Duration = Duration::from_micros(200);
/// For operations up to this length, `Stats::time` starts when a wait first reads the clock, which
/// is after one or two µs.
const UNTIMED_BYTES: usize = 256;

/// What a group has done so far, as this rank saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of operations.
    pub operations: u64,
    /// Payload bytes of the operations' arguments.
    pub bytes: u64,
    /// Time inside operations, including waits for late ranks. Idle waits are not counted, nor
    /// operations of at most 256 bytes that hardly wait.
    pub time: Duration,
}

/// One rank's part of a group of ranks that work together. Used by one thread at a time.
pub struct Group {
    pub(crate) core: Core,
    config: Config,
    stats: Stats,
    forced: Option<Algorithm>,
    cost_model: CostModel,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

impl Group {
    /// A group of one rank: every operation is at most a copy.
    pub fn solo() -> Self {
        Self::alone(Config::new(0, 1, ""))
    }

    fn alone(config: Config) -> Self {
        let wait_policy = wait_policy(&config, 1);
        Self {
            core: Core::new(0, vec![None], vec![vec![0]], None, None, wait_policy),
            config,
            stats: Stats::default(),
            forced: None,
            cost_model: CostModel::guess(&[vec![0]]),
        }
    }

    /// Forms the group: waits for all ranks, then connects this rank with each other rank.
    ///
    /// # Errors
    /// If ranks do not connect in time, do not know the secret or cannot be reached, or if the
    /// configuration is invalid.
    pub fn init(config: Config) -> Result<Self, InitError> {
        config.check()?;
        if config.size == 1 {
            return Ok(Self::alone(config));
        }
        let bound = BoundEndpoint::bind(&config)?;
        let table = rendezvous::exchange_endpoints(&config, bound.endpoint.clone())?;
        Self::connect(config, bound, &table)
    }

    /// Forms the group that the environment describes, or a group of one if it describes none.
    ///
    /// # Errors
    /// Those of [`Config::from_env`] and [`Group::init`].
    pub fn from_env() -> Result<Self, InitError> {
        Config::from_env()?.map_or_else(|| Ok(Self::solo()), Self::init)
    }

    fn connect(mut config: Config, bound: BoundEndpoint, table: &[Endpoint]) -> Result<Self, InitError> {
        // All ranks have connected, so the coordinator's socket can be closed.
        config.listener = None;
        let rank = config.rank;
        let world = world::form(&config, bound, table)?;
        let wait_policy = wait_policy(&config, world.local_ranks);
        let mut core = Core::new(rank, world.links, world.hosts, world.board, Some(world.watch), wait_policy);
        core.wire = config.wire;
        // All ranks must make the same guess, so it must not depend on this rank's links.
        let cost_model = CostModel::guess(&core.hosts);
        Ok(Self { core, config, stats: Stats::default(), forced: None, cost_model })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.core.size
    }

    /// What this rank talks to another rank over.
    pub fn transport(&self, rank: usize) -> Transport {
        self.core.transport(rank)
    }

    /// Identity of this rank's host, or container: equal for ranks that can share memory.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn host_identity(&self) -> io::Result<String> {
        self.config.host_identity()
    }

    /// Identity of this rank's machine: equal for ranks that run on the same cores, also in
    /// different containers.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn machine_identity(&self) -> io::Result<String> {
        self.config.machine_identity()
    }

    /// Checks that all ranks are still there; for a rank that computes for long between two
    /// operations. Costs a few loads from memory.
    ///
    /// # Errors
    /// Those of the next operation: a rank is lost, has left, or has given the group up.
    pub fn check(&mut self) -> Result<(), CommError> {
        self.core.check_peers()
    }

    /// Makes every all-reduce use this algorithm, or with `None` the cheapest for its size. All
    /// ranks must do the same. Returns the previous setting.
    pub fn force_algorithm(&mut self, algorithm: Option<Algorithm>) -> Option<Algorithm> {
        std::mem::replace(&mut self.forced, algorithm)
    }

    /// The algorithm of an all-reduce of this many bytes: the forced one, otherwise the cheapest.
    /// For exceptions see [`Algorithm::OneShot`] and [`Wire::Int8`](crate::Wire::Int8).
    pub fn algorithm(&self, bytes: usize, dtype: DType, op: Op) -> Algorithm {
        let chosen = self.forced.unwrap_or_else(|| self.cost_model.choose(bytes, !dtype.is_float()));
        algorithm::effective(&self.core, bytes, (dtype, op), chosen)
    }

    /// Whether sums of long rows of floats arrive as they were added, not rounded to fewer bits.
    pub fn is_exact(&self) -> bool {
        self.config.wire == Wire::Exact
    }

    /// The expected cost of each algorithm: a guess before [`Group::tune`], measured afterwards.
    pub fn costs(&self) -> [Cost; Algorithm::ALL.len()] {
        self.cost_model.costs
    }

    pub(crate) fn set_costs(&mut self, costs: [Cost; Algorithm::ALL.len()]) {
        self.cost_model.costs = costs;
    }

    /// The counters since the start or the last reset.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Resets the counters to zero and returns their previous values.
    pub fn reset_stats(&mut self) -> Stats {
        std::mem::take(&mut self.stats)
    }

    /// Makes waits yield their core to other threads almost at once; for a thread whose core also
    /// runs a thread that computes. Returns the previous setting.
    pub fn set_oversubscribed(&mut self, oversubscribed: bool) -> bool {
        let wait_policy = &mut self.core.wait_policy;
        wait_policy.spin = spin(&self.config, oversubscribed);
        std::mem::replace(&mut wait_policy.oversubscribed, oversubscribed)
    }

    /// Changes how long a live rank may send nothing within an operation. Returns the previous
    /// limit.
    pub fn set_stall_limit(&mut self, limit: Duration) -> Duration {
        std::mem::replace(&mut self.core.wait_policy.stall_limit, limit)
    }

    /// Runs an operation to its end on this thread.
    fn run(
        &mut self,
        bytes: usize,
        idle: bool,
        kind: OperationKind,
        operation: impl AsyncFnOnce(&mut Core) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if self.core.size == 1 {
            return Ok(());
        }
        // Reading the clock twice would take a tenth of a short operation's time.
        let start = (bytes > UNTIMED_BYTES).then(Instant::now);
        self.core.begin(start, kind, idle)?;
        let result = block_on(operation(&mut self.core));
        let start = self.core.end();
        self.stats.operations += 1;
        self.stats.bytes += bytes as u64;
        if !idle {
            self.stats.time += start.map_or(Duration::ZERO, |start| start.elapsed());
        }
        result
    }
}

fn spin(config: &Config, oversubscribed: bool) -> Duration {
    config.spin.unwrap_or(if oversubscribed { OVERSUBSCRIBED_SPIN } else { SPIN })
}

fn wait_policy(config: &Config, local_ranks: usize) -> WaitPolicy {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let oversubscribed = local_ranks > cores;
    WaitPolicy {
        spin: spin(config, oversubscribed),
        oversubscribed,
        idle_spin: if oversubscribed { config.idle_spin.min(OVERSUBSCRIBED_SPIN) } else { config.idle_spin },
        stall_limit: config.stall_limit,
    }
}

/// Runs an operation that waits inside and so never suspends.
pub(crate) fn block_on<R>(operation: impl Future<Output = R>) -> R {
    let mut operation = pin!(operation);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(result) = operation.as_mut().poll(&mut context) {
            return result;
        }
    }
}
