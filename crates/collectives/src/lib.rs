//! Groups of ranks and the collectives among them, over shared memory, TCP and RDMA.
//!
//! ```
//! use thunder_collectives::{Op, TransportChoice, local};
//!
//! let sums = local::run(2, TransportChoice::Auto, |mut group| {
//!     let mut data = [1.0f32 + group.rank() as f32; 4];
//!     group.all_reduce(&mut data, Op::Sum).map(|()| data)
//! })?;
//! assert!(sums.iter().all(|sum| *sum == Ok([3.0; 4])));
//! # Ok::<(), thunder_collectives::InitError>(())
//! ```
//!
//! A process of a real group calls [`Group::from_env`] or [`Group::init`]. Every wait is bounded: a rank that exits, is
//! killed or loses its link makes every other rank's operation, also an idle wait, return [`CommError::PeerLost`].

mod algorithm;
pub mod bench;
mod config;
mod core;
mod cost;
mod element;
mod error;
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
pub use config::{Config, MAX_RANKS, RdmaConfig};
pub use cost::Cost;
pub use element::{DType, Element, Op};
pub use error::{CommError, InitError};
pub use group::{Group, Pending, Stats};
pub use thunder_verbs::Mode as RdmaMode;
pub use transport::{Transport, TransportChoice};
pub use wire::Wire;
