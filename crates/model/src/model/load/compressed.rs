//! What a rank reads for attention to compressed tokens.

use thunder_compute::{
    Backend, CacheKind, CompressedSpec, CompressionSpec, Extra, LatentSpec, MatrixSource, Norm, PartNorm,
    Rope, SelectionSpec,
};

use super::shared::SharedSources;
use super::sources::{ShardView, Window, whole_groups};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::compressed::{Compressed, CompressedSelection, Compressor};
use crate::model::mixer::{HeadNorms, QueryDown};
use crate::spec::{CompressedShape, CompressionShape, SelectionShape};
use crate::weights::LayerRole;

/// One layer's attention on this rank, which has some groups of heads and everything that the heads
/// share.
pub(super) struct CompressedSources<'a> {
    spec: CompressedSpec<Vec<f32>>,
    rope: Rope,
    norm_eps: f32,
    query_down: (MatrixSource<'a>, Vec<f32>),
    query: MatrixSource<'a>,
    query_norm: bool,
    rounds: bool,
    vector: MatrixSource<'a>,
    vector_norm: Vec<f32>,
    groups: Vec<MatrixSource<'a>>,
    group_columns: usize,
    out: MatrixSource<'a>,
    compressor: Option<CompressorSources<'a>>,
    selection: Option<SelectionSources<'a>>,
    shared: Option<SharedSources<'a>>,
}

struct CompressorSources<'a> {
    spec: CompressionSpec<Vec<f32>>,
    /// Values and gates.
    matrices: [MatrixSource<'a>; 2],
}

struct SelectionSources<'a> {
    spec: SelectionSpec,
    keys: CompressorSources<'a>,
    query: MatrixSource<'a>,
    weights: MatrixSource<'a>,
}

/// A whole matrix, `[outputs, inputs]`.
pub(super) fn whole<'a>(
    view: &ShardView<'a>,
    layer: usize,
    role: LayerRole,
    [outputs, inputs]: [usize; 2],
) -> Result<MatrixSource<'a>, ModelError> {
    let window = Window { rows: 0..outputs, cols: 0..inputs, bias: false };
    view.matrix(role.of(layer), [outputs, inputs], window)
}

impl<'a> CompressedSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &CompressedShape) -> Result<Self, ModelError> {
        let (hidden, dim, rank) = (view.spec.hidden, shape.dim, shape.query_rank);
        let (group_heads, group_rank) = (shape.heads / shape.groups, shape.group_rank);
        // Heads of a group share its projection, so a rank has whole groups.
        let unit = view.weights.format(LayerRole::AttentionOut.of(layer))?.column_unit();
        let groups = view.shard.channels(shape.groups, whole_groups(group_rank, unit));
        let heads = groups.start * group_heads..groups.end * group_heads;
        let matrix = |role: LayerRole, shape, rows, cols| {
            view.matrix(role.of(layer), shape, Window { rows, cols, bias: false })
        };
        let group_columns = group_heads * dim;
        let of_group = |group: usize| {
            let rows = group * group_rank..(group + 1) * group_rank;
            let all = [shape.groups * group_rank, group_columns];
            matrix(LayerRole::OutGroups, all, rows, 0..group_columns)
        };
        let sinks = view.vector(layer, LayerRole::AttentionSinks, shape.heads)?[heads.clone()].to_vec();
        let columns = groups.start * group_rank..groups.end * group_rank;
        let query_rows = heads.start * dim..heads.end * dim;
        let rope = view.spec.ropes[shape.rope].clone();
        let compressor = |of: &CompressionShape| {
            let roles = [LayerRole::CompressedValues, LayerRole::CompressedGates];
            let vectors = [LayerRole::CompressedPlaces, LayerRole::CompressedNorm];
            CompressorSources::describe(view, layer, (dim, of, shape.norm_eps), &rope, (roles, vectors))
        };
        let selection = |of: &CompressionShape, selection: &SelectionShape| {
            SelectionSources::describe(view, layer, (of, selection), shape, &rope)
        };
        let compression = shape.compression.as_ref();
        let shared = compression.and_then(|of| Some((of, of.selection.as_ref()?, of.sources?)));
        let own = compression.filter(|of| of.sources.is_none());
        Ok(Self {
            shared: shared.map(|of| SharedSources::describe(view, layer, shape, of)).transpose()?,
            compressor: own.map(compressor).transpose()?,
            selection: own.and_then(|of| Some(selection(of, of.selection.as_ref()?))).transpose()?,
            query_norm: shape.query_norm,
            rounds: shape.rounds,
            spec: CompressedSpec {
                heads: heads.len(),
                dim,
                rotated: shape.rotated,
                window: shape.window,
                every: compression.map(|of| of.every),
                sinks,
            },
            norm_eps: shape.norm_eps,
            query_down: (
                whole(view, layer, LayerRole::QueryDown, [rank, hidden])?,
                view.vector(layer, LayerRole::QueryDownNorm, rank)?,
            ),
            query: matrix(LayerRole::QueryUp, [shape.heads * dim, rank], query_rows, 0..rank)?,
            vector: whole(view, layer, LayerRole::KvDown, [dim, hidden])?,
            vector_norm: view.vector(layer, LayerRole::KvDownNorm, dim)?,
            groups: groups.map(of_group).collect::<Result<_, _>>()?,
            group_columns,
            out: matrix(LayerRole::AttentionOut, [hidden, shape.groups * group_rank], 0..hidden, columns)?,
            rope,
        })
    }

    fn compressors(&self) -> impl Iterator<Item = &CompressorSources<'a>> {
        self.compressor.iter().chain(self.selection.iter().map(|of| &of.keys))
    }

    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        [&self.query_down.0, &self.query, &self.vector, &self.out]
            .into_iter()
            .chain(&self.groups)
            .chain(self.compressors().flat_map(|of| &of.matrices))
            .chain(self.selection.iter().flat_map(|of| [&of.query, &of.weights]))
            .chain(self.shared.iter().flat_map(SharedSources::matrices))
    }

    /// Operations that not every backend has.
    pub const fn needs(&self) -> Option<Extra> {
        Some(if self.shared.is_some() { Extra::Pooling } else { Extra::Compression })
    }

    /// The caches of single tokens, and those of each compressor.
    pub fn caches(&self) -> impl Iterator<Item = CacheKind> {
        let of_compressor = |of: &CompressorSources<'_>| [of.spec.state(), of.spec.cache()];
        let shared = self.shared.iter().flat_map(SharedSources::caches);
        [self.spec.cache()].into_iter().chain(self.compressors().flat_map(of_compressor)).chain(shared)
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Compressed<B>, ModelError> {
        let (spec, eps) = (self.spec, self.norm_eps);
        let (down, down_norm) = self.query_down;
        let cache = upload.cache(spec.cache());
        let dim = spec.dim;
        // Scores are divided by the root of a head's width.
        let unit = upload.vector(&vec![1.0 / (dim as f32).sqrt(); dim])?;
        let norm_of = |columns: std::ops::Range<usize>, weight: B::Vector| PartNorm {
            counted: columns.clone(),
            columns,
            weight,
            width: dim,
            eps,
        };
        let heads = if self.query_norm { spec.heads } else { 0 };
        let query_norms = HeadNorms {
            norms: (0..heads).map(|head| norm_of(head * dim..(head + 1) * dim, unit.clone())).collect(),
            centered: Vec::new(),
            sums_buffer: upload.shared_buffer("square sums", heads)?,
        };
        let vector_norm = HeadNorms {
            norms: vec![norm_of(0..dim, upload.vector(&self.vector_norm)?)],
            centered: Vec::new(),
            sums_buffer: upload.shared_buffer("square sums", 1)?,
        };
        let append = LatentSpec {
            heads: 0,
            rank: dim - spec.rotated,
            rotated: spec.rotated,
            plain: 0,
            scale: 1.0,
            norm: Norm { weight: unit, eps },
            rope: None,
        };
        let group_rank = self.groups.first().map_or(0, |group| group.rows);
        Ok(Compressed {
            rope: self.rope,
            query_norms,
            query_scale: (!self.query_norm).then(|| 1.0 / (dim as f32).sqrt()),
            rounds: self.rounds,
            vector_norm,
            append,
            compressor: self.compressor.map(|of| of.upload(upload)).transpose()?,
            selection: self.selection.map(|of| of.upload(upload)).transpose()?.map(Box::new),
            shared: self.shared.map(|of| of.upload(upload)).transpose()?.map(Box::new),
            query_down: QueryDown {
                buffer: upload.shared_buffer("compressed queries", down.rows)?,
                matrix: upload.matrix(&[down])?,
                norm: upload.norm(&down_norm, eps)?,
            },
            query: upload.matrix(&[self.query])?,
            vector: upload.matrix(&[self.vector])?,
            out: upload.matrix(&[self.out])?,
            group_columns: self.group_columns,
            cache,
            queries_buffer: upload.shared_buffer("queries", spec.heads * dim)?,
            vector_buffer: upload.shared_buffer("latent", dim)?,
            heads_buffer: upload.shared_buffer("heads", spec.heads * dim)?,
            groups_buffer: upload.shared_buffer("groups of heads", self.groups.len() * group_rank)?,
            groups: upload.heads(&self.groups, self.groups.iter().map(MatrixSource::bytes).sum())?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}

impl<'a> CompressorSources<'a> {
    fn describe(
        view: &ShardView<'a>,
        layer: usize,
        (dim, of, eps): (usize, &CompressionShape, f32),
        rope: &Rope,
        (matrices, [places, norm]): ([LayerRole; 2], [LayerRole; 2]),
    ) -> Result<Self, ModelError> {
        let (hidden, width) = (view.spec.hidden, of.width(dim));
        let [values, gates] = matrices.map(|role| whole(view, layer, role, [width, hidden]));
        let spec = CompressionSpec {
            dim,
            every: of.every,
            overlaps: of.overlaps,
            place_bias: view.weights.vector(places.of(layer), &[of.every, width])?,
            norm: Some(Norm { weight: view.vector(layer, norm, dim)?, eps }),
            rope: rope.clone(),
        };
        Ok(Self { spec, matrices: [values?, gates?] })
    }

    fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Compressor<B>, ModelError> {
        let [values, gates] = self.matrices;
        let width = self.spec.width();
        Ok(Compressor {
            caches: [upload.cache(self.spec.state()), upload.cache(self.spec.cache())],
            buffers: [upload.shared_buffer("values", width)?, upload.shared_buffer("gates", width)?],
            matrices: [upload.matrix(&[values])?, upload.matrix(&[gates])?],
            spec: self.spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}

impl<'a> SelectionSources<'a> {
    fn describe(
        view: &ShardView<'a>,
        layer: usize,
        (of, selection): (&CompressionShape, &SelectionShape),
        shape: &CompressedShape,
        rope: &Rope,
    ) -> Result<Self, ModelError> {
        let SelectionShape { heads, dim, chosen, .. } = *selection;
        let matrices = [LayerRole::IndexValues, LayerRole::IndexGates];
        let vectors = [LayerRole::IndexPlaces, LayerRole::IndexNorm];
        let of_keys = (dim, of, shape.norm_eps);
        Ok(Self {
            spec: SelectionSpec { heads, dim, chosen, every: of.every },
            keys: CompressorSources::describe(view, layer, of_keys, rope, (matrices, vectors))?,
            query: whole(view, layer, LayerRole::IndexQuery, [heads * dim, shape.query_rank])?,
            weights: whole(view, layer, LayerRole::IndexWeights, [heads, view.spec.hidden])?,
        })
    }

    fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<CompressedSelection<B>, ModelError> {
        let SelectionSpec { heads, dim, .. } = self.spec;
        Ok(CompressedSelection {
            keys: self.keys.upload(upload)?,
            query: upload.matrix(&[self.query])?,
            weights: upload.matrix(&[self.weights])?,
            queries_buffer: upload.shared_buffer("indexer", heads * dim)?,
            weights_buffer: upload.shared_buffer("indexer's weights", heads)?,
            selection_buffer: upload.shared_buffer("selection", self.spec.columns())?,
            spec: self.spec,
        })
    }
}
