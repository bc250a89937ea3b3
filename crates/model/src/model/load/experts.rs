//! What a rank reads for a feed-forward made of experts. Each expert is divided by channels, as a
//! gated MLP is.

use std::ops::Range;

use thunder_compute::{Activation, Backend, Expert, MatrixSource, RouterSpec, SharedExpert};

use super::gated::{GateUp, channel_unit, gate_up};
use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::feed_forward::Experts;
use crate::spec::{Correction, ExpertsShape};
use crate::weights::{ExpertRole, LayerRole, Role};

/// One layer's experts on this rank.
pub(super) struct ExpertsSources<'a> {
    spec: RouterSpec<Vec<f32>>,
    hidden: usize,
    activation: Activation,
    /// Logits of all experts, and the shared expert's gate.
    router: Vec<MatrixSource<'a>>,
    /// The routed experts, then the shared one.
    experts: Vec<ExpertSources<'a>>,
}

/// One expert's part on this rank.
struct ExpertSources<'a> {
    gate_up: [MatrixSource<'a>; 2],
    down: MatrixSource<'a>,
    down_bias: Option<Vec<f32>>,
}

impl ExpertSources<'_> {
    fn bytes(&self) -> u64 {
        self.gate_up.iter().chain([&self.down]).map(|matrix| matrix.bytes() as u64).sum()
    }
}

/// The matrices of an expert.
struct Roles {
    gate_up: GateUp,
    down: Role,
}

/// The down projection of a layer's first routed expert; the others are stored like it.
pub(super) fn expert_down(layer: usize, shape: &ExpertsShape) -> Role {
    Role::Expert { layer, role: ExpertRole::Down, index: 0, count: shape.experts }
}

impl<'a> ExpertsSources<'a> {
    pub fn describe(view: &ShardView<'a>, layer: usize, shape: &ExpertsShape) -> Result<Self, ModelError> {
        let hidden = view.spec.hidden;
        let fused = Role::Expert { layer, role: ExpertRole::GateUp, index: 0, count: shape.experts };
        let fused = view.weights.has(fused);
        let of_expert = |index| {
            let of = |role| Role::Expert { layer, role, index, count: shape.experts };
            let gate_up = match fused {
                true => GateUp { gate: of(ExpertRole::GateUp), up: of(ExpertRole::GateUp), fused },
                false => GateUp { gate: of(ExpertRole::Gate), up: of(ExpertRole::Up), fused },
            };
            expert(view, &Roles { gate_up, down: of(ExpertRole::Down) }, shape.channels, shape.bias)
        };
        let mut experts = (0..shape.experts).map(of_expert).collect::<Result<Vec<_>, _>>()?;
        if let Some(shared) = shape.shared {
            let of = |role: LayerRole| role.of(layer);
            let (gate, up) = (of(LayerRole::SharedGate), of(LayerRole::SharedUp));
            let gate_up = GateUp { gate, up, fused: false };
            let roles = Roles { gate_up, down: of(LayerRole::SharedDown) };
            experts.push(expert(view, &roles, shared.channels, false)?);
        }
        // Every rank chooses, so that choices need not be sent.
        let logits = |role: LayerRole, rows: usize, bias| {
            view.matrix(role.of(layer), [rows, hidden], Window { rows: 0..rows, cols: 0..hidden, bias })
        };
        let mut router = vec![logits(LayerRole::Router, shape.experts, shape.router.bias)?];
        let shared = match shape.shared {
            None => SharedExpert::None,
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
        Ok(Self { spec, hidden, activation: shape.activation, router, experts })
    }

    pub fn matrices(&self) -> Vec<&MatrixSource<'a>> {
        let experts = self.experts.iter().flat_map(|expert| expert.gate_up.iter().chain([&expert.down]));
        self.router.iter().chain(experts).collect()
    }

    /// Bytes of the routed experts.
    pub fn routed_bytes(&self) -> u64 {
        self.experts[..self.spec.experts].iter().map(ExpertSources::bytes).sum()
    }

    pub fn upload<B: Backend>(self, upload: &mut Upload<'_, B>) -> Result<Experts<B>, ModelError> {
        let all_bytes: u64 = self.experts.iter().map(ExpertSources::bytes).sum();
        let idle =
            self.routed_bytes() / self.spec.experts as u64 * (self.spec.experts - self.spec.chosen) as u64;
        let bytes_per_token = (all_bytes - idle) as usize;
        let Self { spec, hidden, activation, router, experts } = self;
        let (logits, choices) = (spec.logits(), 2 * spec.choices());
        let experts = experts
            .into_iter()
            .map(|ExpertSources { gate_up, down, down_bias }| {
                let (gate_up, down) = (upload.matrix(&gate_up)?, upload.matrix(&[down])?);
                Ok(Expert { gate_up, down, down_bias })
            })
            .collect::<Result<_, ModelError>>()?;
        Ok(Experts {
            router: upload.matrix(&router)?,
            experts: upload.experts(experts, activation)?,
            bytes_per_token,
            normed_buffer: upload.shared_buffer("normed", hidden)?,
            logits_buffer: upload.shared_buffer("router logits", logits)?,
            choices_buffer: upload.shared_buffer("choices", choices)?,
            spec: spec.try_map(&mut |values| upload.vector(&values))?,
        })
    }
}

/// This rank's channels of an expert.
fn expert<'a>(
    view: &ShardView<'a>,
    roles: &Roles,
    channels: usize,
    bias: bool,
) -> Result<ExpertSources<'a>, ModelError> {
    let hidden = view.spec.hidden;
    let own: Range<usize> = view.shard.channels(channels, channel_unit(view.weights, roles.down)?);
    let window = Window { rows: 0..hidden, cols: own.clone(), bias: false };
    let down_bias = match bias && view.shard.adds_once() {
        true => Some(view.weights.bias(roles.down, hidden)?),
        false => None,
    };
    Ok(ExpertSources {
        gate_up: gate_up(view, &roles.gate_up, (channels, &own), bias)?,
        down: view.matrix(roles.down, [hidden, channels], window)?,
        down_bias,
    })
}
