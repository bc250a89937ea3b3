//! Starts the ranks of a group as processes, on this machine and over ssh on others, and supervises
//! them until the last has ended.
//!
//! [`launch`] runs any program as the ranks of a group, [`local`] runs copies of this program as
//! the other ranks of its own group, [`watched`] is one rank of a node's agent, and [`hostfile`]
//! reads MLX's description of machines and RDMA devices.
//!
//! ```
//! use thunder_cluster::launch::{Launch, parse_hosts};
//!
//! let command = ["./program".to_owned(), "--steps=10".to_owned()];
//! let plan = Launch::new(command.to_vec(), parse_hosts("localhost:2", 1)?).plan()?;
//! assert_eq!(plan.ranks.len(), 2);
//! let rank = ("THUNDER_RANK".to_owned(), "1".to_owned());
//! assert!(plan.ranks[1].environment.contains(&rank));
//! // plan.run() would start both and return when both have ended.
//! # Ok::<(), thunder_cluster::launch::LaunchError>(())
//! ```

pub mod hostfile;
pub mod launch;
pub mod local;
mod ranks;
mod signal;
pub mod watched;
