//! Experts by their definition.

use super::{Experts, dot};
use crate::backend::{ExpertGroups, RouterSpec, SharedExpert};

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// A row of choices: indices in ascending order, then weights.
pub(super) fn route(spec: &RouterSpec<Vec<f32>>, logits: &[f32]) -> Vec<f32> {
    let scores = spec.scores.of(&logits[..spec.experts]);
    let correction = |expert: usize| spec.correction.as_ref().map_or(0.0, |correction| correction[expert]);
    let for_choice: Vec<f32> = (0..spec.experts).map(|expert| scores[expert] + correction(expert)).collect();
    let allowed = match spec.groups {
        Some(groups) => in_best_groups(groups, &for_choice),
        None => (0..spec.experts).collect(),
    };
    let mut chosen = largest(&for_choice, allowed, spec.chosen);
    chosen.sort_unstable();
    let sum: f32 = chosen.iter().map(|&expert| scores[expert]).sum();
    let divisor = if spec.renormalise { sum + 1e-20 } else { 1.0 };
    let mut weights: Vec<f32> = chosen.iter().map(|&expert| scores[expert] / divisor * spec.scale).collect();
    match spec.shared {
        SharedExpert::None => {}
        SharedExpert::Plain => weights.push(1.0),
        SharedExpert::Gated => weights.push(sigmoid(logits[spec.experts])),
    }
    if weights.len() > chosen.len() {
        chosen.push(spec.experts);
    }
    chosen.into_iter().map(|expert| expert as f32).chain(weights).collect()
}

/// The `count` of these experts with the largest scores; of equal ones, the first.
fn largest(scores: &[f32], mut experts: Vec<usize>, count: usize) -> Vec<usize> {
    experts.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    experts.truncate(count);
    experts
}

/// The experts of the best groups.
fn in_best_groups(groups: ExpertGroups, scores: &[f32]) -> Vec<usize> {
    let size = scores.len() / groups.count;
    let members = |group: usize| (group * size..(group + 1) * size).collect::<Vec<_>>();
    let score =
        |group| largest(scores, members(group), groups.best).iter().map(|&expert| scores[expert]).sum();
    let of_groups: Vec<f32> = (0..groups.count).map(score).collect();
    let mut best = largest(&of_groups, (0..groups.count).collect(), groups.chosen);
    best.sort_unstable();
    best.into_iter().flat_map(members).collect()
}

impl Experts {
    /// The weighted sum of a row's experts.
    pub(super) fn sum(&self, x: &[f32], choices: &[f32], width: usize) -> Vec<f32> {
        let (indices, weights) = choices.split_at(choices.len() / 2);
        let mut sum = vec![0.0; width];
        for (&index, &weight) in indices.iter().zip(weights) {
            let expert = &self.experts[index as usize];
            let both = expert.gate_up.times(x);
            let channels: Vec<f32> = match self.activation {
                Some(activation) => {
                    let (gate, up) = both.split_at(both.len() / 2);
                    gate.iter().zip(up).map(|(&gate, &up)| activation.of(gate, up)).collect()
                }
                None => both.iter().map(|up| up.max(0.0).powi(2)).collect(),
            };
            for (row, sum) in sum.iter_mut().enumerate() {
                let bias = expert.down_bias.as_ref().map_or(0.0, |bias| bias[row]);
                let weights = expert.down.rows.get(row);
                *sum += weight * (weights.map_or(0.0, |weights| dot(&channels, weights)) + bias);
            }
        }
        sum
    }
}
