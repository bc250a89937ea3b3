//! Results that the device stores where the host sees them. The host reads them as soon as they are
//! there: it maps nothing, and asks the driver only if they take long or a sum was lost.
//!
//! Why this is correct:
//! - A vector of four words has a check word, as in sums that hosts relay ([`crate::relay`]). The
//!   device's stores may arrive in any order; a vector of another report does not pass.
//! - Reports use two slots alternately. While the host waits for a report, at most one more step is
//!   submitted. The report of a step computed in vain is overwritten, in the queue's order.
//! - A report may arrive before the device's word that a sum was lost, which is elsewhere. So it
//!   says this itself; the host then waits for the device before it looks.

use std::ops::Range;
use std::time::Duration;

use thunder_compute::ComputeError;
use wgpu::SubmissionIndex;

use super::shared::{Place, Shared};
use super::{Device, binding_of};
use crate::ahead::Dispatch;
use crate::buffer::Memory;
use crate::kernel::{Kernel, RELAY_WORDS};
use crate::proof::Numbers;
use crate::wait::Waits;
use crate::without::{Way, without};

/// Maximum words of a report: the parts of the largest logits of 128 rows.
const MAX_WORDS: usize = 16 << 10;
/// Vectors of a slot. The first word is no result.
const SLOT_VECTORS: usize = (1 + MAX_WORDS).div_ceil(RELAY_WORDS).next_multiple_of(64);
/// Threads of a workgroup, each for a vector.
const THREADS: usize = 64;
/// How long the host looks itself before it waits for the driver: steps that take longer are of
/// prompts, or on slow devices.
const LONGEST_LOOK: Duration = Duration::from_millis(15);
/// The same on a host that has no core to spare.
const SHORT_LOOK: Duration = Duration::from_millis(2);
/// Reports of a proof, and their sizes in words.
const PROVED: usize = 48;
const SIZES: [usize; 5] = [2, 1, 128, 1000, MAX_WORDS];

/// Memory for reports.
pub(super) struct Reports {
    shared: Shared,
    waits: Waits,
    /// The last report's number.
    number: u32,
}

/// A recorded report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    number: u32,
    words: usize,
}

/// When a report was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Before the driver was asked.
    Early,
    Late,
    Never,
}

impl Report {
    fn first_vector(self) -> usize {
        self.number as usize % 2 * SLOT_VECTORS
    }

    fn vectors(self) -> usize {
        (1 + self.words).div_ceil(RELAY_WORDS)
    }
}

impl Device {
    /// Whether results of this many words can be reported. Steps that are measured are waited for.
    pub(super) fn can_report(&self, words: usize) -> bool {
        words <= MAX_WORDS && self.reports.is_some() && !self.timer.is_on() && !without(Way::Reports)
    }

    /// The dispatch of the next report, of words of `memory`. The first word of `lost` is not 0 if
    /// a sum over ranks was lost.
    pub(super) fn report(
        &mut self,
        memory: &Memory,
        words: Range<usize>,
        lost: &Memory,
    ) -> Result<(Report, Dispatch), ComputeError> {
        let Some(reports) = &mut self.reports else { unreachable!("reports were asked for") };
        reports.number = reports.number.wrapping_add(1);
        let report = Report { number: reports.number, words: words.len() };
        let to = reports.shared.memory.clone();
        let numbers = [words.start, words.len(), report.first_vector(), report.number as usize];
        let buffers = [memory, lost, &to];
        self.prepare(&Kernel::Report)?;
        let binding = binding_of(&Kernel::Report, &buffers);
        let group = self.bind(binding, &buffers)?;
        let arguments = numbers.map(|number| number as u32).to_vec();
        let groups = [report.vectors().div_ceil(THREADS) as u32, 1, 1];
        Ok((report, Dispatch { binding, group, arguments, groups }))
    }

    /// Waits for a report, which `submission` makes.
    pub(super) fn await_report(
        &mut self,
        report: Report,
        submission: Option<SubmissionIndex>,
        out: &mut Vec<u32>,
    ) -> Result<Arrival, ComputeError> {
        let is_early = self.look_for(report, out);
        if !is_early || out.first() != Some(&0) {
            self.wait_for(submission)?;
            if !is_early && !self.has_arrived(report, out) {
                out.clear();
                return Ok(Arrival::Never);
            }
        }
        out.truncate(1 + report.words);
        out.drain(..1);
        self.check()?;
        Ok(if is_early { Arrival::Early } else { Arrival::Late })
    }

    fn look_for(&self, report: Report, out: &mut Vec<u32>) -> bool {
        let Some(reports) = &self.reports else { return false };
        let longest = if reports.waits.can_spin() { LONGEST_LOOK } else { SHORT_LOOK };
        let mut wait = reports.waits.begin();
        loop {
            if self.has_arrived(report, out) {
                return true;
            }
            if wait.pause().is_some_and(|waited| waited > longest) {
                return false;
            }
        }
    }

    fn has_arrived(&self, report: Report, out: &mut Vec<u32>) -> bool {
        let (first, vectors, number) = (report.first_vector(), report.vectors(), report.number);
        self.reports.as_ref().is_some_and(|reports| reports.shared.read_checked(first, vectors, number, out))
    }

    /// Proves that reports arrive, if there is memory for them, at each start: this depends on more
    /// than the driver's version. The inner error says what is wrong. Nothing is wrong with reports
    /// that arrive only when the driver is asked, but then they are not used.
    pub fn prove_reports(&mut self, is_real: bool) -> Result<Result<(), String>, ComputeError> {
        let Some(shared) = self.shared(2 * 16 * SLOT_VECTORS, Place::Host)? else {
            return Ok(Ok(()));
        };
        // Words that nobody has written are a report number 0.
        self.reports = Some(Reports { shared, waits: Waits::new(is_real), number: 0 });
        let outcome = self.try_reports()?;
        if outcome != Ok(true) {
            self.reports = None;
        }
        Ok(outcome.map(drop))
    }

    /// Whether most reports arrive before the driver is asked.
    fn try_reports(&mut self) -> Result<Result<bool, String>, ComputeError> {
        let mut numbers = Numbers(3);
        let all: Vec<u32> = numbers.take(MAX_WORDS + PROVED).iter().map(|x| x.to_bits()).collect();
        let memory = self.filled(&all, "a proof of reports")?;
        // The last reports are those of a lost sum.
        let states = [self.filled(&[0; 4], "no lost sum")?, self.filled(&[1; 4], "a lost sum")?];
        let (mut found, mut early) = (Vec::new(), 0);
        for index in 0..PROVED {
            let words = index..index + SIZES[index % SIZES.len()];
            let (report, dispatch) =
                self.report(&memory, words.clone(), &states[index / (PROVED - SIZES.len())])?;
            self.record_all(std::slice::from_ref(&dispatch))?;
            self.submit()?;
            let arrival = self.await_report(report, self.earlier[1].clone(), &mut found)?;
            early += usize::from(arrival == Arrival::Early);
            if arrival == Arrival::Never {
                return Ok(Err(format!("results of {} words did not arrive", words.len())));
            }
            if found != all[words.clone()] {
                return Ok(Err(format!("results of {} words are wrong", words.len())));
            }
        }
        Ok(Ok(2 * early > PROVED))
    }
}

#[cfg(test)]
mod tests;
