//! Sums over slow wires with 8 bits per value: a quarter of the bytes of `f32`, but not exact.
//!
//! Values travel in blocks, each with the scale that its largest value needs. A rank adds its own
//! values as the other ranks read them from the wire, and takes its own part of a result in the
//! same form. So all ranks still have the same bits.

use super::{exchange, part};
use crate::core::Core;
use crate::header::OperationKind;
use crate::reduce::{narrow, widen};
use crate::{Algorithm, CommError, DType, Op};

/// Values that share a scale.
const SCALE_BLOCK: usize = 64;
const SCALE_BYTES: usize = size_of::<f32>();
const BLOCK_BYTES: usize = SCALE_BYTES + SCALE_BLOCK;
/// The level of a block's largest value.
const MAX_LEVEL: f32 = 127.0;
/// Adding this to a float rounds it to the nearest integer, ties to even, and leaves the integer in
/// the lowest bits. For NaN (0 / 0) those bits are 0. Unlike a call to round, it needs no
/// instruction of newer processors.
const ROUNDING_OFFSET: f32 = (3 << 22) as f32;
const SUM: u8 = Op::Sum as u8;
/// Phases of the messages, in their headers.
const WHOLE: u8 = 8;
const PARTS: u8 = 9;
const RESULTS: u8 = 10;

/// True when a reduction can travel as int8. Products and extremes of rounded values would have
/// unbounded errors, and integers are expected to be exact.
pub(super) fn supports(dtype: DType, op: Op) -> bool {
    op == Op::Sum && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Bytes of `count` values on the wire.
fn wire_bytes(count: usize) -> usize {
    count + count.div_ceil(SCALE_BLOCK) * SCALE_BYTES
}

/// All-reduce in place, in one step if `algorithm` is `OneShot`, otherwise by a mesh.
///
/// # Safety
/// `data` must be valid for `count` elements of `dtype` until this returns.
pub(super) async unsafe fn all_reduce(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    dtype: DType,
    algorithm: Algorithm,
) -> Result<(), CommError> {
    let mut wire = std::mem::take(&mut core.wire_buffer);
    // SAFETY: as promised by the caller.
    let result = unsafe {
        match algorithm {
            Algorithm::OneShot => one_shot(core, &mut wire, data, count, dtype).await,
            _ => mesh(core, &mut wire, data, count, dtype).await,
        }
    };
    core.wire_buffer = wire;
    result
}

/// A buffer with one slot of equal length per message.
struct MessageSlots {
    slot_bytes: usize,
}

impl MessageSlots {
    fn new(wire: &mut Vec<u8>, ranks: usize, count: usize) -> Self {
        let slot_bytes = wire_bytes(count);
        wire.resize(wire.len().max(ranks * slot_bytes), 0);
        Self { slot_bytes }
    }

    fn at(&self, rank: usize) -> usize {
        rank * self.slot_bytes
    }
}

/// # Safety
/// As for `all_reduce`.
async unsafe fn one_shot(
    core: &mut Core,
    wire: &mut Vec<u8>,
    data: *mut u8,
    count: usize,
    dtype: DType,
) -> Result<(), CommError> {
    let slots = MessageSlots::new(wire, core.size, count);
    // SAFETY: as promised by the caller.
    unsafe { encode(dtype, data, count, &mut wire[slots.at(core.rank)..]) };
    // SAFETY: `wire` is neither dropped nor moved until the exchange has ended.
    unsafe {
        let start = wire.as_mut_ptr();
        let bytes = wire_bytes(count);
        let own = start.add(slots.at(core.rank)).cast_const();
        let incoming = |rank| Some((start.add(slots.at(rank)), bytes));
        exchange(core, OperationKind::AllReduce, dtype, (SUM, WHOLE), |_| Some((own, bytes)), incoming)
            .await?;
        sum(dtype, data, count, (0..core.size).map(|rank| &wire[slots.at(rank)..]));
    }
    Ok(())
}

/// # Safety
/// As for `all_reduce`.
async unsafe fn mesh(
    core: &mut Core,
    wire: &mut Vec<u8>,
    data: *mut u8,
    count: usize,
    dtype: DType,
) -> Result<(), CommError> {
    let (mine, ranks, size) = (core.rank, core.size, dtype.size());
    let part = |rank| part(count, dtype, rank, ranks);
    let longest = part(0).len();
    // The first half of the slots receives, the second half is sent.
    let slots = MessageSlots::new(wire, 2 * ranks, longest);
    for rank in 0..ranks {
        let part = part(rank);
        // This rank's own part goes to the slot where the other ranks' parts for it arrive.
        let at = slots.at(if rank == mine { mine } else { ranks + rank });
        // SAFETY: parts lie within `count` elements.
        unsafe { encode(dtype, data.add(part.start * size), part.len(), &mut wire[at..]) };
    }
    let own = part(mine);
    // SAFETY: `wire` is neither dropped nor moved until the exchange has ended; parts lie within
    // `count` elements.
    unsafe {
        let start = wire.as_mut_ptr();
        let own_bytes = wire_bytes(own.len());
        let outgoing =
            |rank| Some((start.add(slots.at(ranks + rank)).cast_const(), wire_bytes(part(rank).len())));
        let incoming = |rank| Some((start.add(slots.at(rank)), own_bytes));
        exchange(core, OperationKind::AllReduce, dtype, (SUM, PARTS), outgoing, incoming).await?;
        let own_data = data.add(own.start * size);
        sum(dtype, own_data, own.len(), (0..ranks).map(|rank| &wire[slots.at(rank)..]));
        encode(dtype, own_data, own.len(), &mut wire[slots.at(mine)..]);
        let start = wire.as_mut_ptr();
        let result = start.add(slots.at(mine)).cast_const();
        let incoming = |rank| Some((start.add(slots.at(rank)), wire_bytes(part(rank).len())));
        let outgoing = |_| Some((result, own_bytes));
        exchange(core, OperationKind::AllReduce, dtype, (SUM, RESULTS), outgoing, incoming).await?;
        for rank in 0..ranks {
            let part = part(rank);
            let to = data.add(part.start * size);
            sum(dtype, to, part.len(), std::iter::once(&wire[slots.at(rank)..]));
        }
    }
    Ok(())
}

/// Writes `count` values as blocks to the start of `wire`.
///
/// # Safety
/// `data` must be valid for `count` elements of `dtype`.
unsafe fn encode(dtype: DType, data: *const u8, count: usize, wire: &mut [u8]) {
    let mut values = [0f32; SCALE_BLOCK];
    for (index, block) in wire[..wire_bytes(count)].chunks_mut(BLOCK_BYTES).enumerate() {
        let (scale_bytes, levels) = block.split_at_mut(SCALE_BYTES);
        let values = &mut values[..levels.len()];
        // SAFETY: the block's values lie within `count`.
        unsafe { load(dtype, data.add(index * SCALE_BLOCK * dtype.size()), values) };
        // Without their sign bits, floats are in the order of their bits, and NaN is above
        // infinity.
        let largest = values.iter().fold(0, |largest, value| value.abs().to_bits().max(largest));
        // A NaN or infinite value makes the whole block NaN.
        let finite = largest < f32::INFINITY.to_bits();
        let scale = if finite { f32::from_bits(largest) / MAX_LEVEL } else { f32::NAN };
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        for (level, value) in levels.iter_mut().zip(values.iter()) {
            // A scale so small that it is subnormal is itself rounded, which leaves values above
            // the limit.
            *level = ((value / scale).clamp(-MAX_LEVEL, MAX_LEVEL) + ROUNDING_OFFSET).to_bits() as u8;
        }
    }
}

/// Adds the values in each of `wires`, in order, and writes the `count` sums to `data`.
///
/// # Safety
/// `data` must be valid for `count` elements of `dtype`.
unsafe fn sum<'a>(dtype: DType, data: *mut u8, count: usize, wires: impl Iterator<Item = &'a [u8]> + Clone) {
    let mut sums = [0f32; SCALE_BLOCK];
    for start in (0..count).step_by(SCALE_BLOCK) {
        let sums = &mut sums[..SCALE_BLOCK.min(count - start)];
        let at = start / SCALE_BLOCK * BLOCK_BYTES;
        for (index, wire) in wires.clone().enumerate() {
            let (scale, levels) = wire[at..at + SCALE_BYTES + sums.len()].split_at(SCALE_BYTES);
            let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            for (sum, level) in sums.iter_mut().zip(levels) {
                let value = f32::from(*level as i8) * scale;
                *sum = if index == 0 { value } else { *sum + value };
            }
        }
        // SAFETY: within `count`.
        unsafe { store(dtype, data.add(start * dtype.size()), sums) };
    }
}

/// # Safety
/// `from` must be valid for as many elements as there are values.
unsafe fn load(dtype: DType, from: *const u8, values: &mut [f32]) {
    let to = values.as_mut_ptr().cast::<u8>();
    // SAFETY: as promised by the caller.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(from, to, size_of_val(values)),
            _ => widen(dtype, to, from, values.len()),
        }
    }
}

/// # Safety
/// `to` must be valid for as many elements as there are values.
unsafe fn store(dtype: DType, to: *mut u8, values: &[f32]) {
    let from = values.as_ptr().cast::<u8>();
    // SAFETY: as promised by the caller.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(from, to, size_of_val(values)),
            _ => narrow(dtype, to, from, values.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(values: &[f32]) -> Vec<f32> {
        let mut wire = vec![0; wire_bytes(values.len())];
        let mut back = vec![0f32; values.len()];
        // SAFETY: both hold as many values.
        unsafe {
            encode(DType::F32, values.as_ptr().cast(), values.len(), &mut wire);
            sum(DType::F32, back.as_mut_ptr().cast(), back.len(), std::iter::once(&wire[..]));
        }
        back
    }

    #[test]
    fn a_value_is_off_by_half_a_level_of_its_block_at_most() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i / 64 - 8)).collect();
        for (block, back) in values.chunks(SCALE_BLOCK).zip(there_and_back(&values).chunks(SCALE_BLOCK)) {
            let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            for (value, back) in block.iter().zip(back) {
                assert!((value - back).abs() <= largest / MAX_LEVEL * 0.5001, "{value} came back as {back}");
            }
        }
    }

    #[test]
    fn zeros_stay_zero_and_a_nan_spreads_only_over_its_block() {
        assert!(there_and_back(&[0.0; 70]).iter().all(|value| *value == 0.0));
        for wrong in [f32::NAN, f32::INFINITY] {
            let mut values = [1f32; 2 * SCALE_BLOCK];
            values[3] = wrong;
            let back = there_and_back(&values);
            assert!(back[..SCALE_BLOCK].iter().all(|value| value.is_nan()));
            assert!(back[SCALE_BLOCK..].iter().all(|value| *value == 1.0));
        }
    }
}
