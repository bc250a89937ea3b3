//! What a rank reads for the gated delta rule.

use std::ops::Range;

use thunder_compute::{Backend, CacheKind, Decays, DeltaSpec, HeadSharing, MatrixSource, Norm};

use super::columns::upload_side_by_side;
use super::sources::{Runs, ShardView, Window, whole_groups};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::Delta;
use crate::spec::DeltaShape;
use crate::weights::{LayerRole, Role};

/// One layer's gated delta rule on this rank, which has some key heads and the value heads that
/// share them.
pub(super) struct DeltaSources<'a> {
    spec: DeltaSpec<Vec<f32>>,
    inputs: Inputs<'a>,
    /// A part of the output projection's columns for each run of value heads.
    out: Vec<MatrixSource<'a>>,
}

/// Projections of the residual stream: one matrix, or one for each run of value heads.
struct Inputs<'a> {
    /// Queries, keys, values.
    qkv: Vec<MatrixSource<'a>>,
    /// Write strengths, decays.
    gates: Vec<MatrixSource<'a>>,
    output_gate: Vec<MatrixSource<'a>>,
}

/// A rank's heads.
struct DeltaHeads {
    keys: Range<usize>,
    /// Value heads that follow each other in the files.
    values: Vec<Range<usize>>,
}

impl DeltaHeads {
    fn new(shape: &DeltaShape, keys: Range<usize>) -> Self {
        let (all, group) = (shape.key_heads, shape.value_heads / shape.key_heads);
        let values = match shape.sharing {
            HeadSharing::Tiled if keys.len() < all => {
                (0..group).map(|turn| turn * all + keys.start..turn * all + keys.end).collect()
            }
            _ => vec![keys.start * group..keys.end * group],
        };
        Self { keys, values }
    }

    /// Number of key heads that are not divided: with this many, the columns of each run of value
    /// heads fill whole groups of `unit` columns.
    fn unit(shape: &DeltaShape, unit: usize) -> usize {
        let group = shape.value_heads / shape.key_heads;
        match shape.sharing {
            HeadSharing::Grouped => whole_groups(group * shape.value_dim, unit),
            HeadSharing::Tiled if (shape.key_heads * shape.value_dim).is_multiple_of(unit) => {
                whole_groups(shape.value_dim, unit)
            }
            HeadSharing::Tiled => shape.key_heads,
        }
    }

    /// Outputs of the key heads.
    fn key_outputs(&self, shape: &DeltaShape) -> Range<usize> {
        self.keys.start * shape.key_dim..self.keys.end * shape.key_dim
    }

    /// Outputs of the value heads, `width` for each, after `first` others.
    fn value_outputs(&self, first: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
        self.values.iter().map(move |heads| first + heads.start * width..first + heads.end * width)
    }

    /// Rows of `[queries, keys, values]`.
    fn qkv_rows(&self, shape: &DeltaShape) -> Vec<Range<usize>> {
        let (first_key, keys) = (shape.key_heads * shape.key_dim, self.key_outputs(shape));
        let after_queries = first_key + keys.start..first_key + keys.end;
        [keys, after_queries].into_iter().chain(self.value_outputs(2 * first_key, shape.value_dim)).collect()
    }
}

impl<'a> Inputs<'a> {
    fn describe(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<Self, ModelError> {
        let in_one =
            |role: LayerRole| shape.sharing == HeadSharing::Grouped && view.weights.has(role.of(layer));
        let (qkv, output_gate) = match in_one(LayerRole::DeltaQkvz) {
            true => Self::with_gates(view, layer, shape, heads)?,
            false => Self::apart(view, layer, shape, heads)?,
        };
        let gates = match in_one(LayerRole::DeltaBa) {
            true => Self::gates_in_one(view, layer, shape, heads)?,
            false => Self::gates_apart(view, layer, shape, heads)?,
        };
        Ok(Self { qkv, gates, output_gate })
    }

    /// Queries, keys and values, and output gates, as Qwen3.5 stores them.
    fn apart(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<(Vec<MatrixSource<'a>>, Vec<MatrixSource<'a>>), ModelError> {
        let all_values = shape.value_heads * shape.value_dim;
        let gates = heads.value_outputs(0, shape.value_dim);
        Ok((
            rows_of(view, LayerRole::DeltaQkv.of(layer), shape.channels(), heads.qkv_rows(shape))?,
            rows_of(view, LayerRole::DeltaGate.of(layer), all_values, gates)?,
        ))
    }

    /// Write strengths and decays as Qwen3.5 stores them.
    fn gates_apart(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<Vec<MatrixSource<'a>>, ModelError> {
        let gate =
            |role: LayerRole| rows_of(view, role.of(layer), shape.value_heads, heads.value_outputs(0, 1));
        Ok([gate(LayerRole::DeltaBeta)?, gate(LayerRole::DeltaDecay)?].into_iter().flatten().collect())
    }

    /// As Qwen3-Next stores them: one key head after the other, each with its query, its key, and
    /// the values and output gates of its value heads.
    fn with_gates(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<(Vec<MatrixSource<'a>>, Vec<MatrixSource<'a>>), ModelError> {
        let (hidden, key_dim) = (view.spec.hidden, shape.key_dim);
        let values = shape.value_heads / shape.key_heads * shape.value_dim;
        let stride = 2 * (key_dim + values);
        let part = |first, run, outputs| {
            let runs = Runs { first, run, stride, outputs };
            view.runs(LayerRole::DeltaQkvz.of(layer), [shape.key_heads * stride, hidden], &runs, false)
        };
        let own_keys = heads.key_outputs(shape);
        let own_values = heads.keys.start * values..heads.keys.end * values;
        let qkv = vec![
            part(0, key_dim, own_keys.clone())?,
            part(key_dim, key_dim, own_keys)?,
            part(2 * key_dim, values, own_values.clone())?,
        ];
        Ok((qkv, vec![part(2 * key_dim + values, values, own_values)?]))
    }

    /// As Qwen3-Next stores them: of each key head, the write strengths of its value heads, then
    /// their decays.
    fn gates_in_one(
        view: &ShardView<'a>,
        layer: usize,
        shape: &DeltaShape,
        heads: &DeltaHeads,
    ) -> Result<Vec<MatrixSource<'a>>, ModelError> {
        let group = shape.value_heads / shape.key_heads;
        let part = |first| {
            let outputs = heads.keys.start * group..heads.keys.end * group;
            let runs = Runs { first, run: group, stride: 2 * group, outputs };
            view.runs(LayerRole::DeltaBa.of(layer), [2 * shape.value_heads, view.spec.hidden], &runs, false)
        };
        Ok(vec![part(0)?, part(group)?])
    }
}

/// Ranges of the rows of a matrix with `outputs` rows.
fn rows_of<'a>(
    view: &ShardView<'a>,
    role: Role,
    outputs: usize,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> Result<Vec<MatrixSource<'a>>, ModelError> {
    let hidden = view.spec.hidden;
    let part = |rows| view.matrix(role, [outputs, hidden], Window { rows, cols: 0..hidden, bias: false });
    ranges.into_iter().map(part).collect()
}

impl<'a> DeltaSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &DeltaShape) -> Result<Self, ModelError> {
        let (hidden, all_values) = (view.spec.hidden, shape.value_heads * shape.value_dim);
        let unit = view.weights.format(LayerRole::DeltaOut.of(layer))?.column_unit();
        let heads =
            DeltaHeads::new(shape, view.shard.channels(shape.key_heads, DeltaHeads::unit(shape, unit)));
        let out = |cols| {
            let window = Window { rows: 0..hidden, cols, bias: false };
            view.matrix(LayerRole::DeltaOut.of(layer), [hidden, all_values], window)
        };
        let out = heads.value_outputs(0, shape.value_dim).map(out).collect::<Result<_, _>>()?;
        let taps = view
            .weights
            .vector(LayerRole::DeltaConvolution.of(layer), &[shape.channels(), 1, shape.kernel])?;
        let rows = heads.qkv_rows(shape);
        let taps = rows.iter().flat_map(|rows| &taps[rows.start * shape.kernel..rows.end * shape.kernel]);
        let of_heads = |role| {
            let all = view.vector(layer, role, shape.value_heads)?;
            Ok::<_, ModelError>(heads.values.iter().flat_map(|heads| &all[heads.clone()]).copied().collect())
        };
        let norm = view.vector(layer, LayerRole::DeltaNorm, shape.value_dim)?;
        let spec = DeltaSpec {
            key_heads: heads.keys.len(),
            value_heads: heads.values.iter().map(Range::len).sum(),
            sharing: shape.sharing,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            kernel: shape.kernel,
            unit_eps: shape.unit_eps,
            decays: Decays::Softplus,
            taps: taps.copied().collect(),
            decay: of_heads(LayerRole::DeltaLogRate)?,
            decay_bias: of_heads(LayerRole::DeltaTimeBias)?,
            norm: Norm { weight: norm, eps: view.spec.norm_eps },
        };
        Ok(Self { spec, inputs: Inputs::describe(view, layer, shape, &heads)?, out })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let Inputs { qkv, gates, output_gate } = &self.inputs;
        qkv.iter().chain(gates).chain(output_gate).chain(&self.out).collect()
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
            output_gate: upload.matrix(&output_gate)?,
            out: upload_side_by_side(&out, upload)?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}
