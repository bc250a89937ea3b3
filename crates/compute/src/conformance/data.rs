//! Inputs: repeatable random numbers, stored matrices, steps.

use std::ops::Range;

use half::{bf16, f16};

use crate::backend::{Backend, CachePart, CacheShape, ComputeError};
use crate::source::{Block, Encoding, Extent, Float, Fp8Scales, MatrixSource, MatrixWindow, RowOrder};
use crate::step::{KV_BLOCK_TOKENS, Step};

/// A repeatable sequence of numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// In −1..1.
    pub fn number(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 30) as f32 - 1.0
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.bits() as u8).collect()
    }

    pub fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }
}

/// A matrix as a file has it.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub rows: usize,
    pub cols: usize,
    pub encoding: Encoding,
    weight: Vec<u8>,
    /// Empty if the encoding has none apart from the weights.
    scales: Vec<u8>,
    /// Empty if the encoding has none apart from the weights.
    offsets: Vec<u8>,
    bias: Option<Vec<f32>>,
}

fn encode(float: Float, numbers: &[f32]) -> Vec<u8> {
    let bytes = |x: &f32| match float {
        Float::F32 => x.to_le_bytes().to_vec(),
        Float::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        Float::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
    };
    numbers.iter().flat_map(bytes).collect()
}

impl Stored {
    /// Random weights. Quantized ones have levels around their group's middle, as trained weights
    /// do.
    pub fn random([rows, cols]: [usize; 2], encoding: Encoding, bias: bool, random: &mut Random) -> Self {
        let bias = bias.then(|| random.numbers(rows));
        let mut stored = Self { rows, cols, encoding, weight: vec![], scales: vec![], offsets: vec![], bias };
        match encoding {
            Encoding::Float(float) => stored.weight = encode(float, &random.numbers(rows * cols)),
            Encoding::Affine { bits, group, scales: float } => {
                let scales: Vec<f32> =
                    random.numbers(rows * cols / group).iter().map(|x| 0.1 + 0.02 * x).collect();
                let middle = (1 << (bits - 1)) as f32;
                stored.scales = encode(float, &scales);
                stored.offsets =
                    encode(float, &scales.iter().map(|scale| -middle * scale).collect::<Vec<_>>());
                stored.weight = random.bytes(rows * cols * bits as usize / 8);
            }
            Encoding::Mxfp4 => {
                stored.weight = random.bytes(rows * cols / 2);
                // Scales of 2^-5 to 2^-2.
                stored.scales = random.bytes(rows * cols / 32).iter().map(|byte| 122 + byte % 4).collect();
            }
            Encoding::Mxfp8 | Encoding::Nvfp4 | Encoding::Fp8 { .. } | Encoding::Integers { .. } => {
                stored.randomise(random);
            }
            Encoding::Blocks(block) => stored.weight = random_blocks(block, rows * cols, random),
        }
        stored
    }

    /// Fills tensors at the places that [`Encoding`] defines: bytes that are not NaN, and scales
    /// that give weights of about 1.
    fn randomise(&mut self, random: &mut Random) {
        let size = |extent: Extent| extent.rows.len() * extent.bytes.len();
        let (encoding, shape @ [rows, cols]) = (self.encoding, [self.rows, self.cols]);
        let window = MatrixWindow { shape, rows: 0..rows, cols: 0..cols };
        self.weight = random.bytes(size(encoding.weight_extent(&window)));
        let scales = size(encoding.scale_extent(&window));
        let numbers = |random: &mut Random, float: Float, size: f32| {
            let numbers: Vec<f32> = random.numbers(scales / float.bytes());
            encode(float, &numbers.iter().map(|x| size * (1.0 + 0.2 * x)).collect::<Vec<_>>())
        };
        match encoding {
            Encoding::Mxfp8 | Encoding::Fp8 { .. } => {
                // Bit 6 is set in numbers from 2 to 448.
                self.weight.iter_mut().for_each(|code| *code &= 0xbf);
            }
            _ => {}
        }
        self.scales = match encoding {
            // 2^-2 to 2.
            Encoding::Mxfp8 => random.bytes(scales).iter().map(|byte| 125 + byte % 4).collect(),
            // 2^-2 to 1¾.
            Encoding::Nvfp4 => random.bytes(scales).iter().map(|byte| 0x28 + byte % 24).collect(),
            Encoding::Fp8 { scales: Fp8Scales::Float(scales), .. } => numbers(random, scales, 1.0),
            Encoding::Fp8 { .. } => random.bytes(scales).iter().map(|byte| 125 + byte % 4).collect(),
            Encoding::Integers { bits, scales, .. } => {
                numbers(random, scales, 1.0 / (1 << (bits - 1)) as f32)
            }
            _ => unreachable!("other encodings are made elsewhere"),
        };
        if encoding.has_offsets() {
            // Zeros near the middle of 4 bits.
            let zeros = random.bytes(size(encoding.offset_extent(&window)));
            self.offsets = zeros.iter().map(|byte| 0x66 + (byte & 0x33)).collect();
        }
    }

    pub fn source(&self) -> MatrixSource<'_> {
        self.part(0..self.rows, 0..self.cols)
    }

    /// The part of a rank with these rows and columns.
    pub fn part(&self, rows: Range<usize>, cols: Range<usize>) -> MatrixSource<'_> {
        let encoding = self.encoding;
        let window = MatrixWindow { shape: [self.rows, self.cols], rows: rows.clone(), cols: cols.clone() };
        MatrixSource {
            rows: rows.len(),
            cols: cols.len(),
            encoding,
            weight: encoding.weight_extent(&window).of(&self.weight),
            scales: encoding.has_scales().then(|| encoding.scale_extent(&window).of(&self.scales)),
            offsets: encoding.has_offsets().then(|| encoding.offset_extent(&window).of(&self.offsets)),
            row_order: RowOrder::AsStored,
            first_row: rows.start,
            bias: self.bias.as_ref().map(|bias| bias[rows].to_vec()),
            pages: None,
        }
    }
}

/// Random blocks with scales that give weights of about 1.
pub(crate) fn random_blocks(block: Block, elements: usize, random: &mut Random) -> Vec<u8> {
    // Where the block's f16 numbers are, and their size: levels and the groups' scales are up to
    // 2^bits and 2^6.
    let numbers: &[(usize, f32)] = match block {
        Block::Q4_0 => &[(0, 0.1)],
        Block::Q4_1 => &[(0, 0.1), (2, -0.8)],
        Block::Q5_0 => &[(0, 0.06)],
        Block::Q5_1 => &[(0, 0.06), (2, -0.9)],
        Block::Q8_0 | Block::Iq4Nl => &[(0, 0.01)],
        Block::Q2K => &[(80, 0.05), (82, 0.08)],
        Block::Q3K => &[(108, 0.01)],
        Block::Q4K => &[(0, 0.003), (2, 0.02)],
        Block::Q5K => &[(0, 0.0015), (2, 0.02)],
        Block::Q6K => &[(208, 0.0004)],
        Block::Iq4Xs => &[(0, 0.0003)],
        Block::Mxfp4 => &[],
    };
    let mut blocks = random.bytes(elements / block.columns() * block.bytes());
    for bytes in blocks.chunks_exact_mut(block.bytes()) {
        for (at, size) in numbers {
            let number = f16::from_f32(size * (1.0 + 0.2 * random.number()));
            bytes[*at..][..2].copy_from_slice(&number.to_le_bytes());
        }
        if block == Block::Mxfp4 {
            // 2^-5 to 2^-2.
            bytes[0] = 122 + bytes[0] % 4;
        }
    }
    blocks
}

/// A buffer with these rows.
pub(super) fn filled<B: Backend>(
    backend: &mut B,
    rows: &[f32],
    width: usize,
) -> Result<B::Buffer, ComputeError> {
    let mut buffer = backend.buffer((rows.len() / width).max(1), width)?;
    backend.write(rows, &mut buffer)?;
    Ok(buffer)
}

/// The first columns of rows.
pub(super) fn columns<B: Backend>(
    backend: &mut B,
    buffer: &B::Buffer,
    rows: std::ops::Range<usize>,
    (width, used): (usize, usize),
) -> Result<Vec<f32>, ComputeError> {
    let mut all = vec![0.0; rows.len() * width];
    backend.read(buffer, rows, &mut all)?;
    Ok(all.chunks(width).flat_map(|row| &row[..used]).copied().collect())
}

/// New caches with the bytes that others hold. A number too many is refused.
pub(super) fn moved<B: Backend>(
    backend: &mut B,
    shape: &CacheShape,
    mut from: B::Caches,
) -> Result<B::Caches, ComputeError> {
    let mut to = backend.caches(shape)?;
    let blocks = (0..shape.blocks).map(CachePart::Block);
    for part in blocks.chain((0..shape.slots).map(CachePart::Slot)) {
        let mut bytes = Vec::new();
        backend.read_cache(&mut from, part, &mut bytes)?;
        let is_written = backend.write_cache(&mut to, part, &bytes)?;
        bytes.extend([0; 4]);
        let is_refused = !backend.write_cache(&mut to, part, &bytes)?;
        assert!(
            is_written && is_refused,
            "{part:?}: written {is_written}, one too many refused {is_refused}"
        );
    }
    Ok(to)
}

/// Consecutive tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub slot: usize,
    pub start: usize,
    pub tokens: usize,
}

/// Blocks that each sequence of [`step`] may use.
pub(super) const BLOCKS_OF_SLOT: usize = 12;

/// A step of these pieces, generated tokens first, as a scheduler orders them. Blocks of sequences
/// are interleaved.
pub(super) fn step(pieces: &[Piece], slots: usize) -> Step {
    let mut step = Step::default();
    for piece in pieces {
        let end = (piece.start + piece.tokens).div_ceil(KV_BLOCK_TOKENS);
        assert!(end <= BLOCKS_OF_SLOT, "a sequence is too long for its blocks");
        let blocks: Vec<u32> = (0..end).map(|block| (block * slots + piece.slot) as u32).collect();
        step.push(&vec![1; piece.tokens], piece.start, &blocks, piece.slot, true);
    }
    step
}

/// Steps of several sequences: prompts whole and in pieces, then generated tokens together with a
/// prompt.
pub(super) fn workload() -> Vec<Vec<Piece>> {
    let piece = |slot, start, tokens| Piece { slot, start, tokens };
    vec![
        vec![piece(0, 0, 70)],
        vec![piece(1, 0, 33), piece(2, 0, 5)],
        vec![piece(0, 70, 1), piece(2, 5, 1), piece(1, 33, 64)],
        vec![piece(2, 6, 1), piece(0, 71, 1), piece(1, 97, 1)],
        // A sequence that starts over in a slot that another has used.
        vec![piece(0, 72, 1), piece(2, 0, 40)],
    ]
}

/// The step of [`workload`] before which caches are moved.
pub(super) const MOVED_BEFORE: usize = 3;

/// Sequences of [`workload`].
pub(super) const SLOTS: usize = 3;
