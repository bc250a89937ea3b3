//! Products, rows and sums.

use std::ops::Range;

use super::data::{Stored, columns, filled};
use super::{Suite, Work};
use crate::backend::{Activation, Backend, ComputeError, Largest, LinearInput, Norm, PartNorm};
use crate::choice::{Choice, Choices, RowEdits, RowLikelihoods, TokenEdit};
use crate::source::{Block, Encoding, Float, Fp8Scales, IntegerLayout};

/// Every kind of stored weight.
pub(crate) fn encodings() -> Vec<Encoding> {
    let mut all: Vec<_> = [Float::F32, Float::F16, Float::BF16].map(Encoding::Float).to_vec();
    for (index, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (shift, group) in [32, 64, 128].into_iter().enumerate() {
            let scales = [Float::F32, Float::F16, Float::BF16][(index + shift) % 3];
            all.push(Encoding::Affine { bits, group, scales });
        }
    }
    all.extend([Encoding::Mxfp4, Encoding::Nvfp4, Encoding::Mxfp8]);
    for (block, scales) in [([128, 128], Float::F32), ([1, 0], Float::BF16), ([0, 0], Float::F32)] {
        all.push(Encoding::Fp8 { block, scales: Fp8Scales::Float(scales) });
    }
    all.push(Encoding::Fp8 { block: [32, 64], scales: Fp8Scales::Exponents });
    let integers = |layout, bits, group| Encoding::Integers { layout, bits, group, scales: Float::F16 };
    all.extend([
        integers(IntegerLayout::Rows, 4, 32),
        integers(IntegerLayout::Rows, 8, 0),
        integers(IntegerLayout::RowsWithZeros, 4, 32),
        integers(IntegerLayout::Gptq { add: 1 }, 4, 128),
        integers(IntegerLayout::Gptq { add: 0 }, 8, 64),
        integers(IntegerLayout::Awq, 4, 128),
    ]);
    all.extend(Block::ALL.map(Encoding::Blocks));
    all
}

/// Every gated activation.
pub(super) const ACTIVATIONS: [Activation; 8] = [
    Activation::Silu,
    Activation::Sigmoid,
    Activation::ExactGelu,
    Activation::Gelu,
    Activation::Clamped { alpha: 1.702, limit: 0.7 },
    Activation::Limited { limit: 0.6 },
    Activation::Situ { beta: 0.8, cap: None },
    Activation::Situ { beta: 1.5, cap: Some(0.6) },
];

/// A product's input.
#[derive(Debug, Clone, Copy)]
enum Input {
    Plain,
    Normed,
    Gated,
    Precise,
}

struct Linear<'a> {
    input: Input,
    x: &'a [f32],
    norm: &'a [f32],
    parts: &'a [Stored],
    rows: Range<usize>,
}

impl Work for Linear<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let cols = self.parts[0].cols;
        let sources: Vec<_> = self.parts.iter().map(Stored::source).collect();
        let w = backend.matrix(&sources)?;
        let x = filled(backend, self.x, cols)?;
        let weight = backend.vector(self.norm)?;
        let outputs = self.parts.iter().map(|part| part.rows).sum();
        // A buffer may be wider than a product's outputs.
        let mut out = backend.buffer(self.x.len() / cols, outputs + 3)?;
        let input = match self.input {
            Input::Plain => LinearInput::Plain(&x),
            Input::Gated => LinearInput::Gated(&x),
            Input::Precise => LinearInput::Precise(&x),
            Input::Normed => LinearInput::Normed { x: &x, weight: &weight, eps: 1e-5 },
        };
        backend.linear(input, self.rows.clone(), &w, &mut out)?;
        columns(backend, &out, self.rows.clone(), (outputs + 3, outputs))
    }
}

struct GatedLinear<'a> {
    x: &'a [f32],
    gate_up: [&'a Stored; 2],
    down: &'a Stored,
    activation: Activation,
    fused: bool,
}

impl Work for GatedLinear<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (cols, channels) = (self.gate_up[0].cols, self.down.cols);
        let rows = self.x.len() / cols;
        let gate_up = backend.matrix(&self.gate_up.map(Stored::source))?;
        let down = backend.matrix(&[self.down.source()])?;
        let x = filled(backend, self.x, cols)?;
        let mut gated = backend.buffer(rows, channels)?;
        let mut out = backend.buffer(rows, self.down.rows)?;
        if self.fused {
            backend.linear_gated(
                LinearInput::Plain(&x),
                0..rows,
                &gate_up,
                (self.activation, &down),
                &mut gated,
            )?;
            backend.linear(LinearInput::Gated(&gated), 0..rows, &down, &mut out)?;
        } else {
            let mut both = backend.buffer(rows, 2 * channels)?;
            backend.product(&x, 0..rows, &gate_up, &mut both)?;
            backend.gate(&both, 0..rows, self.activation, &mut gated)?;
            backend.product(&gated, 0..rows, &down, &mut out)?;
        }
        columns(backend, &out, 0..rows, (self.down.rows, self.down.rows))
    }
}

/// Operations on rows, without weights but a norm's.
struct RowOperations<'a> {
    x: &'a [f32],
    norm: &'a [f32],
}

impl Work for RowOperations<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let width = self.norm.len();
        let rows = self.x.len() / width;
        let mut x = filled(backend, self.x, width)?;
        let mut normed = backend.buffer(rows, width)?;
        let norm = Norm { weight: backend.vector(self.norm)?, eps: 1e-5 };
        backend.rms_norm(&x, 0..rows, &norm, &mut normed)?;
        backend.add(&normed, 1..rows, &mut x)?;
        let picked: Vec<u32> = (0..rows as u32).step_by(2).collect();
        let mut taken = backend.buffer(picked.len(), width)?;
        backend.take_rows(&x, &picked, &mut taken)?;
        columns(backend, &taken, 0..picked.len(), (width, width))
    }
}

/// Norms of two vectors in a row, of which each rank has some columns.
struct PartNorms<'a> {
    x: &'a [f32],
    width: usize,
    norms: &'a [PartNorm<Vec<f32>>],
    fused: bool,
}

impl Work for PartNorms<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let rows = self.x.len() / self.width;
        let mut x = filled(backend, self.x, self.width)?;
        let norms = self.norms.iter().cloned();
        let norms: Vec<PartNorm<B::Vector>> = norms
            .map(|norm| norm.try_map(&mut |values| backend.vector(&values)))
            .collect::<Result<_, _>>()?;
        if self.fused {
            backend.norm_parts(&norms, 0..rows, &mut x)?;
        } else {
            let mut sums = backend.buffer(rows, norms.len())?;
            backend.square_sums(&norms, &x, 0..rows, &mut sums)?;
            backend.all_reduce(&mut sums, 0..rows)?;
            backend.norm_by_sums(&norms, &sums, 0..rows, &mut x)?;
        }
        columns(backend, &x, 0..rows, (self.width, self.width))
    }
}

struct Embedding<'a> {
    table: &'a Stored,
    ids: &'a [u32],
    first: u32,
}

impl Work for Embedding<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let table = backend.matrix(&[self.table.source()])?;
        let mut out = backend.buffer(self.ids.len(), self.table.cols)?;
        backend.embed(&table, self.ids, self.first, 0.5, &mut out)?;
        columns(backend, &out, 0..self.ids.len(), (self.table.cols, self.table.cols))
    }
}

/// Columns and values of the largest outputs, for a product that was told to find them and for a
/// written buffer.
struct LargestOutputs<'a> {
    x: &'a [f32],
    w: &'a Stored,
    ties: &'a [f32],
}

impl Work for LargestOutputs<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let rows = self.x.len() / self.w.cols;
        let w = backend.matrix(&[self.w.source()])?;
        let x = filled(backend, self.x, self.w.cols)?;
        let mut out = backend.buffer(rows, self.w.rows)?;
        backend.linear_largest(LinearInput::Plain(&x), rows, &w, &mut out)?;
        let mut largest = vec![Largest::NONE; rows];
        backend.read_largest(&out, &mut largest)?;
        let ties = filled(backend, self.ties, self.ties.len())?;
        let mut of_ties = [Largest::NONE];
        backend.read_largest(&ties, &mut of_ties)?;
        // The logits of different rows differ by far more than rounding, so columns must agree.
        Ok(largest.iter().chain(&of_ties).flat_map(|l| [l.column as f32 * 100.0, l.value]).collect())
    }
}

struct ChosenOutputs<'a> {
    x: &'a [f32],
    width: usize,
}

impl Work for ChosenOutputs<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let mut results = chosen_outputs(backend, self.x, self.width)?;
        results.extend(likely_outputs(backend, self.x, self.width)?);
        Ok(results)
    }
}

/// Columns (times 100) and values of outputs of rows of `values` that are chosen by all kinds of
/// choices.
///
/// # Errors
/// When the backend fails.
pub fn chosen_outputs<B: Backend>(
    backend: &mut B,
    values: &[f32],
    width: usize,
) -> Result<Vec<f32>, ComputeError> {
    let rows = values.len() / width;
    let x = filled(backend, values, width)?;
    let plain = Choice { temperature: 0.9, ..Choice::LARGEST };
    let kinds = [
        Choice::LARGEST,
        plain,
        Choice { top_k: 1, ..plain },
        Choice { top_k: 7, ..plain },
        Choice { top_p: 0.6, ..plain },
        Choice { top_p: 0.0, ..plain },
        Choice { min_p: 0.2, ..plain },
        Choice { min_p: 1.0, ..plain },
        Choice { temperature: 30.0, top_k: 40, top_p: 0.9, min_p: 0.3, ..plain },
    ];
    let mut results = Vec::new();
    for kind in kinds {
        for (draw, cap) in [(0, None), (0x3000_0000, Some(2.5)), (0x9000_0000, None), (u32::MAX, None)] {
            let choices: Vec<Choice> =
                (0..rows as u32).map(|row| Choice { draw: draw.wrapping_add(row << 26), ..kind }).collect();
            let mut chosen = vec![Largest::NONE; rows];
            let choices = Choices { cap, edits: &[], rows: &choices, next_draws: &[], likely: None };
            backend.read_chosen(&x, &choices, &mut chosen, &mut [])?;
            results.extend(chosen.iter().flat_map(|l| [l.column as f32 * 100.0, l.value]));
        }
    }
    results.extend(edited_outputs(backend, values, width)?);
    Ok(results)
}

/// Chosen outputs of rows of `values`, and what is reported of them: ids are numbers here, times
/// 100.
///
/// # Errors
/// When the backend fails.
pub fn likely_outputs<B: Backend>(
    backend: &mut B,
    values: &[f32],
    width: usize,
) -> Result<Vec<f32>, ComputeError> {
    let rows = values.len() / width;
    let x = filled(backend, values, width)?;
    let mut results = Vec::new();
    for (count, cap, temperature) in [(0, None, 0.0), (5, None, 0.9), (20, Some(2.5), 30.0)] {
        let choice = |row: usize| Choice { temperature, draw: 0x2000_0000u32 << row, ..Choice::LARGEST };
        let kinds: Vec<Choice> = (0..rows).map(choice).collect();
        let choices = Choices { cap, edits: &[], rows: &kinds, next_draws: &[], likely: Some(count) };
        let mut chosen = vec![Largest::NONE; rows];
        let mut likely = vec![0.0; rows * choices.likely_words()];
        backend.read_chosen(&x, &choices, &mut chosen, &mut likely)?;
        results.extend(chosen.iter().flat_map(|l| [l.column as f32 * 100.0, l.value]));
        for words in likely.chunks_exact(choices.likely_words()) {
            let Some(row) = RowLikelihoods::from_words(words) else { unreachable!("all words are there") };
            results.push(row.chosen());
            results.extend(row.likeliest().flat_map(|(id, logprob)| [id as f32 * 100.0, logprob]));
        }
    }
    Ok(results)
}

/// Columns (times 100) and values of outputs of `x` that are chosen after changes of tokens, and
/// among some tokens only. The last row is not changed.
fn edited_outputs<B: Backend>(backend: &mut B, x: &[f32], width: usize) -> Result<Vec<f32>, ComputeError> {
    let rows = x.len() / width;
    let edit = |token| TokenEdit { token, repetition: 1.4, added: (token % 7) as f32 - 3.0 };
    let words =
        |index: usize| if index.is_multiple_of(3) { 0 } else { 0x5a71_03f0u32.rotate_left(index as u32) };
    let edits: Vec<RowEdits> = (0..rows)
        .map(|row| match row {
            _ if row + 1 == rows => RowEdits::default(),
            _ => RowEdits {
                tokens: (row as u32..width as u32).step_by(3 + row).map(edit).collect(),
                // The last tokens have no words.
                allowed: (1..(width / 32).min(width * row)).map(words).collect(),
            },
        })
        .collect();
    let plain = Choice { temperature: 0.9, draw: 0x9000_0000, ..Choice::LARGEST };
    // Hot, so that the drawn token depends on all that may be chosen.
    let hot = [0, 0x4000_0000, 0xb000_0000, u32::MAX].map(|draw| Choice { temperature: 30.0, draw, ..plain });
    let kinds = [Choice::LARGEST, plain].into_iter().chain(hot).map(|kind| (kind, None));
    let mut results = Vec::new();
    for (kind, cap) in kinds.chain([(Choice { top_k: 7, ..plain }, Some(2.5))]) {
        // A backend may change the outputs in place.
        let x = filled(backend, x, width)?;
        let (choices, mut chosen) = (vec![kind; rows], vec![Largest::NONE; rows]);
        let choices = Choices { cap, edits: &edits, rows: &choices, next_draws: &[], likely: None };
        backend.read_chosen(&x, &choices, &mut chosen, &mut [])?;
        results.extend(chosen.iter().flat_map(|l| [l.column as f32 * 100.0, l.value]));
    }
    Ok(results)
}

/// A product for each of three heads, with inputs `stride` apart.
struct HeadProducts<'a> {
    x: &'a [f32],
    stride: usize,
    heads: &'a [Stored],
}

impl Work for HeadProducts<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let width = self.stride * self.heads.len();
        let (rows, outputs) = (self.x.len() / width, self.heads.len() * self.heads[0].rows);
        let sources: Vec<_> = self.heads.iter().map(Stored::source).collect();
        let w = backend.heads(&sources)?;
        let x = filled(backend, self.x, width)?;
        let mut out = backend.buffer(rows, outputs)?;
        backend.head_products(&x, self.stride, 0..rows, &w, &mut out)?;
        columns(backend, &out, 0..rows, (outputs, outputs))
    }
}

/// A layer's end on one of several ranks.
struct ReduceAdd<'a> {
    x: &'a [f32],
    residual: &'a [f32],
    w: &'a Stored,
    fused: bool,
}

impl Work for ReduceAdd<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let rows = self.x.len() / self.w.cols;
        let w = backend.matrix(&[self.w.source()])?;
        let x = filled(backend, self.x, self.w.cols)?;
        let mut residual = filled(backend, self.residual, self.w.rows)?;
        if self.fused {
            backend.linear_reduce_add(LinearInput::Plain(&x), 0..rows, &w, &mut residual)?;
            backend.settle(&mut residual)?;
        } else {
            let mut partial = backend.buffer(rows, self.w.rows)?;
            backend.product(&x, 0..rows, &w, &mut partial)?;
            backend.all_reduce(&mut partial, 0..rows)?;
            backend.add(&partial, 0..rows, &mut residual)?;
        }
        columns(backend, &residual, 0..rows, (self.w.rows, self.w.rows))
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn products(&mut self) {
        for encoding in encodings() {
            let limit = self.limits.product(encoding);
            for (outputs, cols, rows, bias) in
                [(1, 128_usize, 1, false), (37, 256, 3, true), (64, 384, 8, false), (130, 128, 40, true)]
            {
                // Floats need no whole groups.
                let cols = match encoding {
                    Encoding::Float(_) => cols + 5,
                    _ => cols.next_multiple_of(encoding.column_unit()),
                };
                let shape = [outputs, cols];
                let parts = [
                    Stored::random(shape, encoding, bias, &mut self.random),
                    Stored::random([outputs + 3, cols], encoding, false, &mut self.random),
                ];
                let (x, norm) = (self.random.numbers(rows * cols), self.random.numbers(cols));
                // The error of a single output is not averaged.
                let limit = if rows * outputs == 1 { 2.0 * limit } else { limit };
                for input in [Input::Plain, Input::Normed, Input::Gated, Input::Precise] {
                    let case = format!("linear {input:?} of {rows} rows, {shape:?} {encoding:?}");
                    let (norm, parts) = (norm.as_slice(), parts.as_slice());
                    self.compare(case, limit, Linear { input, x: &x, norm, parts, rows: 0..rows });
                }
                if rows > 4 {
                    let case = format!("linear of rows 2..{rows}, {shape:?} {encoding:?}");
                    let (norm, parts) = (norm.as_slice(), &parts[..1]);
                    self.compare(
                        case,
                        limit,
                        Linear { input: Input::Plain, x: &x, norm, parts, rows: 2..rows },
                    );
                }
            }
            self.gated_products(encoding);
            let width = 128_usize.next_multiple_of(encoding.column_unit());
            let table = Stored::random([50, width], encoding, false, &mut self.random);
            let embedding = Embedding { table: &table, ids: &[10, 59, 33, 9, 60, 10], first: 10 };
            self.compare(format!("embed {encoding:?}"), limit, embedding);
        }
        self.row_operations();
    }

    fn gated_products(&mut self, encoding: Encoding) {
        for (rows, cols, channels) in [(1, 128, 128), (5, 256, 384), (40, 128, 256)] {
            let [cols, channels] =
                [cols, channels].map(|n: usize| n.next_multiple_of(encoding.column_unit()));
            let gate = Stored::random([channels, cols], encoding, true, &mut self.random);
            let up = Stored::random([channels, cols], encoding, true, &mut self.random);
            let down = Stored::random([70, channels], encoding, false, &mut self.random);
            // Small inputs, so that the gate is not saturated.
            let x: Vec<f32> = self.random.numbers(rows * cols).iter().map(|x| x * 0.1).collect();
            // Errors of two products add up.
            let limit = 2.0 * self.limits.product(encoding);
            let activations = match encoding {
                Encoding::Float(Float::F32) | Encoding::Affine { bits: 4, group: 64, .. } => &ACTIVATIONS[..],
                _ => &ACTIVATIONS[..1],
            };
            for (&activation, fused) in activations.iter().flat_map(|a| [(a, false), (a, true)]) {
                let case = format!(
                    "gated product of {rows} rows, {channels} channels, {activation:?}, fused {fused}, \
                     {encoding:?}"
                );
                let gate_up = [&gate, &up];
                self.compare(case, limit, GatedLinear { x: &x, gate_up, down: &down, activation, fused });
            }
        }
    }

    fn row_operations(&mut self) {
        for (rows, width) in [(1, 64), (3, 100), (17, 48)] {
            let (x, norm) = (self.random.numbers(rows * width), self.random.numbers(width));
            let case = format!("norm, sum and picked rows of {rows} × {width}");
            self.compare(case, self.limits.rows, RowOperations { x: &x, norm: &norm });
        }
        self.part_norms(1);
        let float = Encoding::Float(Float::F32);
        for (rows, outputs) in [(1, 5), (4, 333)] {
            let w = Stored::random([outputs, 64], float, false, &mut self.random);
            let x = self.random.numbers(rows * 64);
            let mut ties = self.random.numbers(100);
            (ties[37], ties[80]) = (2.0, 2.0);
            let case = format!("largest of {outputs} outputs, {rows} rows");
            self.compare(case, self.limits.float_products, LargestOutputs { x: &x, w: &w, ties: &ties });
        }
        for (rows, width, levels) in [(1, 1, 1.0), (3, 300, 1e6), (2, 5000, 4.0), (1, 70_001, 1e6)] {
            let numbers = self.random.numbers(rows * width).into_iter();
            let x: Vec<f32> = numbers.map(|x| (x * levels).round() / levels * 5.0).collect();
            let case = format!("chosen among {width} outputs, {rows} rows");
            self.compare(case, self.limits.rows, ChosenOutputs { x: &x, width });
        }
        let levels = Encoding::Affine { bits: 4, group: 32, scales: Float::F16 };
        for (rows, stride, outputs, kinds) in [
            (1, 64, 33, vec![float; 3]),
            (6, 80, 33, vec![float; 3]),
            (40, 80, 36, vec![float; 3]),
            (40, 80, 36, vec![levels; 3]),
            (3, 64, 36, vec![levels; 1]),
            (20, 64, 36, vec![levels, float]),
        ] {
            let random = |kind: &Encoding| Stored::random([outputs, 64], *kind, false, &mut self.random);
            let heads: Vec<_> = kinds.iter().map(random).collect();
            let x = self.random.numbers(rows * stride * heads.len());
            let case = format!("products of {} heads, {rows} rows, {stride} apart", heads.len());
            self.compare(case, self.limits.product(kinds[0]), HeadProducts { x: &x, stride, heads: &heads });
        }
    }

    /// Norms of vectors that `ranks` ranks have parts of.
    fn part_norms(&mut self, ranks: usize) {
        for (rows, first, second) in [(1, 64, 3), (9, 37, 50)] {
            let width = first + second + 5;
            let mut norm = |columns: Range<usize>, counted: Range<usize>| PartNorm {
                width: ranks * counted.len(),
                weight: self.random.numbers(columns.len()),
                columns,
                counted,
                eps: 1e-5,
            };
            // Another rank counts the last column of the second vector.
            let norms = [
                norm(0..first, 0..first),
                norm(first + 2..first + 2 + second, first + 2..first + 1 + second),
            ];
            let x = self.random.numbers(rows * width);
            for fused in [false, true] {
                let case = format!("norms of {rows} × {first} and {second} on {ranks} ranks, fused {fused}");
                self.compare(case, self.limits.rows, PartNorms { x: &x, width, norms: &norms, fused });
            }
        }
    }

    pub(super) fn reductions(&mut self) {
        let ranks = self.backend.group().size();
        self.part_norms(ranks);
        for encoding in
            [Encoding::Float(Float::BF16), Encoding::Affine { bits: 4, group: 64, scales: Float::F16 }]
        {
            for rows in [1, 7, 40] {
                let w = Stored::random([65, 128], encoding, false, &mut self.random);
                let (x, residual) = (self.random.numbers(rows * 128), self.random.numbers(rows * 65));
                for fused in [false, true] {
                    let case = format!("sum over ranks of {rows} rows, fused {fused}, {encoding:?}");
                    let work = ReduceAdd { x: &x, residual: &residual, w: &w, fused };
                    self.compare(case, self.limits.product(encoding), work);
                }
            }
        }
    }
}
