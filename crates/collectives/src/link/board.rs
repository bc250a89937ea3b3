//! The board: memory that all ranks of a host share, for reductions. Each rank writes its data
//! once, and the others add them in place.
//!
//! Every rank has a ring of its own and posts records in it. A record has a line, a pair of cache
//! lines that says that the record is complete. All ranks post records of the same lengths in the
//! same order, so no message is needed to say where a record is. Nor does a rank announce what it
//! has read: it posts record `w` only after it has read all records up to `w - MAX_AHEAD`. So a
//! rank that has seen record `w - MAX_AHEAD` of every rank knows that all ranks have read the
//! records up to `w - 2 * MAX_AHEAD`.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::wakeup::{self, Position, Sleeps as _};
use crate::header::{Header, INLINE_BYTES};
use crate::platform::Mapping;

/// How many records a rank may post beyond those that it has read.
const MAX_AHEAD: u64 = 3;
/// Records that may be in use at a time, counting the unused end of the ring as one.
const RECORDS: u64 = 8;
const _: () = assert!(RECORDS > 2 * MAX_AHEAD);
const ALIGN: usize = 64;

/// Announces a record. 128 bytes, because processors prefetch cache lines in pairs.
#[repr(C, align(128))]
struct RecordLine {
    /// The record's number, from 1. The fields below belong to that record.
    number: AtomicU64,
    header: [u64; 2],
    payload: [u8; INLINE_BYTES],
}

#[repr(C, align(128))]
struct Sleeps(AtomicU32);

/// The control words before a rank's ring.
#[repr(C, align(128))]
struct Control {
    sleeps: Sleeps,
    lines: [RecordLine; RECORDS as usize],
}

/// Bytes of shared memory for `ranks` rings of `ring_bytes` each.
pub(crate) fn board_bytes(ranks: usize, ring_bytes: usize) -> usize {
    ranks * (size_of::<Control>() + ring_bytes)
}

/// One rank's view of its host's board.
pub(crate) struct Board {
    mapping: Mapping,
    ring_bytes: usize,
    /// The ranks on the board, in order, and this rank's index among them.
    pub ranks: Vec<usize>,
    own: usize,
    /// Number of the last posted record, and where in the ring the next one may begin.
    posted: u64,
    next: usize,
    /// Offsets of the last records from the start of the rank's control words, by record number.
    offsets: [usize; RECORDS as usize],
}

impl Board {
    /// `mapping` has `board_bytes(ranks.len(), ring_bytes)` bytes, initially zero.
    pub fn new(mapping: Mapping, ranks: Vec<usize>, rank: usize, ring_bytes: usize) -> Self {
        let own = ranks.iter().position(|other| *other == rank).unwrap_or_default();
        Self { mapping, ring_bytes, ranks, own, posted: 0, next: 0, offsets: [0; RECORDS as usize] }
    }

    /// The longest record, in bytes.
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
        // SAFETY: within the mapping, which lives as long as `self`; atomics may be shared.
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

    /// Reserves the next record of `bytes` bytes and returns its number. All ranks must reserve the
    /// same lengths. A short record has its bytes in its line: one cache line less to move is most
    /// of a short message's latency.
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

    /// The bytes of a recently reserved record of the rank at `index`. Only its owner writes there
    /// until the record is posted; then every rank may read it.
    pub fn bytes(&self, index: usize, number: u64) -> *mut u8 {
        // SAFETY: records lie within a rank's control words and ring.
        unsafe { self.start(index).add(self.offsets[(number % RECORDS) as usize]) }
    }

    /// Posts a record whose bytes have been written.
    pub fn post(&self, number: u64, header: &Header) {
        let line = self.line(self.own, number);
        // SAFETY: no rank still reads this line's previous record, and only this rank writes it.
        unsafe { (*line).header = header.words() };
        self.number(self.own, number).release(number);
    }

    /// True when the rank at `index` has posted the record.
    pub fn is_posted(&self, index: usize, number: u64) -> bool {
        self.number(index, number).acquire() >= number
    }

    /// The header of a posted record.
    pub fn header(&self, index: usize, number: u64) -> [u64; 2] {
        // SAFETY: a posted record stays unchanged until this rank has posted `MAX_AHEAD` more.
        unsafe { (*self.line(index, number)).header }
    }

    /// The header of the next record, if the rank at `index` has already posted it.
    pub fn next_header(&self, index: usize) -> Option<[u64; 2]> {
        let number = self.posted + 1;
        self.is_posted(index, number).then(|| self.header(index, number))
    }

    /// After a post: true when the rank at `index` sleeps; this caller alone must then wake it.
    pub fn must_wake(&self, index: usize) -> bool {
        wakeup::must_wake(self.sleeps(index))
    }

    /// Prepares for sleep until all ranks have posted the record. False if they already have.
    pub fn arm(&self, number: u64) -> bool {
        wakeup::announce(self.sleeps(self.own), || {
            (0..self.ranks.len()).any(|index| !self.is_posted(index, number))
        })
    }

    /// Ends sleep.
    pub fn disarm(&self) {
        self.sleeps(self.own).take();
    }
}
