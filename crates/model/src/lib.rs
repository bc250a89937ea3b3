//! Model folders: configuration, weight files, quantization formats, tokenizer, chat template, architectures and shard
//! plans.

pub mod arch;
pub mod chat;
pub mod error;
pub mod folder;
pub mod model;
pub mod plan;
pub mod spec;
pub mod synth;
pub mod tokenizer;
pub mod weights;

pub use error::ModelError;
pub use folder::ModelFolder;
pub use model::{Capacity, Model, ShardFootprint};
pub use plan::{Parallelism, ShardPlan};
pub use spec::ModelSpec;
