//! The checked arguments of the operations that reduce, for both the blocking and the non-blocking
//! forms.

use std::marker::PhantomData;

use super::arguments::{RankAndSize, part_of, send_ptr};
use crate::core::Core;
use crate::element::{make_valid, raw_bytes_of};
use crate::{Algorithm, CommError, DType, Element, Op, algorithm};

/// An all-reduce in place. Lives no longer than the borrow of its slice.
#[derive(Debug)]
pub(super) struct AllReduce<'a> {
    /// Payload of the operation's argument.
    pub bytes: usize,
    data: *mut u8,
    what: (DType, Op),
    algorithm: Algorithm,
    slice: PhantomData<&'a mut ()>,
}

impl<'a> AllReduce<'a> {
    pub fn new<T: Element>(data: &'a mut [T], op: Op, algorithm: Algorithm) -> Self {
        let (data, bytes) = raw_bytes_of(data);
        Self { bytes, data, what: (T::DTYPE, op), algorithm, slice: PhantomData }
    }

    /// The caller must call [`Self::finish`] when this has ended.
    pub fn run<'c>(&'c self, core: &'c mut Core) -> impl Future<Output = Result<(), CommError>> + 'c {
        let count = self.bytes / self.what.0.size();
        // SAFETY: the slice is borrowed for as long as this lives.
        unsafe { algorithm::all_reduce(core, self.data, count, self.what, self.algorithm) }
    }

    pub fn finish(self) {
        // SAFETY: as above.
        unsafe { make_valid(self.what.0, self.data, self.bytes) };
    }
}

/// A reduce-scatter. Lives no longer than the borrow of its slices.
#[derive(Debug)]
pub(super) struct ReduceScatter<'a> {
    /// Payload of the operation's arguments.
    pub bytes: usize,
    send: *const u8,
    /// This rank's part of the result; may be the same memory as its operand.
    out: *mut u8,
    own_bytes: usize,
    counts: &'a [usize],
    what: (DType, Op),
}

impl ReduceScatter<'_> {
    pub async fn run(&self, core: &mut Core) -> Result<(), CommError> {
        let (dtype, op) = self.what;
        // SAFETY: the slices are borrowed for as long as this lives, and their lengths have been
        // checked.
        unsafe {
            let result = algorithm::reduce_scatter(core, self.send, self.out, self.counts, dtype, op).await;
            make_valid(dtype, self.out, self.own_bytes);
            result
        }
    }
}

impl RankAndSize {
    pub fn reduce_scatter<'a, T: Element>(
        self,
        send: &'a [T],
        recv: &'a mut [T],
        counts: &'a [usize],
        op: Op,
    ) -> Result<ReduceScatter<'a>, CommError> {
        self.check_part("reduce_scatter", counts, ("recv", recv.len()))?;
        self.check_counts("reduce_scatter", counts, "send", send.len())?;
        if self.size == 1 {
            recv.copy_from_slice(send);
        }
        let (out, own_bytes) = raw_bytes_of(recv);
        let bytes = size_of_val(send);
        Ok(ReduceScatter { bytes, send: send_ptr(send), out, own_bytes, counts, what: (T::DTYPE, op) })
    }

    pub fn reduce_scatter_in_place<'a, T: Element>(
        self,
        data: &'a mut [T],
        counts: &'a [usize],
        op: Op,
    ) -> Result<ReduceScatter<'a>, CommError> {
        self.check_counts("reduce_scatter", counts, "data", data.len())?;
        let (send, bytes) = raw_bytes_of(data);
        let own = part_of(counts, self.rank);
        let (out, own_bytes) = (send.wrapping_add(own.start * size_of::<T>()), own.len() * size_of::<T>());
        Ok(ReduceScatter { bytes, send, out, own_bytes, counts, what: (T::DTYPE, op) })
    }
}
