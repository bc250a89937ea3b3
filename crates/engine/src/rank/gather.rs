//! What ranks send to rank 0 after a step.

use std::time::Instant;

use thunder_compute::choice::RowLikelihoods;
use thunder_compute::{Backend, Choices, Largest};

use super::RankWorker;
use crate::error::EngineError;
use crate::protocol::StepExtras;
use crate::results::StepResults;
use crate::scheduler::RowResults;
use crate::work::WorkClock;

impl<B: Backend> RankWorker<B> {
    /// On the last stage: gathers the results on the stage's first rank, which sends them to rank
    /// 0. See [`StepResults`] for their layout. Does nothing on other stages.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn gather_results(&mut self, results: RowResults) -> Result<(), EngineError> {
        let (rank, rows) = (self.world.rank(), self.step.logit_rows.len());
        if rank + self.tensor_ranks < self.world.size() || rows == 0 {
            return Ok(());
        }
        self.size_results(results, rows);
        if !results.logits {
            let first = match results.chosen {
                true => {
                    self.read_chosen(results)?;
                    0
                }
                false => {
                    self.model.read_largest(&mut self.backend, &self.step, &mut self.largest)?;
                    self.model.vocab_rows().start as u32
                }
            };
            let of_row =
                |largest: &Largest| [f32::from_bits(first.wrapping_add(largest.column)), largest.value];
            self.outgoing.clear();
            self.outgoing.extend(self.largest.iter().flat_map(of_row));
            if results.likely.is_some() {
                self.outgoing.extend_from_slice(&self.likely);
            }
        } else {
            self.model.read_logits(&mut self.backend, &self.step, &mut self.outgoing)?;
        }
        self.lap();
        self.clock.report(&mut self.outgoing);
        let root = rank.is_multiple_of(self.tensor_ranks);
        let of_ranks: usize = self.counts.iter().sum();
        let recv = root.then_some(&mut self.gathered[..of_ranks]);
        self.backend.group().gather(0, &self.outgoing, recv, &self.counts)?;
        if root && results.hidden {
            self.model.read_normed(&mut self.backend, &self.step, &mut self.gathered[of_ranks..])?;
        }
        if root && rank > 0 {
            let began = Instant::now();
            self.world.send_idle(0, &self.gathered)?;
            self.clock.note_wait(began);
        }
        Ok(())
    }

    /// Chooses the step's tokens. If a stage has several ranks, all of them choose the same, after
    /// they have got each other's logits, or only rank 0 chooses.
    fn read_chosen(&mut self, results: RowResults) -> Result<(), EngineError> {
        let Self { model, backend, step, extras, edits, edited, largest, likely, .. } = self;
        let edits = &edits[..std::mem::take(edited)];
        let StepExtras { choices: rows, next_draws, .. } = extras;
        let choices = Choices { cap: None, edits, rows, next_draws, likely: results.likely.map(usize::from) };
        if self.tensor_ranks == 1 {
            return Ok(model.read_chosen(backend, None, &choices, largest, likely)?);
        }
        let all = model.gather_logits(backend, step, self.vocab.iter().sum())?;
        if !results.by_head || self.world.rank() == 0 {
            model.read_chosen(backend, Some(&all), &choices, largest, likely)?;
        } else {
            largest.clear();
            largest.resize(choices.rows.len(), Largest::NONE);
            likely.clear();
            likely.resize(choices.rows.len() * choices.likely_words(), 0.0);
        }
        backend.give_back(all);
        Ok(())
    }

    /// On rank 0: waits for the results of the oldest step in flight, in which `rows` rows have
    /// logits.
    ///
    /// # Errors
    /// If a peer was lost.
    pub fn results(&mut self, results: RowResults, rows: usize) -> Result<StepResults<'_>, EngineError> {
        self.size_results(results, rows);
        if self.stages > 1 && rows > 0 {
            let from = (self.stages - 1) * self.tensor_ranks;
            let began = Instant::now();
            self.world.recv_idle(from, &mut self.gathered)?;
            self.clock.note_wait(began);
        }
        self.take_reports();
        self.received_rows = rows;
        Ok(self.received(results))
    }

    /// Adds up the reports of the results, if there are any.
    fn take_reports(&mut self) {
        let words = WorkClock::words(self.stages);
        let mut end = 0;
        for (rank, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            end += count;
            self.work.add(rank, &self.gathered[end - words..end]);
        }
    }

    /// The results that [`RankWorker::results`] has waited for.
    pub fn received(&self, results: RowResults) -> StepResults<'_> {
        let hidden = if results.hidden { self.hidden } else { 0 };
        let (rows, has_logits) = (self.received_rows, results.logits);
        let report = WorkClock::words(self.stages);
        let likely = likely_words(results);
        StepResults { rows, vocab: &self.vocab, has_logits, likely, report, hidden, gathered: &self.gathered }
    }

    /// Sizes the buffer for the results of `rows` rows. If there are no rows, there are no results
    /// and no reports.
    fn size_results(&mut self, results: RowResults, rows: usize) {
        let likely = likely_words(results);
        let width = |vocab: usize| if results.logits { vocab } else { 2 + likely };
        self.counts.clear();
        let report = if rows == 0 { 0 } else { WorkClock::words(self.stages) };
        self.counts.extend(self.vocab.iter().map(|&vocab| rows * width(vocab) + report));
        let hidden = if results.hidden { rows * self.hidden } else { 0 };
        let all = self.counts.iter().sum::<usize>() + hidden;
        if self.gathered.len() != all {
            self.gathered.resize(all, 0.0);
        }
    }
}

/// Numbers of a row that say how likely tokens are.
fn likely_words(results: RowResults) -> usize {
    results.likely.map_or(0, |count| RowLikelihoods::words(usize::from(count)))
}
