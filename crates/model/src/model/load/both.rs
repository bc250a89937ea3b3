//! What a rank reads for an MLP and experts in parallel (Gemma 4).

use thunder_compute::{Backend, Extra, MatrixSource};

use super::experts::ExpertsSources;
use super::mlp::MlpSources;
use super::sources::ShardView;
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::both::Both;
use crate::spec::BothShape;
use crate::weights::LayerRole;

/// One layer's MLP and experts on this rank. Norms are of the residual stream's width.
pub(super) struct BothSources<'a> {
    mlp: MlpSources<'a>,
    experts: ExpertsSources<'a>,
    /// Norms of the router, before and after the experts, and after the MLP.
    norms: [Vec<f32>; 4],
    factors: Vec<f32>,
}

impl<'a> BothSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &BothShape) -> Result<Self, ModelError> {
        let hidden = view.spec.hidden;
        // The files' router norm is without the root of its width (transformers' Gemma4TextRouter).
        let root = (hidden as f32).sqrt();
        let router = view.vector(layer, LayerRole::RouterNorm, hidden)?;
        let norm = |role: LayerRole| view.norm(role.of(layer), hidden);
        Ok(Self {
            mlp: MlpSources::describe(view, layer, &shape.mlp)?,
            experts: ExpertsSources::describe(view, layer, &shape.experts)?,
            norms: [
                router.into_iter().map(|weight| weight / root).collect(),
                norm(LayerRole::ExpertsNorm)?,
                norm(LayerRole::ExpertsPostNorm)?,
                norm(LayerRole::MlpPostNorm)?,
            ],
            factors: view.vector(layer, LayerRole::RouterFactors, shape.experts.experts)?,
        })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        [self.mlp.matrices(), self.experts.matrices()].concat()
    }

    /// An operation that not every backend has.
    pub fn needs(&self) -> Option<Extra> {
        self.experts.needs()
    }

    /// Bytes of the routed experts in memory.
    pub fn routed_bytes(&self) -> u64 {
        self.experts.routed_bytes()
    }

    /// `eps` is the epsilon of all norms.
    pub fn upload<B: Backend>(self, eps: f32, upload: &mut Upload<'_, B>) -> Result<Both<B>, ModelError> {
        let [router, before, experts_after, mlp_after] = self.norms;
        Ok(Both {
            mlp: self.mlp.upload(upload)?,
            experts: self.experts.upload(upload)?,
            routed_buffer: upload.shared_buffer("sum of experts", router.len())?,
            router_norm: upload.norm(&router, eps)?,
            factors: self.factors,
            experts_norm: upload.norm(&before, eps)?,
            experts_after: upload.norm(&experts_after, eps)?,
            mlp_after: upload.norm(&mlp_after, eps)?,
        })
    }
}
