//! What callers need to know of the served model.

use std::sync::Arc;

use thunder_model::chat::ChatTemplate;
use thunder_model::spec::FeedForwardSpec;
use thunder_model::tokenizer::Tokenizer;
use thunder_model::{ModelFolder, Pooling};

use crate::sampling::Sampling;

/// A low-rank adapter, as callers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterInfo {
    /// The name that requests ask for.
    pub name: String,
    /// Tells the adapter's files from others, as [`ModelInfo::digest`].
    pub digest: String,
    /// Bytes of its matrices.
    pub bytes: u64,
}

/// What the model's files hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelFiles {
    /// `model_type` of its configuration, such as "qwen3".
    pub family: String,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Numbers in its matrices, also of experts that a token does not use.
    pub weights: u64,
    /// Matrices are quantized.
    pub is_quantized: bool,
}

impl ModelFiles {
    /// What this folder's files hold. Vectors, such as those of norms, are not counted.
    pub fn of(folder: &ModelFolder) -> Self {
        let mut spec = folder.spec.clone();
        for layer in &mut spec.layers {
            let experts = match &mut layer.feed_forward {
                FeedForwardSpec::Experts(shape) => shape,
                FeedForwardSpec::Both(shape) => &mut shape.experts,
                FeedForwardSpec::None | FeedForwardSpec::Mlp(_) => continue,
            };
            experts.chosen = experts.experts;
        }
        let tables = if spec.tied == Some(false) { 2 } else { 1 };
        Self {
            bytes: folder.weights.bytes(),
            weights: spec.layer_weights() + (tables * spec.vocab * spec.hidden) as u64,
            is_quantized: folder.weights.is_quantized(),
            family: spec.family,
        }
    }
}

/// What a model is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ModelKind {
    /// A decoder: it continues texts.
    #[default]
    Decoder,
    /// An encoder that makes a vector of a text.
    Embedder,
    /// An encoder that scores a pair of texts.
    Reranker,
}

impl ModelKind {
    /// What a model of this kind is that continues no text; `None` for decoders.
    pub const fn no_text(self) -> Option<&'static str> {
        match self {
            Self::Decoder => None,
            Self::Embedder => Some("an encoder, which makes vectors of texts and writes none"),
            Self::Reranker => Some("a reranker, which scores documents and writes no text"),
        }
    }
}

/// The served model, as callers see it.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    /// The name to serve the model under.
    pub name: String,
    /// The most tokens of a prompt and its answer together.
    pub context_length: usize,
    /// What the model is for.
    pub kind: ModelKind,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Types of an encoder's tokens, at least 1. A token of type `t` has the id `t * vocab_size +
    /// id`.
    pub token_types: usize,
    /// Converts text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Converts messages to a prompt; `None` for a model without a chat template.
    pub chat_template: Option<Arc<ChatTemplate>>,
    /// Sampling of the model's generation_config.json, for requests that choose none.
    pub default_sampling: Sampling,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// How the model's folder wants embeddings to be made.
    pub pooling: Pooling,
    /// Tells the model's files from others: SHA-256, in hexadecimal digits.
    pub digest: String,
    /// What its files hold.
    pub files: ModelFiles,
    /// The low-rank adapters that requests can choose.
    pub adapters: Vec<AdapterInfo>,
    /// Ranks of the world.
    pub ranks: usize,
}
