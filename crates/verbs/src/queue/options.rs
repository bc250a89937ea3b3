//! What a queue pair is made with, and what its peer must know.

use super::window::RemoteWindow;
use crate::gid::Gid;
use serde::{Deserialize, Serialize};

/// The service of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Connection {
    /// Unreliable: what is lost is lost in silence. All that Apple offers.
    Uc,
    /// Reliable: repeated until acknowledged, or an error. RDMA WRITE needs it here.
    Rc,
}

/// What a queue pair is made with.
#[derive(Debug, Clone, Copy)]
pub struct QueueOptions {
    /// Its service.
    pub connection: Connection,
    /// Bytes of a slot, in both rings.
    pub slot_bytes: usize,
    /// Send slots; at most as many sends are outstanding. Lowered to what the device takes.
    pub sends: u32,
    /// Receive slots. Lowered to what the device takes.
    pub receives: u32,
    /// Bytes that the peer may write into by RDMA WRITE; 0 for none.
    pub window_bytes: usize,
}

/// What the peer must know of a queue pair, to be sent to it by other means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueAddress {
    /// Queue pair number.
    pub qpn: u32,
    /// The number of the first packet that it sends.
    pub psn: u32,
    /// The address of its port.
    pub gid: Gid,
    /// The port's local identifier (InfiniBand).
    pub lid: u16,
    /// The port's active path MTU; the smaller of both sides' is used.
    pub mtu_bytes: u32,
    /// Its window, if it has one.
    pub window: Option<RemoteWindow>,
}
