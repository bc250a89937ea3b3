//! What a rank reads for an MLP.

use std::ops::Range;

use thunder_compute::{Activation, Backend, Curve, MatrixSource};

use super::adapters::AdaptersSources;
use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::adapters::Adapters;
use crate::model::feed_forward::Mlp;
use crate::spec::MlpShape;
use crate::weights::{AdaptedOutputs, LayerRole, Role, WeightSource};

/// Channels are not divided below the rows that kernels compute together.
const LEAST_CHANNELS: usize = 32;

/// One layer's MLP on this rank.
pub(super) struct MlpSources<'a> {
    /// Gate and up, or up alone.
    gate_up: Vec<MatrixSource<'a>>,
    down: MatrixSource<'a>,
    activation: Option<Activation>,
    curve: Curve,
    /// Of gate and up, and of down; `None` for shared experts.
    adapters: Option<[AdaptersSources<'a>; 2]>,
}

impl<'a> MlpSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &MlpShape) -> Result<Self, ModelError> {
        let fused = view.weights.has(LayerRole::GateUp.of(layer));
        let [gate, up] = match fused {
            true => [LayerRole::GateUp; 2],
            false => [LayerRole::Gate, LayerRole::Up],
        };
        let roles = GateUp { gate: gate.of(layer), up: up.of(layer), fused };
        let down = LayerRole::Down.of(layer);
        let own = view.shard.channels(shape.channels, channel_unit(view.weights, down)?);
        let rows = |role, first| AdaptedOutputs {
            modules: vec![(role, 0), (LayerRole::GateUp, first)],
            rows: own.clone(),
        };
        let of_gate_up = match shape.activation {
            Some(_) => vec![rows(LayerRole::Gate, 0), rows(LayerRole::Up, shape.channels)],
            None => vec![rows(LayerRole::Up, 0)],
        };
        let hidden = 0..view.spec.hidden;
        let of_down = vec![AdaptedOutputs { modules: vec![(LayerRole::Down, 0)], rows: hidden.clone() }];
        let adapters = [
            AdaptersSources::describe(view, layer, of_gate_up, hidden),
            AdaptersSources::describe(view, layer, of_down, own),
        ];
        Ok(Self { adapters: Some(adapters), ..Self::of_roles(view, (roles, down), shape)? })
    }

    /// Bytes of what adapters change.
    pub fn adapter_bytes(&self) -> u64 {
        self.adapters.iter().flatten().map(AdaptersSources::bytes).sum()
    }

    /// The MLP of these roles.
    pub fn of_roles(
        view: &ShardView<'a>,
        (roles, down): (GateUp, Role),
        shape: &MlpShape,
    ) -> Result<Self, ModelError> {
        let (channels, hidden) = (shape.channels, view.spec.hidden);
        let own = view.shard.channels(channels, channel_unit(view.weights, down)?);
        let gate_up = match shape.activation {
            Some(_) => gate_up(view, &roles, (hidden, channels, &own), shape.bias)?.into(),
            None => {
                let window = Window { rows: own.clone(), cols: 0..hidden, bias: shape.bias };
                vec![view.matrix(roles.up, [channels, hidden], window)?]
            }
        };
        let bias = shape.bias && view.shard.adds_once();
        let window = Window { rows: 0..hidden, cols: own, bias };
        let down = view.matrix(down, [hidden, channels], window)?;
        Ok(Self { gate_up, down, activation: shape.activation, curve: shape.curve, adapters: None })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        self.gate_up.iter().chain([&self.down]).collect()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Mlp<B>, ModelError> {
        let [gate_up_adapters, down_adapters] = match self.adapters {
            Some([gate_up, down]) => [gate_up.upload(upload)?, down.upload(upload)?],
            None => [Adapters(Vec::new()), Adapters(Vec::new())],
        };
        Ok(Mlp {
            gate_up_adapters,
            down_adapters,
            activation: self.activation,
            curve: self.curve,
            channels_buffer: upload.shared_buffer("channels", self.down.cols)?,
            gate_up: upload.matrix(&self.gate_up)?,
            down: upload.matrix(&[self.down])?,
        })
    }
}

/// Where gate and up are: in separate tensors, or in one, with the gates' rows first.
pub(super) struct GateUp {
    pub gate: Role,
    pub up: Role,
    pub fused: bool,
}

/// The rows of gate and up that belong to some of `channels`; each has `inputs` columns.
pub(super) fn gate_up<'a>(
    view: &ShardView<'a>,
    roles: &GateUp,
    (inputs, channels, own): (usize, usize, &Range<usize>),
    bias: bool,
) -> Result<[MatrixSource<'a>; 2], ModelError> {
    let (all, first_up) = if roles.fused { (2 * channels, channels) } else { (channels, 0) };
    let rows = |role: Role, first: usize| {
        let rows = first + own.start..first + own.end;
        view.matrix(role, [all, inputs], Window { rows, cols: 0..inputs, bias })
    };
    Ok([rows(roles.gate, 0)?, rows(roles.up, first_up)?])
}

/// Number of channels that are not divided: a quantization group of the down projection, at least
/// [`LEAST_CHANNELS`].
pub(super) fn channel_unit(weights: &dyn WeightSource, down: Role) -> Result<usize, ModelError> {
    Ok(weights.format(down)?.column_unit().max(LEAST_CHANNELS))
}
