//! The operations to measure, with operands in memory rather than in a cache.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use thunder_compute::cpu::measure::arithmetic::Arithmetic;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    Activation, Activations, AttentionSpec, Backend, CacheKind, CacheShape, ComputeError, Encoding, Float,
    Isa, KvFormat, LinearInput, MatrixSource, PackedFormat, Rope, RowOrder, Step, Strided,
};

/// Most rows of a step.
pub const MAX_ROWS: usize = 2048;

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

/// Heads of an 8B model.
const HEAD_DIM: usize = 128;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
/// Positions of a sequence; steps end at the last.
const CONTEXT: usize = 2048;
/// Steps of up to this many rows decode one token of a sequence per row; larger ones read a prompt.
const SEQUENCES: usize = 16;
/// With the sequences above, the KV cache has 512 MiB in f16, and a little more than half of it in
/// int8.
const LAYERS: usize = 4;

/// An operation, as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A product with weights.
    Linear(PackedFormat),
    /// Attention over a KV cache of this format.
    Attention(KvFormat),
    /// A norm fused into a product with few outputs.
    Norm,
    /// Gated activations of a product with few inputs, fused into one with few outputs.
    Swiglu,
}

impl Operation {
    /// All operations, the most important first.
    pub fn all() -> Vec<Self> {
        let affine = |bits, group| PackedFormat::Affine { bits, group };
        let mut all = Vec::new();
        for bits in [4, 8, 2, 3, 5, 6] {
            all.extend([64, 32, 128].map(|group| Self::Linear(affine(bits, group))));
        }
        all.extend([Float::BF16, Float::F16].map(|float| Self::Linear(PackedFormat::Float(float))));
        all.extend([KvFormat::F16, KvFormat::Int8].map(Self::Attention));
        all.extend([Self::Norm, Self::Swiglu]);
        all
    }
}

impl FromStr for Operation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let float = |float| Ok(Self::Linear(PackedFormat::Float(float)));
        match text {
            "attention" => Ok(Self::Attention(KvFormat::F16)),
            "attention-int8" => Ok(Self::Attention(KvFormat::Int8)),
            "norm" => Ok(Self::Norm),
            "swiglu" => Ok(Self::Swiglu),
            "bf16" => float(Float::BF16),
            "f16" => float(Float::F16),
            "f32" => float(Float::F32),
            _ => Self::all().into_iter().find(|operation| operation.to_string() == text).ok_or_else(|| {
                "must be BITS/GROUP with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128; bf16, f16, f32, attention, \
                 attention-int8, norm or swiglu"
                    .to_owned()
            }),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linear(PackedFormat::Affine { bits, group }) => write!(f, "{bits}/{group}"),
            Self::Linear(PackedFormat::Float(Float::BF16)) => f.write_str("bf16"),
            Self::Linear(PackedFormat::Float(Float::F16)) => f.write_str("f16"),
            Self::Linear(PackedFormat::Float(Float::F32)) => f.write_str("f32"),
            Self::Attention(KvFormat::F16) => f.write_str("attention"),
            Self::Attention(KvFormat::Int8) => f.write_str("attention-int8"),
            Self::Norm => f.write_str("norm"),
            Self::Swiglu => f.write_str("swiglu"),
        }
    }
}

/// The work of one run.
pub struct Work {
    /// Bytes of weights, keys and values read; for norm and swiglu, all bytes read and written.
    pub bytes: usize,
    /// Multiplications and additions in products. An activation counts once, whatever its size in
    /// bytes.
    pub operations: usize,
    /// The arithmetic whose peak the operations are compared with.
    pub arithmetic: Arithmetic,
}

/// An operation with its operands.
pub enum Subject<B: Backend> {
    /// Uses the matrices in turn.
    Linear {
        format: PackedFormat,
        shape: [usize; 2],
        matrices: Vec<B::Matrix>,
        next: usize,
        x: B::Buffer,
        out: B::Buffer,
    },
    Attention(Box<Sequences<B>>),
    Norm {
        weight: B::Vector,
        matrix: B::Matrix,
        x: B::Buffer,
        out: B::Buffer,
    },
    Swiglu {
        gate_up: B::Matrix,
        down: B::Matrix,
        x: B::Buffer,
        channels: B::Buffer,
        out: B::Buffer,
    },
}

/// Sequences with filled KV caches, used in turn.
pub struct Sequences<B: Backend> {
    layers: usize,
    spec: AttentionSpec<B::Vector>,
    rope: Rope,
    caches: B::Caches,
    bytes_per_token: usize,
    step: Step,
    next: usize,
    qkv: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Subject<B> {
    /// Allocates and fills the operands.
    pub fn new(operation: Operation, backend: &mut B) -> Result<Self, ComputeError> {
        Ok(match operation {
            Operation::Linear(format) => Self::product(format, MATRIX, WEIGHT_BYTES, backend)?,
            Operation::Attention(format) => Self::attention(format, LAYERS, backend)?,
            Operation::Norm => Self::Norm {
                weight: backend.vector(&[1.0; INPUTS])?,
                matrix: small(1, [FEW_OUTPUTS, INPUTS], backend)?,
                x: backend.buffer(MAX_ROWS, INPUTS)?,
                out: backend.buffer(MAX_ROWS, FEW_OUTPUTS)?,
            },
            Operation::Swiglu => Self::Swiglu {
                gate_up: small(2, [OUTPUTS, FEW_INPUTS], backend)?,
                down: small(1, [FEW_OUTPUTS, OUTPUTS], backend)?,
                x: backend.buffer(MAX_ROWS, FEW_INPUTS)?,
                channels: backend.buffer(MAX_ROWS, OUTPUTS)?,
                out: backend.buffer(MAX_ROWS, FEW_OUTPUTS)?,
            },
        })
    }

    /// Attention over sequences in this many layers, each of which takes 128 MiB in f16.
    pub fn attention(format: KvFormat, layers: usize, backend: &mut B) -> Result<Self, ComputeError> {
        let spec = spec((0..KV_HEADS).map(|head| {
            let group = HEADS / KV_HEADS;
            head * group..(head + 1) * group
        }));
        Ok(Self::Attention(Box::new(Sequences {
            layers,
            caches: filled_cache(format, layers, backend)?,
            bytes_per_token: shape(format, layers).bytes_per_token() / layers,
            rope: Rope { inverse_frequencies: vec![0.01; HEAD_DIM / 2], amplitude: 1.0, interleaved: false },
            step: Step::default(),
            next: 0,
            qkv: backend.buffer(MAX_ROWS, spec.qkv_width())?,
            out: backend.buffer(MAX_ROWS, HEADS * HEAD_DIM)?,
            spec,
        })))
    }

    /// A product with matrices of a shape (outputs first). There are as many matrices as have these
    /// bytes together.
    pub fn product(
        format: PackedFormat,
        [outputs, inputs]: [usize; 2],
        bytes: usize,
        backend: &mut B,
    ) -> Result<Self, ComputeError> {
        let count = bytes.div_ceil(stored(format).bytes(outputs, inputs));
        Ok(Self::Linear {
            format,
            shape: [outputs, inputs],
            matrices: matrices((count, 1), [outputs, inputs], format, backend)?,
            next: 0,
            x: backend.buffer(MAX_ROWS, inputs)?,
            out: backend.buffer(MAX_ROWS, outputs)?,
        })
    }

    /// Fills the input with `rows` rows and returns the work of a run.
    pub fn begin(
        &mut self,
        backend: &mut B,
        (isa, activations): (Isa, Activations),
        rows: usize,
    ) -> Result<Work, ComputeError> {
        let of_each = rows / sequences_of(rows);
        let mut step = Step::default();
        (0..sequences_of(rows)).for_each(|sequence| push(&mut step, sequence, 0, of_each));
        backend.begin(&step, &[])?;
        let (bytes, operations, arithmetic) = match self {
            Self::Linear { format, shape: [outputs, inputs], x, .. } => {
                backend.write(&numbers(rows * *inputs), x)?;
                let arithmetic = Arithmetic::of_product(isa, activations, *format, (rows, rows > SEQUENCES));
                let bytes = stored(*format).bytes(*outputs, *inputs);
                (bytes, 2 * rows * *outputs * *inputs, arithmetic)
            }
            Self::Attention(sequences) => {
                backend.write(&numbers(rows * sequences.spec.qkv_width()), &mut sequences.qkv)?;
                // Each visible token takes one product for its score and one for the weighted sum.
                let (tokens, visible) = match rows {
                    ..=SEQUENCES => (rows * CONTEXT, rows * CONTEXT),
                    _ => (CONTEXT, (CONTEXT - rows + 1..=CONTEXT).sum()),
                };
                let arithmetic = Arithmetic::of_attention(isa, activations, of_each);
                (tokens * sequences.bytes_per_token, 2 * 2 * visible * HEADS * HEAD_DIM, arithmetic)
            }
            Self::Norm { x, .. } => {
                backend.write(&numbers(rows * INPUTS), x)?;
                (4 * rows * INPUTS, 2 * 2 * rows * INPUTS, Arithmetic::Floats)
            }
            // The exponential takes more operations than the products counted here.
            Self::Swiglu { x, .. } => {
                backend.write(&numbers(rows * FEW_INPUTS), x)?;
                // Gated activations are written once and read once.
                let arithmetic = Arithmetic::of_product(isa, activations, SMALL, (rows, rows > SEQUENCES));
                let bytes = if arithmetic == Arithmetic::Bf16 { size_of::<bf16>() } else { size_of::<f32>() };
                (2 * bytes * rows * OUTPUTS, 2 * rows * OUTPUTS, Arithmetic::Floats)
            }
        };
        Ok(Work { bytes, operations, arithmetic })
    }

    /// Computes several runs that follow each other without a wait of the host, and waits for them.
    #[cfg(feature = "gpu")]
    pub fn series(&mut self, backend: &mut B, rows: usize, runs: u32) -> Result<(), ComputeError> {
        (0..runs).try_for_each(|_| self.run(backend, rows))?;
        self.finish(backend)
    }

    /// Waits until all runs have been computed, on a device that computes behind the host.
    #[cfg(feature = "gpu")]
    fn finish(&self, backend: &mut B) -> Result<(), ComputeError> {
        let out = match self {
            Self::Linear { out, .. } | Self::Norm { out, .. } | Self::Swiglu { out, .. } => out,
            Self::Attention(sequences) => &sequences.out,
        };
        let (_, width) = backend.extent(out);
        backend.read(out, 0..1, &mut vec![0.0; width])
    }

    /// Computes a step of as many rows as [`Subject::begin`] was given.
    pub fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        match self {
            Self::Linear { matrices, next, x, out, .. } => {
                backend.linear(LinearInput::Plain(x), 0..rows, &matrices[*next], out)?;
                *next = (*next + 1) % matrices.len();
                Ok(())
            }
            Self::Attention(sequences) => sequences.run(backend, rows),
            Self::Norm { weight, matrix, x, out } => {
                backend.linear(LinearInput::Normed { x, weight, eps: 1e-5 }, 0..rows, matrix, out)
            }
            Self::Swiglu { gate_up, down, x, channels, out } => {
                let next = (Activation::Silu, &*down);
                backend.linear_gated(LinearInput::Plain(x), 0..rows, gate_up, next, channels)?;
                backend.linear(LinearInput::Gated(channels), 0..rows, down, out)
            }
        }
    }
}

impl<B: Backend> Sequences<B> {
    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        self.step.clear();
        let sequences = sequences_of(rows);
        let of_each = rows / sequences;
        for _ in 0..sequences {
            push(&mut self.step, self.next % SEQUENCES, CONTEXT - of_each, of_each);
            self.next = (self.next + 1) % (SEQUENCES * self.layers);
        }
        backend.begin(&self.step, std::slice::from_ref(&self.rope))?;
        let layer = self.next / SEQUENCES;
        let rows = 0..self.step.rows();
        let cache = (&mut self.caches, layer);
        backend.attention(&self.spec, &self.step, rows, &mut self.qkv, cache, &mut self.out)
    }
}

/// Sequences in a step of `rows` rows: one per row in a decode step, one in a prompt.
fn sequences_of(rows: usize) -> usize {
    if rows <= SEQUENCES { rows } else { 1 }
}

/// Repeatable numbers in −1..1.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state as f32 / (1u32 << 31) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The encoding in a file that packs to this format.
fn stored(format: PackedFormat) -> Encoding {
    match format {
        PackedFormat::Float(float) => Encoding::Float(float),
        PackedFormat::Affine { bits, group } => Encoding::Affine { bits, group, scales: Float::F16 },
    }
}

/// `count` matrices of `parts` parts each, all with the same weights.
fn matrices<B: Backend>(
    (count, parts): (usize, usize),
    [rows, cols]: [usize; 2],
    format: PackedFormat,
    backend: &mut B,
) -> Result<Vec<B::Matrix>, ComputeError> {
    let (weight, numbers_of_groups) = match format {
        PackedFormat::Float(float) => {
            let bytes = |x: f32| match float {
                Float::F32 => x.to_le_bytes().to_vec(),
                Float::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
                Float::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
            };
            (numbers(rows * cols).into_iter().flat_map(bytes).collect(), Vec::new())
        }
        PackedFormat::Affine { bits, group } => {
            let levels = numbers(rows * cols * bits as usize / 8);
            let levels: Vec<u8> = levels.iter().map(|x| (x * 128.0) as i8 as u8).collect();
            (levels, f16::from_f32(0.01).to_le_bytes().repeat(rows * cols / group))
        }
    };
    let view = |bytes| -> Strided<'_> {
        let bytes: &[u8] = bytes;
        Strided { bytes, stride: bytes.len() / rows, row_bytes: bytes.len() / rows }
    };
    let weight: Vec<u8> = weight;
    let quantized = matches!(format, PackedFormat::Affine { .. });
    let source = MatrixSource {
        rows,
        cols,
        encoding: stored(format),
        weight: view(&weight),
        scales: quantized.then(|| view(&numbers_of_groups)),
        offsets: quantized.then(|| view(&numbers_of_groups)),
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    };
    (0..count).map(|_| backend.matrix(&vec![source.clone(); parts])).collect()
}

/// A matrix whose product takes little of the measured time.
fn small<B: Backend>(parts: usize, shape: [usize; 2], backend: &mut B) -> Result<B::Matrix, ComputeError> {
    Ok(matrices((1, parts), shape, SMALL, backend)?.remove(0))
}

fn spec<V>(queries_of: impl Iterator<Item = std::ops::Range<usize>>) -> AttentionSpec<V> {
    AttentionSpec {
        key_dim: HEAD_DIM,
        value_dim: HEAD_DIM,
        queries_of: queries_of.collect(),
        scale: 1.0,
        window: None,
        qk_norm: None,
        rope: Some(0),
        sinks: None,
        temperature: None,
        out_column: 0,
    }
}

fn shape(format: KvFormat, layers: usize) -> CacheShape {
    let layer = CacheKind::Heads { heads: KV_HEADS, key_dim: HEAD_DIM, value_dim: HEAD_DIM };
    let blocks = SEQUENCES * CONTEXT / KV_BLOCK_TOKENS;
    CacheShape { format, caches: vec![layer; layers], blocks, slots: SEQUENCES }
}

/// A KV cache with all sequences and layers filled, by attention without queries.
fn filled_cache<B: Backend>(
    format: KvFormat,
    layers: usize,
    backend: &mut B,
) -> Result<B::Caches, ComputeError> {
    let mut caches = backend.caches(&shape(format, layers))?;
    let spec = AttentionSpec { rope: None, ..spec((0..KV_HEADS).map(|_| 0..0)) };
    let mut qkv = backend.buffer(CONTEXT, spec.qkv_width())?;
    let mut out = backend.buffer(CONTEXT, 1)?;
    backend.write(&numbers(CONTEXT * spec.qkv_width()), &mut qkv)?;
    let mut step = Step::default();
    for sequence in 0..SEQUENCES {
        step.clear();
        push(&mut step, sequence, 0, CONTEXT);
        backend.begin(&step, &[])?;
        for layer in 0..layers {
            backend.attention(&spec, &step, 0..CONTEXT, &mut qkv, (&mut caches, layer), &mut out)?;
        }
    }
    Ok(caches)
}

/// Adds `rows` rows of a sequence to a step.
fn push(step: &mut Step, sequence: usize, start: usize, rows: usize) {
    const BLOCKS: usize = CONTEXT / KV_BLOCK_TOKENS;
    let blocks: [u32; BLOCKS] = std::array::from_fn(|block| (sequence * BLOCKS + block) as u32);
    step.push(&[0; CONTEXT][..rows], start, &blocks, sequence, false);
}
