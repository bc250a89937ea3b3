//! What a draft model needs to know about sequences, and the proposals for their next tokens.

use thunder_compute::step::KV_BLOCK_TOKENS;

use super::blocks::missing;
use super::sequence::{Sequence, Work};
use super::{RequestId, Scheduler};
use crate::speculation::MAX_DRAFT;

/// A request whose next token the next step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decoding<'a> {
    /// The request.
    pub request: RequestId,
    /// Its slot.
    pub slot: usize,
    /// Prompt and answer so far.
    pub tokens: &'a [u32],
    /// The blocks of its table, which the draft model's cache has too.
    pub blocks: &'a [u32],
    /// Number of these blocks that the ranks know.
    pub sent_blocks: usize,
    /// Number of tokens that the draft model has read. The last one may be read again, for its
    /// logits.
    pub draft_read: usize,
    /// Tokens at the beginning whose blocks other sequences may read too.
    pub shared: usize,
    /// Tokens that may still be generated.
    pub left: usize,
    /// Maximum tokens of a draft.
    pub room: usize,
}

impl Scheduler {
    /// The requests that the next step will decode, unless an older one needs their blocks.
    pub fn decoding(&self) -> impl Iterator<Item = Decoding<'_>> {
        let ready = |slot: &usize| {
            let sequence = self.slots[*slot].as_ref()?;
            (sequence.ready_for() == Some(Work::Decode)).then(|| self.describe(*slot, sequence))
        };
        self.running.iter().filter_map(ready).take(self.share())
    }

    /// A request that the next step will decode.
    pub fn decoding_request(&self, request: RequestId) -> Option<Decoding<'_>> {
        self.decoding().find(|decoding| decoding.request == request)
    }

    fn describe<'a>(&self, slot: usize, sequence: &'a Sequence) -> Decoding<'a> {
        let left = sequence.room(self.max_tokens);
        Decoding {
            request: sequence.id,
            slot,
            tokens: &sequence.tokens,
            blocks: &sequence.blocks,
            sent_blocks: sequence.sent_blocks,
            draft_read: sequence.draft_read,
            shared: sequence.kept_blocks * KV_BLOCK_TOKENS,
            left,
            room: left.saturating_sub(1).min(MAX_DRAFT),
        }
    }

    /// Maximum tokens of all drafts in the next step.
    pub fn draft_rows(&self) -> usize {
        self.limits.draft_rows.min(self.limits.rows.saturating_sub(self.running.len() + 2))
    }

    /// Proposes a request's next tokens, at most [`MAX_DRAFT`]. If the next step decodes the
    /// request, it verifies them. The answer does not change, and takes fewer steps if they are
    /// right.
    pub fn propose(&mut self, request: RequestId, draft: &[u32]) {
        if self.limits.draft_rows > 0
            && let Some(slot) = self.slot_of(request)
            && let Some(sequence) = self.slots[slot].as_mut()
        {
            sequence.proposal.clear();
            sequence.proposal.extend_from_slice(&draft[..draft.len().min(MAX_DRAFT)]);
        }
    }

    /// Allocates blocks for a draft of `count` tokens to a request, before a draft model writes to
    /// them. Returns false if other requests need the blocks.
    pub fn reserve_draft(&mut self, request: RequestId, count: usize) -> bool {
        let Some(slot) = self.slot_of(request) else { return false };
        let Some(sequence) = self.slots[slot].as_ref() else { return false };
        let tokens = sequence.tokens.len() + count;
        if !self.can_extend_for_draft(sequence, tokens) {
            return false;
        }
        let Some(sequence) = self.slots[slot].as_mut() else { return false };
        self.blocks.extend(&mut sequence.blocks, tokens)
    }

    /// Records that the draft model's cache contains the first `read` of a request's tokens,
    /// including guesses after them.
    pub fn note_draft_read(&mut self, request: RequestId, read: usize) {
        let Some(slot) = self.slot_of(request) else { return };
        let Some(sequence) = self.slots[slot].as_mut() else { return };
        let whole = read.min(sequence.tokens.len()) / KV_BLOCK_TOKENS;
        self.blocks.note_draft_read(&sequence.blocks[..whole.min(sequence.blocks.len())]);
        sequence.draft_read = read;
    }

    /// True if blocks for `tokens` tokens of a sequence are available, in addition to those that
    /// every sequence may need for its next token.
    pub(super) fn can_extend_for_draft(&self, sequence: &Sequence, tokens: usize) -> bool {
        let needed = missing(&sequence.blocks, tokens);
        needed == 0 || needed + self.running.len() <= self.blocks.unused()
    }
}
