//! How long exchanges take, with a host that sums nothing.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use thunder_compute::ComputeError;

use super::{Mailbox, Rows, Summer};
use crate::Found;
use crate::device::Device;

/// Exchanges of a submission: the sums of a token with 32 layers.
const SUMS: usize = 64;
/// Submissions, on real GPUs and on software drivers.
const SUBMISSIONS: [usize; 2] = [60, 4];

/// When the host answered.
static ANSWERED: Mutex<Vec<Instant>> = Mutex::new(Vec::new());

/// How a device waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExchangeForm {
    /// In the kernel that sends.
    OneKernel,
    /// In a second kernel.
    TwoKernels,
    /// Between two submissions.
    Gate,
}

/// Times of exchanges of one size, from answer to answer.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct ExchangeTime {
    /// KiB of a sum.
    pub kib: usize,
    /// How the device waits.
    pub form: ExchangeForm,
    /// How long the proof at the start took.
    pub proof_ms: f64,
    /// The median in µs.
    pub median_us: f64,
    /// The 99th percentile in µs.
    pub p99_us: f64,
}

/// Measures exchanges inside of submissions. The inner error says why this device has none.
///
/// # Errors
/// When the device fails.
pub fn exchange_times(
    found: &Found,
    kib: &[usize],
) -> Result<Result<Vec<ExchangeTime>, String>, ComputeError> {
    let mut device = Device::open(found, true)?;
    let mut times = Vec::new();
    let submissions = SUBMISSIONS[usize::from(!found.info.is_real())];
    for &kib in kib {
        let words = kib * 256;
        let x = device.memory(4 * words, "a measurement")?;
        for form in [ExchangeForm::OneKernel, ExchangeForm::TwoKernels, ExchangeForm::Gate] {
            let (began, is_real) = (Instant::now(), found.info.is_real());
            let proved = match form {
                ExchangeForm::Gate => Mailbox::gated(&mut device, is_real)?,
                _ => Mailbox::proved(&mut device, is_real)?,
            };
            let mut mailbox = match proved {
                Ok(mailbox) => mailbox,
                Err(reason) => return Ok(Err(reason)),
            };
            let proof = began.elapsed();
            mailbox.words_at_once = if form == ExchangeForm::OneKernel { usize::MAX } else { 0 };
            mailbox.begin(Summer::Stand(note));
            answers().clear();
            for _ in 0..submissions {
                for _ in 0..SUMS {
                    let rows = Rows { x: &x, first: 0, rows: 1, width: words, stride: words };
                    mailbox.record(&mut device, rows, None)?;
                }
                device.submit()?;
                device.wait()?;
            }
            if let (_, Err(failure)) = mailbox.take_back(&device) {
                return Ok(Err(format!("{failure:?}")));
            }
            let (median_us, p99_us) = middle_and_end(&std::mem::take(&mut *answers()), submissions / 2);
            let proof_ms = ms(proof);
            times.push(ExchangeTime { kib, form, proof_ms, median_us, p99_us });
        }
    }
    Ok(Ok(times))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn answers() -> std::sync::MutexGuard<'static, Vec<Instant>> {
    ANSWERED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note(_: &mut [f32], _: u32) {
    answers().push(Instant::now());
}

/// Of the times from one answer of a submission to the next, without the first submissions.
fn middle_and_end(answered: &[Instant], without: usize) -> (f64, f64) {
    let of_submissions = answered.chunks_exact(SUMS).skip(without);
    let mut us: Vec<f64> = of_submissions
        .flat_map(|answers| answers.windows(2).map(|pair| 1e3 * ms(pair[1] - pair[0])))
        .collect();
    us.sort_by(f64::total_cmp);
    let at =
        |share: f64| us.get((us.len().saturating_sub(1) as f64 * share) as usize).copied().unwrap_or(0.0);
    (at(0.5), at(0.99))
}
