//! Measures the time of each kernel of a step by timestamps that the device writes between
//! dispatches.
//!
//! A process measures all of its GPUs together: [`start_profile`], some steps, [`take_profile`].

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wgpu::{BufferDescriptor, BufferUsages, CommandEncoder, ComputePass, Features, MapMode, QuerySet};

use crate::format::Format;
use crate::kernel::{Kernel, Role};

/// Features that a device needs for measurements.
pub(crate) const TIMING: Features = Features::TIMESTAMP_QUERY.union(Features::TIMESTAMP_QUERY_INSIDE_PASSES);

/// Maximum timestamps of a submission: one for each dispatch, and one for each pass.
const MAX_MARKS: u32 = 512;

/// All dispatches of a kernel with one shape.
#[derive(Debug, Clone, Default)]
pub struct KernelTime {
    /// How often the kernel ran.
    pub dispatches: usize,
    /// Its time, including the barrier before each dispatch.
    pub time: Duration,
    /// Bytes of weights that it read; 0 for kernels without weights.
    pub bytes: u64,
}

/// The measurements.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// Number of measured steps.
    pub steps: usize,
    /// Total time, from the beginning of each step to that of the next, including the cost of
    /// measuring.
    pub wall: Duration,
    /// By the kernel's name and shape.
    pub kernels: BTreeMap<String, KernelTime>,
    /// The longest time of a submission's commands. A driver ends submissions that take too long.
    pub longest_submission: Duration,
}

/// Which steps to measure, and their measurements.
type Wanted = Option<(Option<usize>, Profile)>;
static PROFILE: Mutex<Wanted> = Mutex::new(None);

fn profile() -> MutexGuard<'static, Wanted> {
    PROFILE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to measure the steps that consist of `generated` tokens; with `None`, the steps that read
/// prompts.
pub fn start_profile(generated: Option<usize>) {
    *profile() = Some((generated, Profile::default()));
}

/// Ends measuring. `None` if it had not begun.
pub fn take_profile() -> Option<Profile> {
    profile().take().map(|(_, profile)| profile)
}

/// A device's part of the measurements.
#[derive(Default)]
pub(crate) struct Timer {
    /// When the step began, or its time was last added, if it is measured.
    step: Option<Instant>,
    marks: Option<Marks>,
    submitted: Vec<Marks>,
}

/// Timestamps of one submission.
struct Marks {
    set: QuerySet,
    /// What ended at each timestamp: a dispatch and its bytes, or something that does not count.
    ended: Vec<Option<(String, u64)>>,
    results: Option<wgpu::Buffer>,
}

impl Timer {
    /// Begins a step of `generated` rows; `None` if it has others too.
    pub fn begin_step(&mut self, device: &wgpu::Device, generated: Option<usize>) {
        let before = self.step.take();
        if let Some((wanted, profile)) = &mut *profile() {
            if let Some(before) = before {
                profile.wall += before.elapsed();
            }
            if generated == *wanted && device.features().contains(TIMING) {
                profile.steps += 1;
                self.step = Some(Instant::now());
            }
        }
    }

    /// True in a step that is measured.
    pub fn is_on(&self) -> bool {
        self.step.is_some()
    }

    /// Writes a timestamp at the beginning of a pass or after a dispatch.
    pub fn mark(
        &mut self,
        device: &wgpu::Device,
        pass: &mut ComputePass<'_>,
        ended: impl FnOnce() -> Option<(String, u64)>,
    ) {
        if self.step.is_none() {
            return;
        }
        let marks = self.marks.get_or_insert_with(|| {
            let description =
                wgpu::QuerySetDescriptor { label: None, ty: wgpu::QueryType::Timestamp, count: MAX_MARKS };
            Marks { set: device.create_query_set(&description), ended: Vec::new(), results: None }
        });
        if (marks.ended.len() as u32) < MAX_MARKS {
            pass.write_timestamp(&marks.set, marks.ended.len() as u32);
            marks.ended.push(ended());
        }
    }

    /// Ends a submission.
    pub fn resolve(&mut self, device: &wgpu::Device, encoder: &mut CommandEncoder) {
        let Some(mut marks) = self.marks.take() else { return };
        let bytes = marks.ended.len() as u64 * 8;
        let buffer = |usage| {
            device.create_buffer(&BufferDescriptor {
                label: None,
                size: bytes,
                usage,
                mapped_at_creation: false,
            })
        };
        let resolved = buffer(BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC);
        let results = buffer(BufferUsages::MAP_READ | BufferUsages::COPY_DST);
        encoder.resolve_query_set(&marks.set, 0..marks.ended.len() as u32, &resolved, 0);
        encoder.copy_buffer_to_buffer(&resolved, 0, &results, 0, Some(bytes));
        marks.results = Some(results);
        self.submitted.push(marks);
    }

    /// Requests the timestamps of the submitted commands. Call [`Self::collect`] after the device
    /// has finished them.
    pub fn ask(&self) {
        for results in self.submitted.iter().filter_map(|marks| marks.results.as_ref()) {
            results.slice(..).map_async(MapMode::Read, |_| ());
        }
    }

    /// Adds up the timestamps of the submitted commands.
    pub fn collect(&mut self, queue: &wgpu::Queue) {
        // No other step may begin before the profile is taken.
        if let (Some(step), Some((_, profile))) = (&mut self.step, &mut *profile()) {
            profile.wall += step.elapsed();
            *step = Instant::now();
        }
        for marks in self.submitted.drain(..) {
            let view = marks.results.as_ref().and_then(|results| results.slice(..).get_mapped_range().ok());
            let (Some(view), Some((_, profile))) = (view, &mut *profile()) else { continue };
            let ticks: Vec<u64> = view.as_chunks::<8>().0.iter().map(|t| u64::from_le_bytes(*t)).collect();
            let time = |from: u64, to: u64| {
                let ns = to.saturating_sub(from) as f64 * f64::from(queue.get_timestamp_period());
                Duration::from_secs_f64(ns / 1e9)
            };
            if let [first, .., last] = ticks[..] {
                profile.longest_submission = profile.longest_submission.max(time(first, last));
            }
            for (pair, ended) in ticks.windows(2).zip(&marks.ended[1..]) {
                let Some((name, bytes)) = ended else { continue };
                let all = profile.kernels.entry(name.clone()).or_default();
                all.dispatches += 1;
                all.time += time(pair[0], pair[1]);
                all.bytes += bytes;
            }
        }
    }
}

/// A kernel's name and shape, and the bytes of weights that a dispatch reads.
pub(crate) fn named(kernel: &Kernel, arguments: &[u32], groups: [u32; 3]) -> (String, u64) {
    let (product, how) = match kernel {
        Kernel::Product(product) if product.shares_experts() => (*product, ", shared"),
        Kernel::Product(product) => (*product, ""),
        Kernel::Batch(batch) => (batch.of_one_row(), ", matrices"),
        _ => {
            let name = format!("{kernel:?}");
            let end = name.find(['(', ' ']).unwrap_or(name.len());
            return (name[..end].to_owned(), 0);
        }
    };
    let argument = |index: usize| arguments.get(index).map_or(0, |&word| u64::from(word));
    let (outputs, x_stride, choices) = (argument(2), argument(6), argument(14));
    let lines = if product.role.is_gated() { 2 * outputs } else { outputs };
    let (blocks, matrices) = match product.role {
        // A matrix for each head.
        Role::Plain | Role::Gated => (argument(0), u64::from(groups[2])),
        // How many experts the tiles have is not known here.
        _ if product.shares_experts() => (argument(0), 0),
        Role::ExpertGated | Role::ExpertUp => (argument(0), u64::from(groups[1]) * u64::from(groups[2])),
        // A row of an expert's channels.
        Role::ExpertDown if product.input.has_levels() => (x_stride, choices * u64::from(groups[2])),
        Role::ExpertDown => (x_stride / 8, choices * u64::from(groups[2])),
    };
    let bits = product.format.words().iter().sum::<usize>();
    let (role, input, columns) = (product.role, product.input, blocks * 32);
    let name = format!("{role:?} {lines} x {columns}, {bits} bits, {input:?}{how}");
    (name, matrices * lines * bytes_of(product.format, blocks, argument(1)))
}

/// Bytes of a row of `blocks` blocks, where `1 << shift` blocks share a scale.
fn bytes_of(format: Format, blocks: u64, shift: u64) -> u64 {
    let words = format.words().iter().sum::<usize>() as u64;
    let groups = if format.halves { 2 * blocks } else { blocks >> shift };
    4 * (blocks * words + groups * format.scale_words() as u64)
}
