//! All-reduce of long messages among ranks of one host that can read each other's memory: a mesh
//! that bypasses the board.
//!
//! Each rank reduces its part of a block directly from the other ranks' data, then reads the other
//! ranks' results from where they reduced them. The board only shows how far each rank has come.

use super::{PART_ALIGN_BYTES, part};
use crate::core::Core;
use crate::header::OperationKind;
use crate::reduce::reduce;
use crate::{CommError, DType, Op};

/// From this length on, a system call per part costs less than writing everything to the board.
pub(super) const MIN_BYTES: usize = 2 << 20;
/// Bytes that a rank reads from the others before it reduces them; fits the second-level cache.
const READ_BYTES: usize = 512 << 10;
/// Phases of the records, in their headers.
const ADDRESSES: u8 = 13;
const REDUCED: u8 = 14;
const READ: u8 = 15;

/// # Safety
/// `data` must be valid for `count` elements of `dtype` until this returns, and
/// `core.can_read_peers()` must have returned true.
pub(super) async unsafe fn all_reduce(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    (dtype, op): (DType, Op),
) -> Result<(), CommError> {
    let (size, mine, ranks) = (dtype.size(), core.rank, core.size);
    let header =
        |core: &Core, phase| core.header(OperationKind::AllReduce, dtype, op as u8, phase, count * size);
    let address_header = header(core, ADDRESSES);
    let record = core.post_words(&address_header, [data as u64, 0]);
    core.await_record(record, &address_header).await?;
    let addresses: Vec<u64> = (0..ranks).map(|rank| core.words_of(rank, record)[0]).collect();

    // A multiple of the parts' alignment, so that no part is longer.
    let share_bytes = (READ_BYTES / (ranks - 1)).next_multiple_of(PART_ALIGN_BYTES);
    let share = share_bytes / size;
    // A rank's part of a block: its first byte and its length.
    let part_of = |start: usize, rank: usize| {
        let part = part((ranks * share).min(count - start), dtype, rank, ranks);
        ((start + part.start) * size, part.len() * size)
    };
    let mut buffer = std::mem::take(&mut core.wire_buffer);
    buffer.resize(buffer.len().max((ranks - 1) * share_bytes), 0);
    let (reduced, done) = (header(core, REDUCED), header(core, READ));
    let mut sources = Vec::with_capacity(ranks);
    let mut before = None;
    // A block's results are read after this rank has reduced the next block; those of the last
    // block at the end.
    for block in (0..count).step_by(ranks * share).map(Some).chain([None]) {
        let mut posted = None;
        if let Some(start) = block {
            let part = part_of(start, mine);
            // SAFETY: parts lie within `count` elements and are no longer than a share, and the
            // buffer holds a share per other rank.
            unsafe { reduce_part(core, data, &addresses, part, &mut buffer, &mut sources, (dtype, op))? };
            posted = Some((start, core.post_words(&reduced, [0; 2])));
        }
        if let Some((start, record)) = std::mem::replace(&mut before, posted) {
            core.await_record(record, &reduced).await?;
            // SAFETY: as promised by the caller.
            unsafe { read_results(core, data, &addresses, |rank| part_of(start, rank))? };
        }
    }
    core.wire_buffer = buffer;
    // The other ranks read this rank's data until they have posted that they are done.
    let record = core.post_words(&done, [0; 2]);
    core.await_record(record, &done).await
}

/// Reads the other ranks' elements of this rank's part, `bytes` long from byte `at` on, and reduces
/// them all into `data`.
///
/// # Safety
/// `data` must be valid for the part, and `buffer` hold its bytes once per other rank.
unsafe fn reduce_part(
    core: &mut Core,
    data: *mut u8,
    addresses: &[u64],
    (at, bytes): (usize, usize),
    buffer: &mut [u8],
    sources: &mut Vec<*const u8>,
    (dtype, op): (DType, Op),
) -> Result<(), CommError> {
    sources.clear();
    let mut free = buffer.as_mut_ptr();
    for (rank, address) in addresses.iter().enumerate() {
        if rank == core.rank {
            // SAFETY: as promised by the caller.
            sources.push(unsafe { data.add(at) }.cast_const());
            continue;
        }
        // SAFETY: as promised by the caller.
        unsafe { core.read_peer(rank, address + at as u64, free, bytes)? };
        sources.push(free.cast_const());
        free = free.wrapping_add(bytes);
    }
    // SAFETY: as above, for each source.
    unsafe { reduce(dtype, op, data.add(at), sources, bytes / dtype.size()) };
    Ok(())
}

/// Reads the other ranks' results of a block.
///
/// # Safety
/// `data` must be valid for all parts.
unsafe fn read_results(
    core: &mut Core,
    data: *mut u8,
    addresses: &[u64],
    part_of: impl Fn(usize) -> (usize, usize),
) -> Result<(), CommError> {
    let mine = core.rank;
    for (rank, address) in addresses.iter().enumerate().filter(|(rank, _)| *rank != mine) {
        let (at, bytes) = part_of(rank);
        // SAFETY: as promised by the caller.
        unsafe { core.read_peer(rank, address + at as u64, data.add(at), bytes)? };
    }
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::{TransportChoice, local};

    #[test]
    fn ranks_find_out_that_they_can_read_each_others_memory() {
        for (transport, expected) in [(TransportChoice::Shm, Some(true)), (TransportChoice::Tcp, None)] {
            let known = local::run(3, transport, |mut group| {
                group.all_reduce(&mut vec![1f32; MIN_BYTES / 4 - 1], Op::Sum)?;
                let before = group.core.reads_peers;
                group.all_reduce(&mut vec![1f32; MIN_BYTES / 4], Op::Sum)?;
                Ok::<_, CommError>((before, group.core.reads_peers))
            });
            assert!(known.unwrap().into_iter().all(|known| known == Ok((None, expected))));
        }
    }
}
