//! Packing: from rows in a file to the panels that `layout/matrix.rs` describes.
//!
//! Plain numbers and MLX's affine bit streams have fast paths. Every other format is read group by
//! group through its [`GroupReader`](crate::source::GroupReader). A thread packs a contiguous part
//! of a matrix, requests the file's pages one piece ahead of reading and releases them afterwards.

mod affine;
mod groups;
mod planes;
#[cfg(test)]
mod tests;
mod transpose;

use std::io;
use std::ops::Range;

use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::fixed_point::{FixedPoint, HEADER_BYTES};
use crate::cpu::layout::matrix::{BLOCK32, Matrix, STEP_BYTES, record_bytes};
use crate::cpu::layout::region::{Arena, Region};
use crate::cpu::pointers::SendPtr;
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::Pool;
use crate::source::{Encoding, Float, MatrixSource, PackedFormat, Strided};
use affine::pack_block32;
use groups::GroupPacker;
use transpose::{Rows, columns};

/// Bytes that a thread packs before it releases the file's pages; each thread holds about this much
/// of them.
const PIECE_BYTES: usize = 2 << 20;

impl Matrix {
    /// Packs what `source` describes, in parallel.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub(in crate::cpu) fn pack(
        source: &MatrixSource<'_>,
        arena: &mut Arena,
        pool: &mut Pool,
    ) -> io::Result<Self> {
        let mut matrix = Self {
            rows: source.rows,
            cols: source.cols,
            format: source.encoding.packed(),
            panels: Region::zeroed(0)?,
            units: Vec::new(),
            bias: source.bias.clone().unwrap_or_default(),
        };
        matrix.panels = arena.take(matrix.panel_count() * matrix.panel_bytes())?;
        if let PackedFormat::Affine { .. } = matrix.format {
            matrix.units = vec![0.0; matrix.panel_count() * LANES];
        }
        pack(source, &mut matrix, pool);
        Ok(matrix)
    }
}

/// Fills the panels and units of `matrix`, whose shape is that of `source`.
fn pack(source: &MatrixSource<'_>, matrix: &mut Matrix, pool: &mut Pool) {
    let (panels, panel_bytes) = (matrix.panel_count(), matrix.panel_bytes());
    let (base, units) = (SendPtr(matrix.panels.as_mut_ptr()), SendPtr(matrix.units.as_mut_ptr()));
    let piece = (PIECE_BYTES / panel_bytes.max(1)).max(1);
    let rows = |panels: &Range<usize>| {
        source.row_order.stored_range(&(panels.start * LANES..source.rows.min(panels.end * LANES)))
    };
    let numbers = || [&source.scales, &source.offsets].into_iter().flatten();
    let (weight_rows, scale_rows) = (source.encoding.has_weight_rows(), source.encoding.has_scale_rows());
    let format = matrix.format;
    pool.split(panels, &|mine| {
        let mut packer = Packer::new(source);
        if let Some(pages) = source.pages {
            numbers().for_each(|part| {
                pages.need(if scale_rows { part.span(rows(&mine)) } else { part.bytes });
            });
            if !weight_rows {
                pages.need(source.weight.bytes);
            }
        }
        for first in mine.clone().step_by(piece) {
            let panels = first..mine.end.min(first + piece);
            let weights = if weight_rows { source.weight.span(rows(&panels)) } else { &[] };
            if let Some(pages) = source.pages {
                pages.need(weights);
            }
            for panel in panels {
                // SAFETY: each panel is written by one thread, inside the region allocated for all
                // panels.
                let out =
                    unsafe { std::slice::from_raw_parts_mut(base.at(panel * panel_bytes), panel_bytes) };
                let units = match format {
                    PackedFormat::Float(_) => None,
                    PackedFormat::Affine { .. } => {
                        // SAFETY: there are 16 units for each panel, and one thread packs a panel.
                        Some(unsafe { &mut *units.at(panel * LANES).cast::<[f32; LANES]>() })
                    }
                };
                packer.panel(panel, out, units);
            }
            if let Some(pages) = source.pages {
                pages.release(weights);
            }
        }
    });
    // What neighbouring threads share is released when all threads are done: scales, which are few
    // pages, and elements in which rows share words.
    if let Some(pages) = source.pages {
        numbers().for_each(|part| pages.release(part.bytes));
        if !weight_rows {
            pages.release(source.weight.bytes);
        }
    }
}

/// Packs panels of one matrix.
pub(in crate::cpu) struct Packer<'a> {
    source: &'a MatrixSource<'a>,
    /// The row of lanes beyond the matrix.
    zeros: Vec<u8>,
    /// Scales, then offsets of a panel, `[groups][16]`, in the file's format and as f32.
    stored: [Vec<u8>; 2],
    numbers: [Vec<f32>; 2],
    /// Formats without a fast path.
    groups: Option<GroupPacker<'a>>,
}

impl<'a> Packer<'a> {
    pub fn new(source: &'a MatrixSource<'a>) -> Self {
        let (groups, float) = match source.encoding {
            Encoding::Affine { group, scales, .. } => (source.cols / group, scales),
            _ => (0, Float::F32),
        };
        let partial = !source.rows.is_multiple_of(LANES);
        Self {
            source,
            // No row of scales is longer than its weights.
            zeros: vec![0; if partial { source.weight.row_bytes } else { 0 }],
            stored: std::array::from_fn(|_| vec![0; groups * LANES * float.bytes()]),
            numbers: std::array::from_fn(|_| vec![0.0; groups * LANES]),
            groups: match source.encoding {
                Encoding::Float(_) | Encoding::Affine { .. } => None,
                _ => GroupPacker::new(source),
            },
        }
    }

    /// Packs one panel. Wider vectors are an eighth faster where the CPU has them; the bytes are
    /// the same.
    pub fn panel(&mut self, panel: usize, out: &mut [u8], units: Option<&mut [f32; LANES]>) {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512(
                packer: &mut Packer<'_>,
                panel: usize,
                out: &mut [u8],
                units: Option<&mut [f32; LANES]>,
            ) {
                packer.panel_inlined(panel, out, units);
            }
            if crate::cpu::simd::avx512::Avx512::detected() {
                // SAFETY: detected.
                return unsafe { avx512(self, panel, out, units) };
            }
        }
        self.panel_inlined(panel, out, units);
    }

    #[inline(always)]
    pub fn panel_inlined(&mut self, panel: usize, out: &mut [u8], units: Option<&mut [f32; LANES]>) {
        match (self.source.encoding, units) {
            (Encoding::Float(float), _) => {
                let rows = self.rows(&self.source.weight, panel);
                columns(&rows, self.source.cols, float.bytes(), out);
            }
            (Encoding::Affine { bits, group, scales }, Some(units)) => {
                of_bits!(bits, [Self::affine], [], (self, panel, group, scales, units, out));
            }
            (_, Some(units)) => {
                let Some(groups) = &mut self.groups else { unreachable!("other encodings have groups") };
                groups.panel(panel, units, out);
            }
            (_, None) => unreachable!("quantized matrices have units"),
        }
    }

    #[inline(always)]
    fn affine<const BITS: u32>(
        &mut self,
        panel: usize,
        group: usize,
        float: Float,
        units: &mut [f32; LANES],
        out: &mut [u8],
    ) {
        let fixed = FixedPoint::of(BITS);
        let groups = self.source.cols / group;
        let (Some(scales), Some(offsets)) = (&self.source.scales, &self.source.offsets) else {
            unreachable!("affine sources have scales and offsets")
        };
        for (index, stored) in [scales, offsets].into_iter().enumerate() {
            let rows = self.rows(stored, panel);
            columns(&rows, groups, float.bytes(), &mut self.stored[index]);
            float.decode(&self.stored[index], &mut self.numbers[index]);
        }
        let [scales, offsets] = &self.numbers;
        let (scales, offsets) = (scales.as_chunks::<LANES>().0, offsets.as_chunks::<LANES>().0);
        *units = fixed.units(scales.iter().zip(offsets));
        let inverse = FixedPoint::inverse(units);
        let rows = self.rows(&self.source.weight, panel);
        let blocks_of_group = group / BLOCK32;
        for (g, record) in out.chunks_exact_mut(record_bytes(BITS, group)).enumerate() {
            let (header, blocks) = record.split_at_mut(HEADER_BYTES);
            write_header(header, &fixed.encode(&inverse, &scales[g], &offsets[g]));
            for (o, block) in blocks.chunks_exact_mut(BITS as usize * STEP_BYTES).enumerate() {
                let at = (g * blocks_of_group + o) * BLOCK32 * BITS as usize / 8;
                let lines = block.as_chunks_mut::<STEP_BYTES>().0;
                // SAFETY: a row has the bytes of all of its columns.
                unsafe { pack_block32::<BITS>(&rows, at, lines) };
            }
        }
    }

    fn rows(&self, from: &Strided<'_>, panel: usize) -> Rows {
        std::array::from_fn(|lane| {
            let row = panel * LANES + lane;
            let is_present = row < self.source.rows;
            let bytes = match is_present {
                true => from.row(self.source.stored_row(row)),
                false => &self.zeros[..from.row_bytes],
            };
            bytes.as_ptr()
        })
    }
}

/// Writes the 16 scales and 16 offsets of a group.
#[inline(always)]
fn write_header(header: &mut [u8], encoded: &[[i16; LANES]; 2]) {
    for (to, number) in header.as_chunks_mut::<2>().0.iter_mut().zip(encoded.as_flattened()) {
        *to = number.to_le_bytes();
    }
}
