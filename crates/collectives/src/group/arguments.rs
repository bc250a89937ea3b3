//! Checks of operations' arguments: which part of a slice belongs to which rank, and whether the
//! lengths match.

use std::ops::Range;

use crate::{CommError, Element};

/// Where a rank's part lies among all parts.
pub(super) fn part_of(counts: &[usize], rank: usize) -> Range<usize> {
    let start: usize = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// This rank and the size of its group. They decide what an operation sends and receives.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankAndSize {
    pub rank: usize,
    pub size: usize,
}

impl RankAndSize {
    /// The buffer that only the root passes, and must pass.
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

    /// Checks that there is one count per rank, and that the counts add up to the length of the
    /// named buffer.
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

    /// Checks that there is one count per rank, and that this rank's count is the part's length.
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

/// The start of a slice that is sent. The pointer is only read from.
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
