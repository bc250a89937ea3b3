//! The all-reduce in which each byte crosses the wires between hosts once in each direction.
//!
//! The lowest rank of a host leads it. Its host-mates post their elements on the host's board; it adds them to the sums of
//! the hosts before, passes the sums on, and posts the results that come back. Hosts are in the order of their leaders, so
//! where each host's ranks are consecutive, the sum is in rank order, bit for bit that of the other algorithms. Otherwise it
//! is host by host, in rank order within each: the same bits on all ranks and in all runs, but not the others'.

use std::ops::Range;

use crate::core::Core;
use crate::header::{Header, Kind, STREAMED_PHASES};
use crate::reduce::{accumulated_size, narrow, reduce_partial, widen};
use crate::{CommError, DType, Op};

const UP: u8 = STREAMED_PHASES + 2;
const DOWN: u8 = STREAMED_PHASES + 3;
/// Steps on the board.
const OWN: u8 = 6;
const RESULTS: u8 = 7;

/// One all-reduce, as this rank sees it.
struct Job {
    data: *mut u8,
    /// Where the sums of this host and those before are: `data` itself, or memory for wider elements.
    sums: *mut u8,
    count: usize,
    dtype: DType,
    op: Op,
    /// Elements of a record on the board.
    piece: usize,
    lower: Option<usize>,
    upper: Option<usize>,
}

impl Job {
    fn header(&self, core: &Core, phase: u8, size: usize) -> Header {
        core.header(Kind::AllReduce, self.dtype, self.op as u8, phase, self.count * size)
    }

    fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (count, piece) = (self.count, self.piece);
        (0..count).step_by(piece).map(move |start| start..count.min(start + piece))
    }
}

/// # Safety
/// `data` must be valid for `count` elements of `dtype` until this returns.
pub(super) async unsafe fn all_reduce(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    (dtype, op): (DType, Op),
) -> Result<(), CommError> {
    let host = core.hosts.iter().position(|ranks| ranks.contains(&core.rank)).unwrap_or_default();
    let leader_of = |host: usize| core.hosts.get(host).map(|ranks| ranks[0]);
    let (lower, upper) = (host.checked_sub(1).and_then(leader_of), leader_of(host + 1));
    let leads = leader_of(host) == Some(core.rank);
    let piece = core.record_bytes() / dtype.size();
    let mut job = Job { data, sums: data, count, dtype, op, piece, lower, upper };
    if !leads {
        // SAFETY: as promised by the caller.
        return unsafe { follow(core, &job).await };
    }
    let mut scratch = std::mem::take(&mut core.scratch);
    if accumulated_size(dtype) != dtype.size() {
        scratch.resize(scratch.len().max(count), 0.0);
        job.sums = scratch.as_mut_ptr().cast();
    }
    // SAFETY: as promised by the caller; `sums` holds `count` accumulated elements.
    let result = unsafe { lead(core, &job).await };
    core.scratch = scratch;
    result
}

/// What ranks do that do not lead.
///
/// # Safety
/// The job's pointers must be valid for its elements.
async unsafe fn follow(core: &mut Core, job: &Job) -> Result<(), CommError> {
    let size = job.dtype.size();
    let (own, results) = (job.header(core, OWN, size), job.header(core, RESULTS, size));
    for piece in job.pieces() {
        let (record, to) = core.take_record(piece.len() * size);
        // SAFETY: the piece lies within `data`, and the record holds as much.
        unsafe { std::ptr::copy_nonoverlapping(job.data.add(piece.start * size), to, piece.len() * size) };
        core.post_record(record, &own);
        core.await_record(record, &own).await?;
    }
    for piece in job.pieces() {
        let (record, _) = core.take_record(piece.len() * size);
        core.post_record(record, &results);
        core.await_record(record, &results).await?;
        // SAFETY: as above; the leader, who is the first of the board, has posted the results.
        unsafe {
            let from = core.record_of(0, record);
            std::ptr::copy_nonoverlapping(from, job.data.add(piece.start * size), piece.len() * size);
        }
    }
    Ok(())
}

/// What the lowest rank of a host does.
///
/// # Safety
/// As for `follow`, and `sums` must be valid for as many accumulated elements.
async unsafe fn lead(core: &mut Core, job: &Job) -> Result<(), CommError> {
    let (size, wide) = (job.dtype.size(), accumulated_size(job.dtype));
    let (sums, results) = (job.header(core, UP, wide), job.header(core, DOWN, size));
    if let Some(lower) = job.lower {
        core.queue_receive(lower, sums, std::ptr::null_mut());
        // SAFETY: as promised by the caller.
        unsafe { core.queue_send(lower, results, job.data) };
        core.limit_send(lower, 0);
    }
    if let Some(upper) = job.upper {
        core.queue_receive(upper, results, job.data);
        // SAFETY: as above.
        unsafe { core.queue_send(upper, sums, job.sums) };
        core.limit_send(upper, 0);
    }
    let own = job.header(core, OWN, size);
    for piece in job.pieces() {
        let record = if core.has_board() {
            let (record, _) = core.take_record(piece.len() * size);
            core.post_record(record, &own);
            core.await_record(record, &own).await?;
            Some(record)
        } else {
            None
        };
        let mut done = piece.start;
        while done < piece.end {
            let mut moved = pass_on(core, job)?;
            let mut ready = piece.end - done;
            let mut theirs = None;
            if let Some(lower) = job.lower {
                moved |= core.step_header(lower)?;
                ready = if core.header_done(lower) { core.arrived(lower, ready * wide)? / wide } else { 0 };
                theirs = Some(core.view(lower).as_ptr());
            }
            if ready > 0 {
                let mates = record.map(|record| (record, (done - piece.start) * size));
                // SAFETY: `done + ready` is within the piece, and the view holds `ready` sums.
                unsafe { add_host(core, job, done..done + ready, theirs, mates) };
                done += ready;
                if let Some(lower) = job.lower {
                    core.consume(lower, ready * wide);
                }
                match (job.upper, job.lower) {
                    (Some(upper), _) => core.limit_send(upper, done * wide),
                    (None, Some(lower)) => core.limit_send(lower, done * size),
                    (None, None) => {}
                }
            } else {
                core.turn(moved).await?;
            }
        }
    }
    let posted = job.header(core, RESULTS, size);
    for piece in job.pieces() {
        while job.upper.is_some_and(|upper| core.received(upper) < piece.end * size) {
            let moved = pass_on(core, job)?;
            core.turn(moved).await?;
        }
        if core.has_board() {
            let (record, to) = core.take_record(piece.len() * size);
            // SAFETY: the piece lies within `data`, and the record holds as much.
            unsafe {
                std::ptr::copy_nonoverlapping(job.data.add(piece.start * size), to, piece.len() * size);
            }
            core.post_record(record, &posted);
            core.await_record(record, &posted).await?;
        }
    }
    loop {
        let moved = pass_on(core, job)?;
        if core.idle_messages() {
            return Ok(());
        }
        core.turn(moved).await?;
    }
}

/// Moves sums up and results down as far as they go.
fn pass_on(core: &mut Core, job: &Job) -> Result<bool, CommError> {
    let mut moved = core.step_sends()?;
    if let Some(upper) = job.upper {
        if core.expects(upper) {
            moved |= core.step_receive(upper)?;
        }
        if let Some(lower) = job.lower {
            core.limit_send(lower, core.received(upper));
        }
    }
    if let Some(lower) = job.lower.filter(|lower| core.expects(*lower)) {
        // A message of no elements is only its header.
        moved |= core.step_header(lower)?;
        core.finish_receive(lower);
    }
    Ok(moved)
}

/// Adds a host's elements in `range` to `theirs`, the sums of the hosts before, if there are any. `mates` is the record that
/// has the elements of the others of this host, and where they begin in it.
///
/// # Safety
/// As for `lead`; `theirs` and the record must hold the elements.
unsafe fn add_host(
    core: &mut Core,
    job: &Job,
    range: Range<usize>,
    theirs: Option<*const u8>,
    mates: Option<(u64, usize)>,
) {
    let (dtype, op, count) = (job.dtype, job.op, range.len());
    let (size, wide) = (dtype.size(), accumulated_size(dtype));
    // SAFETY: as promised by the caller.
    unsafe {
        let (own, sums) = (job.data.add(range.start * size), job.sums.add(range.start * wide));
        if wide == size {
            core.reduce_record(mates, theirs, own, sums, count, (dtype, op));
            return;
        }
        match theirs {
            Some(theirs) => reduce_partial(dtype, op, theirs, own, Some(sums), count),
            None => widen(dtype, sums, own, count),
        }
        if let Some((record, at)) = mates {
            for place in 1..core.board_ranks() {
                let theirs = core.record_of(place, record).add(at);
                reduce_partial(dtype, op, sums, theirs.cast_mut(), Some(sums), count);
            }
        }
        if job.upper.is_none() {
            narrow(dtype, own, sums, count);
        }
    }
}
