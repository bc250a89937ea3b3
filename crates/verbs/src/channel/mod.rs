//! A stream of bytes to a peer over one or more RDMA cables. Sending copies each byte once;
//! received bytes can be read in place. A connected channel does not allocate, and blocks only in
//! calls that have a time limit.
//!
//! Data is cut into frames, one per slot. Short writes use a lane with slots of 4 KiB; long writes
//! alternate among the cables' lanes with long slots. A frame is sent only when the peer has a free
//! slot for it; the peer returns credits in the headers of its own frames. Each frame has two
//! numbers: one in its lane, whose gaps reveal a loss that UC would hide, and one in the stream, by
//! which the reader merges the lanes.
//!
//! The caller watches whether the peer is alive: see [`Abort`].

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
pub use self::cable::Cable;
pub use self::message::{ChannelAddress, LaneAddress, Readiness};
pub use self::options::{ChannelOptions, Mode};
pub use self::setup::{Connected, Prepared};
pub use self::stream::Channel;
