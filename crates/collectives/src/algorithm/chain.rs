//! The all-reduce along a chain of ranks, in which only neighbours exchange data.
//!
//! Rank 0 sends its elements to rank 1, which adds its own and sends the sums on. The last rank has
//! the results and sends them back down. `f16` and `bf16` sums travel up as `f32`, so that they are
//! rounded once, as in every other algorithm.

use crate::core::Core;
use crate::header::{OperationKind, STREAMED_PHASES};
use crate::reduce::{accumulated_size, reduce, reduce_partial, widen};
use crate::{CommError, DType, Op};

const UP: u8 = STREAMED_PHASES;
const DOWN: u8 = STREAMED_PHASES + 1;
/// Bytes that are added before they are passed on: enough for efficient loops, and few enough to
/// stay in the cache.
const PIECE_BYTES: usize = 64 << 10;

/// # Safety
/// `data` must be valid for `count` elements of `dtype` until this returns.
pub(super) async unsafe fn all_reduce(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    dtype: DType,
    op: Op,
) -> Result<(), CommError> {
    let (size, wide) = (dtype.size(), accumulated_size(dtype));
    let lower = core.rank.checked_sub(1);
    let upper = (core.rank + 1 < core.size).then_some(core.rank + 1);
    let mut scratch = std::mem::take(&mut core.scratch);
    // Where elements need not be widened, partial sums overwrite the elements that went into them.
    let partial: *mut u8 = if wide != size && upper.is_some() {
        scratch.resize(scratch.len().max(count), 0.0);
        scratch.as_mut_ptr().cast()
    } else {
        data
    };
    if let Some(lower) = lower {
        let sums = core.header(OperationKind::AllReduce, dtype, op as u8, UP, count * wide);
        core.queue_receive(lower, sums, std::ptr::null_mut());
        let results = core.header(OperationKind::AllReduce, dtype, op as u8, DOWN, count * size);
        // SAFETY: as promised by the caller.
        unsafe { core.queue_send(lower, results, data) };
        core.limit_send(lower, 0);
    }
    if let Some(upper) = upper {
        let results = core.header(OperationKind::AllReduce, dtype, op as u8, DOWN, count * size);
        core.queue_receive(upper, results, data);
        let sums = core.header(OperationKind::AllReduce, dtype, op as u8, UP, count * wide);
        // SAFETY: as above; `partial` holds `count` accumulated elements.
        unsafe { core.queue_send(upper, sums, partial) };
        if lower.is_some() {
            core.limit_send(upper, 0);
        } else if wide != size {
            // SAFETY: `data` and the scratch memory hold `count` elements.
            unsafe { widen(dtype, partial, data, count) };
        }
    }
    // SAFETY: as promised by the caller; `partial` holds `count` accumulated elements.
    let result = unsafe { pass(core, data, partial, count, (dtype, op), (lower, upper)).await };
    core.scratch = scratch;
    result
}

/// Runs the queued messages to their end.
///
/// # Safety
/// As for the caller, and `partial` must be valid for `count` accumulated elements, or be `data`
/// itself.
async unsafe fn pass(
    core: &mut Core,
    data: *mut u8,
    partial: *mut u8,
    count: usize,
    (dtype, op): (DType, Op),
    (lower, upper): (Option<usize>, Option<usize>),
) -> Result<(), CommError> {
    let (size, wide) = (dtype.size(), accumulated_size(dtype));
    let mut summed = 0;
    loop {
        let mut moved = core.step_sends()?;
        if let Some(lower) = lower.filter(|lower| core.expects(*lower)) {
            moved |= core.step_header(lower)?;
            if core.header_done(lower) {
                let want = ((count - summed) * wide).min(PIECE_BYTES);
                let ready = core.fill_view(lower, want)? / wide;
                let theirs = core.view(lower).as_ptr();
                // SAFETY: `summed + ready <= count`, and the view holds `ready` accumulated
                // elements.
                unsafe {
                    let own = data.add(summed * size);
                    if wide == size {
                        reduce(dtype, op, own, &[theirs, own.cast_const()], ready);
                    } else {
                        let out = upper.map(|_| partial.add(summed * wide));
                        reduce_partial(dtype, op, theirs, own, out, ready);
                    }
                }
                core.consume(lower, ready * wide);
                summed += ready;
                moved |= ready > 0;
                match upper {
                    Some(upper) => core.limit_send(upper, summed * wide),
                    None => core.limit_send(lower, summed * size),
                }
            }
        }
        if let Some(upper) = upper {
            if core.expects(upper) {
                moved |= core.step_receive(upper)?;
            }
            if let Some(lower) = lower {
                core.limit_send(lower, core.received(upper));
            }
        }
        if core.all_messages_done() {
            return Ok(());
        }
        core.pause_unless(moved).await?;
    }
}
