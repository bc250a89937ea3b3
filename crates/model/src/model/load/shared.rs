//! What a rank reads for compressed tokens that layers share, and for choosing among them.

use thunder_compute::{
    Backend, CacheKind, CompressionSpec, LatentSpec, MatrixSource, Norm, PartNorm, Rope, SelectionSpec,
};

use super::compressed::whole;
use super::sources::{ShardView, of_other_rank};
use super::upload::{SharedCache, Upload};
use crate::error::ModelError;
use crate::model::mixer::HeadNorms;
use crate::model::shared::{Chooser, ChosenBlocks, Keys, Maker, Pool, Shared};
use crate::spec::{CompressedShape, CompressionShape, SelectionShape, SourcesShape};
use crate::weights::LayerRole;

/// What a layer has itself, and which layers have the rest.
pub(super) struct SharedSources<'a> {
    layer: usize,
    sources: SourcesShape,
    spec: SelectionSpec,
    maker: Option<MakerSources<'a>>,
    chooser: Option<[MatrixSource<'a>; 2]>,
}

struct MakerSources<'a> {
    /// Width of a compressed token, and its columns that are rotated.
    dim: usize,
    rotated: usize,
    eps: f32,
    values: MatrixSource<'a>,
    /// The matrix of gates, if several tokens become one.
    pool: Option<(CompressionSpec<Vec<f32>>, MatrixSource<'a>)>,
    norm: Vec<f32>,
    /// The matrix of keys, and their norm.
    keys: Option<(MatrixSource<'a>, Vec<f32>)>,
}

impl<'a> SharedSources<'a> {
    pub fn describe(
        view: &ShardView<'a>,
        layer: usize,
        shape: &CompressedShape,
        (of, selection, sources): (&CompressionShape, &SelectionShape, SourcesShape),
    ) -> Result<Self, ModelError> {
        let SourcesShape { entries, keys, selection: chosen_by, .. } = sources;
        let own = view.shard.layers();
        let before = [entries, keys, chosen_by].into_iter().flatten().find(|source| !own.contains(source));
        if let Some(source) = before {
            return Err(of_other_rank(layer, source));
        }
        let hidden = view.spec.hidden;
        let SelectionShape { heads, dim, chosen, .. } = *selection;
        let maker = || MakerSources::describe(view, layer, shape, (of, keys.is_none().then_some(dim)));
        let chooser = || {
            Ok::<_, ModelError>([
                whole(view, layer, LayerRole::IndexQuery, [heads * dim, shape.query_rank])?,
                whole(view, layer, LayerRole::IndexWeights, [heads, hidden])?,
            ])
        };
        Ok(Self {
            layer,
            sources,
            spec: SelectionSpec { heads, dim, chosen, every: of.every },
            maker: entries.is_none().then(maker).transpose()?,
            chooser: chosen_by.is_none().then(chooser).transpose()?,
        })
    }

    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        let of_maker = self.maker.iter().flat_map(|maker| {
            let gates = maker.pool.iter().map(|(_, gates)| gates);
            [&maker.values].into_iter().chain(gates).chain(maker.keys.iter().map(|(keys, _)| keys))
        });
        of_maker.chain(self.chooser.iter().flatten())
    }

    /// The caches that the layer writes, in the order of [`Self::upload`].
    pub fn caches(&self) -> impl Iterator<Item = CacheKind> {
        self.maker.iter().flat_map(|maker| {
            let state = maker.pool.iter().map(|(spec, _)| spec.state());
            let entries = maker.cache(self.spec.every);
            let keys = maker.keys.is_some().then(|| self.spec.cache());
            state.chain([entries]).chain(keys)
        })
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Shared<B>, ModelError> {
        let (layer, spec) = (self.layer, self.spec);
        let maker = self.maker.map(|maker| maker.upload(layer, &spec, upload)).transpose()?;
        let chooser = match self.chooser {
            None => None,
            Some([query, weights]) => Some(Chooser {
                query: upload.matrix(&[query])?,
                weights: upload.matrix(&[weights])?,
                keys: upload.cache_of(self.sources.keys.unwrap_or(layer), SharedCache::Keys),
                blocks: match self.sources.blocks {
                    None => None,
                    Some(of) => Some(ChosenBlocks {
                        spec: of.blocks,
                        chooses: of.chooses,
                        buffer: upload.shared_buffer("blocks", of.blocks.columns())?,
                    }),
                },
                queries_buffer: upload.shared_buffer("indexer", spec.heads * spec.dim)?,
                weights_buffer: upload.shared_buffer("indexer's weights", spec.heads)?,
                spec,
            }),
        };
        Ok(Shared {
            entries: upload.cache_of(self.sources.entries.unwrap_or(layer), SharedCache::Entries),
            selection_buffer: upload.shared_buffer("selection", spec.columns())?,
            maker,
            chooser,
        })
    }
}

/// A norm of all columns.
fn norm_of_all<B: Backend>(
    weights: &[f32],
    eps: f32,
    upload: &mut Upload<'_, B>,
) -> Result<HeadNorms<B>, ModelError> {
    let width = weights.len();
    let weight = upload.vector(weights)?;
    Ok(HeadNorms {
        norms: vec![PartNorm { counted: 0..width, columns: 0..width, weight, width, eps }],
        centered: Vec::new(),
        sums_buffer: upload.shared_buffer("square sums", 1)?,
    })
}

/// Appends vectors of `rank` and `rotated` columns, unchanged.
fn appending<B: Backend>(
    [rank, rotated]: [usize; 2],
    upload: &mut Upload<'_, B>,
) -> Result<LatentSpec<B::Vector>, ModelError> {
    let norm = Norm { weight: upload.vector(&vec![1.0; rank])?, eps: 0.0 };
    Ok(LatentSpec { heads: 0, rank, rotated, plain: 0, scale: 1.0, norm, rope: None })
}

impl<'a> MakerSources<'a> {
    fn describe(
        view: &ShardView<'a>,
        layer: usize,
        shape: &CompressedShape,
        (of, key_width): (&CompressionShape, Option<usize>),
    ) -> Result<Self, ModelError> {
        let (hidden, dim, every) = (view.spec.hidden, shape.dim, of.every);
        let pool = || {
            let spec = CompressionSpec {
                dim,
                every,
                overlaps: false,
                place_bias: vec![0.0; every * dim],
                norm: None,
                rope: Rope { inverse_frequencies: Vec::new(), amplitude: 1.0, interleaved: true },
            };
            Ok::<_, ModelError>((spec, whole(view, layer, LayerRole::CompressedGates, [dim, hidden])?))
        };
        let keys = |width: usize| {
            let norm = view.vector(layer, LayerRole::IndexNorm, width)?;
            Ok::<_, ModelError>((whole(view, layer, LayerRole::IndexKey, [width, dim])?, norm))
        };
        Ok(Self {
            dim,
            rotated: shape.rotated,
            eps: shape.norm_eps,
            values: whole(view, layer, LayerRole::CompressedValues, [dim, hidden])?,
            pool: (every > 1).then(pool).transpose()?,
            norm: view.vector(layer, LayerRole::CompressedNorm, dim)?,
            keys: key_width.map(keys).transpose()?,
        })
    }

    const fn cache(&self, every: usize) -> CacheKind {
        CacheKind::Latent { rank: self.dim - self.rotated, rotated: self.rotated, every }
    }

    fn upload<B: Backend>(
        self,
        layer: usize,
        spec: &SelectionSpec,
        upload: &mut Upload<'_, B>,
    ) -> Result<Maker<B>, ModelError> {
        let (dim, every) = (self.dim, spec.every);
        let cache = self.cache(every);
        let pool = match self.pool {
            None => None,
            Some((spec, gates)) => Some(Pool {
                state: upload.cache(spec.state()),
                gates: upload.matrix(&[gates])?,
                values_buffer: upload.shared_buffer("values", dim)?,
                gates_buffer: upload.shared_buffer("gates", dim)?,
                spec: spec.try_map(&mut |values| upload.vector(&values))?,
            }),
        };
        upload.share_cache(layer, SharedCache::Entries, cache);
        let keys = match self.keys {
            None => None,
            Some((matrix, norm)) => Some(Keys {
                cache: upload.share_cache(layer, SharedCache::Keys, spec.cache()),
                matrix: upload.matrix(&[matrix])?,
                norm: norm_of_all(&norm, self.eps, upload)?,
                dim: spec.dim,
                append: appending([spec.dim / 2; 2], upload)?,
                buffer: upload.shared_buffer("key", spec.dim)?,
            }),
        };
        Ok(Maker {
            every,
            values: upload.matrix(&[self.values])?,
            pool,
            norm: norm_of_all(&self.norm, self.eps, upload)?,
            append: appending([dim - self.rotated, self.rotated], upload)?,
            entries_buffer: upload.shared_buffer("compressed tokens", dim)?,
            keys,
        })
    }
}
