//! The non-blocking operations: start one, compute, poll now and then, wait at the end.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::arguments::copy_checked;
use super::reduction::ReduceScatter;
use super::transfer::Transfer;
use super::{Group, Stats};
use crate::core::Core;
use crate::header::OperationKind;
use crate::{CommError, Element, Op};

type OperationFuture<'a> = Pin<Box<dyn Future<Output = Result<(), CommError>> + 'a>>;

/// An operation under way. It makes progress only while it is polled or waited for. Dropping it
/// waits for its end.
#[must_use = "an operation moves on only while it is polled or waited for"]
pub struct Pending<'a> {
    operation: Option<OperationFuture<'a>>,
    /// While true, the operation suspends instead of waiting.
    cooperative: Arc<AtomicBool>,
    stats: &'a mut Stats,
    result: Result<(), CommError>,
}

impl std::fmt::Debug for Pending<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("done", &self.operation.is_none()).finish_non_exhaustive()
    }
}

impl Pending<'_> {
    /// Makes what progress is possible without waiting. True when the operation has ended.
    ///
    /// # Errors
    /// Those of the operation.
    pub fn poll(&mut self) -> Result<bool, CommError> {
        self.advance(true);
        self.result.clone().map(|()| self.operation.is_none())
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// Those of the operation.
    pub fn wait(mut self) -> Result<(), CommError> {
        self.advance(false);
        self.result.clone()
    }

    fn advance(&mut self, cooperative: bool) {
        let Some(operation) = &mut self.operation else { return };
        self.cooperative.store(cooperative, Ordering::Relaxed);
        let start = Instant::now();
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(result) = operation.as_mut().poll(&mut context) {
                self.result = result;
                self.operation = None;
                break;
            }
            if cooperative {
                break;
            }
        }
        self.cooperative.store(false, Ordering::Relaxed);
        self.stats.time += start.elapsed();
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        // The peers need the rest of the messages. The group keeps an error.
        self.advance(false);
    }
}

impl Group {
    /// Starts [`Group::all_reduce`].
    ///
    /// # Errors
    /// If the group has failed before.
    pub fn start_all_reduce<'a, T: Element>(
        &'a mut self,
        data: &'a mut [T],
        op: Op,
    ) -> Result<Pending<'a>, CommError> {
        let reduction = self.prepare_all_reduce(data, op);
        self.start(OperationKind::AllReduce, reduction.bytes, async move |core: &mut Core| {
            let result = reduction.run(core).await;
            reduction.finish();
            result
        })
    }

    /// Starts [`Group::all_reduce_into`]. `send` has been read when this returns.
    ///
    /// # Errors
    /// If the group has failed before, or the lengths differ.
    pub fn start_all_reduce_into<'a, T: Element>(
        &'a mut self,
        send: &[T],
        recv: &'a mut [T],
        op: Op,
    ) -> Result<Pending<'a>, CommError> {
        copy_checked("all_reduce", send, recv)?;
        self.start_all_reduce(recv, op)
    }

    /// Starts [`Group::all_gather`]. `send` has been read when this returns.
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match `counts`.
    pub fn start_all_gather<'a, T: Element>(
        &'a mut self,
        send: &[T],
        recv: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        self.rank_and_size().copy_own_part(send, recv, counts)?;
        self.start_all_gather_in_place(recv, counts)
    }

    /// Starts [`Group::all_gather_in_place`].
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match `counts`.
    pub fn start_all_gather_in_place<'a, T: Element>(
        &'a mut self,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().all_gather(data, counts)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::reduce_scatter`].
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match `counts`.
    pub fn start_reduce_scatter<'a, T: Element>(
        &'a mut self,
        send: &'a [T],
        recv: &'a mut [T],
        counts: &'a [usize],
        op: Op,
    ) -> Result<Pending<'a>, CommError> {
        let reduction = self.rank_and_size().reduce_scatter(send, recv, counts, op)?;
        self.start_prepared_reduce_scatter(reduction)
    }

    /// Starts [`Group::reduce_scatter_in_place`].
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match `counts`.
    pub fn start_reduce_scatter_in_place<'a, T: Element>(
        &'a mut self,
        data: &'a mut [T],
        counts: &'a [usize],
        op: Op,
    ) -> Result<Pending<'a>, CommError> {
        let reduction = self.rank_and_size().reduce_scatter_in_place(data, counts, op)?;
        self.start_prepared_reduce_scatter(reduction)
    }

    /// Starts [`Group::broadcast`].
    ///
    /// # Errors
    /// If the group has failed before, or `root` is not in it.
    pub fn start_broadcast<'a, T: Element>(
        &'a mut self,
        root: usize,
        data: &'a mut [T],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().broadcast(root, data)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::broadcast_into`]. `send` has been read when this returns.
    ///
    /// # Errors
    /// If the group has failed before, `root` is not in it, or its `send` is missing or has another
    /// length.
    pub fn start_broadcast_into<'a, T: Element>(
        &'a mut self,
        root: usize,
        send: Option<&[T]>,
        recv: &'a mut [T],
    ) -> Result<Pending<'a>, CommError> {
        self.rank_and_size().copy_root_input(root, send, recv)?;
        self.start_broadcast(root, recv)
    }

    /// Starts [`Group::gather`].
    ///
    /// # Errors
    /// If the group has failed before, a length does not match `counts`, or the root passes no
    /// `recv`.
    pub fn start_gather<'a, T: Element>(
        &'a mut self,
        root: usize,
        send: &'a [T],
        recv: Option<&'a mut [T]>,
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().gather(root, send, recv, counts)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::gather_in_place`].
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match `counts`.
    pub fn start_gather_in_place<'a, T: Element>(
        &'a mut self,
        root: usize,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().gather_in_place(root, data, counts)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::scatter`].
    ///
    /// # Errors
    /// If the group has failed before, a length does not match `counts`, or the root passes no
    /// `send`.
    pub fn start_scatter<'a, T: Element>(
        &'a mut self,
        root: usize,
        send: Option<&'a [T]>,
        recv: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().scatter(root, send, recv, counts)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::scatter_in_place`].
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match `counts`.
    pub fn start_scatter_in_place<'a, T: Element>(
        &'a mut self,
        root: usize,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().scatter_in_place(root, data, counts)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::all_to_all`].
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match its counts.
    pub fn start_all_to_all<'a, T: Element>(
        &'a mut self,
        send: &'a [T],
        send_counts: &'a [usize],
        recv: &'a mut [T],
        recv_counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().all_to_all(send, send_counts, recv, recv_counts)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::all_to_all_in_place`].
    ///
    /// # Errors
    /// If the group has failed before, or a length does not match `counts`.
    pub fn start_all_to_all_in_place<'a, T: Element>(
        &'a mut self,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().all_to_all_in_place(data, counts, &mut self.core.wire_buffer)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::barrier`].
    ///
    /// # Errors
    /// If the group has failed before.
    pub fn start_barrier(&mut self) -> Result<Pending<'_>, CommError> {
        self.start_transfer(self.rank_and_size().barrier())
    }

    /// Starts [`Group::send`].
    ///
    /// # Errors
    /// If the group has failed before, or `to` is this rank.
    pub fn start_send<'a, T: Element>(
        &'a mut self,
        to: usize,
        data: &'a [T],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().send(to, data)?;
        self.start_transfer(transfer)
    }

    /// Starts [`Group::recv`].
    ///
    /// # Errors
    /// If the group has failed before, or `from` is this rank.
    pub fn start_recv<'a, T: Element>(
        &'a mut self,
        from: usize,
        data: &'a mut [T],
    ) -> Result<Pending<'a>, CommError> {
        let transfer = self.rank_and_size().recv(from, data)?;
        self.start_transfer(transfer)
    }

    fn start_prepared_reduce_scatter<'a>(
        &'a mut self,
        reduction: ReduceScatter<'a>,
    ) -> Result<Pending<'a>, CommError> {
        self.start(OperationKind::ReduceScatter, reduction.bytes, async move |core: &mut Core| {
            reduction.run(core).await
        })
    }

    fn start_transfer<'a>(&'a mut self, transfer: Transfer<'a>) -> Result<Pending<'a>, CommError> {
        self.start(transfer.kind, transfer.bytes, async move |core: &mut Core| transfer.run(core).await)
    }

    fn start<'a>(
        &'a mut self,
        kind: OperationKind,
        bytes: usize,
        operation: impl AsyncFnOnce(&mut Core) -> Result<(), CommError> + 'a,
    ) -> Result<Pending<'a>, CommError> {
        let Self { core, stats, .. } = self;
        let cooperative = core.cooperative.clone();
        let alone = core.size == 1;
        if !alone {
            core.begin(Some(Instant::now()), kind, false)?;
            stats.operations += 1;
            stats.bytes += bytes as u64;
        }
        let mut pending = Pending { operation: None, cooperative, stats, result: Ok(()) };
        if !alone {
            pending.operation = Some(Box::pin(async move {
                let result = operation(&mut *core).await;
                core.end();
                result
            }));
            // Sends at once what the links take.
            pending.advance(true);
        }
        Ok(pending)
    }
}
