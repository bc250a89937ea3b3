//! Numbers and weights that operands are filled with, and the steps of sequences.

use half::{bf16, f16};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{
    Backend, ComputeError, Encoding, Float, MatrixSource, PackedFormat, Rope, RowOrder, Step, Strided,
};

/// Positions of a sequence; steps end at the last.
pub const CONTEXT: usize = 2048;
/// Steps of up to this many rows decode one token of a sequence per row; larger ones read a prompt.
pub const SEQUENCES: usize = 16;
/// Blocks of the cache that all sequences have.
pub const BLOCKS: usize = SEQUENCES * CONTEXT / KV_BLOCK_TOKENS;

/// Repeatable numbers in −1..1.
pub fn numbers(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state as f32 / (1u32 << 31) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The encoding in a file that packs to this format.
pub fn stored(format: PackedFormat) -> Encoding {
    match format {
        PackedFormat::Float(float) => Encoding::Float(float),
        PackedFormat::Affine { bits, group } => Encoding::Affine { bits, group, scales: Float::F16 },
    }
}

/// `count` matrices of `parts` parts each, all with the same weights.
pub fn matrices<B: Backend>(
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

/// A buffer of `rows` rows of numbers.
pub fn filled<B: Backend>(rows: usize, width: usize, backend: &mut B) -> Result<B::Buffer, ComputeError> {
    let mut x = backend.buffer(rows, width)?;
    backend.write(&numbers(rows * width), &mut x)?;
    Ok(x)
}

/// Runs that change an input in place before it is made anew: with more, its numbers become so
/// small that processors compute with them slowly.
const RUNS: u32 = 64;

/// An input that runs change in place.
pub struct Changed<B: Backend> {
    original: B::Buffer,
    x: B::Buffer,
    runs: u32,
}

impl<B: Backend> Changed<B> {
    /// With `rows` rows of numbers.
    pub fn new(rows: usize, width: usize, backend: &mut B) -> Result<Self, ComputeError> {
        let original = filled(rows, width, backend)?;
        Ok(Self { original, x: backend.buffer(rows, width)?, runs: 0 })
    }

    /// The input of the next run.
    pub fn next(&mut self, backend: &mut B, rows: usize) -> Result<&mut B::Buffer, ComputeError> {
        if self.runs.is_multiple_of(RUNS) {
            let (_, width) = backend.extent(&self.original);
            backend.copy_columns((&self.original, 0), 0..rows, (&mut self.x, 0..width))?;
        }
        self.runs += 1;
        Ok(&mut self.x)
    }

    /// The input as the last run left it.
    pub fn last(&self) -> &B::Buffer {
        &self.x
    }
}

/// Sequences in a step of `rows` rows: one per row in a decode step, one in a prompt.
pub fn sequences_of(rows: usize) -> usize {
    if rows <= SEQUENCES { rows } else { 1 }
}

/// Steps of the sequences in turn, each through all layers.
pub struct Steps {
    layers: usize,
    ropes: Vec<Rope>,
    step: Step,
    sequence: usize,
    layer: usize,
}

impl Steps {
    /// Steps of a model with this many layers. `rotated`: columns of a head that are rotated.
    pub fn new(layers: usize, rotated: Option<usize>) -> Self {
        let rope = |columns: usize| Rope {
            inverse_frequencies: vec![0.01; columns / 2],
            amplitude: 1.0,
            interleaved: false,
        };
        let ropes = rotated.map(rope).into_iter().collect();
        Self { layers, ropes, step: Step::default(), sequence: 0, layer: layers }
    }

    /// Begins with steps of this many rows.
    pub fn restart(&mut self) {
        self.layer = self.layers;
    }

    /// The layer that is next, and its step of `rows` rows, which the first layer begins.
    pub fn next<B: Backend>(&mut self, backend: &mut B, rows: usize) -> Result<(&Step, usize), ComputeError> {
        if self.layer == self.layers {
            self.layer = 0;
            self.step.clear();
            let sequences = sequences_of(rows);
            let of_each = rows / sequences;
            for _ in 0..sequences {
                push(&mut self.step, self.sequence, CONTEXT - of_each, of_each);
                self.sequence = (self.sequence + 1) % SEQUENCES;
            }
            backend.begin(&self.step, &self.ropes)?;
        }
        self.layer += 1;
        Ok((&self.step, self.layer - 1))
    }
}

/// Begins a step of `rows` rows, in which operations without caches are measured.
pub fn begin_step<B: Backend>(backend: &mut B, rows: usize) -> Result<(), ComputeError> {
    Steps::new(1, None).next(backend, rows).map(drop)
}

/// Adds `rows` rows of a sequence to a step.
pub fn push(step: &mut Step, sequence: usize, start: usize, rows: usize) {
    const OF_SEQUENCE: usize = CONTEXT / KV_BLOCK_TOKENS;
    let blocks: [u32; OF_SEQUENCE] = std::array::from_fn(|block| (sequence * OF_SEQUENCE + block) as u32);
    step.push(&[0; CONTEXT][..rows], start, &blocks, sequence, false);
}
