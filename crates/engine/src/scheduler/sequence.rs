//! One request's tokens, and the state of their computation.

use thunder_compute::step::KV_BLOCK_TOKENS;

use super::blocks::BlockPool;
use super::stored::Reading;
use crate::event::FinishReason;
use crate::speculation::MAX_DRAFT;
use crate::transfer::BlockName;

/// Identifies a request. A request submitted later has a larger id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// How long to generate, with which adapter, and from which results tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Generation {
    /// Maximum tokens to generate; `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// Continue after end-of-sequence tokens.
    pub ignore_eos: bool,
    /// The results from which the next token is chosen.
    pub wanted: Wanted,
    /// The low-rank adapter, counted from 1; 0: none.
    pub adapter: u32,
}

/// The results that ranks must send for a row that gives a next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// The most probable token.
    #[default]
    Largest,
    /// A token that ranks choose.
    Chosen,
    /// All logits.
    Logits,
    /// The hidden state after the last norm. The token is ignored.
    Hidden,
}

impl Generation {
    /// Why an answer ends with `token`, if it does. The token is the last of `generated` generated
    /// tokens, and of `tokens` tokens including the prompt.
    pub(super) fn finish(
        &self,
        token: u32,
        generated: usize,
        tokens: usize,
        eos: &[u32],
        max_tokens: usize,
    ) -> Option<FinishReason> {
        if eos.contains(&token) && !self.ignore_eos {
            Some(FinishReason::Stop)
        } else if self.max_tokens.is_some_and(|max| generated >= max) || tokens >= max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

/// Shorter prompts save no state at their end: computing them again costs less than an additional
/// step.
const LEAST_SAVED_TOKENS: usize = 4 * KV_BLOCK_TOKENS;

/// A request, from its submission until it ends.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: RequestId,
    pub generation: Generation,
    /// Prompt and answer. While a step that verifies a draft is in flight, also the draft.
    pub tokens: Vec<u32>,
    /// Number of tokens at the end of `tokens` that are a draft.
    pub drafted: usize,
    /// Right tokens of the last draft that the ranks' states have not absorbed yet.
    pub accepted: usize,
    /// Guesses of the next tokens, which the next step that decodes verifies.
    pub proposal: Vec<u32>,
    pub prompt_tokens: usize,
    /// Tokens that are in the caches, or will be when the steps in flight are computed.
    pub computed: usize,
    /// Tokens that are in the draft model's cache, in the same blocks.
    pub draft_read: usize,
    /// The sequence's part of the paged KV cache.
    pub blocks: Vec<u32>,
    /// Names of the prompt's whole blocks, if there is a disk tier.
    pub names: Vec<BlockName>,
    /// Blocks from disk that the sequence waits for.
    pub reading: Option<Reading>,
    /// The data for choosing its next token is not ready.
    pub is_held: bool,
    /// Reading from disk has failed before, so the prompt is computed.
    pub avoids_disk: bool,
    /// Blocks at the table's beginning that are kept for other prompts.
    pub kept_blocks: usize,
    /// Tokens of the prompt that were in the cache at lookup. A later prompt may differ from the
    /// same position on, so a model with states saves its state there.
    pub branch: usize,
    /// The snapshot that the next step restores, pinned.
    pub restore: Option<u32>,
    /// The snapshot that a step saves, pinned, and the tokens before it.
    pub saved: Option<(u32, usize)>,
    /// States are saved while the prompt is read.
    pub saves_states: bool,
    /// Prompt tokens that were already in the cache.
    pub cached_tokens: usize,
    /// What [`ReadTokens`] contains of the prompt.
    pub counted: ReadTokens,
    /// Number of blocks that the ranks know.
    pub sent_blocks: usize,
    /// A row of a step in flight gives the next token.
    pub awaits_token: bool,
    /// Number of steps in flight that contain tokens of this sequence.
    pub in_flight: usize,
    /// The request ended while tokens were in flight. Its slot is freed after them.
    pub ended: bool,
}

impl Sequence {
    /// Allocates memory for all tokens and blocks at once, so that later tokens allocate nothing.
    pub fn new(id: RequestId, prompt: &[u32], generation: Generation, max_tokens: usize) -> Self {
        let longest =
            prompt.len().saturating_add(generation.max_tokens.unwrap_or(usize::MAX)).min(max_tokens);
        let mut tokens = Vec::with_capacity(longest);
        tokens.extend_from_slice(prompt);
        Self {
            id,
            generation,
            tokens,
            drafted: 0,
            accepted: 0,
            proposal: Vec::with_capacity(MAX_DRAFT),
            prompt_tokens: prompt.len(),
            computed: 0,
            draft_read: 0,
            blocks: Vec::with_capacity(longest.div_ceil(KV_BLOCK_TOKENS)),
            names: Vec::new(),
            reading: None,
            is_held: false,
            avoids_disk: false,
            kept_blocks: 0,
            branch: 0,
            restore: None,
            saved: None,
            saves_states: false,
            cached_tokens: 0,
            counted: ReadTokens::default(),
            sent_blocks: 0,
            awaits_token: false,
            in_flight: 0,
            ended: false,
        }
    }

    /// Tokens that are computed as a prompt. A prompt of one token is not, nor are tokens generated
    /// before a preemption: backends compute these with the numbers of decoding, and the text must
    /// not change.
    pub fn prompt_rows(&self) -> usize {
        if self.prompt_tokens == 1 { 0 } else { self.prompt_tokens }
    }

    /// The beginning of the prompt that may come from the cache. The rest has at least two tokens,
    /// because it gives the next token and no piece of a prompt is a single token.
    pub fn sharable(&self) -> &[u32] {
        let most = self.prompt_rows().saturating_sub(2);
        &self.tokens[..most - most % KV_BLOCK_TOKENS]
    }

    /// Keeps the blocks that contain only computed tokens of the prompt, because a generated token
    /// has other numbers than the same token in a prompt.
    pub fn keep_prompt_blocks(&mut self, pool: &mut BlockPool) {
        let (blocks, _) = self.tokens[..self.computed.min(self.prompt_rows())].as_chunks();
        while self.kept_blocks < blocks.len() {
            let index = self.kept_blocks;
            if pool.keep(&mut self.blocks, index, (blocks[index], self.generation.adapter)) {
                // The ranks' tables contain this sequence's own block.
                self.sent_blocks = self.sent_blocks.min(index);
                if !pool.is_draft_read(self.blocks[index]) && self.draft_read > index * KV_BLOCK_TOKENS {
                    // States can only return to the beginning.
                    self.draft_read = if pool.none_draft_read { 0 } else { index * KV_BLOCK_TOKENS };
                }
            }
            self.kept_blocks += 1;
            if let Some(disk) = &mut pool.disk {
                disk.note(self, index);
            }
        }
        if let (Some((snapshot, position)), Some(snapshots)) = (self.saved.take(), &mut pool.snapshots) {
            let last = position / KV_BLOCK_TOKENS - 1;
            snapshots.place(snapshot, self.blocks[last]);
            if let Some(disk) = &mut pool.disk {
                disk.note_state(self, last, snapshot);
            }
        }
    }

    /// Latest end of the prompt's next piece: the prompt's end, or an earlier position at which a
    /// state will be saved.
    pub fn piece_end(&self) -> usize {
        self.save_points().find(|point| *point > self.computed).unwrap_or(self.prompt_rows())
    }

    /// True if the state should be saved after the step that began at `start` and ends at the
    /// sequence's computed position.
    pub fn is_at_save_point(&self, start: usize) -> bool {
        self.computed > start && self.save_points().any(|point| point == self.computed)
    }

    /// Positions at which the state is saved, in ascending order: where another prompt differed,
    /// and at the last block's end, where this conversation's next prompt continues.
    fn save_points(&self) -> impl Iterator<Item = usize> {
        let last = Some(self.sharable().len()).filter(|last| *last >= LEAST_SAVED_TOKENS);
        let branch = Some(self.branch).filter(|branch| *branch > 0);
        let (first, second) = if branch == last { (None, last) } else { (branch, last) };
        first.into_iter().chain(second).filter(|_| self.saves_states)
    }

    /// Resets the computed tokens. The blocks have been released.
    pub fn start_over(&mut self) {
        (self.computed, self.sent_blocks, self.kept_blocks, self.draft_read) = (0, 0, 0, 0);
        (self.reading, self.avoids_disk, self.accepted) = (None, false, 0);
        if self.tokens.len() == self.prompt_tokens {
            self.cached_tokens = 0;
        }
    }

    /// What the sequence can do in the next step.
    pub fn ready_for(&self) -> Option<Work> {
        if self.ended || self.awaits_token || self.reading.is_some() {
            None
        } else if self.computed < self.prompt_rows() {
            Some(Work::ReadPrompt)
        } else if self.computed + 1 < self.tokens.len() {
            Some(Work::Recompute)
        } else {
            (!self.is_held).then_some(Work::Decode)
        }
    }

    /// True if a client that has received tokens waits for the next one, and nothing else must be
    /// computed before it.
    pub fn is_stream(&self) -> bool {
        let awaits_next = self.awaits_token && self.tokens.len() > self.prompt_tokens;
        (awaits_next && !self.ended) || self.ready_for() == Some(Work::Decode)
    }

    /// True if a part of the prompt is unread.
    pub fn reads_prompt(&self) -> bool {
        !self.ended && self.reading.is_none() && self.computed < self.prompt_rows()
    }

    /// Tokens that may still be generated.
    pub fn room(&self, max_tokens: usize) -> usize {
        let generated = self.tokens.len() - self.prompt_tokens;
        let wanted = self.generation.max_tokens.map_or(usize::MAX, |most| most.saturating_sub(generated));
        wanted.min(max_tokens - self.tokens.len())
    }

    /// Appends the first `count` proposed tokens to the others, for a step to verify.
    pub fn begin_draft(&mut self, count: usize) {
        self.tokens.extend_from_slice(&self.proposal[..count]);
        self.drafted = count;
        self.proposal.clear();
    }

    /// Removes the draft, and what was computed of it.
    pub fn end_draft(&mut self) {
        self.tokens.truncate(self.tokens.len() - self.drafted);
        self.computed -= std::mem::take(&mut self.drafted);
    }

    /// Drops what the draft model has computed after the first `tokens` tokens.
    pub fn rewind_draft_model(&mut self, tokens: usize) {
        self.draft_read = self.draft_read.min(tokens);
    }

    /// The tokens of the draft that a step verifies.
    pub fn draft(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.drafted..]
    }

    /// Appends the awaited token. Returns why the answer ends with it, if it does.
    pub fn accept(&mut self, token: u32, eos: &[u32], max_tokens: usize) -> Option<FinishReason> {
        self.awaits_token = false;
        self.tokens.push(token);
        let generated = self.tokens.len() - self.prompt_tokens;
        self.generation.finish(token, generated, self.tokens.len(), eos, max_tokens)
    }
}

/// Tokens of prompts that steps have taken. A sequence that starts over adds only what it had not
/// reached before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadTokens {
    /// Computed, or found in the cache.
    pub all: u64,
    /// Found in the cache.
    pub cached: u64,
}

impl ReadTokens {
    /// Adds what the sequence's prompt has more than was counted of it.
    pub(super) fn count(&mut self, sequence: &mut Sequence) {
        let all = sequence.computed.min(sequence.prompt_tokens) as u64;
        let now = Self { all, cached: sequence.cached_tokens as u64 };
        let before = sequence.counted;
        sequence.counted = Self { all: now.all.max(before.all), cached: now.cached.max(before.cached) };
        self.all += sequence.counted.all - before.all;
        self.cached += sequence.counted.cached - before.cached;
    }
}

/// What a step computes for a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// The last token, which gives the next one.
    Decode,
    /// Tokens that were generated before a preemption.
    Recompute,
    /// A piece of the prompt.
    ReadPrompt,
}
