//! What a rank reads for latent attention.

use std::ops::Range;

use thunder_compute::reference::dequantize;
use thunder_compute::{Backend, CacheKind, Extra, LatentSpec, MatrixSource, Norm};

use super::selection::SelectionSources;
use super::sources::{ShardView, Window, of_floats, whole_groups};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::{Latent, LatentGate, QueryDown};
use crate::model::selection::Selected;
use crate::spec::{LatentShape, Temperature};
use crate::weights::{LatentHeadRole, LayerRole, Role};

/// One layer's latent attention on this rank, which has some of the heads, and the whole compressed
/// vector.
pub(super) struct LatentSources<'a> {
    spec: LatentSpec<Vec<f32>>,
    temperature: Option<Temperature>,
    selection: Option<SelectionSources<'a>>,
    value_dim: usize,
    /// Compression of queries, and its norm.
    query_down: Option<(MatrixSource<'a>, Vec<f32>)>,
    query: MatrixSource<'a>,
    latent: MatrixSource<'a>,
    /// Each head's matrices to and from the compressed vector.
    heads: Vec<HeadSources<'a>>,
    out: MatrixSource<'a>,
    gate: Option<MatrixSource<'a>>,
}

/// One head's matrices to and from the compressed vector.
struct HeadSources<'a> {
    /// The key part of `kv_b`: `[plain, rank]`, or `[rank, plain]` if the files have it transposed.
    keys: MatrixSource<'a>,
    transposed: bool,
    /// The value part, `[value_dim, rank]`.
    values: MatrixSource<'a>,
}

impl<'a> LatentSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &LatentShape) -> Result<Self, ModelError> {
        let (hidden, query_dim, value_dim) = (view.spec.hidden, shape.query_dim(), shape.value_dim);
        let matrix = |role: LayerRole, shape, rows, cols| {
            view.matrix(role.of(layer), shape, Window { rows, cols, bias: false })
        };
        let unit = view.weights.format(LayerRole::AttentionOut.of(layer))?.column_unit();
        let heads = view.shard.channels(shape.heads, whole_groups(value_dim, unit));
        let queries = heads.start * query_dim..heads.end * query_dim;
        let all_queries = shape.heads * query_dim;
        let (query_down, query) = match shape.query_rank {
            Some(rank) => {
                let down = matrix(LayerRole::QueryDown, [rank, hidden], 0..rank, 0..hidden)?;
                let norm = view.vector(layer, LayerRole::QueryDownNorm, rank)?;
                let up = matrix(LayerRole::QueryUp, [all_queries, rank], queries, 0..rank)?;
                (Some((down, norm)), up)
            }
            None => (None, matrix(LayerRole::Query, [all_queries, hidden], queries, 0..hidden)?),
        };
        let width = shape.rank + shape.rotated;
        let latent = matrix(LayerRole::KvDown, [width, hidden], 0..width, 0..hidden)?;
        let own = heads.clone().map(|head| HeadSources::describe(view, layer, shape, head));
        let own = own.collect::<Result<_, ModelError>>()?;
        let columns = heads.start * value_dim..heads.end * value_dim;
        let values = shape.heads * value_dim;
        let gate = match shape.output_gate {
            true => Some(matrix(LayerRole::OutputGate, [values, hidden], columns.clone(), 0..hidden)?),
            false => None,
        };
        let out = matrix(LayerRole::AttentionOut, [hidden, values], 0..hidden, columns)?;
        let norm =
            Norm { weight: view.vector(layer, LayerRole::KvDownNorm, shape.rank)?, eps: shape.norm_eps };
        let spec = LatentSpec {
            heads: heads.len(),
            rank: shape.rank,
            rotated: shape.rotated,
            plain: shape.plain,
            scale: shape.scale,
            norm,
            rope: shape.rope,
        };
        let temperature = shape.temperature;
        let selection = match (&shape.selection, shape.query_rank) {
            (Some(selection), Some(rank)) => Some(SelectionSources::describe(view, layer, selection, rank)?),
            _ => None,
        };
        Ok(Self { spec, temperature, selection, value_dim, query_down, query, latent, heads: own, out, gate })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let down = self.query_down.as_ref().map(|(matrix, _)| matrix);
        [&self.query, &self.latent, &self.out]
            .into_iter()
            .chain(down)
            .chain(&self.gate)
            .chain(self.heads.iter().flat_map(|head| [&head.keys, &head.values]))
            .chain(self.selection.iter().flat_map(SelectionSources::matrices))
            .collect()
    }

    /// Bytes that transposed matrices take in memory beyond their packed size, since they are f32.
    pub fn converted_bytes(&self) -> u64 {
        let turned = self.heads.iter().filter(|head| !head.transposed).map(|head| &head.keys);
        turned.map(|keys| (keys.rows * keys.cols * size_of::<f32>() - keys.packed_bytes()) as u64).sum()
    }

    /// Operations that not every backend has.
    pub fn needs(&self) -> Option<Extra> {
        self.selection.as_ref().map(|of| if of.compresses() { Extra::Compression } else { Extra::Selection })
    }

    /// The cache of compressed vectors, and that of the indexer's keys.
    pub fn caches(&self) -> impl Iterator<Item = CacheKind> {
        let keys = self.selection.iter().flat_map(SelectionSources::caches);
        [self.spec.cache()].into_iter().chain(keys)
    }

    /// The cache of compressed vectors, and the heads that attend to it.
    pub fn attended(&self) -> (CacheKind, usize) {
        (self.spec.cache(), self.spec.heads)
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Latent<B>, ModelError> {
        let Self { spec, temperature, selection, value_dim, query_down, query, latent, heads, out, gate } =
            self;
        let width = spec.heads * value_dim;
        let gate = match gate {
            Some(gate) => Some(LatentGate {
                matrix: upload.matrix(&[gate])?,
                both_buffer: upload.shared_buffer("gates and latent heads", 2 * width)?,
                gated_buffer: upload.shared_buffer("gated heads", width)?,
            }),
            None => None,
        };
        let eps = spec.norm.eps;
        let query_down = match query_down {
            Some((matrix, norm)) => Some(QueryDown {
                buffer: upload.shared_buffer("compressed queries", matrix.rows)?,
                matrix: upload.matrix(&[matrix])?,
                norm: upload.norm(&norm, eps)?,
            }),
            None => None,
        };
        let bytes = |of: fn(&HeadSources<'_>) -> usize| heads.iter().map(of).sum();
        let read: [usize; 2] = [bytes(|head| head.keys.bytes()), bytes(|head| head.values.bytes())];
        let turned: Vec<Option<Vec<u8>>> =
            heads.iter().map(|head| (!head.transposed).then(|| transposed(&head.keys))).collect();
        let (mut keys, mut values) = (Vec::with_capacity(heads.len()), Vec::with_capacity(heads.len()));
        for (head, turned) in heads.into_iter().zip(&turned) {
            keys.push(match turned {
                Some(bytes) => of_floats(bytes, [head.keys.cols, head.keys.rows]),
                None => head.keys,
            });
            values.push(head.values);
        }
        let absorb = upload.heads(&keys, read[0])?;
        let expand = upload.heads(&values, read[1])?;
        let cache = upload.cache(spec.cache());
        let selected = match selection {
            Some(selection) => selection.upload(upload)?,
            None => Selected::All,
        };
        Ok(Latent {
            temperature,
            selected,
            cache,
            queries_buffer: upload.shared_buffer("queries", spec.heads * spec.query_dim())?,
            latent_buffer: upload.shared_buffer("latent", spec.rank + spec.rotated)?,
            absorbed_buffer: upload.shared_buffer("absorbed queries", spec.heads * spec.rank)?,
            attended_buffer: upload.shared_buffer("attended", spec.heads * spec.rank)?,
            heads_buffer: upload.shared_buffer("heads", width)?,
            gate,
            query: upload.matrix(&[query])?,
            latent: upload.matrix(&[latent])?,
            out: upload.matrix(&[out])?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
            query_down,
            absorb,
            expand,
        })
    }
}

impl<'a> HeadSources<'a> {
    fn describe(
        view: &ShardView<'a>,
        layer: usize,
        shape: &LatentShape,
        head: usize,
    ) -> Result<Self, ModelError> {
        let (rank, plain, value_dim) = (shape.rank, shape.plain, shape.value_dim);
        let stored = |role| Role::LatentHead { layer, role, index: head, count: shape.heads };
        let transposed = view.weights.has(stored(LatentHeadRole::Absorb));
        let window = |rows, cols| Window { rows, cols, bias: false };
        if transposed {
            let keys =
                view.matrix(stored(LatentHeadRole::Absorb), [rank, plain], window(0..rank, 0..plain))?;
            let values = [value_dim, rank];
            let values =
                view.matrix(stored(LatentHeadRole::Expand), values, window(0..value_dim, 0..rank))?;
            return Ok(Self { keys, transposed, values });
        }
        let (first, height) = (head * (plain + value_dim), shape.heads * (plain + value_dim));
        let part = |rows: Range<usize>| {
            view.matrix(LayerRole::KvUp.of(layer), [height, rank], window(rows, 0..rank))
        };
        let (keys, values) = (part(first..first + plain)?, part(first + plain..first + plain + value_dim)?);
        Ok(Self { keys, transposed, values })
    }
}

/// The transposed matrix in f32, because quantization groups run along rows and do not
/// survive a transposition.
fn transposed(source: &MatrixSource<'_>) -> Vec<u8> {
    let rows = dequantize(source);
    let column = |col: usize| rows.iter().flat_map(move |row| row[col].to_le_bytes());
    (0..source.cols).flat_map(column).collect()
}
