//! The blocking operations of a group, on slices of elements.

use super::Group;
use super::arguments::{RankAndSize, copy_checked};
use super::reduction::{AllReduce, ReduceScatter};
use super::transfer::Transfer;
use crate::header::OperationKind;
use crate::{CommError, Element, Op};

impl Group {
    /// Reduces `data` over all ranks, element by element; all ranks get the result, with the same
    /// bits.
    ///
    /// # Errors
    /// [`CommError`], like every operation.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], op: Op) -> Result<(), CommError> {
        let reduction = self.prepare_all_reduce(data, op);
        let result = self
            .run(reduction.bytes, false, OperationKind::AllReduce, async |core| reduction.run(core).await);
        reduction.finish();
        result
    }

    /// [`Group::all_reduce`] of `send` into `recv`.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if the lengths differ.
    pub fn all_reduce_into<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        op: Op,
    ) -> Result<(), CommError> {
        copy_checked("all_reduce", send, recv)?;
        self.all_reduce(recv, op)
    }

    /// Every rank's `send`, in rank order, to every rank; rank `r` contributes `counts[r]`
    /// elements.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`.
    pub fn all_gather<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.rank_and_size().copy_own_part(send, recv, counts)?;
        self.all_gather_in_place(recv, counts)
    }

    /// [`Group::all_gather`] with this rank's part already at its position in `data`.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`.
    pub fn all_gather_in_place<T: Element>(
        &mut self,
        data: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        let transfer = self.rank_and_size().all_gather(data, counts)?;
        self.transfer(&transfer)
    }

    /// Reduces `send` over all ranks; rank `r` gets part `r` of the result, `counts[r]` elements.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
        op: Op,
    ) -> Result<(), CommError> {
        let reduction = self.rank_and_size().reduce_scatter(send, recv, counts, op)?;
        self.run_reduce_scatter(&reduction)
    }

    /// [`Group::reduce_scatter`] of `data`: this rank's part is replaced by the result, the rest is
    /// unchanged.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`.
    pub fn reduce_scatter_in_place<T: Element>(
        &mut self,
        data: &mut [T],
        counts: &[usize],
        op: Op,
    ) -> Result<(), CommError> {
        let reduction = self.rank_and_size().reduce_scatter_in_place(data, counts, op)?;
        self.run_reduce_scatter(&reduction)
    }

    /// Sends the root's `data` to every rank.
    ///
    /// # Errors
    /// [`CommError`], like every operation.
    pub fn broadcast<T: Element>(&mut self, root: usize, data: &mut [T]) -> Result<(), CommError> {
        let transfer = self.rank_and_size().broadcast(root, data)?;
        self.transfer(&transfer)
    }

    /// [`Group::broadcast`] of the root's `send` into every rank's `recv`, including the root's.
    /// The other ranks pass no `send`.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if the root passes no `send`, or one whose length differs from
    /// `recv`.
    pub fn broadcast_into<T: Element>(
        &mut self,
        root: usize,
        send: Option<&[T]>,
        recv: &mut [T],
    ) -> Result<(), CommError> {
        self.rank_and_size().copy_root_input(root, send, recv)?;
        self.broadcast(root, recv)
    }

    /// [`Group::broadcast`] for receivers that may wait for hours: there is no stall limit, only
    /// the ranks' liveness is watched. Receivers spin for `idle_spin`, then sleep, and wake at once
    /// when data arrive.
    ///
    /// # Errors
    /// [`CommError`], like every operation.
    pub fn broadcast_idle<T: Element>(&mut self, root: usize, data: &mut [T]) -> Result<(), CommError> {
        let idle = root != self.rank();
        let transfer = self.rank_and_size().broadcast(root, data)?;
        self.transfer_with(&transfer, idle)
    }

    /// Every rank's `send`, in rank order, to the root, which passes `recv`; rank `r` contributes
    /// `counts[r]` elements.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`, or the root passes no
    /// `recv`.
    pub fn gather<T: Element>(
        &mut self,
        root: usize,
        send: &[T],
        recv: Option<&mut [T]>,
        counts: &[usize],
    ) -> Result<(), CommError> {
        let transfer = self.rank_and_size().gather(root, send, recv, counts)?;
        self.transfer(&transfer)
    }

    /// [`Group::gather`] with each rank's part at its position in `data`. The root's `data` is
    /// filled, that of the other ranks is unchanged.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`.
    pub fn gather_in_place<T: Element>(
        &mut self,
        root: usize,
        data: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        let transfer = self.rank_and_size().gather_in_place(root, data, counts)?;
        self.transfer(&transfer)
    }

    /// Sends the root's `send` in parts: rank `r` gets `counts[r]` elements.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`, or the root passes no
    /// `send`.
    pub fn scatter<T: Element>(
        &mut self,
        root: usize,
        send: Option<&[T]>,
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        let transfer = self.rank_and_size().scatter(root, send, recv, counts)?;
        self.transfer(&transfer)
    }

    /// [`Group::scatter`] of the root's `data`. Every other rank gets its part at its position in
    /// its own `data`; the rest is unchanged.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`.
    pub fn scatter_in_place<T: Element>(
        &mut self,
        root: usize,
        data: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        let transfer = self.rank_and_size().scatter_in_place(root, data, counts)?;
        self.transfer(&transfer)
    }

    /// Sends part `r` of `send` to rank `r`, and receives a part from every rank, in rank order, in
    /// `recv`.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match its counts.
    pub fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        let transfer = self.rank_and_size().all_to_all(send, send_counts, recv, recv_counts)?;
        self.transfer(&transfer)
    }

    /// [`Group::all_to_all`] in which the part from rank `r` replaces the part to rank `r`; both
    /// have `counts[r]` elements. Copies `data`.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if a length does not match `counts`.
    pub fn all_to_all_in_place<T: Element>(
        &mut self,
        data: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        let transfer = self.rank_and_size().all_to_all_in_place(data, counts, &mut self.core.wire_buffer)?;
        self.transfer(&transfer)
    }

    /// Sends to one rank, which must call [`Group::recv`] with the same number of elements of the
    /// same type.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if `to` is this rank.
    pub fn send<T: Element>(&mut self, to: usize, data: &[T]) -> Result<(), CommError> {
        let transfer = self.rank_and_size().send(to, data)?;
        self.transfer(&transfer)
    }

    /// [`Group::send`] to a rank that may be busy for long: there is no stall limit, only the
    /// ranks' liveness is watched.
    ///
    /// # Errors
    /// Those of [`Group::send`].
    pub fn send_idle<T: Element>(&mut self, to: usize, data: &[T]) -> Result<(), CommError> {
        let transfer = self.rank_and_size().send(to, data)?;
        self.transfer_with(&transfer, true)
    }

    /// Receives from one rank.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if `from` is this rank.
    pub fn recv<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), CommError> {
        let transfer = self.rank_and_size().recv(from, data)?;
        self.transfer(&transfer)
    }

    /// [`Group::recv`] that may wait for hours: there is no stall limit, only the ranks' liveness
    /// is watched. It spins for `idle_spin`, then sleeps, and wakes at once when data arrive.
    ///
    /// # Errors
    /// [`CommError::Argument`] also if `from` is this rank.
    pub fn recv_idle<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), CommError> {
        let transfer = self.rank_and_size().recv(from, data)?;
        self.transfer_with(&transfer, true)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// [`CommError`], like every operation.
    pub fn barrier(&mut self) -> Result<(), CommError> {
        self.transfer(&self.rank_and_size().barrier())
    }

    fn run_reduce_scatter(&mut self, reduction: &ReduceScatter<'_>) -> Result<(), CommError> {
        self.run(reduction.bytes, false, OperationKind::ReduceScatter, async |core| reduction.run(core).await)
    }

    fn transfer(&mut self, transfer: &Transfer<'_>) -> Result<(), CommError> {
        self.transfer_with(transfer, false)
    }

    fn transfer_with(&mut self, transfer: &Transfer<'_>, idle: bool) -> Result<(), CommError> {
        self.run(transfer.bytes, idle, transfer.kind, async |core| transfer.run(core).await)
    }

    pub(super) fn prepare_all_reduce<'a, T: Element>(&self, data: &'a mut [T], op: Op) -> AllReduce<'a> {
        let algorithm = self.algorithm(size_of_val(data), T::DTYPE, op);
        AllReduce::new(data, op, algorithm)
    }

    pub(super) fn rank_and_size(&self) -> RankAndSize {
        RankAndSize { rank: self.rank(), size: self.size() }
    }
}
