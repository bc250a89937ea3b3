//! Finds a model by path or name, in the local Hugging Face cache or by downloading it.
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
//! The cache has the layout of Python's `huggingface_hub`, so what is pulled here is found by transformers and MLX, and
//! the other way round.

mod cache;
mod checksum;
mod client;
mod download;
mod environment;
mod error;
mod failure;
mod listing;
mod locate;
mod names;
mod options;
mod parallel;
mod platform;
mod progress;
mod pull;
mod url;

pub use environment::cache_root;
pub use error::HubError;
pub use locate::{Located, locate, locate_in};
pub use options::PullOptions;
pub use progress::Event;
pub use pull::pull;
