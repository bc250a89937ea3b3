//! Packing: from rows in a file to the panels that `layout/matrix.rs` describes.
//!
//! Plain numbers and MLX's affine bit streams have fast paths, and so have words of levels
//! (`words.rs`) and E4M3 numbers (`codes.rs`). Every other format is read group by group through
//! its [`GroupReader`](crate::source::GroupReader). Threads share the panels of all matrices that
//! are packed together. Each copies a piece of the file to a buffer that stays in its second-level
//! cache, and packs it from there.

mod affine;
mod codes;
mod groups;
mod planes;
#[cfg(test)]
mod tests;
mod transpose;
mod words;

use std::io;
use std::ops::Range;

use crate::cpu::dispatch::of_file_bits;
use crate::cpu::layout::fixed_point::{FixedPoint, HEADER_BYTES};
use crate::cpu::layout::matrix::{BLOCK32, Headers, Matrix, Record, STEP_BYTES, format_of};
use crate::cpu::layout::region::{Arena, Region};
use crate::cpu::pointers::SendPtr;
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::{Pool, WorkQueue};
use crate::source::{Encoding, Float, MatrixSource, PackedFormat, Strided};
use affine::pack_block32;
use groups::GroupPacker;
use transpose::{Rows, columns};
use words::{Line, PANELS, takes_panels};

/// Bytes that a thread copies from a file at once. They stay in its second-level cache until they
/// are packed.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces that a thread claims at once, at least: then few huge pages are written by two threads,
/// each of which would clear the page.
const CLAIMED_PIECES: usize = 8;

impl Matrix {
    /// Packs what `sources` describe, in parallel. `short`: headers may be other than whole.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub(in crate::cpu) fn pack(
        sources: &[&MatrixSource<'_>],
        short: bool,
        arena: &mut Arena,
        pool: &mut Pool,
    ) -> io::Result<Vec<Self>> {
        let empty = |source: &&MatrixSource<'_>| Self::empty(source, short, arena);
        let mut matrices = sources.iter().map(empty).collect::<io::Result<Vec<_>>>()?;
        let jobs = sources.iter().zip(&mut matrices).map(|(source, matrix)| Job::new(source, matrix));
        let jobs: Vec<Job<'_>> = jobs.collect();
        let pieces: Vec<_> = jobs.iter().flat_map(Job::pieces).collect();
        let mut queue = WorkQueue::new(pool.threads());
        queue.reset(pieces.len(), CLAIMED_PIECES.min(pieces.len() / pool.threads())..=usize::MAX);
        pool.run(&|thread| {
            let mut scratch = Scratch::default();
            while let Some(claimed) = queue.next(thread) {
                for (job, panels) in &pieces[claimed] {
                    job.pack(panels.clone(), &mut scratch);
                }
            }
        });
        jobs.iter().for_each(Job::release);
        Ok(matrices)
    }

    /// A matrix of zeros with the shape and format of `source`.
    fn empty(source: &MatrixSource<'_>, short: bool, arena: &mut Arena) -> io::Result<Self> {
        let format = format_of(source.encoding);
        let headers = if short { Headers::of(source.encoding, source.cols) } else { Headers::default() };
        let mut matrix = Self {
            rows: source.rows,
            cols: source.cols,
            format,
            headers,
            panels: Region::zeroed(0)?,
            units: Vec::new(),
            bias: source.bias.clone().unwrap_or_default(),
        };
        matrix.panels = arena.take(matrix.panel_count() * matrix.panel_bytes())?;
        if let PackedFormat::Affine { .. } = matrix.format {
            matrix.units = vec![0.0; matrix.panel_count() * LANES];
        }
        Ok(matrix)
    }
}

/// A thread's memory.
#[derive(Default)]
struct Scratch {
    /// A piece of the file, one for each tensor.
    read: [Vec<u8>; 3],
    lines: Vec<Line>,
}

/// A matrix that is being packed.
struct Job<'a> {
    source: &'a MatrixSource<'a>,
    headers: Headers,
    panel_count: usize,
    panel_bytes: usize,
    panels: SendPtr<u8>,
    /// 16 for each panel, if the matrix is quantized.
    units: Option<SendPtr<f32>>,
}

impl<'a> Job<'a> {
    fn new(source: &'a MatrixSource<'_>, matrix: &mut Matrix) -> Self {
        // Elements without rows are read where they are mapped, all for each panel.
        if let Some(pages) = source.pages.filter(|_| !source.encoding.has_weight_rows()) {
            Self::tensors(source).for_each(|tensor| pages.need(tensor.bytes));
        }
        Self {
            source,
            headers: matrix.headers,
            panel_count: matrix.panel_count(),
            panel_bytes: matrix.panel_bytes(),
            panels: SendPtr(matrix.panels.as_mut_ptr()),
            units: (!matrix.units.is_empty()).then_some(SendPtr(matrix.units.as_mut_ptr())),
        }
    }

    fn tensors(source: &MatrixSource<'a>) -> impl Iterator<Item = Strided<'a>> {
        [Some(source.weight), source.scales, source.offsets].into_iter().flatten()
    }

    /// What is mapped was read.
    fn release(&self) {
        let Some(pages) = self.source.pages else { return };
        let [scales, offsets] = self.source.encoding.rows_together();
        let mapped = match self.source.encoding.has_weight_rows() {
            true => [1, scales, offsets],
            false => [0; 3],
        };
        let tensors = [Some(self.source.weight), self.source.scales, self.source.offsets];
        for (tensor, together) in tensors.into_iter().zip(mapped) {
            if let Some(tensor) = tensor.filter(|_| together != 1) {
                pages.release(tensor.bytes);
            }
        }
    }

    /// Panels that are packed together.
    fn pieces(&self) -> impl Iterator<Item = (&Self, Range<usize>)> {
        let piece = (PIECE_BYTES / self.panel_bytes.max(1)).max(1);
        let piece = if takes_panels(self.source.encoding) { piece.next_multiple_of(PANELS) } else { piece };
        let pieces = (0..self.panel_count).step_by(piece);
        pieces.map(move |first| (self, first..self.panel_count.min(first + piece)))
    }

    /// Packs some panels.
    fn pack(&self, panels: Range<usize>, scratch: &mut Scratch) {
        let source = self.source;
        let outputs = panels.start * LANES..source.rows.min(panels.end * LANES);
        let rows = source.row_order.stored_range(&outputs);
        let read;
        let (source, before) = match source.pages {
            Some(pages) if source.encoding.has_weight_rows() => {
                read = source.read(&rows, pages, &mut scratch.read);
                (&read, rows.start)
            }
            _ => (source, 0),
        };
        let mut packer = Packer::new(source, before, self.headers, &mut scratch.lines);
        for panel in panels {
            // SAFETY: each panel is packed by one thread, and lies inside the region allocated for
            // all panels; there are 16 units for each.
            let (out, units) = unsafe {
                let out = std::slice::from_raw_parts_mut(
                    self.panels.at(panel * self.panel_bytes),
                    self.panel_bytes,
                );
                (out, self.units.map(|units| &mut *units.at(panel * LANES).cast::<[f32; LANES]>()))
            };
            packer.panel(panel, out, units);
        }
    }
}

/// Packs panels of one matrix.
pub(in crate::cpu) struct Packer<'a> {
    source: &'a MatrixSource<'a>,
    /// Stored rows before those of `source`'s tensors.
    before: usize,
    /// The row of lanes beyond the matrix.
    zeros: Vec<u8>,
    /// Scales, then offsets of a panel, `[groups][16]`, in the file's format and as f32.
    stored: [Vec<u8>; 2],
    numbers: [Vec<f32>; 2],
    /// Formats without a fast path.
    groups: Option<GroupPacker<'a>>,
}

impl<'a> Packer<'a> {
    /// `lines` is memory.
    pub fn new(
        source: &'a MatrixSource<'a>,
        before: usize,
        headers: Headers,
        lines: &'a mut Vec<Line>,
    ) -> Self {
        let (groups, float) = match source.encoding {
            Encoding::Affine { group, scales, .. } => (source.cols / group, scales),
            _ => (0, Float::F32),
        };
        let partial = !source.rows.is_multiple_of(LANES);
        Self {
            source,
            before,
            // No row of scales is longer than its weights.
            zeros: vec![0; if partial { source.weight.row_bytes } else { 0 }],
            stored: std::array::from_fn(|_| vec![0; groups * LANES * float.bytes()]),
            numbers: std::array::from_fn(|_| vec![0.0; groups * LANES]),
            groups: match source.encoding {
                Encoding::Float(_) | Encoding::Affine { .. } => None,
                _ => GroupPacker::new(source, before, headers, Some(lines)),
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
                packer.panel_inlined::<true>(panel, out, units);
            }
            if crate::cpu::simd::avx512::Avx512::detected() {
                // SAFETY: detected.
                return unsafe { avx512(self, panel, out, units) };
            }
        }
        self.panel_inlined::<false>(panel, out, units);
    }

    /// `WIDE`: on a CPU with AVX-512.
    #[inline(always)]
    pub fn panel_inlined<const WIDE: bool>(
        &mut self,
        panel: usize,
        out: &mut [u8],
        units: Option<&mut [f32; LANES]>,
    ) {
        match (self.source.encoding, units) {
            (Encoding::Float(float), _) => {
                let rows = self.rows(&self.source.weight, panel);
                columns::<WIDE>(&rows, self.source.cols, float.bytes(), out);
            }
            (Encoding::Affine { bits, group, scales }, Some(units)) => {
                of_file_bits!(bits, [Self::affine], [WIDE], (self, panel, group, scales, units, out));
            }
            (_, Some(units)) => {
                let Some(groups) = &mut self.groups else { unreachable!("other encodings have groups") };
                groups.panel::<WIDE>(panel, units, out);
            }
            (_, None) => unreachable!("quantized matrices have units"),
        }
    }

    #[inline(always)]
    fn affine<const WIDE: bool, const BITS: u32>(
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
            columns::<WIDE>(&rows, groups, float.bytes(), &mut self.stored[index]);
            float.decode(&self.stored[index], &mut self.numbers[index]);
        }
        let [scales, offsets] = &self.numbers;
        let (scales, offsets) = (scales.as_chunks::<LANES>().0, offsets.as_chunks::<LANES>().0);
        *units = fixed.units(scales.iter().zip(offsets));
        let inverse = FixedPoint::inverse(units);
        let rows = self.rows(&self.source.weight, panel);
        let blocks_of_group = group / BLOCK32;
        let record = Record::of(BITS, group, Headers::default());
        for (g, record) in out.chunks_exact_mut(record.bytes).enumerate() {
            let (header, blocks) = record.split_at_mut(HEADER_BYTES);
            write_header(header, &fixed.encode(&inverse, &scales[g], &offsets[g]));
            for (o, block) in blocks.chunks_exact_mut(BITS as usize * STEP_BYTES).enumerate() {
                let at = (g * blocks_of_group + o) * BLOCK32 * BITS as usize / 8;
                let lines = block.as_chunks_mut::<STEP_BYTES>().0;
                // SAFETY: a row has the bytes of all of its columns; `WIDE` on CPUs with AVX-512.
                unsafe { pack_block32::<WIDE, BITS>(&rows, at, lines) };
            }
        }
    }

    fn rows(&self, from: &Strided<'_>, panel: usize) -> Rows {
        std::array::from_fn(|lane| {
            let row = panel * LANES + lane;
            let is_present = row < self.source.rows;
            let bytes = match is_present {
                true => from.row(self.source.stored_row(row) - self.before),
                false => &self.zeros[..from.row_bytes],
            };
            bytes.as_ptr()
        })
    }
}

/// Writes the 16 scales of a group, and the 16 offsets if the header has room for them.
#[inline(always)]
fn write_header(header: &mut [u8], encoded: &[[i16; LANES]; 2]) {
    for (to, number) in header.as_chunks_mut::<2>().0.iter_mut().zip(encoded.as_flattened()) {
        *to = number.to_le_bytes();
    }
}
