//! One request's tokens, and how far they are computed.

use thunder_compute::step::KV_BLOCK_TOKENS;

use crate::event::FinishReason;

/// Identifies a request. A request submitted later has a larger id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// How long to generate, and from what tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generation {
    /// The most tokens to generate; `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// The likeliest token of a row is always chosen, so the other logits are not needed.
    pub greedy: bool,
}

/// A request, from its submission until it ends.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: RequestId,
    pub generation: Generation,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    pub prompt_tokens: usize,
    /// Tokens that are in the caches, or will be once the steps in flight are computed.
    pub computed: usize,
    /// The sequence's part of the paged KV cache.
    pub blocks: Vec<u32>,
    /// Blocks that the ranks know of.
    pub sent_blocks: usize,
    /// A row of a step in flight gives the next token.
    pub awaits_token: bool,
    /// Steps in flight that hold tokens of this sequence.
    pub in_flight: usize,
    /// The request ended while tokens were in flight. Its slot is freed after them.
    pub ended: bool,
}

impl Sequence {
    /// Takes the memory for all tokens and blocks at once, so that later tokens allocate nothing.
    pub fn new(id: RequestId, prompt: &[u32], generation: Generation, max_tokens: usize) -> Self {
        let longest =
            prompt.len().saturating_add(generation.max_tokens.unwrap_or(usize::MAX)).min(max_tokens);
        let mut tokens = Vec::with_capacity(longest);
        tokens.extend_from_slice(prompt);
        Self {
            id,
            generation,
            tokens,
            prompt_tokens: prompt.len(),
            computed: 0,
            blocks: Vec::with_capacity(longest.div_ceil(KV_BLOCK_TOKENS)),
            sent_blocks: 0,
            awaits_token: false,
            in_flight: 0,
            ended: false,
        }
    }

    /// Tokens that are computed as a prompt. A prompt of one token is not, nor are tokens generated
    /// before a preemption: backends compute those with the numbers of decoding, and the text must
    /// not change.
    pub fn prompt_rows(&self) -> usize {
        if self.prompt_tokens == 1 { 0 } else { self.prompt_tokens }
    }

    /// What the sequence can do in the next step.
    pub fn ready_for(&self) -> Option<Work> {
        if self.ended || self.awaits_token {
            None
        } else if self.computed < self.prompt_rows() {
            Some(Work::ReadPrompt)
        } else if self.computed + 1 < self.tokens.len() {
            Some(Work::Recompute)
        } else {
            Some(Work::Decode)
        }
    }

    /// Appends the token that was awaited. Returns why the answer ends with it, if it does.
    pub fn accept(&mut self, token: u32, eos: &[u32], max_tokens: usize) -> Option<FinishReason> {
        self.awaits_token = false;
        self.tokens.push(token);
        let generated = self.tokens.len() - self.prompt_tokens;
        if eos.contains(&token) && !self.generation.ignore_eos {
            Some(FinishReason::Stop)
        } else if self.generation.max_tokens.is_some_and(|max| generated >= max)
            || self.tokens.len() >= max_tokens
        {
            Some(FinishReason::Length)
        } else {
            None
        }
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
