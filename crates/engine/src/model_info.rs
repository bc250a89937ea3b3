//! What callers need to know about the served model.

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
    /// Identifies the adapter's files, like [`ModelInfo::digest`].
    pub digest: String,
    /// Bytes of its matrices.
    pub bytes: u64,
}

/// The content of the model's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelFiles {
    /// `model_type` of its configuration, such as "qwen3".
    pub family: String,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Numbers in its matrices, including experts that a token does not use.
    pub weights: u64,
    /// Matrices are quantized.
    pub is_quantized: bool,
}

impl ModelFiles {
    /// The content of this folder's files. Vectors, such as those of norms, are not counted.
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

/// The purpose of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ModelKind {
    /// A decoder: it continues texts.
    #[default]
    Decoder,
    /// An encoder that turns a text into a vector.
    Embedder,
    /// An encoder that scores a pair of texts.
    Reranker,
}

impl ModelKind {
    /// What a model of this kind is, if it does not continue text; `None` for decoders.
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
    /// Maximum tokens of a prompt and its answer together.
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
    /// Sampling from the model's generation_config.json, for requests that choose none.
    pub default_sampling: Sampling,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// How the model's folder says that embeddings are made.
    pub pooling: Pooling,
    /// Identifies the model's files: a SHA-256 in hexadecimal digits.
    pub digest: String,
    /// The content of its files.
    pub files: ModelFiles,
    /// The low-rank adapters that requests can choose.
    pub adapters: Vec<AdapterInfo>,
    /// Ranks of the world.
    pub ranks: usize,
}
