//! All-reduce on a host's board: every rank writes its data once, and the others reduce it in
//! place.

use super::part;
use crate::core::Core;
use crate::header::{Header, OperationKind};
use crate::{CommError, DType, Op};

/// A rank posts a long message in pieces of half its length, within these bounds, so that the other
/// ranks process one piece while it writes the next.
const PIECE_BYTES: std::ops::RangeInclusive<usize> = 4 << 10..=16 << 10;
/// Phases of the records, in their headers.
const WHOLE: u8 = 3;
const PARTS: u8 = 4;
const RESULTS: u8 = 5;

/// Every rank reduces everything.
///
/// # Safety
/// `data` must be valid for `count` elements of `dtype` until this returns.
pub(super) async unsafe fn one_shot(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    (dtype, op): (DType, Op),
    record_bytes: usize,
) -> Result<(), CommError> {
    let length = count * dtype.size();
    let header = core.header(OperationKind::AllReduce, dtype, op as u8, WHOLE, length);
    let half = (length / 2).next_multiple_of(64);
    let piece = half.clamp(*PIECE_BYTES.start(), *PIECE_BYTES.end()).min(record_bytes);
    let mut posted = 0;
    let mut ahead = None;
    for start in (0..length).step_by(piece) {
        let bytes = |start: usize| piece.min(length - start);
        let mut post = |core: &mut Core| {
            let (record, to) = core.take_record(bytes(posted));
            // SAFETY: the piece lies within `length` bytes, and the record holds as many.
            unsafe { std::ptr::copy_nonoverlapping(data.add(posted), to, bytes(posted)) };
            core.post_record(record, &header);
            posted += bytes(posted);
            record
        };
        let record = ahead.take().unwrap_or_else(|| post(core));
        if start + piece < length {
            ahead = Some(post(core));
        }
        core.await_record(record, &header).await?;
        // SAFETY: as above; all ranks have posted the record.
        unsafe {
            let out = data.add(start);
            core.reduce_record(Some((record, 0)), None, out, out, bytes(start) / dtype.size(), (dtype, op));
        }
    }
    Ok(())
}

/// Every rank reduces its part of each block and posts the result for the others.
///
/// # Safety
/// As for `one_shot`.
pub(super) async unsafe fn mesh(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    (dtype, op): (DType, Op),
    record_bytes: usize,
) -> Result<(), CommError> {
    let (size, mine, ranks) = (dtype.size(), core.rank, core.size);
    let parts = core.header(OperationKind::AllReduce, dtype, op as u8, PARTS, count * size);
    let results = core.header(OperationKind::AllReduce, dtype, op as u8, RESULTS, count * size);
    let block = record_bytes / size;
    let mut ahead = None;
    for start in (0..count).step_by(block) {
        let record = ahead.take().unwrap_or_else(|| {
            // SAFETY: the block lies within `count` elements.
            unsafe { post_block(core, data.add(start * size), block.min(count - start), dtype, &parts) }
        });
        let next = start + block;
        if next < count {
            // SAFETY: as above.
            ahead = Some(unsafe {
                post_block(core, data.add(next * size), block.min(count - next), dtype, &parts)
            });
        }
        let count = block.min(count - start);
        let part_of = |rank| {
            let part = part(count, dtype, rank, ranks);
            (part.start * size, part.len() * size)
        };
        core.await_record(record, &parts).await?;
        let (at, bytes) = part_of(mine);
        let (result, to) = core.take_record(part_of(0).1);
        // SAFETY: parts lie within the block, and no part is longer than the first.
        unsafe {
            let own = data.add(start * size + at);
            core.reduce_record(Some((record, at)), None, own, own, bytes / size, (dtype, op));
            std::ptr::copy_nonoverlapping(own, to, bytes);
        }
        core.post_record(result, &results);
        core.await_record(result, &results).await?;
        for rank in (0..ranks).filter(|rank| *rank != mine) {
            let (at, bytes) = part_of(rank);
            // SAFETY: as above; all ranks have posted the result.
            unsafe {
                let to = data.add(start * size + at);
                std::ptr::copy_nonoverlapping(core.record_of(rank, result), to, bytes);
            }
        }
    }
    Ok(())
}

/// Posts a block without this rank's own part. Returns the record's number.
///
/// # Safety
/// `data` must be valid for `count` elements.
unsafe fn post_block(core: &mut Core, data: *const u8, count: usize, dtype: DType, header: &Header) -> u64 {
    let size = dtype.size();
    let own = part(count, dtype, core.rank, core.size);
    let (record, to) = core.take_record(count * size);
    // SAFETY: both ranges lie within `count` elements, which the record holds.
    unsafe {
        std::ptr::copy_nonoverlapping(data, to, own.start * size);
        let (from, to) = (data.add(own.end * size), to.add(own.end * size));
        std::ptr::copy_nonoverlapping(from, to, (count - own.end) * size);
    }
    core.post_record(record, header);
    record
}
