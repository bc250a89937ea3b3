//! What a rank reads for the delta rule with a decay for each channel (Kimi Delta Attention).

use std::ops::Range;

use thunder_compute::{Backend, CacheKind, DeltaSpec, HeadSharing, MatrixSource, Norm, PartNorm};

use super::sources::{ShardView, Window, whole_groups};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::channel_delta::{ChannelDelta, Gates, TwoProducts};
use crate::model::mixer::HeadNorms;
use crate::spec::ChannelDeltaShape;
use crate::weights::LayerRole;

/// One layer's delta rule on this rank, which has some of the heads.
pub(super) struct ChannelDeltaSources<'a> {
    spec: DeltaSpec<Vec<f32>>,
    qkv: [MatrixSource<'a>; 3],
    beta: MatrixSource<'a>,
    /// From the residual stream to a narrow vector, and from there to the heads.
    decays: [MatrixSource<'a>; 2],
    /// By way of a narrow vector, or in one product.
    gates: Vec<MatrixSource<'a>>,
    out: MatrixSource<'a>,
}

impl<'a> ChannelDeltaSources<'a> {
    pub fn describe(
        view: &ShardView<'a>,
        layer: usize,
        shape: &ChannelDeltaShape,
    ) -> Result<Self, ModelError> {
        let (hidden, dim) = (view.spec.hidden, shape.dim);
        let unit = view.weights.format(LayerRole::AttentionOut.of(layer))?.column_unit();
        let heads = view.shard.channels(shape.heads, whole_groups(dim, unit));
        let (all, rows) = (shape.heads * dim, heads.start * dim..heads.end * dim);
        let matrix = |role: LayerRole, [outputs, inputs]: [usize; 2], rows: Range<usize>| {
            view.matrix(role.of(layer), [outputs, inputs], Window { rows, cols: 0..inputs, bias: false })
        };
        let heads_of = |role| matrix(role, [all, hidden], rows.clone());
        // MLX-LM's Kimi K3 has queries, keys and values in one.
        let is_fused = view.weights.has(LayerRole::Qkv.of(layer));
        let part = |role: LayerRole, first: usize| match is_fused {
            true => matrix(LayerRole::Qkv, [3 * all, hidden], first + rows.start..first + rows.end),
            false => heads_of(role),
        };
        let two = |down, up| {
            Ok::<_, ModelError>([matrix(down, [dim, hidden], 0..dim)?, matrix(up, [all, dim], rows.clone())?])
        };
        let taps = |role: LayerRole| {
            let all = view.weights.vector(role.of(layer), &[all, 1, shape.kernel])?;
            Ok::<_, ModelError>(all[rows.start * shape.kernel..rows.end * shape.kernel].to_vec())
        };
        let taps = match view.weights.has(LayerRole::DeltaConvolution.of(layer)) {
            // As transformers keeps them in memory.
            true => {
                let all_taps = [3 * all, 1, shape.kernel];
                let every = view.weights.vector(LayerRole::DeltaConvolution.of(layer), &all_taps)?;
                let part = |first: usize| {
                    let rows = (first + rows.start) * shape.kernel..(first + rows.end) * shape.kernel;
                    every[rows].to_vec()
                };
                [part(0), part(all), part(2 * all)].concat()
            }
            false => [
                taps(LayerRole::QueryConvolution)?,
                taps(LayerRole::KeyConvolution)?,
                taps(LayerRole::ValueConvolution)?,
            ]
            .concat(),
        };
        let decay = view.vector(layer, LayerRole::DeltaLogRate, shape.heads)?;
        let window = Window { rows: 0..hidden, cols: rows.clone(), bias: false };
        let out = view.matrix(LayerRole::AttentionOut.of(layer), [hidden, all], window)?;
        let spec = DeltaSpec {
            key_heads: heads.len(),
            value_heads: heads.len(),
            sharing: HeadSharing::Grouped,
            key_dim: dim,
            value_dim: dim,
            kernel: shape.kernel,
            unit_eps: shape.unit_eps,
            decays: shape.decays,
            taps,
            decay: decay[heads.clone()].to_vec(),
            decay_bias: view.vector(layer, LayerRole::DeltaTimeBias, all)?[rows.clone()].to_vec(),
            norm: Norm { weight: view.vector(layer, LayerRole::DeltaNorm, dim)?, eps: view.spec.norm_eps },
        };
        Ok(Self {
            spec,
            qkv: [part(LayerRole::Query, 0)?, part(LayerRole::Key, all)?, part(LayerRole::Value, 2 * all)?],
            beta: matrix(LayerRole::DeltaBeta, [shape.heads, hidden], heads)?,
            decays: two(LayerRole::DecayDown, LayerRole::DecayUp)?,
            gates: match shape.whole_gates {
                true => vec![heads_of(LayerRole::OutputGate)?],
                false => two(LayerRole::OutputGateDown, LayerRole::OutputGateUp)?.into(),
            },
            out,
        })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let Self { qkv, beta, decays, gates, out, .. } = self;
        qkv.iter().chain([beta, out]).chain(decays).chain(gates).collect()
    }

    pub fn cache(&self) -> CacheKind {
        self.spec.cache()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<ChannelDelta<B>, ModelError> {
        let Self { spec, qkv, beta, decays, gates, out } = self;
        let (heads, dim) = (spec.value_heads, spec.value_dim);
        let width = heads * dim;
        let mut two = |[down, up]: [MatrixSource<'a>; 2]| {
            Ok::<_, ModelError>(TwoProducts {
                buffer: upload.shared_buffer("narrow", dim)?,
                down: upload.matrix(&[down])?,
                up: upload.matrix(&[up])?,
            })
        };
        let decays = two(decays)?;
        let gates = match <[MatrixSource<'a>; 2]>::try_from(gates) {
            Ok(both) => Gates::Narrow(two(both)?),
            Err(one) => Gates::Whole(upload.matrix(&one)?),
        };
        let spec = spec.try_map(&mut |values| upload.vector(&values))?;
        let norm = |head: usize| {
            let columns = head * dim..(head + 1) * dim;
            let (weight, eps) = (spec.norm.weight.clone(), spec.norm.eps);
            PartNorm { counted: columns.clone(), columns, weight, width: dim, eps }
        };
        let norms = HeadNorms {
            norms: (0..heads).map(norm).collect(),
            centered: Vec::new(),
            sums_buffer: upload.shared_buffer("square sums", heads)?,
        };
        Ok(ChannelDelta {
            cache: upload.cache(spec.cache()),
            qkv_buffer: upload.shared_buffer("convolved", spec.channels())?,
            beta_buffer: upload.shared_buffer("write strengths", heads)?,
            decays_buffer: upload.shared_buffer("decays", width)?,
            heads_buffer: upload.shared_buffer("heads", width)?,
            both_buffer: upload.shared_buffer("gates and heads of states", 2 * width)?,
            gated_buffer: upload.shared_buffer("gated heads", width)?,
            qkv: upload.matrix(&qkv)?,
            beta: upload.matrix(&[beta])?,
            out: upload.matrix(&[out])?,
            decays,
            gates,
            norms,
            spec,
        })
    }
}
