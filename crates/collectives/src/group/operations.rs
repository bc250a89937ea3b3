//! The operations of a group, on slices of elements.

use super::Group;
use crate::algorithm;
use crate::element::{bytes_of, raw_bytes_of};
use crate::header::Kind;
use crate::{CommError, DType, Element, Op};

impl Group {
    /// Reduces `data` over all ranks, element by element; all ranks get the result, with the same bits.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], op: Op) -> Result<(), CommError> {
        let count = data.len();
        let (pointer, bytes) = raw_bytes_of(data);
        let algorithm = self.algorithm_of(bytes, T::DTYPE);
        self.run(bytes, false, Kind::AllReduce, async |core| {
            // SAFETY: `data` is borrowed until the operation has ended.
            unsafe { algorithm::all_reduce(core, pointer, count, (T::DTYPE, op), algorithm).await }
        })
    }

    /// [`Group::all_reduce`] of `send` into `recv`.
    ///
    /// # Errors
    /// Also when the lengths differ.
    pub fn all_reduce_into<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        op: Op,
    ) -> Result<(), CommError> {
        same("all_reduce", "recv", send.len(), recv.len())?;
        recv.copy_from_slice(send);
        self.all_reduce(recv, op)
    }

    /// Every rank's `send`, in rank order, to every rank; rank `r` gives `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says.
    pub fn all_gather<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_counts("all_gather", counts)?;
        same("all_gather", "send", counts[self.rank()], send.len())?;
        same("all_gather", "recv", counts.iter().sum(), recv.len())?;
        let at: usize = counts[..self.rank()].iter().sum();
        recv[at..at + send.len()].copy_from_slice(send);
        self.all_gather_in_place(recv, counts)
    }

    /// [`Group::all_gather`] where this rank's part is in its place in `data` already.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says.
    pub fn all_gather_in_place<T: Element>(
        &mut self,
        data: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        check_lengths("all_gather", self.size(), counts, data.len())?;
        let own = self.rank();
        let (pointer, bytes) = raw_bytes_of(data);
        let place = |rank: usize| {
            let at: usize = counts[..rank].iter().sum();
            // SAFETY: within the sum of `counts`.
            (unsafe { pointer.add(at * size_of::<T>()) }, counts[rank] * size_of::<T>())
        };
        let outgoing = |_| Some((place(own).0.cast_const(), place(own).1));
        let incoming = |peer| Some(place(peer));
        self.exchange::<T>(Kind::AllGather, bytes, false, outgoing, incoming)?;
        finish(data);
        Ok(())
    }

    /// Reduces `send` over all ranks; rank `r` gets part `r` of the result, `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
        op: Op,
    ) -> Result<(), CommError> {
        self.check_reduce_scatter(send.len(), recv.len(), counts)?;
        if self.size() == 1 {
            recv.copy_from_slice(send);
        }
        let (from, to) = (bytes_of(send), raw_bytes_of(recv).0);
        self.run(from.len(), false, Kind::ReduceScatter, async |core| {
            // SAFETY: both slices are borrowed until the operation has ended, and their lengths are checked.
            unsafe { algorithm::reduce_scatter(core, from.as_ptr(), to, counts, T::DTYPE, op).await }
        })
    }

    /// The root's `data` to every rank.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn broadcast<T: Element>(&mut self, root: usize, data: &mut [T]) -> Result<(), CommError> {
        self.broadcast_with(root, data, false)
    }

    /// [`Group::broadcast`], whose receivers may wait for hours: no stall limit, only the ranks' liveness. They spin for
    /// a moment (`idle_spin`), then sleep, and wake up at once when data come.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn broadcast_idle<T: Element>(&mut self, root: usize, data: &mut [T]) -> Result<(), CommError> {
        let idle = root != self.rank();
        self.broadcast_with(root, data, idle)
    }

    fn broadcast_with<T: Element>(
        &mut self,
        root: usize,
        data: &mut [T],
        idle: bool,
    ) -> Result<(), CommError> {
        self.check_rank("broadcast", root)?;
        let own = self.rank();
        let (pointer, bytes) = raw_bytes_of(data);
        let outgoing = |_| (own == root).then_some((pointer.cast_const(), bytes));
        let incoming = |peer| (peer == root).then_some((pointer, bytes));
        self.exchange::<T>(Kind::Broadcast, bytes, idle, outgoing, incoming)?;
        finish(data);
        Ok(())
    }

    /// Every rank's `send`, in rank order, to the root, which gives `recv`; rank `r` gives `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says, or the root gives no `recv`.
    pub fn gather<T: Element>(
        &mut self,
        root: usize,
        send: &[T],
        recv: Option<&mut [T]>,
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_rank("gather", root)?;
        self.check_counts("gather", counts)?;
        let own = self.rank();
        same("gather", "send", counts[own], send.len())?;
        let recv = match recv {
            Some(recv) if own == root => recv,
            None if own == root => return Err(argument("gather", "the root needs a recv buffer".to_owned())),
            _ => &mut [],
        };
        if own == root {
            same("gather", "recv", counts.iter().sum(), recv.len())?;
            let at: usize = counts[..own].iter().sum();
            recv[at..at + send.len()].copy_from_slice(send);
        }
        let from = bytes_of(send);
        let (pointer, bytes) = raw_bytes_of(recv);
        let outgoing = |peer| (peer == root).then_some((from.as_ptr(), from.len()));
        let incoming = |peer: usize| {
            let at: usize = counts[..peer].iter().sum();
            // SAFETY: within `recv`, whose length is the sum of `counts`, on the root.
            (own == root)
                .then(|| (unsafe { pointer.add(at * size_of::<T>()) }, counts[peer] * size_of::<T>()))
        };
        self.exchange::<T>(Kind::Gather, from.len().max(bytes), false, outgoing, incoming)?;
        finish(recv);
        Ok(())
    }

    /// The root's `send`, in parts: rank `r` gets `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says, or the root gives no `send`.
    pub fn scatter<T: Element>(
        &mut self,
        root: usize,
        send: Option<&[T]>,
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_rank("scatter", root)?;
        self.check_counts("scatter", counts)?;
        let own = self.rank();
        same("scatter", "recv", counts[own], recv.len())?;
        let send = match send {
            Some(send) if own == root => send,
            None if own == root => {
                return Err(argument("scatter", "the root needs a send buffer".to_owned()));
            }
            _ => &[],
        };
        let place = |rank: usize| -> usize { counts[..rank].iter().sum() };
        if own == root {
            same("scatter", "send", counts.iter().sum(), send.len())?;
            recv.copy_from_slice(&send[place(own)..place(own) + counts[own]]);
        }
        let from = bytes_of(send);
        let (pointer, bytes) = raw_bytes_of(recv);
        let outgoing = |peer: usize| {
            let (at, length) = (place(peer) * size_of::<T>(), counts[peer] * size_of::<T>());
            (own == root).then(|| (from[at..at + length].as_ptr(), length))
        };
        let incoming = |peer| (peer == root).then_some((pointer, bytes));
        self.exchange::<T>(Kind::Scatter, from.len().max(bytes), false, outgoing, incoming)?;
        finish(recv);
        Ok(())
    }

    /// Part `r` of `send` to rank `r`, and every rank's part for this one, in rank order, into `recv`.
    ///
    /// # Errors
    /// Also when a length is not what the counts say.
    pub fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_counts("all_to_all", send_counts)?;
        self.check_counts("all_to_all", recv_counts)?;
        let own = self.rank();
        same("all_to_all", "send", send_counts.iter().sum(), send.len())?;
        same("all_to_all", "recv", recv_counts.iter().sum(), recv.len())?;
        same("all_to_all", "this rank's own part", send_counts[own], recv_counts[own])?;
        let place = |counts: &[usize], rank: usize| -> usize { counts[..rank].iter().sum() };
        let (from_at, to_at) = (place(send_counts, own), place(recv_counts, own));
        recv[to_at..to_at + recv_counts[own]].copy_from_slice(&send[from_at..from_at + send_counts[own]]);
        let from = bytes_of(send);
        let (pointer, bytes) = raw_bytes_of(recv);
        let outgoing = |peer: usize| {
            let at = place(send_counts, peer) * size_of::<T>();
            let length = send_counts[peer] * size_of::<T>();
            Some((from[at..at + length].as_ptr(), length))
        };
        let incoming = |peer: usize| {
            let at = place(recv_counts, peer) * size_of::<T>();
            // SAFETY: within `recv`, whose length is the sum of its counts.
            Some((unsafe { pointer.add(at) }, recv_counts[peer] * size_of::<T>()))
        };
        self.exchange::<T>(Kind::AllToAll, from.len().max(bytes), false, outgoing, incoming)?;
        finish(recv);
        Ok(())
    }

    /// Sends to one rank, which must call [`Group::recv`] with as many elements of the same type.
    ///
    /// # Errors
    /// Also when `to` is this rank.
    pub fn send<T: Element>(&mut self, to: usize, data: &[T]) -> Result<(), CommError> {
        self.send_with(to, data, false)
    }

    /// [`Group::send`] to a rank that may be busy for long: no stall limit, only the ranks' liveness.
    ///
    /// # Errors
    /// As [`Group::send`].
    pub fn send_idle<T: Element>(&mut self, to: usize, data: &[T]) -> Result<(), CommError> {
        self.send_with(to, data, true)
    }

    fn send_with<T: Element>(&mut self, to: usize, data: &[T], idle: bool) -> Result<(), CommError> {
        self.check_peer("send", to)?;
        let from = bytes_of(data);
        let outgoing = |peer| (peer == to).then_some((from.as_ptr(), from.len()));
        self.exchange::<T>(Kind::SendReceive, from.len(), idle, outgoing, |_| None)
    }

    /// Receives from one rank.
    ///
    /// # Errors
    /// Also when `from` is this rank.
    pub fn recv<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), CommError> {
        self.recv_with(from, data, false)
    }

    /// [`Group::recv`], which may wait for hours: no stall limit, only the ranks' liveness. It spins for a moment
    /// (`idle_spin`), then sleeps, and wakes up at once when data come.
    ///
    /// # Errors
    /// Also when `from` is this rank.
    pub fn recv_idle<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), CommError> {
        self.recv_with(from, data, true)
    }

    fn recv_with<T: Element>(&mut self, from: usize, data: &mut [T], idle: bool) -> Result<(), CommError> {
        self.check_peer("recv", from)?;
        let (pointer, bytes) = raw_bytes_of(data);
        let incoming = |peer| (peer == from).then_some((pointer, bytes));
        self.exchange::<T>(Kind::SendReceive, bytes, idle, |_| None, incoming)?;
        finish(data);
        Ok(())
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn barrier(&mut self) -> Result<(), CommError> {
        let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
        self.exchange::<u8>(
            Kind::Barrier,
            0,
            false,
            |_| Some((nothing.cast_const(), 0)),
            |_| Some((nothing, 0)),
        )
    }

    fn exchange<T: Element>(
        &mut self,
        kind: Kind,
        bytes: usize,
        idle: bool,
        outgoing: impl Fn(usize) -> Option<(*const u8, usize)>,
        incoming: impl Fn(usize) -> Option<(*mut u8, usize)>,
    ) -> Result<(), CommError> {
        self.run(bytes, idle, kind, async |core| {
            // SAFETY: the places are in slices that the calling method borrows until the operation has ended.
            unsafe { algorithm::exchange(core, kind, T::DTYPE, (0, 0), outgoing, incoming).await }
        })
    }

    pub(super) fn check_reduce_scatter(
        &self,
        send: usize,
        recv: usize,
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_counts("reduce_scatter", counts)?;
        same("reduce_scatter", "send", counts.iter().sum(), send)?;
        same("reduce_scatter", "recv", counts[self.rank()], recv)
    }

    pub(super) fn check_rank(&self, operation: &'static str, rank: usize) -> Result<(), CommError> {
        if rank < self.size() {
            return Ok(());
        }
        Err(argument(operation, format!("rank {rank} is not in a group of {}", self.size())))
    }

    pub(super) fn check_peer(&self, operation: &'static str, rank: usize) -> Result<(), CommError> {
        self.check_rank(operation, rank)?;
        if rank != self.rank() {
            return Ok(());
        }
        Err(argument(operation, format!("rank {rank} is this rank itself")))
    }

    fn check_counts(&self, operation: &'static str, counts: &[usize]) -> Result<(), CommError> {
        same(operation, "counts", self.size(), counts.len())
    }
}

fn argument(operation: &'static str, why: String) -> CommError {
    CommError::Argument { operation, why }
}

fn same(operation: &'static str, what: &str, expected: usize, found: usize) -> Result<(), CommError> {
    if expected == found {
        return Ok(());
    }
    Err(argument(operation, format!("{what} has {found} elements, {expected} are needed")))
}

/// The end of an operation that has filled `data` from the wire.
fn finish<T: Element>(data: &mut [T]) {
    let (pointer, bytes) = raw_bytes_of(data);
    // SAFETY: the bytes of `data`.
    unsafe { make_valid(T::DTYPE, pointer, bytes) };
}

/// As many counts as ranks, which add up to the length.
pub(super) fn check_lengths(
    operation: &'static str,
    ranks: usize,
    counts: &[usize],
    length: usize,
) -> Result<(), CommError> {
    same(operation, "counts", ranks, counts.len())?;
    same(operation, "data", counts.iter().sum(), length)
}

/// Booleans that came over a wire can be any byte; makes them 0 or 1 before anyone looks at them.
///
/// # Safety
/// `pointer` must be valid for `bytes` bytes.
pub(super) unsafe fn make_valid(dtype: DType, pointer: *mut u8, bytes: usize) {
    if dtype != DType::Bool {
        return;
    }
    for index in 0..bytes {
        // SAFETY: within the bytes that the caller vouches for.
        unsafe {
            let byte = pointer.add(index);
            *byte = u8::from(*byte != 0);
        }
    }
}
