//! Groups of ranks (one process or thread each) and the collectives among them, over shared memory,
//! TCP and RDMA.
//!
//! ```
//! use thunder_collectives::{Op, TransportChoice, local};
//!
//! // Two ranks, each on a thread of its own, add up their data.
//! let sums = local::run(2, TransportChoice::Auto, |mut group| {
//!     let mut data = [1.0f32 + group.rank() as f32; 4];
//!     group.all_reduce(&mut data, Op::Sum).map(|()| data)
//! })?;
//! assert!(sums.iter().all(|sum| *sum == Ok([3.0; 4])));
//! # Ok::<(), thunder_collectives::InitError>(())
//! ```
//!
//! A process of a real group calls [`Group::from_env`] or [`Group::init`]. Every wait is bounded:
//! if a rank exits, is killed or loses its link, the operations of every other rank return
//! [`CommError::PeerLost`], including idle waits.
//!
//! Modules, from the bottom up: `platform` (system calls), `link` (bytes between two ranks, and the
//! board that all ranks of a host share), `core` (messages, waits and failures), `reduce` (the
//! loops that add), `algorithm` (all-reduces), `group` (the public operations). A group is formed
//! by `rendezvous` (all ranks find each other) and `world` (each pair connects); `watch` notices
//! lost ranks.

mod algorithm;
pub mod bench;
mod config;
mod core;
mod cost;
mod element;
mod error;
mod forming;
mod group;
mod header;
mod link;
pub mod local;
mod platform;
mod reduce;
mod rendezvous;
mod transport;
#[cfg(test)]
mod untrusted_input;
mod watch;
mod wire;
mod world;

pub use algorithm::Algorithm;
pub use config::{CableNetwork, Config, MAX_RANKS, RdmaConfig, parse_ports};
pub use cost::Cost;
pub use element::{DType, Element, Op};
pub use error::{CommError, InitError};
pub use forming::{FormingEvent, Observer};
pub use group::{Group, Pending, SharedMemory, Stats};
pub use thunder_verbs::Mode as RdmaMode;
pub use transport::{Transport, TransportChoice};
pub use wire::Wire;
