//! The non-blocking form: start an operation, go on computing, look in now and then, wait at the end.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::operations::{check_lengths, make_valid};
use super::{Group, Stats};
use crate::algorithm;
use crate::core::Core;
use crate::element::{bytes_of, raw_bytes_of};
use crate::header::Kind;
use crate::{CommError, Element, Op};

type Operation<'a> = Pin<Box<dyn Future<Output = Result<(), CommError>> + 'a>>;

/// An operation under way. It moves on while it is polled or waited for, not by itself; dropping it waits for its end.
#[must_use = "an operation moves on only while it is polled or waited for"]
pub struct Pending<'a> {
    operation: Option<Operation<'a>>,
    /// While set, the operation returns instead of waiting.
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
    /// Moves what can be moved now, without waiting. True when the operation has ended.
    ///
    /// # Errors
    /// The operation's.
    pub fn poll(&mut self) -> Result<bool, CommError> {
        self.advance(true);
        self.result.clone().map(|()| self.operation.is_none())
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The operation's.
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
        // The peers count on the rest of the messages. An error is kept by the group.
        self.advance(false);
    }
}

impl Group {
    /// Starts [`Group::all_reduce`].
    ///
    /// # Errors
    /// When the group has failed before.
    pub fn start_all_reduce<'a, T: Element>(
        &'a mut self,
        data: &'a mut [T],
        op: Op,
    ) -> Result<Pending<'a>, CommError> {
        let count = data.len();
        let (pointer, bytes) = raw_bytes_of(data);
        let algorithm = self.algorithm_of(bytes, T::DTYPE);
        self.start(Kind::AllReduce, bytes, async move |core: &mut Core| {
            // SAFETY: `data` is borrowed until the operation has ended.
            unsafe { algorithm::all_reduce(core, pointer, count, (T::DTYPE, op), algorithm).await }
        })
    }

    /// Starts [`Group::all_gather_in_place`].
    ///
    /// # Errors
    /// When the group has failed before, or a length is not what `counts` says.
    pub fn start_all_gather_in_place<'a, T: Element>(
        &'a mut self,
        data: &'a mut [T],
        counts: &'a [usize],
    ) -> Result<Pending<'a>, CommError> {
        check_lengths("all_gather", self.size(), counts, data.len())?;
        let own = self.rank();
        let (pointer, bytes) = raw_bytes_of(data);
        let place = move |rank: usize| {
            let at: usize = counts[..rank].iter().sum();
            // SAFETY: within the sum of `counts`.
            (unsafe { pointer.add(at * size_of::<T>()) }, counts[rank] * size_of::<T>())
        };
        let outgoing = move |_| Some((place(own).0.cast_const(), place(own).1));
        let incoming = move |peer| Some(place(peer));
        self.start_exchange::<T>(Kind::AllGather, bytes, outgoing, incoming, (pointer, bytes))
    }

    /// Starts [`Group::reduce_scatter`].
    ///
    /// # Errors
    /// When the group has failed before, or a length is not what `counts` says.
    pub fn start_reduce_scatter<'a, T: Element>(
        &'a mut self,
        send: &'a [T],
        recv: &'a mut [T],
        counts: &'a [usize],
        op: Op,
    ) -> Result<Pending<'a>, CommError> {
        self.check_reduce_scatter(send.len(), recv.len(), counts)?;
        if self.size() == 1 {
            recv.copy_from_slice(send);
        }
        let (from, to) = (bytes_of(send), raw_bytes_of(recv).0);
        self.start(Kind::ReduceScatter, from.len(), async move |core: &mut Core| {
            // SAFETY: both slices are borrowed until the operation has ended, and their lengths are checked.
            unsafe { algorithm::reduce_scatter(core, from.as_ptr(), to, counts, T::DTYPE, op).await }
        })
    }

    /// Starts [`Group::broadcast`].
    ///
    /// # Errors
    /// When the group has failed before, or `root` is not in it.
    pub fn start_broadcast<'a, T: Element>(
        &'a mut self,
        root: usize,
        data: &'a mut [T],
    ) -> Result<Pending<'a>, CommError> {
        self.check_rank("broadcast", root)?;
        let own = self.rank();
        let (pointer, bytes) = raw_bytes_of(data);
        let outgoing = move |_| (own == root).then_some((pointer.cast_const(), bytes));
        let incoming = move |peer| (peer == root).then_some((pointer, bytes));
        self.start_exchange::<T>(Kind::Broadcast, bytes, outgoing, incoming, (pointer, bytes))
    }

    /// Starts [`Group::barrier`].
    ///
    /// # Errors
    /// When the group has failed before.
    pub fn start_barrier(&mut self) -> Result<Pending<'_>, CommError> {
        let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
        let (outgoing, incoming) = (move |_| Some((nothing.cast_const(), 0)), move |_| Some((nothing, 0)));
        self.start_exchange::<u8>(Kind::Barrier, 0, outgoing, incoming, (nothing, 0))
    }

    /// Starts [`Group::send`].
    ///
    /// # Errors
    /// When the group has failed before, or `to` is this rank.
    pub fn start_send<'a, T: Element>(
        &'a mut self,
        to: usize,
        data: &'a [T],
    ) -> Result<Pending<'a>, CommError> {
        self.check_peer("send", to)?;
        let from = bytes_of(data);
        let outgoing = move |peer| (peer == to).then_some((from.as_ptr(), from.len()));
        let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
        self.start_exchange::<T>(Kind::SendReceive, from.len(), outgoing, |_| None, (nothing, 0))
    }

    /// Starts [`Group::recv`].
    ///
    /// # Errors
    /// When the group has failed before, or `from` is this rank.
    pub fn start_recv<'a, T: Element>(
        &'a mut self,
        from: usize,
        data: &'a mut [T],
    ) -> Result<Pending<'a>, CommError> {
        self.check_peer("recv", from)?;
        let (pointer, bytes) = raw_bytes_of(data);
        let incoming = move |peer| (peer == from).then_some((pointer, bytes));
        self.start_exchange::<T>(Kind::SendReceive, bytes, |_| None, incoming, (pointer, bytes))
    }

    /// Starts an exchange, which fills `filled`. The places must be in slices that are borrowed for `'a`.
    fn start_exchange<'a, T: Element>(
        &'a mut self,
        kind: Kind,
        bytes: usize,
        outgoing: impl Fn(usize) -> Option<(*const u8, usize)> + 'a,
        incoming: impl Fn(usize) -> Option<(*mut u8, usize)> + 'a,
        (pointer, length): (*mut u8, usize),
    ) -> Result<Pending<'a>, CommError> {
        self.start(kind, bytes, async move |core: &mut Core| {
            // SAFETY: the slices that hold the places are borrowed until the operation has ended.
            unsafe {
                algorithm::exchange(core, kind, T::DTYPE, (0, 0), outgoing, incoming).await?;
                make_valid(T::DTYPE, pointer, length);
            }
            Ok(())
        })
    }

    fn start<'a>(
        &'a mut self,
        kind: Kind,
        bytes: usize,
        operation: impl AsyncFnOnce(&mut Core) -> Result<(), CommError> + 'a,
    ) -> Result<Pending<'a>, CommError> {
        let Self { core, stats, .. } = self;
        stats.operations += 1;
        stats.bytes += bytes as u64;
        let cooperative = core.cooperative.clone();
        let alone = core.size == 1;
        if !alone {
            core.begin(Some(Instant::now()), kind, false)?;
        }
        let mut pending = Pending { operation: None, cooperative, stats, result: Ok(()) };
        if !alone {
            pending.operation = Some(Box::pin(async move {
                let result = operation(&mut *core).await;
                core.end();
                result
            }));
            // What fits leaves at once.
            pending.advance(true);
        }
        Ok(pending)
    }
}
