//! A queue pair's options, and the address that its peer needs.

use super::window::RemoteWindow;
use crate::gid::Gid;
use serde::{Deserialize, Serialize};

/// A connection's service type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Connection {
    /// Unreliable: a lost message is not reported. The only type of Apple's devices.
    Uc,
    /// Reliable: a message is repeated until acknowledged, or an error is reported. This crate uses
    /// RDMA WRITE with this type only.
    Rc,
}

/// A queue pair's options.
#[derive(Debug, Clone, Copy)]
pub struct QueueOptions {
    /// The service type.
    pub connection: Connection,
    /// Bytes of a slot, in both rings.
    pub slot_bytes: usize,
    /// Send slots, the limit on outstanding sends. Lowered to the device's limit.
    pub sends: u32,
    /// Receive slots. Lowered to the device's limit.
    pub receives: u32,
    /// Size of the window that the peer may write by RDMA WRITE, in bytes; 0 for none.
    pub window_bytes: usize,
}

/// What the peer needs to connect to a queue pair. The caller sends it by other means, such as TCP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueAddress {
    /// Queue pair number.
    pub qpn: u32,
    /// The number of the first packet that the queue pair sends.
    pub psn: u32,
    /// The port's address.
    pub gid: Gid,
    /// The port's local identifier (InfiniBand).
    pub lid: u16,
    /// The port's active path MTU in bytes. Both sides use the smaller of the two.
    pub mtu_bytes: u32,
    /// The queue pair's window, if it has one.
    pub window: Option<RemoteWindow>,
}
