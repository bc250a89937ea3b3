//! RDMA verbs by dlopen: safe devices, memory regions, queue pairs and completions.
//!
//! `libibverbs.so.1` (Linux) or `librdma.dylib` (macOS 26.2 and later, Thunderbolt 5) is loaded on
//! first use. Without it, every call returns an error that says so. Three layers, each usable
//! alone:
//!
//! - [`DeviceList`], [`Context`], [`QueuePair`]: safe verbs. A queue pair's state is its type, and
//!   memory that the device may use cannot be read, written or freed.
//! - [`Channel`]: a stream of bytes to a peer over one or more cables. Credits ensure that a
//!   receive is posted for each message, and frame numbers turn a loss into an error.
//! - [`doctor`]: reports the devices, what is missing, and what to do.
//!
//! ```no_run
//! use std::{net::TcpStream, time::Duration};
//! use thunder_verbs::{Abort, Cable, Channel, ChannelOptions, Context, Mode};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cable = Cable { context: Context::open("rdma_en3")?, local_address: None };
//! let mut side_channel = TcpStream::connect("192.168.0.2:7000")?;
//! // Devices do not notice a dead peer: call `raise` on this when the peer dies.
//! let abort = Abort::new();
//! let prepared = Channel::prepare(&[cable], ChannelOptions::new(Mode::Uc))?;
//! let mut channel = prepared.handshake(&mut side_channel, abort.clone())?;
//! channel.send_all(b"hello", Duration::from_secs(2))?;
//! # Ok(()) }
//! ```
//!
//! Architecture invariant: this crate knows bytes and cables, but no ranks, groups or tensors. It
//! starts no threads.

mod channel;
mod device;
pub mod doctor;
mod error;
pub mod gid;
mod interface;
mod library;
mod memory;
mod profile;
mod queue;
mod random;
mod status;
pub mod sys;

pub use channel::{
    Abort, Cable, Channel, ChannelAddress, ChannelOptions, Connected, LaneAddress, Mode, Prepared, Readiness,
};
pub use device::{Context, DeviceLimits, DeviceList, LinkLayer, LocalPort, PortInfo, PortState};
pub use error::{Error, Result};
pub use memory::ProtectionDomain;
pub use profile::{FRAME_BYTES, Profile};
pub use queue::{
    Connection, Init, QueueAddress, QueueOptions, QueuePair, ReadyToReceive, ReadyToSend, Received,
    RemoteWindow, Reset, SendSlot, Window,
};
pub use status::WcStatus;
