//! Weight matrices in the layout that the kernels read straight through.
//!
//! 16 rows are interleaved to a *panel*, so that a vector register holds one column (or four, as bytes) of 16 rows and a
//! dot product needs no sum across lanes. A float panel is `[cols][16]`. A quantized panel is a sequence of groups; a
//! group is `16 scales, 16 biases` (16-bit integers, see `fixed.rs`), then its *octets*: 32 columns of 16 rows, as 8
//! *steps* of 64 bytes (4 columns of each row, what one byte dot product takes), packed to `bits` lines of 64 bytes:
//!
//! | bits | lines of an octet |
//! |---|---|
//! | 8 | 8 × one step |
//! | 4 | 4 × two steps (step 2j in the low, 2j+1 in the high bits) |
//! | 2 | 2 × four steps |
//! | 3, 5, 6 | those of 2 (4, 4) bits, then those of the upper 1 (1, 2) bits |
//!
//! so that a matrix takes as many bytes here as in the file, whatever its bits, and one unit for each row.

use crate::cpu::layout::fixed_point::{Fixed, HEADER_BYTES};
use crate::cpu::layout::region::Region;
use crate::cpu::simd::LANES;
use crate::source::Encoding;

/// Columns of an octet.
pub(in crate::cpu) const OCTET: usize = 32;
/// Bytes of a step: 4 columns of 16 rows.
pub(in crate::cpu) const STEP_BYTES: usize = 64;
/// Steps of an octet.
pub(in crate::cpu) const STEPS: usize = 8;

/// A packed matrix `[rows, cols]`.
#[derive(Debug)]
pub struct Matrix {
    pub(in crate::cpu) rows: usize,
    pub(in crate::cpu) cols: usize,
    pub(in crate::cpu) encoding: Encoding,
    pub(in crate::cpu) panels: Region,
    /// What a quantized row's integers are multiples of, `[panels × 16]`.
    pub(in crate::cpu) units: Vec<f32>,
    /// Added to the output; empty or one for each row.
    pub(in crate::cpu) bias: Vec<f32>,
}

/// Matrices that share their input; their rows follow each other.
#[derive(Debug)]
pub struct Linear {
    pub(in crate::cpu) parts: Vec<Matrix>,
    pub(in crate::cpu) rows: usize,
}

/// The lines into which `bits` are packed: (bits, first bit) of each plane.
pub(in crate::cpu) const fn planes(bits: u32) -> &'static [(u32, u32)] {
    match bits {
        2 => &[(2, 0)],
        3 => &[(2, 0), (1, 2)],
        4 => &[(4, 0)],
        5 => &[(4, 0), (1, 4)],
        6 => &[(4, 0), (2, 4)],
        _ => &[(8, 0)],
    }
}

impl Matrix {
    /// Panels, the last of which may be partly empty.
    pub(in crate::cpu) fn panel_count(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes of one panel.
    pub(in crate::cpu) fn panel_bytes(&self) -> usize {
        match self.encoding {
            Encoding::Float(float) => LANES * self.cols * float.bytes(),
            Encoding::Affine { bits, group, .. } => self.cols / group * record_bytes(bits, group),
        }
    }

    /// Bytes that the matrix takes in memory.
    pub fn bytes(&self) -> usize {
        self.panels.len() + size_of_val(self.units.as_slice())
    }

    /// Writes one row as floats.
    pub(in crate::cpu) fn row(&self, row: usize, out: &mut [f32]) {
        let panel = &self.panels[row / LANES * self.panel_bytes()..][..self.panel_bytes()];
        let lane = row % LANES;
        match self.encoding {
            Encoding::Float(float) => {
                let size = float.bytes();
                for (col, x) in out.iter_mut().enumerate() {
                    float.decode(&panel[(col * LANES + lane) * size..][..size], std::slice::from_mut(x));
                }
            }
            Encoding::Affine { bits, group, .. } => {
                let (fixed, unit) = (Fixed::of(bits), self.units[row]);
                let records = panel.chunks_exact(record_bytes(bits, group));
                for (record, out) in records.zip(out.chunks_exact_mut(group)) {
                    let (header, octets) = record.split_at(HEADER_BYTES);
                    let number = |index: usize| i16::from_le_bytes(header.as_chunks::<2>().0[index]);
                    let (scale, bias) = (number(lane), number(LANES + lane));
                    let octets = octets.chunks_exact(bits as usize * STEP_BYTES);
                    for (octet, out) in octets.zip(out.chunks_exact_mut(OCTET)) {
                        for (col, x) in out.iter_mut().enumerate() {
                            *x = fixed.weight(element(octet, bits, lane, col), scale, bias) as f32 * unit;
                        }
                    }
                }
            }
        }
    }
}

/// Bytes of a group of a panel.
pub(in crate::cpu) const fn record_bytes(bits: u32, group: usize) -> usize {
    HEADER_BYTES + group / OCTET * bits as usize * STEP_BYTES
}

/// One quantized element of an octet.
fn element(octet: &[u8], bits: u32, lane: usize, col: usize) -> u8 {
    let (step, byte) = (col / 4, 4 * lane + col % 4);
    let mut line = 0;
    let mut value = 0;
    for &(width, first) in planes(bits) {
        let per_line = (8 / width) as usize;
        let packed =
            octet[(line + step / per_line) * STEP_BYTES + byte] >> (width * (step % per_line) as u32);
        value |= (packed & ((1u16 << width) - 1) as u8) << first;
        line += STEPS / per_line;
    }
    value
}
