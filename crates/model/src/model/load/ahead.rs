//! What a rank reads for the layer that predicts further tokens.

use thunder_compute::{Backend, MatrixSource};

use super::layer::LayerSources;
use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::ahead::Ahead;
use crate::spec::AheadSpec;
use crate::weights::LayerRole;

/// The layer that predicts further tokens, on a rank that computes logits. The layer is split like
/// the others. Every rank has the whole projection, so that its result need not be summed.
pub(super) struct AheadSources<'a> {
    pub layer: LayerSources<'a>,
    embedding_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    /// Of the embedding, and of the hidden state.
    projections: [MatrixSource<'a>; 2],
    output_norm: Vec<f32>,
    chains_normed: bool,
}

impl<'a> AheadSources<'a> {
    pub fn describe(view: &ShardView<'a>, spec: &AheadSpec) -> Result<Self, ModelError> {
        let (number, hidden) = (view.spec.layers.len(), view.spec.hidden);
        let norm = |role: LayerRole| view.norm(role.of(number), hidden);
        let columns = |second: bool| {
            let first = if second { hidden } else { 0 };
            let window = Window { rows: 0..hidden, cols: first..first + hidden, bias: false };
            view.matrix(LayerRole::AheadProjection.of(number), [hidden, 2 * hidden], window)
        };
        Ok(Self {
            layer: LayerSources::describe(view, number)?,
            embedding_norm: norm(LayerRole::AheadEmbeddingNorm)?,
            hidden_norm: norm(LayerRole::AheadHiddenNorm)?,
            projections: [columns(spec.hidden_first)?, columns(!spec.hidden_first)?],
            output_norm: norm(LayerRole::AheadOutputNorm)?,
            chains_normed: spec.chains_normed,
        })
    }

    /// All its matrices.
    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let mut matrices = self.layer.matrices();
        matrices.extend(&self.projections);
        matrices
    }

    /// Packs the layer. Its caches are the next of `upload`'s.
    pub fn upload<B: Backend>(self, eps: f32, upload: &mut Upload<'_, B>) -> Result<Ahead<B>, ModelError> {
        let [of_embedding, of_hidden] = self.projections;
        Ok(Ahead {
            layer: self.layer.upload((eps, eps), upload)?,
            embedding_norm: upload.norm(&self.embedding_norm, eps)?,
            hidden_norm: upload.norm(&self.hidden_norm, eps)?,
            of_embedding: upload.matrix(&[of_embedding])?,
            of_hidden: upload.matrix(&[of_hidden])?,
            output_norm: upload.norm(&self.output_norm, eps)?,
            chains_normed: self.chains_normed,
        })
    }
}
