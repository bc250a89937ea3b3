//! What a rank reads for the gated delta rule.

use std::ops::Range;

use thunder_compute::{Backend, CacheKind, DeltaSpec, MatrixSource, Norm};

use super::sources::{Runs, ShardView, Window, whole_groups};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::Delta;
use crate::spec::DeltaShape;
use crate::weights::LayerRole;

/// One layer's gated delta rule on this rank, which has some key heads and the value heads that
/// share them.
pub(super) struct DeltaSources<'a> {
    spec: DeltaSpec<Vec<f32>>,
    inputs: Inputs<'a>,
    out: MatrixSource<'a>,
}

/// Projections of the residual stream.
struct Inputs<'a> {
    /// Queries, keys, values.
    qkv: [MatrixSource<'a>; 3],
    /// Write strengths, decays.
    gates: [MatrixSource<'a>; 2],
    output_gate: MatrixSource<'a>,
}

/// A rank's heads.
struct DeltaHeads {
    keys: Range<usize>,
    values: Range<usize>,
}

impl DeltaHeads {
    /// Outputs of the key heads.
    fn key_outputs(&self, shape: &DeltaShape) -> Range<usize> {
        self.keys.start * shape.key_dim..self.keys.end * shape.key_dim
    }

    /// Outputs of the value heads.
    fn value_outputs(&self, shape: &DeltaShape) -> Range<usize> {
        self.values.start * shape.value_dim..self.values.end * shape.value_dim
    }

    /// Rows of `[queries, keys, values]`.
    fn qkv_rows(&self, shape: &DeltaShape) -> [Range<usize>; 3] {
        let first_key = shape.key_heads * shape.key_dim;
        let (keys, values) = (self.key_outputs(shape), self.value_outputs(shape));
        let after = |first: usize, of: &Range<usize>| first + of.start..first + of.end;
        [keys.clone(), after(first_key, &keys), after(2 * first_key, &values)]
    }
}

impl<'a> Inputs<'a> {
    fn describe(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<Self, ModelError> {
        match view.weights.has(LayerRole::DeltaQkvz.of(layer)) {
            true => Self::in_two(view, layer, shape, heads),
            false => Self::in_four(view, layer, shape, heads),
        }
    }

    /// As Qwen3.5 stores them.
    fn in_four(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<Self, ModelError> {
        let hidden = view.spec.hidden;
        let matrix = |role: LayerRole, outputs, rows| {
            view.matrix(role.of(layer), [outputs, hidden], Window { rows, cols: 0..hidden, bias: false })
        };
        let [q, k, v] = heads.qkv_rows(shape).map(|rows| matrix(LayerRole::DeltaQkv, shape.channels(), rows));
        let gate = |role| matrix(role, shape.value_heads, heads.values.clone());
        let all_values = shape.value_heads * shape.value_dim;
        Ok(Self {
            qkv: [q?, k?, v?],
            gates: [gate(LayerRole::DeltaBeta)?, gate(LayerRole::DeltaDecay)?],
            output_gate: matrix(LayerRole::DeltaGate, all_values, heads.value_outputs(shape))?,
        })
    }

    /// As Qwen3-Next stores them: one key head after the other, each with its query, its key, and
    /// the values and output gates of its value heads; and the same for strengths and decays.
    fn in_two(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<Self, ModelError> {
        let hidden = view.spec.hidden;
        let (group, key_dim) = (shape.value_heads / shape.key_heads, shape.key_dim);
        let values = group * shape.value_dim;
        let runs = |role: LayerRole, stride: usize, first: usize, run: usize, outputs: Range<usize>| {
            let runs = Runs { first, run, stride, outputs };
            view.runs(role.of(layer), [shape.key_heads * stride, hidden], &runs, false)
        };
        let stride = 2 * (key_dim + values);
        let part = |first, run, outputs| runs(LayerRole::DeltaQkvz, stride, first, run, outputs);
        let gate = |first| runs(LayerRole::DeltaBa, 2 * group, first, group, heads.values.clone());
        let (own_keys, own_values) = (heads.key_outputs(shape), heads.value_outputs(shape));
        Ok(Self {
            qkv: [
                part(0, key_dim, own_keys.clone())?,
                part(key_dim, key_dim, own_keys)?,
                part(2 * key_dim, values, own_values.clone())?,
            ],
            gates: [gate(0)?, gate(group)?],
            output_gate: part(2 * key_dim + values, values, own_values)?,
        })
    }
}

impl<'a> DeltaSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &DeltaShape) -> Result<Self, ModelError> {
        let (hidden, all_values) = (view.spec.hidden, shape.value_heads * shape.value_dim);
        let group = shape.value_heads / shape.key_heads;
        let unit = view.weights.format(LayerRole::DeltaOut.of(layer))?.column_unit();
        let keys = view.shard.channels(shape.key_heads, whole_groups(group * shape.value_dim, unit));
        let heads = DeltaHeads { values: keys.start * group..keys.end * group, keys };
        let out = view.matrix(
            LayerRole::DeltaOut.of(layer),
            [hidden, all_values],
            Window { rows: 0..hidden, cols: heads.value_outputs(shape), bias: false },
        )?;
        let taps = view
            .weights
            .vector(LayerRole::DeltaConvolution.of(layer), &[shape.channels(), 1, shape.kernel])?;
        let rows = heads.qkv_rows(shape);
        let taps = rows.iter().flat_map(|rows| &taps[rows.start * shape.kernel..rows.end * shape.kernel]);
        let of_heads = |role| {
            Ok::<_, ModelError>(view.vector(layer, role, shape.value_heads)?[heads.values.clone()].to_vec())
        };
        let norm = view.vector(layer, LayerRole::DeltaNorm, shape.value_dim)?;
        let spec = DeltaSpec {
            key_heads: heads.keys.len(),
            value_heads: heads.values.len(),
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            kernel: shape.kernel,
            taps: taps.copied().collect(),
            decay: of_heads(LayerRole::DeltaLogRate)?,
            decay_bias: of_heads(LayerRole::DeltaTimeBias)?,
            norm: Norm { weight: norm, eps: view.spec.norm_eps },
        };
        Ok(Self { spec, inputs: Inputs::describe(view, layer, shape, &heads)?, out })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let Inputs { qkv, gates, output_gate } = &self.inputs;
        qkv.iter().chain(gates).chain([output_gate, &self.out]).collect()
    }

    pub fn cache(&self) -> CacheKind {
        self.spec.cache()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Delta<B>, ModelError> {
        let Self { spec, inputs: Inputs { qkv, gates, output_gate }, out } = self;
        let values = spec.value_heads * spec.value_dim;
        Ok(Delta {
            cache: upload.cache(spec.cache()),
            qkv_buffer: upload.shared_buffer("convolved", spec.channels())?,
            gates_buffer: upload.shared_buffer("delta gates", 2 * spec.value_heads)?,
            output_gate_buffer: upload.shared_buffer("output gate", values)?,
            heads_buffer: upload.shared_buffer("heads", values)?,
            qkv: upload.matrix(&qkv)?,
            gates: upload.matrix(&gates)?,
            output_gate: upload.matrix(&[output_gate])?,
            out: upload.matrix(&[out])?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}
