//! Decides which sequences a step computes, and which of their tokens.
//!
//! The scheduler is a state machine: it has no threads, no channels, no clock and no model. A
//! caller submits prompts, takes steps ([`Scheduler::next_step`]), computes them, and hands each
//! step's tokens back in order ([`Scheduler::apply`]).
//!
//! A step holds the next token of every sequence that decodes, then pieces of prompts in the rows
//! that are left. If streams wait for the step, the pieces are only as long as its time allows
//! ([`Scheduler::note_time`]). With a pipeline, as many steps are in flight as it has stages. A
//! sequence that waits for a token is in no further step; one that is still reading its prompt may
//! be in several.
//!
//! A sequence keeps its slot from admission until it ends or is preempted. The slot also finds the
//! sequence's fixed-size state on each rank: the state is zeroed by the step that starts at
//! position 0, so no step needs to clear it.
//!
//! Blocks with prompt tokens are kept after their sequence ends, so that prompts that begin alike
//! are computed once. Of models with states, copies are kept as well, at chosen positions. With a
//! tier on disk, prompts can go on after blocks that are not in memory any more.

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
pub use sequence::{Generation, RequestId, Wanted};
use snapshots::Snapshots;
use step::PlannedStep;
pub use step::{Awaiting, NextStep, RowResults, StepLoad, StepPart};
pub(crate) use stored::Stored;

use crate::event::FinishReason;
use crate::request::SubmitError;

/// [`Limits::step_time`] unless the user says otherwise.
pub const STEP_TIME: Duration = Duration::from_millis(15);

/// How much work the scheduler takes on at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that run together: slots.
    pub sequences: usize,
    /// Rows of a step. At least 3: with fewer, a prompt of 3 tokens cannot be read without a piece
    /// of one token.
    pub rows: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// Prompts are read whole, as encoders must: several in a step only up to this many rows.
    /// `rows` holds the longest.
    pub whole_prompts: Option<usize>,
    /// Keep the blocks of prompts for later prompts that begin alike.
    pub prefix_cache: bool,
    /// States that ranks keep besides those of sequences; none if the model has no states.
    pub snapshots: Option<usize>,
    /// Rows of a step that verify drafts, at most.
    pub draft_rows: usize,
    /// A layer of the model makes drafts. It reads prompts in the steps that read them.
    pub ahead: bool,
    /// The draft model has states: it reads each text from its first token on, and no token twice.
    pub draft_states: bool,
    /// How long a step may take that streams wait for, with the pieces of prompts in it: this for
    /// each prompt that waits, of which five count; where the model has experts, 24 times this for
    /// rows that are worth reading them. Prompts get at least as much of it as the
    /// streams, even if these take it all.
    pub step_time: Duration,
    /// The model's routed experts: pieces of prompts have enough rows to be worth reading them.
    pub routed: Option<RoutedExperts>,
}

/// A token that a sequence has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenEvent {
    /// The request that the token answers.
    pub request: RequestId,
    /// Token id.
    pub token: u32,
    /// Set on the request's last token, and never twice: `Stop` for an end-of-sequence token, which
    /// is no part of the text.
    pub finish: Option<FinishReason>,
    /// Tokens of the request's prompt that were in the cache already.
    pub cached_tokens: usize,
}

/// The state of all requests between two steps.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    /// Stages of the pipeline: the most steps in flight.
    stages: usize,
    /// All requests decode in one step, which is alone in flight.
    together: bool,
    /// The most tokens of a prompt and its answer together.
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
    /// Steps whose tokens have not come, the oldest first.
    in_flight: VecDeque<PlannedStep>,
    /// Kept blocks of the prompt that was looked up last.
    found: Vec<u32>,
    /// Steps whose memory is used again.
    spare: Vec<PlannedStep>,
    pace: Pace,
    preemptions: u64,
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
        }
    }

    /// Queues a prompt.
    ///
    /// # Errors
    /// When the prompt is empty or leaves no room for an answer.
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

    /// Queues a prompt whose answer begins with `answered`, which another engine has chosen, none
    /// of them the last. They are computed as after a preemption: with the numbers of decoding, so
    /// the answer goes on as it would have there.
    ///
    /// # Errors
    /// When the prompt is empty, or no room is left for another token.
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

    /// Why the answer to `prompt` tokens ends with its token number `generated`, if it does.
    pub fn finish(
        &self,
        generation: &Generation,
        prompt: usize,
        generated: usize,
        token: u32,
    ) -> Option<FinishReason> {
        generation.finish(token, generated, prompt + generated, &self.eos, self.max_tokens)
    }

    /// Ends a request without an event: its client is gone, or its text met a stop text. Does
    /// nothing if the request has ended. A slot with tokens in flight is freed when their steps are
    /// applied.
    pub fn cancel(&mut self, request: RequestId) {
        if let Some(slot) = self.slot_of(request) {
            self.end(slot);
        } else if let Ok(place) = self.waiting.binary_search_by_key(&request, |sequence| sequence.id) {
            self.waiting.remove(place);
        }
    }

    /// Keeps a request out of steps that would give its next token, or no longer.
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

    /// The oldest step in flight, whose tokens [`Scheduler::apply`] takes. `None` if there is none.
    pub fn oldest_step(&self) -> Option<NextStep<'_>> {
        self.in_flight.front().map(|step| NextStep::new(step, &self.slots))
    }

    /// Tells how long the oldest step in flight took: when it was taken from
    /// [`Scheduler::next_step`] and when its tokens were there, in seconds on the caller's clock.
    /// Call it before [`Scheduler::apply`]. Without it, pieces of prompts have a fixed size.
    pub fn note_time(&mut self, began_s: f64, ended_s: f64) {
        if let Some(step) = self.in_flight.front() {
            self.pace.note(&step.load, began_s, ended_s);
        }
    }

    /// Lets all requests decode in one step that is alone in flight, or again in as many steps as
    /// the pipeline has stages.
    pub fn decode_together(&mut self, together: bool) {
        self.together = together;
    }

    /// Steps that would decode a step's requests at the same time if they did not decode together.
    pub fn steps_apart(&self) -> usize {
        if self.together { self.stages } else { 1 }
    }

    /// Steps that may be in flight.
    fn steps(&self) -> usize {
        if self.together { 1 } else { self.stages }
    }

    /// False if as many steps are in flight as may be.
    pub fn takes_steps(&self) -> bool {
        self.in_flight.len() < self.steps()
    }

    /// Requests that a step decodes: each step of a pipeline takes its share, so that every stage
    /// has some to compute.
    fn share(&self) -> usize {
        self.running.len().div_ceil(self.steps()).max(1)
    }

    /// True if all requests run, and none is still to read a prompt or to compute an answer again.
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

    /// How often a sequence lost its slot and blocks to an older one, to start over later.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// True when nothing runs, waits or is in flight.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.in_flight.is_empty()
    }

    fn slot_of(&self, request: RequestId) -> Option<usize> {
        self.running.iter().copied().find(|&slot| self.slots[slot].as_ref().is_some_and(|s| s.id == request))
    }
}
