//! Memory that all ranks of a host share, for reductions: each rank writes its data once, and the others add them up where
//! they lie.
//!
//! Every rank has a ring of its own and posts records there, each of which says in a line of its own that it is complete.
//! All ranks post records of the same lengths in the same order, so a record's index needs no message, and nobody has to say
//! what it has read: a rank posts record `w` only when it has read all up to `w - MAX_AHEAD`, so whoever has seen record `w - MAX_AHEAD`
//! of every rank knows that all have read those up to `w - 2 * MAX_AHEAD`.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::wakeup::{self, Position, Sleeps as _};
use crate::header::{Header, INLINE_BYTES};
use crate::platform::Mapping;

/// How far a rank may post ahead of what it has read.
const MAX_AHEAD: u64 = 3;
/// Records that may be in use at a time, and the wasted end of the ring as one more.
const RECORDS: u64 = 8;
const _: () = assert!(RECORDS > 2 * MAX_AHEAD);
const ALIGN: usize = 64;

/// Says that a record is there. 128 bytes, because processors prefetch lines in pairs.
#[repr(C, align(128))]
struct RecordLine {
    /// The record's number, counted from 1; what follows belongs to it.
    number: AtomicU64,
    header: [u64; 2],
    payload: [u8; INLINE_BYTES],
}

#[repr(C, align(128))]
struct Sleeps(AtomicU32);

/// What stands before a rank's ring.
#[repr(C, align(128))]
struct Control {
    sleeps: Sleeps,
    lines: [RecordLine; RECORDS as usize],
}

/// Bytes of shared memory for `ranks` with rings of `ring_bytes` each.
pub(crate) fn board_bytes(ranks: usize, ring_bytes: usize) -> usize {
    ranks * (size_of::<Control>() + ring_bytes)
}

/// One rank's view of its host's board.
pub(crate) struct Board {
    mapping: Mapping,
    ring_bytes: usize,
    /// The ranks that share it, in order, and this one's index among them.
    pub ranks: Vec<usize>,
    own: usize,
    /// The last record that was posted, and where the next one may begin.
    posted: u64,
    next: usize,
    /// Where the last records begin, counted from the rank's control words, by number.
    offsets: [usize; RECORDS as usize],
}

impl Board {
    /// `mapping` is of `board_bytes(ranks.len(), ring_bytes)`, zeroed when new.
    pub fn new(mapping: Mapping, ranks: Vec<usize>, rank: usize, ring_bytes: usize) -> Self {
        let own = ranks.iter().position(|other| *other == rank).unwrap_or_default();
        Self { mapping, ring_bytes, ranks, own, posted: 0, next: 0, offsets: [0; RECORDS as usize] }
    }

    /// The longest record.
    pub fn record_bytes(&self) -> usize {
        self.ring_bytes / RECORDS as usize
    }

    /// This rank's index among `ranks`.
    pub fn own_index(&self) -> usize {
        self.own
    }

    fn start(&self, index: usize) -> *mut u8 {
        // SAFETY: `index` is below the number of ranks for which the mapping was made.
        unsafe { self.mapping.start().add(index * (size_of::<Control>() + self.ring_bytes)) }
    }

    fn control(&self, index: usize) -> *mut Control {
        self.start(index).cast()
    }

    fn sleeps(&self, index: usize) -> &AtomicU32 {
        // SAFETY: within the mapping, which lives as long as `self`; an atomic may be shared.
        unsafe { &(*self.control(index)).sleeps.0 }
    }

    fn line(&self, index: usize, number: u64) -> *mut RecordLine {
        // SAFETY: the index is below the number of lines.
        unsafe {
            (&raw mut (*self.control(index)).lines).cast::<RecordLine>().add((number % RECORDS) as usize)
        }
    }

    fn number(&self, index: usize, number: u64) -> &AtomicU64 {
        // SAFETY: as in `sleeps`.
        unsafe { &(*self.line(index, number)).number }
    }

    /// Takes the index of the next record, `bytes` long, and returns its number. All ranks must take the same. A short
    /// record has its bytes in its line: one line less to move is most of a short message's latency.
    pub fn take(&mut self, bytes: usize) -> u64 {
        debug_assert!(bytes <= self.record_bytes());
        self.posted += 1;
        let slot = (self.posted % RECORDS) as usize;
        if bytes <= INLINE_BYTES {
            self.offsets[slot] =
                offset_of!(Control, lines) + slot * size_of::<RecordLine>() + offset_of!(RecordLine, payload);
            return self.posted;
        }
        let bytes = bytes.next_multiple_of(ALIGN);
        if self.next + bytes > self.ring_bytes {
            self.next = 0;
        }
        self.offsets[slot] = size_of::<Control>() + self.next;
        self.next += bytes;
        self.posted
    }

    /// Where the rank at `index` has the bytes of a record that was taken lately. Only its owner writes there, until it is
    /// posted; then everyone may read it.
    pub fn bytes(&self, index: usize, number: u64) -> *mut u8 {
        // SAFETY: offsets of records lie within a rank's control words and ring.
        unsafe { self.start(index).add(self.offsets[(number % RECORDS) as usize]) }
    }

    /// Posts a record whose bytes have been written.
    pub fn post(&self, number: u64, header: &Header) {
        let line = self.line(self.own, number);
        // SAFETY: nobody reads this line's record any more, and only this rank writes it.
        unsafe { (*line).header = header.words() };
        self.number(self.own, number).release(number);
    }

    /// Whether the rank at `index` has posted the record.
    pub fn is_posted(&self, index: usize, number: u64) -> bool {
        self.number(index, number).acquire() >= number
    }

    /// What a record that is posted is part of.
    pub fn header(&self, index: usize, number: u64) -> [u64; 2] {
        // SAFETY: a posted record stays unchanged until this rank has posted `MAX_AHEAD` more.
        unsafe { (*self.line(index, number)).header }
    }

    /// The header of the record that comes next, if the rank at `index` has posted it.
    pub fn next_header(&self, index: usize) -> Option<[u64; 2]> {
        let number = self.posted + 1;
        self.is_posted(index, number).then(|| self.header(index, number))
    }

    /// After a post: whether the rank at `index` sleeps and must be woken up, by this call's caller alone.
    pub fn must_wake(&self, index: usize) -> bool {
        wakeup::must_wake(self.sleeps(index))
    }

    /// Prepares for sleep until all have posted the record. False when they have.
    pub fn arm(&self, number: u64) -> bool {
        wakeup::announce(self.sleeps(self.own), || {
            (0..self.ranks.len()).any(|index| !self.is_posted(index, number))
        })
    }

    /// Awake again.
    pub fn disarm(&self) {
        self.sleeps(self.own).take();
    }
}
