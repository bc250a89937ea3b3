//! Operands of feed-forwards with experts: how a router chooses, and how a gate acts.

/// The function that a gated MLP applies to gate and up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Activation {
    /// `gate / (1 + e^-gate) * up` (SwiGLU).
    #[default]
    Silu,
    /// `up / (1 + e^-gate)`: the output gate of attention.
    Sigmoid,
    /// `gelu(gate) * up`, with the tanh approximation of GELU.
    Gelu,
    /// `gelu(gate) * up`, with GELU itself (ModernBERT).
    ExactGelu,
    /// `g / (1 + e^(-alpha * g)) * (u + 1)` with `g = min(gate, limit)` and `u` = up, limited to
    /// `-limit..=limit` (gpt-oss).
    Clamped {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Largest gate, and largest magnitude of up.
        limit: f32,
    },
    /// [`Self::Silu`] of gate and up within the same limits (DeepSeek V4).
    Limited {
        /// Largest gate, and largest magnitude of up.
        limit: f32,
    },
    /// `beta * tanh(g / beta) / (1 + e^-g) * u`, where `u` is up, or `cap * tanh(up / cap)` (Kimi
    /// K3's SiTU).
    Situ {
        /// Largest magnitude of the gate's first factor.
        beta: f32,
        /// Largest magnitude of up.
        cap: Option<f32>,
    },
}

impl Activation {
    /// The function by its definition.
    pub fn of(self, gate: f32, up: f32) -> f32 {
        match self {
            Self::Silu => gate / (1.0 + (-gate).exp()) * up,
            Self::Sigmoid => up / (1.0 + (-gate).exp()),
            Self::Gelu => {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
                0.5 * gate * (1.0 + inner.tanh()) * up
            }
            Self::ExactGelu => super::Curve::Gelu.of(gate) * up,
            Self::Clamped { alpha, limit } => {
                let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
                gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)
            }
            Self::Limited { limit } => Self::Silu.of(gate.min(limit), up.clamp(-limit, limit)),
            Self::Situ { beta, cap } => {
                let up = cap.map_or(up, |cap| cap * (up / cap).tanh());
                beta * (gate / beta).tanh() / (1.0 + (-gate).exp()) * up
            }
        }
    }
}

/// How a router chooses a token's experts from its logits, and weighs them.
///
/// A row of logits is `[experts]`, and with [`SharedExpert::Gated`] one more. A row of choices is
/// the chosen experts' indices in ascending order, the shared expert's after them (`experts`), and
/// then their weights in the same order: `2 * choices()` numbers.
#[derive(Debug, Clone)]
pub struct RouterSpec<V> {
    /// Routed experts.
    pub experts: usize,
    /// Number of routed experts that each token uses.
    pub chosen: usize,
    /// From logits to scores.
    pub scores: Scores,
    /// Added to the scores for the choice only, `[experts]`.
    pub correction: Option<V>,
    /// Restricts the choice to some groups of experts.
    pub groups: Option<ExpertGroups>,
    /// Divides the weights by their sum.
    pub renormalise: bool,
    /// Multiplies the weights of routed experts.
    pub scale: f32,
    /// An expert that every token uses.
    pub shared: SharedExpert,
}

impl<V> RouterSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<RouterSpec<W>, E> {
        Ok(RouterSpec {
            correction: self.correction.map(f).transpose()?,
            experts: self.experts,
            chosen: self.chosen,
            scores: self.scores,
            groups: self.groups,
            renormalise: self.renormalise,
            scale: self.scale,
            shared: self.shared,
        })
    }

    /// Experts of a token, the shared one included.
    pub fn choices(&self) -> usize {
        self.chosen + usize::from(self.shared != SharedExpert::None)
    }

    /// Columns of the logits.
    pub fn logits(&self) -> usize {
        self.experts + usize::from(self.shared == SharedExpert::Gated)
    }

    /// A row of choices with given routed experts.
    pub(crate) fn assign(&self, assigned: &[u16], logits: &[f32], out: &mut [f32]) {
        let scores = self.scores.of(&logits[..self.experts]);
        let mut assigned = assigned.to_vec();
        assigned.sort_unstable();
        let sum: f32 = assigned.iter().map(|expert| scores[usize::from(*expert)]).sum();
        let factor = if self.renormalise { self.scale / (sum + 1e-20) } else { self.scale };
        let (indices, weights) = out.split_at_mut(self.choices());
        for ((index, weight), expert) in indices.iter_mut().zip(&mut *weights).zip(assigned) {
            (*index, *weight) = (f32::from(expert), scores[usize::from(expert)] * factor);
        }
        let weight = match self.shared {
            SharedExpert::None => return,
            SharedExpert::Plain => 1.0,
            SharedExpert::Gated => 1.0 / (1.0 + (-logits[self.experts]).exp()),
        };
        (indices[self.chosen], weights[self.chosen]) = (self.experts as f32, weight);
    }
}

/// From a router's logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts. With `renormalise`, the weights are a softmax over the chosen
    /// experts.
    Softmax,
    /// Each expert's sigmoid.
    Sigmoid,
    /// The root of each expert's `ln(1 + e^x)` (DeepSeek V4).
    RootSoftplus,
}

/// `√ln(1 + e^x)`.
pub(crate) fn root_softplus(x: f32) -> f32 {
    (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()
}

impl Scores {
    /// The scores by their definition.
    pub fn of(self, logits: &[f32]) -> Vec<f32> {
        match self {
            Self::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            Self::RootSoftplus => logits.iter().copied().map(root_softplus).collect(),
            Self::Softmax => {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f32> = logits.iter().map(|x| (x - largest).exp()).collect();
                let sum: f32 = powers.iter().sum();
                powers.iter().map(|x| x / sum).collect()
            }
        }
    }
}

/// Experts in equal groups; only those of the best groups can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups that each token uses.
    pub chosen: usize,
    /// A group's score is the sum of this many of its best experts (1: DeepSeek V2, 2: V3).
    pub best: usize,
}

/// The expert that every token uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedExpert {
    /// There is none.
    None,
    /// Its weight is 1.
    Plain,
    /// Its weight is the sigmoid of the last logit.
    Gated,
}

/// One expert's packed matrices. On a rank without channels of the expert, they have no rows or no
/// columns.
#[derive(Debug)]
pub struct Expert<M> {
    /// Packed of gate and up.
    pub gate_up: M,
    /// From the channels back.
    pub down: M,
    /// Added to the output of `down`, `[down's rows]`.
    pub down_bias: Option<Vec<f32>>,
}
