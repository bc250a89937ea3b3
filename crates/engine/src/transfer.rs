//! Transfers between a rank's caches and its disk, as rank 0 orders them on all ranks.

use crate::protocol::BadMessage;

/// Identifies a block of a prompt by its tokens, the tokens before them, and everything else that
/// its bytes depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BlockName(pub [u8; 32]);

/// The content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// A block's part of all caches of tokens.
    Block,
    /// The states at a block's end.
    State,
}

/// A block or a state that is written to disk or read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Whether it is a block or a state.
    pub part: Part,
    /// The number of the block or the snapshot, or [`NOWHERE`].
    pub place: u32,
    /// The block's name.
    pub name: BlockName,
    /// Number of blocks of the prompt before this one.
    pub depth: u32,
    /// Larger for later requests, even after a restart: approximately the request's time in
    /// microseconds since 1970.
    pub used: u64,
}

/// The place of a block that was used and is not written.
pub const NOWHERE: u32 = u32::MAX;

/// Words of a transfer in a message.
pub const TRANSFER_WORDS: usize = 13;

impl Transfer {
    /// The words of a message.
    pub fn words(&self) -> [u32; TRANSFER_WORDS] {
        let mut words = [0; TRANSFER_WORDS];
        let used = [self.used as u32, (self.used >> 32) as u32];
        words[..5].copy_from_slice(&[self.part as u32, self.place, self.depth, used[0], used[1]]);
        let (name, _) = self.name.0.as_chunks();
        words[5..].iter_mut().zip(name).for_each(|(word, bytes)| *word = u32::from_le_bytes(*bytes));
        words
    }

    /// Decodes the words of a message. `bounds` are the numbers of blocks and of snapshots.
    pub fn from_words(words: &[u32; TRANSFER_WORDS], bounds: (usize, usize)) -> Result<Self, BadMessage> {
        let [part, place, depth, low, high, name @ ..] = words;
        let (part, bound) = match part {
            0 => (Part::Block, bounds.0),
            1 => (Part::State, bounds.1),
            _ => return Err(BadMessage),
        };
        if *place as usize >= bound && *place != NOWHERE {
            return Err(BadMessage);
        }
        let mut bytes = [0; 32];
        let (chunks, _) = bytes.as_chunks_mut();
        chunks.iter_mut().zip(name).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
        let used = u64::from(*low) | u64::from(*high) << 32;
        Ok(Self { part, place: *place, name: BlockName(bytes), depth: *depth, used })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_read_as_it_was_written_and_within_bounds() {
        let name = BlockName(std::array::from_fn(|index| index as u8 * 5));
        let transfer = Transfer { part: Part::State, place: 2, name, depth: 70_000, used: 0x12_3456_789a };
        let words = transfer.words();
        assert_eq!(Transfer::from_words(&words, (0, 3)), Ok(transfer));
        assert_eq!(Transfer::from_words(&words, (9, 2)), Err(BadMessage));
        let used = Transfer { place: NOWHERE, ..transfer };
        assert_eq!(Transfer::from_words(&used.words(), (0, 0)), Ok(used));
        let block = Transfer { part: Part::Block, ..transfer };
        assert_eq!(Transfer::from_words(&block.words(), (3, 0)), Ok(block));
        let mut wrong = words;
        wrong[0] = 2;
        assert_eq!(Transfer::from_words(&wrong, (9, 9)), Err(BadMessage));
    }
}
