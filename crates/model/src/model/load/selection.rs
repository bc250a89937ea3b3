//! What a rank reads for an indexer. Every rank has all of it, so that selections need not be sent.

use thunder_compute::{
    AttentionSpec, Backend, CacheKind, CompressionSpec, LatentSpec, MatrixSource, Norm, PartNorm, Rope,
    SelectionSpec,
};

use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::HeadNorms;
use crate::model::selection::{Indexer, Pool, Selected};
use crate::spec::SelectionShape;
use crate::weights::LayerRole;

/// Epsilon of the norm of the indexer's keys, independent of the config (transformers'
/// DeepseekV32Indexer).
const NORM_EPS: f32 = 1e-6;

/// How a layer selects tokens.
pub(super) struct SelectionSources<'a> {
    spec: SelectionSpec,
    /// Most tokens that are selected.
    tokens: usize,
    /// `None`: the selection of an earlier layer counts.
    own: Option<IndexerSources<'a>>,
}

struct IndexerSources<'a> {
    rope: Option<usize>,
    /// Compresses keys, if they are: the gates.
    pool: Option<(CompressionSpec<Vec<f32>>, MatrixSource<'a>)>,
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
        let SelectionShape { heads, dim, chosen, rope, pool, selects } = *shape;
        let hidden = view.spec.hidden;
        let matrix = |role: LayerRole, [outputs, inputs]: [usize; 2]| {
            let window = Window { rows: 0..outputs, cols: 0..inputs, bias: false };
            view.matrix(role.of(layer), [outputs, inputs], window)
        };
        let own = match selects {
            true => Some(IndexerSources {
                rope,
                pool: match pool {
                    1 => None,
                    every => {
                        let places = LayerRole::IndexPlaces.of(layer);
                        let spec = CompressionSpec {
                            dim,
                            every,
                            overlaps: false,
                            place_bias: view.weights.vector(places, &[every, dim])?,
                            norm: None,
                            rope: Rope {
                                inverse_frequencies: Vec::new(),
                                amplitude: 1.0,
                                interleaved: false,
                            },
                        };
                        Some((spec, matrix(LayerRole::IndexGates, [dim, hidden])?))
                    }
                },
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
        let spec = SelectionSpec { heads, dim, chosen: chosen / pool, every: pool };
        // The last tokens are not compressed yet.
        Ok(Self { spec, tokens: chosen + pool - 1, own })
    }

    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        let own = self.own.iter();
        own.flat_map(|own| {
            [&own.query, &own.key, &own.weights].into_iter().chain(own.pool.as_ref().map(|of| &of.1))
        })
    }

    /// The caches of the indexer's keys.
    pub fn caches(&self) -> Vec<CacheKind> {
        match &self.own {
            None => Vec::new(),
            Some(IndexerSources { pool: Some((spec, _)), .. }) => vec![spec.state(), spec.cache()],
            Some(_) => vec![self.spec.cache()],
        }
    }

    /// True if keys are compressed.
    pub const fn compresses(&self) -> bool {
        self.spec.every > 1
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Selected<B>, ModelError> {
        let spec = self.spec;
        let selection = upload.shared_buffer("selection", 1 + self.tokens)?;
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
            rope: own.rope,
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
        let (cache, pool) = match own.pool {
            None => (upload.cache(spec.cache()), None),
            Some((compression, gates)) => {
                let state = upload.cache(compression.state());
                let pool = Pool {
                    state,
                    gates_buffer: upload.shared_buffer("indexer's gates", dim)?,
                    selected_buffer: upload.shared_buffer("selected keys", spec.columns())?,
                    gates: upload.matrix(&[gates])?,
                    spec: compression.try_map(&mut |values| upload.vector(&values))?,
                };
                (upload.cache(pool.spec.cache()), Some(pool))
            }
        };
        let indexer = Indexer {
            cache,
            pool,
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
