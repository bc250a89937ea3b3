//! The parts of an encoder that a decoder lacks.

use thunder_compute::Curve;

use crate::pooling::Pooling;

/// The parts of an encoder around its layers (BERT, XLM-RoBERTa). Every token of a text attends to
/// all others, so a text is computed in one step, and its result is one vector.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderSpec {
    /// Learned positions, which are added to the embedding. `None`: positions are rotations.
    pub positions: Option<PositionsShape>,
    /// Types of tokens, whose vectors are added to the embedding; 0 if there are none. A token of
    /// type `t` has the id `t * vocab + id`.
    pub types: usize,
    /// Norm of the embedding.
    pub embedding_norm: EmbeddingNorm,
    /// True if hidden states are normed before they become a vector, like a decoder's before its
    /// output head.
    pub output_norm: bool,
    /// How a text's hidden states become one vector.
    pub pooling: Pooling,
    /// Dense layers that are applied to this vector, one after the other. The outputs of the last
    /// one are the result.
    pub dense: Vec<DenseShape>,
    /// True if the result is a score of a pair of texts, not a text's vector.
    pub scores: bool,
}

/// Whether an encoder's embedding is normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbeddingNorm {
    /// No.
    None,
    /// By a LayerNorm without a bias.
    Plain,
    /// By a LayerNorm with a bias.
    Biased,
}

impl EncoderSpec {
    /// The parts of a decoder whose tokens attend to later ones as well (EmbeddingGemma).
    pub fn of_decoder() -> Self {
        Self {
            positions: None,
            types: 0,
            embedding_norm: EmbeddingNorm::None,
            output_norm: true,
            pooling: Pooling::Mean,
            dense: Vec::new(),
            scores: false,
        }
    }
}

/// A table of positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PositionsShape {
    /// Its rows.
    pub rows: usize,
    /// Row of a text's first token.
    pub first: usize,
}

/// A product with a bias and an activation, of a text's vector.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseShape {
    /// Where its weights are.
    pub from: DenseFrom,
    /// Numbers that it reads.
    pub inputs: usize,
    /// Number of its outputs.
    pub outputs: usize,
    /// True if it has a bias.
    pub bias: bool,
    /// Its activation.
    pub curve: Option<Curve>,
}

/// Where a product of a text's vector is in a model folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DenseFrom {
    /// The first product of a classifier, among the model's tensors.
    Pooler,
    /// The last product of a classifier.
    Classifier,
    /// A folder of sentence-transformers within the model's.
    Folder(String),
}
