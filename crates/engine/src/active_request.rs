//! One request in the engine loop: chooses its tokens, measures its times, and sends its events.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use thunder_compute::RowEdits;
use thunder_compute::choice::{Likelihoods, are_finite, likeliest};
use thunder_model::tokenizer::{TokenStream, Tokenizer};

use crate::answer::{AnswerStream, PushOutcome};
use crate::constraint::{MaskFailure, MaskedAnswer};
use crate::event::{AnsweredToken, Event, EventSender, Fault, FinishReason, TokenLogprob, Usage};
use crate::model_guesses::ModelGuesses;
use crate::request::{Output, Request};
use crate::results::StepResults;
use crate::sampler::{Draws, Sampler, Scratch};
use crate::scheduler::{Generation, Wanted};
use crate::speculation::{HitRate, PromptLookup};
use crate::work::{WorkMarks, WorkSums};

/// Memory for choosing a token, shared by all requests and reused for each token.
#[derive(Debug, Default)]
pub struct ChoiceBuffers {
    /// One row of logits over the whole vocabulary.
    pub logits: Vec<f32>,
    pub scratch: Scratch,
}

/// Guesses of an answer.
#[derive(Debug)]
enum Guesses {
    /// The answer is not guessed.
    None,
    /// Guessing starts with the first token, because a table of the whole context takes much memory
    /// while a request waits.
    Later {
        prompt: Vec<u32>,
        predicted: Vec<u32>,
        longest: usize,
    },
    Now(PromptLookup),
}

/// How answers are guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speculates {
    /// Not at all.
    Never,
    /// From the text.
    FromText,
    /// From the text, and by a draft model.
    WithModel,
}

/// A request whose answer has not ended.
pub struct ActiveRequest {
    answer: AnswerStream,
    sampler: Sampler,
    /// Masks the tokens that the answer must not have.
    masked: Option<MaskedAnswer>,
    /// For each token that a mask has chosen and that is not pushed yet: whether the answer ends
    /// with it.
    ends: VecDeque<bool>,
    output: Output,
    /// Alternatives to report with each token's log-probability; `None` reports nothing.
    logprobs: Option<usize>,
    guesses: Guesses,
    by_model: Option<ModelGuesses>,
    /// The share of right guesses from the text before the last token, and whether the last guess
    /// was right.
    noted: Option<(f32, bool)>,
    /// Reports of the tokens chosen last, until they are pushed.
    reports: VecDeque<TokenLogprob>,
    prompt_tokens: usize,
    /// Prompt tokens that were in the cache already.
    pub cached_tokens: usize,
    generated: usize,
    submitted: Instant,
    first_token: Option<Instant>,
    /// The ranks' work at certain moments, if it is to be reported.
    work: Option<WorkMarks>,
}

impl ActiveRequest {
    /// A request that was submitted at this time. Prompt and answer together have at most `context`
    /// tokens.
    pub fn new(
        request: &Request,
        (events, submitted): (EventSender, Instant),
        tokens: TokenStream,
        context: usize,
        speculates: Speculates,
    ) -> Self {
        let is_text = request.output == Output::Text;
        let most = if is_text { request.max_tokens.unwrap_or(context) } else { 1 };
        let longest = request.prompt.len().saturating_add(most).min(context);
        let sampler = Sampler::new(&request.sampling, &request.prompt);
        let guesser = || ModelGuesses::new(Sampler::new(&request.sampling, &[]), request.ignore_eos);
        let answer = AnswerStream::new(events, tokens, request.stop.clone(), request.marks.clone());
        Self {
            answer: if request.reports_tokens { answer.reporting_tokens() } else { answer },
            masked: request.constraint.clone().map(MaskedAnswer::begin),
            ends: VecDeque::new(),
            by_model: (is_text && speculates == Speculates::WithModel).then(guesser),
            sampler,
            output: request.output.clone(),
            logprobs: request.logprobs,
            guesses: match is_text && speculates != Speculates::Never {
                true => Guesses::Later {
                    prompt: request.prompt.clone(),
                    predicted: request.predicted.clone(),
                    longest,
                },
                false => Guesses::None,
            },
            noted: None,
            reports: VecDeque::new(),
            prompt_tokens: request.prompt.len(),
            cached_tokens: 0,
            generated: 0,
            submitted,
            first_token: None,
            work: None,
        }
    }

    /// Starts to report the ranks' work, after this many steps, until the answer ends.
    pub fn watch_work(&mut self, sums: &WorkSums, steps: u64) {
        self.work = Some(WorkMarks::begin(sums, steps));
    }

    /// Records the ranks' work up to the moment when a token came.
    pub fn note_work(&mut self, sums: &WorkSums, steps: u64) {
        if let Some(work) = &mut self.work {
            work.note_token(sums, steps);
        }
    }

    /// Reports the ranks' work for the answer, which has ended.
    pub fn report_work(&mut self, sums: &WorkSums, steps: u64) {
        if let Some(work) = self.work.take().and_then(|work| work.end(sums, steps)) {
            self.answer.report(Event::Work(work));
        }
    }

    /// What the scheduler needs to know about `request`, from which this was made. `chooses`: ranks
    /// can choose tokens by themselves.
    pub fn generation(&self, request: &Request, chooses: bool) -> Generation {
        let wanted = match self.sampler.draws() {
            _ if self.reads_logits() || self.sampler.has_edits() => Wanted::Logits,
            Some(_) if chooses => Wanted::Chosen,
            None => Wanted::Largest,
            Some(_) => Wanted::Logits,
        };
        let adapter = request.adapter.map_or(0, |adapter| adapter as u32 + 1);
        match self.output {
            Output::Text => {
                Generation { max_tokens: request.max_tokens, ignore_eos: request.ignore_eos, wanted, adapter }
            }
            Output::Hidden => {
                Generation { max_tokens: Some(1), ignore_eos: true, wanted: Wanted::Hidden, adapter }
            }
            Output::Likelihoods(_) => {
                Generation { max_tokens: Some(1), ignore_eos: true, wanted: Wanted::Logits, adapter }
            }
        }
    }

    /// The next choices; `None` if they are the most probable tokens.
    pub fn draws(&self) -> Option<Draws> {
        self.sampler.draws()
    }

    /// True if ranks can choose the tokens of a step, given the changes of [`Self::edit`]: if only
    /// tokens are wanted, or how likely they are without changes, and no mask depends on a token of
    /// a draft.
    pub fn is_chosen_by_ranks(&self, drafted: usize) -> bool {
        let wants_token = !matches!(self.output, Output::Likelihoods(_));
        let is_changed = self.masked.is_some() || self.sampler.has_edits();
        let reports = self.logprobs.is_none() || !is_changed;
        wants_token && reports && (self.masked.is_none() || drafted == 0)
    }

    /// How many of the likeliest tokens are reported with each token; `None`: nothing is.
    pub fn reported(&self) -> Option<u8> {
        self.logprobs.map(|count| u8::try_from(count).unwrap_or(u8::MAX))
    }

    /// Fills in the changes of logits before the choices of the next token and of those after
    /// `draft`. Waits for the mask, if there is one; if it fails, so does [`Self::take`].
    pub fn edit(&mut self, draft: &[u32], rows: &mut [RowEdits]) {
        if let (Some(masked), Some(row)) = (&mut self.masked, rows.first_mut()) {
            // The failure is kept.
            let _ = masked.allow(&mut row.allowed);
        }
        if !self.sampler.has_edits() {
            return;
        }
        for (index, row) in rows.iter_mut().enumerate() {
            self.sampler.edit(&mut row.tokens);
            draft.get(index).into_iter().for_each(|token| self.sampler.accept(*token));
        }
        draft.iter().for_each(|token| self.sampler.forget(*token));
    }

    /// True if logits are reported or masked.
    fn reads_logits(&self) -> bool {
        self.logprobs.is_some() || self.masked.is_some()
    }

    /// True if the client has left.
    pub fn is_abandoned(&self) -> bool {
        self.answer.is_abandoned()
    }

    /// The guesses from the text.
    pub fn lookup(&self) -> Option<&PromptLookup> {
        // Each row of a draft would wait for its mask.
        self.begun_lookup().filter(|_| !self.has_slow_masks())
    }

    fn begun_lookup(&self) -> Option<&PromptLookup> {
        match &self.guesses {
            Guesses::Now(lookup) => Some(lookup),
            Guesses::None | Guesses::Later { .. } => None,
        }
    }

    /// Whether the last token was guessed right from the text, and the share of right guesses
    /// before it. `None` if there was no guess, or this was asked before.
    pub fn take_noted(&mut self) -> Option<(f32, bool)> {
        self.noted.take()
    }

    fn has_slow_masks(&self) -> bool {
        self.masked.as_ref().is_some_and(MaskedAnswer::is_slow)
    }

    /// The draft model's guesses, if there is a draft model, and the request's sampler, which they
    /// follow.
    pub fn by_model(&mut self) -> Option<(&mut ModelGuesses, &Sampler)> {
        if self.has_slow_masks() {
            return None;
        }
        self.by_model.as_mut().map(|guesses| (guesses, &self.sampler))
    }

    /// If the draft model has guessed the tokens that a step verified, records how many were right.
    pub fn note_verified(&mut self, right: usize, verified: usize, all: &mut HitRate) -> bool {
        self.by_model.as_mut().is_some_and(|guesses| guesses.note_verified(right, verified, all))
    }

    /// Number of the answer's tokens so far.
    pub fn generated(&self) -> usize {
        self.generated
    }

    /// Processes a row's results: chooses a token, or reports what the request asks for. `None` if
    /// a number is not finite, or the constraint failed. The next row is that of the following
    /// token.
    pub fn take(
        &mut self,
        results: &StepResults<'_>,
        row: usize,
        tokenizer: &Tokenizer,
        buffers: &mut ChoiceBuffers,
    ) -> Option<u32> {
        match &self.output {
            Output::Hidden => {
                let values = results.hidden(row);
                are_finite(values).then(|| self.answer.report(Event::Hidden { values: values.to_vec() }))?;
                Some(0)
            }
            _ if !results.has_logits() => {
                let token = results.token(row)?;
                if self.own_failure().is_some() {
                    return None;
                }
                self.sampler.skip(token);
                self.ends.extend(self.masked.as_mut().map(|masked| masked.accept(token)));
                if let Some(count) = self.logprobs {
                    let likely = results.likely(row)?;
                    self.report(token, likely.chosen(), likely.likeliest().take(count), tokenizer);
                }
                Some(token)
            }
            _ => {
                results.logits(row, &mut buffers.logits);
                are_finite(&buffers.logits).then_some(())?;
                self.choose(|id| results.logit(row, id), tokenizer, buffers)
            }
        }
    }

    /// Chooses a token from `buffers.logits`, which are overwritten. `logit` is a token's logit
    /// before that.
    fn choose(
        &mut self,
        logit: impl Fn(u32) -> f32,
        tokenizer: &Tokenizer,
        buffers: &mut ChoiceBuffers,
    ) -> Option<u32> {
        let ChoiceBuffers { logits, scratch } = buffers;
        if let Output::Likelihoods(ids) = &self.output {
            let likelihoods = Likelihoods::new(logits);
            let logprobs = ids.iter().map(|id| likelihoods.of(logits[*id as usize])).collect();
            self.answer.report(Event::Likelihoods { logprobs });
            return Some(0);
        }
        if let Some(masked) = &mut self.masked {
            if self.ends.back() == Some(&true) {
                // The draft extends beyond the answer's end.
                return Some(0);
            }
            masked.allow(&mut scratch.edits.allowed)?;
        }
        // The unmodified distribution is reported.
        let report = self.logprobs.map(|count| (Likelihoods::new(logits), likeliest(logits, count)));
        let id = self.sampler.choose(logits, scratch);
        self.sampler.accept(id);
        // The next row of a draft needs the mask after this token.
        self.ends.extend(self.masked.as_mut().map(|masked| masked.accept(id)));
        if let Some((likelihoods, top)) = report {
            let top = top.into_iter().map(|(id, logit)| (id, likelihoods.of(logit)));
            self.report(id, likelihoods.of(logit(id)), top, tokenizer);
        }
        Some(id)
    }

    /// Reports a token's log-probability, and those of the likeliest tokens.
    fn report(
        &mut self,
        id: u32,
        logprob: f32,
        top: impl Iterator<Item = (u32, f32)>,
        tokenizer: &Tokenizer,
    ) {
        let bytes = |id| tokenizer.token_bytes(id);
        let top = top.map(|(id, logprob)| (id, bytes(id), logprob)).collect();
        self.reports.push_back(TokenLogprob { id, bytes: bytes(id), logprob, top });
    }

    /// Adds the next token, and sends the text that it completes. The scheduler sets `finish` on
    /// the last token. Returns why the answer ends, if it does.
    pub fn push(&mut self, token: u32, finish: Option<FinishReason>) -> Option<FinishReason> {
        self.first_token.get_or_insert_with(Instant::now);
        if self.output != Output::Text {
            return finish;
        }
        let stops = finish == Some(FinishReason::Stop) || self.ends.pop_front() == Some(true);
        self.append(token, if stops { Some(FinishReason::Stop) } else { finish })
    }

    /// Adds a token that another engine has chosen, like [`ActiveRequest::push`]. The constraint
    /// has already followed it.
    pub fn replay(&mut self, token: &AnsweredToken, finish: Option<FinishReason>) -> Option<FinishReason> {
        self.sampler.skip(token.id);
        self.reports.extend(token.report.clone());
        self.append(token.id, finish)
    }

    fn append(&mut self, token: u32, finish: Option<FinishReason>) -> Option<FinishReason> {
        self.generated += 1;
        if let Guesses::Later { prompt, predicted, longest } = &self.guesses {
            self.guesses = Guesses::Now(PromptLookup::new(prompt, *longest).predicting(predicted));
        }
        if let Guesses::Now(lookup) = &mut self.guesses {
            self.noted = lookup.push(token);
        }
        let report = self.reports.pop_front();
        if finish == Some(FinishReason::Stop) {
            return finish;
        }
        match self.answer.push(token, report) {
            PushOutcome::StopText(number) => Some(FinishReason::StopText(number)),
            PushOutcome::Continues => finish,
        }
    }

    /// Sends the last events of a complete answer.
    pub fn finish(self, reason: FinishReason) {
        let first = self.first_token.unwrap_or(self.submitted);
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.generated,
            predicted: self.begun_lookup().and_then(PromptLookup::predicted),
            time_to_first_token: first - self.submitted,
            decode_time: first.elapsed(),
        };
        tracing::debug!(?reason, ?usage, "an answer is complete");
        self.answer.finish(reason, usage);
    }

    /// Why the constraint failed, if it did.
    pub fn own_failure(&self) -> Option<&MaskFailure> {
        self.masked.as_ref().and_then(MaskedAnswer::failure)
    }

    /// True if a step with this request would wait for its mask; `None` without a constraint.
    pub fn is_mask_late(&mut self) -> Option<bool> {
        self.masked.as_mut().map(MaskedAnswer::is_late)
    }

    /// Waits up to `limit` for the next mask.
    pub fn wait_for_mask(&mut self, limit: Duration) {
        if let Some(masked) = &mut self.masked {
            masked.wait(limit);
        }
    }

    /// Ends the answer with an error: the constraint's, if it failed.
    pub fn fail(self, message: &str) {
        let own = self.own_failure().cloned();
        let of_engine = || MaskFailure { message: message.to_owned(), fault: Fault::Engine };
        let MaskFailure { message, fault } = own.unwrap_or_else(of_engine);
        self.answer.fail(message, fault);
    }
}
