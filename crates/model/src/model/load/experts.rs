//! What a rank reads for a feed-forward that consists of experts. Each expert is divided by
//! channels, like an MLP.

use std::ops::Range;

use thunder_compute::{
    Activation, Backend, Curve, Expert, Extra, MatrixSource, Norm, RouterSpec, SharedExpert,
};

use super::mlp::{GateUp, MlpSources, channel_unit, gate_up};
use super::sources::{ShardView, Window};
use super::transposed::{ExpertMatrix, Outputs, Transposed, upload_experts};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::feed_forward::{Apart, Experts, Narrow};
use crate::plan::Shard;
use crate::spec::{Correction, ExpertsShape, MlpShape};
use crate::weights::{ExpertRole, LayerRole, Role, WeightSource};

/// One layer's experts on this rank.
pub(super) struct ExpertsSources<'a> {
    spec: RouterSpec<Vec<f32>>,
    hidden: usize,
    activation: Option<Activation>,
    /// Logits of all experts, and the shared expert's gate.
    router: Vec<MatrixSource<'a>>,
    /// The experts of each token id, if these are given.
    table: Option<Vec<u16>>,
    /// The routed experts, then the shared one.
    experts: Vec<ExpertSources<'a>>,
    /// The shared expert, if it is not one of them.
    apart: Option<MlpSources<'a>>,
    /// Projections to what routed experts read, and back.
    narrow: Option<[MatrixSource<'a>; 2]>,
    /// Norm of what they write, before it is led back.
    narrow_norm: Option<Norm<Vec<f32>>>,
    weighs_input: bool,
}

/// One expert's part on this rank.
struct ExpertSources<'a> {
    /// Gate and up, or up alone.
    gate_up: Vec<ExpertMatrix<'a>>,
    down: ExpertMatrix<'a>,
    down_bias: Option<Vec<f32>>,
}

impl<'a> ExpertSources<'a> {
    fn matrices(&self) -> impl Iterator<Item = &ExpertMatrix<'a>> {
        self.gate_up.iter().chain([&self.down])
    }

    /// Bytes in memory.
    fn bytes(&self) -> u64 {
        self.matrices().map(|matrix| matrix.packed_bytes() as u64).sum()
    }
}

/// The matrices of an expert.
struct Roles {
    gate_up: GateUp,
    /// There is a gate.
    gated: bool,
    down: Role,
    /// Whether stacks of gate and up, and of down, are `[experts, inputs, outputs]`.
    transposed: [bool; 2],
    /// Distance in columns of two outputs in a transposed gate: 2 if the outputs of gate and up
    /// alternate.
    step: usize,
}

/// The down projection of a layer's first routed expert; the others are stored like it.
pub(super) fn expert_down(layer: usize, shape: &ExpertsShape) -> Role {
    Role::Expert { layer, role: ExpertRole::Down, index: 0, count: shape.experts }
}

/// The routed experts that a rank holds channels of, and which channels of each.
pub(super) fn held_experts(
    weights: &dyn WeightSource,
    shard: Shard<'_>,
    layer: usize,
    shape: &ExpertsShape,
) -> Result<(Range<usize>, Range<usize>), ModelError> {
    let unit = channel_unit(weights, expert_down(layer, shape))?;
    Ok(shard.experts(shape.experts, shape.channels, unit))
}

impl<'a> ExpertsSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &ExpertsShape) -> Result<Self, ModelError> {
        let hidden = view.spec.hidden;
        let (width, gated) = (shape.width(hidden), shape.activation.is_some());
        let fused = Role::Expert { layer, role: ExpertRole::GateUp, index: 0, count: shape.experts };
        let fused = view.weights.has(fused);
        let (held, own) = held_experts(view.weights, view.shard, layer, shape)?;
        let of_expert = |index| {
            let of = |role| Role::Expert { layer, role, index, count: shape.experts };
            let (gate_up, columns) = match fused {
                true => {
                    let both = of(ExpertRole::GateUp);
                    (GateUp { gate: both, up: both, fused }, 2 * shape.channels)
                }
                false => {
                    (GateUp { gate: of(ExpertRole::Gate), up: of(ExpertRole::Up), fused }, shape.channels)
                }
            };
            let transposed = [
                view.weights.is_transposed(gate_up.up, [columns, width], shape.transposed),
                view.weights.is_transposed(of(ExpertRole::Down), [width, shape.channels], shape.transposed),
            ];
            // gpt-oss, the family with biases, has gates in even columns and ups in odd ones.
            let step = if fused && shape.bias { 2 } else { 1 };
            let roles = Roles { gate_up, gated, down: of(ExpertRole::Down), transposed, step };
            let own = if held.contains(&index) { own.clone() } else { 0..0 };
            // Of an expert that one rank holds whole, that rank adds the bias.
            let whole = held.len() < shape.experts;
            let adds_bias = if whole { !own.is_empty() } else { view.shard.adds_once() };
            expert(view, &roles, (width, shape.channels, own), (shape.bias, adds_bias))
        };
        let mut experts = (0..shape.experts).map(of_expert).collect::<Result<Vec<_>, _>>()?;
        let (mut apart, is_apart) = (None, shape.weighs_input || shape.latent.is_some());
        if let Some(shared) = shape.shared {
            let of = |role: LayerRole| role.of(layer);
            let fused = view.weights.has(of(LayerRole::SharedGateUp));
            let [gate, up] = match fused {
                true => [of(LayerRole::SharedGateUp); 2],
                false => [of(LayerRole::SharedGate), of(LayerRole::SharedUp)],
            };
            let (gate_up, down) = (GateUp { gate, up, fused }, of(LayerRole::SharedDown));
            if is_apart {
                let of = MlpShape {
                    channels: shared.channels,
                    bias: false,
                    activation: shape.activation,
                    curve: Curve::default(),
                };
                apart = Some(MlpSources::of_roles(view, (gate_up, down), &of)?);
            } else {
                let roles = Roles { gate_up, gated, down, transposed: [false; 2], step: 1 };
                let unit = channel_unit(view.weights, roles.down)?;
                let own = view.shard.channels(shared.channels, unit);
                experts.push(expert(view, &roles, (hidden, shared.channels, own), (false, false))?);
            }
        }
        // Every rank chooses, so that choices need not be sent.
        let logits = |role: LayerRole, rows: usize, bias| {
            view.matrix(role.of(layer), [rows, hidden], Window { rows: 0..rows, cols: 0..hidden, bias })
        };
        let mut router = vec![logits(LayerRole::Router, shape.experts, shape.router.bias)?];
        let shared = match shape.shared {
            None => SharedExpert::None,
            Some(_) if is_apart => SharedExpert::None,
            Some(shared) if shared.gated => SharedExpert::Gated,
            Some(_) => SharedExpert::Plain,
        };
        if shared == SharedExpert::Gated {
            router.push(logits(LayerRole::SharedExpertGate, 1, false)?);
        }
        let correction = match shape.router.correction {
            Correction::None => false,
            Correction::Given => true,
            Correction::IfGiven => view.weights.has(LayerRole::RouterCorrection.of(layer)),
        };
        let correction = match correction {
            true => Some(view.vector(layer, LayerRole::RouterCorrection, shape.experts)?),
            false => None,
        };
        let spec = RouterSpec {
            experts: shape.experts,
            chosen: shape.chosen,
            scores: shape.router.scores,
            correction,
            groups: shape.router.groups,
            renormalise: shape.router.renormalise,
            scale: shape.router.scale,
            shared,
        };
        let (activation, weighs_input) = (shape.activation, shape.weighs_input);
        let narrow = shape.latent.map(|width| narrow(view, layer, width)).transpose()?;
        let table = shape.router.assigned.then(|| table(view, layer, shape)).transpose()?;
        let narrow_norm = match shape.latent.filter(|_| shape.latent_norm) {
            Some(width) => {
                let weight = view.vector(layer, LayerRole::ExpertsLatentNorm, width)?;
                Some(Norm { weight, eps: view.spec.norm_eps })
            }
            None => None,
        };
        Ok(Self {
            spec,
            hidden,
            activation,
            router,
            table,
            experts,
            apart,
            narrow,
            narrow_norm,
            weighs_input,
        })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let experts = self.experts.iter().flat_map(ExpertSources::matrices).filter_map(ExpertMatrix::listed);
        let apart = self.apart.iter().flat_map(MlpSources::matrices);
        self.router.iter().chain(experts).chain(apart).chain(self.narrow.iter().flatten()).collect()
    }

    /// An operation that not every backend has.
    pub fn needs(&self) -> Option<Extra> {
        self.activation.is_none().then_some(Extra::UngatedExperts)
    }

    /// Bytes of the routed experts in memory.
    pub fn routed_bytes(&self) -> u64 {
        self.experts[..self.spec.experts].iter().map(ExpertSources::bytes).sum()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Experts<B>, ModelError> {
        let all_bytes: u64 = self.experts.iter().map(ExpertSources::bytes).sum();
        let idle =
            self.routed_bytes() / self.spec.experts as u64 * (self.spec.experts - self.spec.chosen) as u64;
        let bytes_per_token = (all_bytes - idle) as usize;
        let Self {
            spec,
            hidden,
            activation,
            router,
            table,
            experts,
            apart,
            narrow,
            narrow_norm,
            weighs_input,
        } = self;
        let norm = narrow_norm.map(|norm| upload.norm(&norm.weight, norm.eps)).transpose()?;
        let narrow = match narrow {
            Some([down, up]) => Some(Narrow {
                norm,
                buffers: [
                    upload.shared_buffer("experts' input", down.rows)?,
                    upload.shared_buffer("experts' sum", down.rows)?,
                ],
                down: upload.matrix(&[down])?,
                up: upload.matrix(&[up])?,
            }),
            None => None,
        };
        let apart = match apart {
            Some(mlp) => Some(Apart {
                mlp: mlp.upload(upload)?,
                narrow,
                sum_buffers: [
                    upload.shared_buffer("sum", hidden)?,
                    upload.shared_buffer("sum of experts", hidden)?,
                ],
            }),
            None => None,
        };
        let (logits, choices) = (spec.logits(), 2 * spec.choices());
        let (mut matrices, mut biases) = (Vec::new(), Vec::new());
        for ExpertSources { gate_up, down, down_bias } in experts {
            matrices.extend([gate_up, vec![down]]);
            biases.push(down_bias);
        }
        let mut packed = upload_experts(&matrices, upload)?.into_iter();
        let mut experts = Vec::with_capacity(biases.len());
        for down_bias in biases {
            let (Some(gate_up), Some(down)) = (packed.next(), packed.next()) else {
                unreachable!("two matrices of each expert were packed")
            };
            experts.push(Expert { gate_up, down, down_bias });
        }
        Ok(Experts {
            router: upload.matrix(&router)?,
            experts: upload.experts(experts, activation)?,
            table,
            apart,
            weighs_input,
            bytes_per_token,
            normed_buffer: upload.shared_buffer("normed", hidden)?,
            logits_buffer: upload.shared_buffer("router logits", logits)?,
            choices_buffer: upload.shared_buffer("choices", choices)?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}

/// The projections from the residual stream to the experts' input, and back. Every rank has both
/// whole.
fn narrow<'a>(view: &ShardView<'a>, layer: usize, width: usize) -> Result<[MatrixSource<'a>; 2], ModelError> {
    let hidden = view.spec.hidden;
    let whole = |role: LayerRole, [rows, cols]: [usize; 2]| {
        view.matrix(role.of(layer), [rows, cols], Window { rows: 0..rows, cols: 0..cols, bias: false })
    };
    Ok([whole(LayerRole::ExpertsDown, [width, hidden])?, whole(LayerRole::ExpertsUp, [hidden, width])?])
}

/// The experts of each token id: different ones.
fn table(view: &ShardView<'_>, layer: usize, shape: &ExpertsShape) -> Result<Vec<u16>, ModelError> {
    let role = LayerRole::RouterTable.of(layer);
    let table = view.weights.indices(role, &[view.spec.vocab, shape.chosen])?;
    for (token, experts) in table.chunks_exact(shape.chosen).enumerate() {
        let differ = (1..experts.len()).all(|at| !experts[..at].contains(&experts[at]));
        if !differ || experts.iter().any(|expert| *expert as usize >= shape.experts) {
            return Err(ModelError::Unsupported {
                field: "the table of experts",
                value: format!("{experts:?} for token {token} in layer {layer}"),
                supported: format!("{} different ones of {} are", shape.chosen, shape.experts),
            });
        }
    }
    // `Config` bounds the number of experts.
    Ok(table.into_iter().map(|expert| expert as u16).collect())
}

/// This rank's channels of an expert.
fn expert<'a>(
    view: &ShardView<'a>,
    roles: &Roles,
    (width, channels, own): (usize, usize, Range<usize>),
    (bias, adds_bias): (bool, bool),
) -> Result<ExpertSources<'a>, ModelError> {
    let down_bias = match bias && adds_bias {
        true => Some(view.weights.bias(roles.down, width)?),
        false => None,
    };
    let [transposed, transposed_down] = roles.transposed;
    let gate_up = match transposed {
        _ if !roles.gated => {
            let window = Window { rows: own.clone(), cols: 0..width, bias: false };
            let up = view.matrix(roles.gate_up.up, [channels, width], window)?;
            vec![ExpertMatrix::AsOutputs(up)]
        }
        false => {
            gate_up(view, &roles.gate_up, (width, channels, &own), bias)?.map(ExpertMatrix::AsOutputs).into()
        }
        true => {
            let GateUp { gate, up, fused } = roles.gate_up;
            let columns = if fused { 2 * channels } else { channels };
            let part = |role: Role, first: usize| {
                let outputs = Outputs { first, step: roles.step, own: own.clone() };
                Transposed::describe(view, role, [width, columns], (0..width, outputs), bias)
                    .map(ExpertMatrix::Transposed)
            };
            let first_up = match (fused, roles.step) {
                (true, 1) => channels,
                (true, _) => 1,
                (false, _) => 0,
            };
            vec![part(gate, 0)?, part(up, first_up)?]
        }
    };
    let down = match transposed_down {
        false => {
            let window = Window { rows: 0..width, cols: own, bias: false };
            ExpertMatrix::AsOutputs(view.matrix(roles.down, [width, channels], window)?)
        }
        true => {
            let outputs = Outputs { first: 0, step: 1, own: 0..width };
            let shape = [channels, width];
            ExpertMatrix::Transposed(Transposed::describe(view, roles.down, shape, (own, outputs), false)?)
        }
    };
    Ok(ExpertSources { gate_up, down, down_bias })
}
