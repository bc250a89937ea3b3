//! Operations of feed-forwards made of experts.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{RouterSpec, Scores, SharedExpert, root_softplus};
use crate::cpu::pointers::SendPtr;
use crate::cpu::product::experts::Experts;
use crate::cpu::product::input::each_row;
use crate::cpu::{Buffer, CpuBackend};

impl CpuBackend {
    pub(super) fn route_rows(
        &mut self,
        spec: &RouterSpec<Arc<[f32]>>,
        logits: &Buffer,
        rows: Range<usize>,
        choices: &mut Buffer,
    ) {
        let width = 2 * spec.choices();
        assert!(
            choices.width == width && logits.width >= spec.logits(),
            "a row of choices is an index and a weight for each expert"
        );
        choices.shape(logits.rows);
        let threads = self.pool.threads();
        self.routers.resize_with(threads, Router::default);
        let routers = SendPtr(self.routers.as_mut_ptr());
        let to = SendPtr(choices.data[rows.start * width..rows.end * width].as_mut_ptr());
        each_row(&mut self.pool, rows.len(), &|thread, i| {
            let logits = &logits.data[(rows.start + i) * logits.width..][..spec.logits()];
            // SAFETY: each thread has its own router; each row is one thread's.
            unsafe {
                let choices = std::slice::from_raw_parts_mut(to.at(i * width), width);
                (*routers.at(thread)).route(spec, logits, choices);
            }
        });
    }

    /// Adds the chosen experts of the rows of `x` to rows of `out`, with prompts' rows separate
    /// from the others.
    pub(super) fn add_experts(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        choices: &Buffer,
        experts: &Experts,
        out: &mut Buffer,
    ) {
        for (rows, prompts) in self.alike(x.rows, &rows) {
            let to = out.output(rows.clone(), true);
            self.multiplier(prompts).add_experts(x, rows, choices, experts, to);
        }
    }
}

/// Memory of one thread to choose experts.
#[derive(Debug, Default)]
pub(in crate::cpu) struct Router {
    scores: Vec<f32>,
    /// The scores with the correction; `-∞` for experts that cannot be chosen.
    candidates: Vec<f32>,
    /// The groups' scores.
    groups: Vec<f32>,
    sorted: Vec<f32>,
    chosen: Vec<u32>,
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The index of the largest number, the first if there are several.
fn argmax(numbers: &[f32]) -> usize {
    let mut best = 0;
    for (index, number) in numbers.iter().enumerate() {
        if *number > numbers[best] {
            best = index;
        }
    }
    best
}

impl Router {
    fn route(&mut self, spec: &RouterSpec<Arc<[f32]>>, logits: &[f32], choices: &mut [f32]) {
        let (routed, shared) = logits.split_at(spec.experts);
        self.score(spec.scores, routed);
        self.candidates.clear();
        self.candidates.extend_from_slice(&self.scores);
        if let Some(correction) = &spec.correction {
            self.candidates.iter_mut().zip(&correction[..]).for_each(|(score, more)| *score += more);
        }
        self.leave_best_groups(spec);
        self.chosen.clear();
        for _ in 0..spec.chosen {
            let best = argmax(&self.candidates);
            self.candidates[best] = f32::NEG_INFINITY;
            self.chosen.push(best as u32);
        }
        self.chosen.sort_unstable();
        let sum: f32 = self.chosen.iter().map(|expert| self.scores[*expert as usize]).sum();
        let factor = if spec.renormalise { spec.scale / (sum + 1e-20) } else { spec.scale };
        let (indices, weights) = choices.split_at_mut(spec.choices());
        for ((index, weight), &expert) in indices.iter_mut().zip(&mut *weights).zip(&self.chosen) {
            (*index, *weight) = (expert as f32, self.scores[expert as usize] * factor);
        }
        let weight = match spec.shared {
            SharedExpert::None => return,
            SharedExpert::Plain => 1.0,
            SharedExpert::Gated => sigmoid(shared[0]),
        };
        (indices[spec.chosen], weights[spec.chosen]) = (spec.experts as f32, weight);
    }

    fn score(&mut self, scores: Scores, logits: &[f32]) {
        self.scores.clear();
        match scores {
            Scores::Sigmoid => self.scores.extend(logits.iter().map(|x| sigmoid(*x))),
            Scores::RootSoftplus => self.scores.extend(logits.iter().map(|x| root_softplus(*x))),
            Scores::Softmax => {
                let largest = logits[argmax(logits)];
                self.scores.extend(logits.iter().map(|x| (x - largest).exp()));
                let sum: f32 = self.scores.iter().sum();
                self.scores.iter_mut().for_each(|score| *score /= sum);
            }
        }
    }

    /// Takes the experts outside of the best groups from the candidates.
    fn leave_best_groups(&mut self, spec: &RouterSpec<Arc<[f32]>>) {
        let Some(groups) = spec.groups else { return };
        let size = spec.experts / groups.count;
        self.groups.clear();
        for group in self.candidates.chunks_exact(size) {
            self.sorted.clear();
            self.sorted.extend_from_slice(group);
            self.sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            self.groups.push(self.sorted.iter().take(groups.best).sum());
        }
        self.sorted.clear();
        self.sorted.resize(spec.experts, f32::NEG_INFINITY);
        for _ in 0..groups.chosen {
            let best = argmax(&self.groups);
            self.groups[best] = f32::NEG_INFINITY;
            let members = best * size..(best + 1) * size;
            self.sorted[members.clone()].copy_from_slice(&self.candidates[members]);
        }
        std::mem::swap(&mut self.sorted, &mut self.candidates);
    }
}
