//! Engine assembly: from a [`RankSpec`], plain data, to a running rank.
//!
//! 1. [`spec`]: what to run, as data that travels in a control message, with its validation.
//! 2. [`group`]: how the rank joins the other ranks; [`places`]: which of them share its machine.
//! 3. [`threads`] and [`memory`]: pure functions that place threads and size the KV cache;
//!    [`draft`]: the draft model, and whether it suits the served one; [`disk`]: the rank's part of
//!    the prefix cache on disk.
//! 4. [`assemble`](mod@assemble): opens the model, joins the group, loads the shard, starts the
//!    scheduler on rank 0.

pub mod assemble;
pub mod device;
mod disk;
pub mod draft;
mod error;
pub mod group;
mod headers;
pub mod memory;
pub mod places;
mod running;
pub mod spec;
pub mod threads;

pub use assemble::{Assembly, Progress, assemble};
pub use device::DeviceChoice;
pub use draft::{Draft, DraftError};
pub use error::AssemblyError;
pub use group::form_group;
pub use headers::{check, rank_ranges};
pub use memory::{DeviceMemory, KvCacheSize};
pub use places::RankPlace;
pub use running::{Follower, RunningEngine, RunningRank};
pub use spec::{
    AdapterSpec, DiskCacheSpec, DraftSpec, EngineSpec, Forming, GroupSource, RankSpec, Secret, SpecError,
};
pub use threads::{ThreadCounts, ThreadPlacement};
