//! Products with weights, and what is fused into them.

use half::bf16;
use thunder_compute::cpu::measure::arithmetic::Arithmetic;
use thunder_compute::{
    Activation, Backend, ComputeError, Expert, LinearInput, PackedFormat, RouterSpec, Scores, SharedExpert,
};

use super::data::{SEQUENCES, begin_step, filled, matrices, numbers, stored};
use super::{How, MAX_ROWS, Subject, Work};

/// Bytes of weights to cycle through: several times the last-level cache of a desktop, over twice
/// that of a server.
const WEIGHT_BYTES: usize = 256 << 20;
/// Shape of a 1B model's matrix, so that a product reads as many bytes as in that model.
const OUTPUTS: usize = 8192;
const INPUTS: usize = 2048;
/// Both, outputs first.
pub const MATRIX: [usize; 2] = [OUTPUTS, INPUTS];

/// Few outputs: a product's time is mostly that of preparing its input.
const FEW_OUTPUTS: usize = 16;
/// Few inputs: a product is small compared with a model's.
const FEW_INPUTS: usize = 64;

const SMALL: PackedFormat = PackedFormat::Affine { bits: 4, group: 64 };
/// Routers have 8 bits where the other weights have 4.
const ROUTER: PackedFormat = PackedFormat::Affine { bits: 8, group: 64 };

/// Experts of Qwen3 30B-A3B: how many, how many a row chooses, their inputs, and their channels.
const EXPERTS: usize = 128;
const CHOSEN: usize = 8;
const HIDDEN: usize = 2048;
const CHANNELS: usize = 768;
/// Choices that runs use in turn, so that their experts come from memory.
const CHOICES: usize = 16;

/// A product with weights, which are used in turn.
pub struct Product<B: Backend> {
    format: PackedFormat,
    shape: [usize; 2],
    matrices: Vec<B::Matrix>,
    next: usize,
    x: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Product<B> {
    /// With matrices of a 1B model.
    pub fn of_a_1b(format: PackedFormat, backend: &mut B) -> Result<Self, ComputeError> {
        Self::new(format, MATRIX, WEIGHT_BYTES, backend)
    }

    /// With matrices of a shape (outputs first). There are as many as have these bytes together.
    pub fn new(
        format: PackedFormat,
        [outputs, inputs]: [usize; 2],
        bytes: usize,
        backend: &mut B,
    ) -> Result<Self, ComputeError> {
        let count = bytes.div_ceil(stored(format).bytes(outputs, inputs));
        Ok(Self {
            format,
            shape: [outputs, inputs],
            matrices: matrices((count, 1), [outputs, inputs], format, backend)?,
            next: 0,
            x: backend.buffer(MAX_ROWS, inputs)?,
            out: backend.buffer(MAX_ROWS, outputs)?,
        })
    }
}

impl<B: Backend> Subject<B> for Product<B> {
    fn begin(&mut self, backend: &mut B, how: How, rows: usize) -> Result<Work, ComputeError> {
        begin_step(backend, rows)?;
        let [outputs, inputs] = self.shape;
        backend.write(&numbers(rows * inputs), &mut self.x)?;
        Ok(Work {
            bytes: stored(self.format).bytes(outputs, inputs),
            operations: 2 * rows * outputs * inputs,
            arithmetic: of_product(how, self.format, rows),
            counts_floats: false,
        })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { matrices, next, x, out, .. } = self;
        backend.linear(LinearInput::Plain(x), 0..rows, &matrices[*next], out)?;
        *next = (*next + 1) % matrices.len();
        Ok(())
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}

fn of_product((isa, activations): How, format: PackedFormat, rows: usize) -> Arithmetic {
    Arithmetic::of_product(isa, activations, format, (rows, rows > SEQUENCES))
}

/// A matrix whose product takes little of the measured time.
fn small<B: Backend>(parts: usize, shape: [usize; 2], backend: &mut B) -> Result<B::Matrix, ComputeError> {
    Ok(matrices((1, parts), shape, SMALL, backend)?.remove(0))
}

/// [`super::Operation::Norm`].
pub struct Norm<B: Backend> {
    weight: B::Vector,
    matrix: B::Matrix,
    x: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Norm<B> {
    pub fn new(backend: &mut B) -> Result<Self, ComputeError> {
        Ok(Self {
            weight: backend.vector(&[1.0; INPUTS])?,
            matrix: small(1, [FEW_OUTPUTS, INPUTS], backend)?,
            x: backend.buffer(MAX_ROWS, INPUTS)?,
            out: backend.buffer(MAX_ROWS, FEW_OUTPUTS)?,
        })
    }
}

impl<B: Backend> Subject<B> for Norm<B> {
    fn begin(&mut self, backend: &mut B, _: How, rows: usize) -> Result<Work, ComputeError> {
        begin_step(backend, rows)?;
        backend.write(&numbers(rows * INPUTS), &mut self.x)?;
        Ok(Work {
            bytes: 4 * rows * INPUTS,
            operations: 2 * 2 * rows * INPUTS,
            arithmetic: Arithmetic::Floats,
            counts_floats: true,
        })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { weight, matrix, x, out } = self;
        backend.linear(LinearInput::Normed { x, weight, eps: 1e-5 }, 0..rows, matrix, out)
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}

/// [`super::Operation::Swiglu`].
pub struct Swiglu<B: Backend> {
    gate_up: B::Matrix,
    down: B::Matrix,
    x: B::Buffer,
    channels: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Swiglu<B> {
    pub fn new(backend: &mut B) -> Result<Self, ComputeError> {
        Ok(Self {
            gate_up: small(2, [OUTPUTS, FEW_INPUTS], backend)?,
            down: small(1, [FEW_OUTPUTS, OUTPUTS], backend)?,
            x: backend.buffer(MAX_ROWS, FEW_INPUTS)?,
            channels: backend.buffer(MAX_ROWS, OUTPUTS)?,
            out: backend.buffer(MAX_ROWS, FEW_OUTPUTS)?,
        })
    }
}

impl<B: Backend> Subject<B> for Swiglu<B> {
    fn begin(&mut self, backend: &mut B, how: How, rows: usize) -> Result<Work, ComputeError> {
        begin_step(backend, rows)?;
        backend.write(&numbers(rows * FEW_INPUTS), &mut self.x)?;
        // Gated activations are written once and read once. The exponential takes more operations
        // than the products counted here.
        let is_bf16 = of_product(how, SMALL, rows) == Arithmetic::Bf16;
        let bytes = if is_bf16 { size_of::<bf16>() } else { size_of::<f32>() };
        Ok(Work {
            bytes: 2 * bytes * rows * OUTPUTS,
            operations: 2 * rows * OUTPUTS,
            arithmetic: Arithmetic::Floats,
            counts_floats: true,
        })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { gate_up, down, x, channels, out } = self;
        let next = (Activation::Silu, &*down);
        backend.linear_gated(LinearInput::Plain(x), 0..rows, gate_up, next, channels)?;
        backend.linear(LinearInput::Gated(channels), 0..rows, down, out)
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}

/// [`super::Operation::Experts`].
pub struct Experts<B: Backend> {
    experts: B::Experts,
    x: B::Buffer,
    /// Used in turn.
    choices: Vec<B::Buffer>,
    next: usize,
    out: B::Buffer,
}

impl<B: Backend> Experts<B> {
    pub fn new(backend: &mut B) -> Result<Self, ComputeError> {
        let gate_up = matrices((EXPERTS, 2), [CHANNELS, HIDDEN], SMALL, backend)?;
        let down = matrices((EXPERTS, 1), [HIDDEN, CHANNELS], SMALL, backend)?;
        let all = gate_up.into_iter().zip(down);
        let all = all.map(|(gate_up, down)| Expert { gate_up, down, down_bias: None }).collect();
        Ok(Self {
            experts: backend.experts(all, Activation::Silu)?,
            x: backend.buffer(MAX_ROWS, HIDDEN)?,
            choices: (0..CHOICES).map(|_| backend.buffer(MAX_ROWS, 2 * CHOSEN)).collect::<Result<_, _>>()?,
            next: 0,
            out: backend.buffer(MAX_ROWS, HIDDEN)?,
        })
    }
}

/// Rows of choices, each of different experts, and the number of experts that one of them chose.
fn chosen_by(rows: usize, random: &mut impl Iterator<Item = f32>) -> (Vec<f32>, usize) {
    let (mut choices, mut is_read) = (Vec::with_capacity(2 * CHOSEN * rows), [false; EXPERTS]);
    for _ in 0..rows {
        let mut of_row = Vec::with_capacity(CHOSEN);
        while let (true, Some(x)) = (of_row.len() < CHOSEN, random.next()) {
            let expert = (((x + 1.0) / 2.0 * EXPERTS as f32) as usize).min(EXPERTS - 1);
            if !of_row.contains(&expert) {
                of_row.push(expert);
            }
        }
        of_row.sort_unstable();
        of_row.iter().for_each(|expert| is_read[*expert] = true);
        choices.extend(of_row.iter().map(|expert| *expert as f32));
        choices.extend([1.0 / CHOSEN as f32; CHOSEN]);
    }
    (choices, is_read.iter().filter(|is_read| **is_read).count())
}

impl<B: Backend> Subject<B> for Experts<B> {
    fn begin(&mut self, backend: &mut B, how: How, rows: usize) -> Result<Work, ComputeError> {
        begin_step(backend, rows)?;
        backend.write(&numbers(rows * HIDDEN), &mut self.x)?;
        let mut random = numbers(4 * CHOICES * CHOSEN * rows).into_iter();
        let mut read = 0;
        for choices in &mut self.choices {
            let (chosen, of_these) = chosen_by(rows, &mut random);
            backend.write(&chosen, choices)?;
            read += of_these;
        }
        let rows_of_expert = (rows * CHOSEN * CHOICES / read).max(1);
        let of_expert = 3 * stored(SMALL).bytes(CHANNELS, HIDDEN);
        Ok(Work {
            bytes: of_expert * read / CHOICES,
            operations: 2 * rows * CHOSEN * 3 * CHANNELS * HIDDEN,
            arithmetic: Arithmetic::of_product(how.0, how.1, SMALL, (rows_of_expert, rows > SEQUENCES)),
            counts_floats: false,
        })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { experts, x, choices, next, out } = self;
        *next = (*next + 1) % choices.len();
        backend.expert_sum(x, 0..rows, &choices[*next], experts, out)
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}

/// [`super::Operation::Router`].
pub struct Router<B: Backend> {
    norm: thunder_compute::Norm<B::Vector>,
    router: B::Matrix,
    spec: RouterSpec<B::Vector>,
    x: B::Buffer,
    normed: B::Buffer,
    logits: B::Buffer,
    choices: B::Buffer,
}

impl<B: Backend> Router<B> {
    pub fn new(backend: &mut B) -> Result<Self, ComputeError> {
        Ok(Self {
            norm: thunder_compute::Norm { weight: backend.vector(&[1.0; HIDDEN])?, eps: 1e-6 },
            router: matrices((1, 1), [EXPERTS, HIDDEN], ROUTER, backend)?.remove(0),
            spec: RouterSpec {
                experts: EXPERTS,
                chosen: CHOSEN,
                scores: Scores::Softmax,
                correction: None,
                groups: None,
                renormalise: true,
                scale: 1.0,
                shared: SharedExpert::None,
            },
            x: backend.buffer(MAX_ROWS, HIDDEN)?,
            normed: backend.buffer(MAX_ROWS, HIDDEN)?,
            logits: backend.buffer(MAX_ROWS, EXPERTS)?,
            choices: backend.buffer(MAX_ROWS, 2 * CHOSEN)?,
        })
    }
}

impl<B: Backend> Subject<B> for Router<B> {
    fn begin(&mut self, backend: &mut B, _: How, rows: usize) -> Result<Work, ComputeError> {
        self.x = filled(rows, HIDDEN, backend)?;
        begin_step(backend, rows)?;
        Ok(Work {
            bytes: stored(ROUTER).bytes(EXPERTS, HIDDEN),
            operations: 2 * rows * EXPERTS * HIDDEN,
            // Routers decide between computations, so no rank rounds their input.
            arithmetic: Arithmetic::Floats,
            counts_floats: false,
        })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { norm, router, spec, x, normed, logits, choices } = self;
        backend.norm_route(x, 0..rows, norm, (router, spec), [normed, logits, choices])
    }

    fn out(&self) -> &B::Buffer {
        &self.choices
    }
}
