//! A draft model that checks its cache: as far as the scheduler says that it has read, its blocks
//! contain exactly the sequence's tokens. A model with states has read exactly to this position.

use thunder_compute::step::KV_BLOCK_TOKENS;

use crate::scheduler::{Decoding, Limits, RequestId, Scheduler};

pub struct FakeDraft {
    /// By block, then by token of the block: a hash of the token and all before it.
    cache: Vec<u64>,
    /// For each slot, if it has states: a hash of all tokens read, and their number.
    states: Option<Vec<(u64, usize)>>,
    /// Number of tokens that had been read when a guess began.
    pub found: usize,
}

impl FakeDraft {
    pub fn new(limits: Limits) -> Self {
        let states = limits.draft_states.then(|| vec![(0, 0); limits.sequences]);
        Self { cache: vec![0; limits.kv_blocks * KV_BLOCK_TOKENS], states, found: 0 }
    }

    /// Reads what it has not read of a request that decodes next (sometimes all except one token),
    /// and proposes `draft`.
    pub fn guess(&mut self, scheduler: &mut Scheduler, request: RequestId, draft: &[u32]) {
        let Some(decoding) = scheduler.decoding_request(request) else { return };
        let last = decoding.tokens.len() - 1;
        let read = decoding.draft_read;
        if self.states.is_some() && read > last {
            // It cannot read the last token again.
            return;
        }
        let read = read.min(last);
        self.found += read;
        self.check(&decoding, read);
        let draft = &draft[..draft.len().min(decoding.room)];
        let text = [decoding.tokens, draft].concat();
        // Sometimes the text is read without guessing.
        if draft.is_empty() || !scheduler.reserve_draft(request, draft.len()) {
            let Some(decoding) = scheduler.decoding_request(request) else { return };
            self.write(&decoding, &text, read..last);
            return scheduler.note_draft_read(request, last);
        }
        let Some(decoding) = scheduler.decoding_request(request) else { return };
        self.write(&decoding, &text, read..text.len() - 1);
        scheduler.propose(request, draft);
        scheduler.note_draft_read(request, text.len() - 1);
    }

    fn check(&self, decoding: &Decoding<'_>, read: usize) {
        let mut before = 0;
        for (position, token) in decoding.tokens[..read].iter().enumerate() {
            before = hash(before, *token);
            assert_eq!(self.cache[place(decoding, position)], before, "token {position} of {read}");
        }
        if let Some(states) = self.states.as_ref().filter(|_| read > 0) {
            assert_eq!(states[decoding.slot], (before, read), "the state of {read} tokens");
        }
    }

    fn write(&mut self, decoding: &Decoding<'_>, text: &[u32], positions: std::ops::Range<usize>) {
        let mut before = 0;
        for (position, token) in text.iter().enumerate().take(positions.end) {
            before = hash(before, *token);
            if positions.contains(&position) {
                self.cache[place(decoding, position)] = before;
            }
            // Guesses are read on a copy.
            if let Some(states) = &mut self.states
                && position < decoding.tokens.len()
            {
                states[decoding.slot] = (before, position + 1);
            }
        }
    }
}

fn place(decoding: &Decoding<'_>, position: usize) -> usize {
    decoding.blocks[position / KV_BLOCK_TOKENS] as usize * KV_BLOCK_TOKENS + position % KV_BLOCK_TOKENS
}

fn hash(before: u64, token: u32) -> u64 {
    (before ^ (u64::from(token) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}
