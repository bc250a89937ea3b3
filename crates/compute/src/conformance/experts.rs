//! Routers and experts.

use std::ops::Range;

use super::data::{Stored, columns, filled};
use super::products::ACTIVATIONS;
use super::{Suite, Work};
use crate::backend::{
    Activation, Backend, ComputeError, Expert, ExpertGroups, RouterSpec, Scores, SharedExpert,
};
use crate::source::{Encoding, Float};

/// A router's choice, of rows after the first.
struct Route<'a> {
    spec: &'a RouterSpec<Vec<f32>>,
    logits: &'a [f32],
}

impl Work for Route<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let (rows, width) = (self.logits.len() / spec.logits(), 2 * spec.choices());
        let logits = filled(backend, self.logits, spec.logits())?;
        let mut choices = backend.buffer(rows, width)?;
        let first = usize::from(rows > 1);
        backend.route(&spec, &logits, first..rows, &mut choices)?;
        columns(backend, &choices, first..rows, (width, width))
    }
}

/// One expert as files have it.
struct StoredExpert {
    gate_up: [Stored; 2],
    down: Stored,
    down_bias: Option<Vec<f32>>,
}

/// A feed-forward with experts, on the rows `rows`, with or without the residual stream.
struct ExpertSum<'a> {
    x: &'a [f32],
    choices: &'a [f32],
    experts: &'a [StoredExpert],
    activation: Activation,
    rows: Range<usize>,
    residual: Option<&'a [f32]>,
}

impl Work for ExpertSum<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let [cols, width] = [self.experts[0].gate_up[0].cols, self.experts[0].down.rows];
        let all = self.x.len() / cols;
        let mut experts = Vec::new();
        for expert in self.experts {
            let [gate, up] = &expert.gate_up;
            // Shards without channels of an expert have sources without rows or columns.
            let both = [gate.source(), up.source()];
            let packed = backend.expert_matrices(&[&both, &[expert.down.source()]])?;
            let [gate_up, down] = packed.try_into().unwrap_or_else(|_| unreachable!("one for each"));
            experts.push(Expert { gate_up, down, down_bias: expert.down_bias.clone() });
        }
        let experts = backend.experts(experts, self.activation)?;
        let x = filled(backend, self.x, cols)?;
        let choices = filled(backend, self.choices, self.choices.len() / all)?;
        let rows = self.rows.clone();
        let mut out = match self.residual {
            Some(residual) => filled(backend, residual, width)?,
            None => backend.buffer(all, width)?,
        };
        match self.residual {
            Some(_) => {
                backend.experts_reduce_add(&x, rows.clone(), &choices, &experts, &mut out)?;
                backend.settle(&mut out)?;
            }
            None => backend.expert_sum(&x, rows.clone(), &choices, &experts, &mut out)?,
        }
        columns(backend, &out, rows, (width, width))
    }
}

/// The sums over ranks of two buffers, of rows after the first.
struct SumBoth<'a> {
    x: &'a [f32],
    y: &'a [f32],
    widths: [usize; 2],
}

impl Work for SumBoth<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let [x_width, y_width] = self.widths;
        let rows = self.x.len() / x_width;
        let mut x = filled(backend, self.x, x_width)?;
        let mut y = filled(backend, self.y, y_width)?;
        backend.all_reduce_both([&mut x, &mut y], usize::from(rows > 1)..rows)?;
        let mut results = columns(backend, &x, 0..rows, (x_width, x_width))?;
        results.extend(columns(backend, &y, 0..rows, (y_width, y_width))?);
        Ok(results)
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn experts(&mut self) {
        self.routers();
        let affine = |bits, group, scales| Encoding::Affine { bits, group, scales };
        let [f32, bf16] = [Float::F32, Float::BF16].map(Encoding::Float);
        for (gates, ups, activation) in [
            (f32, f32, ACTIVATIONS[0]),
            (bf16, bf16, ACTIVATIONS[1]),
            (affine(4, 64, Float::BF16), affine(4, 64, Float::BF16), ACTIVATIONS[0]),
            (affine(8, 32, Float::F16), affine(8, 32, Float::F16), ACTIVATIONS[0]),
            (Encoding::Mxfp4, Encoding::Mxfp4, ACTIVATIONS[2]),
            // Mixed, as some quantizers make them.
            (affine(4, 64, Float::BF16), affine(6, 32, Float::F16), ACTIVATIONS[0]),
            (affine(8, 64, Float::F16), bf16, ACTIVATIONS[0]),
        ] {
            for rows in [1, 3, 9, 70] {
                self.expert_sums([gates, ups], activation, rows, false);
            }
        }
    }

    pub(super) fn expert_reductions(&mut self) {
        for (rows, widths) in [(1, [24, 24]), (6, [40, 17])] {
            let [x, y] = widths.map(|width| self.random.numbers(rows * width));
            let work = SumBoth { x: &x, y: &y, widths };
            self.compare(format!("sums of two buffers of {rows} rows, {widths:?}"), self.limits.rows, work);
        }
        let encoding = Encoding::Affine { bits: 4, group: 64, scales: Float::F16 };
        for rows in [1, 7, 40] {
            self.expert_sums([encoding; 2], Activation::Silu, rows, true);
        }
    }

    fn routers(&mut self) {
        let plain = RouterSpec {
            experts: 24,
            chosen: 4,
            scores: Scores::Softmax,
            correction: None,
            groups: None,
            renormalise: false,
            scale: 1.0,
            shared: SharedExpert::None,
        };
        let correction = || Some(self.random.clone().numbers(24));
        let specs = [
            plain.clone(),
            RouterSpec { renormalise: true, shared: SharedExpert::Gated, ..plain.clone() },
            RouterSpec { scores: Scores::Sigmoid, correction: correction(), scale: 2.5, ..plain.clone() },
            RouterSpec {
                scores: Scores::Sigmoid,
                correction: correction(),
                groups: Some(ExpertGroups { count: 4, chosen: 2, best: 2 }),
                renormalise: true,
                shared: SharedExpert::Plain,
                ..plain.clone()
            },
            RouterSpec { groups: Some(ExpertGroups { count: 6, chosen: 3, best: 1 }), ..plain.clone() },
            RouterSpec {
                scores: Scores::RootSoftplus,
                correction: correction(),
                renormalise: true,
                ..plain.clone()
            },
            RouterSpec { experts: 7, chosen: 7, renormalise: true, ..plain },
        ];
        for (spec, rows) in specs.iter().flat_map(|spec| [(spec, 1), (spec, 13)]) {
            let logits: Vec<f32> =
                self.random.numbers(rows * spec.logits()).iter().map(|x| 3.0 * x).collect();
            self.compare(format!("choice of {rows} rows, {spec:?}"), 1e-5, Route { spec, logits: &logits });
        }
    }

    fn expert_sums(
        &mut self,
        [gates, ups]: [Encoding; 2],
        activation: Activation,
        rows: usize,
        reduces: bool,
    ) {
        const EXPERTS: usize = 6;
        const CHOSEN: usize = 3;
        let [cols, width] = [128, 70];
        let biased = activation != Activation::Silu;
        // The last is a shared expert with a different number of channels, and one expert has none
        // on this rank.
        let experts: Vec<_> = (0..=EXPERTS)
            .map(|expert| {
                let channels = [128, 0, 128, 128, 128, 128, 192][expert];
                let random = &mut self.random;
                let gate_up =
                    [gates, ups].map(|encoding| Stored::random([channels, cols], encoding, biased, random));
                let down = Stored::random([width, channels], gates, false, random);
                let down_bias = biased.then(|| random.numbers(width));
                StoredExpert { gate_up, down, down_bias }
            })
            .collect();
        let x: Vec<f32> = self.random.numbers(rows * cols).iter().map(|x| x * 0.1).collect();
        let mut choices = Vec::new();
        for row in 0..rows {
            let mut chosen: Vec<usize> =
                (0..CHOSEN).map(|i| (row * (1 + row % 2) + 2 * i) % EXPERTS).collect();
            chosen.sort_unstable();
            chosen.push(EXPERTS);
            choices.extend(chosen.iter().map(|expert| *expert as f32));
            choices.extend(chosen.iter().map(|_| 0.5 + 0.4 * self.random.number()));
        }
        let residual = self.random.numbers(rows * width);
        let limit = 2.0 * self.limits.product(gates).max(self.limits.product(ups));
        let cases: &[(Range<usize>, Option<&[f32]>)] = match reduces {
            true => &[(0..rows, Some(&residual))],
            false => &[(0..rows, None), (rows / 2..rows, None), (0..rows, Some(&residual))],
        };
        for (of_rows, residual) in cases {
            let case = format!(
                "experts of rows {of_rows:?} of {rows}, residual {}, {activation:?}, {gates:?}, {ups:?}",
                residual.is_some()
            );
            let (rows, residual) = (of_rows.clone(), *residual);
            let (x, choices, experts) = (&x[..], &choices[..], &experts[..]);
            self.compare(case, limit, ExpertSum { x, choices, experts, activation, rows, residual });
        }
    }
}
