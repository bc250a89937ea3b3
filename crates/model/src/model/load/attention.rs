//! What a rank reads for grouped-query attention.

use std::ops::Range;

use thunder_compute::{AttentionSpec, Backend, CacheKind, Extra, MatrixSource, PartNorm, QkNorm, Scoring};

use super::adapters::AdaptersSources;
use super::sources::{Runs, ShardView, Window, of_other_rank};
use super::upload::{SharedCache, Upload};
use crate::error::ModelError;
use crate::model::mixer::{Attention, HeadGates, HeadNorms, OutputGate};
use crate::plan::HeadShare;
use crate::spec::{AttentionShape, QkNormWidth, Temperature};
use crate::weights::{AdaptedOutputs, LayerRole};

/// One layer's attention on this rank.
pub(super) struct AttentionSources<'a> {
    spec: AttentionSpec<Vec<f32>>,
    /// Queries, keys, values; only queries if the layer reads another one's keys and values.
    qkv: Vec<MatrixSource<'a>>,
    layer: usize,
    keys_of: Option<usize>,
    part_norms: Vec<PartNorm<Vec<f32>>>,
    /// Before rotation, and after.
    head_norms: [OwnNorms; 2],
    temperature: Option<Temperature>,
    scoring: Scoring,
    value_scale: f32,
    /// A gate for each input of `out`, also for those of other ranks' heads, which are zero.
    gate: Option<MatrixSource<'a>>,
    /// A gate for each head.
    head_gates: Option<MatrixSource<'a>>,
    out: MatrixSource<'a>,
    /// Of queries, keys and values, and of the output projection.
    adapters: [AdaptersSources<'a>; 2],
}

/// Norms of single heads.
#[derive(Default)]
struct OwnNorms {
    norms: Vec<PartNorm<Vec<f32>>>,
    /// Columns whose mean is subtracted first.
    centered: Vec<Range<usize>>,
}

impl OwnNorms {
    fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Option<HeadNorms<B>>, ModelError> {
        let Self { norms, centered } = self;
        if norms.is_empty() {
            return Ok(None);
        }
        let sums_buffer = upload.shared_buffer("square sums", norms.len())?;
        let norms = norms.into_iter().map(|norm| norm.try_map(&mut |values| upload.vector(&values)));
        Ok(Some(HeadNorms { norms: norms.collect::<Result<_, _>>()?, centered, sums_buffer }))
    }
}

impl<'a> AttentionSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &AttentionShape) -> Result<Self, ModelError> {
        let (dim, value_dim) = (shape.head_dim, shape.value_dim);
        let heads = view.shard.heads(shape);
        if let Some(source) = shape.keys_of.filter(|source| !view.shard.layers().contains(source)) {
            return Err(of_other_rank(layer, source));
        }
        let (out, first_column) = out_projection(view, layer, shape, &heads)?;
        let gate = match shape.output_gate {
            true => {
                let columns = first_column..first_column + out.cols;
                Some(of_gated_queries(view, layer, shape, (dim, columns))?)
            }
            false => None,
        };
        let head_gates = match shape.head_gates {
            true => {
                let (rows, cols) = (heads.queries.clone(), 0..view.spec.hidden);
                let window = Window { rows, cols: cols.clone(), bias: false };
                Some(view.matrix(LayerRole::OutputGate.of(layer), [shape.heads, cols.end], window)?)
            }
            false => None,
        };
        let eps = view.spec.norm_eps;
        let qk_norm = match shape.qk_norm {
            Some(QkNormWidth::Head) => Some(QkNorm {
                query: view.norm(LayerRole::QueryNorm.of(layer), dim)?,
                key: match shape.keys_of {
                    None => view.norm(LayerRole::KeyNorm.of(layer), dim)?,
                    Some(_) => vec![1.0; dim],
                },
                eps,
            }),
            // Rotation does not change lengths, so the norm may come before or after it.
            Some(QkNormWidth::Unweighted) => Some(QkNorm { query: vec![1.0; dim], key: vec![1.0; dim], eps }),
            _ => None,
        };
        let part_norms = match shape.qk_norm {
            Some(QkNormWidth::All) => part_norms(view, layer, shape, &heads)?,
            _ => Vec::new(),
        };
        let sinks = match shape.sinks {
            true => {
                let all = view.vector(layer, LayerRole::AttentionSinks, shape.heads)?;
                Some(all[heads.queries.clone()].to_vec())
            }
            false => None,
        };
        let qkv = projections(view, layer, shape, &heads)?;
        let kv_and_queries = [heads.kv.clone(), heads.queries.clone()];
        // Gates are the columns before the heads' results.
        let gates = gate.as_ref().map_or(0, |gate| gate.rows);
        // A norm after rotation would undo the scale of queries, so its weights include the scale.
        let scale = if shape.qk_norm == Some(QkNormWidth::Rotated) { 1.0 } else { shape.scale };
        let in_spec = shape.temperature.filter(|temperature| temperature.first == 0);
        let adapters = adapters(view, layer, shape, (&heads, first_column..first_column + out.cols));
        let spec = AttentionSpec {
            key_dim: dim,
            value_dim,
            out_column: gates + heads.queries.start * value_dim - first_column,
            queries_of: heads.queries_of,
            scale,
            window: shape.window,
            qk_norm,
            rope: shape.rope,
            sinks,
            temperature: in_spec.map(|temperature| (temperature.beta, temperature.original)),
        };
        let temperature = shape.temperature.filter(|temperature| temperature.first != 0);
        let head_norms = head_norms(view, layer, shape, (&spec, &kv_and_queries))?;
        let (scoring, value_scale) = (shape.scoring, shape.value_scale);
        Ok(Self {
            spec,
            qkv,
            layer,
            keys_of: shape.keys_of,
            part_norms,
            head_norms,
            temperature,
            scoring,
            value_scale,
            gate,
            head_gates,
            out,
            adapters,
        })
    }

    /// Bytes of what adapters change.
    pub fn adapter_bytes(&self) -> u64 {
        self.adapters.iter().map(AdaptersSources::bytes).sum()
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        self.qkv.iter().chain(&self.gate).chain(&self.head_gates).chain([&self.out]).collect()
    }

    /// An operation that not every backend has.
    pub fn needs(&self) -> Option<Extra> {
        let operation = if self.scoring.after > 0 { Extra::LaterTokens } else { Extra::Scoring };
        (self.scoring != Scoring::default()).then_some(operation)
    }

    /// The cache of the layer's own keys and values.
    pub fn cache(&self) -> Option<CacheKind> {
        self.keys_of.is_none().then(|| self.spec.cache())
    }

    /// The cache that the layer attends to, and the most query heads of a KV head.
    pub fn attended(&self) -> (CacheKind, usize) {
        let queries = self.spec.queries_of.iter().map(|queries| queries.len()).max();
        (self.spec.cache(), queries.unwrap_or(0))
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Attention<B>, ModelError> {
        let Self {
            spec,
            qkv,
            layer,
            keys_of,
            part_norms,
            head_norms: [before, after],
            temperature,
            scoring,
            value_scale,
            gate,
            head_gates,
            out,
            adapters,
        } = self;
        let [qkv_adapters, out_adapters] = adapters;
        let heads = spec.out_column..spec.out_column + spec.heads() * spec.value_dim;
        let (heads_buffer, gate) = match gate {
            Some(gate) => {
                let heads_buffer = upload.partly_written_buffer("gates and heads", 2 * out.cols, heads)?;
                let gated_buffer = upload.shared_buffer("gated heads", out.cols)?;
                (heads_buffer, Some(OutputGate { matrix: upload.matrix(&[gate])?, gated_buffer }))
            }
            None => (upload.partly_written_buffer("heads", out.cols, heads)?, None),
        };
        let head_gates = match head_gates {
            Some(gates) => Some(HeadGates {
                buffer: upload.shared_buffer("head gates", spec.heads())?,
                matrix: upload.matrix(&[gates])?,
            }),
            None => None,
        };
        let part_norms = part_norms
            .into_iter()
            .map(|norm| norm.try_map(&mut |values: Vec<f32>| upload.vector(&values)))
            .collect::<Result<_, _>>()?;
        Ok(Attention {
            head_norms: [before.upload(upload)?, after.upload(upload)?],
            temperature,
            scoring,
            value_scale,
            appends: keys_of.is_none(),
            cache: match keys_of {
                None => upload.share_cache(layer, SharedCache::Heads, spec.cache()),
                Some(source) => upload.cache_of(source, SharedCache::Heads),
            },
            qkv_buffer: upload.shared_buffer("qkv", spec.qkv_width())?,
            heads_buffer,
            qkv: upload.matrix(&qkv)?,
            qkv_adapters: qkv_adapters.upload(upload)?,
            out_adapters: out_adapters.upload(upload)?,
            part_norms,
            gate,
            head_gates,
            out: upload.matrix(&[out])?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}

/// The rank's query, key and value projections: from separate tensors, from one, or with the
/// queries from one that also has gates. Only that of queries if another layer has the rest.
fn projections<'a>(
    view: &ShardView<'a>,
    layer: usize,
    shape: &AttentionShape,
    heads: &HeadShare,
) -> Result<Vec<MatrixSource<'a>>, ModelError> {
    let (key_dim, value_dim, hidden) = (shape.head_dim, shape.value_dim, view.spec.hidden);
    let fused = view.weights.has(LayerRole::Qkv.of(layer));
    let rows = |own: &Range<usize>, dim: usize| own.start * dim..own.end * dim;
    let keys = (shape.heads + shape.kv_heads) * key_dim;
    // `before` rows precede these heads' in one tensor of all.
    let projection = |role: LayerRole, (before, all, dim): (usize, usize, usize), own: &Range<usize>| {
        let own = rows(own, dim);
        let (role, all, own) = match fused {
            true => (LayerRole::Qkv, keys + shape.kv_heads * value_dim, before + own.start..before + own.end),
            false => (role, all * dim, own),
        };
        let window = Window { rows: own, cols: 0..hidden, bias: shape.qkv_bias };
        view.matrix(role.of(layer), [all, hidden], window)
    };
    let (of_queries, of_keys) = ((0, shape.heads, key_dim), (shape.heads * key_dim, shape.kv_heads, key_dim));
    let queries = match shape.output_gate {
        true => of_gated_queries(view, layer, shape, (0, rows(&heads.queries, key_dim)))?,
        false => projection(LayerRole::Query, of_queries, &heads.queries)?,
    };
    if shape.keys_of.is_some() {
        return Ok(vec![queries]);
    }
    Ok(vec![
        queries,
        projection(LayerRole::Key, of_keys, &heads.kv)?,
        match shape.values_are_keys {
            true => projection(LayerRole::Key, of_keys, &heads.kv)?,
            false => projection(LayerRole::Value, (keys, shape.kv_heads, value_dim), &heads.kv)?,
        },
    ])
}

/// The adapters' changes of the rank's projections: of queries, keys and values, and of the
/// output's columns `out`.
fn adapters<'a>(
    view: &ShardView<'a>,
    layer: usize,
    shape: &AttentionShape,
    (heads, out): (&HeadShare, Range<usize>),
) -> [AdaptersSources<'a>; 2] {
    let (dim, hidden) = (shape.head_dim, 0..view.spec.hidden);
    let outputs = |role, before: usize, dim: usize, own: &Range<usize>| AdaptedOutputs {
        modules: vec![(role, 0), (LayerRole::Qkv, before)],
        rows: own.start * dim..own.end * dim,
    };
    let qkv = vec![
        outputs(LayerRole::Query, 0, dim, &heads.queries),
        outputs(LayerRole::Key, shape.heads * dim, dim, &heads.kv),
        outputs(LayerRole::Value, (shape.heads + shape.kv_heads) * dim, shape.value_dim, &heads.kv),
    ];
    let of_out = vec![AdaptedOutputs { modules: vec![(LayerRole::AttentionOut, 0)], rows: hidden.clone() }];
    [AdaptersSources::describe(view, layer, qkv, hidden), AdaptersSources::describe(view, layer, of_out, out)]
}

/// Some columns of all heads, from the tensor that has each head's query, then its gate.
fn of_gated_queries<'a>(
    view: &ShardView<'a>,
    layer: usize,
    shape: &AttentionShape,
    (first, columns): (usize, Range<usize>),
) -> Result<MatrixSource<'a>, ModelError> {
    let dim = shape.head_dim;
    let runs = Runs { first, run: dim, stride: 2 * dim, outputs: columns };
    let all = [2 * shape.heads * dim, view.spec.hidden];
    view.runs(LayerRole::Query.of(layer), all, &runs, shape.qkv_bias)
}

/// The rank's part of the norms of all queries and of all keys. A KV head on several ranks counts
/// on the rank that has its first query head.
fn part_norms(
    view: &ShardView<'_>,
    layer: usize,
    shape: &AttentionShape,
    heads: &HeadShare,
) -> Result<Vec<PartNorm<Vec<f32>>>, ModelError> {
    let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let HeadShare { queries, kv, .. } = heads;
    let with_first = |query: usize| query.div_ceil(group).clamp(kv.start, kv.end);
    let counted = with_first(queries.start)..with_first(queries.end);
    let norm = |role: LayerRole, all: usize, own: &Range<usize>, counted: &Range<usize>, first: usize| {
        let weight = view.norm(role.of(layer), all * dim)?;
        let column = |head: usize| first + (head - own.start) * dim;
        let columns = |heads: &Range<usize>| column(heads.start)..column(heads.end);
        Ok::<_, ModelError>(PartNorm {
            columns: columns(own),
            counted: columns(counted),
            weight: weight[own.start * dim..own.end * dim].to_vec(),
            width: all * dim,
            eps: view.spec.norm_eps,
        })
    };
    Ok(vec![
        norm(LayerRole::QueryNorm, shape.heads, queries, queries, 0)?,
        norm(LayerRole::KeyNorm, shape.kv_heads, kv, &counted, queries.len() * dim)?,
    ])
}

/// The norms of single heads that [`AttentionSpec`] does not have, before rotation and after.
fn head_norms(
    view: &ShardView<'_>,
    layer: usize,
    shape: &AttentionShape,
    (spec, [kv, queries]): (&AttentionSpec<Vec<f32>>, &[Range<usize>; 2]),
) -> Result<[OwnNorms; 2], ModelError> {
    let (dim, eps) = (shape.head_dim, view.spec.norm_eps);
    let norm = |first: usize, weight: Vec<f32>| {
        let columns = first..first + dim;
        PartNorm { counted: columns.clone(), columns, weight, width: dim, eps }
    };
    let local_queries = || (0..queries.len()).map(|head| spec.query_column(head));
    let local_keys = || (0..kv.len()).map(|head| spec.key_column(head));
    let [mut before, mut after] = [OwnNorms::default(), OwnNorms::default()];
    match shape.qk_norm {
        Some(QkNormWidth::Rotated) => {
            let mut query = view.norm(LayerRole::QueryNorm.of(layer), dim)?;
            query.iter_mut().for_each(|weight| *weight *= shape.scale);
            let key = view.norm(LayerRole::KeyNorm.of(layer), dim)?;
            after.norms.extend(local_queries().map(|first| norm(first, query.clone())));
            after.norms.extend(local_keys().map(|first| norm(first, key.clone())));
        }
        Some(QkNormWidth::Centered) => {
            let weights = |role: LayerRole, heads: usize| view.weights.vector(role.of(layer), &[heads, dim]);
            let query = weights(LayerRole::QueryNorm, shape.heads)?;
            let key = weights(LayerRole::KeyNorm, shape.kv_heads)?;
            let of = |all: &[f32], head: usize| all[head * dim..(head + 1) * dim].to_vec();
            let own = local_queries().zip(queries.clone());
            before.norms.extend(own.map(|(first, head)| norm(first, of(&query, head))));
            let own = local_keys().zip(kv.clone());
            before.norms.extend(own.map(|(first, head)| norm(first, of(&key, head))));
            before.centered = before.norms.iter().map(|norm| norm.columns.clone()).collect();
        }
        _ => {}
    }
    if shape.value_norm {
        let values = (0..kv.len()).map(|head| spec.value_column(head));
        before.norms.extend(values.map(|first| norm(first, vec![1.0; dim])));
    }
    Ok([before, after])
}

/// The columns of the output projection that belong to the rank's heads, and the first one's
/// number.
///
/// Heads may begin inside of a quantization group. Then the window takes the whole group, and the
/// rank's input is zero in the columns of other ranks' heads.
fn out_projection<'a>(
    view: &ShardView<'a>,
    layer: usize,
    shape: &AttentionShape,
    heads: &HeadShare,
) -> Result<(MatrixSource<'a>, usize), ModelError> {
    let (dim, hidden, role) = (shape.value_dim, view.spec.hidden, LayerRole::AttentionOut.of(layer));
    let unit = view.weights.format(role)?.column_unit();
    let columns = heads.queries.start * dim..heads.queries.end * dim;
    let (window, first_column) = match columns.is_empty() {
        true => (0..0, columns.start),
        false => {
            let first = columns.start / unit * unit;
            (first..columns.end.next_multiple_of(unit), first)
        }
    };
    let bias = shape.out_bias && view.shard.adds_once();
    let window = Window { rows: 0..hidden, cols: window, bias };
    Ok((view.matrix(role, [hidden, shape.heads * dim], window)?, first_column))
}
