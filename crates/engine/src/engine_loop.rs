//! RankWorker 0's loop: which sequences compute what in the next step, and what becomes of the results.
//!
//! A step holds the next token of every sequence that decodes and, in the rows that are left, pieces of prompts. With a
//! pipeline, as many steps are under way as it has stages; a sequence is in one of them at most, unless it is still
//! reading its prompt.

mod plan;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use thunder_compute::step::KV_BLOCK_TOKENS;

use crate::answer::{AnswerStream, Outcome};
use crate::blocks::Blocks;
use crate::handle::{Inbox, ModelInfo, Submission, Unpark};
use crate::protocol::Command;
use crate::rank::{EngineError, RankWorker};
use crate::request::{Event, FinishReason, Request, TokenLogprob, Usage};
use crate::sampler::{Sampler, Scratch, log_probabilities};

/// An idle engine asks this often whether all ranks are there.
const PING: Duration = Duration::from_millis(500);

/// The scheduler's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that are computed together.
    pub sequences: usize,
    /// Rows of a step.
    pub rows: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
}

struct Sequence {
    slot: usize,
    request: Request,
    /// Prompt and answer.
    tokens: Vec<u32>,
    /// Tokens of which keys and values are computed or under way.
    computed: usize,
    blocks: Vec<u32>,
    /// Blocks that the ranks know of.
    sent_blocks: usize,
    /// A row of a step under way will give the next token.
    awaits_token: bool,
    /// Steps under way that hold tokens of this sequence.
    under_way: usize,
    /// Its answer ended while tokens were under way.
    ended: bool,
    sampler: Sampler,
    answer: Option<AnswerStream>,
    submitted: Instant,
    first_token: Option<Instant>,
}

impl Sequence {
    /// Tokens that are computed as a prompt: a single one is not, nor is what was generated before a preemption, or its numbers
    /// would be others.
    fn prompt_rows(&self) -> usize {
        match self.request.prompt.len() {
            1 => 0,
            rows => rows,
        }
    }

    /// Whether the next tokens to compute are a prompt's.
    fn reads_prompt(&self) -> bool {
        self.computed < self.prompt_rows()
    }
}

/// A step whose results have not come.
struct UnderWay {
    command: Command,
    /// Slots that are in it, and how many tokens of each.
    slots: Vec<(usize, usize)>,
    /// Slots of the rows that want logits, in order.
    rows: Vec<usize>,
}

impl UnderWay {
    const fn new() -> Self {
        Self { command: Command::ComputeLargest, slots: Vec::new(), rows: Vec::new() }
    }
}

/// The next token of a sequence: its slot, the token, and what its report is made of.
type Chosen = (usize, u32, Option<(f32, Vec<(u32, f32)>)>);

/// A scheduler that panics must not look as if it were still at work.
struct NotePanic(Arc<OnceLock<String>>);

impl Drop for NotePanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // One who knows a better reason was faster.
            let _ = self.0.set("the scheduler panicked; standard error says where".to_owned());
        }
    }
}

/// RankWorker 0's loop.
pub struct EngineLoop {
    rank: RankWorker,
    info: Arc<ModelInfo>,
    inbox: Inbox,
    limits: Limits,
    eos: Vec<u32>,
    blocks: Blocks,
    /// By slot.
    sequences: Vec<Option<Sequence>>,
    waiting: VecDeque<Sequence>,
    under_way: VecDeque<UnderWay>,
    closed: bool,
    scratch: Scratch,
    // Kept from step to step, so that a token takes no memory but for its text, log-probabilities and penalties.
    logits: Vec<f32>,
    unmodified: Vec<f32>,
    chosen: Vec<Chosen>,
    spare: Vec<UnderWay>,
}

impl EngineLoop {
    /// A scheduler that serves what comes into `inbox`.
    pub fn new(rank: RankWorker, info: Arc<ModelInfo>, inbox: Inbox, limits: Limits, eos: Vec<u32>) -> Self {
        let mut sequences = Vec::new();
        sequences.resize_with(limits.sequences, || None);
        Self {
            rank,
            info,
            inbox,
            limits,
            eos,
            blocks: Blocks::new(limits.kv_blocks),
            sequences,
            waiting: VecDeque::new(),
            under_way: VecDeque::new(),
            closed: false,
            scratch: Scratch::default(),
            logits: Vec::new(),
            unmodified: Vec::new(),
            chosen: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Serves until all handles are gone or a rank is lost. Every request gets its last event before this returns.
    ///
    /// # Errors
    /// Why the engine cannot go on.
    pub fn run(mut self) -> Result<(), EngineError> {
        let _guard = NotePanic(self.inbox.stopped.clone());
        self.rank.pin_thread();
        let outcome = self.serve();
        if let Err(error) = &outcome {
            let message = error.to_string();
            // The first to write this is the one who knows the reason.
            let _ = self.inbox.stopped.set(message.clone());
            let running = self.sequences.iter_mut().filter_map(Option::take);
            for answer in running.chain(self.waiting.drain(..)).filter_map(|sequence| sequence.answer) {
                answer.fail(&message);
            }
            self.inbox.submissions.close();
            while let Ok(submission) = self.inbox.submissions.try_recv() {
                let _ = submission.events.send(Event::Failed { message: message.clone() });
            }
        }
        outcome
    }

    fn serve(&mut self) -> Result<(), EngineError> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            self.take_submissions(&waker)?;
            self.drop_abandoned();
            self.admit();
            let issued = self.issue()?;
            let idle = !issued && self.under_way.is_empty();
            if idle && self.closed && self.waiting.is_empty() {
                self.rank.message().begin(Command::Stop);
                self.rank.exchange_step()?;
                return Ok(());
            }
            // A pipeline is kept full while there is something to issue.
            if !issued || self.under_way.len() >= self.rank.stages() {
                self.collect()?;
            }
        }
    }

    /// Takes what was submitted. Sleeps while there is nothing else to do, and looks after the other ranks meanwhile.
    fn take_submissions(&mut self, waker: &Waker) -> Result<(), EngineError> {
        let mut context = Context::from_waker(waker);
        loop {
            match self.inbox.submissions.poll_recv(&mut context) {
                Poll::Ready(Some(submission)) => {
                    let sequence = self.sequence(submission);
                    self.waiting.push_back(sequence);
                }
                Poll::Ready(None) => {
                    self.closed = true;
                    return Ok(());
                }
                Poll::Pending => {
                    let busy = !self.waiting.is_empty() || !self.under_way.is_empty();
                    if busy || self.sequences.iter().any(Option::is_some) {
                        return Ok(());
                    }
                    let since = Instant::now();
                    std::thread::park_timeout(PING);
                    if since.elapsed() >= PING {
                        self.rank.message().begin(Command::Ping);
                        self.rank.exchange_step()?;
                    }
                }
            }
        }
    }

    /// Tokens that prompt and answer may have together.
    fn most_tokens(&self) -> usize {
        self.info.context_length.min(self.limits.kv_blocks * KV_BLOCK_TOKENS)
    }

    fn sequence(&self, Submission { request, events }: Submission) -> Sequence {
        let answer = AnswerStream::new(events, self.info.tokenizer.stream(), request.stop.clone());
        let wanted = request.prompt.len().saturating_add(request.max_tokens.unwrap_or(usize::MAX));
        let longest = wanted.min(self.most_tokens().max(request.prompt.len()));
        let mut tokens = Vec::with_capacity(longest);
        tokens.extend_from_slice(&request.prompt);
        Sequence {
            slot: 0,
            tokens,
            computed: 0,
            blocks: Vec::with_capacity(longest.div_ceil(KV_BLOCK_TOKENS)),
            sent_blocks: 0,
            awaits_token: false,
            under_way: 0,
            ended: false,
            sampler: Sampler::new(&request.sampling, &request.prompt),
            answer: Some(answer),
            submitted: Instant::now(),
            first_token: None,
            request,
        }
    }

    /// Frees the slots of clients that went away.
    fn drop_abandoned(&mut self) {
        let gone = |sequence: &Sequence| sequence.answer.as_ref().is_none_or(AnswerStream::is_abandoned);
        let before = self.waiting.len();
        self.waiting.retain(|sequence| !gone(sequence));
        self.inbox.counters.waiting.fetch_sub(before - self.waiting.len(), Ordering::Relaxed);
        for slot in 0..self.sequences.len() {
            if self.sequences[slot].as_ref().is_some_and(gone) {
                self.end(slot);
            }
        }
    }

    /// Gives slots to those who wait, first come first served.
    fn admit(&mut self) {
        while let Some(slot) = self.sequences.iter().position(Option::is_none) {
            let Some(next) = self.waiting.front() else { return };
            // Room for the prompt and a first block of answer, so that an admission does not at once drive another out.
            if self.blocks.free_tokens() < next.tokens.len() + 1 && self.running() > 0 {
                return;
            }
            if let Some(mut sequence) = self.waiting.pop_front() {
                sequence.slot = slot;
                self.sequences[slot] = Some(sequence);
                self.inbox.counters.waiting.fetch_sub(1, Ordering::Relaxed);
                self.inbox.counters.running.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn running(&self) -> usize {
        self.sequences.iter().flatten().count()
    }

    /// Forms the next step and computes this rank's part of it. False if there is nothing to compute.
    fn issue(&mut self) -> Result<bool, EngineError> {
        let mut step = self.spare.pop().unwrap_or_else(UnderWay::new);
        self.plan(&mut step.slots);
        if step.slots.is_empty() {
            self.spare.push(step);
            return Ok(false);
        }
        let began = Instant::now();
        self.describe(&mut step);
        let command = step.command;
        self.under_way.push_back(step);
        self.rank.exchange_step()?;
        self.rank.compute()?;
        if self.rank.stages() > 1 {
            // Receiving the oldest results first: a last stage that waits for us to take them could not take our rows.
            if self.under_way.len() >= self.rank.stages() {
                self.collect()?;
            }
            self.rank.send_hidden()?;
        } else {
            self.rank.gather_results(command)?;
        }
        let (counters, reductions) = (&self.inbox.counters, self.rank.reductions());
        counters.steps.fetch_add(1, Ordering::Relaxed);
        counters.step_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        counters.reduce_ns.fetch_add(reductions.time.as_nanos() as u64, Ordering::Relaxed);
        counters.reduce_bytes.fetch_add(reductions.bytes, Ordering::Relaxed);
        Ok(true)
    }

    /// Writes the message of a step of its slots, and what else is to be known of it.
    fn describe(&mut self, step: &mut UnderWay) {
        let wants = |s: &Sequence, count: usize| s.computed + count == s.tokens.len();
        let plain = step.slots.iter().all(|&(slot, count)| {
            let sequence = self.sequences[slot].as_ref();
            sequence
                .is_none_or(|s| !wants(s, count) || (s.sampler.is_argmax() && s.request.logprobs.is_none()))
        });
        step.command = if plain { Command::ComputeLargest } else { Command::ComputeLogits };
        step.rows.clear();
        let message = self.rank.message();
        message.begin(step.command);
        for &(slot, count) in &step.slots {
            let Some(sequence) = self.sequences[slot].as_mut() else { continue };
            let logits = wants(sequence, count);
            let new = &sequence.blocks[sequence.sent_blocks..];
            let tokens = &sequence.tokens[sequence.computed..sequence.computed + count];
            let prompt = sequence.reads_prompt();
            message.push(slot, sequence.computed, sequence.sent_blocks, new, tokens, (logits, prompt));
            sequence.sent_blocks = sequence.blocks.len();
            sequence.computed += count;
            sequence.under_way += 1;
            sequence.awaits_token = logits;
            if logits {
                step.rows.push(slot);
            }
        }
    }

    /// Takes the results of the oldest step under way.
    fn collect(&mut self) -> Result<(), EngineError> {
        let Some(step) = self.under_way.pop_front() else { return Ok(()) };
        let results = self.rank.results(step.command, step.rows.len())?;
        for (row, &slot) in step.rows.iter().enumerate() {
            let Some(sequence) = self.sequences[slot].as_mut() else { continue };
            let mut report = None;
            let id = if step.command == Command::ComputeLargest {
                results.argmax(row, &mut self.logits)
            } else {
                results.logits(row, &mut self.logits);
                // The unmodified distribution is reported, and choosing overwrites it.
                if sequence.request.logprobs.is_some() {
                    self.unmodified.clone_from(&self.logits);
                }
                let id = sequence.sampler.choose(&mut self.logits, &mut self.scratch);
                report = sequence
                    .request
                    .logprobs
                    .map(|count| log_probabilities(&self.unmodified, id, count, &mut self.scratch));
                id
            };
            self.chosen.push((slot, id, report));
        }
        for &(slot, _) in &step.slots {
            if let Some(sequence) = self.sequences[slot].as_mut() {
                sequence.under_way -= 1;
            }
        }
        let mut chosen = std::mem::take(&mut self.chosen);
        for (slot, id, report) in chosen.drain(..) {
            self.accept(slot, id, report);
        }
        self.chosen = chosen;
        for &(slot, _) in &step.slots {
            if self.sequences[slot].as_ref().is_some_and(|s| s.ended) {
                self.end(slot);
            }
        }
        self.spare.push(step);
        Ok(())
    }

    /// Gives a sequence its next token.
    fn accept(&mut self, slot: usize, id: u32, report: Option<(f32, Vec<(u32, f32)>)>) {
        let most = self.most_tokens();
        let Some(sequence) = self.sequences[slot].as_mut().filter(|s| !s.ended) else { return };
        sequence.awaits_token = false;
        sequence.first_token.get_or_insert_with(Instant::now);
        sequence.tokens.push(id);
        sequence.sampler.accept(id);
        let generated = sequence.tokens.len() - sequence.request.prompt.len();
        let is_end = self.eos.contains(&id) && !sequence.request.ignore_eos;
        let bytes = |id| self.info.tokenizer.token_bytes(id);
        let logprob = report.map(|(logprob, top)| TokenLogprob {
            id,
            bytes: bytes(id),
            logprob,
            top: top.into_iter().map(|(id, logprob)| (id, bytes(id), logprob)).collect(),
        });
        let outcome = match (sequence.answer.as_mut(), is_end) {
            (Some(answer), false) => answer.push(id, logprob),
            (Some(_), true) => Outcome::Stopped,
            (None, _) => Outcome::Abandoned,
        };
        let full =
            sequence.request.max_tokens.is_some_and(|max| generated >= max) || sequence.tokens.len() >= most;
        let reason = match outcome {
            Outcome::Stopped => FinishReason::Stop,
            Outcome::GoesOn if full => FinishReason::Length,
            Outcome::GoesOn => return,
            Outcome::Abandoned => return self.end(slot),
        };
        let first = sequence.first_token.unwrap_or(sequence.submitted);
        let usage = Usage {
            prompt_tokens: sequence.request.prompt.len(),
            completion_tokens: generated,
            time_to_first_token: first - sequence.submitted,
            decode_time: first.elapsed(),
        };
        tracing::debug!(slot, ?reason, ?usage, "an answer is complete");
        if let Some(answer) = sequence.answer.take() {
            answer.finish(reason, usage);
        }
        self.end(slot);
    }

    /// Frees a slot, or marks it if some of its tokens are under way.
    fn end(&mut self, slot: usize) {
        let Some(sequence) = self.sequences[slot].as_mut() else { return };
        sequence.ended = true;
        sequence.answer = None;
        if sequence.under_way == 0 {
            self.blocks.release(&mut sequence.blocks);
            self.sequences[slot] = None;
            self.inbox.counters.running.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
