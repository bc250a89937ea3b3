//! Which requests get slots, and which lose them.

use thunder_compute::step::KV_BLOCK_TOKENS;

use super::{RequestId, Scheduler, Sequence};

impl Scheduler {
    /// Gives free slots to waiting requests, first come first served.
    pub(super) fn admit(&mut self) {
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let Some(next) = self.waiting.front() else { return };
            // The free blocks must suffice for the prompt and one more token, so that an admission
            // does not cause a preemption at once. Blocks shared with a running sequence already
            // exist.
            let blocks = (next.tokens.len() + 1).div_ceil(KV_BLOCK_TOKENS);
            if blocks > self.blocks.unused() && !self.running.is_empty() {
                self.found.clear();
                if self.limits.prefix_cache {
                    let tokens = (next.sharable(), next.generation.adapter);
                    self.blocks.find(&[], tokens, &mut self.found);
                }
                let shared = self.found.len() - self.blocks.unused_among(&self.found);
                if blocks - shared > self.blocks.unused() {
                    return;
                }
            }
            let Some(sequence) = self.waiting.pop_front() else { return };
            let index = self.running.partition_point(|&other| self.id(other) < Some(sequence.id));
            self.running.insert(index, slot);
            self.slots[slot] = Some(sequence);
        }
    }

    /// Allocates blocks for `count` more tokens of the sequence at `index` in
    /// [`Scheduler::running`]. If too few are free, younger sequences are preempted, the youngest
    /// first. Older sequences are never preempted, because two sequences could then preempt each
    /// other forever.
    pub(super) fn reserve_blocks(&mut self, index: usize, count: usize) -> bool {
        let slot = self.running[index];
        loop {
            let Some(sequence) = self.slots[slot].as_mut() else { return false };
            if self.blocks.extend(&mut sequence.blocks, sequence.computed + count) {
                return true;
            }
            let younger = &self.running[index + 1..];
            match younger.iter().rev().copied().find(|&other| self.can_preempt(other)) {
                Some(other) => self.preempt(other),
                None => {
                    // The youngest sequence gives up its own slot. If there are younger ones, they
                    // are in flight, and this sequence waits until one can be preempted.
                    if younger.is_empty() && index > 0 && self.can_preempt(slot) {
                        self.preempt(slot);
                    }
                    return false;
                }
            }
        }
    }

    fn can_preempt(&self, slot: usize) -> bool {
        self.slots[slot].as_ref().is_some_and(|sequence| sequence.in_flight == 0)
    }

    /// Takes a sequence's slot and blocks away. The sequence waits, and later computes its prompt
    /// and its answer so far again.
    fn preempt(&mut self, slot: usize) {
        let Some(mut sequence) = self.free(slot) else { return };
        tracing::debug!(slot, tokens = sequence.tokens.len(), "preempted: the KV cache is full");
        sequence.start_over();
        let index = self.waiting.partition_point(|other| other.id < sequence.id);
        self.waiting.insert(index, sequence);
        self.preemptions += 1;
    }

    /// Ends a slot's sequence. The slot is freed now, or when its tokens in flight have arrived.
    pub(super) fn end(&mut self, slot: usize) {
        let Some(sequence) = self.slots[slot].as_mut() else { return };
        sequence.ended = true;
        if sequence.in_flight == 0 {
            self.free(slot);
        }
    }

    /// Empties a slot and frees its blocks.
    fn free(&mut self, slot: usize) -> Option<Sequence> {
        let mut sequence = self.slots[slot].take()?;
        if self.limits.prefix_cache {
            sequence.keep_prompt_blocks(&mut self.blocks);
            self.blocks.change_pin(&mut sequence.restore, None);
        }
        self.blocks.release(&mut sequence.blocks);
        self.running.retain(|&other| other != slot);
        Some(sequence)
    }

    pub(super) fn id(&self, slot: usize) -> Option<RequestId> {
        self.slots[slot].as_ref().map(|sequence| sequence.id)
    }
}
