//! The operations over the links between pairs of ranks.

use super::part;
use crate::core::Core;
use crate::header::OperationKind;
use crate::{CommError, DType, Op};

/// # Safety
/// As for `all_reduce`.
pub(super) async unsafe fn one_shot(
    core: &mut Core,
    data: *mut u8,
    count: usize,
    dtype: DType,
    op: Op,
) -> Result<(), CommError> {
    let length = count * dtype.size();
    let mine = core.rank;
    let header = core.header(OperationKind::AllReduce, dtype, op as u8, 0, length);
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
pub(super) async unsafe fn mesh(
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
        let out = core.header(OperationKind::AllReduce, dtype, op as u8, 1, theirs.len() * size);
        // SAFETY: parts lie within `count` elements.
        unsafe { core.queue_send(peer, out, data.add(theirs.start * size)) };
        let inc = core.header(OperationKind::AllReduce, dtype, op as u8, 1, own.len() * size);
        core.queue_receive(peer, inc, std::ptr::null_mut());
    }
    // SAFETY: as promised by the caller.
    unsafe {
        let out = data.add(own.start * size);
        core.exchange_reduce(out, out, own.len() * size, (dtype, op), false).await?;
    }
    let ranks = core.size;
    let part_bytes = |rank| {
        let part = part(count, dtype, rank, ranks);
        // SAFETY: as above.
        (unsafe { data.add(part.start * size) }, part.len() * size)
    };
    let outgoing = |_| Some((part_bytes(mine).0.cast_const(), part_bytes(mine).1));
    // SAFETY: as promised by the caller.
    unsafe {
        exchange(core, OperationKind::AllReduce, dtype, (op as u8, 2), outgoing, |peer| {
            Some(part_bytes(peer))
        })
        .await
    }
}

/// Reduce-scatter: `send` holds all parts, `out` gets this rank's part.
///
/// # Safety
/// `send` must be valid for the sum of `counts` elements and `out` for this rank's, until this
/// returns.
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
    let inc = core.header(OperationKind::ReduceScatter, dtype, op as u8, 0, own);
    let mut at = 0;
    let mut own_at = 0;
    for (peer, count) in counts.iter().enumerate() {
        if peer == core.rank {
            own_at = at;
        } else {
            let outgoing = core.header(OperationKind::ReduceScatter, dtype, op as u8, 0, count * size);
            // SAFETY: within the sum of `counts`.
            unsafe { core.queue_send(peer, outgoing, send.add(at)) };
            core.queue_receive(peer, inc, std::ptr::null_mut());
        }
        at += count * size;
    }
    // SAFETY: as promised by the caller.
    unsafe { core.exchange_reduce(out, send.add(own_at), own, (dtype, op), false).await }
}

/// At most one message to and one from each peer; all other operations are made of it. `outgoing`
/// and `incoming` return the address and length of a peer's bytes, if there are any. `op` and
/// `phase` tell the steps of an operation apart; most operations have one step.
///
/// # Safety
/// The addresses must be valid until this returns.
pub(crate) async unsafe fn exchange(
    core: &mut Core,
    kind: OperationKind,
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
