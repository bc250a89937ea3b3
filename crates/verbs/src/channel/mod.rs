//! A stream of bytes between two ranks over one or more RDMA links, without a copy more than needed, without
//! allocation once it runs, and without ever blocking unless asked to.
//!
//! What is written is cut into frames, one to a slot. Short writes go over a lane with slots of 4 KiB, long ones over
//! a lane per link with long slots, in turns. A frame is sent only into a slot that the peer is known to have free
//! (credits, returned in the headers of frames going back), and has two numbers: one on its lane, whose gaps show a
//! loss that UC would hide, and one in the stream, by which the reader puts the lanes together again.
//!
//! Liveness is the caller's: see [`Abort`].

mod abort;
mod cable;
mod credit;
mod frame;
mod lane;
mod message;
mod options;
mod setup;
mod stream;
#[cfg(test)]
mod untrusted_peer_tests;
mod wait;

pub use self::abort::Abort;
pub use self::cable::Link;
pub use self::message::{ChannelAddress, LaneAddress, Readiness};
pub use self::options::{ChannelOptions, Mode};
pub use self::setup::{Armed, Pending};
pub use self::stream::Channel;
