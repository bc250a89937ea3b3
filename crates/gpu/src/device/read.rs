//! Reads the results of a step while the device computes the next step, if that was predicted.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thunder_compute::ComputeError;
use wgpu::{BufferUsages, PollType, SubmissionIndex};

use super::report::{Arrival, Report};
use super::{ANSWER_LIMIT_S, Device, MOST_DISPATCHES, add_dispatch, binding_of};
use crate::ahead::Dispatch;
use crate::buffer::Memory;
use crate::follow::{Given, Next, Script, Vote, Wanted};
use crate::kernel::{Kernel, TokenSearch};

/// Results of submitted commands.
pub(crate) struct Results {
    carrier: Carrier,
    submission: Option<SubmissionIndex>,
}

/// Returns what all ranks can do.
pub(crate) type Ballot<'a> = &'a mut dyn FnMut(Vote) -> Vote;

enum Carrier {
    Report(Report),
    /// To be mapped.
    Buffer(wgpu::Buffer),
}

impl Device {
    /// Submits the recorded commands, waits for them and reads words.
    pub fn read(
        &mut self,
        memory: &Memory,
        words: Range<usize>,
        out: &mut Vec<u32>,
    ) -> Result<(), ComputeError> {
        self.cannot_repeat()?;
        self.read_step((memory, words), (None, None), out, None)
    }

    /// [`Self::read`] for a step's last result: the largest number of each part of `rows` rows.
    /// Meanwhile the device gets the `next` step, if enough of it is known and no other rank
    /// objects. The first word of `lost` is not 0 if a sum over ranks was lost; without it, the
    /// host waits for all commands.
    pub fn read_step(
        &mut self,
        (memory, words): (&Memory, Range<usize>),
        (lost, ballot): (Option<&Memory>, Option<Ballot<'_>>),
        out: &mut Vec<u32>,
        next: Option<(Next, usize)>,
    ) -> Result<(), ComputeError> {
        out.clear();
        let bytes = words.len() as u64 * 4;
        if bytes == 0 {
            return Ok(());
        }
        self.reads += 1;
        let given = self.follow.finish(&(memory.id, words.clone()));
        let was_given = given.is_some();
        let mut results = match given {
            Some(given) => given.results,
            None => {
                self.interrupt()?;
                self.submit_results(memory, words.clone(), lost)?
            }
        };
        let mut wanted = next.and_then(|(next, rows)| Some((self.follow.wanted(next)?, rows)));
        if let Some(ballot) = ballot {
            let keeps = !self.follow.was_in_vain();
            let all = ballot(Vote { keeps, shares: true, gives: wanted.is_some() });
            if was_given && !all.keeps {
                let again = self.follow.again();
                again.map_or(Ok(()), |again| self.record_again(&again))?;
                results = self.submit_results(memory, words.clone(), lost)?;
            }
            wanted = wanted.filter(|_| all.gives && all.keeps);
        }
        let follows = match wanted {
            Some((wanted, rows)) => self.submit_next(wanted, rows, (memory, words), lost)?,
            None => false,
        };
        let Results { carrier, submission } = results;
        if !follows {
            self.record_ahead();
        }
        let staging = match carrier {
            Carrier::Report(report) => {
                return match self.await_report(report, submission, out)? {
                    Arrival::Never => Err(self.failed("its results did not arrive")),
                    Arrival::Early | Arrival::Late => Ok(()),
                };
            }
            Carrier::Buffer(staging) => staging,
        };
        let mapped = Arc::new(Mutex::new(None));
        let told = Arc::clone(&mapped);
        staging.slice(..bytes).map_async(wgpu::MapMode::Read, move |result| {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        });
        if follows {
            self.wait_for(submission)?
        } else {
            self.wait()?
        }
        match mapped.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(self.failed(error.to_string())),
            None => return Err(self.failed("the results were not mapped")),
        }
        let view = staging.slice(..bytes).get_mapped_range();
        let view = view.map_err(|error| self.failed(error.to_string()))?;
        // The view has the alignment of the mapping, which wgpu guarantees to be 8.
        out.extend(view.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)));
        drop(view);
        staging.unmap();
        self.staging.push(staging);
        Ok(())
    }

    /// Submits the recorded commands and those that take results to the host.
    fn submit_results(
        &mut self,
        memory: &Memory,
        words: Range<usize>,
        lost: Option<&Memory>,
    ) -> Result<Results, ComputeError> {
        let carrier = self.record_results(memory, words, lost)?;
        self.submit_all()?;
        Ok(Results { carrier, submission: self.earlier[1].clone() })
    }

    /// Records how results get to the host.
    fn record_results(
        &mut self,
        memory: &Memory,
        words: Range<usize>,
        lost: Option<&Memory>,
    ) -> Result<Carrier, ComputeError> {
        if let Some(lost) = lost.filter(|_| self.can_report(words.len())) {
            let (report, dispatch) = self.report(memory, words, lost)?;
            let mut all = self.ahead.end();
            all.push(dispatch);
            self.record_all(&all)?;
            return Ok(Carrier::Report(report));
        }
        let staging = self.staging_of(words.len() as u64 * 4)?;
        let to = Memory::new(staging.clone(), 0);
        self.copy_recorded((memory, words.start), (&to, 0), words.len())?;
        Ok(Carrier::Buffer(staging))
    }

    fn staging_of(&mut self, bytes: u64) -> Result<wgpu::Buffer, ComputeError> {
        if let Some(index) = self.staging.iter().position(|staging| staging.size() >= bytes) {
            return Ok(self.staging.swap_remove(index));
        }
        self.staging.clear();
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        Ok(self.allocate(bytes.next_power_of_two() as usize, "results", usage)?.buffer)
    }

    /// Submits the next step, which is known except for its tokens. These are the columns of the
    /// largest numbers of `rows` rows, whose parts are first in `words` of `memory`.
    fn submit_next(
        &mut self,
        Wanted { tables, tokens, parts, are_floats }: Wanted,
        rows: usize,
        (memory, words): (&Memory, Range<usize>),
        lost: Option<&Memory>,
    ) -> Result<bool, ComputeError> {
        let Some((of_tables, _)) = self.tables.clone() else { return Ok(false) };
        let first: usize = tables[..tokens].iter().map(Vec::len).sum();
        let arguments = TokenSearch { parts, to: first, are_floats, ..Default::default() }.arguments();
        let buffers = [memory, &of_tables];
        self.prepare(&Kernel::NextTokens)?;
        let binding = binding_of(&Kernel::NextTokens, &buffers);
        let group = self.bind(binding, &buffers)?;
        let of_tokens =
            Dispatch { binding, group, arguments: arguments.to_vec(), groups: [rows as u32, 1, 1] };
        let (carrier, report) = match lost.filter(|_| self.can_report(words.len())) {
            Some(lost) => {
                let (report, dispatch) = self.report(memory, words.clone(), lost)?;
                (Carrier::Report(report), Some(dispatch))
            }
            None => (Carrier::Buffer(self.staging_of(words.len() as u64 * 4)?), None),
        };
        self.queue.write_buffer(&of_tables.buffer, 0, bytemuck::cast_slice(&tables.concat()));
        let dispatches: Vec<_> =
            std::iter::once(&of_tokens).chain(self.follow.dispatches()).chain(&report).collect();
        let parts = dispatches.chunks(MOST_DISPATCHES);
        let last = parts.len() - 1;
        for (index, part) in parts.enumerate() {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for Dispatch { binding: (kernel, _), group, arguments, groups } in part {
                let Some(pipeline) = self.pipelines.get(kernel) else {
                    unreachable!("pipelines of recorded kernels were made")
                };
                let numbering = self.numbering.as_deref();
                add_dispatch(&mut pass, (kernel, pipeline), numbering, group, arguments, *groups);
            }
            drop(pass);
            if index == last
                && let Carrier::Buffer(staging) = &carrier
            {
                let (from, bytes) = (words.start as u64 * 4, words.len() as u64 * 4);
                encoder.copy_buffer_to_buffer(&memory.buffer, from, staging, 0, Some(bytes));
            }
            self.followed += usize::from(index == last);
            let [_, before] = std::mem::take(&mut self.earlier);
            self.earlier = [before, Some(self.queue.submit([encoder.finish()]))];
        }
        let results = Results { carrier, submission: self.earlier[1].clone() };
        self.follow.give(Given { tables, tokens, read: (memory.id, words), results });
        self.check()?;
        Ok(true)
    }

    /// Passes on the tokens of the step that the device got ahead.
    pub fn tell_tokens(&mut self, tokens: impl Iterator<Item = u32>) {
        self.follow.tell(tokens);
    }

    /// Prepares for something that was not predicted: the current step's commands are recorded
    /// again.
    pub fn interrupt(&mut self) -> Result<(), ComputeError> {
        match self.follow.take_back() {
            Some(again) => self.record_again(&again),
            None => Ok(()),
        }
    }

    fn record_again(&mut self, again: &Script) -> Result<(), ComputeError> {
        let words = again.tables.concat();
        if let Some((memory, used)) = &mut self.tables {
            self.queue.write_buffer(&memory.buffer, 0, bytemuck::cast_slice(&words));
            *used = words.len();
            self.upload_bytes += size_of_val(&*words);
        }
        self.record_all(&again.dispatches)
    }

    /// The current step changes something that it has read.
    pub fn cannot_repeat(&mut self) -> Result<(), ComputeError> {
        self.interrupt()?;
        self.follow.spoil();
        Ok(())
    }

    /// Waits until the device has finished a submission and all before it.
    pub(super) fn wait_for(&mut self, submission: Option<SubmissionIndex>) -> Result<(), ComputeError> {
        let timeout = Some(Duration::from_secs(ANSWER_LIMIT_S));
        let waited = self.device.poll(PollType::Wait { submission_index: submission, timeout });
        self.check()?;
        match waited {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed(format!("no answer within {ANSWER_LIMIT_S} s: {error}"))),
        }
    }
}
