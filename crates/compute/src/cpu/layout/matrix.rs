//! Weight matrices in the layout that the kernels read from first to last byte.
//!
//! A *panel* interleaves 16 rows: a vector register holds one column (or four columns, as bytes) of
//! 16 rows, so a dot product needs no sum across lanes. A float panel is `[cols][16]`. A quantized
//! panel is a sequence of groups. A group is `16 scales, 16 biases` (16-bit integers, see
//! `fixed_point.rs`), then its *blocks*: 32 columns of 16 rows, as 8 *steps* of 64 bytes. A step is
//! 4 columns of each row: the operand of one byte dot product. Two groups of 16 columns share a
//! block, which follows the scales and biases of both. Where the middle level of every group is 0,
//! biases are implied: `16 scales, 16 scales` of two groups come before the blocks of both. Where a
//! file has factors (GGUF's K-quants), 256 columns begin with those of 16 rows, as f16, for scales
//! and for biases; then each group has its 16 scales and 16 biases as bytes. See [`Headers`]. A
//! block is packed to `bits` lines of 64 bytes:
//!
//! | bits | lines of a block |
//! |---|---|
//! | 8 | 8 × one step |
//! | 4 | 4 × two steps (step 2j in the low, 2j+1 in the high bits) |
//! | 2 | 2 × four steps |
//! | 3, 5, 6 | the lines of 2 (4, 4) bits, then the lines of the upper 1 (1, 2) bits |
//! | [`E2M1`], [`IQ4`] | codes, as levels of 4 bits: a table makes levels of 5 or 8 bits of them |
//!
//! So a matrix takes as many bytes in memory as in the file, plus one unit per row.

use half::f16;

use crate::cpu::layout::fixed_point::{FixedPoint, HEADER_BYTES};
use crate::cpu::layout::region::Region;
use crate::cpu::simd::LANES;
use crate::source::blocks::tables;
use crate::source::{Encoding, MatrixSource, PackedFormat, Table, mxfp4};

/// Columns of a block.
pub(in crate::cpu) const BLOCK32: usize = 32;
/// Bytes of a step: 4 columns of 16 rows, one byte each.
pub(in crate::cpu) const STEP_BYTES: usize = 64;
/// Steps of a block.
pub(in crate::cpu) const STEPS: usize = 8;

/// Stands for the bits of E2M1 numbers: levels of 5 bits, stored as codes of 4.
pub(in crate::cpu) const E2M1: u32 = 7;
/// Stands for the bits of IQ4_NL and IQ4_XS: levels of 8 bits, stored as codes of 4.
pub(in crate::cpu) const IQ4: u32 = 1;

/// Bits of a level.
pub(in crate::cpu) const fn level_bits(bits: u32) -> u32 {
    match bits {
        E2M1 => mxfp4::LEVEL_BITS,
        IQ4 => 8,
        _ => bits,
    }
}

/// The levels of codes, for these bits.
pub(in crate::cpu) const fn table(bits: u32) -> Option<&'static [u8; 16]> {
    match bits {
        E2M1 => Some(&mxfp4::LEVELS),
        IQ4 => Some(&tables::LEVELS),
        _ => None,
    }
}

/// Lines of a block; a line has 64 bytes.
pub(in crate::cpu) const fn block_lines(bits: u32) -> usize {
    if table(bits).is_some() { 4 } else { bits as usize }
}

/// Bytes of a block.
pub(in crate::cpu) const fn block_bytes(bits: u32) -> usize {
    block_lines(bits) * STEP_BYTES
}

/// How a matrix of this encoding is packed here.
pub(in crate::cpu) const fn format_of(encoding: Encoding) -> PackedFormat {
    match (encoding.packed(), encoding.table()) {
        (PackedFormat::Affine { group, .. }, Some(Table::E2m1)) => PackedFormat::Affine { bits: E2M1, group },
        (PackedFormat::Affine { group, .. }, Some(Table::Iq4)) => PackedFormat::Affine { bits: IQ4, group },
        (format, _) => format,
    }
}

/// A packed matrix `[rows, cols]`.
#[derive(Debug)]
pub struct Matrix {
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) cols: usize,
    pub(in crate::cpu) format: PackedFormat,
    pub(in crate::cpu) headers: Headers,
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
        4 | E2M1 | IQ4 => &[(4, 0)],
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
        panel_bytes(self.format, self.headers, self.cols)
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
                let record = Record::of(bits, group, self.headers);
                let records = panel.chunks_exact(record.bytes);
                for (bytes, out) in records.zip(out.chunks_exact_mut(record.columns)) {
                    let (headers, blocks) = bytes.split_at(record.header_bytes);
                    let block_bytes = block_bytes(bits);
                    for (index, out) in out.chunks_exact_mut(group).enumerate() {
                        let [scale, bias] = self.headers.of_row(headers, index, lane, &fixed);
                        for (part, out) in out.chunks_mut(BLOCK32).enumerate() {
                            let col = index * group + part * BLOCK32;
                            let block = &blocks[col / BLOCK32 * block_bytes..][..block_bytes];
                            for (x, level) in out.iter_mut().zip(&levels(block, bits, lane)[col % BLOCK32..])
                            {
                                *x = (f64::from(*level) * scale + bias) as f32 * unit;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Bytes of a panel of `cols` columns.
const fn panel_bytes(format: PackedFormat, headers: Headers, cols: usize) -> usize {
    match format {
        PackedFormat::Float(float) => LANES * cols * float.bytes(),
        PackedFormat::Affine { bits, group } => {
            let record = Record::of(bits, group, headers);
            cols / record.columns * record.bytes
        }
    }
}

impl MatrixSource<'_> {
    /// Bytes that the matrix takes in the memory of a CPU once it is packed, without the units of
    /// rows and what fills the last panel.
    pub fn packed_bytes(&self) -> usize {
        let panel = panel_bytes(format_of(self.encoding), Headers::of(self.encoding, self.cols), self.cols);
        self.rows * panel / LANES
    }
}

/// What a matrix stores of its groups' scales and biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::cpu) struct Headers {
    /// Biases are implied by scales.
    pub implied: bool,
    /// Scales and biases are bytes, times factors of 256 columns.
    pub factored: bool,
}

/// Columns that share factors.
pub(in crate::cpu) const FACTOR_COLUMNS: usize = 256;
/// Bytes of factors: 16 of scales and 16 of biases, as f16.
pub(in crate::cpu) const FACTOR_BYTES: usize = HEADER_BYTES;

impl Headers {
    /// The least headers for `cols` columns of this encoding.
    pub const fn of(encoding: Encoding, cols: usize) -> Self {
        match format_of(encoding) {
            PackedFormat::Float(_) => Self { implied: false, factored: false },
            PackedFormat::Affine { group, .. } => Self {
                implied: encoding.is_symmetric() && cols.is_multiple_of(2 * group),
                factored: encoding.has_factors(),
            },
        }
    }

    /// Bytes of a group's scales, and biases unless these are implied.
    pub const fn group_bytes(self) -> usize {
        let whole = if self.factored { HEADER_BYTES / 2 } else { HEADER_BYTES };
        if self.implied { whole / 2 } else { whole }
    }

    /// Where the scales of group `index` of a record are.
    pub const fn place(self, index: usize) -> usize {
        index * self.group_bytes() + if self.factored { FACTOR_BYTES } else { 0 }
    }

    /// The scale and the bias of one row in group `index` of a record, in units.
    fn of_row(self, headers: &[u8], index: usize, lane: usize, fixed: &FixedPoint) -> [f64; 2] {
        let shift = f64::from(1u32 << fixed.shift);
        let two = |at: usize| [headers[at], headers[at + 1]];
        if self.factored {
            let at = self.place(index) + lane;
            let number = |at: usize| f64::from(headers[at] as i8);
            let factor = |at: usize| f16::from_le_bytes(two(at)).to_f64();
            let scale = factor(2 * lane) * number(at);
            let middle = f64::from(1u32 << (fixed.bits - 1));
            return match self.implied {
                true => [scale, -middle * scale],
                false => [scale, factor(2 * (LANES + lane)) * number(at + LANES) * shift],
            };
        }
        let at = self.place(index) + 2 * lane;
        let scale = i16::from_le_bytes(two(at));
        let bias = match self.implied {
            true => fixed.symmetric_offset(scale),
            false => i16::from_le_bytes(two(at + 2 * LANES)),
        };
        [f64::from(scale), f64::from(bias) * shift]
    }
}

/// A unit of a quantized panel: the headers of some groups, then their blocks.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Record {
    /// Columns of its groups.
    pub columns: usize,
    /// Bytes of its headers, whole lines.
    pub header_bytes: usize,
    /// All bytes.
    pub bytes: usize,
}

impl Record {
    /// The record of a matrix with levels of `bits` bits.
    pub const fn of(bits: u32, group: usize, headers: Headers) -> Self {
        let columns = match headers {
            Headers { factored: true, .. } => FACTOR_COLUMNS,
            Headers { implied: true, .. } => 2 * group,
            _ => record_columns(group),
        };
        let header_bytes = headers.place(columns / group).next_multiple_of(STEP_BYTES);
        Self { columns, header_bytes, bytes: header_bytes + columns / BLOCK32 * block_bytes(bits) }
    }
}

/// Groups of fewer columns share a block with the next one, and a record.
pub(in crate::cpu) const fn shares_block(group: usize) -> bool {
    group < BLOCK32
}

/// Columns of whole headers and their blocks: a group, or the two groups that share a block.
pub(in crate::cpu) const fn record_columns(group: usize) -> usize {
    if shares_block(group) { BLOCK32 } else { group }
}

/// The levels of one row of a block.
fn levels(block: &[u8], bits: u32, lane: usize) -> [u8; BLOCK32] {
    let mut levels = [[0; 4]; STEPS];
    let mut line = 0;
    for &(width, first) in planes(bits) {
        let per_line = (8 / width) as usize;
        let mask = 0x0101_0101 * ((1 << width) - 1);
        for (step, levels) in levels.iter_mut().enumerate() {
            let from = &block[(line + step / per_line) * STEP_BYTES..].as_chunks::<4>().0[lane];
            let plane = u32::from_le_bytes(*from) >> (width * (step % per_line) as u32) & mask;
            *levels = (u32::from_le_bytes(*levels) | plane << first).to_le_bytes();
        }
        line += STEPS / per_line;
    }
    let mut all = [0; BLOCK32];
    for (to, level) in all.iter_mut().zip(levels.as_flattened()) {
        *to = table(bits).map_or(*level, |table| table[*level as usize]);
    }
    all
}
