//! The algorithms of the operations, on raw bytes.

mod board;
mod chain;
mod direct;
mod hierarchical;
mod int8;
mod links;
mod ring;

pub(crate) use links::{exchange, reduce_scatter};

use std::ops::Range;

use serde::Serialize;

use crate::core::Core;
use crate::link::board::Board;
use crate::{CommError, DType, Op, Wire};

/// How an all-reduce is done. All algorithms give the same bits, except as stated for
/// `Hierarchical` and `Ring`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Every rank sends all its data to every rank, and each reduces everything: one step, for
    /// short messages. On one host, messages of 2 MiB and more are reduced as with `Mesh`, directly
    /// from the other ranks' memory where the system allows that.
    OneShot,
    /// Each rank reduces one part of the data, then sends the result to all: two steps, each byte
    /// moves twice.
    Mesh,
    /// Partial sums travel up the ranks and results back down, both at the same time, in pieces.
    /// Only neighbours exchange data, and each direction of their link carries the data once. Like
    /// a ring, but the sum is in rank order.
    Chain,
    /// First inside each host, then between the hosts' lowest ranks as in a chain, then inside the
    /// hosts again. Each byte crosses the wire between two hosts once in each direction, however
    /// many ranks the hosts have. Needs shared memory inside the hosts; a rank without it counts as
    /// a host. The sum is in rank order if each host's ranks are consecutive, otherwise host by
    /// host.
    Hierarchical,
    /// Partial sums of parts travel around a ring of ranks, half of the data in each direction,
    /// followed by the results. Only neighbours exchange data, and each direction of their links
    /// carries `(n - 1) / n` of it. The sum of each part starts at another rank, so floats get
    /// other bits than with the other algorithms; for floats a ring is used only if forced.
    Ring,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 5] = [Self::OneShot, Self::Mesh, Self::Chain, Self::Hierarchical, Self::Ring];

    /// The name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::Mesh => "mesh",
            Self::Chain => "chain",
            Self::Hierarchical => "hierarchical",
            Self::Ring => "ring",
        }
    }

    /// All names, separated by commas.
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

/// Shorter messages are not sent as int8: their time is latency.
const INT8_BYTES: usize = 1 << 10;
/// A mesh all-reduce processes blocks of this length, so that the results of its first step are
/// still in the cache in the second.
const MESH_BLOCK_BYTES: usize = 1 << 20;
/// Parts start on cache lines of the data.
const PART_ALIGN_BYTES: usize = 64;

/// The part of `count` elements that `rank` of `size` reduces.
fn part(count: usize, dtype: DType, rank: usize, size: usize) -> Range<usize> {
    let align = PART_ALIGN_BYTES / dtype.size();
    let each = count.div_ceil(size).next_multiple_of(align);
    (each * rank).min(count)..(each * (rank + 1)).min(count)
}

/// True when an all-reduce travels as int8.
fn uses_int8(core: &Core, bytes: usize, (dtype, op): (DType, Op)) -> bool {
    let suits = core.wire == Wire::Int8 && bytes >= INT8_BYTES && int8::supports(dtype, op);
    suits && core.group_board().is_none()
}

/// True when an all-reduce reads directly from the other ranks' memory, provided that the ranks
/// can.
fn may_read_directly(core: &Core, bytes: usize, algorithm: Algorithm) -> bool {
    let suits = bytes >= direct::MIN_BYTES && matches!(algorithm, Algorithm::OneShot | Algorithm::Mesh);
    suits && core.size > 1 && core.group_board().is_some()
}

/// The algorithm that an all-reduce actually uses if `chosen` was chosen. Int8 values travel in one
/// step or by a mesh, and direct reads are a mesh too. Whether ranks can read each other's memory
/// is known only after the first attempt.
pub(crate) fn effective(core: &Core, bytes: usize, what: (DType, Op), chosen: Algorithm) -> Algorithm {
    let by_mesh = match chosen {
        Algorithm::OneShot => core.reads_peers == Some(true) && may_read_directly(core, bytes, chosen),
        _ => uses_int8(core, bytes, what),
    };
    if by_mesh { Algorithm::Mesh } else { chosen }
}

/// All-reduce in place, with the algorithm that [`effective`] gives.
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
    if uses_int8(core, bytes, (dtype, op)) {
        // SAFETY: as promised by the caller.
        return unsafe { int8::all_reduce(core, data, count, dtype, algorithm).await };
    }
    if may_read_directly(core, bytes, algorithm) && core.can_read_peers().await? {
        // SAFETY: as promised by the caller.
        return unsafe { direct::all_reduce(core, data, count, (dtype, op)).await };
    }
    let record_bytes = core.group_board().map(Board::record_bytes);
    match (algorithm, record_bytes) {
        // SAFETY: as promised by the caller.
        (Algorithm::OneShot, Some(bytes)) => unsafe {
            board::one_shot(core, data, count, (dtype, op), bytes).await
        },
        // SAFETY: as promised by the caller.
        (Algorithm::Mesh, Some(bytes)) => unsafe { board::mesh(core, data, count, (dtype, op), bytes).await },
        // SAFETY: as promised by the caller.
        (Algorithm::OneShot, None) => unsafe { links::one_shot(core, data, count, dtype, op).await },
        (Algorithm::Mesh, None) => {
            let block = MESH_BLOCK_BYTES / dtype.size();
            for start in (0..count).step_by(block) {
                // SAFETY: the block lies within `count` elements.
                unsafe {
                    let data = data.add(start * dtype.size());
                    links::mesh(core, data, block.min(count - start), dtype, op).await?;
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
