//! How long each kernel of a step takes, by timestamps that the device writes between dispatches.
//!
//! A process measures all of its GPUs together: [`start_profile`], some steps, [`take_profile`].

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wgpu::{BufferDescriptor, BufferUsages, CommandEncoder, ComputePass, Features, MapMode, QuerySet};

use crate::format::Format;
use crate::kernel::{Kernel, Role};

/// What a device needs to be measured.
pub(crate) const TIMING: Features = Features::TIMESTAMP_QUERY.union(Features::TIMESTAMP_QUERY_INSIDE_PASSES);

/// Timestamps of a submission at most: one of each dispatch, and one of each pass.
const MAX_MARKS: u32 = 512;

/// All dispatches of a kernel with one shape.
#[derive(Debug, Clone, Default)]
pub struct KernelTime {
    /// How often it ran.
    pub dispatches: usize,
    /// With the barrier before each dispatch.
    pub time: Duration,
    /// Bytes of weights that were read; 0 for kernels without weights.
    pub bytes: u64,
}

/// What was measured.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// Steps that were measured.
    pub steps: usize,
    /// From the beginning of a step to that of the next one, all added up. Measuring is in it.
    pub wall: Duration,
    /// By the kernel's name and shape.
    pub kernels: BTreeMap<String, KernelTime>,
    /// The longest that a submission's commands took: a driver ends those that take too long.
    pub longest_submission: Duration,
}

/// The steps that are wanted, and what they gave.
type Wanted = Option<(Option<usize>, Profile)>;
static PROFILE: Mutex<Wanted> = Mutex::new(None);

fn profile() -> MutexGuard<'static, Wanted> {
    PROFILE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to measure steps of `generated` tokens and nothing else; with `None`, those that read
/// prompts.
pub fn start_profile(generated: Option<usize>) {
    *profile() = Some((generated, Profile::default()));
}

/// Ends measuring. `None` if it was not begun.
pub fn take_profile() -> Option<Profile> {
    profile().take().map(|(_, profile)| profile)
}

/// A device's part of measuring.
#[derive(Default)]
pub(crate) struct Timer {
    /// When the step began, if it is measured.
    step: Option<Instant>,
    marks: Option<Marks>,
    submitted: Vec<Marks>,
}

/// Timestamps of one submission.
struct Marks {
    set: QuerySet,
    /// What ended at each timestamp: a dispatch and its bytes, or nothing that counts.
    ended: Vec<Option<(String, u64)>>,
    results: Option<wgpu::Buffer>,
}

impl Timer {
    /// Begins a step: of `generated` rows, or of others too.
    pub fn begin_step(&mut self, device: &wgpu::Device, generated: Option<usize>) {
        let before = self.step.take();
        if let Some((wanted, profile)) = &mut *profile() {
            if let Some(before) = before {
                profile.steps += 1;
                profile.wall += before.elapsed();
            }
            if generated == *wanted && device.features().contains(TIMING) {
                self.step = Some(Instant::now());
            }
        }
    }

    /// True in a step that is measured.
    pub fn is_on(&self) -> bool {
        self.step.is_some()
    }

    /// Writes a timestamp: where a pass begins, or after a dispatch.
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

    /// Asks for the timestamps of what was submitted. Call [`Self::collect`] when the device has
    /// done it.
    pub fn ask(&self) {
        for results in self.submitted.iter().filter_map(|marks| marks.results.as_ref()) {
            results.slice(..).map_async(MapMode::Read, |_| ());
        }
    }

    /// Adds up the timestamps of what was submitted.
    pub fn collect(&mut self, queue: &wgpu::Queue) {
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
    let Kernel::Product(product) = kernel else {
        let name = format!("{kernel:?}");
        let end = name.find(['(', ' ']).unwrap_or(name.len());
        return (name[..end].to_owned(), 0);
    };
    let argument = |index: usize| arguments.get(index).map_or(0, |&word| u64::from(word));
    let (outputs, x_stride, choices) = (argument(2), argument(6), argument(14));
    let lines = if matches!(product.role, Role::Gated | Role::ExpertGated) { 2 * outputs } else { outputs };
    let (blocks, matrices) = match product.role {
        Role::Plain | Role::Gated => (argument(0), 1),
        Role::ExpertGated => (argument(0), u64::from(groups[1]) * u64::from(groups[2])),
        // A row of an expert's channels.
        Role::ExpertDown if product.input.has_levels() => (x_stride, choices * u64::from(groups[2])),
        Role::ExpertDown => (x_stride / 8, choices * u64::from(groups[2])),
    };
    let bits = product.format.words().iter().sum::<usize>();
    let (role, input, columns) = (product.role, product.input, blocks * 32);
    let name = format!("{role:?} {lines} x {columns}, {bits} bits, {input:?}");
    (name, matrices * lines * bytes_of(product.format, blocks, argument(1)))
}

/// Bytes of a row of `blocks` blocks, of which `1 << shift` share a scale.
fn bytes_of(format: Format, blocks: u64, shift: u64) -> u64 {
    let words = format.words().iter().sum::<usize>() as u64;
    let groups = if format.halves { 2 * blocks } else { blocks >> shift };
    4 * (blocks * words + groups * format.scale_words() as u64)
}
