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

use std::io;
use std::ops::Range;

use super::fixed::{Fixed, HEADER_BYTES};
use super::memory::{Arena, Region};
use super::pool::Pool;
use super::simd::LANES;
use crate::source::{Encoding, Float, MatrixSource, Strided};

/// Columns of an octet.
pub(super) const OCTET: usize = 32;
/// Bytes of a step: 4 columns of 16 rows.
pub(super) const STEP_BYTES: usize = 64;
/// Steps of an octet.
pub(super) const STEPS: usize = 8;
/// About how much is packed before the file's pages are let go.
const PIECE_BYTES: usize = 2 << 20;

/// A packed matrix `[rows, cols]`.
#[derive(Debug)]
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) encoding: Encoding,
    pub(super) panels: Region,
    /// What a quantized row's integers are multiples of, `[panels × 16]`.
    pub(super) units: Vec<f32>,
    /// Added to the output; empty or one for each row.
    pub(super) bias: Vec<f32>,
}

/// The lines into which `bits` are packed: (bits, first bit) of each plane.
pub(super) const fn planes(bits: u32) -> &'static [(u32, u32)] {
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
    /// Packs what `source` describes, in parallel.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub fn pack(source: &MatrixSource<'_>, arena: &mut Arena, pool: &mut Pool) -> io::Result<Self> {
        let mut matrix = Self {
            rows: source.rows,
            cols: source.cols,
            encoding: source.encoding,
            panels: Region::zeroed(0)?,
            units: Vec::new(),
            bias: source.bias.clone().unwrap_or_default(),
        };
        matrix.panels = arena.take(matrix.panel_count() * matrix.panel_bytes())?;
        let panel_bytes = matrix.panel_bytes();
        if let Encoding::Affine { .. } = source.encoding {
            matrix.units = vec![0.0; matrix.panel_count() * LANES];
        }
        let (base, units) = (SendPtr(matrix.panels.as_mut_ptr()), SendPtr(matrix.units.as_mut_ptr()));
        // In pieces, so that the file's pages can leave memory: the peak is the packed matrix and one piece.
        let piece = (PIECE_BYTES / panel_bytes.max(1)).max(pool.threads());
        for first in (0..matrix.panel_count()).step_by(piece) {
            let last = matrix.panel_count().min(first + piece);
            pool.split(last - first, &|range: Range<usize>| {
                for panel in first + range.start..first + range.end {
                    // SAFETY: each panel is written by one thread, inside of the region that was allocated for all.
                    let out =
                        unsafe { std::slice::from_raw_parts_mut(base.at(panel * panel_bytes), panel_bytes) };
                    match source.encoding {
                        Encoding::Float(float) => pack_floats(source, float, panel, out),
                        Encoding::Affine { bits, group, scales } => {
                            // SAFETY: 16 units for each panel; a panel is packed by one thread.
                            let units = unsafe { &mut *units.at(panel * LANES).cast::<[f32; LANES]>() };
                            pack_affine(source, (bits, group, scales), panel, units, out);
                        }
                    }
                }
            });
            if let Some(release) = source.release {
                let rows = first * LANES..source.rows.min(last * LANES);
                release.release(source.weight.span(rows.clone()));
                if let Some((scales, biases)) = &source.scales {
                    release.release(scales.span(rows.clone()));
                    release.release(biases.span(rows));
                }
            }
        }
        Ok(matrix)
    }

    /// Panels, the last of which may be partly empty.
    pub(super) fn panel_count(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes of one panel.
    pub(super) fn panel_bytes(&self) -> usize {
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
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
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
pub(super) const fn record_bytes(bits: u32, group: usize) -> usize {
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

fn pack_floats(source: &MatrixSource<'_>, float: Float, panel: usize, out: &mut [u8]) {
    let size = float.bytes();
    for lane in 0..LANES.min(source.rows - panel * LANES) {
        let row = source.weight.row(panel * LANES + lane);
        for (col, bytes) in row.chunks_exact(size).enumerate() {
            out[(col * LANES + lane) * size..][..size].copy_from_slice(bytes);
        }
    }
}

fn pack_affine(
    source: &MatrixSource<'_>,
    (bits, group, scales): (u32, usize, Float),
    panel: usize,
    units: &mut [f32; LANES],
    out: &mut [u8],
) {
    let (fixed, size) = (Fixed::of(bits), scales.bytes());
    let lanes = LANES.min(source.rows - panel * LANES);
    let octet_source = OCTET * bits as usize / 8;
    let Some((scale_rows, bias_rows)) = &source.scales else { unreachable!("affine sources carry scales") };
    let number = |rows: &Strided<'_>, row: usize, g: usize| {
        let mut x = [0.0];
        scales.decode(&rows.row(row)[g * size..][..size], &mut x);
        x[0]
    };
    let affine = |row: usize, g: usize| (number(scale_rows, row, g), number(bias_rows, row, g));
    for (lane, unit) in units[..lanes].iter_mut().enumerate() {
        *unit = fixed.unit((0..source.cols / group).map(|g| affine(panel * LANES + lane, g)));
    }
    let mut steps = [[0u8; STEP_BYTES]; STEPS];
    for (g, record) in out.chunks_exact_mut(record_bytes(bits, group)).enumerate() {
        let (header, octets) = record.split_at_mut(HEADER_BYTES);
        let header = header.as_chunks_mut::<2>().0;
        for lane in 0..lanes {
            let (scale, bias) = affine(panel * LANES + lane, g);
            let (scale, bias) = fixed.encode(units[lane], scale, bias);
            header[lane] = scale.to_le_bytes();
            header[LANES + lane] = bias.to_le_bytes();
        }
        for (o, octet) in octets.chunks_exact_mut(bits as usize * STEP_BYTES).enumerate() {
            for lane in 0..lanes {
                let row = source.weight.row(panel * LANES + lane);
                let elements = unpack(&row[(g * group / OCTET + o) * octet_source..][..octet_source], bits);
                for (step, four) in elements.as_chunks::<4>().0.iter().enumerate() {
                    steps[step][4 * lane..][..4].copy_from_slice(four);
                }
            }
            pack_octet(&steps, bits, octet);
        }
    }
}

/// 32 elements of a little-endian bit stream.
fn unpack(stream: &[u8], bits: u32) -> [u8; OCTET] {
    let mut out = [0; OCTET];
    match bits {
        8 => out.copy_from_slice(stream),
        4 => {
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(stream) {
                *pair = [byte & 15, byte >> 4];
            }
        }
        // 8 elements are `bits` whole bytes, at most 6: they fit a u64.
        _ => {
            for (eight, bytes) in
                out.as_chunks_mut::<8>().0.iter_mut().zip(stream.chunks_exact(bits as usize))
            {
                let mut word = [0; 8];
                word[..bytes.len()].copy_from_slice(bytes);
                let word = u64::from_le_bytes(word);
                for (i, x) in eight.iter_mut().enumerate() {
                    *x = (word >> (bits as usize * i)) as u8 & ((1u16 << bits) - 1) as u8;
                }
            }
        }
    }
    out
}

fn pack_octet(steps: &[[u8; STEP_BYTES]; STEPS], bits: u32, out: &mut [u8]) {
    let mut lines = out.as_chunks_mut::<STEP_BYTES>().0.iter_mut();
    for &(width, first) in planes(bits) {
        let mask = ((1u16 << width) - 1) as u8;
        for together in steps.chunks_exact((8 / width) as usize) {
            let Some(line) = lines.next() else { unreachable!("an octet has as many lines as bits") };
            for (i, step) in together.iter().enumerate() {
                for (byte, x) in line.iter_mut().zip(step) {
                    let bits = ((x >> first) & mask) << (width * i as u32);
                    *byte = if i == 0 { bits } else { *byte | bits };
                }
            }
        }
    }
}

/// A pointer that threads of a pool share, each writing its own part.
#[derive(Debug)]
pub(super) struct SendPtr<T>(pub *mut T);

impl<T> Clone for SendPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SendPtr<T> {}

// SAFETY: only a number until it is dereferenced, which is up to the user's own SAFETY argument.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    /// The address of element `index`.
    ///
    /// # Safety
    /// `index` must be within the allocation.
    pub(super) unsafe fn at(self, index: usize) -> *mut T {
        // SAFETY: the caller's.
        unsafe { self.0.add(index) }
    }
}
