//! A short table of all-reduce latencies between two threads: `quick [TRANSPORT…]`.
use std::time::Duration;
use thunder_collectives::{Algorithm, TransportChoice, bench, local};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let plan = bench::Plan {
        sizes: vec![8, 1 << 10, 8 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20],
        algorithms: Algorithm::ALL.to_vec(),
        time_per_row: Duration::from_millis(60),
        ..bench::Plan::default()
    };
    let ring: usize = std::env::var("RING").ok().map_or(Ok(128 << 10), |v| v.parse())?;
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let groups = local::groups_with(2, |config| {
            config.transport = transport;
            config.ring_bytes = ring;
        })?;
        let rows = local::run_on(groups, |mut group| bench::run::<f32>(&mut group, &plan));
        for row in rows.into_iter().next().into_iter().flatten().flatten() {
            println!(
                "{:14} {:?} {:>9} min {:9.2} median {:9.2} p99 {:9.2}",
                row.transport, row.algorithm, row.bytes, row.min_us, row.median_us, row.p99_us
            );
        }
    }
    Ok(())
}
