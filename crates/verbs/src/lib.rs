//! RDMA verbs by dlopen: safe devices, memory regions, queue pairs and completions.
//!
//! `libibverbs.so.1` (Linux) or `librdma.dylib` (macOS 26.2 and later, Thunderbolt 5) is loaded when it is first used;
//! without it every call says so and nothing else breaks. Three layers, each usable alone:
//!
//! - [`DeviceList`], [`Context`], [`QueuePair`]: the verbs, with states as types and memory that cannot be misused.
//! - [`Channel`]: a stream of bytes to a peer over one or more links, with credits, so that nothing is lost on
//!   unreliable connections for want of a posted receive, and with numbers, so that a loss is an error.
//! - [`doctor`]: what is there, what is missing, and what to do.
//!
//! ```no_run
//! use std::{net::TcpStream, time::Duration};
//! use thunder_verbs::{Abort, Channel, ChannelOptions, Context, Link, Mode};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let link = Link { context: Context::open("rdma_en3")?, facing: None };
//! let mut side_channel = TcpStream::connect("192.168.0.2:7000")?;
//! let abort = Abort::new(); // raised by whoever watches the peer: devices do not notice its death
//! let pending = Channel::prepare(&[link], ChannelOptions::new(Mode::Uc))?;
//! let mut channel = pending.handshake(&mut side_channel, abort.clone())?;
//! channel.send_all(b"hello", Duration::from_secs(2))?;
//! # Ok(()) }
//! ```
//!
//! Architecture invariant: this crate knows bytes and links, no ranks, groups or tensors, and starts no thread.

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
    Abort, Armed, Channel, ChannelAddress, ChannelOptions, LaneAddress, Link, Mode, Pending, Readiness,
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
