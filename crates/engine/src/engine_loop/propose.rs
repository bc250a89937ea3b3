//! Chooses the drafts that the next step verifies, and computes the guesses of a draft model or of
//! the model's own layer.

use std::collections::HashMap;
use std::time::Instant;

use thunder_compute::Backend;

use super::EngineLoop;
use crate::active_request::{ActiveRequest, ChoiceBuffers};
use crate::drafter::{Drafter, Reads};
use crate::error::EngineError;
use crate::hidden_rows::KEPT_ROWS;
use crate::scheduler::{Decoding, RequestId, Scheduler};
use crate::speculation::{
    Calibration, Candidate, Choice, MAX_DRAFT, MAX_ROWS, ModelRecord, Rows, StepCosts, choose, counted_s,
};

/// Tokens of texts that the draft model reads between two steps of several requests, which all
/// wait meanwhile.
const READ_WITH_OTHERS: usize = 64;
/// Number of guesses in a trial of a model that was not worthwhile.
pub(super) const TRIED_TOKENS: usize = 2;
/// From this number of unread tokens on, the model's own layer reads them even if it does not guess
/// now: after another step there may be more tokens than kept hidden states.
const MOST_UNREAD: usize = KEPT_ROWS - MAX_DRAFT - 2;

/// The inputs of a decision about drafts.
struct Prices<'a> {
    costs: &'a StepCosts,
    calibration: &'a Calibration,
    /// Requests that the step decodes.
    rows: Rows,
    /// Maximum tokens of all drafts.
    most: usize,
    /// Maximum tokens of a text that the draft model can read.
    context: usize,
    /// Unread tokens that a guessing pass reads in addition.
    few: usize,
    /// The model's own layer guesses. It has read almost all of each text.
    by_layer: bool,
}

impl<B: Backend> EngineLoop<B> {
    /// Proposes drafts for the answers, as long as they are worthwhile: from the text where it
    /// repeats itself, otherwise by the draft model. Returns the usual seconds of these guesses and
    /// of a step without drafts, by which the caller limits what it counts: a model that is slower
    /// than expected changes what is usual.
    ///
    /// # Errors
    /// If the draft model cannot be computed.
    pub(super) fn propose(&mut self) -> Result<f32, EngineError> {
        let Self {
            worker,
            scheduler,
            requests,
            tries_together,
            costs,
            ledger,
            calibration,
            record,
            candidates,
            info,
            buffers,
            ..
        } = self;
        candidates.clear();
        if !scheduler.takes_steps() {
            return Ok(0.0);
        }
        let is_tried = std::mem::take(tries_together);
        let rows = scheduler.decoding().count();
        if rows == 0 || rows > MAX_ROWS || costs.is_stale(rows) || !ledger.allows_drafts() {
            return Ok(0.0);
        }
        let is_free = scheduler.steps_in_flight() == 0;
        // A pass of the model's own layer would wait for the steps in flight.
        let drafter = worker.drafter().filter(|drafter| is_free || !drafter.is_layer());
        let prices = Prices {
            costs,
            calibration,
            rows: Rows { all: rows, steps: scheduler.steps_apart() },
            most: scheduler.draft_rows(),
            context: drafter.as_ref().map_or(0, Drafter::context),
            few: drafter.as_ref().map_or(0, |drafter| drafter.few(rows)),
            by_layer: drafter.as_ref().is_some_and(Drafter::is_layer),
        };
        for decoding in scheduler.decoding() {
            if let Some(request) = requests.get_mut(&decoding.request) {
                candidates.extend(prices.candidate(&decoding, request, record));
            }
        }
        choose(candidates, (costs, &record.passes), prices.rows, prices.most);
        let tried_s = prices.try_again(candidates, scheduler, record, is_tried);
        let plain_s = prices.rows.plain_s(costs).unwrap_or(0.0);
        let began = Instant::now();
        for candidate in candidates.iter().filter(|candidate| !candidate.by_model && candidate.count > 0) {
            if let Some(lookup) = requests.get(&candidate.key).and_then(ActiveRequest::lookup) {
                scheduler.propose(candidate.key, &lookup.draft()[..candidate.count]);
            }
        }
        candidates.retain(|candidate| candidate.by_model && candidate.count > 0);
        let Some(drafter) = drafter else { return Ok(plain_s) };
        if prices.by_layer {
            for decoding in scheduler.decoding().filter(|decoding| missing(decoding) >= MOST_UNREAD) {
                let request = requests.get_mut(&decoding.request).and_then(ActiveRequest::by_model);
                let goes_on = request.is_some_and(|(guesses, _)| guesses.catches_up);
                if goes_on && candidates.iter().all(|candidate| candidate.key != decoding.request) {
                    candidates.push(Candidate::new(decoding.request, true, 0.0, 0));
                }
            }
        }
        let mut guesser = Guesser { drafter, scheduler, requests, record, usual_s: 0.0 };
        guesser.catch_up(candidates, if rows == 1 { usize::MAX } else { READ_WITH_OTHERS })?;
        guesser.guess(candidates, (info.vocab_size, &info.eos), buffers)?;
        if let Some(expected_s) = tried_s {
            guesser.record.charge(counted_s(began.elapsed().as_secs_f32(), expected_s) - expected_s);
        }
        Ok(plain_s + guesser.usual_s)
    }
}

impl Prices<'_> {
    /// The best way to guess for a request, if any.
    fn candidate(
        &self,
        decoding: &Decoding<'_>,
        request: &mut ActiveRequest,
        record: &ModelRecord,
    ) -> Option<Candidate<RequestId>> {
        let (key, generated) = (decoding.request, request.generated());
        let from_text = from_text(key, request, self.calibration, decoding.room);
        // The model's own layer needs a hidden state, which follows a token.
        let has_state = !self.by_layer || decoding.tokens.len() > 1;
        let room = decoding.room.min(self.context.saturating_sub(decoding.tokens.len()));
        let room = if has_state { room } else { 0 };
        let Some((guesses, _)) = request.by_model().filter(|_| room > 0) else { return from_text };
        guesses.forget();
        let by_model = Candidate::new(key, true, guesses.rate(record.rate).share(), room.min(MAX_DRAFT));
        let alone = |candidate| choose(&mut [candidate], (self.costs, &record.passes), self.rows, self.most);
        let (of_text, of_model) = (from_text.map(alone), alone(by_model));
        // The model's own layer continues to read a text as long as its guesses would pay.
        guesses.catches_up = if self.by_layer { of_model.gain > 1.0 } else { guesses.catches_up };
        if let (Some(candidate), Some(of_text)) = (from_text, of_text)
            && of_text.gain > 1.0
            && of_text.gain >= of_model.gain
        {
            return Some(candidate);
        }
        let missing = missing(decoding);
        let is_late = missing > self.few && !self.by_layer;
        guesses.catches_up &= is_late || self.by_layer;
        if is_late && !guesses.catches_up {
            guesses.catches_up =
                self.saved_s(of_model, decoding, record.expected_left(generated)) > record.reading_s(missing);
        }
        // A text that is not worth reading may still be tried.
        let is_read = !is_late || guesses.catches_up;
        match (from_text, of_text) {
            (Some(candidate), Some(of_text)) if of_text.gain > 1.0 && !is_read => Some(candidate),
            _ => Some(Candidate::new(key, true, if is_read { by_model.chance } else { 0.0 }, by_model.most)),
        }
    }

    /// Expected seconds saved by guesses until the answer ends, which probably has `left` tokens
    /// more.
    fn saved_s(&self, choice: Choice, decoding: &Decoding<'_>, left: f32) -> f32 {
        let left = left.min(decoding.left as f32);
        let own = choice.tokens - (self.rows.all - 1) as f32;
        let plain_s = self.rows.plain_s(self.costs).unwrap_or(0.0);
        (choice.gain - 1.0) * plain_s * left / own
    }

    /// Makes a model that was not worthwhile guess for one request, if enough time has passed since
    /// the last trial, because texts change. Returns the expected seconds of the guesses.
    /// `is_paid`: the trial has already been decided.
    fn try_again(
        &self,
        candidates: &mut [Candidate<RequestId>],
        scheduler: &Scheduler,
        record: &mut ModelRecord,
        is_paid: bool,
    ) -> Option<f32> {
        let is_used = candidates.iter().any(|candidate| candidate.by_model && candidate.count > 0);
        let chosen: usize = candidates.iter().map(|candidate| candidate.count).sum();
        if is_used || chosen + TRIED_TOKENS > self.most {
            return None;
        }
        let candidate = candidates.iter_mut().find(|candidate| candidate.by_model)?;
        let count = candidate.most.min(TRIED_TOKENS);
        let decoding = scheduler.decoding_request(candidate.key)?;
        let seconds = |rows: usize| self.costs.expected(rows);
        let (plain, longer) = seconds(self.rows.all).zip(seconds(self.rows.all + count))?;
        let pass = record.passes.expected(1).unwrap_or(f32::MAX);
        let missing = missing(&decoding);
        let reading = if missing > self.few { record.reading_s(missing) } else { 0.0 };
        let guessing = pass * count as f32 + reading;
        (is_paid || record.may_try((longer - plain).max(0.0) + guessing)).then(|| {
            candidate.count = count;
            guessing
        })
    }
}

/// Expected right guesses from a request's text for its next `room` tokens.
pub(super) fn from_text(
    key: RequestId,
    request: &ActiveRequest,
    calibration: &Calibration,
    room: usize,
) -> Option<Candidate<RequestId>> {
    let lookup = request.lookup()?;
    let chance = calibration.chance(lookup.rate().share());
    Some(Candidate::new(key, false, chance, lookup.draft().len().min(room)))
}

/// Tokens that the draft model has not read, without the last one.
fn missing(decoding: &Decoding<'_>) -> usize {
    (decoding.tokens.len() - 1).saturating_sub(decoding.draft_read)
}

/// State needed for guessing.
struct Guesser<'a, B: Backend> {
    drafter: Drafter<'a, B>,
    scheduler: &'a mut Scheduler,
    requests: &'a mut HashMap<RequestId, ActiveRequest>,
    record: &'a mut ModelRecord,
    /// Seconds that the passes so far usually take.
    usual_s: f32,
}

impl<B: Backend> Guesser<'_, B> {
    /// Reads unread parts of texts, at most `most` tokens, a piece for each request. Requests whose
    /// text is not read to its end, or that have no room for a draft, are not guessed for now.
    fn catch_up(
        &mut self,
        candidates: &mut [Candidate<RequestId>],
        mut most: usize,
    ) -> Result<(), EngineError> {
        let few = self.drafter.few(candidates.len());
        let others = candidates.len() > 1;
        for candidate in candidates {
            let Some(decoding) = self.scheduler.decoding_request(candidate.key) else { continue };
            let (read, last) = (self.drafter.first_unread(&decoding), decoding.tokens.len() - 1);
            if self.drafter.has_states() && read > last {
                candidate.count = 0;
                continue;
            }
            let missing = last.saturating_sub(read);
            // Blocks that others may read are written in a separate pass.
            let is_shared = self.drafter.is_shared(&decoding, read.min(last));
            if missing > few || (missing > 0 && (is_shared || candidate.count == 0)) {
                let piece = missing.min(self.drafter.rows()).min(most);
                if piece > 0 {
                    let pass_s = self.record.passes.expected(1).unwrap_or(0.0);
                    self.usual_s += self.record.reading_s(piece).max(pass_s);
                    let began = Instant::now();
                    self.drafter.begin(false);
                    let tokens = &decoding.tokens[read..read + piece];
                    let of = &decoding;
                    self.drafter.push(Reads { of, start: read, tokens, guesses: false, depth: 0 });
                    self.drafter.compute(false)?;
                    // The time of a small piece says little about long ones.
                    if piece > few {
                        self.record.note_read(piece, began.elapsed().as_secs_f32());
                    }
                    self.scheduler.note_draft_read(candidate.key, read + piece);
                    most -= piece;
                }
                if piece < missing {
                    candidate.count = 0;
                    continue;
                }
            } else if is_shared && others {
                candidate.count = 0;
                continue;
            }
            if !self.scheduler.reserve_draft(candidate.key, candidate.count) {
                candidate.count = 0;
            }
        }
        Ok(())
    }

    /// Guesses the tokens of all candidates, one token of each per pass, and proposes them.
    fn guess(
        &mut self,
        candidates: &mut [Candidate<RequestId>],
        (vocab, eos): (usize, &[u32]),
        buffers: &mut ChoiceBuffers,
    ) -> Result<(), EngineError> {
        let Self { drafter, scheduler, requests, record, usual_s } = self;
        for candidate in candidates.iter_mut().filter(|candidate| candidate.count > 0) {
            match requests.get_mut(&candidate.key).and_then(ActiveRequest::by_model) {
                Some((guesses, sampler)) => guesses.begin(sampler),
                None => candidate.count = 0,
            }
        }
        for depth in 0..MAX_DRAFT {
            let began = Instant::now();
            let of_depth = || candidates.iter().filter(|candidate| candidate.count > depth);
            let needs_logits = |candidate: &Candidate<RequestId>| {
                let guesses = requests.get_mut(&candidate.key).and_then(ActiveRequest::by_model);
                guesses.is_some_and(|(guesses, _)| !guesses.is_argmax())
            };
            let logits = of_depth().any(needs_logits);
            drafter.begin(logits);
            let mut width = 0;
            for candidate in of_depth() {
                let Some(decoding) = scheduler.decoding_request(candidate.key) else { continue };
                let Some(request) = requests.get_mut(&candidate.key) else { continue };
                let Some((guesses, _)) = request.by_model() else { continue };
                let last = decoding.tokens.len() - 1;
                let (start, tokens) = match depth.checked_sub(1) {
                    None => {
                        let start = drafter.first_unread(&decoding).min(last);
                        (start, &decoding.tokens[start..])
                    }
                    Some(before) => (last + depth, &guesses.tokens()[before..depth]),
                };
                drafter.push(Reads { of: &decoding, start, tokens, guesses: true, depth });
                width += 1;
            }
            if width == 0 {
                break;
            }
            *usual_s += record.passes.expected(width).unwrap_or(0.0);
            drafter.compute(logits)?;
            if depth == 0 && drafter.has_states() {
                // States have absorbed the last token, whatever follows.
                for candidate in candidates.iter().filter(|candidate| candidate.count > 0) {
                    let read = scheduler.decoding_request(candidate.key).map(|of| of.tokens.len());
                    read.into_iter().for_each(|read| scheduler.note_draft_read(candidate.key, read));
                }
            }
            let open = candidates.iter_mut().filter(|candidate| candidate.count > depth);
            for (index, candidate) in open.enumerate() {
                let Some(request) = requests.get_mut(&candidate.key) else { continue };
                let Some((guesses, _)) = request.by_model() else { continue };
                let token = match logits {
                    false => drafter.largest(index),
                    true => drafter
                        .logits(index, vocab, &mut buffers.logits)
                        .map(|()| guesses.choose(&mut buffers.logits, &mut buffers.scratch)),
                };
                // Padding of the model's vocabulary is not a token.
                let token = token.filter(|token| (*token as usize) < vocab);
                let goes_on = token.is_some_and(|token| guesses.push(token, eos));
                if token.is_none() {
                    // A model that computes no finite numbers counts as wrong.
                    guesses.note_verified(0, 1, &mut record.rate);
                }
                if !goes_on {
                    candidate.count = guesses.tokens().len();
                }
            }
            record.passes.note(width, began.elapsed().as_secs_f32());
        }
        for candidate in candidates {
            let Some((guesses, _)) = requests.get_mut(&candidate.key).and_then(ActiveRequest::by_model)
            else {
                continue;
            };
            let Some(decoding) = scheduler.decoding_request(candidate.key) else { continue };
            // The last guess was not read.
            let read = decoding.tokens.len() - 1 + guesses.tokens().len();
            let read = if drafter.has_states() { decoding.tokens.len() } else { read };
            if candidate.count > 0 {
                scheduler.propose(candidate.key, guesses.tokens());
                scheduler.note_draft_read(candidate.key, read);
            }
        }
        Ok(())
    }
}
