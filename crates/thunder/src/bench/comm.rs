//! `thunder bench comm`.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use thunder_cluster::local::LocalRanks;
use thunder_collectives::bench::{self, Operation, Plan, Row};
use thunder_collectives::{Algorithm, Config, Group, Wire};

use crate::table;

/// Latency and bandwidth of collectives among ranks
///
/// Median, p99 and bus bandwidth per size, operation and algorithm. Start it on several machines with
/// `thunder launch`, or with --ranks on this one.
#[derive(Args)]
pub struct CommCommand {
    /// Ranks to start on this machine
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: u16,
    /// Operations: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv, barrier, or all of them
    #[arg(long = "op", value_delimiter = ',', default_value = "all_reduce", value_parser = operations)]
    operations: Vec<Operations>,
    /// Message sizes in bytes, or as 64K or 1MiB, powers of 1024 both [default: 8 B to 64 MiB]
    #[arg(long, value_delimiter = ',', value_parser = bytes)]
    sizes: Vec<usize>,
    /// Algorithms to force, one after the other: one-shot, mesh, chain, hierarchical, ring [default: what the cost model
    /// chooses]
    #[arg(long = "algorithm", value_delimiter = ',')]
    algorithms: Vec<Algorithm>,
    /// What ranks of this machine talk over: auto, shm, tcp or rdma
    #[arg(long, default_value = "auto", env = "THUNDER_TRANSPORT")]
    transport: String,
    /// How sums travel between hosts: exact, or int8 for slow wires
    #[arg(long, env = "THUNDER_WIRE", default_value = "exact")]
    wire: Wire,
    /// Element type: f32 or bf16
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Milliseconds for each row
    #[arg(long, default_value_t = 100)]
    time: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What one name stands for.
type Operations = std::sync::Arc<[Operation]>;

fn operations(name: &str) -> Result<Operations, String> {
    match name {
        "all" => Ok(Operation::ALL.into()),
        _ => name.parse().map(|operation| [operation].into()).map_err(|error| format!("{error}, or all")),
    }
}

/// Longer messages are a slip of the pen: every rank holds two.
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
        let (mut config, ranks) = match Config::from_env()? {
            Some(mut config) => {
                config.transport = self
                    .transport
                    .parse()
                    .map_err(|remedy| anyhow::anyhow!("--transport {}: {remedy}", self.transport))?;
                (config, None)
            }
            None => {
                let (config, ranks) = LocalRanks::start(self.ranks.into(), &self.transport)?;
                (config, Some(ranks))
            }
        };
        config.wire = self.wire;
        let mut group = Group::init(config)?;
        group.tune()?;
        let mut plan = Plan {
            operations: self.operations.iter().flat_map(|named| named.iter().copied()).collect(),
            algorithms: self.algorithms,
            time_per_row: Duration::from_millis(self.time),
            ..Plan::default()
        };
        if !self.sizes.is_empty() {
            plan.sizes = self.sizes;
        }
        let rows = match self.dtype.as_str() {
            "bf16" => bench::run::<half::bf16>(&mut group, &plan)?,
            _ => bench::run::<f32>(&mut group, &plan)?,
        };
        if group.rank() == 0 {
            match self.json {
                true => println!("{}", json!({ "dtype": self.dtype, "wire": self.wire, "rows": rows })),
                false => print(&rows),
            }
        }
        group.barrier()?;
        if let Some(mut ranks) = ranks {
            ranks.finish();
        }
        Ok(())
    }
}

fn print(rows: &[Row]) {
    let mut table = table::new(&[
        "operation",
        "bytes",
        "algorithm",
        "over",
        "ranks",
        "median µs",
        "p99 µs",
        "bus GB/s",
        "",
    ]);
    let best = rows.iter().map(|row| row.bus_gb_per_s).fold(0.0, f64::max).max(1e-9);
    for row in rows {
        table.add_row([
            row.operation.name().to_owned(),
            row.bytes.to_string(),
            row.algorithm.map_or("-".to_owned(), |algorithm| algorithm.name().to_owned()),
            row.transport.clone(),
            row.ranks.to_string(),
            format!("{:.1}", row.median_us),
            format!("{:.1}", row.p99_us),
            format!("{:.2}", row.bus_gb_per_s),
            "▇".repeat((20.0 * row.bus_gb_per_s / best).round() as usize),
        ]);
    }
    println!("{table}");
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
