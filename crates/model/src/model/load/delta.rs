//! What a rank reads for the gated delta rule.

use std::ops::Range;

use thunder_compute::{Backend, CacheKind, DeltaSpec, MatrixSource, Norm};

use super::sources::{ShardView, Window, whole_groups};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::Delta;
use crate::spec::DeltaShape;
use crate::weights::LayerRole;

/// One layer's gated delta rule on this rank, which has some key heads and the value heads that
/// share them.
pub(super) struct DeltaSources<'a> {
    spec: DeltaSpec<Vec<f32>>,
    /// Queries, keys, values.
    qkv: [MatrixSource<'a>; 3],
    /// Write strengths, decays.
    gates: [MatrixSource<'a>; 2],
    output_gate: MatrixSource<'a>,
    out: MatrixSource<'a>,
}

/// Rows of `[queries, keys, values]` that belong to some heads.
fn qkv_rows(shape: &DeltaShape, keys: &Range<usize>, values: &Range<usize>) -> [Range<usize>; 3] {
    let first_key = shape.key_heads * shape.key_dim;
    let of =
        |first: usize, heads: &Range<usize>, dim: usize| first + heads.start * dim..first + heads.end * dim;
    [
        of(0, keys, shape.key_dim),
        of(first_key, keys, shape.key_dim),
        of(2 * first_key, values, shape.value_dim),
    ]
}

impl<'a> DeltaSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &DeltaShape) -> Result<Self, ModelError> {
        let (hidden, all_values) = (view.spec.hidden, shape.value_heads * shape.value_dim);
        let matrix = |role: LayerRole, outputs, rows| {
            view.matrix(role.of(layer), [outputs, hidden], Window { rows, cols: 0..hidden, bias: false })
        };
        let group = shape.value_heads / shape.key_heads;
        let unit = view.weights.format(LayerRole::DeltaOut.of(layer))?.column_unit();
        let keys = view.shard.channels(shape.key_heads, whole_groups(group * shape.value_dim, unit));
        let values = keys.start * group..keys.end * group;
        let columns = values.start * shape.value_dim..values.end * shape.value_dim;
        let rows = qkv_rows(shape, &keys, &values);
        let [q, k, v] = rows.clone().map(|rows| matrix(LayerRole::DeltaQkv, shape.channels(), rows));
        let gate = |role| matrix(role, shape.value_heads, values.clone());
        let out = view.matrix(
            LayerRole::DeltaOut.of(layer),
            [hidden, all_values],
            Window { rows: 0..hidden, cols: columns.clone(), bias: false },
        )?;
        let taps = view
            .weights
            .vector(LayerRole::DeltaConvolution.of(layer), &[shape.channels(), 1, shape.kernel])?;
        let taps = rows.iter().flat_map(|rows| &taps[rows.start * shape.kernel..rows.end * shape.kernel]);
        let of_heads =
            |role| Ok::<_, ModelError>(view.vector(layer, role, shape.value_heads)?[values.clone()].to_vec());
        let norm = view.vector(layer, LayerRole::DeltaNorm, shape.value_dim)?;
        let spec = DeltaSpec {
            key_heads: keys.len(),
            value_heads: values.len(),
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            kernel: shape.kernel,
            taps: taps.copied().collect(),
            decay: of_heads(LayerRole::DeltaLogRate)?,
            decay_bias: of_heads(LayerRole::DeltaTimeBias)?,
            norm: Norm { weight: norm, eps: view.spec.norm_eps },
        };
        Ok(Self {
            spec,
            qkv: [q?, k?, v?],
            gates: [gate(LayerRole::DeltaBeta)?, gate(LayerRole::DeltaDecay)?],
            output_gate: matrix(LayerRole::DeltaGate, all_values, columns)?,
            out,
        })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        self.qkv.iter().chain(&self.gates).chain([&self.output_gate, &self.out]).collect()
    }

    pub fn cache(&self) -> CacheKind {
        self.spec.cache()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Delta<B>, ModelError> {
        let Self { spec, qkv, gates, output_gate, out } = self;
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
