//! Blocks of prompts on disk: which are written, and which a prompt reads instead of computing
//! them.
//!
//! Blocks and states that are kept or shared are recorded as used; ranks write those that they do
//! not have yet. If the next blocks of a prompt are on disk, the prompt gets blocks in memory and
//! takes part in no step until all ranks have read them. If a rank fails to read one, the prompt is
//! computed from there on.

use thunder_compute::step::KV_BLOCK_TOKENS;

use super::{Scheduler, Sequence};
use crate::transfer::{BlockName, NOWHERE, Part, Transfer};

/// The scheduler's view of the blocks on disk.
pub(crate) trait Stored: Send {
    /// The names of a prompt's whole blocks, computed with this adapter.
    fn names(&self, tokens: &[u32], adapter: u32) -> Vec<BlockName>;
    /// True if the block or the state at its end is on disk, according to rank 0.
    fn holds(&self, name: &BlockName, part: Part) -> bool;
}

/// Blocks on disk.
pub(super) struct DiskTier {
    stored: Box<dyn Stored>,
    /// The sum of this and a request's number is the time of its use.
    first_use: u64,
    /// Blocks that were kept or used since they were last taken.
    noted: Vec<Transfer>,
}

impl std::fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskTier").field("noted", &self.noted).finish_non_exhaustive()
    }
}

/// Blocks that a sequence reads from disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    /// The first block's index in the table, which is the number of blocks that the sequence had
    /// before.
    first: usize,
    /// Number of blocks to read.
    blocks: usize,
    /// Number of blocks that were read.
    read: usize,
    /// Number of blocks that are being read.
    asked: usize,
    /// The pinned snapshot into which the state at the last block's end is read.
    snapshot: Option<u32>,
}

impl DiskTier {
    /// Records that the block at `index` of a sequence's table was kept.
    pub fn note(&mut self, sequence: &Sequence, index: usize) {
        self.push(sequence, index, Part::Block, sequence.blocks[index]);
    }

    /// Records a snapshot at the end of the block at `index` of a sequence's table.
    pub fn note_state(&mut self, sequence: &Sequence, index: usize, snapshot: u32) {
        self.push(sequence, index, Part::State, snapshot);
    }

    /// Records that a sequence uses the blocks of its table from `first` on, and the state at their
    /// end. Nothing of it is written, because another sequence may get the snapshot before the next
    /// step.
    pub fn note_shared(&mut self, sequence: &Sequence, first: usize, has_state: bool) {
        let end = sequence.blocks.len();
        (first..end).for_each(|index| self.push(sequence, index, Part::Block, NOWHERE));
        if has_state {
            self.push(sequence, end - 1, Part::State, NOWHERE);
        }
    }

    fn push(&mut self, sequence: &Sequence, index: usize, part: Part, place: u32) {
        let Some(&name) = sequence.names.get(index) else { return };
        let used = self.first_use + sequence.id.0;
        self.noted.push(Transfer { part, place, name, depth: index as u32, used });
    }

    /// The names of a prompt's whole blocks.
    pub fn names(&self, tokens: &[u32], adapter: u32) -> Vec<BlockName> {
        self.stored.names(tokens, adapter)
    }

    /// The number of blocks at the beginning that are on disk, and the number that a model with
    /// states can use, which end where a state is.
    fn known(&self, names: &[BlockName], has_states: bool) -> (usize, usize) {
        let known = names.iter().take_while(|name| self.stored.holds(name, Part::Block)).count();
        if !has_states {
            return (known, known);
        }
        let has_state = |name: &BlockName| self.stored.holds(name, Part::State);
        (known, names[..known].iter().rposition(has_state).map_or(0, |last| last + 1))
    }
}

impl Scheduler {
    /// Adds a disk tier to the prefix cache. Uses of requests are numbered from `first_use` on.
    pub(crate) fn with_disk(mut self, stored: Box<dyn Stored>, first_use: u64) -> Self {
        self.blocks.disk = Some(DiskTier { stored, first_use, noted: Vec::new() });
        self
    }

    /// Keeps what steps have computed, and moves the blocks and states that were kept or used since
    /// the last call to `noted`. They stay valid until the next step is computed.
    pub(crate) fn take_noted(&mut self, noted: &mut Vec<Transfer>) {
        noted.clear();
        self.keep_prompts();
        if let Some(disk) = &mut self.blocks.disk {
            noted.append(&mut disk.noted);
        }
    }

    /// Clears what was recorded and not taken, because the planned step may write to these blocks.
    pub(super) fn forget_noted(&mut self) {
        if let Some(disk) = &mut self.blocks.disk {
            disk.noted.clear();
        }
    }

    /// Searches the disk for the blocks that follow those of a prompt's table, all of which are
    /// full and kept.
    pub(super) fn look_on_disk(&mut self, slot: usize) {
        let has_states = self.blocks.snapshots.is_some();
        let (Some(disk), Some(sequence)) = (&self.blocks.disk, self.slots[slot].as_mut()) else { return };
        let (held, sharable) = (sequence.blocks.len(), sequence.sharable().len() / KV_BLOCK_TOKENS);
        let names = sequence.names.get(held..sharable).unwrap_or_default();
        if sequence.avoids_disk {
            return;
        }
        let (known, usable) = disk.known(names, has_states);
        sequence.branch = sequence.branch.max((held + known) * KV_BLOCK_TOKENS);
        if usable > 0 {
            let reading = Reading { first: held, blocks: usable, read: 0, asked: 0, snapshot: None };
            sequence.reading = Some(reading);
        }
    }

    /// True if a prompt waits for blocks from disk.
    pub(crate) fn waits_for_disk(&self) -> bool {
        self.slots.iter().flatten().any(|sequence| sequence.reading.is_some())
    }

    /// What all ranks read next: at most `most` blocks of the oldest prompt that waits for some. No
    /// step may be in flight, and [`Scheduler::finish_reading`] must follow. Returns false if there
    /// is nothing left to read.
    pub(crate) fn begin_reading(&mut self, most: usize, reads: &mut Vec<Transfer>) -> bool {
        debug_assert!(self.in_flight.is_empty(), "steps in flight may use the blocks");
        reads.clear();
        self.forget_noted();
        let is_reading = |slot: &usize| self.slots[*slot].as_ref().is_some_and(|s| s.reading.is_some());
        let Some(slot) = self.running.iter().copied().find(is_reading) else { return false };
        let Some(sequence) = self.slots[slot].as_mut() else { return false };
        let Some(reading) = &mut sequence.reading else { return false };
        if reading.read == 0 {
            // Another prompt may have read or computed the same blocks meanwhile.
            let rest = sequence.tokens.get(reading.first * KV_BLOCK_TOKENS..).unwrap_or_default();
            let rest = &rest[..reading.blocks * KV_BLOCK_TOKENS];
            self.blocks.find(&sequence.blocks, (rest, sequence.generation.adapter), &mut self.found);
            if !self.found.is_empty() {
                sequence.reading = None;
                return false;
            }
        }
        reading.asked = most.clamp(1, reading.blocks - reading.read);
        let first = reading.first + reading.read;
        let (end, is_last) = (first + reading.asked, reading.read + reading.asked == reading.blocks);
        let mut has_room = self.blocks.extend(&mut sequence.blocks, end * KV_BLOCK_TOKENS);
        if has_room
            && is_last
            && let Some(snapshots) = &mut self.blocks.snapshots
        {
            reading.snapshot = snapshots.take();
            has_room = reading.snapshot.is_some();
        }
        if !has_room {
            sequence.avoids_disk = true;
            self.end_reading(slot, false);
            return false;
        }
        let snapshot = reading.snapshot;
        let used = self.blocks.disk.as_ref().map_or(0, |disk| disk.first_use) + sequence.id.0;
        let read = |part, place, index: usize| Transfer {
            part,
            place,
            name: sequence.names[index],
            depth: index as u32,
            used,
        };
        reads.extend((first..end).map(|index| read(Part::Block, sequence.blocks[index], index)));
        reads.extend(snapshot.map(|snapshot| read(Part::State, snapshot, end - 1)));
        true
    }

    /// Records that all ranks have read the first `count` transfers from
    /// [`Scheduler::begin_reading`]. Returns the number of tokens that need not be computed.
    pub(crate) fn finish_reading(&mut self, count: usize) -> usize {
        let asks = |sequence: &Sequence| sequence.reading.is_some_and(|reading| reading.asked > 0);
        let Some(slot) = self.slots.iter().position(|slot| slot.as_ref().is_some_and(asks)) else { return 0 };
        let Some(sequence) = self.slots[slot].as_mut() else { return 0 };
        let Some(reading) = &mut sequence.reading else { return 0 };
        let blocks = std::mem::take(&mut reading.asked);
        let is_whole = count >= blocks + usize::from(reading.snapshot.is_some());
        reading.read += count.min(blocks);
        if is_whole && reading.read < reading.blocks {
            return 0;
        }
        sequence.avoids_disk = !is_whole && self.blocks.snapshots.is_some();
        self.end_reading(slot, is_whole)
    }

    /// Makes a sequence continue after the blocks that were read. A model with states needs all of
    /// them, and the state at their end. Returns the number of their tokens.
    fn end_reading(&mut self, slot: usize, is_whole: bool) -> usize {
        let Some(sequence) = self.slots[slot].as_mut() else { return 0 };
        let Some(Reading { first, read, snapshot, .. }) = sequence.reading.take() else { return 0 };
        if let Some(snapshots) = &mut self.blocks.snapshots {
            match (snapshot, is_whole) {
                (Some(snapshot), true) => {
                    snapshots.pin_again(snapshot);
                    self.blocks.change_pin(&mut sequence.restore, None);
                    sequence.restore = Some(snapshot);
                    sequence.saved = Some((snapshot, (first + read) * KV_BLOCK_TOKENS));
                }
                (snapshot, _) => {
                    snapshot.into_iter().for_each(|snapshot| snapshots.unpin(snapshot));
                    return 0;
                }
            }
        }
        sequence.computed = (first + read) * KV_BLOCK_TOKENS;
        if sequence.tokens.len() == sequence.prompt_tokens {
            sequence.cached_tokens += read * KV_BLOCK_TOKENS;
        }
        read * KV_BLOCK_TOKENS
    }
}
