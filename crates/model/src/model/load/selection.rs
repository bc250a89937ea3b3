//! What a rank reads for an indexer. Every rank has all of it, so that selections need not be sent.

use thunder_compute::{
    AttentionSpec, Backend, CacheKind, LatentSpec, MatrixSource, Norm, PartNorm, SelectionSpec,
};

use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::HeadNorms;
use crate::model::selection::{Indexer, Selected};
use crate::spec::SelectionShape;
use crate::weights::LayerRole;

/// Epsilon of the norm of the indexer's keys, whatever the config says (transformers'
/// DeepseekV32Indexer).
const NORM_EPS: f32 = 1e-6;

/// How a layer selects tokens.
pub(super) struct SelectionSources<'a> {
    spec: SelectionSpec,
    /// `None`: the selection of an earlier layer counts.
    own: Option<IndexerSources<'a>>,
}

struct IndexerSources<'a> {
    rope: usize,
    query: MatrixSource<'a>,
    key: MatrixSource<'a>,
    weights: MatrixSource<'a>,
    norm: Vec<f32>,
    bias: Vec<f32>,
}

impl<'a> SelectionSources<'a> {
    pub fn describe(
        view: &ShardView<'a>,
        layer: usize,
        shape: &SelectionShape,
        query_rank: usize,
    ) -> Result<Self, ModelError> {
        let SelectionShape { heads, dim, chosen, rope, selects } = *shape;
        let hidden = view.spec.hidden;
        let matrix = |role: LayerRole, [outputs, inputs]: [usize; 2]| {
            let window = Window { rows: 0..outputs, cols: 0..inputs, bias: false };
            view.matrix(role.of(layer), [outputs, inputs], window)
        };
        let own = match selects {
            true => Some(IndexerSources {
                rope,
                query: matrix(LayerRole::IndexQuery, [heads * dim, query_rank])?,
                key: matrix(LayerRole::IndexKey, [dim, hidden])?,
                weights: matrix(LayerRole::IndexWeights, [heads, hidden])?,
                norm: view.vector(layer, LayerRole::IndexNorm, dim)?,
                bias: view.vector(layer, LayerRole::IndexNormBias, dim)?,
            }),
            false if layer == view.shard.layers().start => {
                return Err(ModelError::Plan(format!(
                    "layer {layer} attends to the tokens that the layer before it selected, which would be on \
                     another rank: split the layers elsewhere, or use --parallel tensor"
                )));
            }
            false => None,
        };
        Ok(Self { spec: SelectionSpec { heads, dim, chosen, every: 1 }, own })
    }

    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        self.own.iter().flat_map(|own| [&own.query, &own.key, &own.weights])
    }

    /// The cache of the indexer's keys.
    pub fn cache(&self) -> Option<CacheKind> {
        self.own.as_ref().map(|_| self.spec.cache())
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Selected<B>, ModelError> {
        let spec = self.spec;
        let selection = upload.shared_buffer("selection", spec.columns())?;
        let Some(own) = self.own else { return Ok(Selected::Before(selection)) };
        let dim = spec.dim;
        let columns = 0..dim;
        let norm = upload.vector(&own.norm)?;
        let keys = LatentSpec {
            heads: 0,
            rank: dim / 2,
            rotated: dim / 2,
            plain: 0,
            scale: 1.0,
            norm: Norm { weight: norm.clone(), eps: NORM_EPS },
            rope: None,
        };
        let heads = AttentionSpec {
            key_dim: dim,
            value_dim: 0,
            queries_of: vec![0..spec.heads],
            scale: 1.0,
            window: None,
            qk_norm: None,
            rope: Some(own.rope),
            sinks: None,
            temperature: None,
            out_column: 0,
        };
        let norm = PartNorm {
            counted: columns.clone(),
            columns: columns.clone(),
            weight: norm,
            width: dim,
            eps: NORM_EPS,
        };
        let norm = HeadNorms {
            norms: vec![norm],
            centered: vec![columns],
            sums_buffer: upload.shared_buffer("square sums", 1)?,
        };
        let indexer = Indexer {
            cache: upload.cache(spec.cache()),
            heads_buffer: upload.shared_buffer("indexer", (spec.heads + 1) * dim)?,
            key_buffer: upload.shared_buffer("indexer's key", dim)?,
            weights_buffer: upload.shared_buffer("indexer's weights", spec.heads)?,
            query: upload.matrix(&[own.query])?,
            key: upload.matrix(&[own.key])?,
            weights: upload.matrix(&[own.weights])?,
            bias: own.bias,
            norm,
            heads,
            keys,
            spec,
        };
        Ok(Selected::Own(Box::new(indexer), selection))
    }
}
