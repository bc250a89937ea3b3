//! The draft model, before it is loaded.

use thunder_collectives::{CommError, Group};
use thunder_compute::KvFormat;
use thunder_model::model::shard_footprints;
use thunder_model::tokenizer::{Tokenizer, TokenizerError, Vocabulary};
use thunder_model::{ModelError, ModelFolder, Parallelism, ShardFootprint, ShardPlan};

use super::spec::DraftSpec;

/// Why a draft model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// It cannot be read.
    #[error("draft model {name}: {source}")]
    Model {
        /// The draft model.
        name: String,
        /// Why.
        source: ModelError,
    },
    /// Its tokenizer cannot be read.
    #[error("draft model {name}: {source}")]
    Tokenizer {
        /// The draft model.
        name: String,
        /// Why.
        source: TokenizerError,
    },
    /// Its tokens differ from the served model's.
    #[error(
        "the draft model {draft} has other tokens ({draft_vocabulary}) than {target} ({target_vocabulary}): a draft \
         model must have the same tokenizer, so take a smaller model of the same family"
    )]
    Vocabulary {
        /// The draft model.
        draft: String,
        /// Its vocabulary.
        draft_vocabulary: Vocabulary,
        /// The served model.
        target: String,
        /// Its vocabulary.
        target_vocabulary: Vocabulary,
    },
}

/// A draft model with its headers read, which fits the served model.
#[derive(Debug)]
pub struct Draft {
    /// Its files.
    pub folder: ModelFolder,
    /// Its memory on rank 0.
    pub footprint: ShardFootprint,
    /// Number of requests that it may guess for.
    requests: usize,
}

impl Draft {
    /// Reads headers and the tokenizer, and compares the tokenizer with that of the served model
    /// `target`. `requests` is the maximum number of simultaneous requests.
    ///
    /// # Errors
    /// If the model cannot be read, or its tokens differ.
    pub fn open(
        spec: &DraftSpec,
        (target, tokenizer): (&str, &Tokenizer),
        kv: KvFormat,
        requests: usize,
    ) -> Result<Self, DraftError> {
        let of_model = |source| DraftError::Model { name: spec.name.clone(), source };
        let mut draft = ModelFolder::open(&spec.model).map_err(of_model)?;
        draft.spec.ahead = None;
        let own = draft
            .tokenizer()
            .map_err(|source| DraftError::Tokenizer { name: spec.name.clone(), source })?
            .vocabulary();
        let theirs = tokenizer.vocabulary();
        if own != theirs {
            return Err(DraftError::Vocabulary {
                draft: spec.name.clone(),
                draft_vocabulary: own,
                target: target.to_owned(),
                target_vocabulary: theirs,
            });
        }
        let plan = ShardPlan::new(&draft.spec, Parallelism::Tensor, &[1.0]).map_err(of_model)?;
        let footprint = shard_footprints(&draft, &plan, kv).map_err(of_model)?.swap_remove(0);
        Ok(Self { folder: draft, footprint, requests })
    }

    /// On every rank, adds the memory of rank 0's draft model, if there is one, to the footprints
    /// of all ranks. All ranks call this together.
    ///
    /// # Errors
    /// If a rank was lost.
    pub fn count(
        draft: Option<&Self>,
        group: &mut Group,
        footprints: &mut [ShardFootprint],
    ) -> Result<(), CommError> {
        let mut bytes = draft.map_or([0, 0], Self::bytes);
        group.broadcast(0, &mut bytes)?;
        add(bytes, footprints);
        Ok(())
    }

    /// Adds the draft model's memory to the footprints of all ranks.
    pub fn add_to(&self, footprints: &mut [ShardFootprint]) {
        add(self.bytes(), footprints);
    }

    /// Bytes of weights and states, and of KV cache for each token. Each request has two states.
    fn bytes(&self) -> [u64; 2] {
        let ShardFootprint { weight_bytes, state_bytes_per_sequence, kv_bytes_per_token, .. } =
            self.footprint;
        [weight_bytes + 2 * self.requests as u64 * state_bytes_per_sequence, kv_bytes_per_token]
    }
}

/// Adds bytes of weights, and of KV cache for each token, to rank 0's.
fn add([weights, kv]: [u64; 2], footprints: &mut [ShardFootprint]) {
    if let Some(first) = footprints.first_mut() {
        first.weight_bytes += weights;
        first.kv_bytes_per_token += kv;
    }
}
