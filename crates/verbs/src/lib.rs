//! RDMA verbs by dlopen: safe devices, memory regions, queue pairs and completions.

mod channel;
mod device;
mod error;
pub mod gid;
mod interface;
mod library;
mod memory;
mod profile;
mod queue;
pub mod sys;

pub use channel::{
    Abort, Armed, Channel, ChannelAddress, ChannelOptions, LaneAddress, Link, Mode, Pending, Readiness,
};
pub use device::{Context, DeviceLimits, DeviceList, LinkLayer, LocalPort, PortInfo, PortState};
pub use error::{Error, Result, WcStatus};
pub use memory::{MemoryRegion, ProtectionDomain};
pub use profile::{FRAME_BYTES, Profile};
pub use queue::{
    Connection, Init, QueueAddress, QueueOptions, QueuePair, ReadyToReceive, ReadyToSend, Received,
    RemoteWindow, Reset, SendSlot, Window,
};

/// A random number from the system.
pub(crate) fn random_u32() -> Result<u32> {
    getrandom::u32().map_err(|source| Error::Handshake { reason: format!("no random number: {source}") })
}
