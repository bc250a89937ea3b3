//! Computes the time of one run from series that have a cost of their own.

use std::time::{Duration, Instant};

use thunder_compute::ComputeError;

/// Minimum series of each length.
const TIMES: u32 = 5;
/// Maximum series of each length, unless the longer ones take longer before.
const MOST_TIMES: u32 = 100;

/// Measures the seconds of one run on a device. `series` makes the given number of runs and waits
/// for them; it is called with `few` and with `many` in turn, for at least `time`.
///
/// The difference does not contain the fixed cost of a series. It is the difference of the shortest
/// times, because a busy host only adds time; the difference of two single series can be negative.
///
/// # Errors
/// Those of `series`, and if the longer series never take longer.
pub fn seconds_of_run(
    device: &str,
    time: Duration,
    [few, many]: [u32; 2],
    mut series: impl FnMut(u32) -> Result<(), ComputeError>,
) -> Result<f64, ComputeError> {
    let began = Instant::now();
    let mut least = [Duration::MAX; 2];
    let mut times = 0;
    while times < TIMES || began.elapsed() < time || least[1] <= least[0] {
        if times >= MOST_TIMES && least[1] <= least[0] {
            let reason = format!("{many} runs of a measurement take no longer than {few}: {:?}", least[1]);
            return Err(ComputeError::Device { device: device.to_owned(), reason });
        }
        for (least, runs) in least.iter_mut().zip([few, many]) {
            let start = Instant::now();
            series(runs)?;
            *least = start.elapsed().min(*least);
        }
        times += 1;
    }
    Ok((least[1] - least[0]).as_secs_f64() / f64::from(many - few))
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn what_a_series_costs_once_falls_out_whatever_the_host_adds() {
        let mut calls = 0;
        let seconds = seconds_of_run("gpu", Duration::ZERO, [1, 5], |runs| {
            calls += 1;
            // In every other pair the short series takes longer than the long one.
            let added = if calls % 4 == 1 { 20 } else { 0 };
            sleep(Duration::from_millis(2 + added) + Duration::from_millis(2) * runs);
            Ok(())
        });
        let seconds = seconds.unwrap();
        assert!((0.001..0.01).contains(&seconds), "{seconds}");
    }

    #[test]
    fn runs_that_cost_nothing_are_an_error() {
        let error = seconds_of_run("gpu", Duration::ZERO, [1, 5], |runs| {
            sleep(Duration::from_micros(if runs == 1 { 200 } else { 20 }));
            Ok(())
        });
        assert!(error.unwrap_err().to_string().contains("5 runs of a measurement take no longer than 1"));
    }
}
