//! The message that rank 0 sends for each step, and the block tables that every rank keeps to read
//! it.
//!
//! A message is a sequence of 32-bit words: `[words in all, command, sequences]`, then for each
//! sequence `[slot, start, blocks kept, new blocks, tokens, flags, next token or MAX]`, the
//! snapshots to restore and to save, the new blocks, the tokens. The slot's word also has the
//! adapter. Flags: 1 for prompt tokens, 2 and 4 if there is a snapshot to restore and to save, 8 if
//! there are words of [`Draws`] before the new blocks, 16 to 256 the number of tokens of the last
//! draft that were right, and from 512 on the number of rows, the last ones, whose logits are
//! wanted. The first [`HEAD_WORDS`] are sent at once, the rest (long prompts) after them. A slot's
//! new table is its old one, cut to the blocks kept and extended by the new blocks.
//!
//! To write to disk or to read from it, a message is `[words in all, command, transfers]` and the
//! words of each [`Transfer`].

use thunder_collectives::{CommError, Group};
use thunder_compute::{Choice, MAX_DRAFT, Step};

use crate::sampler::{DRAW_WORDS, Draws};
use crate::scheduler::{RowResults, StepPart};
use crate::transfer::{TRANSFER_WORDS, Transfer};

/// Words of the shortest message; unused ones are zero.
pub const HEAD_WORDS: usize = 64;
/// Maximum words of an accepted message: a full step's prompt tokens and every block of a long
/// context.
const MAX_WORDS: usize = 1 << 22;
/// The first of a command's bits that say how many of the likeliest tokens are reported.
const LIKELY: u32 = 1 << 8;

/// Stands for an unknown token.
const NO_TOKEN: u32 = u32::MAX;

/// Bits of a slot's number; the bits above them in the same word are the adapter's.
const SLOT_BITS: u32 = 16;

/// Number of flags below the counts.
const FLAGS: u32 = 4;

/// Bits of the number of right tokens of a draft.
const ACCEPTED_BITS: u32 = 5;
const _: () = assert!(MAX_DRAFT < 1 << ACCEPTED_BITS);

/// A command of rank 0 to all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// End the loop, because the engine is shut down.
    Stop,
    /// Do nothing; rank 0 checks that all ranks are alive.
    Ping,
    /// Compute the step, and send rank 0 these results of its rows.
    Compute(RowResults),
    /// Make the layer that predicts further tokens read the step's tokens, each at the position
    /// before its own, and send rank 0 these results of its rows.
    Predict(RowResults),
    /// Compute the last step once more, and find where its numbers stop being finite.
    Locate,
    /// Write these blocks and states to disk if they are not there, and record their use.
    Store,
    /// Read these blocks and states from disk, and tell rank 0 how many could be read.
    Load,
    /// Send rank 0 the counters of the blocks on disk.
    CountDisk,
}

impl Command {
    fn word(self) -> u32 {
        match self {
            Self::Stop => 0,
            Self::Ping => 1,
            Self::Compute(results) => 2 + bits_of(results),
            Self::Predict(results) => 18 + bits_of(results),
            Self::Locate => 34,
            Self::Store => 35,
            Self::Load => 36,
            Self::CountDisk => 37,
        }
    }

    /// True if [`Message::read_transfers`] reads the rest of the message.
    pub fn has_transfers(self) -> bool {
        matches!(self, Self::Store | Self::Load)
    }

    fn from_word(word: u32) -> Option<Self> {
        let (code, likely) = (word & (LIKELY - 1), word / LIKELY);
        // No other command has these bits.
        let results = |bits| Some(RowResults { likely: likely_of(likely)?, ..of_bits(bits) });
        match code {
            2..=17 => results(code - 2).map(Self::Compute),
            18..=33 => results(code - 18).map(Self::Predict),
            _ if likely > 0 => None,
            0 => Some(Self::Stop),
            1 => Some(Self::Ping),
            34 => Some(Self::Locate),
            35 => Some(Self::Store),
            36 => Some(Self::Load),
            37 => Some(Self::CountDisk),
            _ => None,
        }
    }
}

fn bits_of(RowResults { chosen, logits, hidden, likely, by_head }: RowResults) -> u32 {
    let likely = likely.map_or(0, |count| 1 + u32::from(count));
    let [logits, hidden, chosen, by_head] = [logits, hidden, chosen, by_head].map(u32::from);
    logits + 2 * hidden + 4 * chosen + 8 * by_head + likely * LIKELY
}

fn of_bits(bits: u32) -> RowResults {
    let [logits, hidden, chosen, by_head] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
    RowResults { chosen, logits, hidden, likely: None, by_head }
}

/// What [`RowResults::likely`] is, plus 1; 0 for nothing. `None`: it is nothing that a rank sends.
fn likely_of(bits: u32) -> Option<Option<u8>> {
    match bits.checked_sub(1) {
        None => Some(None),
        Some(count) => u8::try_from(count).ok().map(Some),
    }
}

/// The sizes that a rank has allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Sequences.
    pub slots: usize,
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// Copies of sequences' states.
    pub snapshots: usize,
    /// Low-rank adapters.
    pub adapters: usize,
    /// Maximum rows of a step with logits.
    pub wanted_rows: usize,
}

/// The parts of a message other than the step. Copies of states are pairs `(slot, snapshot)`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepExtras {
    /// From snapshots to slots, before the step.
    pub restore: Vec<(usize, usize)>,
    /// From slots to snapshots, after the step.
    pub save: Vec<(usize, usize)>,
    /// For each sequence, the token after that of its last row; 0 if it is unknown.
    pub next: Vec<u32>,
    /// For each row with logits, how its token is chosen.
    pub choices: Vec<Choice>,
    /// For each sequence, the draw after those of its rows.
    pub next_draws: Vec<u32>,
}

impl StepExtras {
    fn clear(&mut self) {
        self.restore.clear();
        self.save.clear();
        self.next.clear();
        self.choices.clear();
        self.next_draws.clear();
    }
}

/// A message that is being written, or that was received.
#[derive(Debug, Default)]
pub struct Message {
    words: Vec<u32>,
}

/// The message is not from rank 0 of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rank 0 sent a step that cannot be read: all ranks must run the same version of thunder")]
pub struct BadMessage;

impl Message {
    /// Starts a message, with no sequences.
    pub fn begin(&mut self, command: Command) {
        self.words.clear();
        self.words.extend([0, command.word(), 0]);
    }

    /// Adds a sequence's part of the step.
    pub fn push(&mut self, part: &StepPart<'_>) {
        let StepPart { slot, start, tokens, kept_blocks, new_blocks, prompt, wanted_rows, .. } = *part;
        let StepPart { restore, save, adapter, next, accepted, draws, .. } = *part;
        let flags = [draws.is_some(), save.is_some(), restore.is_some(), prompt];
        let counts = wanted_rows << ACCEPTED_BITS | accepted;
        let flags = flags.into_iter().fold(counts, |bits, flag| bits << 1 | usize::from(flag));
        let slot = slot | (adapter as usize) << SLOT_BITS;
        let numbers = [slot, start, kept_blocks, new_blocks.len(), tokens.len(), flags];
        self.words.extend(numbers.map(|number| number as u32));
        self.words.push(next.unwrap_or(NO_TOKEN));
        self.words.extend(restore.into_iter().chain(save));
        self.words.extend(draws.into_iter().flat_map(Draws::words));
        self.words.extend_from_slice(new_blocks);
        self.words.extend_from_slice(tokens);
        self.words[2] += 1;
    }

    /// Adds a block or a state to [`Command::Store`] or [`Command::Load`].
    pub fn push_transfer(&mut self, transfer: &Transfer) {
        self.words.extend(transfer.words());
        self.words[2] += 1;
    }

    /// Reads the transfers of [`Command::Store`] or [`Command::Load`].
    ///
    /// # Errors
    /// If the words are not transfers, or name a block or a snapshot outside of `bounds`.
    pub fn read_transfers(&self, bounds: Bounds, transfers: &mut Vec<Transfer>) -> Result<(), BadMessage> {
        transfers.clear();
        let mut rest = self.words.get(2..).ok_or(BadMessage)?;
        for _ in 0..take(&mut rest, 1)?[0] {
            let words = take(&mut rest, TRANSFER_WORDS)?.as_array().ok_or(BadMessage)?;
            transfers.push(Transfer::from_words(words, (bounds.blocks, bounds.snapshots))?);
        }
        Ok(())
    }

    /// Sends the message on rank 0, and receives it on other ranks, which may wait for hours.
    ///
    /// # Errors
    /// If a rank was lost.
    pub fn exchange(&mut self, group: &mut Group) -> Result<(), CommError> {
        if group.size() == 1 {
            return Ok(());
        }
        if group.rank() == 0 {
            self.words[0] = self.words.len() as u32;
        }
        if group.rank() != 0 || self.words.len() < HEAD_WORDS {
            self.words.resize(HEAD_WORDS, 0);
        }
        group.broadcast_idle(0, &mut self.words[..HEAD_WORDS])?;
        let all = (self.words[0] as usize).min(MAX_WORDS);
        if all > HEAD_WORDS {
            self.words.resize(all, 0);
            group.broadcast(0, &mut self.words[HEAD_WORDS..])?;
        }
        Ok(())
    }

    /// Reads the message: updates the block tables (by slot), and describes the step and the other
    /// things to do.
    ///
    /// # Errors
    /// If the words are not a message, or name a slot, a block or a snapshot outside of `bounds`.
    pub fn read(
        &self,
        bounds: Bounds,
        tables: &mut Vec<Vec<u32>>,
        step: &mut Step,
        extras: &mut StepExtras,
    ) -> Result<Command, BadMessage> {
        step.clear();
        extras.clear();
        let mut rest = self.words.get(1..).ok_or(BadMessage)?;
        let command = Command::from_word(take(&mut rest, 1)?[0]).ok_or(BadMessage)?;
        if command.has_transfers() {
            return Ok(command);
        }
        let sequences = take(&mut rest, 1)?[0];
        for _ in 0..sequences {
            let &[slot, start, kept, new, tokens, flags, next] = take(&mut rest, 7)? else {
                return Err(BadMessage);
            };
            let snapshots = take(&mut rest, (flags >> 1 & 3).count_ones() as usize)?;
            let draws = match flags & 8 {
                0 => None,
                _ => Some(Draws::from_words(*take(&mut rest, DRAW_WORDS)?.as_array().ok_or(BadMessage)?)),
            };
            let (new, tokens) = (take(&mut rest, new as usize)?, take(&mut rest, tokens as usize)?);
            let (slot, adapter) = (slot as usize & ((1 << SLOT_BITS) - 1), slot >> SLOT_BITS);
            let is_outside = |numbers: &[u32], bound| numbers.iter().any(|number| *number as usize >= bound);
            if slot >= bounds.slots
                || adapter as usize > bounds.adapters
                || is_outside(new, bounds.blocks)
                || is_outside(snapshots, bounds.snapshots)
            {
                return Err(BadMessage);
            }
            let mut snapshots = snapshots.iter().map(|snapshot| (slot, *snapshot as usize));
            if flags & 2 != 0 {
                extras.restore.extend(snapshots.next());
            }
            extras.save.extend(snapshots);
            extras.next.push(if next == NO_TOKEN { 0 } else { next });
            if slot >= tables.len() {
                tables.resize_with(slot + 1, Vec::new);
            }
            let table = &mut tables[slot];
            table.truncate(kept as usize);
            table.extend_from_slice(new);
            if table.len() > bounds.blocks {
                return Err(BadMessage);
            }
            let end = start as usize + tokens.len();
            if table.len() < end.div_ceil(thunder_compute::step::KV_BLOCK_TOKENS) {
                return Err(BadMessage);
            }
            let counts = flags >> FLAGS;
            let (wanted, accepted) = (counts >> ACCEPTED_BITS, counts & ((1 << ACCEPTED_BITS) - 1));
            if wanted as usize > tokens.len() || step.logit_rows.len() + wanted as usize > bounds.wanted_rows
            {
                return Err(BadMessage);
            }
            step.push(tokens, start as usize, table, slot, false);
            if let Some(sequence) = step.sequences.last_mut() {
                (sequence.prompt, sequence.adapter) = (flags & 1 != 0, adapter);
                sequence.drafted = (wanted as usize).saturating_sub(1);
                sequence.accepted = accepted as usize;
            }
            let choice = |index| draws.map_or(Choice::LARGEST, |draws| draws.at(index));
            extras.choices.extend((0..wanted as usize).map(choice));
            extras.next_draws.push(choice(wanted as usize).draw);
            let end = step.rows() as u32;
            step.logit_rows.extend(end - wanted..end);
        }
        Ok(command)
    }
}

fn take<'a>(rest: &mut &'a [u32], count: usize) -> Result<&'a [u32], BadMessage> {
    let (taken, left) = rest.split_at_checked(count).ok_or(BadMessage)?;
    *rest = left;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use thunder_collectives::{TransportChoice, local};

    use crate::transfer::{BlockName, Part};

    /// Number of words that are commands.
    const COMMANDS: u32 = 38;
    const COMPUTE: Command = Command::Compute(RowResults {
        chosen: false,
        logits: false,
        hidden: false,
        likely: None,
        by_head: false,
    });
    const DRAWS: [u32; DRAW_WORDS] = [1.5f32.to_bits(), 7, 0, 0, 3, 4];
    const BOUNDS: Bounds = Bounds { slots: 3, blocks: 16, snapshots: 2, adapters: 1, wanted_rows: 3 };

    #[test]
    fn slots_and_blocks_that_a_rank_has_no_room_for_are_refused() {
        let part = StepPart {
            slot: 2,
            start: 0,
            tokens: &[7],
            next: None,
            kept_blocks: 0,
            new_blocks: &[15],
            prompt: true,
            wanted_rows: 1,
            accepted: 0,
            restore: None,
            save: Some(1),
            adapter: 1,
            draws: None,
        };
        let too_many = [0; 17];
        let read = |part: &StepPart<'_>| {
            let (mut message, mut tables) = (Message::default(), Vec::new());
            message.begin(COMPUTE);
            message.push(part);
            message.read(BOUNDS, &mut tables, &mut Step::default(), &mut StepExtras::default())
        };
        assert_eq!(read(&part), Ok(COMPUTE));
        assert_eq!(read(&StepPart { slot: 3, ..part }), Err(BadMessage));
        assert_eq!(read(&StepPart { adapter: 2, ..part }), Err(BadMessage));
        assert_eq!(read(&StepPart { new_blocks: &[16], ..part }), Err(BadMessage));
        assert_eq!(read(&StepPart { save: Some(2), ..part }), Err(BadMessage));
        assert_eq!(read(&StepPart { wanted_rows: 2, ..part }), Err(BadMessage));
        let draft = StepPart { tokens: &[7; 4], wanted_rows: 3, ..part };
        assert_eq!(read(&StepPart { wanted_rows: 4, ..draft }), Err(BadMessage));
        assert_eq!(read(&draft), Ok(COMPUTE));
        assert_eq!(read(&StepPart { restore: Some(2), ..part }), Err(BadMessage));
        assert_eq!(read(&StepPart { new_blocks: &too_many, ..part }), Err(BadMessage));
    }

    #[test]
    fn every_rank_reads_what_rank_0_wrote() {
        let (blocks, prompt): (Vec<u32>, Vec<u32>) = ((0..16).collect(), (0..500).collect());
        let first = StepPart {
            slot: 2,
            start: 0,
            tokens: &prompt,
            next: Some(9),
            kept_blocks: 0,
            new_blocks: &blocks,
            prompt: true,
            wanted_rows: 1,
            accepted: 0,
            restore: Some(1),
            save: None,
            adapter: 1,
            draws: Some(Draws::from_words(DRAWS)),
        };
        let later = StepPart {
            tokens: &[7],
            next: None,
            kept_blocks: 16,
            new_blocks: &[],
            prompt: false,
            accepted: MAX_DRAFT,
            restore: None,
            save: Some(0),
            ..first
        };
        let steps = local::run(3, TransportChoice::Shm, |mut group| {
            let (mut message, mut tables, mut steps) = (Message::default(), Vec::new(), Vec::new());
            for round in 0..3 {
                if group.rank() == 0 {
                    message.begin(COMPUTE);
                    message.push(&if round == 0 { first } else { StepPart { start: 499 + round, ..later } });
                }
                message.exchange(&mut group).unwrap();
                let (mut step, mut extras) = (Step::default(), StepExtras::default());
                let read = message.read(BOUNDS, &mut tables, &mut step, &mut extras);
                assert_eq!(read, Ok(COMPUTE));
                let (restore, save) =
                    if round == 0 { (vec![(2, 1)], vec![]) } else { (vec![], vec![(2, 0)]) };
                let next = vec![if round == 0 { 9 } else { 0 }];
                let draws = Draws::from_words(DRAWS);
                let (choices, next_draws) = (vec![draws.at(0)], vec![draws.at(1).draw]);
                assert_eq!(extras, StepExtras { restore, save, next, choices, next_draws });
                steps.push(step);
            }
            steps
        })
        .unwrap();
        assert_eq!(steps[0], steps[1]);
        assert_eq!(steps[0], steps[2]);
        assert!(steps[0].iter().all(|step| step.sequences[0].adapter == 1));
        let accepted = |step: &Step| (step.sequences[0].accepted, step.sequences[0].drafted);
        assert_eq!([0, 2].map(|step| accepted(&steps[0][step])), [(0, 0), (MAX_DRAFT, 0)]);
        assert_eq!((steps[0][0].rows(), steps[0][2].rows()), (500, 1));
        assert_eq!(steps[0][2].blocks, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn transfers_are_read_as_they_were_written() {
        let transfer =
            |place| Transfer { part: Part::Block, place, name: BlockName([7; 32]), depth: place, used: 9 };
        let (mut message, mut transfers) = (Message::default(), Vec::new());
        message.begin(Command::Load);
        (0..7).for_each(|place| message.push_transfer(&transfer(place)));
        let read = message.read(BOUNDS, &mut Vec::new(), &mut Step::default(), &mut StepExtras::default());
        assert_eq!(read, Ok(Command::Load));
        assert_eq!(message.read_transfers(BOUNDS, &mut transfers), Ok(()));
        assert_eq!(transfers, (0..7).map(transfer).collect::<Vec<_>>());
        message.push_transfer(&transfer(16));
        assert_eq!(message.read_transfers(BOUNDS, &mut transfers), Err(BadMessage));
    }

    #[test]
    fn commands_are_read_as_they_were_written() {
        let commands: Vec<Command> = (0..COMMANDS).filter_map(Command::from_word).collect();
        assert_eq!(commands.len(), COMMANDS as usize);
        assert!(commands.iter().zip(0..).all(|(command, word)| command.word() == word));
        assert_eq!(Command::from_word(COMMANDS), None);
        for likely in [Some(0), Some(20), Some(u8::MAX)] {
            let command = Command::Compute(RowResults { chosen: true, likely, ..RowResults::default() });
            assert_eq!(Command::from_word(command.word()), Some(command));
        }
        for word in [LIKELY, 34 + LIKELY, 2 + 257 * LIKELY] {
            assert_eq!(Command::from_word(word), None, "{word}");
        }
    }

    proptest! {
        #[test]
        fn no_words_make_a_rank_panic(words in prop::collection::vec(prop_oneof![0u32..8, any::<u32>()], 0..40)) {
            let message = Message { words };
            let _ = message.read_transfers(BOUNDS, &mut Vec::new());
            let _ = message.read(BOUNDS, &mut Vec::new(), &mut Step::default(), &mut StepExtras::default());
        }
    }
}
