//! Measures a group: latency and bus bandwidth per operation, size and algorithm.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::{Algorithm, CommError, Element, Group, Op};

/// An operation that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
    /// Rank 0 to rank 1 and back; the time is half of that.
    SendRecv,
    Barrier,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
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
            Self::AllToAll => "all_to_all",
            Self::SendRecv => "send_recv",
            Self::Barrier => "barrier",
        }
    }

    /// Bytes that cross the busiest rank's link per byte of the operation, as NCCL's tests count them, so that figures of
    /// different group sizes can be compared with the wire's speed.
    fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => others,
            Self::Broadcast | Self::SendRecv => 1.0,
            Self::Barrier => 0.0,
        }
    }
}

impl std::str::FromStr for Operation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|operation| operation.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|operation| operation.name()).collect();
            format!("unknown operation {name:?}: use {}", names.join(", "))
        })
    }
}

/// What to measure. All ranks must have the same plan.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The operations, in this order.
    pub operations: Vec<Operation>,
    /// Bytes of the whole message: what a rank holds after an all_gather, before a reduce_scatter.
    pub sizes: Vec<usize>,
    /// Algorithms of the all-reduce; empty: the one that the group chooses for each size.
    pub algorithms: Vec<Algorithm>,
    /// Time to spend on each row, roughly.
    pub time_per_row: Duration,
}

impl Default for Plan {
    /// An all-reduce of 8 B to 64 MiB in powers of 8.
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

/// One measurement. Times are the slowest rank's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The operation.
    pub operation: Operation,
    /// The all-reduce's algorithm.
    pub algorithm: Option<Algorithm>,
    /// What this rank talks over, e.g. `shared memory` or `shared memory + tcp`.
    pub transport: String,
    /// Ranks of the group.
    pub ranks: usize,
    /// Bytes of the whole message.
    pub bytes: usize,
    /// Calls that were timed.
    pub iterations: usize,
    /// Half of the calls took at most this long, in µs.
    pub median_us: f64,
    /// 99 of 100 calls took at most this long, in µs.
    pub p99_us: f64,
    /// The fastest call, in µs.
    pub min_us: f64,
    /// Bytes over the busiest rank's link in a second, from the median, in GB/s.
    pub bus_gb_per_s: f64,
}

/// Calls before the timed ones.
const WARM_UP: usize = 5;
/// A row has at least this many calls, whatever they take.
const MIN_CALLS: f64 = 5.0;
/// And at most this many: more would not make the median better.
const MAX_CALLS: f64 = 20_000.0;

/// Runs the plan with elements of type `T`; every rank of the group must call it, and gets the same figures.
///
/// # Errors
/// [`CommError`], as every operation.
pub fn run<T: Element>(group: &mut Group, plan: &Plan) -> Result<Vec<Row>, CommError> {
    let mut rows = Vec::new();
    for operation in &plan.operations {
        let sizes: &[usize] = if *operation == Operation::Barrier { &[0] } else { &plan.sizes };
        for bytes in sizes {
            if *operation != Operation::AllReduce {
                rows.push(measure::<T>(group, *operation, *bytes, None, plan.time_per_row)?);
                continue;
            }
            let chosen = [group.algorithm(*bytes)];
            let algorithms = if plan.algorithms.is_empty() { &chosen[..] } else { &plan.algorithms };
            for algorithm in algorithms {
                let before = group.force_algorithm(Some(*algorithm));
                let row = measure::<T>(group, *operation, *bytes, Some(*algorithm), plan.time_per_row);
                group.force_algorithm(before);
                rows.push(row?);
            }
        }
    }
    Ok(rows)
}

fn measure<T: Element>(
    group: &mut Group,
    operation: Operation,
    bytes: usize,
    algorithm: Option<Algorithm>,
    time_per_row: Duration,
) -> Result<Row, CommError> {
    let size = group.size();
    let mut work = Work::<T>::new(operation, bytes, size);
    let start = Instant::now();
    for _ in 0..WARM_UP {
        work.call(group)?;
    }
    // All ranks must do the same number of calls: rank 0 says how many.
    let each = start.elapsed().as_secs_f64() / WARM_UP as f64;
    let calls = (time_per_row.as_secs_f64() / each.max(1e-9)).clamp(MIN_CALLS, MAX_CALLS);
    let mut iterations = [calls as u64];
    group.broadcast(0, &mut iterations)?;
    let iterations = iterations[0] as usize;
    let mut times = Vec::with_capacity(iterations);
    group.barrier()?;
    for _ in 0..iterations {
        let start = Instant::now();
        work.call(group)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let halves = if operation == Operation::SendRecv { 0.5 } else { 1.0 };
    let mut figures = [at(0.5) * halves, at(0.99) * halves, at(0.0) * halves];
    group.all_reduce(&mut figures, Op::Max)?;
    let [median_us, p99_us, min_us] = figures;
    Ok(Row {
        operation,
        algorithm,
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
struct Work<T> {
    operation: Operation,
    data: Vec<T>,
    other: Vec<T>,
    /// The parts, as even as it gets, and quite even.
    counts: Vec<usize>,
    even: Vec<usize>,
}

impl<T: Element> Work<T> {
    fn new(operation: Operation, bytes: usize, ranks: usize) -> Self {
        let count = bytes.div_ceil(size_of::<T>());
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
    use crate::{TransportChoice, local};

    #[test]
    fn every_operation_gives_a_row_per_size() {
        let plan = Plan {
            operations: Operation::ALL.to_vec(),
            sizes: vec![0, 10, 100_000],
            algorithms: Algorithm::ALL.to_vec(),
            time_per_row: Duration::from_micros(10),
        };
        for ranks in [1, 3] {
            let rows = local::run(ranks, TransportChoice::Auto, |mut group| run::<f32>(&mut group, &plan));
            for rows in rows.unwrap() {
                let rows = rows.unwrap();
                assert_eq!(rows.len(), 3 * Algorithm::ALL.len() + 5 * 3 + 1);
                assert!(rows.iter().all(|row| row.min_us <= row.median_us && row.median_us <= row.p99_us));
            }
        }
    }
}
