//! The board as algorithms use it: take a record, fill it, post it, wait for those of all ranks.

use super::Core;
use crate::header::{HEADER_BYTES, Header, OperationKind};
use crate::link::board::Board;
use crate::reduce::reduce;
use crate::{CommError, DType, Op};

/// Without a board, messages are processed in pieces of this length.
const PIECE_BYTES: usize = 64 << 10;

impl Core {
    /// The board, if all ranks of the group share it.
    pub fn group_board(&self) -> Option<&Board> {
        self.board.as_ref().filter(|board| board.ranks.len() == self.size)
    }

    /// Reserves the next record on the board. Returns its number and where to write its bytes. All
    /// ranks of the board must reserve the same lengths.
    pub fn take_record(&mut self, bytes: usize) -> (u64, *mut u8) {
        let Some(board) = &mut self.board else { return (0, std::ptr::null_mut()) };
        let number = board.take(bytes);
        (number, board.bytes(board.own_index(), number))
    }

    /// The bytes of the record that the rank at `index` of the board has posted.
    pub fn record_of(&self, index: usize, number: u64) -> *const u8 {
        self.board.as_ref().map_or(std::ptr::null(), |board| board.bytes(index, number))
    }

    /// True when this rank shares a board with others.
    pub fn has_board(&self) -> bool {
        self.board.is_some()
    }

    /// Ranks on the board, or 1 without one.
    pub fn board_ranks(&self) -> usize {
        self.board.as_ref().map_or(1, |board| board.ranks.len())
    }

    /// The longest record; without a board, a suitable piece of a message.
    pub fn record_bytes(&self) -> usize {
        self.board.as_ref().map_or(PIECE_BYTES, Board::record_bytes)
    }

    /// Reduces into `out`, in this order: the elements at `before`, if any, and the elements of
    /// each rank of the board in a posted record, if any, from a given byte on. This rank's own
    /// elements are taken from `own`.
    ///
    /// # Safety
    /// All must be valid for `count` elements; `own` and `out` may be the same.
    pub unsafe fn reduce_record(
        &mut self,
        record: Option<(u64, usize)>,
        before: Option<*const u8>,
        own: *const u8,
        out: *mut u8,
        count: usize,
        (dtype, op): (DType, Op),
    ) {
        self.sources.clear();
        self.sources.extend(before);
        match (&self.board, record) {
            (Some(board), Some((number, at))) => {
                for index in 0..board.ranks.len() {
                    // SAFETY: the byte lies within the record.
                    let theirs = unsafe { board.bytes(index, number).add(at) };
                    self.sources.push(if index == board.own_index() { own } else { theirs });
                }
            }
            _ => self.sources.push(own),
        }
        // SAFETY: as promised by the caller.
        unsafe { reduce(dtype, op, out, &self.sources, count) };
    }

    /// Posts a record that has been filled, and wakes the ranks that sleep.
    pub fn post_record(&mut self, number: u64, header: &Header) {
        let Some(board) = &self.board else { return };
        board.post(number, header);
        for (index, rank) in board.ranks.iter().enumerate() {
            if index != board.own_index()
                && board.must_wake(index)
                && let Some(link) = &self.links[*rank]
            {
                link.wake();
            }
        }
    }

    /// Waits until all ranks of the board have posted a record, which must belong to the same step.
    pub async fn await_record(&mut self, number: u64, header: &Header) -> Result<(), CommError> {
        while let Some(board) = &self.board
            && !(0..board.ranks.len()).all(|index| board.is_posted(index, number))
        {
            self.awaited = Some((number, *header));
            self.pause_unless(false).await?;
        }
        self.awaited = None;
        self.note_progress();
        let Some(board) = &self.board else { return Ok(()) };
        let words = header.words();
        let differs = (0..board.ranks.len()).find(|index| board.header(*index, number) != words);
        let Some(index) = differs else { return Ok(()) };
        let (rank, theirs) = (board.ranks[index], Header::bytes_of_words(board.header(index, number)));
        Err(self.mismatch(rank, &theirs, header))
    }

    /// True when this rank waits for a record on a board that `peer` shares.
    pub(super) fn on_awaited_board(&self, peer: usize) -> bool {
        self.awaited.is_some() && self.board.as_ref().is_some_and(|board| board.ranks.contains(&peer))
    }

    /// True when this rank waits for a record that `peer` has not posted.
    pub(super) fn awaits_record_of(&self, peer: usize) -> bool {
        let (Some(board), Some((number, _))) = (&self.board, &self.awaited) else { return false };
        let index = board.ranks.iter().position(|rank| *rank == peer);
        index.is_some_and(|index| !board.is_posted(index, *number))
    }

    /// Finds a peer that waits on the board while this rank waits for its link, or the other way
    /// round: the two are in different operations. Returns the peer's header and this rank's.
    pub(super) fn diverged(&mut self) -> Result<Option<(usize, [u8; HEADER_BYTES], Header)>, CommError> {
        if self.awaited.is_none() {
            for index in 0..self.board_ranks() {
                let Some(board) = &self.board else { return Ok(None) };
                let (peer, ahead) = (board.ranks[index], board.next_header(index));
                // A peer that has sent all that this rank expects may have gone on before this rank
                // has read it.
                if let Some(words) = ahead.filter(|_| self.incoming[peer].active)
                    && self.links[peer].as_ref().is_some_and(|link| link.is_empty())
                {
                    let ours = self.incoming[peer].expected;
                    return Ok(Some((peer, Header::bytes_of_words(words), ours)));
                }
            }
            return Ok(None);
        }
        for peer in 0..self.size {
            if self.awaits_record_of(peer) && self.fill_view(peer, HEADER_BYTES)? == HEADER_BYTES {
                let mut theirs = [0; HEADER_BYTES];
                theirs.copy_from_slice(self.view(peer));
                // A send that is to be received later is no contradiction.
                let ours = self.awaited.map(|(_, header)| header).unwrap_or_default();
                if !Header::is_of(&theirs, OperationKind::SendReceive) {
                    return Ok(Some((peer, theirs, ours)));
                }
            }
        }
        Ok(None)
    }
}
