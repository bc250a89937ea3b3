//! What a rank reads for a state space (Mamba-2).

use std::ops::Range;

use thunder_compute::{Backend, CacheKind, MatrixSource, PartNorm, StateSpaceSpec};

use super::sources::{ShardView, Window, whole_groups};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::mixer::HeadNorms;
use crate::model::state_space::{StateNorms, StateSpace};
use crate::spec::StateSpaceShape;
use crate::weights::LayerRole;

/// One layer's state space on this rank. If there are several groups, the rank has some, with the
/// heads that share them. A single group is on every rank that has some of its heads.
pub(super) struct StateSpaceSources<'a> {
    spec: StateSpaceSpec<Vec<f32>>,
    gates: MatrixSource<'a>,
    /// The heads' inputs, the groups' input vectors, their output vectors.
    inputs: [MatrixSource<'a>; 3],
    times: MatrixSource<'a>,
    /// Weights of the groups' norms, and their epsilon.
    norm: (Vec<f32>, f32),
    /// Width of the vector that is normed together with this rank's heads.
    normed: usize,
    /// The norm's sums of squares are over all ranks.
    is_divided: bool,
    out: MatrixSource<'a>,
}

/// The heads of a rank, and the groups that they share.
fn share(view: &ShardView<'_>, shape: &StateSpaceShape, unit: usize) -> (Range<usize>, Range<usize>) {
    if shape.groups == 1 {
        let heads = view.shard.channels(shape.heads, whole_groups(shape.head_dim, unit));
        let group = 0..usize::from(!heads.is_empty());
        return (heads, group);
    }
    let heads_of_group = shape.heads / shape.groups;
    let groups = view.shard.channels(shape.groups, whole_groups(heads_of_group * shape.head_dim, unit));
    (groups.start * heads_of_group..groups.end * heads_of_group, groups)
}

impl<'a> StateSpaceSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &StateSpaceShape) -> Result<Self, ModelError> {
        let (hidden, width, of_groups) = (view.spec.hidden, shape.width(), shape.groups * shape.state_dim);
        let unit = view.weights.format(LayerRole::DeltaOut.of(layer))?.column_unit();
        let (heads, groups) = share(view, shape, unit);
        let columns = heads.start * shape.head_dim..heads.end * shape.head_dim;
        let vectors = groups.start * shape.state_dim..groups.end * shape.state_dim;
        let after = |first: usize, of: &Range<usize>| first + of.start..first + of.end;
        let projected = |rows: Range<usize>| {
            let window = Window { rows, cols: 0..hidden, bias: false };
            view.matrix(LayerRole::StateIn.of(layer), [shape.projected(), hidden], window)
        };
        // Rows of the convolution; in the projection they follow the gates.
        let convolved = [columns.clone(), after(width, &vectors), after(width + of_groups, &vectors)];
        let [heads_in, vectors_in, vectors_out] =
            convolved.each_ref().map(|rows| projected(after(width, rows)));
        let own = |all: &[f32], numbers: usize| -> Vec<f32> {
            let parts = convolved.iter().map(|rows| &all[rows.start * numbers..rows.end * numbers]);
            parts.flatten().copied().collect()
        };
        let taps = view
            .weights
            .vector(LayerRole::DeltaConvolution.of(layer), &[shape.channels(), 1, shape.kernel])?;
        let conv_bias = match shape.conv_bias {
            true => Some(own(&view.vector(layer, LayerRole::ConvolutionBias, shape.channels())?, 1)),
            false => None,
        };
        let of_heads =
            |role| Ok::<_, ModelError>(view.vector(layer, role, shape.heads)?[heads.clone()].to_vec());
        let norm = view.vector(layer, LayerRole::DeltaNorm, width)?[columns.clone()].to_vec();
        let window = Window { rows: 0..hidden, cols: columns.clone(), bias: false };
        let spec = StateSpaceSpec {
            heads: heads.len(),
            head_dim: shape.head_dim,
            groups: groups.len(),
            state_dim: shape.state_dim,
            kernel: shape.kernel,
            taps: own(&taps, shape.kernel),
            conv_bias,
            rate: of_heads(LayerRole::DeltaLogRate)?,
            time_bias: of_heads(LayerRole::DeltaTimeBias)?,
            skip: of_heads(LayerRole::StateSkip)?,
            time_limit: shape.time_limit,
        };
        Ok(Self {
            spec,
            gates: projected(columns)?,
            inputs: [heads_in?, vectors_in?, vectors_out?],
            times: projected(after(width + shape.channels(), &heads))?,
            norm: (norm, view.spec.norm_eps),
            normed: width / shape.groups,
            is_divided: shape.groups == 1,
            out: view.matrix(LayerRole::DeltaOut.of(layer), [hidden, width], window)?,
        })
    }

    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        self.inputs.iter().chain([&self.gates, &self.times, &self.out])
    }

    pub fn cache(&self) -> CacheKind {
        self.spec.cache()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<StateSpace<B>, ModelError> {
        let Self { spec, gates, inputs, times, norm: (weights, eps), normed, is_divided, out } = self;
        let width = spec.width();
        let mut norm_of = |columns: Range<usize>| {
            let weight = upload.vector(&weights[columns.clone()])?;
            Ok::<_, ModelError>(PartNorm { counted: columns.clone(), columns, weight, width: normed, eps })
        };
        let norms = match is_divided {
            // Ranks without heads take part in the sum.
            true => StateNorms::Divided(vec![norm_of(0..width)?]),
            false => {
                let groups = (0..spec.groups).map(|group| norm_of(group * normed..(group + 1) * normed));
                let norms = groups.collect::<Result<_, _>>()?;
                let sums_buffer = upload.shared_buffer("square sums", spec.groups)?;
                StateNorms::Whole(HeadNorms { norms, centered: Vec::new(), sums_buffer })
            }
        };
        Ok(StateSpace {
            cache: upload.cache(spec.cache()),
            inputs_buffer: upload.shared_buffer("convolved", spec.channels())?,
            times_buffer: upload.shared_buffer("time steps", spec.heads)?,
            heads_buffer: upload.shared_buffer("heads", width)?,
            both_buffer: upload.shared_buffer("gates and heads of states", 2 * width)?,
            gated_buffer: upload.shared_buffer("gated heads", width)?,
            norms,
            gates: upload.matrix(&[gates])?,
            inputs: upload.matrix(&inputs)?,
            times: upload.matrix(&[times])?,
            out: upload.matrix(&[out])?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}
