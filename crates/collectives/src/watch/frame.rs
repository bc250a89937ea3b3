//! The frames that watches send to each other.

/// Why a rank gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum AbortReason {
    Lost = 1,
    Stalled,
    Mismatch,
    LinkFailed,
}

impl AbortReason {
    pub(super) fn from_wire(value: u8) -> Self {
        match value {
            2 => Self::Stalled,
            3 => Self::Mismatch,
            4 => Self::LinkFailed,
            _ => Self::Lost,
        }
    }
}

pub(super) const FRAME_BYTES: usize = 8;
pub(super) const BYE: u8 = 1;
pub(super) const HEARTBEAT: u8 = 2;
pub(super) const ABORT: u8 = 3;
pub(super) const PING: u8 = 4;
pub(super) const PONG: u8 = 5;

pub(super) fn frame(kind: u8, by: usize, rank: usize, why: u8) -> [u8; FRAME_BYTES] {
    let (by, rank) = ((by as u16).to_le_bytes(), (rank as u16).to_le_bytes());
    [kind, why, by[0], by[1], rank[0], rank[1], 0, 0]
}
