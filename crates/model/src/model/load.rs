//! Loading a rank's part: first a description of what it reads from the files ([`Sources`]), then packing.
//!
//! A new mixer or feed-forward is a new file here: its sources, and how they become a part of [`Model`].

mod attention;
mod footprint;
mod gated;
mod layer;
mod sources;
mod upload;

use std::ops::ControlFlow;

use thunder_compute::{Backend, KvFormat};

use super::{Buffers, Head, Model, Vocabulary};
use crate::error::ModelError;
use crate::folder::ModelFolder;
use crate::plan::ShardPlan;
pub use footprint::{ShardFootprint, lookup_bytes, shard_footprints};
use sources::Sources;
use upload::Upload;

/// Called with the bytes of weights that are loaded and their total. `Break` ends the loading with [`ModelError::Stopped`].
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Sizes of a loaded model's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Rows of a step.
    pub rows: usize,
    /// Rows of a step that want logits.
    pub logit_rows: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
    /// Number format of the KV cache.
    pub kv_format: KvFormat,
}

impl<B: Backend> Model<B> {
    /// Loads the shard of `rank`: reads its byte ranges and packs them for the backend.
    ///
    /// # Errors
    /// When a tensor is missing or malformed, memory runs out, or `progress` breaks.
    pub fn load(
        folder: &ModelFolder,
        plan: &ShardPlan,
        rank: usize,
        capacity: Capacity,
        backend: &mut B,
        progress: Progress<'_>,
    ) -> Result<Self, ModelError> {
        let spec = &folder.spec;
        let sources = Sources::describe(folder, plan.shard(rank))?;
        let kv = backend.kv_cache(sources.kv_shape(capacity.kv_format, capacity.kv_blocks))?;
        let mut upload = Upload::new(backend, capacity.rows, sources.bytes(), progress);
        let embedding = match sources.embedding {
            Some((source, rows)) => Some(Vocabulary { matrix: upload.matrix(&[source])?, rows }),
            None => None,
        };
        let layers = sources.layers.into_iter().map(|layer| layer.upload(spec.norm_eps, &mut upload));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let head = match sources.head {
            Some(head) => Some(Head {
                norm: upload.vector(&head.norm),
                eps: spec.norm_eps,
                matrix: head.matrix.map(|source| upload.matrix(&[source])).transpose()?,
                rows: head.rows,
            }),
            None => None,
        };
        let (rows, last_rows) = (capacity.rows, capacity.logit_rows.min(capacity.rows));
        let vocab = head.as_ref().map_or(0, |head| head.rows.len());
        let inner = upload.into_shared_buffers();
        let buffers = Buffers {
            residual: backend.buffer(rows, spec.hidden)?,
            last: backend.buffer(last_rows, spec.hidden)?,
            logits: backend.buffer(last_rows, vocab)?,
            largest: Vec::with_capacity(last_rows),
            inner,
        };
        Ok(Self { ropes: spec.ropes.clone(), embedding, layers, head, kv, buffers })
    }
}
