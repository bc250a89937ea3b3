//! What a rank reads for grouped-query attention.

use std::ops::Range;

use thunder_compute::{AttentionSpec, Backend, CacheKind, MatrixSource, QkNorm};

use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::Attention;
use crate::plan::HeadShare;
use crate::spec::AttentionShape;
use crate::weights::LayerRole;

/// One layer's attention on this rank.
pub(super) struct AttentionSources<'a> {
    spec: AttentionSpec<Vec<f32>>,
    /// Queries, keys, values.
    qkv: [MatrixSource<'a>; 3],
    out: MatrixSource<'a>,
}

impl<'a> AttentionSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &AttentionShape) -> Result<Self, ModelError> {
        let (dim, hidden) = (shape.head_dim, view.spec.hidden);
        let heads = view.shard.heads(shape);
        let projection = |role: LayerRole, all: usize, own: &Range<usize>| {
            let window =
                Window { rows: own.start * dim..own.end * dim, cols: 0..hidden, bias: shape.qkv_bias };
            view.matrix(role.of(layer), [all * dim, hidden], window)
        };
        let qkv = [
            projection(LayerRole::Query, shape.heads, &heads.queries)?,
            projection(LayerRole::Key, shape.kv_heads, &heads.kv)?,
            projection(LayerRole::Value, shape.kv_heads, &heads.kv)?,
        ];
        let (out, out_column) = out_projection(view, layer, shape, &heads)?;
        let qk_norm = match shape.qk_norm {
            true => Some(QkNorm {
                query: view.vector(layer, LayerRole::QueryNorm, dim)?,
                key: view.vector(layer, LayerRole::KeyNorm, dim)?,
                eps: view.spec.norm_eps,
            }),
            false => None,
        };
        let sinks = match shape.sinks {
            true => {
                let all = view.vector(layer, LayerRole::AttentionSinks, shape.heads)?;
                Some(all[heads.queries.clone()].to_vec())
            }
            false => None,
        };
        let spec = AttentionSpec {
            key_dim: dim,
            value_dim: dim,
            queries_of: heads.queries_of,
            scale: 1.0 / (dim as f32).sqrt(),
            window: shape.window,
            qk_norm,
            rope: shape.rope,
            sinks,
            temperature: shape.temperature,
            out_column,
        };
        Ok(Self { spec, qkv, out })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        self.qkv.iter().chain([&self.out]).collect()
    }

    pub fn cache(&self) -> CacheKind {
        self.spec.cache()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Attention<B>, ModelError> {
        let Self { spec, qkv, out } = self;
        let heads = spec.out_column..spec.out_column + spec.heads() * spec.value_dim;
        Ok(Attention {
            cache: upload.cache(spec.cache()),
            qkv_buffer: upload.shared_buffer("qkv", spec.qkv_width())?,
            heads_buffer: upload.partly_written_buffer("heads", out.cols, heads)?,
            qkv: upload.matrix(&qkv)?,
            out: upload.matrix(&[out])?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}

/// The columns of the output projection that belong to these heads, and where the heads begin in
/// them.
///
/// Heads may begin inside of a quantization group. Then the window takes the whole group, and the
/// rank's input is zero in the columns of other ranks' heads.
fn out_projection<'a>(
    view: &ShardView<'a>,
    layer: usize,
    shape: &AttentionShape,
    heads: &HeadShare,
) -> Result<(MatrixSource<'a>, usize), ModelError> {
    let (dim, hidden, role) = (shape.head_dim, view.spec.hidden, LayerRole::AttentionOut.of(layer));
    let unit = view.weights.format(role)?.column_unit();
    let columns = heads.queries.start * dim..heads.queries.end * dim;
    let window = match columns.is_empty() {
        true => 0..0,
        false => columns.start / unit * unit..columns.end.next_multiple_of(unit),
    };
    let out_column = columns.start - window.start.min(columns.start);
    let bias = shape.out_bias && view.shard.adds_once();
    let window = Window { rows: 0..hidden, cols: window, bias };
    Ok((view.matrix(role, [hidden, shape.heads * dim], window)?, out_column))
}
