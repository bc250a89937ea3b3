//! All-reduces between ranks that compute on GPUs.

use std::time::Instant;

use anyhow::anyhow;
use serde::Serialize;
use thunder_collectives::Group;
use thunder_compute::cpu::pool::allowed_cores;
use thunder_compute::{Backend as _, Device as _};
use thunder_engine::assembly::device::{DeviceChoice, gpu_of_turn};
use thunder_gpu::{Cores, GpuBackend, GpuConfig, Mailboxes, SumForm};

use crate::table;

/// Number of sums that wait for each other before a row of the result is read, as in a step of a
/// model; fewer if each waits for the host.
const SUMS: usize = 64;
const SUMS_OF_HOST: usize = 8;
/// Columns of a row, if the size is a multiple of it.
const WIDTH: usize = 4096;
/// Number of rounds, and of rounds that do not count.
const ROUNDS: usize = 28;
const WARM_UP: usize = 4;
/// Sizes without `--sizes`: activations of one to some tokens, and of prompts.
const BYTES: [usize; 8] = [1 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20];

/// What a size takes.
#[derive(Serialize)]
pub struct Row {
    bytes: usize,
    ranks: usize,
    form: SumForm,
    median_us: f64,
    p99_us: f64,
}

/// Measures sums between the group's ranks, each with its own GPU if there are enough.
/// `pins`: each thread that serves a GPU gets its own core.
pub fn measure(
    (choice, pins): (DeviceChoice, bool),
    group: Group,
    sizes: &[usize],
) -> anyhow::Result<Vec<Row>> {
    let (rank, ranks) = (group.rank(), group.size());
    let found = gpu_of_turn(choice, rank).map_err(anyhow::Error::msg)?;
    let found = found.ok_or_else(|| anyhow!("--device {choice}: there is no GPU; give cpu"))?;
    let shares = choice != DeviceChoice::Gpu || thunder_gpu::real_count() < ranks;
    let mailboxes = if shares { Mailboxes::Never } else { Mailboxes::default() };
    let count = allowed_cores().len() / ranks;
    let cores = pins.then_some(Cores { first: rank * count, count });
    let config = GpuConfig { mailboxes, peers: !shares, cores, ..GpuConfig::default() };
    let mut backend = GpuBackend::new(&found, config, group)?;
    let mut rows = Vec::new();
    for &bytes in if sizes.is_empty() { &BYTES } else { sizes } {
        let mut values = vec![0.0; (bytes / 4).max(1)];
        let width = if values.len().is_multiple_of(WIDTH) { WIDTH } else { values.len() };
        let count = values.len() / width;
        let mut x = backend.buffer(count, width)?;
        backend.write(&values, &mut x)?;
        values.truncate(width);
        let form = backend.sum_form_of(count, width);
        let sums = match form {
            SumForm::Pieces | SumForm::Host => SUMS_OF_HOST,
            SumForm::None | SumForm::Relay | SumForm::Mailbox | SumForm::Gates => SUMS,
        };
        let mut us = Vec::new();
        for round in 0..ROUNDS {
            let began = Instant::now();
            for _ in 0..sums {
                backend.all_reduce(&mut x, 0..count)?;
            }
            backend.read(&x, 0..1, &mut values)?;
            if round >= WARM_UP {
                us.push(began.elapsed().as_secs_f64() * 1e6 / sums as f64);
            }
        }
        us.sort_by(f64::total_cmp);
        let (median_us, p99_us) = (us[us.len() / 2], us[us.len() - 1 - us.len() / 100]);
        rows.push(Row { bytes, ranks, form, median_us, p99_us });
    }
    Ok(rows)
}

pub fn print(rows: &[Row]) {
    let mut table = table::new(&["bytes", "ranks", "sums", "median µs", "p99 µs"]);
    for row in rows {
        table.add_row([
            row.bytes.to_string(),
            row.ranks.to_string(),
            match row.form {
                SumForm::None => "none",
                SumForm::Relay => "relayed by hosts",
                SumForm::Mailbox => "in the GPU's queue",
                SumForm::Gates => "between submissions",
                SumForm::Pieces => "in the host's memory",
                SumForm::Host => "by the host",
            }
            .to_owned(),
            format!("{:.1}", row.median_us),
            format!("{:.1}", row.p99_us),
        ]);
    }
    println!("{table}");
}
