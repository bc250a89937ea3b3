//! Sums over the ranks of one host that are too large for a kernel that waits: those of prompts.
//! Each device stores a piece of its partial sums in memory of the host that all ranks share and
//! all devices have imported. Then the ranks meet, and each device reads the other ranks' pieces
//! and adds them in rank order, while it stores its next piece. The host copies nothing.
//!
//! Why this is correct:
//! - Before ranks meet, each has waited until its device has stored its piece.
//! - Pieces use two slots alternately. A device stores piece `n` after the ranks have met for piece
//!   `n - 1`. They had then waited for their devices, whose commands run in order, so all had read
//!   piece `n - 2`, the last one in this slot.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use thunder_collectives::Group;
use thunder_compute::ComputeError;

use crate::buffer::{BLOCK_COLUMNS, Memory, stride};
use crate::device::Device;
use crate::kernel::{AddPieces, Kernel};
use crate::mailbox::Rows;
use crate::operations::MAX_GROUPS;
use crate::proof::Numbers;
use crate::relay::agree;

type Outcome = Result<(), ComputeError>;

/// Words of the largest piece: 16 MiB cross the bus in a third of a millisecond, somewhat longer
/// than devices and ranks wait for each other.
const MOST_WORDS: usize = 4 << 20;
/// Threads of a workgroup.
const THREADS: usize = 256;
/// Words of the proof's pieces.
const PROVED_WORDS: usize = 16 << 10;

/// Memory for pieces of all ranks.
pub(crate) struct Pieces {
    rank: usize,
    ranks: usize,
    memory: Memory,
    /// Words of a slot of a rank.
    slot_words: usize,
    /// Words of a piece.
    words: usize,
    /// Number of pieces so far.
    count: usize,
}

impl Pieces {
    /// Sums that were correct on the devices of all ranks, which call this together. The inner
    /// error says why there are none, or that another rank has none.
    pub fn agreed(device: &mut Device, group: &mut Group) -> Result<Result<Self, String>, ComputeError> {
        let made = Self::new(device, group)?;
        let mut pieces = match agree(group, made)? {
            Ok(pieces) => pieces,
            Err(reason) => return Ok(Err(reason)),
        };
        let proved = pieces.prove(device, group)?;
        agree(group, proved.map(|()| pieces))
    }

    fn new(device: &mut Device, group: &mut Group) -> Result<Result<Self, String>, ComputeError> {
        let (rank, ranks) = (group.rank(), group.size());
        let mut most = [(device.max_binding_bytes as usize / (2 * ranks * size_of::<f32>())) as u64];
        group.all_reduce(&mut most, thunder_collectives::Op::Min)?;
        // Whole workgroups, and whole pages of all systems.
        let words = MOST_WORDS.min(most[0] as usize / PROVED_WORDS * PROVED_WORDS);
        if words == 0 {
            return Ok(Err("it binds no buffer for pieces of all ranks".to_owned()));
        }
        let bytes = 2 * ranks * words * size_of::<f32>();
        let memory = match group.share_memory(bytes)? {
            Ok(shared) => device.import(&Arc::new(shared), bytes),
            Err(reason) => Err(reason),
        };
        Ok(memory.map(|memory| Self { rank, ranks, memory, slot_words: words, words, count: 0 }))
    }

    /// Sums rows over the ranks, in place or, if `to` is given, added to its rows; the partial sums
    /// stay as they are then. `meet` returns when all ranks have called it. The device has finished
    /// its commands by then.
    pub fn sum(
        &mut self,
        device: &mut Device,
        rows: Rows<'_>,
        to: Option<&Memory>,
        mut meet: impl FnMut(&mut Device) -> Outcome,
    ) -> Outcome {
        let words = rows.rows * rows.stride;
        let mut stored = 0..0;
        loop {
            let next = stored.end..words.min(stored.end + self.words);
            self.dispatch(device, rows, to, [&stored, &next])?;
            if next.is_empty() {
                return Ok(());
            }
            device.submit()?;
            device.wait()?;
            meet(device)?;
            self.count += 1;
            stored = next;
        }
    }

    /// Adds a piece that all ranks have stored, and stores the next one. Either may be empty.
    fn dispatch(
        &self,
        device: &mut Device,
        Rows { x, first, width, stride, .. }: Rows<'_>,
        to: Option<&Memory>,
        pieces: [&Range<usize>; 2],
    ) -> Outcome {
        let [quads, next_quads] = pieces.map(|piece| piece.len() / 4);
        let [at, next_at] = pieces.map(|piece| (first + piece.start) / 4);
        let of_rank = self.slot_words / 4;
        let [slot, next_slot] = [1, 0].map(|before| (self.count + before) % 2 * self.ranks * of_rank);
        let next_place = next_slot + self.rank * of_rank;
        let groups = quads.max(next_quads).div_ceil(THREADS).min(MAX_GROUPS);
        let arguments = [at, quads, slot, next_at, next_quads, next_place, groups, of_rank, width, stride];
        let form = AddPieces { rank: self.rank, ranks: self.ranks, adds: to.is_some() };
        let buffers: Vec<_> = [x, &self.memory].into_iter().chain(to).collect();
        let arguments = arguments.map(|word| word as u32);
        device.dispatch(&Kernel::AddPieces(form), &buffers, &arguments, [groups as u32, 1, 1])
    }

    /// Sums of three pieces with the other ranks, each time other numbers, in place and added to
    /// rows in turn. The inner error says what is wrong.
    fn prove(&mut self, device: &mut Device, group: &mut Group) -> Result<Result<(), String>, ComputeError> {
        const WIDTH: usize = 4010;
        const ROWS: usize = 10;
        let stride = stride(WIDTH);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let mut wrong = Ok(());
        self.words = PROVED_WORDS;
        for round in 0..6 {
            let numbers = |rank: usize| Numbers(51 + 8 * round + rank as u64).take(ROWS * stride);
            let parts: Vec<_> = (0..self.ranks).map(numbers).collect();
            let before = numbers(self.ranks);
            let x = device.filled(&bits(&parts[self.rank]), "a proof of sums")?;
            let to = device.filled(&bits(&before), "a proof of sums")?;
            let in_place = round % 2 == 1;
            // Without the first row.
            let rows = Rows { x: &x, first: stride, rows: ROWS - 1, width: WIDTH, stride };
            self.sum(device, rows, (!in_place).then_some(&to), |_| Ok(group.barrier()?))?;
            let (memory, own) = if in_place { (&x, &parts[self.rank]) } else { (&to, &before) };
            let expected = |at: usize| {
                let sum = match at % stride < WIDTH {
                    true => parts[1..].iter().fold(parts[0][at], |sum, part| sum + part[at]),
                    false => 0.0,
                };
                match (at < stride, in_place) {
                    (true, _) => own[at],
                    (false, true) => sum,
                    (false, false) => own[at] + sum,
                }
            };
            let mut found = Vec::new();
            device.read(memory, 0..ROWS * stride, &mut found)?;
            if let Some(at) = (0..found.len()).find(|at| found[*at] != expected(*at).to_bits()) {
                wrong = Err(format!("word {at} is {}, not {}", f32::from_bits(found[at]), expected(at)));
            }
        }
        self.words = self.slot_words;
        Ok(wrong)
    }
}

const _: () = assert!(PROVED_WORDS.is_multiple_of(BLOCK_COLUMNS) && MOST_WORDS.is_multiple_of(PROVED_WORDS));
