//! What the operations that move parts without reducing them send and fill, checked: the same for the blocking and the
//! non-blocking forms.

use std::ops::Range;
use std::ptr::NonNull;

use super::reduction::make_valid;
use crate::core::Core;
use crate::element::{bytes_of, raw_bytes_of};
use crate::header::Kind;
use crate::{CommError, DType, Element, algorithm};

/// The bytes that go to each peer, or come from it.
#[derive(Debug, Clone, Copy)]
enum Parts<'a> {
    Nothing,
    One {
        peer: usize,
        at: *mut u8,
        bytes: usize,
    },
    /// The same for everyone.
    Same {
        at: *mut u8,
        bytes: usize,
    },
    /// Part `r` is rank `r`'s, one behind the other, in elements of so many bytes.
    Each {
        at: *mut u8,
        counts: &'a [usize],
        element: usize,
    },
}

impl Parts<'_> {
    fn of(self, rank: usize) -> Option<(*mut u8, usize)> {
        match self {
            Self::Nothing => None,
            Self::One { peer, at, bytes } => (peer == rank).then_some((at, bytes)),
            Self::Same { at, bytes } => Some((at, bytes)),
            Self::Each { at, counts, element } => {
                let part = part_of(counts, rank);
                Some((at.wrapping_add(part.start * element), part.len() * element))
            }
        }
    }

    /// All of them together.
    fn extent(self) -> (*mut u8, usize) {
        match self {
            Self::Nothing => (NonNull::dangling().as_ptr(), 0),
            Self::One { at, bytes, .. } | Self::Same { at, bytes } => (at, bytes),
            Self::Each { at, counts, element } => (at, counts.iter().sum::<usize>() * element),
        }
    }
}

/// An operation that sends a message to some peers and takes one from some. Lives no longer than the slices that it was made
/// of are borrowed.
#[derive(Debug)]
pub(super) struct Exchange<'a> {
    pub kind: Kind,
    dtype: DType,
    /// Payload of the operation's arguments.
    pub bytes: usize,
    sends: Parts<'a>,
    fills: Parts<'a>,
}

impl<'a> Exchange<'a> {
    fn new<T: Element>(kind: Kind, bytes: usize, sends: Parts<'a>, fills: Parts<'a>) -> Self {
        Self { kind, dtype: T::DTYPE, bytes, sends, fills }
    }

    pub async fn run(&self, core: &mut Core) -> Result<(), CommError> {
        let outgoing = |peer| self.sends.of(peer).map(|(at, bytes)| (at.cast_const(), bytes));
        let incoming = |peer| self.fills.of(peer);
        // SAFETY: the slices are borrowed for as long as this lives.
        unsafe {
            let result = algorithm::exchange(core, self.kind, self.dtype, (0, 0), outgoing, incoming).await;
            // Also where it failed: some may have come.
            let (at, bytes) = self.fills.extent();
            make_valid(self.dtype, at, bytes);
            result
        }
    }
}

/// Where a rank's part lies among all.
pub(super) fn part_of(counts: &[usize], rank: usize) -> Range<usize> {
    let start: usize = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// A rank's place in its group, which decides what an operation has it send and fill.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seat {
    pub rank: usize,
    pub size: usize,
}

impl Seat {
    pub fn all_gather<'a, T: Element>(
        self,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Exchange<'a>, CommError> {
        self.check_counts("all_gather", counts, "data", data.len())?;
        let (bytes, all) = (size_of_val(data), each(data, counts));
        let own = all.of(self.rank).map_or(Parts::Nothing, |(at, bytes)| Parts::Same { at, bytes });
        Ok(Exchange::new::<T>(Kind::AllGather, bytes, own, all))
    }

    pub fn broadcast<'a, T: Element>(
        self,
        root: usize,
        data: &'a mut [T],
    ) -> Result<Exchange<'a>, CommError> {
        self.check_rank("broadcast", root)?;
        let (at, bytes) = raw_bytes_of(data);
        let (sends, fills) = match self.rank == root {
            true => (Parts::Same { at, bytes }, Parts::Nothing),
            false => (Parts::Nothing, Parts::One { peer: root, at, bytes }),
        };
        Ok(Exchange::new::<T>(Kind::Broadcast, bytes, sends, fills))
    }

    /// `recv` is looked at on the root only.
    pub fn gather<'a, T: Element>(
        self,
        root: usize,
        send: &'a [T],
        recv: Option<&'a mut [T]>,
        counts: &'a [usize],
    ) -> Result<Exchange<'a>, CommError> {
        self.check_rank("gather", root)?;
        self.check_part("gather", counts, ("send", send.len()))?;
        let Some(whole) = self.at_root("gather", root, "recv", recv)? else {
            return Ok(gather_part(root, send));
        };
        self.check_counts("gather", counts, "recv", whole.len())?;
        whole[part_of(counts, root)].copy_from_slice(send);
        Ok(Exchange::new::<T>(Kind::Gather, size_of_val(whole), Parts::Nothing, each(whole, counts)))
    }

    pub fn gather_in_place<'a, T: Element>(
        self,
        root: usize,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Exchange<'a>, CommError> {
        self.check_rank("gather", root)?;
        self.check_counts("gather", counts, "data", data.len())?;
        if self.rank != root {
            return Ok(gather_part(root, &data[part_of(counts, self.rank)]));
        }
        Ok(Exchange::new::<T>(Kind::Gather, size_of_val(data), Parts::Nothing, each(data, counts)))
    }

    /// `send` is looked at on the root only.
    pub fn scatter<'a, T: Element>(
        self,
        root: usize,
        send: Option<&'a [T]>,
        recv: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Exchange<'a>, CommError> {
        self.check_rank("scatter", root)?;
        self.check_part("scatter", counts, ("recv", recv.len()))?;
        let Some(whole) = self.at_root("scatter", root, "send", send)? else {
            return Ok(scatter_part(root, recv));
        };
        self.check_counts("scatter", counts, "send", whole.len())?;
        recv.copy_from_slice(&whole[part_of(counts, root)]);
        Ok(scatter_whole(whole, counts))
    }

    pub fn scatter_in_place<'a, T: Element>(
        self,
        root: usize,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Exchange<'a>, CommError> {
        self.check_rank("scatter", root)?;
        self.check_counts("scatter", counts, "data", data.len())?;
        if self.rank == root {
            return Ok(scatter_whole(data, counts));
        }
        Ok(scatter_part(root, &mut data[part_of(counts, self.rank)]))
    }

    pub fn all_to_all<'a, T: Element>(
        self,
        send: &'a [T],
        send_counts: &'a [usize],
        recv: &'a mut [T],
        recv_counts: &'a [usize],
    ) -> Result<Exchange<'a>, CommError> {
        self.check_counts("all_to_all", send_counts, "send", send.len())?;
        self.check_counts("all_to_all", recv_counts, "recv", recv.len())?;
        let own = self.rank;
        same("all_to_all", "this rank's own part", send_counts[own], recv_counts[own])?;
        recv[part_of(recv_counts, own)].copy_from_slice(&send[part_of(send_counts, own)]);
        let bytes = size_of_val(send).max(size_of_val(recv));
        let sends = Parts::Each { at: start(send), counts: send_counts, element: size_of::<T>() };
        Ok(Exchange::new::<T>(Kind::AllToAll, bytes, sends, each(recv, recv_counts)))
    }

    /// `room` takes a copy of what is sent, as what comes takes its place.
    pub fn all_to_all_in_place<'a, T: Element>(
        self,
        data: &'a mut [T],
        counts: &'a [usize],
        room: &mut Vec<u8>,
    ) -> Result<Exchange<'a>, CommError> {
        self.check_counts("all_to_all", counts, "data", data.len())?;
        let bytes = size_of_val(data);
        room.clear();
        room.extend_from_slice(bytes_of(data));
        let sends = Parts::Each { at: room.as_mut_ptr(), counts, element: size_of::<T>() };
        Ok(Exchange::new::<T>(Kind::AllToAll, bytes, sends, each(data, counts)))
    }

    pub fn send<'a, T: Element>(self, peer: usize, data: &'a [T]) -> Result<Exchange<'a>, CommError> {
        self.check_peer("send", peer)?;
        Ok(Exchange::new::<T>(Kind::SendReceive, size_of_val(data), to(peer, data), Parts::Nothing))
    }

    pub fn recv<'a, T: Element>(self, peer: usize, data: &'a mut [T]) -> Result<Exchange<'a>, CommError> {
        self.check_peer("recv", peer)?;
        let (at, bytes) = raw_bytes_of(data);
        Ok(Exchange::new::<T>(Kind::SendReceive, bytes, Parts::Nothing, Parts::One { peer, at, bytes }))
    }

    pub fn barrier(self) -> Exchange<'static> {
        let nothing = Parts::Same { at: NonNull::dangling().as_ptr(), bytes: 0 };
        Exchange::new::<u8>(Kind::Barrier, 0, nothing, nothing)
    }

    /// Puts this rank's part of an all_gather into its place.
    pub fn put_own<T: Element>(self, send: &[T], recv: &mut [T], counts: &[usize]) -> Result<(), CommError> {
        self.check_part("all_gather", counts, ("send", send.len()))?;
        self.check_counts("all_gather", counts, "recv", recv.len())?;
        recv[part_of(counts, self.rank)].copy_from_slice(send);
        Ok(())
    }

    /// Puts what the root broadcasts where it sends it from.
    pub fn put_broadcast<T: Element>(
        self,
        root: usize,
        send: Option<&[T]>,
        recv: &mut [T],
    ) -> Result<(), CommError> {
        match self.at_root("broadcast", root, "send", send)? {
            Some(send) => copy("broadcast", send, recv),
            None => Ok(()),
        }
    }

    /// The buffer that only the root needs, and must have.
    fn at_root<B>(
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

    fn check_rank(self, operation: &'static str, rank: usize) -> Result<(), CommError> {
        if rank < self.size {
            return Ok(());
        }
        Err(argument(operation, format!("rank {rank} is not in a group of {}", self.size)))
    }

    fn check_peer(self, operation: &'static str, rank: usize) -> Result<(), CommError> {
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
        same(operation, "counts", self.size, counts.len())?;
        same(operation, name, counts.iter().sum(), length)
    }

    /// As many counts as ranks, and a part as long as this rank's count.
    pub fn check_part(
        self,
        operation: &'static str,
        counts: &[usize],
        (name, length): (&str, usize),
    ) -> Result<(), CommError> {
        same(operation, "counts", self.size, counts.len())?;
        same(operation, name, counts[self.rank], length)
    }
}

fn gather_part<'a, T: Element>(root: usize, part: &'a [T]) -> Exchange<'a> {
    Exchange::new::<T>(Kind::Gather, size_of_val(part), to(root, part), Parts::Nothing)
}

fn scatter_whole<'a, T: Element>(whole: &'a [T], counts: &'a [usize]) -> Exchange<'a> {
    let sends = Parts::Each { at: start(whole), counts, element: size_of::<T>() };
    Exchange::new::<T>(Kind::Scatter, size_of_val(whole), sends, Parts::Nothing)
}

fn scatter_part<'a, T: Element>(root: usize, part: &'a mut [T]) -> Exchange<'a> {
    let (at, bytes) = raw_bytes_of(part);
    Exchange::new::<T>(Kind::Scatter, bytes, Parts::Nothing, Parts::One { peer: root, at, bytes })
}

/// A part for each rank.
fn each<'a, T: Element>(data: &'a mut [T], counts: &'a [usize]) -> Parts<'a> {
    Parts::Each { at: raw_bytes_of(data).0, counts, element: size_of::<T>() }
}

/// A message to one peer.
fn to<'a, T: Element>(peer: usize, data: &'a [T]) -> Parts<'a> {
    Parts::One { peer, at: start(data), bytes: size_of_val(data) }
}

/// Where a slice begins that is sent; it is only read.
pub(super) fn start<T: Element>(data: &[T]) -> *mut u8 {
    data.as_ptr().cast_mut().cast()
}

fn argument(operation: &'static str, why: String) -> CommError {
    CommError::Argument { operation, why }
}

pub(super) fn copy<T: Element>(operation: &'static str, send: &[T], recv: &mut [T]) -> Result<(), CommError> {
    same(operation, "recv", send.len(), recv.len())?;
    recv.copy_from_slice(send);
    Ok(())
}

fn same(operation: &'static str, what: &str, expected: usize, found: usize) -> Result<(), CommError> {
    if expected == found {
        return Ok(());
    }
    Err(argument(operation, format!("{what} has {found} elements, {expected} are needed")))
}
