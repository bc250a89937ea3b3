//! `thunder bench membw`.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use thunder_compute::{Isa, memory};

use crate::{progress, table};

/// Measure memory bandwidth, which limits decode, with 1, 2, 4, … threads
#[derive(Args)]
pub struct MembwCommand {
    /// MiB to read in each pass; use several times the size of the last-level cache
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    mib: u32,
    /// Largest number of threads to measure [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl MembwCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let isa = Isa::detect().map_err(anyhow::Error::msg)?;
        let mut rows = Vec::new();
        let most = self.threads.map_or(cores, usize::from);
        let mut threads = 1;
        let bar = progress::measurements(most.ilog2() as usize + 1);
        while threads <= most {
            bar.set_message(format!("{threads} threads"));
            let mut reader = memory::Reader::new(threads, (self.mib as usize) << 20, isa)?;
            rows.push((threads, reader.bytes_per_s(Duration::from_secs(1))));
            threads *= 2;
            bar.inc(1);
        }
        bar.finish_and_clear();
        if self.json {
            let rows: Vec<_> = rows
                .iter()
                .map(|(threads, rate)| json!({ "threads": threads, "bytes_per_s": rate }))
                .collect();
            println!("{}", json!({ "kernel": isa.name(), "rows": rows }));
            return Ok(());
        }
        let mut table = table::new(&["threads", "GB/s", "of one thread"]);
        for (threads, rate) in &rows {
            table.add_row([
                threads.to_string(),
                format!("{:.1}", rate / 1e9),
                format!("{:.2}x", rate / rows[0].1),
            ]);
        }
        println!("{table}");
        Ok(())
    }
}
