//! Measures all-reduces of the group that the environment describes; without one, between two
//! threads.
//!
//! `comm [--json] [--bf16] [--ms N] [--all] [BYTES…]`: `--all` measures every algorithm, `--ms` is
//! the time per row in milliseconds.
use std::time::Duration;

use thunder_collectives::{Algorithm, Config, Group, TransportChoice, bench, local};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut plan = bench::BenchPlan { sizes: Vec::new(), ..bench::BenchPlan::default() };
    let (mut json, mut bf16) = (false, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = true,
            "--bf16" => bf16 = true,
            "--all" => plan.algorithms = Algorithm::ALL.to_vec(),
            "--ms" => {
                let value = arguments.next().ok_or("--ms needs a number")?;
                plan.time_per_row = Duration::from_millis(value.parse()?);
            }
            size => plan.sizes.push(size.parse()?),
        }
    }
    if plan.sizes.is_empty() {
        plan.sizes = bench::BenchPlan::default().sizes;
    }
    let measure = |mut group: Group| {
        let rows = if bf16 {
            bench::run::<half::bf16>(&mut group, &plan)
        } else {
            bench::run::<f32>(&mut group, &plan)
        };
        rows.map(|rows| (group.rank(), rows))
    };
    let results = match Config::from_env()? {
        Some(config) => vec![measure(Group::init(config)?)],
        None => local::run(2, TransportChoice::Auto, measure)?,
    };
    for result in results {
        let (rank, rows) = result?;
        for row in rows.iter().filter(|_| rank == 0) {
            if json {
                println!("{}", serde_json::to_string(row)?);
                continue;
            }
            let algorithm = row.algorithm.map_or("", Algorithm::name);
            println!(
                "{:14} {algorithm:9} {:>9} B  min {:9.2}  median {:9.2}  p99 {:9.2} us  {:6.2} GB/s",
                row.transport, row.bytes, row.min_us, row.median_us, row.p99_us, row.bus_gb_per_s
            );
        }
    }
    Ok(())
}
