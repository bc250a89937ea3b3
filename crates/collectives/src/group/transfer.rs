//! The checked arguments of the operations that move parts without reducing them, for both the
//! blocking and the non-blocking forms.

use std::ptr::NonNull;

use super::arguments::{RankAndSize, check_length, copy_checked, part_of, send_ptr};
use crate::core::Core;
use crate::element::{bytes_of, make_valid, raw_bytes_of};
use crate::header::OperationKind;
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
    /// The same bytes for every peer.
    Same {
        at: *mut u8,
        bytes: usize,
    },
    /// One part per rank, in rank order; `element` is the size of an element in bytes.
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

    /// The bytes of all parts together.
    fn extent(self) -> (*mut u8, usize) {
        match self {
            Self::Nothing => (NonNull::dangling().as_ptr(), 0),
            Self::One { at, bytes, .. } | Self::Same { at, bytes } => (at, bytes),
            Self::Each { at, counts, element } => (at, counts.iter().sum::<usize>() * element),
        }
    }
}

/// An operation that sends at most one message to each peer and receives at most one from each.
/// Lives no longer than the borrow of its slices.
#[derive(Debug)]
pub(super) struct Transfer<'a> {
    pub kind: OperationKind,
    dtype: DType,
    /// Payload of the operation's arguments.
    pub bytes: usize,
    sends: Parts<'a>,
    receives: Parts<'a>,
}

impl<'a> Transfer<'a> {
    fn new<T: Element>(kind: OperationKind, bytes: usize, sends: Parts<'a>, receives: Parts<'a>) -> Self {
        Self { kind, dtype: T::DTYPE, bytes, sends, receives }
    }

    pub async fn run(&self, core: &mut Core) -> Result<(), CommError> {
        let outgoing = |peer| self.sends.of(peer).map(|(at, bytes)| (at.cast_const(), bytes));
        let incoming = |peer| self.receives.of(peer);
        // SAFETY: the slices are borrowed for as long as this lives.
        unsafe {
            let result = algorithm::exchange(core, self.kind, self.dtype, (0, 0), outgoing, incoming).await;
            // Also after an error: some bytes may have arrived.
            let (at, bytes) = self.receives.extent();
            make_valid(self.dtype, at, bytes);
            result
        }
    }
}

impl RankAndSize {
    pub fn all_gather<'a, T: Element>(
        self,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Transfer<'a>, CommError> {
        self.check_counts("all_gather", counts, "data", data.len())?;
        let (bytes, all) = (size_of_val(data), each(data, counts));
        let own = all.of(self.rank).map_or(Parts::Nothing, |(at, bytes)| Parts::Same { at, bytes });
        Ok(Transfer::new::<T>(OperationKind::AllGather, bytes, own, all))
    }

    pub fn broadcast<'a, T: Element>(
        self,
        root: usize,
        data: &'a mut [T],
    ) -> Result<Transfer<'a>, CommError> {
        self.check_rank("broadcast", root)?;
        let (at, bytes) = raw_bytes_of(data);
        let (sends, receives) = match self.rank == root {
            true => (Parts::Same { at, bytes }, Parts::Nothing),
            false => (Parts::Nothing, Parts::One { peer: root, at, bytes }),
        };
        Ok(Transfer::new::<T>(OperationKind::Broadcast, bytes, sends, receives))
    }

    /// Only the root reads `recv`.
    pub fn gather<'a, T: Element>(
        self,
        root: usize,
        send: &'a [T],
        recv: Option<&'a mut [T]>,
        counts: &'a [usize],
    ) -> Result<Transfer<'a>, CommError> {
        self.check_rank("gather", root)?;
        self.check_part("gather", counts, ("send", send.len()))?;
        let Some(whole) = self.at_root("gather", root, "recv", recv)? else {
            return Ok(gather_part(root, send));
        };
        self.check_counts("gather", counts, "recv", whole.len())?;
        whole[part_of(counts, root)].copy_from_slice(send);
        Ok(Transfer::new::<T>(OperationKind::Gather, size_of_val(whole), Parts::Nothing, each(whole, counts)))
    }

    pub fn gather_in_place<'a, T: Element>(
        self,
        root: usize,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Transfer<'a>, CommError> {
        self.check_rank("gather", root)?;
        self.check_counts("gather", counts, "data", data.len())?;
        if self.rank != root {
            return Ok(gather_part(root, &data[part_of(counts, self.rank)]));
        }
        Ok(Transfer::new::<T>(OperationKind::Gather, size_of_val(data), Parts::Nothing, each(data, counts)))
    }

    /// Only the root reads `send`.
    pub fn scatter<'a, T: Element>(
        self,
        root: usize,
        send: Option<&'a [T]>,
        recv: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Transfer<'a>, CommError> {
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
    ) -> Result<Transfer<'a>, CommError> {
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
    ) -> Result<Transfer<'a>, CommError> {
        self.check_counts("all_to_all", send_counts, "send", send.len())?;
        self.check_counts("all_to_all", recv_counts, "recv", recv.len())?;
        let own = self.rank;
        check_length("all_to_all", "this rank's own part", send_counts[own], recv_counts[own])?;
        recv[part_of(recv_counts, own)].copy_from_slice(&send[part_of(send_counts, own)]);
        let bytes = size_of_val(send).max(size_of_val(recv));
        let sends = Parts::Each { at: send_ptr(send), counts: send_counts, element: size_of::<T>() };
        Ok(Transfer::new::<T>(OperationKind::AllToAll, bytes, sends, each(recv, recv_counts)))
    }

    /// The data are sent from a copy in `buffer`, because what arrives overwrites them.
    pub fn all_to_all_in_place<'a, T: Element>(
        self,
        data: &'a mut [T],
        counts: &'a [usize],
        buffer: &mut Vec<u8>,
    ) -> Result<Transfer<'a>, CommError> {
        self.check_counts("all_to_all", counts, "data", data.len())?;
        let bytes = size_of_val(data);
        buffer.clear();
        buffer.extend_from_slice(bytes_of(data));
        let sends = Parts::Each { at: buffer.as_mut_ptr(), counts, element: size_of::<T>() };
        Ok(Transfer::new::<T>(OperationKind::AllToAll, bytes, sends, each(data, counts)))
    }

    pub fn send<'a, T: Element>(self, peer: usize, data: &'a [T]) -> Result<Transfer<'a>, CommError> {
        self.check_peer("send", peer)?;
        Ok(Transfer::new::<T>(OperationKind::SendReceive, size_of_val(data), to(peer, data), Parts::Nothing))
    }

    pub fn recv<'a, T: Element>(self, peer: usize, data: &'a mut [T]) -> Result<Transfer<'a>, CommError> {
        self.check_peer("recv", peer)?;
        let (at, bytes) = raw_bytes_of(data);
        Ok(Transfer::new::<T>(
            OperationKind::SendReceive,
            bytes,
            Parts::Nothing,
            Parts::One { peer, at, bytes },
        ))
    }

    pub fn barrier(self) -> Transfer<'static> {
        let nothing = Parts::Same { at: NonNull::dangling().as_ptr(), bytes: 0 };
        Transfer::new::<u8>(OperationKind::Barrier, 0, nothing, nothing)
    }

    /// Copies this rank's part of an all_gather to its position.
    pub fn copy_own_part<T: Element>(
        self,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_part("all_gather", counts, ("send", send.len()))?;
        self.check_counts("all_gather", counts, "recv", recv.len())?;
        recv[part_of(counts, self.rank)].copy_from_slice(send);
        Ok(())
    }

    /// Copies the root's input to the buffer that it sends from.
    pub fn copy_root_input<T: Element>(
        self,
        root: usize,
        send: Option<&[T]>,
        recv: &mut [T],
    ) -> Result<(), CommError> {
        match self.at_root("broadcast", root, "send", send)? {
            Some(send) => copy_checked("broadcast", send, recv),
            None => Ok(()),
        }
    }
}

fn gather_part<'a, T: Element>(root: usize, part: &'a [T]) -> Transfer<'a> {
    Transfer::new::<T>(OperationKind::Gather, size_of_val(part), to(root, part), Parts::Nothing)
}

fn scatter_whole<'a, T: Element>(whole: &'a [T], counts: &'a [usize]) -> Transfer<'a> {
    let sends = Parts::Each { at: send_ptr(whole), counts, element: size_of::<T>() };
    Transfer::new::<T>(OperationKind::Scatter, size_of_val(whole), sends, Parts::Nothing)
}

fn scatter_part<'a, T: Element>(root: usize, part: &'a mut [T]) -> Transfer<'a> {
    let (at, bytes) = raw_bytes_of(part);
    Transfer::new::<T>(OperationKind::Scatter, bytes, Parts::Nothing, Parts::One { peer: root, at, bytes })
}

/// One part per rank.
fn each<'a, T: Element>(data: &'a mut [T], counts: &'a [usize]) -> Parts<'a> {
    Parts::Each { at: raw_bytes_of(data).0, counts, element: size_of::<T>() }
}

/// A message to one peer.
fn to<'a, T: Element>(peer: usize, data: &'a [T]) -> Parts<'a> {
    Parts::One { peer, at: send_ptr(data), bytes: size_of_val(data) }
}
