//! Measures the time of exchanges, with a host that does not sum.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use thunder_collectives::Group;
use thunder_compute::{ComputeError, Device as _};

use super::{Mailbox, Rows, Summer};
use crate::device::Device;
use crate::device::host_rows::HostRows;
use crate::{Found, GpuBackend, GpuConfig};

/// Exchanges of a submission: the sums of a token with 32 layers.
const SUMS: usize = 64;
/// Submissions on real GPUs, and on software drivers.
const SUBMISSIONS: [usize; 2] = [60, 4];

/// Sizes in KiB of the sums that [`host_ways`] times: a token's activations, and several tokens'.
pub(crate) const QUEUED_KIB: [usize; 2] = [8, 64];
/// Sizes in KiB of a short sum and a prompt's sum by the host, and how often each is timed.
const HOST_KIB: [usize; 2] = [16, 8 << 10];
const HOST_TIMES: usize = 9;

/// When the host has answered.
static ANSWERED: Mutex<Vec<Instant>> = Mutex::new(Vec::new());

/// How a device waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExchangeForm {
    /// In the kernel that sends.
    OneKernel,
    /// In a second kernel.
    TwoKernels,
    /// In a second of three kernels, in Metal's language.
    ThreeKernels,
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
    /// Duration of the proof at the start.
    pub proof_ms: f64,
    /// The median in µs.
    pub median_us: f64,
    /// The 99th percentile in µs.
    pub p99_us: f64,
}

/// Measures exchanges within submissions. The inner error says why this device has none.
///
/// # Errors
/// If the device fails.
pub fn exchange_times(
    found: &Found,
    kib: &[usize],
) -> Result<Result<Vec<ExchangeTime>, String>, ComputeError> {
    let mut device = Device::open(found, true)?;
    let mut times = Vec::new();
    let submissions = SUBMISSIONS[usize::from(!found.info.is_real())];
    for &kib in kib {
        let words = kib * 256;
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
            let form = match (form, mailbox.is_coherent) {
                (ExchangeForm::OneKernel, true) => continue,
                (ExchangeForm::TwoKernels, true) => ExchangeForm::ThreeKernels,
                (form, _) => form,
            };
            mailbox.words_at_once = if form == ExchangeForm::OneKernel { usize::MAX } else { 0 };
            let (median_us, p99_us) = match times_of(&mut device, &mut mailbox, words, submissions)? {
                Ok(times) => times,
                Err(reason) => return Ok(Err(reason)),
            };
            let proof_ms = ms(proof);
            times.push(ExchangeTime { kib, form, proof_ms, median_us, p99_us });
        }
    }
    Ok(Ok(times))
}

/// Median and 99th percentile in µs of exchanges of `words` words, or why they failed.
fn times_of(
    device: &mut Device,
    mailbox: &mut Mailbox,
    words: usize,
    submissions: usize,
) -> Result<Result<(f64, f64), String>, ComputeError> {
    let x = device.memory(4 * words, "a measurement")?;
    mailbox.begin(Summer::Stand(note));
    answers().clear();
    for _ in 0..submissions {
        for _ in 0..SUMS {
            let rows = Rows { x: &x, first: 0, rows: 1, width: words, stride: words };
            mailbox.record(device, rows, None)?;
        }
        device.submit()?;
        device.wait()?;
    }
    if let (_, Err(failure)) = mailbox.take_back(device) {
        return Ok(Err(format!("{failure:?}")));
    }
    Ok(Ok(middle_and_end(&std::mem::take(&mut *answers()), submissions / 2)))
}

/// The path of a sum from a device to its host and back: latency of a short sum and bandwidth of a
/// long one. The ranks' all-reduce is not included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostWay {
    /// Seconds for a sum of no bytes.
    pub latency_s: f64,
    /// Bytes per second, for both directions together.
    pub bytes_s: f64,
}

impl HostWay {
    /// The line through the times of two sizes.
    pub(crate) fn through([few, many]: [(f64, f64); 2]) -> Self {
        let bytes_s = (many.0 - few.0) / (many.1 - few.1).max(1e-9);
        Self { latency_s: (few.1 - few.0 / bytes_s).max(0.0), bytes_s }
    }

    /// The larger latency and the lower bandwidth of both.
    pub(crate) fn slower(self, other: Self) -> Self {
        Self { latency_s: self.latency_s.max(other.latency_s), bytes_s: self.bytes_s.min(other.bytes_s) }
    }
}

/// The paths that sums of several ranks would take on a device: in its queue (`None` if the device
/// has no correct form), and by a host that waits for the device.
///
/// # Errors
/// If the device fails.
pub fn host_ways(found: &Found) -> Result<(Option<HostWay>, HostWay), ComputeError> {
    // Ranks on a software driver do not wait in kernels.
    let in_queue = if found.info.is_real() { way_in_queue(found)? } else { None };
    Ok((in_queue, way_by_host(found)?))
}

fn way_in_queue(found: &Found) -> Result<Option<HostWay>, ComputeError> {
    let mut device = Device::open(found, true)?;
    let proved = match Mailbox::proved(&mut device, true)? {
        Ok(mailbox) => Ok(mailbox),
        Err(_) => Mailbox::gated(&mut device, true)?,
    };
    let Ok(mut mailbox) = proved else { return Ok(None) };
    let mut points = [(0.0, 0.0); 2];
    for (point, kib) in points.iter_mut().zip(QUEUED_KIB) {
        match times_of(&mut device, &mut mailbox, kib * 256, SUBMISSIONS[0])? {
            Ok((median_us, _)) => *point = ((kib << 10) as f64, median_us * 1e-6),
            Err(_) => return Ok(None),
        }
    }
    Ok(Some(HostWay::through(points)))
}

fn way_by_host(found: &Found) -> Result<HostWay, ComputeError> {
    let mut backend = GpuBackend::new(found, GpuConfig::default(), Group::solo())?;
    let mut host_rows = HostRows::proved(&mut backend.device)?.ok();
    let mut points = [(0.0, 0.0); 2];
    for (point, kib) in points.iter_mut().zip(HOST_KIB) {
        let mut values = vec![1.0; kib * 256];
        let mut x = backend.buffer(1, values.len())?;
        backend.write(&values, &mut x)?;
        let rows = Rows { x: &x.memory.clone(), first: 0, rows: 1, width: x.width, stride: x.stride() };
        let mut least = Duration::MAX;
        for _ in 0..HOST_TIMES {
            let began = Instant::now();
            let has_stored = match &mut host_rows {
                Some(host_rows) => host_rows.stored(&mut backend.device, rows)?.is_some(),
                None => false,
            };
            if let Some(host_rows) = host_rows.as_ref().filter(|_| has_stored) {
                host_rows.take(&mut backend.device, rows)?;
                backend.device.submit()?;
            } else {
                backend.read(&x, 0..1, &mut values)?;
                backend.write(&values, &mut x)?;
            }
            least = least.min(began.elapsed());
        }
        *point = ((kib << 10) as f64, least.as_secs_f64());
    }
    Ok(HostWay::through(points))
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

/// Median and 99th percentile of the times between answers of a submission, without the first
/// submissions.
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
