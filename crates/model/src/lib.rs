//! Reads model folders, plans which rank holds which part, and computes that part: config.json,
//! weights, quantization, tokenizer, chat template, shard plan and forward pass.
//!
//! A [`ModelFolder`] becomes a [`ModelSpec`] and a [`weights::WeightSource`]. A [`ShardPlan`]
//! divides the spec among ranks, and [`Model::load`] packs one rank's part for a
//! [`Backend`](thunder_compute::Backend).
//!
//! ```
//! use thunder_compute::KvFormat;
//! use thunder_model::model::shard_footprints;
//! use thunder_model::synth::{self, Shape};
//! use thunder_model::{ModelFolder, Parallelism, ShardPlan};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temporary = tempfile::tempdir()?;
//! # let path = temporary.path().join("model");
//! // A small model with random weights: 4 bits in groups of 64.
//! let shape = Shape::named("qwen3-tiny").expect("a listed shape");
//! synth::write(&shape, Some(4), 64, &path, 0, &mut |_, _| {})?;
//!
//! let folder = ModelFolder::open(&path)?;
//! let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &[3.0, 1.0])?;
//! let ranks = shard_footprints(&folder, &plan, KvFormat::F16)?;
//! assert!(ranks[0].weight_bytes > ranks[1].weight_bytes);
//! # Ok(())
//! # }
//! ```

pub mod arch;
pub mod chat;
mod engram;
pub mod error;
pub mod folder;
pub mod gguf;
pub mod model;
pub mod plan;
pub mod pooling;
mod sentence;
pub mod spec;
pub mod synth;
pub mod tokenizer;
mod unread;
pub mod weights;

pub use error::ModelError;
pub use folder::ModelFolder;
pub use model::{Capacity, Model, Place, ShardFootprint};
pub use plan::{ExpertSplit, Parallelism, ShardPlan};
pub use pooling::Pooling;
pub use spec::ModelSpec;
pub use unread::unread_tensors;
pub use weights::Adapter;
