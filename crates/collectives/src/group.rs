//! The group, as its users see it.

mod exchange;
mod operations;
mod pending;
mod reduction;

pub use pending::Pending;

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::algorithm;
use crate::core::{Core, Patience};
use crate::cost::{Cost, Model};
use crate::header::Kind;
use crate::rendezvous::{self, Endpoint};
use crate::world::{self, Address};
use crate::{Algorithm, CommError, Config, DType, InitError, Op, Transport};

/// A wait that cannot use a core of its own sleeps nearly at once.
const CROWDED_SPIN: Duration = Duration::from_micros(20);
const SPIN: Duration = Duration::from_micros(200);
/// Operations this short count in the statistics' time only from when a wait has looked at the clock, after a µs or two.
const UNTIMED_BYTES: usize = 256;

/// What a group has done so far, as this rank saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Operations.
    pub operations: u64,
    /// Payload bytes of the operations' arguments.
    pub bytes: u64,
    /// Time inside operations, waits for late ranks included; idle waits are not counted, nor are operations of at most
    /// 256 bytes that hardly wait.
    pub time: Duration,
}

/// A number of ranks that work together; this is one rank's part. Used by one thread at a time.
pub struct Group {
    pub(crate) core: Core,
    config: Config,
    stats: Stats,
    forced: Option<Algorithm>,
    model: Model,
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
    /// The group of one: every operation is a copy at most.
    pub fn solo() -> Self {
        Self::alone(Config::new(0, 1, ""))
    }

    fn alone(config: Config) -> Self {
        let patience = patience(&config, 1);
        Self {
            core: Core::new(0, vec![None], vec![vec![0]], None, None, patience),
            config,
            stats: Stats::default(),
            forced: None,
            model: Model::guess(&[vec![0]]),
        }
    }

    /// Forms the group: waits for all ranks, then connects this one with each other.
    ///
    /// # Errors
    /// When ranks do not come, do not know the secret, cannot be reached, or the configuration makes no sense.
    pub fn init(config: Config) -> Result<Self, InitError> {
        config.check()?;
        if config.size == 1 {
            return Ok(Self::alone(config));
        }
        let address = Address::open(&config)?;
        let table = rendezvous::exchange(&config, address.endpoint.clone())?;
        Self::connect(config, address, &table)
    }

    /// The group that the environment describes; the group of one when it describes none.
    ///
    /// # Errors
    /// As [`Config::from_env`] and [`Group::init`].
    pub fn from_env() -> Result<Self, InitError> {
        Config::from_env()?.map_or_else(|| Ok(Self::solo()), Self::init)
    }

    fn connect(mut config: Config, address: Address, table: &[Endpoint]) -> Result<Self, InitError> {
        // All have come.
        config.listener = None;
        let rank = config.rank;
        let world = world::form(&config, rank, address, table)?;
        let patience = patience(&config, world.local_ranks);
        let mut core = Core::new(rank, world.links, world.hosts, world.board, Some(world.watch), patience);
        core.wire = config.wire;
        // All ranks must come to the same guess, so it must not depend on this rank's links.
        let model = Model::guess(&core.hosts);
        Ok(Self { core, config, stats: Stats::default(), forced: None, model })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.core.size
    }

    /// How this rank talks to another.
    pub fn transport(&self, rank: usize) -> Transport {
        self.core.transport(rank)
    }

    /// Whether all ranks are still there: for one that computes for long between two operations. Costs a look at memory.
    ///
    /// # Errors
    /// As the next operation would: a rank is lost, has left or has given up.
    pub fn check(&mut self) -> Result<(), CommError> {
        self.core.check_peers()
    }

    /// Makes every all-reduce use this algorithm, or with `None` the one that suits its size. All ranks must do the same.
    /// Returns what was forced before.
    pub fn force_algorithm(&mut self, algorithm: Option<Algorithm>) -> Option<Algorithm> {
        std::mem::replace(&mut self.forced, algorithm)
    }

    /// The algorithm by which an all-reduce of this many bytes is done: the one that is forced, else the cheapest, but for
    /// what [`Algorithm::OneShot`] and [`Wire::Int8`](crate::Wire::Int8) say.
    pub fn algorithm(&self, bytes: usize, dtype: DType, op: Op) -> Algorithm {
        let chosen = self.forced.unwrap_or_else(|| self.model.choose(bytes, !dtype.is_float()));
        algorithm::carried_out(&self.core, bytes, (dtype, op), chosen)
    }

    /// What each algorithm is thought to cost; a guess before [`Group::tune`].
    pub fn costs(&self) -> [Cost; Algorithm::ALL.len()] {
        self.model.costs
    }

    pub(crate) fn set_costs(&mut self, costs: [Cost; Algorithm::ALL.len()]) {
        self.model.costs = costs;
    }

    /// What has been done since the start or the last reset.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Sets the counters to zero and returns what they were.
    pub fn reset_stats(&mut self) -> Stats {
        std::mem::take(&mut self.stats)
    }

    /// Forms smaller groups: ranks with the same `color` come together, ordered by `key`, then by rank. The new group has
    /// connections of its own, so it may be used by another thread than this one.
    ///
    /// # Errors
    /// When a rank is lost or the connections cannot be made.
    pub fn split(&mut self, color: u32, key: u32) -> Result<Self, InitError> {
        let mut config = self.config.clone();
        if self.size() == 1 {
            return Ok(Self::alone(config));
        }
        let address = Address::open(&config)?;
        let own = serde_json::to_vec(&(color, key, &address.endpoint))
            .map_err(|error| InitError::system("an address cannot be written")(error.into()))?;
        let mut lengths = vec![0u32; self.size()];
        self.all_gather(&[own.len() as u32], &mut lengths, &vec![1; self.size()])?;
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut all = vec![0u8; counts.iter().sum()];
        self.all_gather(&own, &mut all, &counts)?;
        let mut members = Vec::new();
        let mut rest = &all[..];
        for (rank, count) in counts.iter().enumerate() {
            let (text, after) = rest.split_at(*count);
            rest = after;
            let (its_color, its_key, endpoint): (u32, u32, Endpoint) = serde_json::from_slice(text)
                .map_err(|error| InitError::system("a rank's address cannot be read")(error.into()))?;
            if its_color == color {
                members.push((its_key, rank, endpoint));
            }
        }
        members.sort_by_key(|(key, rank, _)| (*key, *rank));
        config.rank = members.iter().position(|(_, rank, _)| *rank == self.rank()).unwrap_or_default();
        config.size = members.len();
        if config.size == 1 {
            return Ok(Self::alone(config));
        }
        if let Some(rdma) = &mut config.rdma {
            rdma.renumber(|old| members.iter().position(|(_, rank, _)| *rank == old));
        }
        let table: Vec<Endpoint> = members.into_iter().map(|(_, _, endpoint)| endpoint).collect();
        Self::connect(config, address, &table)
    }

    /// Whether waits leave their core to other threads nearly at once, for a thread that shares it with one that computes. Returns
    /// what was so before.
    pub fn set_crowded(&mut self, crowded: bool) -> bool {
        let patience = &mut self.core.patience;
        patience.spin = spin(&self.config, crowded);
        std::mem::replace(&mut patience.crowded, crowded)
    }

    /// Runs an operation to its end on this thread.
    fn run(
        &mut self,
        bytes: usize,
        idle: bool,
        kind: Kind,
        operation: impl AsyncFnOnce(&mut Core) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if self.core.size == 1 {
            return Ok(());
        }
        // Two looks at the clock would take a tenth of a short operation.
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

fn spin(config: &Config, crowded: bool) -> Duration {
    config.spin.unwrap_or(if crowded { CROWDED_SPIN } else { SPIN })
}

fn patience(config: &Config, local_ranks: usize) -> Patience {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let crowded = local_ranks > cores;
    Patience {
        spin: spin(config, crowded),
        crowded,
        idle_spin: if crowded { config.idle_spin.min(CROWDED_SPIN) } else { config.idle_spin },
        stall_limit: config.stall_limit,
    }
}

/// Polls an operation that waits inside and so never suspends.
pub(crate) fn block_on<R>(operation: impl Future<Output = R>) -> R {
    let mut operation = pin!(operation);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(result) = operation.as_mut().poll(&mut context) {
            return result;
        }
    }
}
