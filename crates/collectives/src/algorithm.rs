//! The operations over links, in terms of bytes.

mod board;
mod chain;
mod direct;
mod hierarchical;
mod int8;
mod ring;

use std::ops::Range;

use serde::Serialize;

use crate::core::Core;
use crate::header::Kind;
use crate::link::board::Board;
use crate::{CommError, DType, Op};

/// How an all-reduce is done. All give the same bits, but for what `Hierarchical` and `Ring` say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Everyone sends everything to everyone, and reduces it all: one step, for short messages. On one host, messages of 2 MiB
    /// and more are reduced as by `Mesh`, straight from the others' memory where the system allows that.
    OneShot,
    /// Each rank reduces one part of the data, then sends the result to all: two steps, each byte moves twice.
    Mesh,
    /// Partial sums travel up the ranks and results down again, both at the same time, in pieces: only neighbours talk, and
    /// each direction of their link carries the data once. A ring that keeps the sum in rank order.
    Chain,
    /// First inside each host, then between the hosts' lowest ranks as in a chain, then inside the hosts again: each byte
    /// crosses the wire between two hosts once in each direction, however many ranks they have. Needs shared memory inside
    /// the hosts; where a rank has none, it counts as a host. In rank order where each host's ranks are consecutive,
    /// otherwise host by host.
    Hierarchical,
    /// Parts of sums travel around a ring of ranks, half of them each way, and results after them: only neighbours talk, and
    /// each direction of their links carries `(n - 1) / n` of the data. The sum of each part starts at another rank, so floats
    /// get other bits than by the other algorithms; for them it is used only when it is forced.
    Ring,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::OneShot, Self::Mesh, Self::Chain, Self::Hierarchical, Self::Ring];

    /// The name by which it is forced and printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::Mesh => "mesh",
            Self::Chain => "chain",
            Self::Hierarchical => "hierarchical",
            Self::Ring => "ring",
        }
    }

    /// All names, as a list for people.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| format!("unknown algorithm {name:?}: use {}", Self::names()))
    }
}

/// How the values of an all-reduce travel. All ranks of a group must have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// As they are.
    #[default]
    Exact,
    /// Sums of floats of 1 KiB and more as 8-bit levels with an `f32` scale per 64 values, except where all ranks share
    /// memory: a quarter of the bytes of `f32`, for wires slower than some 10 Gbit/s. Each rank's value is off by at most
    /// 1/254 of the largest in its block, and so is the sum once more if it is done in parts. The result has the same bits on
    /// all ranks.
    Int8,
}

impl std::str::FromStr for Wire {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "exact" => Ok(Self::Exact),
            "int8" => Ok(Self::Int8),
            _ => Err(format!("unknown wire format {name:?}: use exact or int8")),
        }
    }
}

/// Shorter messages cost a latency, not their bytes.
const INT8_BYTES: usize = 1 << 10;
/// A mesh all-reduce does this much at a time, so that what its first step leaves is still in the cache in the second.
const MESH_BLOCK_BYTES: usize = 1 << 20;
/// Parts start on cache lines of the data.
const PART_ALIGN_BYTES: usize = 64;

/// The part of `count` elements that `rank` of `size` reduces.
fn part(count: usize, dtype: DType, rank: usize, size: usize) -> Range<usize> {
    let align = PART_ALIGN_BYTES / dtype.size();
    let each = count.div_ceil(size).next_multiple_of(align);
    (each * rank).min(count)..(each * (rank + 1)).min(count)
}

/// Whether an all-reduce travels in 8 bits.
fn is_rounded(core: &Core, bytes: usize, (dtype, op): (DType, Op)) -> bool {
    let suits = core.wire == Wire::Int8 && bytes >= INT8_BYTES && int8::suits(dtype, op);
    suits && core.board_of_all().is_none()
}

/// Whether an all-reduce goes straight from memory to memory, if the ranks can read each other's.
fn is_direct(core: &Core, bytes: usize, algorithm: Algorithm) -> bool {
    let suits = bytes >= direct::FROM_BYTES && matches!(algorithm, Algorithm::OneShot | Algorithm::Mesh);
    suits && core.size > 1 && core.board_of_all().is_some()
}

/// What an all-reduce for which `chosen` was chosen is done by. Rounded values travel in one step or by a mesh, and straight
/// from memory is a mesh too; whether ranks can read it is known once they have tried.
pub(crate) fn carried_out(core: &Core, bytes: usize, what: (DType, Op), chosen: Algorithm) -> Algorithm {
    let by_mesh = match chosen {
        Algorithm::OneShot => core.reads_mates == Some(true) && is_direct(core, bytes, chosen),
        _ => is_rounded(core, bytes, what),
    };
    if by_mesh { Algorithm::Mesh } else { chosen }
}

/// All-reduce in place, by what [`carried_out`] says.
///
/// # Safety
/// `data` must be valid for `count` elements of `dtype` until this returns.
pub(crate) async unsafe fn all_reduce(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    (dtype, op): (DType, Op),
    algorithm: Algorithm,
) -> Result<(), CommError> {
    let bytes = count * dtype.size();
    if is_rounded(core, bytes, (dtype, op)) {
        // SAFETY: as promised by the caller.
        return unsafe { int8::all_reduce(core, data, count, dtype, algorithm).await };
    }
    if is_direct(core, bytes, algorithm) && core.reads_mates().await? {
        // SAFETY: as promised by the caller.
        return unsafe { direct::all_reduce(core, data, count, (dtype, op)).await };
    }
    let record_bytes = core.board_of_all().map(Board::record_bytes);
    match (algorithm, record_bytes) {
        // SAFETY: as promised by the caller.
        (Algorithm::OneShot, Some(bytes)) => unsafe {
            board::one_shot(core, data, count, (dtype, op), bytes).await
        },
        // SAFETY: as promised by the caller.
        (Algorithm::Mesh, Some(bytes)) => unsafe { board::mesh(core, data, count, (dtype, op), bytes).await },
        // SAFETY: as promised by the caller.
        (Algorithm::OneShot, None) => unsafe { one_shot(core, data, count, dtype, op).await },
        (Algorithm::Mesh, None) => {
            let block = MESH_BLOCK_BYTES / dtype.size();
            for start in (0..count).step_by(block) {
                // SAFETY: the block lies within `count` elements.
                unsafe {
                    let data = data.add(start * dtype.size());
                    mesh(core, data, block.min(count - start), dtype, op).await?;
                }
            }
            Ok(())
        }
        // SAFETY: as promised by the caller.
        (Algorithm::Chain, _) => unsafe { chain::all_reduce(core, data, count, dtype, op).await },
        // SAFETY: as promised by the caller.
        (Algorithm::Hierarchical, _) => unsafe {
            hierarchical::all_reduce(core, data, count, (dtype, op)).await
        },
        // SAFETY: as promised by the caller.
        (Algorithm::Ring, _) => unsafe { ring::all_reduce(core, data, count, (dtype, op)).await },
    }
}

/// # Safety
/// As for `all_reduce`.
async unsafe fn one_shot(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    dtype: DType,
    op: Op,
) -> Result<(), CommError> {
    let length = count * dtype.size();
    let mine = core.rank;
    let header = core.header(Kind::AllReduce, dtype, op as u8, 0, length);
    for peer in (0..core.size).filter(|peer| *peer != mine) {
        // SAFETY: as promised by the caller.
        unsafe { core.queue_send(peer, header, data) };
        core.queue_receive(peer, header, std::ptr::null_mut());
    }
    // SAFETY: as promised by the caller.
    unsafe { core.exchange_reduce(data, data, length, (dtype, op), true).await }
}

/// # Safety
/// As for `all_reduce`.
async unsafe fn mesh(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    dtype: DType,
    op: Op,
) -> Result<(), CommError> {
    let (mine, size) = (core.rank, dtype.size());
    let own = part(count, dtype, mine, core.size);
    for peer in (0..core.size).filter(|peer| *peer != mine) {
        let theirs = part(count, dtype, peer, core.size);
        let out = core.header(Kind::AllReduce, dtype, op as u8, 1, theirs.len() * size);
        // SAFETY: parts lie within `count` elements.
        unsafe { core.queue_send(peer, out, data.add(theirs.start * size)) };
        let inc = core.header(Kind::AllReduce, dtype, op as u8, 1, own.len() * size);
        core.queue_receive(peer, inc, std::ptr::null_mut());
    }
    // SAFETY: as promised by the caller.
    unsafe {
        let out = data.add(own.start * size);
        core.exchange_reduce(out, out, own.len() * size, (dtype, op), false).await?;
    }
    let ranks = core.size;
    let place = |rank| {
        let part = part(count, dtype, rank, ranks);
        // SAFETY: as above.
        (unsafe { data.add(part.start * size) }, part.len() * size)
    };
    let outgoing = |_| Some((place(mine).0.cast_const(), place(mine).1));
    // SAFETY: as promised by the caller.
    unsafe { exchange(core, Kind::AllReduce, dtype, (op as u8, 2), outgoing, |peer| Some(place(peer))).await }
}

/// Reduce-scatter: `send` holds all parts, `out` gets this rank's.
///
/// # Safety
/// `send` must be valid for the sum of `counts` elements and `out` for this rank's, until this returns.
pub(crate) async unsafe fn reduce_scatter(
    core: &mut Core,
    send: *const u8,
    out: *mut u8,
    counts: &[usize],
    dtype: DType,
    op: Op,
) -> Result<(), CommError> {
    let size = dtype.size();
    let own = counts[core.rank] * size;
    let inc = core.header(Kind::ReduceScatter, dtype, op as u8, 0, own);
    let mut at = 0;
    let mut own_at = 0;
    for (peer, count) in counts.iter().enumerate() {
        if peer == core.rank {
            own_at = at;
        } else {
            let outgoing = core.header(Kind::ReduceScatter, dtype, op as u8, 0, count * size);
            // SAFETY: within the sum of `counts`.
            unsafe { core.queue_send(peer, outgoing, send.add(at)) };
            core.queue_receive(peer, inc, std::ptr::null_mut());
        }
        at += count * size;
    }
    // SAFETY: as promised by the caller.
    unsafe { core.exchange_reduce(out, send.add(own_at), own, (dtype, op), false).await }
}

/// One message to and one from each peer: what all other operations are made of. `outgoing` and `incoming` say where a
/// peer's bytes lie, if there are any. `op` and `phase` tell the steps of an operation apart; most have one.
///
/// # Safety
/// The places must be valid until this returns.
pub(crate) async unsafe fn exchange(
    core: &mut Core,
    kind: Kind,
    dtype: DType,
    (op, phase): (u8, u8),
    outgoing: impl Fn(usize) -> Option<(*const u8, usize)>,
    incoming: impl Fn(usize) -> Option<(*mut u8, usize)>,
) -> Result<(), CommError> {
    let mine = core.rank;
    for peer in (0..core.size).filter(|peer| *peer != mine) {
        if let Some((data, length)) = outgoing(peer) {
            let header = core.header(kind, dtype, op, phase, length);
            // SAFETY: as promised by the caller.
            unsafe { core.queue_send(peer, header, data) };
        }
        if let Some((data, length)) = incoming(peer) {
            let header = core.header(kind, dtype, op, phase, length);
            core.queue_receive(peer, header, data);
        }
    }
    // SAFETY: as promised by the caller.
    unsafe { core.exchange().await }
}
