//! The all-reduce in which each byte crosses the wires between hosts once in each direction.
//!
//! The lowest rank of a host is its leader. The other ranks of the host post their elements on the
//! host's board. The leader adds them to the sums of the lower hosts, sends the sums to the next
//! host's leader, and posts the results that come back. Hosts are in the order of their leaders. If
//! each host's ranks are consecutive, the sum is in rank order and has the same bits as with the
//! other algorithms. Otherwise the order is host by host, and by rank within each host: the same
//! bits on all ranks and in all runs, but not those of the other algorithms.

use std::ops::Range;

use crate::core::Core;
use crate::header::{Header, OperationKind, STREAMED_PHASES};
use crate::reduce::{accumulated_size, narrow, reduce_partial, widen};
use crate::{CommError, DType, Op};

/// Phases in message headers: sums to higher hosts, results to lower ones.
const UP: u8 = STREAMED_PHASES + 2;
const DOWN: u8 = STREAMED_PHASES + 3;
/// Phases of the board's records: each rank's own elements, and the results.
const OWN: u8 = 6;
const RESULTS: u8 = 7;

/// One all-reduce, as this rank sees it.
struct HostReduce {
    data: *mut u8,
    /// The sums of this host and the lower ones: `data` itself, or scratch memory for wider
    /// elements.
    sums: *mut u8,
    count: usize,
    dtype: DType,
    op: Op,
    /// Elements per record on the board.
    piece: usize,
    /// The leaders of the hosts before and after this one.
    lower: Option<usize>,
    upper: Option<usize>,
}

impl HostReduce {
    fn header(&self, core: &Core, phase: u8, size: usize) -> Header {
        core.header(OperationKind::AllReduce, self.dtype, self.op as u8, phase, self.count * size)
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
    let is_leader = leader_of(host) == Some(core.rank);
    let piece = core.record_bytes() / dtype.size();
    let mut job = HostReduce { data, sums: data, count, dtype, op, piece, lower, upper };
    if !is_leader {
        // SAFETY: as promised by the caller.
        return unsafe { run_follower(core, &job).await };
    }
    let mut scratch = std::mem::take(&mut core.scratch);
    if accumulated_size(dtype) != dtype.size() {
        scratch.resize(scratch.len().max(count), 0.0);
        job.sums = scratch.as_mut_ptr().cast();
    }
    // SAFETY: as promised by the caller; `sums` holds `count` accumulated elements.
    let result = unsafe { run_leader(core, &job).await };
    core.scratch = scratch;
    result
}

/// The part of ranks that are not leaders.
///
/// # Safety
/// The job's pointers must be valid for its elements.
async unsafe fn run_follower(core: &mut Core, job: &HostReduce) -> Result<(), CommError> {
    let size = job.dtype.size();
    let (own, results) = (job.header(core, OWN, size), job.header(core, RESULTS, size));
    for piece in job.pieces() {
        let (record, to) = core.take_record(piece.len() * size);
        // SAFETY: the piece lies within `data`, and the record holds as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(job.data.add(piece.start * size), to, piece.len() * size) };
        core.post_record(record, &own);
        core.await_record(record, &own).await?;
    }
    for piece in job.pieces() {
        let (record, _) = core.take_record(piece.len() * size);
        core.post_record(record, &results);
        core.await_record(record, &results).await?;
        // SAFETY: as above; the leader, the first rank of the board, has posted the results.
        unsafe {
            let from = core.record_of(0, record);
            std::ptr::copy_nonoverlapping(from, job.data.add(piece.start * size), piece.len() * size);
        }
    }
    Ok(())
}

/// The part of a host's lowest rank.
///
/// # Safety
/// As for `run_follower`, and `sums` must be valid for as many accumulated elements.
async unsafe fn run_leader(core: &mut Core, job: &HostReduce) -> Result<(), CommError> {
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
    // SAFETY: as promised by the caller.
    unsafe {
        add_pieces(core, job).await?;
        post_results(core, job).await?;
    }
    loop {
        let moved = forward(core, job)?;
        if core.all_messages_done() {
            return Ok(());
        }
        core.pause_unless(moved).await?;
    }
}

/// Adds the elements of all ranks of the host to the sums of the lower hosts, piece by piece as
/// they come.
///
/// # Safety
/// As for `run_leader`.
async unsafe fn add_pieces(core: &mut Core, job: &HostReduce) -> Result<(), CommError> {
    let (size, wide) = (job.dtype.size(), accumulated_size(job.dtype));
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
            let mut moved = forward(core, job)?;
            let mut ready = piece.end - done;
            let mut theirs = None;
            if let Some(lower) = job.lower {
                moved |= core.step_header(lower)?;
                ready = if core.header_done(lower) { core.fill_view(lower, ready * wide)? / wide } else { 0 };
                theirs = Some(core.view(lower).as_ptr());
            }
            if ready > 0 {
                let record = record.map(|record| (record, (done - piece.start) * size));
                // SAFETY: `done + ready` is within the piece, and the view holds `ready` sums.
                unsafe { add_host(core, job, done..done + ready, theirs, record) };
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
                core.pause_unless(moved).await?;
            }
        }
    }
    Ok(())
}

/// Posts the results on the host's board as they come from the next host.
///
/// # Safety
/// As for `run_leader`.
async unsafe fn post_results(core: &mut Core, job: &HostReduce) -> Result<(), CommError> {
    let size = job.dtype.size();
    let results = job.header(core, RESULTS, size);
    for piece in job.pieces() {
        while job.upper.is_some_and(|upper| core.received(upper) < piece.end * size) {
            let moved = forward(core, job)?;
            core.pause_unless(moved).await?;
        }
        if core.has_board() {
            let (record, to) = core.take_record(piece.len() * size);
            // SAFETY: the piece lies within `data`, and the record holds as many bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(job.data.add(piece.start * size), to, piece.len() * size);
            }
            core.post_record(record, &results);
            core.await_record(record, &results).await?;
        }
    }
    Ok(())
}

/// Moves sums up and results down as far as possible.
fn forward(core: &mut Core, job: &HostReduce) -> Result<bool, CommError> {
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
        // A message of no elements consists of its header only.
        moved |= core.step_header(lower)?;
        core.finish_receive(lower);
    }
    Ok(moved)
}

/// Adds the host's elements in `range` to `theirs`, the sums of the lower hosts, if there are any.
/// `record` holds the elements of the host's other ranks, from the given byte on.
///
/// # Safety
/// As for `run_leader`; `theirs` and the record must hold the elements.
unsafe fn add_host(
    core: &mut Core,
    job: &HostReduce,
    range: Range<usize>,
    theirs: Option<*const u8>,
    record: Option<(u64, usize)>,
) {
    let (dtype, op, count) = (job.dtype, job.op, range.len());
    let (size, wide) = (dtype.size(), accumulated_size(dtype));
    // SAFETY: as promised by the caller.
    unsafe {
        let (own, sums) = (job.data.add(range.start * size), job.sums.add(range.start * wide));
        if wide == size {
            core.reduce_record(record, theirs, own, sums, count, (dtype, op));
            return;
        }
        match theirs {
            Some(theirs) => reduce_partial(dtype, op, theirs, own, Some(sums), count),
            None => widen(dtype, sums, own, count),
        }
        if let Some((record, at)) = record {
            for index in 1..core.board_ranks() {
                let theirs = core.record_of(index, record).add(at);
                reduce_partial(dtype, op, sums, theirs.cast_mut(), Some(sums), count);
            }
        }
        if job.upper.is_none() {
            narrow(dtype, own, sums, count);
        }
    }
}
