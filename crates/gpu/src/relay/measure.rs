//! Measures the time of a relayed sum in the queues of two GPUs.

use std::time::Instant;

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Backend as _, ComputeError, Device as _};

use crate::mailbox::QUEUED_KIB;
use crate::{Found, GpuBackend, GpuConfig, HostWay, SumForm};

/// Sums of a short and a long series. The difference of their times contains no submission and no
/// wait.
const SERIES: [usize; 2] = [64, 192];
/// How often both are timed, after one run that does not count.
const TIMES: usize = 9;

/// The path of a relayed sum between the first two of these GPUs of one host: seconds of a short
/// sum, and bytes per second that each receives. `None` if there is no second GPU, or the GPUs do
/// not relay.
///
/// # Errors
/// If a device fails.
pub fn relay_way(found: &[Found]) -> Result<Option<HostWay>, ComputeError> {
    let [first, second, ..] = found else { return Ok(None) };
    let ways = local::run(2, TransportChoice::Shm, |group| of_rank([first, second][group.rank()], group));
    let ways = ways.map_err(|error| ComputeError::Device {
        device: first.info.name.clone(),
        reason: format!("two ranks cannot be started: {error}"),
    })?;
    let ways: Option<Vec<HostWay>> = ways.into_iter().collect::<Result<_, _>>()?;
    Ok(ways.and_then(|ways| ways.into_iter().reduce(HostWay::slower)))
}

fn of_rank(found: &Found, group: Group) -> Result<Option<HostWay>, ComputeError> {
    let config = GpuConfig { peers: true, ..GpuConfig::default() };
    let mut backend = GpuBackend::new(found, config, group)?;
    if backend.sum_form() != SumForm::Relay {
        return Ok(None);
    }
    let mut points = [(0.0, 0.0); 2];
    for (point, kib) in points.iter_mut().zip(QUEUED_KIB) {
        let mut values = vec![0.0; kib * 256];
        let mut x = backend.buffer(1, values.len())?;
        backend.write(&values, &mut x)?;
        let mut seconds = Vec::new();
        for _ in 0..=TIMES {
            let mut took = [0.0; 2];
            for (took, sums) in took.iter_mut().zip(SERIES) {
                let began = Instant::now();
                (0..sums).try_for_each(|_| backend.all_reduce(&mut x, 0..1))?;
                backend.read(&x, 0..1, &mut values)?;
                *took = began.elapsed().as_secs_f64();
            }
            seconds.push((took[1] - took[0]) / (SERIES[1] - SERIES[0]) as f64);
        }
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        *point = ((kib << 10) as f64, seconds[TIMES / 2].max(1e-9));
    }
    Ok(Some(HostWay::through(points)))
}
