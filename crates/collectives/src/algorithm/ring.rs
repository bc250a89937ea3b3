//! The all-reduce around a ring, in both directions at once. A rank exchanges data only with the
//! ranks before and after it, and each direction of their links carries `(n - 1) / n` of the data.
//!
//! Each direction takes half of the elements, cut into one part per rank. A part's sum starts at
//! the rank with its number and is complete when it has passed all others; then the result goes
//! around. So a part's elements are added in the order of the ring from that rank on: the same on
//! all ranks and in all runs, but not rank order. `f16` and `bf16` travel as `f32` until their sum
//! is complete, so that they are rounded once.

use std::cmp::Ordering;
use std::ops::Range;

use super::part;
use crate::core::Core;
use crate::header::{Header, OperationKind, STREAMED_PHASES};
use crate::reduce::{accumulated_size, reduce, reduce_partial, widen};
use crate::{CommError, DType, Op};

const SUMS: u8 = STREAMED_PHASES + 4;
const RESULTS: u8 = STREAMED_PHASES + 5;
/// Bytes that are added before they are passed on: enough for efficient loops, and few enough to
/// stay in the cache.
const PIECE_BYTES: usize = 64 << 10;

/// One direction around the ring, as this rank sees it.
struct RingDirection {
    ranks: usize,
    /// This rank's index in the order of the direction.
    position: usize,
    next: usize,
    previous: usize,
    /// The direction's elements, and the sums of elements that must be widened.
    data: *mut u8,
    sums: *mut u8,
    count: usize,
    dtype: DType,
    op: Op,
    /// Number of parts whose sending has begun, and of parts that have arrived completely.
    sent: usize,
    received: usize,
    /// Elements of the next part that have arrived.
    arrived: usize,
}

/// # Safety
/// `data` must be valid for `count` elements of `dtype` until this returns.
pub(super) async unsafe fn all_reduce(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    (dtype, op): (DType, Op),
) -> Result<(), CommError> {
    if core.size == 1 {
        return Ok(());
    }
    let (rank, ranks, size, wide) = (core.rank, core.size, dtype.size(), accumulated_size(dtype));
    let mut scratch = std::mem::take(&mut core.scratch);
    let mut sums = data;
    if wide != size {
        scratch.resize(scratch.len().max(count), 0.0);
        sums = scratch.as_mut_ptr().cast();
    }
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let direction = |range: Range<usize>, position, next, previous| RingDirection {
        ranks,
        position,
        next,
        previous,
        // `range` lies within `count` elements, so both stay within their memory.
        data: data.wrapping_add(range.start * size),
        sums: sums.wrapping_add(range.start * wide),
        count: range.len(),
        dtype,
        op,
        sent: 0,
        received: 0,
        arrived: 0,
    };
    // Two ranks have one link, and one direction around the ring already fills both directions of
    // that link.
    let up = if ranks == 2 { count } else { part(count, dtype, 0, 2).end };
    let mut directions = vec![direction(0..up, rank, next, previous)];
    if ranks > 2 {
        directions.push(direction(up..count, ranks - 1 - rank, previous, next));
    }
    // SAFETY: as promised by the caller; the scratch memory holds `count` accumulated elements.
    let result = unsafe { run_directions(core, &mut directions).await };
    core.scratch = scratch;
    result
}

/// # Safety
/// The directions' pointers must be valid for their elements.
async unsafe fn run_directions(core: &mut Core, directions: &mut [RingDirection]) -> Result<(), CommError> {
    for direction in directions.iter().filter(|direction| direction.widens()) {
        let own = direction.part(direction.position);
        // SAFETY: as promised by the caller.
        unsafe {
            widen(direction.dtype, direction.sums_at(own.start), direction.data_at(own.start), own.len())
        };
    }
    loop {
        let mut moved = false;
        for direction in directions.iter_mut() {
            // SAFETY: as promised by the caller.
            moved |= unsafe { direction.receive(core)? };
            // SAFETY: as above.
            unsafe { direction.send_ready(core) };
        }
        moved |= core.step_sends()?;
        if directions.iter().all(RingDirection::is_done) && core.all_messages_done() {
            return Ok(());
        }
        core.pause_unless(moved).await?;
    }
}

impl RingDirection {
    fn is_done(&self) -> bool {
        self.sent == self.steps() && self.received == self.steps()
    }

    /// Number of parts that each link carries.
    fn steps(&self) -> usize {
        2 * (self.ranks - 1)
    }

    /// True when a result is sent in this step, false when it is a sum that still lacks ranks.
    fn is_result(&self, step: usize) -> bool {
        step >= self.ranks - 1
    }

    fn widens(&self) -> bool {
        accumulated_size(self.dtype) != self.dtype.size()
    }

    fn part(&self, position: usize) -> Range<usize> {
        part(self.count, self.dtype, position % self.ranks, self.ranks)
    }

    /// What this rank sends in a step: first its own part, then what arrived in the previous step.
    fn outgoing(&self, step: usize) -> Range<usize> {
        self.part(self.position + 2 * self.ranks - step)
    }

    fn incoming(&self, step: usize) -> Range<usize> {
        self.outgoing(step + 1)
    }

    fn data_at(&self, element: usize) -> *mut u8 {
        self.data.wrapping_add(element * self.dtype.size())
    }

    fn sums_at(&self, element: usize) -> *mut u8 {
        self.sums.wrapping_add(element * accumulated_size(self.dtype))
    }

    /// Bytes per element as it travels in a step.
    fn width(&self, step: usize) -> usize {
        if self.is_result(step) { self.dtype.size() } else { accumulated_size(self.dtype) }
    }

    fn header(&self, core: &Core, step: usize, elements: usize) -> Header {
        let phase = if self.is_result(step) { RESULTS } else { SUMS };
        let bytes = elements * self.width(step);
        core.header(OperationKind::AllReduce, self.dtype, self.op as u8, phase, bytes)
    }

    /// Takes what has arrived from the previous rank.
    ///
    /// # Safety
    /// The pointers must be valid for all elements.
    unsafe fn receive(&mut self, core: &mut Core) -> Result<bool, CommError> {
        let (step, peer) = (self.received, self.previous);
        if step == self.steps() {
            return Ok(false);
        }
        let part = self.incoming(step);
        if !core.expects(peer) {
            let header = self.header(core, step, part.len());
            core.queue_receive(peer, header, self.data_at(part.start));
        }
        let mut moved;
        if self.is_result(step) {
            // The elements that it overwrites have been sent: the result contains them.
            moved = core.step_receive(peer)?;
            self.arrived = core.received(peer) / self.dtype.size();
        } else {
            moved = core.step_header(peer)?;
            if core.header_done(peer) {
                // SAFETY: as promised by the caller.
                moved |= unsafe { self.add_ready(core, part)? };
            }
        }
        if !core.expects(peer) {
            (self.received, self.arrived) = (step + 1, 0);
        }
        Ok(moved)
    }

    /// Adds this rank's elements of a part to the sums that have arrived.
    ///
    /// # Safety
    /// As for `receive`.
    unsafe fn add_ready(&mut self, core: &mut Core, part: Range<usize>) -> Result<bool, CommError> {
        let (width, peer) = (accumulated_size(self.dtype), self.previous);
        let at = part.start + self.arrived;
        let ready = core.fill_view(peer, ((part.end - at) * width).min(PIECE_BYTES))? / width;
        let theirs = core.view(peer).as_ptr();
        let own = self.data_at(at);
        // SAFETY: the part has `ready` more elements, and the view holds as many sums.
        unsafe {
            if self.widens() {
                let out = (!self.is_result(self.received + 1)).then(|| self.sums_at(at));
                reduce_partial(self.dtype, self.op, theirs, own, out, ready);
            } else {
                reduce(self.dtype, self.op, own, &[theirs, own.cast_const()], ready);
            }
        }
        core.consume(peer, ready * width);
        self.arrived += ready;
        Ok(ready > 0)
    }

    /// Sends to the next rank what is ready.
    ///
    /// # Safety
    /// As for `receive`.
    unsafe fn send_ready(&mut self, core: &mut Core) {
        if self.sent < self.steps() && !core.is_sending(self.next) {
            let part = self.outgoing(self.sent);
            let header = self.header(core, self.sent, part.len());
            let sums = !self.is_result(self.sent);
            let from = if sums { self.sums_at(part.start) } else { self.data_at(part.start) };
            // SAFETY: as promised by the caller.
            unsafe { core.queue_send(self.next, header, from) };
            self.sent += 1;
        }
        let step = self.sent - 1;
        // Empty parts are sent before they have arrived, so sending may be ahead by more than one
        // step.
        let ready = match step.cmp(&(self.received + 1)) {
            Ordering::Less => self.outgoing(step).len(),
            Ordering::Equal => self.arrived,
            Ordering::Greater => 0,
        };
        core.limit_send(self.next, ready * self.width(step));
    }
}
