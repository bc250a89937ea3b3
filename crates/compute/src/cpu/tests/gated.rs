//! Gated feed-forward layers compared with plain arithmetic.

use std::ops::Range;

use super::*;
use crate::backend::Activation;

/// A matrix and its bias.
type Biased = (Stored, Vec<f32>);

/// Gate, up and down.
struct Weights([Biased; 3]);

impl Weights {
    /// `down` has five rows.
    fn random(encodings: [Encoding; 3], [cols, channels]: [usize; 2], numbers: &mut Random) -> Self {
        let shapes = [[channels, cols], [channels, cols], [5, channels]];
        Self(std::array::from_fn(|i| {
            let [rows, cols] = shapes[i];
            (Stored::random(rows, cols, encodings[i], numbers), numbers.floats(rows))
        }))
    }

    fn cols(&self) -> usize {
        self.0[0].0.cols
    }

    /// Inputs so small that no gate saturates.
    fn inputs(&self, rows: usize, numbers: &mut Random) -> Vec<f32> {
        numbers.floats(rows * self.cols()).iter().map(|x| x / (self.cols() as f32).sqrt()).collect()
    }

    fn expected(&self, x: &[f32]) -> Vec<f32> {
        let product = |x: &[f32], (stored, bias): &Biased| -> Vec<f32> {
            let rows = stored.values.chunks(stored.cols).zip(bias);
            rows.map(|(w, bias)| bias + w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>()).collect()
        };
        let row = |x| {
            let (gate, up) = (product(x, &self.0[0]), product(x, &self.0[1]));
            let gated: Vec<f32> = gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
            product(&gated, &self.0[2])
        };
        x.chunks(self.cols()).flat_map(row).collect()
    }

    /// The outputs of a backend that computes `parts` of the rows one after another.
    fn run(&self, backend: &mut CpuBackend, x: &[f32], parts: &[Range<usize>]) -> Vec<f32> {
        let [gate_up, down] = [&self.0[..2], &self.0[2..]].map(|parts| {
            let parts: Vec<_> =
                parts.iter().map(|(stored, bias)| stored.source(Some(bias.clone()))).collect();
            backend.matrix(&parts).unwrap()
        });
        let x = filled(backend, x, self.cols());
        let mut channels = backend.buffer(x.rows, self.0[0].0.rows).unwrap();
        let mut out = backend.buffer(x.rows, self.0[2].0.rows).unwrap();
        for rows in parts {
            let next = (Activation::Silu, &down);
            backend.linear_gated(Plain(&x), rows.clone(), &gate_up, next, &mut channels).unwrap();
            backend.linear(Gated(&channels), rows.clone(), &down, &mut out).unwrap();
        }
        read(backend, &out)
    }

    /// Asserts that the relative error is at most the sum of the three products' limits.
    fn check(&self, ours: &[f32], expected: &[f32], numerics: Numerics, what: &str) {
        let limit = self.0.iter().map(|(stored, _)| limit(numerics, stored.encoding)).sum::<f32>();
        let off = distance(ours, expected);
        assert!(off < limit, "{what}, {numerics:?}: {off} > {limit}");
    }
}

const fn affine(bits: u32, group: usize) -> Encoding {
    Encoding::Affine { bits, group, scales: Float::F16 }
}
const F16: Encoding = Encoding::Float(Float::F16);
const BF16: Encoding = Encoding::Float(Float::BF16);

#[test]
fn gate_up_and_down_work_in_any_encodings() {
    let mut numbers = Random::new(7);
    let single = Encoding::Float(Float::F32);
    for encodings in [
        [affine(4, 64), affine(4, 64), BF16],
        [affine(4, 32), affine(6, 128), F16],
        [BF16, affine(8, 64), BF16],
        [affine(4, 64), affine(4, 64), single],
        [single, BF16, BF16],
    ] {
        // An odd number of panels of channels, the last one partly empty.
        let weights = Weights::random(encodings, [128, 37], &mut numbers);
        for batch in [1, 3, 11, 45] {
            let x = weights.inputs(batch, &mut numbers);
            let expected = weights.expected(&x);
            for isa in Isa::available() {
                for activations in [Activations::Auto, Activations::Bf16, Activations::Int8, Activations::F32]
                {
                    let ours = weights.run(&mut backend(isa, 2, activations), &x, &[0..batch]);
                    let numerics = Numerics { isa, activations, prompts: batch >= MANY_ROWS };
                    weights.check(&ours, &expected, numerics, &format!("{encodings:?}, {batch} rows"));
                }
            }
        }
    }
}

/// More pairs of panels and more chunks of columns and channels than are multiplied together; more
/// threads than pairs.
#[test]
fn large_gates_are_right_with_any_number_of_threads() {
    let mut numbers = Random::new(9);
    let weights = Weights::random([affine(4, 64), affine(4, 64), BF16], [1088, 560 + 5], &mut numbers);
    for batch in [2, 70] {
        let x = weights.inputs(batch, &mut numbers);
        let expected = weights.expected(&x);
        for isa in Isa::available() {
            for threads in [1, 3, 40] {
                let activations = Activations::Bf16;
                let ours = weights.run(&mut backend(isa, threads, activations), &x, &[0..batch]);
                let numerics = Numerics { isa, activations, prompts: batch >= MANY_ROWS };
                weights.check(&ours, &expected, numerics, &format!("{batch} rows, {threads} threads"));
            }
        }
    }
}

/// Rows of generated tokens have the same results with and without prompt rows, and if the step is
/// cut into parts.
#[test]
fn generated_rows_next_to_a_prompt_equal_generated_rows_alone() {
    let mut numbers = Random::new(11);
    let weights = Weights::random([affine(4, 64), affine(4, 64), affine(4, 32)], [128, 96], &mut numbers);
    let (generated, rows) = (3usize, 64);
    let x = weights.inputs(rows, &mut numbers);
    let expected = weights.expected(&x);
    let mut step = Step::default();
    (0..generated).for_each(|i| step.push(&[1], 0, &[i as u32], i, true));
    step.push(&vec![1; rows - generated], 0, &[8, 9], generated, true);
    for isa in Isa::available() {
        for activations in [Activations::Auto, Activations::Bf16, Activations::Int8] {
            let mut backend = backend(isa, 2, activations);
            let alone = weights.run(&mut backend, &x[..generated * weights.cols()], &[0..generated]);
            backend.begin(&step, &[]).unwrap();
            let whole = weights.run(&mut backend, &x, &[0..rows]);
            assert_eq!(
                whole,
                weights.run(&mut backend, &x, &[0..32, 32..rows]),
                "in parts on {}",
                isa.name()
            );
            assert_eq!(whole[..alone.len()], alone, "next to a prompt on {}", isa.name());
            let numerics = Numerics { isa, activations, prompts: true };
            weights.check(&whole, &expected, numerics, "both kinds");
        }
    }
}
