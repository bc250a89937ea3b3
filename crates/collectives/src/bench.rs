//! Measures a group: latency and bus bandwidth per operation, size and algorithm.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::group::PROBE_BYTES;
use crate::{Algorithm, CommError, Cost, DType, Element, Group, Op};

/// An operation that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    /// From all ranks to rank 0.
    Gather,
    /// From rank 0 to all ranks.
    Scatter,
    AllToAll,
    /// From rank 0 to rank 1 and back; half of that time is reported.
    SendRecv,
    Barrier,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 9] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::SendRecv,
        Self::Barrier,
    ];

    /// The name on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::SendRecv => "send_recv",
            Self::Barrier => "barrier",
        }
    }

    /// All names, separated by commas.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// Bytes that cross the busiest rank's link per byte of the operation, defined as in NCCL's
    /// tests. Makes results of different group sizes comparable with the wire's speed.
    fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter | Self::Gather | Self::Scatter | Self::AllToAll => others,
            Self::Broadcast | Self::SendRecv => 1.0,
            Self::Barrier => 0.0,
        }
    }
}

impl std::str::FromStr for Operation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|operation| operation.name() == name);
        known.ok_or_else(|| format!("unknown operation {name:?}: use {}", Self::names()))
    }
}

/// What to measure. All ranks must use the same plan.
#[derive(Debug, Clone)]
pub struct BenchPlan {
    /// The operations, in this order.
    pub operations: Vec<Operation>,
    /// Bytes of the whole message: what a rank holds after an all_gather or before a
    /// reduce_scatter, or what the root of a gather or scatter holds.
    pub sizes: Vec<usize>,
    /// Algorithms to force for all-reduces. If empty, the group chooses for each size. Algorithms
    /// that have the same effect share a row.
    pub algorithms: Vec<Algorithm>,
    /// Approximate time per row.
    pub time_per_row: Duration,
}

impl Default for BenchPlan {
    /// An all-reduce of 8 B to 64 MiB.
    fn default() -> Self {
        Self {
            operations: vec![Operation::AllReduce],
            sizes: vec![
                8,
                64,
                512,
                4 << 10,
                8 << 10,
                16 << 10,
                64 << 10,
                256 << 10,
                1 << 20,
                4 << 20,
                16 << 20,
                64 << 20,
            ],
            algorithms: Vec::new(),
            time_per_row: Duration::from_millis(100),
        }
    }
}

/// One measurement. Times are those of the slowest rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measurement {
    /// The operation.
    pub operation: Operation,
    /// The algorithm that the all-reduce used.
    pub algorithm: Option<Algorithm>,
    /// What this rank talks over, e.g. `shared memory` or `shared memory + tcp`.
    pub transport: String,
    /// Ranks in the group.
    pub ranks: usize,
    /// Bytes of the whole message.
    pub bytes: usize,
    /// Number of timed calls.
    pub iterations: usize,
    /// Median time of a call, in µs.
    pub median_us: f64,
    /// 99th percentile of the time of a call, in µs.
    pub p99_us: f64,
    /// Time of the fastest call, in µs.
    pub min_us: f64,
    /// Bus bandwidth: bytes per second over the busiest rank's link, from the median, in GB/s.
    pub bus_gb_per_s: f64,
}

/// Calls before the timed ones.
const WARM_UP: usize = 5;
/// Least number of calls of a row, however long they take.
const MIN_CALLS: f64 = 5.0;
/// Most calls of a row: more would not improve the median.
const MAX_CALLS: f64 = 20_000.0;

/// Runs the plan with elements of type `T`. Every rank of the group must call it and gets the same
/// times.
///
/// # Errors
/// [`CommError`], like every operation.
pub fn run<T: Element>(group: &mut Group, plan: &BenchPlan) -> Result<Vec<Measurement>, CommError> {
    let mut rows = Vec::new();
    for operation in &plan.operations {
        let sizes: &[usize] = if *operation == Operation::Barrier { &[0] } else { &plan.sizes };
        // Only whole elements.
        for bytes in sizes.iter().map(|bytes| bytes.next_multiple_of(size_of::<T>())) {
            if *operation != Operation::AllReduce || plan.algorithms.is_empty() {
                rows.push(measure::<T>(group, *operation, bytes, plan.time_per_row)?);
                continue;
            }
            let first = rows.len();
            for algorithm in &plan.algorithms {
                let before = group.force_algorithm(Some(*algorithm));
                let comes_to = Some(group.algorithm(bytes, T::DTYPE, Op::Sum));
                let is_new = rows[first..].iter().all(|row: &Measurement| row.algorithm != comes_to);
                let row = is_new.then(|| measure::<T>(group, *operation, bytes, plan.time_per_row));
                group.force_algorithm(before);
                rows.extend(row.transpose()?);
            }
        }
    }
    Ok(rows)
}

/// The cost by which the group chooses an algorithm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CostRow {
    /// As in [`Measurement`].
    pub transport: String,
    /// The cost of an algorithm.
    #[serde(flatten)]
    pub cost: Cost,
    /// The smallest power of two, in bytes, from which sums of floats use the algorithm, if any do.
    pub from_bytes: Option<usize>,
}

/// The measured costs of the algorithms that the group can use: int8 values have fewer than exact
/// ones.
pub fn costs(group: &mut Group) -> Vec<CostRow> {
    // A group of one has nothing to choose.
    if group.size() == 1 {
        return Vec::new();
    }
    let transport = transports(group);
    let algorithm = |group: &Group, bytes| group.algorithm(bytes, DType::F32, Op::Sum);
    let before = group.force_algorithm(None);
    let mut rows = Vec::new();
    for cost in group.costs() {
        let from_bytes =
            (0..usize::BITS).map(|power| 1 << power).find(|bytes| algorithm(group, *bytes) == cost.algorithm);
        group.force_algorithm(Some(cost.algorithm));
        let was_probed = algorithm(group, PROBE_BYTES[1]) == cost.algorithm;
        group.force_algorithm(None);
        if was_probed || from_bytes.is_some() {
            rows.push(CostRow { transport: transport.clone(), cost, from_bytes });
        }
    }
    group.force_algorithm(before);
    rows
}

fn measure<T: Element>(
    group: &mut Group,
    operation: Operation,
    bytes: usize,
    time_per_row: Duration,
) -> Result<Measurement, CommError> {
    let size = group.size();
    let mut buffers = Buffers::<T>::new(operation, bytes, size);
    let start = Instant::now();
    for _ in 0..WARM_UP {
        buffers.call(group)?;
    }
    // All ranks must make the same number of calls, so rank 0 decides.
    let each = start.elapsed().as_secs_f64() / WARM_UP as f64;
    let calls = (time_per_row.as_secs_f64() / each.max(1e-9)).clamp(MIN_CALLS, MAX_CALLS);
    let mut iterations = [calls as u64];
    group.broadcast(0, &mut iterations)?;
    let iterations = iterations[0] as usize;
    let mut times = Vec::with_capacity(iterations);
    group.barrier()?;
    for _ in 0..iterations {
        let start = Instant::now();
        buffers.call(group)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let scale = if operation == Operation::SendRecv { 0.5 } else { 1.0 };
    let mut figures = [at(0.5) * scale, at(0.99) * scale, at(0.0) * scale];
    group.all_reduce(&mut figures, Op::Max)?;
    let [median_us, p99_us, min_us] = figures;
    Ok(Measurement {
        operation,
        // Read after the calls: until a rank has tried, it does not know whether it can read the
        // other ranks' memory.
        algorithm: (operation == Operation::AllReduce).then(|| group.algorithm(bytes, T::DTYPE, Op::Sum)),
        transport: transports(group),
        ranks: size,
        bytes,
        iterations,
        median_us,
        p99_us,
        min_us,
        bus_gb_per_s: bytes as f64 * operation.bus_factor(size) / median_us.max(1e-3) / 1e3,
    })
}

fn transports(group: &Group) -> String {
    let mut names: Vec<String> = Vec::new();
    for rank in (0..group.size()).filter(|rank| group.size() == 1 || *rank != group.rank()) {
        let name = group.transport(rank).to_string();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(" + ")
}

/// The buffers of an operation.
struct Buffers<T> {
    operation: Operation,
    data: Vec<T>,
    other: Vec<T>,
    /// The parts' lengths: as equal as possible, and exactly equal.
    counts: Vec<usize>,
    even: Vec<usize>,
}

impl<T: Element> Buffers<T> {
    fn new(operation: Operation, bytes: usize, ranks: usize) -> Self {
        let count = bytes / size_of::<T>();
        let counts = (0..ranks).map(|rank| count * (rank + 1) / ranks - count * rank / ranks).collect();
        let even = vec![count / ranks; ranks];
        Self { operation, data: vec![T::default(); count], other: vec![T::default(); count], counts, even }
    }

    fn call(&mut self, group: &mut Group) -> Result<(), CommError> {
        let rank = group.rank();
        match self.operation {
            Operation::AllReduce => group.all_reduce(&mut self.data, Op::Sum),
            Operation::AllGather => group.all_gather_in_place(&mut self.data, &self.counts),
            Operation::ReduceScatter => {
                let own = &mut self.other[..self.counts[rank]];
                group.reduce_scatter(&self.data, own, &self.counts, Op::Sum)
            }
            Operation::Broadcast => group.broadcast(0, &mut self.data),
            Operation::Gather => {
                let own = &self.data[..self.counts[rank]];
                group.gather(0, own, (rank == 0).then_some(&mut self.other[..]), &self.counts)
            }
            Operation::Scatter => {
                let own = &mut self.other[..self.counts[rank]];
                group.scatter(0, (rank == 0).then_some(&self.data[..]), own, &self.counts)
            }
            Operation::AllToAll => {
                let total: usize = self.even.iter().sum();
                group.all_to_all(&self.data[..total], &self.even, &mut self.other[..total], &self.even)
            }
            Operation::SendRecv if group.size() == 1 => Ok(()),
            Operation::SendRecv => match rank {
                0 => group.send(1, &self.data).and_then(|()| group.recv(1, &mut self.data)),
                1 => group.recv(0, &mut self.data).and_then(|()| group.send(0, &self.data)),
                _ => Ok(()),
            },
            Operation::Barrier => group.barrier(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TransportChoice, Wire, local};

    #[test]
    fn every_operation_gives_a_row_per_size() {
        let plan = BenchPlan {
            operations: Operation::ALL.to_vec(),
            sizes: vec![0, 10, 100_000],
            algorithms: Algorithm::ALL.to_vec(),
            time_per_row: Duration::from_micros(10),
        };
        for ranks in [1, 3] {
            let rows = local::run(ranks, TransportChoice::Auto, |mut group| run::<f32>(&mut group, &plan));
            for rows in rows.unwrap() {
                let rows = rows.unwrap();
                assert_eq!(rows.len(), 3 * Algorithm::ALL.len() + 7 * 3 + 1);
                assert!(rows.iter().all(|row| row.min_us <= row.median_us && row.median_us <= row.p99_us));
            }
        }
    }

    fn all_reduces(sizes: &[usize]) -> BenchPlan {
        BenchPlan {
            sizes: sizes.to_vec(),
            algorithms: Algorithm::ALL.to_vec(),
            time_per_row: Duration::from_micros(10),
            ..BenchPlan::default()
        }
    }

    #[test]
    fn int8_sums_have_a_row_per_effective_algorithm() {
        let groups = local::groups_with(3, |config| {
            (config.transport, config.wire) = (TransportChoice::Tcp, Wire::Int8);
        });
        let measured = local::run_on(groups.unwrap(), |mut group| {
            group.tune()?;
            Ok::<_, CommError>((run::<f32>(&mut group, &all_reduces(&[1023, 4]))?, costs(&mut group)))
        });
        for (rows, costs) in measured.into_iter().map(Result::unwrap) {
            let done: Vec<_> = rows.iter().map(|row| (row.bytes, row.algorithm)).collect();
            let expected: Vec<_> = [Algorithm::OneShot, Algorithm::Mesh]
                .map(|algorithm| (1024, Some(algorithm)))
                .into_iter()
                .chain(Algorithm::ALL.map(|algorithm| (4, Some(algorithm))))
                .collect();
            assert_eq!(done, expected);
            let long = costs.iter().filter(|row| row.from_bytes.is_none_or(|bytes| bytes >= 1024));
            assert!(long.clone().count() > 0);
            for row in long {
                assert!(matches!(row.cost.algorithm, Algorithm::OneShot | Algorithm::Mesh), "{row:?}");
            }
        }
    }

    #[test]
    fn direct_reads_are_reported_as_a_mesh() {
        let bytes = 2 << 20;
        let measured = local::run(2, TransportChoice::Shm, |mut group| {
            let rows = run::<f32>(&mut group, &all_reduces(&[bytes - 4, bytes]))?;
            let reads_peers = group.core.reads_peers == Some(true);
            let done: Vec<_> =
                rows.iter().filter(|row| row.bytes == bytes).map(|row| row.algorithm).collect();
            Ok::<_, CommError>((reads_peers, rows.len(), done))
        });
        for (reads_peers, rows, done) in measured.unwrap().into_iter().map(Result::unwrap) {
            assert_eq!(done.contains(&Some(Algorithm::OneShot)), !reads_peers);
            assert_eq!(rows, 2 * Algorithm::ALL.len() - usize::from(reads_peers));
        }
    }
}
