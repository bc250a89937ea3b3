//! Finds a model by path or name, in the local Hugging Face cache or by downloading it.
//!
//! [`locate`] never uses the network; [`pull`] downloads what is missing.
//!
//! ```no_run
//! # fn main() -> Result<(), thunder_hub::HubError> {
//! let model = match thunder_hub::locate("org/name") {
//!     Err(thunder_hub::HubError::NotFound { .. } | thunder_hub::HubError::Incomplete { .. }) => {
//!         thunder_hub::pull("org/name", "main", &thunder_hub::PullOptions::from_env(), &|_| {})?
//!     }
//!     found => found?,
//! };
//! println!("{}", model.folder.display());
//! # Ok(())
//! # }
//! ```
//!
//! Machines with a model can [`serve`] it to others in the hub's form. [`PullOptions::peers`] are
//! asked before the hub. [`pull_part`] fetches what one rank reads of the weight files.
//!
//! The cache has the layout of Python's `huggingface_hub`: transformers and MLX find the models
//! that this crate pulls, and this crate finds theirs.
//!
//! Architecture invariant: this crate depends on no other crate of the workspace but `parts`, and
//! computes nothing.

mod cache;
mod checksum;
mod client;
mod damage;
mod download;
mod environment;
mod error;
mod failure;
mod gguf;
mod hasher;
mod headers;
mod listing;
mod locate;
mod names;
mod options;
mod parallel;
mod part_folder;
mod partial;
mod peer;
mod pieces;
mod platform;
mod progress;
mod pull;
mod runs;
mod serve;
mod served;
mod sources;
mod syncer;
mod url;
mod verify;

pub use damage::is_damaged;
pub use environment::cache_root;
pub use error::HubError;
pub use gguf::gguf_parts;
pub use headers::fetch_headers;
pub use locate::{Located, gguf_names_in, locate, locate_in};
pub use names::is_hub_name;
pub use options::PullOptions;
pub use part_folder::{PartOfModel, part_in};
pub use partial::{WantedFile, pull_part};
pub use peer::{Peer, PeerStream};
pub use progress::PullEvent;
pub use pull::pull;
pub use serve::{Served, serve};
pub use served::{CachedModel, cached_models, remove};
pub use verify::{Verified, verify};
