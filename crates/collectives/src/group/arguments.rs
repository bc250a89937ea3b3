//! The arguments of operations: which part of a slice is whose, and whether the lengths fit.

use std::ops::Range;

use crate::{CommError, Element};

/// Where a rank's part lies among all.
pub(super) fn part_of(counts: &[usize], rank: usize) -> Range<usize> {
    let start: usize = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// A rank's place in its group, which decides what an operation has it send and fill.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankAndSize {
    pub rank: usize,
    pub size: usize,
}

impl RankAndSize {
    /// The buffer that only the root needs, and must have.
    pub fn at_root<B>(
        self,
        operation: &'static str,
        root: usize,
        name: &str,
        buffer: Option<B>,
    ) -> Result<Option<B>, CommError> {
        if self.rank != root {
            return Ok(None);
        }
        match buffer {
            None => Err(argument(operation, format!("the root needs a {name} buffer"))),
            given => Ok(given),
        }
    }

    pub fn check_rank(self, operation: &'static str, rank: usize) -> Result<(), CommError> {
        if rank < self.size {
            return Ok(());
        }
        Err(argument(operation, format!("rank {rank} is not in a group of {}", self.size)))
    }

    pub fn check_peer(self, operation: &'static str, rank: usize) -> Result<(), CommError> {
        self.check_rank(operation, rank)?;
        if rank != self.rank {
            return Ok(());
        }
        Err(argument(operation, format!("rank {rank} is this rank itself")))
    }

    /// As many counts as ranks, which add up to the length of the buffer of this name.
    pub fn check_counts(
        self,
        operation: &'static str,
        counts: &[usize],
        name: &str,
        length: usize,
    ) -> Result<(), CommError> {
        check_length(operation, "counts", self.size, counts.len())?;
        check_length(operation, name, counts.iter().sum(), length)
    }

    /// As many counts as ranks, and a part as long as this rank's count.
    pub fn check_part(
        self,
        operation: &'static str,
        counts: &[usize],
        (name, length): (&str, usize),
    ) -> Result<(), CommError> {
        check_length(operation, "counts", self.size, counts.len())?;
        check_length(operation, name, counts[self.rank], length)
    }
}

/// Where a slice begins that is sent; it is only read.
pub(super) fn send_ptr<T: Element>(data: &[T]) -> *mut u8 {
    data.as_ptr().cast_mut().cast()
}

pub(super) fn copy_checked<T: Element>(
    operation: &'static str,
    send: &[T],
    recv: &mut [T],
) -> Result<(), CommError> {
    check_length(operation, "recv", send.len(), recv.len())?;
    recv.copy_from_slice(send);
    Ok(())
}

fn argument(operation: &'static str, why: String) -> CommError {
    CommError::Argument { operation, why }
}

pub(super) fn check_length(
    operation: &'static str,
    what: &str,
    expected: usize,
    found: usize,
) -> Result<(), CommError> {
    if expected == found {
        return Ok(());
    }
    Err(argument(operation, format!("{what} has {found} elements, {expected} are needed")))
}
