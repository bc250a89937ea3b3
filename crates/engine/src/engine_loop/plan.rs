//! Which tokens of which sequences the next step holds.

use std::sync::atomic::Ordering;

use super::{EngineLoop, Sequence};

/// Prompt tokens of a step while others decode: they wait for it.
const PROMPT_ROWS_BESIDE_DECODES: usize = 64;

impl EngineLoop {
    /// The next step's slots, and how many tokens of each: first the next token of those that decode, then what was generated
    /// before a preemption and is read again, then prompts, which come last in a step.
    pub(super) fn plan(&mut self, plan: &mut Vec<(usize, usize)>) {
        plan.clear();
        let mut rows = self.limits.rows;
        // In a pipeline each step takes its share of the sequences, so that every stage has one to work on.
        let share = self.running().div_ceil(self.rank.stages()).max(1);
        let free = |s: &Sequence| !s.ended && !s.awaits_token;
        let decodes = |s: &Sequence| free(s) && s.computed + 1 == s.tokens.len();
        for slot in 0..self.sequences.len() {
            if rows > 0
                && plan.len() < share
                && self.sequences[slot].as_ref().is_some_and(decodes)
                && self.room(slot, 1)
            {
                plan.push((slot, 1));
                rows -= 1;
            }
        }
        if !plan.is_empty() {
            rows = rows.min(PROMPT_ROWS_BESIDE_DECODES);
        }
        for prompts in [false, true] {
            let reads =
                |s: &Sequence| free(s) && s.computed + 1 < s.tokens.len() && s.reads_prompt() == prompts;
            for slot in 0..self.sequences.len() {
                let Some(sequence) = self.sequences[slot].as_ref().filter(|s| reads(s)) else { continue };
                let count = match prompts {
                    true => prompt_piece(sequence.prompt_rows() - sequence.computed, rows),
                    false => rows.min(sequence.tokens.len() - sequence.computed),
                };
                if count > 0 && plan.len() < self.limits.sequences && self.room(slot, count) {
                    plan.push((slot, count));
                    rows -= count;
                }
            }
        }
        // Some may have been put back to make room for others.
        plan.retain(|(slot, _)| self.sequences[*slot].is_some());
    }

    /// Makes room for `count` more tokens of a sequence; if need be, the youngest sequence starts over later. Never one
    /// that is older than the one that needs room, or two could drive each other out for ever.
    fn room(&mut self, slot: usize, count: usize) -> bool {
        loop {
            let Some(sequence) = self.sequences[slot].as_mut() else { return false };
            if self.blocks.extend(&mut sequence.blocks, sequence.computed + count) {
                return true;
            }
            let submitted = sequence.submitted;
            let can_go = |s: &Sequence| s.under_way == 0 && s.submitted >= submitted;
            let youngest = (0..self.sequences.len())
                .filter(|&other| self.sequences[other].as_ref().is_some_and(can_go))
                .max_by_key(|&other| self.sequences[other].as_ref().map(|s| s.submitted));
            match youngest {
                Some(other) if self.running() > 1 => self.put_back(other),
                _ => return false,
            }
            if self.sequences[slot].is_none() {
                return false;
            }
        }
    }

    /// Takes a sequence's blocks; it will read its prompt and answer so far again.
    fn put_back(&mut self, slot: usize) {
        if let Some(mut sequence) = self.sequences[slot].take() {
            self.blocks.release(&mut sequence.blocks);
            sequence.computed = 0;
            sequence.sent_blocks = 0;
            tracing::debug!(slot, tokens = sequence.tokens.len(), "starts over later: the KV cache is full");
            self.waiting.push_front(sequence);
            self.inbox.counters.preempted.fetch_add(1, Ordering::Relaxed);
            self.inbox.counters.waiting.fetch_add(1, Ordering::Relaxed);
            self.inbox.counters.running.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Rows of a prompt's next piece, of which `left` tokens are left and at least 2, where a step has room for `room`. Never a single
/// one, nor one that leaves a single one: backends take it for one that generates, whose numbers may differ in the last bits.
fn prompt_piece(left: usize, room: usize) -> usize {
    let count = left.min(room);
    match (count, left - count) {
        (0 | 1, _) | (2, 1) => 0,
        (_, 1) => count - 1,
        _ => count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_piece_of_a_prompt_is_a_single_token() {
        for room in 3..9 {
            for prompt in 2..40 {
                let mut left = prompt;
                while left > 0 {
                    let piece = prompt_piece(left, room);
                    assert!((2..=room).contains(&piece), "{piece} of {left}, with room for {room}");
                    left -= piece;
                }
            }
        }
        assert_eq!((prompt_piece(5, 1), prompt_piece(3, 2)), (0, 0), "they wait for the next step");
    }
}
