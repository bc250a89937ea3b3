//! `thunder bench comm`.

#[cfg(feature = "gpu")]
mod gpu;

use std::time::Duration;

use clap::Args;
use serde_json::json;
use thunder_cluster::local::{LocalRanks, LoopbackRendezvous};
use thunder_collectives::bench::{self, BenchPlan, CostRow, Measurement, Operation};
use thunder_collectives::{Algorithm, Config, Group, TransportChoice, Wire};
use thunder_engine::assembly::Forming;
use thunder_engine::assembly::device::DeviceChoice;

use crate::engine_args::{FormingArgs, check_ranks};
use crate::plot::{self, Series};
use crate::{session, table};

/// Measure latency and bandwidth of the collectives between ranks
///
/// Starts --ranks on this machine; `thunder launch` starts ranks on several machines. Prints the
/// median and p99 time and the bus bandwidth for each operation and size, and the costs by which a
/// group chooses its algorithms.
#[derive(Args)]
pub struct CommCommand {
    /// Ranks to start on this machine, without `thunder launch` [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: Option<u16>,
    #[command(flatten)]
    forming: FormingArgs,
    #[arg(
        long = "op",
        value_delimiter = ',',
        default_value = "all_reduce",
        value_parser = operations,
        value_name = "OP,…",
        help = format!("Operations to measure: {}, or all", Operation::names())
    )]
    operations: Vec<Operations>,
    /// Message sizes in bytes, e.g. 65536, 64K or 1MiB (powers of 1024) [default: 8 B to 64 MiB]
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = bytes)]
    sizes: Vec<usize>,
    #[arg(
        long = "algorithm",
        value_name = "ALGORITHM,…",
        value_delimiter = ',',
        help = format!(
            "Algorithms to measure in turn: {} [default: the choice of the group for each size]",
            Algorithm::names()
        )
    )]
    algorithms: Vec<Algorithm>,
    /// Transports to measure in turn: auto, shm, tcp, rdma [default: THUNDER_TRANSPORT, else auto]
    ///
    /// auto uses shared memory within a machine, and RDMA or TCP between machines.
    #[arg(long = "transport", value_name = "TRANSPORT,…", value_delimiter = ',')]
    transports: Vec<TransportChoice>,
    /// Number format of sums between hosts: exact, or int8 (faster on slow networks, less exact)
    #[arg(long, value_name = "FORMAT", env = "THUNDER_WIRE", default_value = "exact")]
    wire: Wire,
    /// Element type
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Memory that holds the data: cpu, or gpu for sums between kernels of GPU ranks, or gpu:N
    ///
    /// With gpu, ranks use this machine's GPUs in turn, and only all-reduces of f32 are measured.
    /// Each row is the time of 64 sums that wait for each other, divided by 64. Use it to find out
    /// how much time several GPUs add to a token.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// With --device gpu: pin the threads that serve each GPU to cores of their own
    #[arg(long)]
    pin: bool,
    /// Milliseconds for each row of the table; a longer time gives steadier figures
    #[arg(long, value_name = "MS", default_value_t = 100)]
    time: u64,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// The operations of one value of `--op`.
type Operations = std::sync::Arc<[Operation]>;

fn operations(name: &str) -> Result<Operations, String> {
    match name {
        "all" => Ok(Operation::ALL.into()),
        _ => name.parse().map(|operation| [operation].into()).map_err(|error| format!("{error}, or all")),
    }
}

/// Larger sizes are treated as typing errors: every rank holds two messages.
const LONGEST_GIB: usize = 1 << 10;

fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "" | "B" => Some(1),
        "K" | "KiB" => Some(1 << 10),
        "M" | "MiB" => Some(1 << 20),
        "G" | "GiB" => Some(1 << 30),
        _ => None,
    };
    let bytes = digits.parse().ok().zip(unit).and_then(|(number, unit): (usize, _)| number.checked_mul(unit));
    bytes
        .filter(|bytes| *bytes <= LONGEST_GIB << 30)
        .ok_or_else(|| format!("write bytes as 65536, 64K or 64KiB (also M and G), up to {LONGEST_GIB}G"))
}

impl CommCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if self.pin && self.device == DeviceChoice::Cpu {
            anyhow::bail!("--pin is for the threads that serve GPUs: give --device gpu too");
        }
        let (mut config, ranks) = match Config::from_env()? {
            Some(config) => {
                check_ranks(self.ranks, &config)?;
                (config, None)
            }
            None => {
                let ranks = self.ranks.unwrap_or(2).into();
                // Used only without --transport: all ranks have the same arguments and read the
                // transports from them.
                let named = std::env::var("THUNDER_TRANSPORT").ok().filter(|name| !name.is_empty());
                let transport = named.unwrap_or_else(|| "auto".to_owned());
                let rendezvous = LoopbackRendezvous::open()?;
                let config = rendezvous.config(ranks, &transport)?;
                (config, Some(LocalRanks::start(ranks, &rendezvous, &transport)?))
            }
        };
        config.wire = self.wire;
        config.observer = Some(session::observer(config.rank, config.size));
        let Forming { wait, ports } = self.forming.spec();
        config.rendezvous_limit = wait.unwrap_or(config.rendezvous_limit);
        config.ports = ports.or(config.ports);
        if self.device != DeviceChoice::Cpu {
            let rank = config.rank;
            self.run_on_gpus(Group::init(config)?, rank)?;
            if let Some(mut ranks) = ranks {
                ranks.finish();
            }
            return Ok(());
        }
        let mut plan = BenchPlan {
            operations: self.operations.iter().flat_map(|named| named.iter().copied()).collect(),
            algorithms: self.algorithms,
            time_per_row: Duration::from_millis(self.time),
            ..BenchPlan::default()
        };
        if !self.sizes.is_empty() {
            plan.sizes = self.sizes;
        }
        let measure = match self.dtype.as_str() {
            "bf16" => bench::run::<half::bf16>,
            _ => bench::run::<f32>,
        };
        let transports = if self.transports.is_empty() { vec![config.transport] } else { self.transports };
        let (mut rows, mut costs) = (Vec::new(), Vec::new());
        for transport in transports {
            // Each transport's group meets at the same coordinator.
            config.transport = transport;
            let mut group = Group::init(config.clone())?;
            group.tune()?;
            rows.extend(measure(&mut group, &plan)?);
            costs.extend(bench::costs(&mut group));
            group.barrier()?;
        }
        if config.rank == 0 {
            if self.json {
                let report = json!({ "dtype": self.dtype, "wire": self.wire, "rows": rows, "costs": costs });
                println!("{report}");
            } else {
                print(&plan.operations, &rows, &costs);
            }
        }
        if let Some(mut ranks) = ranks {
            ranks.finish();
        }
        Ok(())
    }
}

impl CommCommand {
    #[cfg(not(feature = "gpu"))]
    fn run_on_gpus(&self, _group: Group, _rank: usize) -> anyhow::Result<()> {
        anyhow::bail!("--device {}: this program was built without GPUs", self.device)
    }

    #[cfg(feature = "gpu")]
    fn run_on_gpus(&self, group: Group, rank: usize) -> anyhow::Result<()> {
        let rows = gpu::measure((self.device, self.pin), group, &self.sizes)?;
        match (rank, self.json) {
            (0, true) => println!("{}", json!({ "rows": rows })),
            (0, false) => gpu::print(&rows),
            _ => {}
        }
        Ok(())
    }
}

/// A size in the form of `--sizes`.
fn short(bytes: usize) -> String {
    let units = [(1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    let unit = units.into_iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit))
}

fn print(operations: &[Operation], rows: &[Measurement], costs: &[CostRow]) {
    let mut table =
        table::new(&["operation", "bytes", "algorithm", "over", "ranks", "median µs", "p99 µs", "bus GB/s"]);
    for row in rows {
        table.add_row([
            row.operation.name().to_owned(),
            row.bytes.to_string(),
            row.algorithm.map_or("-".to_owned(), |algorithm| algorithm.name().to_owned()),
            row.transport.clone(),
            row.ranks.to_string(),
            format!("{:.1}", row.median_us),
            format!("{:.1}", row.p99_us),
            format!("{:.3}", row.bus_gb_per_s),
        ]);
    }
    println!("{table}");
    if !costs.is_empty() {
        print_costs(costs);
    }
    for operation in operations {
        let plot = plot::logarithmic(&series(*operation, rows), |bytes| short(bytes as usize));
        if !plot.is_empty() {
            print!("\n{}: bus GB/s over bytes\n{plot}", operation.name());
        }
    }
}

fn print_costs(costs: &[CostRow]) {
    let mut table = table::new(&["all-reduce by", "over", "fixed µs", "µs per KiB", "chosen from"]);
    for CostRow { transport, cost, from_bytes } in costs {
        table.add_row([
            cost.algorithm.name().to_owned(),
            transport.clone(),
            format!("{:.1}", cost.fixed_us),
            format!("{:.4}", cost.us_per_kib),
            from_bytes.map_or("-".to_owned(), short),
        ]);
    }
    println!("{table}");
}

/// The bandwidths of an operation as one series per algorithm and transport, in the order of the
/// rows.
fn series(operation: Operation, rows: &[Measurement]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    // A bandwidth of zero cannot be shown on a logarithmic axis.
    for row in rows.iter().filter(|row| row.operation == operation && row.bus_gb_per_s > 0.0) {
        let name = match row.algorithm {
            Some(algorithm) => format!("{} over {}", algorithm.name(), row.transport),
            None => row.transport.clone(),
        };
        let point = (row.bytes as f64, row.bus_gb_per_s);
        match all.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => all.push(Series { name, points: vec![point] }),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_1024() {
        for (text, expected) in [
            ("0", 0),
            ("8", 8),
            ("8B", 8),
            ("64K", 64 << 10),
            ("64KiB", 64 << 10),
            ("1M", 1 << 20),
            ("1MiB", 1 << 20),
            ("2G", 2 << 30),
            ("1024GiB", 1 << 40),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "K", "-1", "1.5M", "64 K", "64KB", "64k", "1025G", "99999999999999999999", "1Mi"] {
            assert!(bytes(text).unwrap_err().contains("64KiB"), "{text:?}");
        }
    }
}
