//! Loads a rank's part: first a description of what it reads from the files ([`Sources`]), then
//! packing.
//!
//! A new mixer or feed-forward is a new file here: its sources, and how they become a part of
//! [`Model`].

mod adapters;
mod ahead;
mod attention;
mod both;
mod channel_delta;
mod columns;
mod compressed;
mod delta;
mod encoder;
mod engram;
mod experts;
mod footprint;
mod gated_conv;
mod latent;
mod layer;
mod layer_inputs;
mod mlp;
mod ranges;
mod selection;
mod shared;
mod sources;
mod state_space;
mod streams;
mod transposed;
mod upload;

use std::ops::ControlFlow;
use std::sync::Arc;

use thunder_compute::{Backend, ComputeError, KvFormat};

use super::{Buffers, Head, Layer, Model, Vocabulary};
use crate::engram::TokenNumbers;
use crate::error::ModelError;
use crate::folder::ModelFolder;
use crate::plan::ShardPlan;
use crate::spec::Norms;
pub use footprint::{ShardFootprint, shard_footprints};
use layer::LayerSources;
pub use ranges::{FileRanges, check_present, shard_ranges};
use sources::Sources;
use upload::Upload;

/// Called with the bytes of weights that are loaded and their total. `Break` ends the loading with
/// [`ModelError::Stopped`].
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
    /// Maximum sequences with a state at the same time.
    pub slots: usize,
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
        for operation in sources.needs() {
            if !backend.offers(operation) {
                return Err(ComputeError::Lacks(operation).into());
            }
        }
        let has_tables = sources.layers().any(LayerSources::has_tables);
        let numbers = match spec.engram.as_ref().filter(|_| has_tables) {
            Some(shape) => Some(Arc::new(TokenNumbers::of_folder(&folder.path, spec.vocab, shape)?)),
            None => None,
        };
        let Capacity { kv_format, kv_blocks, slots, .. } = capacity;
        for (cache, queries) in sources.layers().filter_map(LayerSources::attention) {
            backend.expect_attention(cache, queries, kv_format);
        }
        // Allocated first, so that missing memory for a cache is found before weights are read.
        let shape = sources.cache_shape(kv_format, kv_blocks, slots);
        let caches = backend.caches(&shape)?;
        let mut upload = Upload::new(backend, capacity.rows, sources.bytes(), progress);
        upload.shares_caches = spec.encoder.is_some();
        upload.numbers = numbers;
        let embedding = match sources.embedding {
            Some((source, rows)) => Some(Vocabulary { matrix: upload.matrix(&[source])?, rows }),
            None => None,
        };
        let inputs = sources.inputs.map(|inputs| inputs.upload(&mut upload)).transpose()?;
        // The residual stream is stored divided by the scale of what is added to it. Norms
        // compensate if their epsilon is divided by the square of the scale.
        let residual_eps = spec.norm_eps / spec.residual_scale.powi(2);
        let layers =
            sources.layers.into_iter().map(|layer| layer.upload((residual_eps, spec.norm_eps), &mut upload));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let last_rows = capacity.logit_rows.min(capacity.rows);
        let encoder = sources
            .encoder
            .map(|encoder| encoder.upload((last_rows, spec.norm_eps), &mut upload))
            .transpose()?;
        let ahead = sources.ahead.map(|ahead| ahead.upload(spec.norm_eps, &mut upload)).transpose()?;
        let head = match sources.head {
            Some(head) => Some(Head {
                mix: head.mix,
                norm: upload.norm(&head.norm, residual_eps)?,
                connection: head.connection.map(|source| source.upload(&mut upload)).transpose()?,
                matrix: head.matrix.map(|source| upload.matrix(&[source])).transpose()?,
                rows: head.rows,
            }),
            None => None,
        };
        let rows = capacity.rows;
        let vocab = head.as_ref().map_or(0, |head| head.rows.len());
        let carried = layers.last().and_then(Layer::carried);
        let (inner, used) = upload.into_parts();
        debug_assert_eq!(used, shape.caches, "layers use the caches that were described");
        let shares_norms =
            spec.streams.is_some() || spec.layers.iter().any(|layer| layer.norms == Norms::Shared);
        let streams = spec.streams.map_or(1, |streams| streams.count);
        let shares_norms = shares_norms || spec.residual_block.is_some();
        let own = plan.shard(rank).layers();
        let counts = [own.start, own.end].map(|layer| spec.sums_before(layer));
        let sums = (0..counts[1]).map(|_| backend.buffer(rows, spec.hidden)).collect::<Result<_, _>>()?;
        let buffers = Buffers {
            residual: backend.buffer(rows, spec.hidden)?,
            streams: backend.buffer(if streams > 1 { rows } else { 1 }, spec.stream_width())?,
            shared_norm: backend.buffer(if shares_norms { rows } else { 1 }, spec.hidden)?,
            sums,
            last: backend.buffer(last_rows, spec.hidden)?,
            logits: backend.buffer(last_rows, vocab)?,
            inner,
        };
        let embedding_scale = spec.embedding_scale / spec.residual_scale;
        let (centered, logit_cap) = (spec.centered, spec.logit_cap);
        let ropes = spec.ropes.clone();
        let first_layer = plan.shard(rank).layers().start;
        Ok(Self {
            logit_rows: last_rows,
            ropes,
            centered,
            embedding_scale,
            logit_cap,
            streams,
            carried,
            embedding,
            inputs,
            layers,
            first_layer,
            head,
            encoder,
            ahead,
            sums: counts,
            caches,
            buffers,
        })
    }
}
