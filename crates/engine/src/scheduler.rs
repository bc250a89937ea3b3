//! Decides which sequences a step computes, and which of their tokens.
//!
//! The scheduler is a state machine: it has no threads, no channels, no clock and no model. A
//! caller submits prompts, takes steps ([`Scheduler::next_step`]), computes them, and returns each
//! step's tokens in order ([`Scheduler::apply`]).
//!
//! A step contains the next token of every sequence that decodes, then pieces of prompts in the
//! remaining rows. If streams wait for the step, the pieces are only as long as its time allows
//! ([`Scheduler::note_time`]). With a pipeline, as many steps are in flight as there are stages. A
//! sequence that waits for a token is in no further step; one that is still reading its prompt may
//! be in several.
//!
//! A sequence keeps its slot from admission until it ends or is preempted. The slot also identifies
//! the sequence's fixed-size state on each rank. The step that starts at position 0 zeroes the
//! state, so no step needs to clear it.
//!
//! Blocks with prompt tokens are kept after their sequence ends, so that equal beginnings of
//! prompts are computed once. For models with states, copies of states at chosen positions are kept
//! as well. With a disk tier, prompts can also continue after blocks that are no longer in memory.

mod admit;
mod apply;
mod blocks;
mod guess;
mod pace;
mod plan;
mod sequence;
mod snapshots;
mod step;
mod stored;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use thunder_compute::step::KV_BLOCK_TOKENS;

use blocks::BlockPool;
pub use guess::Decoding;
use pace::Pace;
pub use pace::RoutedExperts;
use sequence::Sequence;
pub use sequence::{Generation, ReadTokens, RequestId, Wanted};
use snapshots::Snapshots;
use step::PlannedStep;
pub use step::{Awaiting, NextStep, RowResults, StepLoad, StepPart};
pub(crate) use stored::Stored;

use crate::event::FinishReason;
use crate::request::SubmitError;

/// Default of [`Limits::step_time`].
pub const STEP_TIME: Duration = Duration::from_millis(15);

/// Limits of the scheduler's concurrent work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Number of slots: sequences that run together.
    pub sequences: usize,
    /// Rows of a step. At least 3: with fewer, a prompt of 3 tokens cannot be read without a piece
    /// of one token.
    pub rows: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// Prompts are read whole, as encoders require. A step has several only up to this many rows;
    /// `rows` is enough for the longest.
    pub whole_prompts: Option<usize>,
    /// Keep the blocks of prompts for later prompts with the same beginning.
    pub prefix_cache: bool,
    /// States that ranks keep in addition to those of sequences; `None` if the model has no states.
    pub snapshots: Option<usize>,
    /// Maximum rows of a step that verify drafts.
    pub draft_rows: usize,
    /// A layer of the model makes drafts. It reads prompts in the steps that read them.
    pub ahead: bool,
    /// The draft model has states: it reads each text from its first token on, and each token once.
    pub draft_states: bool,
    /// Time goal of a step that streams wait for, including its pieces of prompts. A step may take
    /// this for each waiting prompt, up to five, or 24 times this for rows that are worth reading
    /// the model's experts. Prompts get at least as much time as the streams, even if these take
    /// all of it.
    pub step_time: Duration,
    /// The model's routed experts. Pieces of prompts have enough rows to be worth reading them.
    pub routed: Option<RoutedExperts>,
}

/// A token that a sequence has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenEvent {
    /// The request that the token answers.
    pub request: RequestId,
    /// Token id.
    pub token: u32,
    /// Set on the request's last token, and only once: `Stop` for an end-of-sequence token, which
    /// is not part of the text.
    pub finish: Option<FinishReason>,
    /// Tokens of the request's prompt that were already in the cache.
    pub cached_tokens: usize,
}

/// The state of all requests between two steps.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    /// Stages of the pipeline, which is the maximum number of steps in flight.
    stages: usize,
    /// All requests decode in one step, with no other step in flight.
    together: bool,
    /// Maximum tokens of a prompt and its answer together.
    max_tokens: usize,
    /// End-of-sequence tokens.
    eos: Vec<u32>,
    next_id: u64,
    blocks: BlockPool,
    /// Running sequences, by slot.
    slots: Vec<Option<Sequence>>,
    /// Occupied slots, the oldest request first.
    running: Vec<usize>,
    /// Requests without a slot, the oldest first.
    waiting: VecDeque<Sequence>,
    /// Steps whose tokens have not arrived, the oldest first.
    in_flight: VecDeque<PlannedStep>,
    /// Kept blocks of the last prompt that was looked up.
    found: Vec<u32>,
    /// Steps whose memory can be reused.
    spare: Vec<PlannedStep>,
    pace: Pace,
    preemptions: u64,
    read: ReadTokens,
}

impl Scheduler {
    /// A scheduler for a pipeline of `stages` stages. A prompt and its answer have at most
    /// `context_length` tokens together; a token of `eos` ends an answer.
    pub fn new(limits: Limits, stages: usize, context_length: usize, eos: Vec<u32>) -> Self {
        let mut slots = Vec::new();
        slots.resize_with(limits.sequences, || None);
        let snapshots = limits.snapshots.map(|count| Snapshots::new(count, limits.kv_blocks));
        let mut blocks = BlockPool::new(limits.kv_blocks, snapshots);
        blocks.all_draft_read = limits.ahead;
        blocks.none_draft_read = limits.draft_states;
        Self {
            limits,
            stages,
            together: false,
            max_tokens: context_length.min(limits.kv_blocks * KV_BLOCK_TOKENS),
            eos,
            next_id: 0,
            blocks,
            slots,
            running: Vec::with_capacity(limits.sequences),
            waiting: VecDeque::new(),
            in_flight: VecDeque::new(),
            found: Vec::with_capacity(limits.kv_blocks),
            spare: Vec::new(),
            pace: Pace::new(limits.step_time, stages, limits.routed),
            preemptions: 0,
            read: ReadTokens::default(),
        }
    }

    /// Queues a prompt.
    ///
    /// # Errors
    /// If the prompt is empty or leaves no space for an answer.
    pub fn submit(&mut self, prompt: &[u32], generation: Generation) -> Result<RequestId, SubmitError> {
        if prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt.len() >= self.max_tokens {
            return Err(SubmitError::PromptTooLong { tokens: prompt.len(), context: self.max_tokens });
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let mut sequence = Sequence::new(id, prompt, generation, self.max_tokens);
        sequence.saves_states = self.limits.prefix_cache && self.limits.snapshots.is_some();
        if let Some(disk) = self.blocks.disk.as_ref().filter(|_| self.limits.prefix_cache) {
            sequence.names = disk.names(&prompt[..sequence.prompt_rows()], generation.adapter);
        }
        self.waiting.push_back(sequence);
        Ok(id)
    }

    /// Queues a prompt and the beginning of its answer, `answered`, which another engine has chosen
    /// and which does not end it. These tokens are computed as after a preemption, with the numbers
    /// of decoding, so the answer continues as it would have there.
    ///
    /// # Errors
    /// If the prompt is empty, or no space is left for another token.
    pub fn resume(
        &mut self,
        prompt: &[u32],
        answered: impl ExactSizeIterator<Item = u32>,
        generation: Generation,
    ) -> Result<RequestId, SubmitError> {
        let tokens = prompt.len() + answered.len();
        if tokens >= self.max_tokens {
            return Err(SubmitError::PromptTooLong { tokens, context: self.max_tokens });
        }
        let id = self.submit(prompt, generation)?;
        if let Some(sequence) = self.waiting.back_mut() {
            sequence.tokens.extend(answered);
        }
        Ok(id)
    }

    /// Why the answer to a prompt of `prompt` tokens ends with its token number `generated`, if it
    /// does.
    pub fn finish(
        &self,
        generation: &Generation,
        prompt: usize,
        generated: usize,
        token: u32,
    ) -> Option<FinishReason> {
        generation.finish(token, generated, prompt + generated, &self.eos, self.max_tokens)
    }

    /// Ends a request without an event, because its client has left or its text contains a stop
    /// text. Does nothing if the request has ended. A slot with tokens in flight is freed when
    /// their steps are applied.
    pub fn cancel(&mut self, request: RequestId) {
        if let Some(slot) = self.slot_of(request) {
            self.end(slot);
        } else if let Ok(place) = self.waiting.binary_search_by_key(&request, |sequence| sequence.id) {
            self.waiting.remove(place);
        }
    }

    /// Sets whether a request is left out of steps that would give its next token.
    pub fn hold(&mut self, request: RequestId, is_held: bool) {
        if let Some(slot) = self.slot_of(request)
            && let Some(sequence) = &mut self.slots[slot]
        {
            sequence.is_held = is_held;
        }
    }

    /// The next step, or `None` if there is nothing to compute or the pipeline is full.
    pub fn next_step(&mut self) -> Option<NextStep<'_>> {
        if !self.takes_steps() {
            return None;
        }
        self.keep_prompts();
        self.forget_noted();
        self.admit();
        let mut step = self.spare.pop().unwrap_or_default();
        self.plan(&mut step);
        if step.is_empty() {
            self.spare.push(step);
            return None;
        }
        self.in_flight.push_back(step);
        self.in_flight.back().map(|step| NextStep::new(step, &self.slots))
    }

    /// Lets rank 0 choose the tokens of the step that was planned last, instead of reading logits.
    /// `likely`: it reports how likely these are, and this many of the likeliest tokens.
    pub fn choose_by_head(&mut self, likely: Option<u8>) {
        if let Some(step) = self.in_flight.back_mut() {
            step.results = RowResults { chosen: true, logits: false, likely, by_head: true, ..step.results };
        }
    }

    /// Reads all logits of the step that was planned last, in place of chosen tokens.
    pub fn read_logits(&mut self) {
        if let Some(step) = self.in_flight.back_mut() {
            step.results.logits = true;
        }
    }

    /// The step that was planned last.
    pub fn newest_step(&self) -> Option<NextStep<'_>> {
        self.in_flight.back().map(|step| NextStep::new(step, &self.slots))
    }

    /// The oldest step in flight, for which [`Scheduler::apply`] takes the tokens. `None` if there
    /// is none.
    pub fn oldest_step(&self) -> Option<NextStep<'_>> {
        self.in_flight.front().map(|step| NextStep::new(step, &self.slots))
    }

    /// Reports when the oldest step in flight was taken from [`Scheduler::next_step`] and when its
    /// tokens arrived, in seconds on the caller's clock. Call this before [`Scheduler::apply`].
    /// Without it, pieces of prompts have a fixed size.
    pub fn note_time(&mut self, began_s: f64, ended_s: f64) {
        if let Some(step) = self.in_flight.front() {
            self.pace.note(&step.load, began_s, ended_s);
        }
    }

    /// Sets whether all requests decode in one step with no other in flight, or in as many steps as
    /// the pipeline has stages.
    pub fn decode_together(&mut self, together: bool) {
        self.together = together;
    }

    /// Number of steps that would decode a step's requests at the same time if they did not decode
    /// together.
    pub fn steps_apart(&self) -> usize {
        if self.together { self.stages } else { 1 }
    }

    /// Maximum steps in flight.
    fn steps(&self) -> usize {
        if self.together { 1 } else { self.stages }
    }

    /// True if another step may be in flight.
    pub fn takes_steps(&self) -> bool {
        self.in_flight.len() < self.steps()
    }

    /// Maximum requests that a step decodes: each step of a pipeline takes its share, so that every
    /// stage has work.
    fn share(&self) -> usize {
        self.running.len().div_ceil(self.steps()).max(1)
    }

    /// True if all requests run, and none has a prompt to read or an answer to compute again.
    pub fn only_decodes(&self) -> bool {
        let decodes = |sequence: &Sequence| sequence.is_stream() || sequence.ended;
        self.waiting.is_empty() && self.slots.iter().flatten().all(decodes)
    }

    /// Steps in flight.
    pub fn steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Requests that have a slot.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait for a slot.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Blocks of the KV cache in the tables of running requests.
    pub fn blocks_used(&self) -> usize {
        self.limits.kv_blocks - self.blocks.unused()
    }

    /// How often a sequence lost its slot and blocks to an older one. It starts over later.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Tokens of prompts that steps have taken.
    pub fn read_tokens(&self) -> ReadTokens {
        self.read
    }

    /// True when nothing runs, waits or is in flight.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.in_flight.is_empty()
    }

    fn slot_of(&self, request: RequestId) -> Option<usize> {
        self.running.iter().copied().find(|&slot| self.slots[slot].as_ref().is_some_and(|s| s.id == request))
    }
}
