//! Direct reads from the memory of the host's other ranks, where the system lets one process read
//! another's.

use super::Core;
use crate::header::{Header, OperationKind};
use crate::{CommError, DType};

/// Phases of the agreement, in the records' headers.
const NONCES: u8 = 11;
const VERDICTS: u8 = 12;

impl Core {
    /// True when all ranks can read each other's memory. They must share a board. The first call
    /// finds out, on all ranks together.
    pub async fn can_read_peers(&mut self) -> Result<bool, CommError> {
        if let Some(known) = self.reads_peers {
            return Ok(known);
        }
        // A process id may belong to another process in another namespace. A random value at a
        // known address proves that it is the right one.
        let mut nonce = [0u8; size_of::<u64>()];
        let random = getrandom::fill(&mut nonce).is_ok();
        let mut memory = std::mem::take(&mut self.wire_buffer);
        memory.clear();
        memory.extend(nonce);
        let header = |core: &Self, phase| {
            core.header(OperationKind::AllReduce, DType::U64, 0, phase, size_of::<u64>())
        };
        let nonces = header(self, NONCES);
        let record = self.post_words(&nonces, [memory.as_ptr() as u64, u64::from_ne_bytes(nonce)]);
        self.await_record(record, &nonces).await?;
        let read = |rank: usize| {
            let [address, nonce] = self.words_of(rank, record);
            let mut seen = 0u64;
            // SAFETY: `seen` has the length that is read.
            unsafe {
                self.try_read(rank, address, (&raw mut seen).cast(), size_of_val(&seen)) && seen == nonce
            }
        };
        let all = random && (0..self.size).all(|rank| rank == self.rank || read(rank));
        let verdicts = header(self, VERDICTS);
        let record = self.post_words(&verdicts, [u64::from(all), 0]);
        self.await_record(record, &verdicts).await?;
        self.wire_buffer = memory;
        let known = (0..self.size).all(|rank| self.words_of(rank, record)[0] == 1);
        self.reads_peers = Some(known);
        Ok(known)
    }

    /// Posts a record of two words and returns its number.
    pub fn post_words(&mut self, header: &Header, words: [u64; 2]) -> u64 {
        let (record, to) = self.take_record(size_of_val(&words));
        // SAFETY: the record holds two words.
        unsafe { to.cast::<[u64; 2]>().write_unaligned(words) };
        self.post_record(record, header);
        record
    }

    /// The two words that a rank has posted, on a board of all ranks.
    pub fn words_of(&self, rank: usize, record: u64) -> [u64; 2] {
        // SAFETY: all ranks have posted the record, and none writes there before this rank has
        // posted more records.
        unsafe { self.record_of(rank, record).cast::<[u64; 2]>().read_unaligned() }
    }

    /// Reads from a rank's memory.
    ///
    /// # Safety
    /// `to` must be valid for `length` bytes.
    pub unsafe fn read_peer(
        &mut self,
        rank: usize,
        from: u64,
        to: *mut u8,
        length: usize,
    ) -> Result<(), CommError> {
        // SAFETY: as promised by the caller.
        match unsafe { self.try_read(rank, from, to, length) } {
            true => Ok(()),
            false => Err(self.closed(rank)),
        }
    }

    /// Reads from a rank's memory; false if that is not possible.
    ///
    /// # Safety
    /// `to` must be valid for `length` bytes.
    unsafe fn try_read(&self, rank: usize, from: u64, to: *mut u8, length: usize) -> bool {
        let process = self.links[rank].as_ref().and_then(|link| link.process());
        // SAFETY: as promised by the caller.
        process.is_some_and(|process| unsafe { process.read(from, to, length) }.is_ok())
    }
}
