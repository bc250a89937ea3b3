//! Measures the time of sums of two GPUs of one host.

use std::time::Instant;

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Backend as _, ComputeError, Device as _};

use crate::mailbox::QUEUED_KIB;
use crate::{Found, GpuBackend, GpuConfig, HostWay, SumForm};

/// Sums of a short and a long series. The difference of their times contains no submission and no
/// wait. Sums in pieces have their own waits.
const SERIES: [usize; 2] = [64, 192];
const SERIES_OF_PIECES: [usize; 2] = [2, 8];
/// Sizes in KiB of sums in pieces: a prompt's of several hundred and of thousands of tokens.
const PIECES_KIB: [usize; 2] = [4 << 10, 64 << 10];
/// How often both are timed, after one run that does not count.
const TIMES: usize = 9;
/// Columns of a row.
const WIDTH: usize = 2048;

/// The paths of sums between two GPUs of one host. Seconds of a short sum, and bytes per second
/// that each receives.
#[derive(Debug, Clone, Copy)]
pub struct PairWays {
    /// Relayed by the hosts, for generated tokens.
    pub relayed: HostWay,
    /// In pieces in the host's memory, for prompts; `None` if the GPUs cannot.
    pub pieces: Option<HostWay>,
}

/// The paths between the first two of these GPUs of one host. `None` if there is no second GPU, or
/// the GPUs do not relay.
///
/// # Errors
/// If a device fails.
pub fn pair_ways(found: &[Found]) -> Result<Option<PairWays>, ComputeError> {
    let [first, second, ..] = found else { return Ok(None) };
    let ways = local::run(2, TransportChoice::Shm, |group| of_rank([first, second][group.rank()], group));
    let ways = ways.map_err(|error| ComputeError::Device {
        device: first.info.name.clone(),
        reason: format!("two ranks cannot be started: {error}"),
    })?;
    let ways: Option<Vec<PairWays>> = ways.into_iter().collect::<Result<_, _>>()?;
    let slower = |one: PairWays, other: PairWays| PairWays {
        relayed: one.relayed.slower(other.relayed),
        pieces: one.pieces.zip(other.pieces).map(|(one, other)| one.slower(other)),
    };
    Ok(ways.and_then(|ways| ways.into_iter().reduce(slower)))
}

fn of_rank(found: &Found, group: Group) -> Result<Option<PairWays>, ComputeError> {
    let config = GpuConfig { peers: true, ..GpuConfig::default() };
    let mut backend = GpuBackend::new(found, config, group)?;
    if backend.sum_form() != SumForm::Relay {
        return Ok(None);
    }
    let relayed = way(&mut backend, QUEUED_KIB, SERIES)?;
    let has_pieces = backend.sum_form_of(PIECES_KIB[0] * 256 / WIDTH, WIDTH) == SumForm::Pieces;
    let pieces = has_pieces.then(|| way(&mut backend, PIECES_KIB, SERIES_OF_PIECES)).transpose()?;
    Ok(Some(PairWays { relayed, pieces }))
}

fn way(backend: &mut GpuBackend, kib: [usize; 2], series: [usize; 2]) -> Result<HostWay, ComputeError> {
    let mut points = [(0.0, 0.0); 2];
    for (point, kib) in points.iter_mut().zip(kib) {
        let rows = kib * 256 / WIDTH;
        let mut x = backend.buffer(rows, WIDTH)?;
        backend.write(&vec![0.0; rows * WIDTH], &mut x)?;
        let mut row = [0.0; WIDTH];
        let mut seconds = Vec::new();
        for _ in 0..=TIMES {
            let mut took = [0.0; 2];
            for (took, sums) in took.iter_mut().zip(series) {
                let began = Instant::now();
                (0..sums).try_for_each(|_| backend.all_reduce(&mut x, 0..rows))?;
                backend.read(&x, 0..1, &mut row)?;
                *took = began.elapsed().as_secs_f64();
            }
            seconds.push((took[1] - took[0]) / (series[1] - series[0]) as f64);
        }
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        *point = ((kib << 10) as f64, seconds[TIMES / 2].max(1e-9));
    }
    Ok(HostWay::through(points))
}
