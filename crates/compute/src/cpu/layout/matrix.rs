//! Weight matrices in the layout that the kernels read from first to last byte.
//!
//! A *panel* interleaves 16 rows: a vector register holds one column (or four columns, as bytes) of
//! 16 rows, so a dot product needs no sum across lanes. A float panel is `[cols][16]`. A quantized
//! panel is a sequence of groups. A group is `16 scales, 16 biases` (16-bit integers, see
//! `fixed_point.rs`), then its *blocks*: 32 columns of 16 rows, as 8 *steps* of 64 bytes. A step is
//! 4 columns of each row: the operand of one byte dot product. Two groups of 16 columns share a
//! block, which follows the scales and biases of both. Where the middle level of every group is 0,
//! biases are implied: `16 scales, 16 scales` of two groups come before the blocks of both. A block
//! is packed to `bits` lines of 64 bytes:
//!
//! | bits | lines of a block |
//! |---|---|
//! | 8 | 8 × one step |
//! | 4 | 4 × two steps (step 2j in the low, 2j+1 in the high bits) |
//! | 2 | 2 × four steps |
//! | 3, 5, 6 | the lines of 2 (4, 4) bits, then the lines of the upper 1 (1, 2) bits |
//! | [`CODED`] | codes, as the levels of 4 bits: a table makes levels of 5 bits of them |
//!
//! So a matrix takes as many bytes in memory as in the file, plus one unit per row.

use crate::cpu::layout::fixed_point::{FixedPoint, HEADER_BYTES};
use crate::cpu::layout::region::Region;
use crate::cpu::simd::LANES;
use crate::source::{Encoding, PackedFormat, mxfp4};

/// Columns of a block.
pub(in crate::cpu) const BLOCK32: usize = 32;
/// Bytes of a step: 4 columns of 16 rows, one byte each.
pub(in crate::cpu) const STEP_BYTES: usize = 64;
/// Steps of a block.
pub(in crate::cpu) const STEPS: usize = 8;

/// Stands for the bits of E2M1 numbers: levels of 5 bits, stored as codes of 4.
pub(in crate::cpu) const CODED: u32 = 7;

/// Bits of a level.
pub(in crate::cpu) const fn level_bits(bits: u32) -> u32 {
    if bits == CODED { mxfp4::LEVEL_BITS } else { bits }
}

/// Lines of a block; a line has 64 bytes.
pub(in crate::cpu) const fn block_lines(bits: u32) -> usize {
    if bits == CODED { 4 } else { bits as usize }
}

/// Bytes of a block.
pub(in crate::cpu) const fn block_bytes(bits: u32) -> usize {
    block_lines(bits) * STEP_BYTES
}

/// How a matrix of this encoding is packed here.
pub(in crate::cpu) const fn format_of(encoding: Encoding) -> PackedFormat {
    match encoding.packed() {
        PackedFormat::Affine { group, .. } if encoding.is_e2m1() => {
            PackedFormat::Affine { bits: CODED, group }
        }
        format => format,
    }
}

/// A packed matrix `[rows, cols]`.
#[derive(Debug)]
pub struct Matrix {
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) cols: usize,
    pub(in crate::cpu) format: PackedFormat,
    /// Biases are implied by scales.
    pub(in crate::cpu) implied: bool,
    pub(in crate::cpu) panels: Region,
    /// The unit of each quantized row: its weights are integers times the unit. `[panels × 16]`;
    /// empty for floats.
    pub(in crate::cpu) units: Vec<f32>,
    /// Added to the output: one number per row, or empty.
    pub(in crate::cpu) bias: Vec<f32>,
}

/// Matrices that share their input; their rows follow each other.
#[derive(Debug)]
pub struct Linear {
    pub(in crate::cpu) parts: Vec<Matrix>,
    pub(in crate::cpu) rows: usize,
}

/// The bit planes of a `bits`-bit level: (bits, first bit) of each.
pub(in crate::cpu) const fn planes(bits: u32) -> &'static [(u32, u32)] {
    match bits {
        2 => &[(2, 0)],
        3 => &[(2, 0), (1, 2)],
        4 | CODED => &[(4, 0)],
        5 => &[(4, 0), (1, 4)],
        6 => &[(4, 0), (2, 4)],
        8 => &[(8, 0)],
        _ => panic!("levels have 2 to 6 or 8 bits"),
    }
}

impl Matrix {
    /// Number of panels. The last one may be partly empty.
    pub(in crate::cpu) fn panel_count(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes of one panel.
    pub(in crate::cpu) fn panel_bytes(&self) -> usize {
        match self.format {
            PackedFormat::Float(float) => LANES * self.cols * float.bytes(),
            PackedFormat::Affine { bits, group } => {
                let record = Record::of(bits, group, self.implied);
                self.cols / record.columns * record.bytes
            }
        }
    }

    /// Bytes of the matrix in memory.
    pub fn bytes(&self) -> usize {
        self.panels.len() + size_of_val(self.units.as_slice())
    }

    /// Writes one row as floats.
    pub(in crate::cpu) fn row(&self, row: usize, out: &mut [f32]) {
        let panel = &self.panels[row / LANES * self.panel_bytes()..][..self.panel_bytes()];
        let lane = row % LANES;
        match self.format {
            PackedFormat::Float(float) => {
                let size = float.bytes();
                for (col, x) in out.iter_mut().enumerate() {
                    float.decode(&panel[(col * LANES + lane) * size..][..size], std::slice::from_mut(x));
                }
            }
            PackedFormat::Affine { bits, group } => {
                let (fixed, unit) = (FixedPoint::of(bits), self.units[row]);
                let record = Record::of(bits, group, self.implied);
                let records = panel.chunks_exact(record.bytes);
                for (bytes, out) in records.zip(out.chunks_exact_mut(record.columns)) {
                    let (headers, blocks) = bytes.split_at(record.header_bytes);
                    let numbers = headers.as_chunks::<2>().0;
                    let number = |index: usize| i16::from_le_bytes(numbers[index]);
                    let block_bytes = block_bytes(bits);
                    for (col, x) in out.iter_mut().enumerate() {
                        let header = col / group * record.numbers;
                        let scale = number(header + lane);
                        let bias = match self.implied {
                            true => fixed.symmetric_offset(scale),
                            false => number(header + LANES + lane),
                        };
                        let block = &blocks[col / BLOCK32 * block_bytes..][..block_bytes];
                        let level = level(block, bits, lane, col % BLOCK32);
                        *x = fixed.weight(level, scale, bias) as f32 * unit;
                    }
                }
            }
        }
    }
}

/// A unit of a quantized panel: the headers of one or two groups, then their blocks.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Record {
    /// Columns of its groups.
    pub columns: usize,
    /// Numbers in the header of a group: 16 scales, and 16 biases unless these are implied.
    pub numbers: usize,
    /// Bytes of its headers.
    pub header_bytes: usize,
    /// All bytes.
    pub bytes: usize,
}

impl Record {
    /// The record of a matrix with levels of `bits` bits.
    pub const fn of(bits: u32, group: usize, implied: bool) -> Self {
        if implied {
            let (columns, header_bytes) = (2 * group, HEADER_BYTES);
            let bytes = header_bytes + columns / BLOCK32 * block_bytes(bits);
            return Self { columns, numbers: LANES, header_bytes, bytes };
        }
        Self {
            columns: record_columns(group),
            numbers: 2 * LANES,
            header_bytes: record_headers(group) * HEADER_BYTES,
            bytes: record_bytes(bits, group),
        }
    }
}

/// Groups of fewer columns share a block with the next one, and a record.
pub(in crate::cpu) const fn shares_block(group: usize) -> bool {
    group < BLOCK32
}

/// Columns of a record: a group, or the two groups that share a block.
pub(in crate::cpu) const fn record_columns(group: usize) -> usize {
    if shares_block(group) { BLOCK32 } else { group }
}

/// Groups of a record, each with a header.
pub(in crate::cpu) const fn record_headers(group: usize) -> usize {
    record_columns(group) / group
}

/// Bytes of a record of a panel: headers and blocks.
pub(in crate::cpu) const fn record_bytes(bits: u32, group: usize) -> usize {
    record_headers(group) * HEADER_BYTES + record_columns(group) / BLOCK32 * block_bytes(bits)
}

/// The level of one weight of a block.
fn level(block: &[u8], bits: u32, lane: usize, col: usize) -> u8 {
    let (step, byte) = (col / 4, 4 * lane + col % 4);
    let mut line = 0;
    let mut value = 0;
    for &(width, first) in planes(bits) {
        let per_line = (8 / width) as usize;
        let packed =
            block[(line + step / per_line) * STEP_BYTES + byte] >> (width * (step % per_line) as u32);
        value |= (packed & ((1u16 << width) - 1) as u8) << first;
        line += STEPS / per_line;
    }
    if bits == CODED { mxfp4::LEVELS[value as usize] } else { value }
}
