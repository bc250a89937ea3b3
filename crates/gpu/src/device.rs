//! An open device: its pipelines, and a step's commands that are recorded and not yet submitted.

pub(crate) mod gate;
pub(crate) mod host_rows;
mod import;
pub(crate) mod numbering;
mod open;
mod pipelines;
pub(crate) mod read;
pub(crate) mod report;
pub(crate) mod shared;
mod soon;
mod tables;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thunder_collectives::SharedMemory;
use thunder_compute::ComputeError;
use thunder_compute::cpu::pool::Pool;
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BufferDescriptor, BufferUsages, CommandBuffer,
    CommandEncoder, ComputePass, PollType, SubmissionIndex,
};

use crate::adapter::block_on;
use crate::ahead::{AHEAD, Ahead, Binding, Dispatch};
use crate::buffer::Memory;
use crate::follow::Follow;
use crate::kernel::{Access, Draw, Kernel};
use crate::peak::GpuArithmetic;
use crate::profile::{Timer, named};
use crate::wait::Cores;
use numbering::Numbering;
use pipelines::Pipeline;
use report::Reports;
use soon::Soon;

/// Maximum bytes of a kernel's arguments, which every Vulkan driver supports.
pub(crate) const MAX_ARGUMENT_BYTES: u32 = 128;

/// How long the device may take for submitted work.
pub(crate) const ANSWER_LIMIT_S: u64 = 60;

/// A part of a step is submitted after this many dispatches at first, then after twice as many each
/// time. The device computes while the rest is recorded, and no submission takes long.
const FIRST_DISPATCHES: usize = 16;
const MOST_DISPATCHES: usize = 128;

/// Number of bind groups that are kept. A model uses a few thousand; beyond this limit all are made
/// again.
const MAX_BIND_GROUPS: usize = 16 << 10;

/// Bytes that may be waiting for the device while weights are uploaded.
const MAX_UPLOAD_BYTES: usize = 64 << 20;

/// An open device.
pub(crate) struct Device {
    pub name: String,
    device: wgpu::Device,
    queue: wgpu::Queue,
    /// The largest buffer that can be bound.
    pub max_binding_bytes: u64,
    /// A discrete GPU, which is faster than others.
    pub is_discrete: bool,
    /// Kernels can be given in Metal's language.
    pub speaks_metal: bool,
    max_groups: u32,
    /// The form of the kernel that chooses tokens.
    pub draw: Draw,
    /// Side of the cooperative matrices that kernels can use.
    pub matrix_side: Option<usize>,
    /// The device has cooperative matrices of bytes.
    pub multiplies_bytes: bool,
    /// The device can import host memory.
    imports: bool,
    /// Cores for threads that serve the device.
    pub cores: Option<Cores>,
    pipelines: HashMap<Kernel, Pipeline>,
    soon: Soon,
    bindings: HashMap<Binding, BindGroup>,
    encoder: Option<CommandEncoder>,
    pass: Option<ComputePass<'static>>,
    /// Number of dispatches, copies and uploads so far.
    pub recorded: u64,
    dispatches: usize,
    /// Work of the current submission, in the most that one may have.
    share: f32,
    /// All work so far.
    #[cfg(test)]
    pub work: f32,
    /// Maximum dispatches of the current submission.
    most_dispatches: usize,
    /// Number of kernels that were compiled one by one, and the time that this took.
    #[cfg(test)]
    pub compiled: (usize, Duration),
    /// Dispatches of the step.
    #[cfg(test)]
    pub submissions: usize,
    /// Number of steps that the device got ahead.
    pub followed: usize,
    /// How often the host has waited for results.
    pub reads: usize,
    ahead: Ahead,
    follow: Follow,
    /// Numbers exchanges with other ranks.
    pub numbering: Option<Arc<dyn Numbering>>,
    /// The last two submissions.
    earlier: [Option<SubmissionIndex>; 2],
    /// Tables that kernels read, and how much of them is used.
    tables: Option<(Memory, usize)>,
    /// The last part of the used tables, not yet uploaded.
    new_tables: Vec<u32>,
    /// Results that the host reads without the driver, if they are proved.
    reports: Option<Reports>,
    /// Free buffers for reading results.
    staging: Vec<wgpu::Buffer>,
    upload_bytes: usize,
    /// Threads that pack weights while a model is loaded.
    packers: Option<Pool>,
    next_id: u64,
    timer: Timer,
    /// The first error that the driver reported.
    failure: Arc<Mutex<Option<String>>>,
    /// Changes kernels' texts, to test that proofs find wrong kernels.
    #[cfg(test)]
    pub sabotage: Option<fn(&Kernel, String) -> String>,
    /// Memory behind imported buffers. Dropped after the buffers.
    imported: Vec<Arc<SharedMemory>>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let Self { reads, followed, .. } = self;
        tracing::debug!(reads, ahead = followed, "device closed");
    }
}

impl Device {
    pub fn failed(&self, reason: impl Into<String>) -> ComputeError {
        ComputeError::Device { device: self.name.clone(), reason: reason.into() }
    }

    /// Fails if the driver has reported an error.
    pub fn check(&self) -> Result<(), ComputeError> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(reason) => Err(self.failed(reason.clone())),
            None => Ok(()),
        }
    }

    /// Threads that pack weights, one for each core. They sleep between matrices.
    pub fn packers(&mut self) -> &mut Pool {
        self.packers.get_or_insert_with(|| {
            Pool::new(std::thread::available_parallelism().map_or(1, usize::from), None)
        })
    }

    /// Ends the packing threads. A step begins, so all weights are loaded.
    pub fn end_packing(&mut self) {
        self.packers = None;
    }

    /// A zeroed buffer.
    pub fn memory(&mut self, bytes: usize, what: &'static str) -> Result<Memory, ComputeError> {
        self.allocate(bytes, what, BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC)
    }

    fn allocate(
        &mut self,
        bytes: usize,
        what: &'static str,
        usage: BufferUsages,
    ) -> Result<Memory, ComputeError> {
        self.check()?;
        let size = bytes.next_multiple_of(16).max(16) as u64;
        let memory = |reason| ComputeError::Memory { bytes, what, reason };
        if size > self.max_binding_bytes {
            let limit = self.max_binding_bytes;
            let name = &self.name;
            return Err(memory(format!(
                "{name} binds buffers of at most {limit} bytes: use more ranks, or less context"
            )));
        }
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = self.device.create_buffer(&BufferDescriptor {
            label: None,
            size,
            usage,
            mapped_at_creation: false,
        });
        if let Some(error) = block_on(scope.pop()) {
            return Err(memory(error.to_string()));
        }
        self.check()?;
        self.next_id += 1;
        Ok(Memory::new(buffer, self.next_id))
    }

    /// A buffer with these words.
    pub fn filled(&mut self, words: &[u32], what: &'static str) -> Result<Memory, ComputeError> {
        let memory = self.memory(size_of_val(words), what)?;
        self.upload(&memory, 0, words)?;
        Ok(memory)
    }

    /// Writes words to a part of a buffer that no recorded command reads, starting at word `first`.
    pub fn upload(&mut self, memory: &Memory, first: usize, words: &[u32]) -> Result<(), ComputeError> {
        if words.is_empty() {
            return Ok(());
        }
        self.interrupt()?;
        self.recorded += 1;
        memory.note_write(self.recorded);
        self.queue.write_buffer(&memory.buffer, first as u64 * 4, bytemuck::cast_slice(words));
        self.upload_bytes += size_of_val(words);
        if self.upload_bytes > MAX_UPLOAD_BYTES {
            self.submit()?;
            self.wait()?;
        }
        Ok(())
    }

    /// Writes words to a part of a buffer that recorded commands may read. These are submitted
    /// first.
    pub fn overwrite(&mut self, memory: &Memory, first: usize, words: &[u32]) -> Result<(), ComputeError> {
        self.submit()?;
        self.upload(memory, first, words)
    }

    /// Records a kernel with these buffers, arguments and workgroups.
    pub fn dispatch(
        &mut self,
        kernel: &Kernel,
        buffers: &[&Memory],
        arguments: &[u32],
        groups: [u32; 3],
    ) -> Result<(), ComputeError> {
        if groups.contains(&0) {
            return Ok(());
        }
        debug_assert!(size_of_val(arguments) <= MAX_ARGUMENT_BYTES as usize);
        self.recorded += 1;
        for (memory, access) in buffers.iter().zip(kernel.bindings()) {
            if access == Access::Write {
                memory.note_write(self.recorded);
            }
        }
        if let Some(&value) = groups.iter().find(|count| **count > self.max_groups) {
            let (what, needs) = ("the number of a kernel's workgroups", "at most 65535");
            return Err(ComputeError::Shape { what, value: value as usize, backend: "GPU", needs });
        }
        let binding = binding_of(kernel, buffers);
        if self.follow.dispatch(&binding, arguments, groups) {
            return Ok(());
        }
        self.interrupt()?;
        let bound = self.bindings.get(&binding).cloned();
        let dispatch = |group| Dispatch { binding, group, arguments: arguments.to_vec(), groups };
        if self.ahead.matches(&binding, arguments, groups) {
            match bound {
                Some(group) => self.follow.note(|| dispatch(group)),
                None => self.follow.spoil(),
            }
            let Some(commands) = self.ahead.hold_back() else { return Ok(()) };
            self.most_dispatches = 2 * AHEAD;
            return self.submit_commands(Some(commands));
        }
        self.prepare(kernel)?;
        let group = match bound {
            Some(group) => group,
            None => self.bind(binding, buffers)?,
        };
        if self.ahead.begins() {
            let held_back = self.ahead.release();
            self.record_all(&held_back)?;
            self.ahead.note(dispatch(group.clone()));
        }
        self.follow.note(|| dispatch(group.clone()));
        self.record(kernel, &group, arguments, groups)
    }

    fn record_all(&mut self, dispatches: &[Dispatch]) -> Result<(), ComputeError> {
        for Dispatch { binding: (kernel, _), group, arguments, groups } in dispatches {
            self.record(kernel, group, arguments, *groups)?;
        }
        Ok(())
    }

    fn record(
        &mut self,
        kernel: &Kernel,
        group: &BindGroup,
        arguments: &[u32],
        groups: [u32; 3],
    ) -> Result<(), ComputeError> {
        if self.pass.is_none() {
            let device = &self.device;
            let encoder =
                self.encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()));
            let mut pass = encoder.begin_compute_pass(&Default::default()).forget_lifetime();
            self.timer.mark(device, &mut pass, || None);
            self.pass = Some(pass);
        }
        let (Some(pass), Some(pipeline)) = (&mut self.pass, self.pipelines.get(kernel)) else {
            unreachable!("the pass was begun and the pipeline made")
        };
        add_dispatch(pass, (kernel, pipeline), self.numbering.as_deref(), group, arguments, groups);
        self.timer.mark(&self.device, pass, || Some(named(kernel, arguments, groups)));
        self.dispatches += 1;
        if self.dispatches >= self.most_dispatches {
            self.most_dispatches = (2 * self.most_dispatches).min(MOST_DISPATCHES);
            self.submit_recorded()?;
        }
        Ok(())
    }

    /// Records the beginning of the next step, if it will probably equal this step's.
    fn record_ahead(&mut self) {
        let Some(dispatches) = self.ahead.wanted() else { return };
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for Dispatch { binding: (kernel, _), group, arguments, groups } in dispatches {
            let Some(pipeline) = self.pipelines.get(kernel) else {
                unreachable!("pipelines of recorded kernels were made")
            };
            // There is no exchange among them.
            add_dispatch(&mut pass, (kernel, pipeline), None, group, arguments, *groups);
        }
        drop(pass);
        self.ahead.keep(encoder.finish());
    }

    /// Records a copy of words.
    pub fn copy(
        &mut self,
        (from, from_word): (&Memory, usize),
        (to, to_word): (&Memory, usize),
        words: usize,
    ) -> Result<(), ComputeError> {
        if words == 0 {
            return Ok(());
        }
        self.cannot_repeat()?;
        self.recorded += 1;
        to.note_write(self.recorded);
        self.copy_recorded((from, from_word), (to, to_word), words)
    }

    fn copy_recorded(
        &mut self,
        (from, from_word): (&Memory, usize),
        (to, to_word): (&Memory, usize),
        words: usize,
    ) -> Result<(), ComputeError> {
        let held_back = self.ahead.end();
        self.record_all(&held_back)?;
        self.pass = None;
        let encoder =
            self.encoder.get_or_insert_with(|| self.device.create_command_encoder(&Default::default()));
        let (from_byte, to_byte) = (from_word as u64 * 4, to_word as u64 * 4);
        encoder.copy_buffer_to_buffer(&from.buffer, from_byte, &to.buffer, to_byte, Some(words as u64 * 4));
        self.check()
    }

    /// Submits what was recorded.
    pub fn submit(&mut self) -> Result<(), ComputeError> {
        self.interrupt()?;
        self.submit_all()
    }

    /// [`Self::submit`] for sums over ranks, which have been submitted if the device got the step
    /// ahead.
    pub fn submit_sums(&mut self) -> Result<(), ComputeError> {
        if self.follow.has_given() { Ok(()) } else { self.submit() }
    }

    /// [`Self::submit`] between operations. Does nothing if the device already has the next step
    /// and the host has not begun it: then nothing is recorded.
    pub fn submit_step(&mut self) -> Result<(), ComputeError> {
        if self.follow.has_given() && !self.follow.is_comparing() { Ok(()) } else { self.submit() }
    }

    fn submit_all(&mut self) -> Result<(), ComputeError> {
        let held_back = self.ahead.end();
        self.record_all(&held_back)?;
        self.submit_recorded()
    }

    fn submit_recorded(&mut self) -> Result<(), ComputeError> {
        self.pass = None;
        (self.dispatches, self.share) = (0, 0.0);
        if let Some(encoder) = &mut self.encoder {
            self.timer.resolve(&self.device, encoder);
        }
        let commands = self.encoder.take().map(CommandEncoder::finish);
        self.submit_commands(commands)
    }

    fn submit_commands(&mut self, commands: Option<CommandBuffer>) -> Result<(), ComputeError> {
        self.upload_tables();
        if commands.is_some() || self.upload_bytes > 0 {
            #[cfg(test)]
            {
                self.submissions += 1;
            }
            let [_, last] = std::mem::take(&mut self.earlier);
            self.earlier = [last, Some(self.queue.submit(commands))];
            self.upload_bytes = 0;
        }
        self.check()
    }

    /// Counts work before it is recorded, in the most that a submission may have. What does not fit
    /// begins another one.
    pub fn record_share(&mut self, share: f32) -> Result<(), ComputeError> {
        if self.share + share > 1.0 {
            self.submit()?;
        }
        self.share += share;
        #[cfg(test)]
        {
            self.work += share;
        }
        Ok(())
    }

    /// Submits, and waits until only this submission is left. Drivers give up a queue that takes
    /// seconds, so long work must not pile up.
    pub fn submit_long(&mut self) -> Result<(), ComputeError> {
        self.submit()?;
        let Some(index) = self.earlier[0].take() else { return Ok(()) };
        let timeout = Some(Duration::from_secs(ANSWER_LIMIT_S));
        let waited = self.device.poll(PollType::Wait { submission_index: Some(index), timeout });
        self.check()?;
        match waited {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed(format!("no answer within {ANSWER_LIMIT_S} s: {error}"))),
        }
    }

    /// Waits until the device has finished all submitted work.
    pub fn wait(&mut self) -> Result<(), ComputeError> {
        let timeout = Some(Duration::from_secs(ANSWER_LIMIT_S));
        self.timer.ask();
        let [earlier, _] = std::mem::take(&mut self.earlier);
        if earlier.is_some() {
            // Frees what earlier submissions held while the last one runs. The wait for the last
            // one reports the same errors.
            let _ = self.device.poll(PollType::Wait { submission_index: earlier, timeout });
        }
        let waited = self.device.poll(PollType::Wait { submission_index: None, timeout });
        self.timer.collect(&self.queue);
        self.check()?;
        match waited {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed(format!("no answer within {ANSWER_LIMIT_S} s: {error}"))),
        }
    }

    fn bind(&mut self, binding: Binding, buffers: &[&Memory]) -> Result<BindGroup, ComputeError> {
        if let Some(group) = self.bindings.get(&binding) {
            return Ok(group.clone());
        }
        let kernel = &binding.0;
        let Some(pipeline) = self.pipelines.get(kernel) else { unreachable!("the pipeline was made") };
        debug_assert_eq!(buffers.len(), kernel.bindings().len(), "{kernel:?}");
        let resources = buffers.iter().map(|memory| memory.buffer.as_entire_binding());
        let entry = |(binding, resource)| BindGroupEntry { binding, resource };
        let entries: Vec<_> = (0..).zip(resources).map(entry).collect();
        let group = self.device.create_bind_group(&BindGroupDescriptor {
            label: None,
            layout: &pipeline.layout,
            entries: &entries,
        });
        self.check()?;
        if self.bindings.len() >= MAX_BIND_GROUPS {
            self.bindings.clear();
        }
        self.bindings.insert(binding, group.clone());
        Ok(group)
    }

    /// Drops the bind groups of kernels, which keep their buffers alive.
    pub fn forget_bindings_of(&mut self, is_one: impl Fn(&Kernel) -> bool) {
        self.bindings.retain(|(kernel, _), _| !is_one(kernel));
    }

    /// The fastest arithmetic of the kernels that were used since all bind groups were dropped.
    pub fn arithmetic(&self) -> GpuArithmetic {
        self.bindings.keys().map(|(kernel, _)| kernel.arithmetic()).max().unwrap_or_default()
    }

    /// Drops all bind groups.
    pub fn forget_bindings(&mut self) {
        self.bindings.clear();
        self.ahead = Ahead::default();
        self.follow = Follow::default();
    }
}

/// Adds a dispatch to a pass that the device will compute. `numbering` numbers exchanges.
fn add_dispatch(
    pass: &mut ComputePass<'_>,
    (kernel, pipeline): (&Kernel, &Pipeline),
    numbering: Option<&dyn Numbering>,
    group: &BindGroup,
    arguments: &[u32],
    groups: [u32; 3],
) {
    let numbered = numbering.and_then(|numbering| numbering.numbered(kernel, arguments));
    let arguments = numbered.as_ref().map_or(arguments, |numbered| numbered);
    pass.set_pipeline(&pipeline.pipeline);
    pass.set_bind_group(0, group, &[]);
    pass.set_immediates(0, bytemuck::cast_slice(arguments));
    pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
}

fn binding_of(kernel: &Kernel, buffers: &[&Memory]) -> Binding {
    let mut ids = [0; 12];
    for (id, memory) in ids.iter_mut().zip(buffers) {
        *id = memory.id;
    }
    (*kernel, ids)
}
