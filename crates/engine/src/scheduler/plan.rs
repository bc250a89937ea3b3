//! Plans the next step: its sequences and their tokens.

use thunder_compute::step::KV_BLOCK_TOKENS;

use super::pace::{LEAST_ROWS, UNMEASURED_ROWS, Waiting};
use super::sequence::Work;
use super::step::{Entry, PlannedStep};
use super::{RequestId, Scheduler, Sequence};

/// What a step has left while it is planned.
struct Room {
    rows: usize,
    /// Seconds for prompts; `None` if no stream waits for the step, or no times were measured.
    seconds: Option<f32>,
    /// The oldest sequence that waits for blocks of younger ones in flight. The younger ones get no
    /// rows, because otherwise they could stay in flight forever.
    waiting: Option<RequestId>,
}

impl Scheduler {
    /// Fills `step`: first the next token of sequences that decode, then prompts and tokens
    /// generated before a preemption, each in the order of their requests.
    pub(super) fn plan(&mut self, step: &mut PlannedStep) {
        step.clear();
        let mut room = Room { rows: self.limits.rows, seconds: None, waiting: None };
        self.plan_work(step, &[Work::Decode], self.share(), &mut room);
        let waiting = self.waiting_for(step);
        if waiting.streams > 0 && self.limits.whole_prompts.is_none() {
            room.seconds = self.pace.prompt_s(waiting);
            let most = if room.seconds.is_some() { usize::MAX } else { UNMEASURED_ROWS };
            room.rows = if self.pace.measures_decoding(waiting) { 0 } else { room.rows.min(most) };
        }
        // Both kinds together, so that younger sequences that compute their answers again leave
        // rows to the prompts of older ones.
        self.plan_work(step, &[Work::Recompute, Work::ReadPrompt], self.limits.sequences, &mut room);
        // Later entries may have preempted the sequences of earlier ones.
        step.entries.retain(|entry| self.slots[entry.slot].is_some());
        // Backends expect generated tokens first.
        step.entries.sort_unstable_by_key(|entry| (entry.prompt, self.id(entry.slot)));
        self.issue(step);
        // Proposals that no step verifies now are out of date in the next step.
        for sequence in self.slots.iter_mut().flatten() {
            sequence.proposal.clear();
            sequence.rewind_draft_model(sequence.tokens.len());
        }
    }

    /// Adds entries of these kinds until the step has `most` entries or no rows are left.
    fn plan_work(&mut self, step: &mut PlannedStep, kinds: &[Work], most: usize, room: &mut Room) {
        let mut index = 0;
        while index < self.running.len() && room.rows > 0 && step.entries.len() < most {
            let slot = self.running[index];
            let id = self.id(slot);
            if room.waiting.is_some() && id > room.waiting {
                return;
            }
            if kinds.contains(&Work::ReadPrompt) {
                self.share_prefix(slot);
            }
            let sequence = self.slots[slot].as_ref();
            let work = sequence.and_then(Sequence::ready_for).filter(|work| kinds.contains(work));
            let ready = sequence.zip(work);
            let rows = |sequence: &Sequence| self.rows_for(sequence, step, room);
            if let Some(mut entry) =
                ready.and_then(|(sequence, work)| entry(slot, sequence, work, rows(sequence)))
            {
                entry.drafted = self.drafted(&entry, step, room.rows);
                entry.count += entry.drafted;
                if self.reserve_blocks(index, entry.count) {
                    room.rows -= entry.count;
                    if let Some(seconds) = &mut room.seconds {
                        *seconds -= self.pace.seconds(entry.count, entry.start, step.prompt_rows());
                    }
                    step.entries.push(entry);
                } else if self.slots[slot].is_some() {
                    room.waiting = id;
                }
            }
            // A preemption removes this index or later ones, so no sequence is skipped.
            index += 1;
        }
    }

    /// The requests that wait for a step that decodes these entries.
    fn waiting_for(&self, step: &PlannedStep) -> Waiting {
        let sequences = || self.slots.iter().flatten();
        Waiting {
            decoding: step.entries.len(),
            streams: sequences().filter(|sequence| sequence.is_stream()).count(),
            prompts: sequences().filter(|sequence| sequence.reads_prompt()).count(),
        }
    }

    /// Maximum rows of a sequence's next part.
    fn rows_for(&self, sequence: &Sequence, step: &PlannedStep, room: &Room) -> usize {
        if let Some(most) = self.limits.whole_prompts {
            let used: usize = step.entries.iter().map(|entry| entry.count).sum();
            let rows = sequence.prompt_rows();
            let fits = rows <= room.rows && (used == 0 || used + rows <= most);
            return if fits { rows } else { 0 };
        }
        let Some(seconds) = room.seconds else { return room.rows };
        let rows = self.pace.rows_in(seconds, sequence.computed, step.prompt_rows());
        // The first prompt continues however long the streams take.
        let is_first = step.entries.iter().all(|entry| entry.count == entry.drafted + 1);
        rows.max(if is_first { LEAST_ROWS } else { 0 }).min(room.rows)
    }

    /// Number of proposed tokens that the step verifies: limited by the step's rows, with one for
    /// every sequence and three for a prompt, and by free blocks. A draft preempts no sequence.
    fn drafted(&self, entry: &Entry, step: &PlannedStep, rows: usize) -> usize {
        let Some(sequence) = self.slots[entry.slot].as_ref().filter(|sequence| !sequence.proposal.is_empty())
        else {
            return 0;
        };
        let used: usize = step.entries.iter().map(|entry| entry.drafted).sum();
        let most = (self.limits.draft_rows - used).min(rows.saturating_sub(self.running.len() + 2));
        let room = sequence.room(self.max_tokens).saturating_sub(1);
        let count = sequence.proposal.len().min(most).min(room);
        let can_extend = self.can_extend_for_draft(sequence, entry.start + 1 + count);
        if entry.wants_token && !entry.prompt && entry.count == 1 && can_extend { count } else { 0 }
    }

    /// Keeps the prompt blocks that earlier steps have computed. Those of the next step are
    /// excluded, because no sequence may read what another one writes in the same step.
    pub(super) fn keep_prompts(&mut self) {
        if self.limits.prefix_cache {
            for sequence in self.slots.iter_mut().flatten() {
                sequence.keep_prompt_blocks(&mut self.blocks);
            }
        }
    }

    /// If all blocks of a sequence are full and kept, makes it continue after further kept blocks
    /// of its prompt.
    fn share_prefix(&mut self, slot: usize) {
        let Some(sequence) = self.slots[slot].as_mut().filter(|_| self.limits.prefix_cache) else { return };
        let (start, held) = (sequence.computed, sequence.blocks.len());
        let is_at_end = start == held * KV_BLOCK_TOKENS && sequence.kept_blocks == held;
        if !is_at_end || sequence.ready_for() != Some(Work::ReadPrompt) {
            return;
        }
        let rest = sequence.sharable().get(start..).unwrap_or_default();
        let rest = (rest, sequence.generation.adapter);
        let known = held + self.blocks.find(&sequence.blocks, rest, &mut self.found);
        sequence.branch = known * KV_BLOCK_TOKENS;
        if self.found.is_empty() {
            return self.look_on_disk(slot);
        }
        self.blocks.share(&mut sequence.blocks, &self.found);
        if sequence.draft_read == start {
            let read = self.found.iter().take_while(|block| self.blocks.is_draft_read(**block)).count();
            sequence.draft_read += read * KV_BLOCK_TOKENS;
        }
        self.blocks.change_pin(&mut sequence.restore, self.found.last().copied());
        sequence.kept_blocks = sequence.blocks.len();
        sequence.computed = sequence.kept_blocks * KV_BLOCK_TOKENS;
        if sequence.tokens.len() == sequence.prompt_tokens {
            sequence.cached_tokens += sequence.computed - start;
        }
        if let Some(disk) = &mut self.blocks.disk {
            disk.note_shared(sequence, held, sequence.restore.is_some());
        }
        self.look_on_disk(slot);
    }

    /// Records that the step's tokens are in flight.
    fn issue(&mut self, step: &mut PlannedStep) {
        for index in 0..step.entries.len() {
            let entry = &mut step.entries[index];
            let Some(sequence) = self.slots[entry.slot].as_mut() else { continue };
            sequence.computed += entry.count;
            self.read.count(sequence);
            sequence.sent_blocks = sequence.blocks.len();
            sequence.in_flight += 1;
            sequence.awaits_token = entry.wants_token;
            entry.restore = sequence.restore;
            entry.accepted = std::mem::take(&mut sequence.accepted);
            self.blocks.change_pin(&mut sequence.restore, None);
            if sequence.is_at_save_point(entry.start)
                && let Some(snapshots) = &mut self.blocks.snapshots
            {
                entry.save = snapshots.take();
                sequence.saved = entry.save.map(|snapshot| (snapshot, sequence.computed));
            }
            if self.limits.ahead && entry.count > entry.wanted_rows() {
                // The rows' tokens, and the following one if it is known.
                sequence.draft_read = (entry.start + entry.count + 1).min(sequence.tokens.len());
            }
            if entry.drafted > 0 {
                sequence.begin_draft(entry.drafted);
            }
            if entry.wants_token {
                step.results.add(sequence.generation.wanted);
            }
            step.load.add(entry.prompt, entry.start, entry.count);
            step.load.prompt_ends += usize::from(entry.prompt && entry.wants_token);
        }
    }
}

/// A sequence's part of a step with `rows` free rows; `None` if it must wait for the next step.
fn entry(slot: usize, sequence: &Sequence, work: Work, rows: usize) -> Option<Entry> {
    let start = sequence.computed;
    let count = match work {
        Work::Decode => 1,
        Work::Recompute => rows.min(sequence.tokens.len() - start),
        Work::ReadPrompt => prompt_piece(sequence.piece_end() - start, rows),
    };
    (count > 0).then_some(Entry {
        slot,
        start,
        count,
        kept_blocks: sequence.sent_blocks,
        prompt: work == Work::ReadPrompt,
        restore: None,
        save: None,
        wants_token: start + count == sequence.tokens.len(),
        drafted: 0,
        accepted: 0,
    })
}

/// Rows of the next piece of a prompt with `left` unread tokens, in a step with `room` free rows; 0
/// if it must wait. No piece is a single token, and none leaves a single one: backends would
/// compute it as a generated token, which may change the last bits.
pub(super) fn prompt_piece(left: usize, room: usize) -> usize {
    let count = left.min(room);
    match (count, left - count) {
        (0 | 1, _) | (2, 1) => 0,
        (_, 1) => count - 1,
        _ => count,
    }
}
