//! Packing: from rows as they lie in a file to the panels that `matrix.rs` describes, about as fast as memory is copied.
//!
//! All is moved as words of 32 bits: blocks of 4 rows × 4 words are transposed in registers, and what a word holds is put
//! in the kernels' order for all lanes at once. A thread takes a contiguous part of a matrix, asks for the file's pages a
//! piece ahead of its reading, and lets them go behind it.

use std::io;
use std::ops::Range;

use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::fixed_point::{Fixed, HEADER_BYTES};
use crate::cpu::layout::matrix::{BLOCK32, Matrix, STEP_BYTES, STEPS, planes, record_bytes};
use crate::cpu::layout::region::{Arena, Region};
use crate::cpu::pointers::SendPtr;
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::Pool;
use crate::source::{Encoding, Float, MatrixSource, Strided};

/// About how much is packed before the file's pages are let go: each thread has so much of them in memory.
const PIECE_BYTES: usize = 2 << 20;
/// Rows and words of a block that is transposed.
const BLOCK: usize = 4;
const BLOCK_BYTES: usize = BLOCK * size_of::<u32>();

/// The rows of one panel in the file; lanes beyond the matrix read zeros.
type Rows = [*const u8; LANES];

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
            encoding: source.encoding,
            panels: Region::zeroed(0)?,
            units: Vec::new(),
            bias: source.bias.clone().unwrap_or_default(),
        };
        matrix.panels = arena.take(matrix.panel_count() * matrix.panel_bytes())?;
        if let Encoding::Affine { .. } = source.encoding {
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
    let rows = |panels: &Range<usize>| panels.start * LANES..source.rows.min(panels.end * LANES);
    let numbers = source.scales.as_ref().map(|(scales, biases)| [scales, biases]);
    let numbers = || numbers.into_iter().flatten();
    pool.split(panels, &|mine| {
        let mut packer = Packer::new(source);
        if let Some(pages) = source.pages {
            numbers().for_each(|part| pages.need(part.span(rows(&mine))));
        }
        for first in mine.clone().step_by(piece) {
            let panels = first..mine.end.min(first + piece);
            let weights = source.weight.span(rows(&panels));
            if let Some(pages) = source.pages {
                pages.need(weights);
            }
            for panel in panels {
                // SAFETY: each panel is written by one thread, inside of the region that was allocated for all.
                let out =
                    unsafe { std::slice::from_raw_parts_mut(base.at(panel * panel_bytes), panel_bytes) };
                let units = match source.encoding {
                    Encoding::Float(_) => None,
                    Encoding::Affine { .. } => {
                        // SAFETY: 16 units for each panel; a panel is packed by one thread.
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
    // These are a few pages for each thread, side by side: none may let another's go.
    if let Some(pages) = source.pages {
        numbers().for_each(|part| pages.release(part.span(0..source.rows)));
    }
}

/// Packs panels of one matrix.
pub(in crate::cpu) struct Packer<'a> {
    source: &'a MatrixSource<'a>,
    /// A row for lanes that have none.
    zeros: Vec<u8>,
    /// Scales, then biases of a panel, `[groups][16]`, as the file has them and as floats.
    stored: [Vec<u8>; 2],
    numbers: [Vec<f32>; 2],
}

impl<'a> Packer<'a> {
    pub fn new(source: &'a MatrixSource<'a>) -> Self {
        let (groups, float) = match source.encoding {
            Encoding::Float(_) => (0, Float::F32),
            Encoding::Affine { group, scales, .. } => (source.cols / group, scales),
        };
        let partial = !source.rows.is_multiple_of(LANES);
        Self {
            source,
            // No row of scales is longer than its weights.
            zeros: vec![0; if partial { source.weight.row_bytes } else { 0 }],
            stored: std::array::from_fn(|_| vec![0; groups * LANES * float.bytes()]),
            numbers: std::array::from_fn(|_| vec![0.0; groups * LANES]),
        }
    }

    /// Packs one panel. Wider vectors are an eighth faster where the CPU has them; the bytes are the same.
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
            (Encoding::Affine { .. }, None) => unreachable!("quantized matrices have units"),
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
        let fixed = Fixed::of(BITS);
        let groups = self.source.cols / group;
        let Some((scales, biases)) = &self.source.scales else { unreachable!("affine sources carry scales") };
        for (index, stored) in [scales, biases].into_iter().enumerate() {
            let rows = self.rows(stored, panel);
            columns(&rows, groups, float.bytes(), &mut self.stored[index]);
            float.decode(&self.stored[index], &mut self.numbers[index]);
        }
        let [scales, biases] = &self.numbers;
        let (scales, biases) = (scales.as_chunks::<LANES>().0, biases.as_chunks::<LANES>().0);
        *units = fixed.units(scales.iter().zip(biases));
        let inverse = Fixed::inverse(units);
        let rows = self.rows(&self.source.weight, panel);
        let octets_of_group = group / BLOCK32;
        for (g, record) in out.chunks_exact_mut(record_bytes(BITS, group)).enumerate() {
            let (header, octets) = record.split_at_mut(HEADER_BYTES);
            let encoded = fixed.encode(&inverse, &scales[g], &biases[g]);
            for (to, number) in header.as_chunks_mut::<2>().0.iter_mut().zip(encoded.as_flattened()) {
                *to = number.to_le_bytes();
            }
            for (o, octet) in octets.chunks_exact_mut(BITS as usize * STEP_BYTES).enumerate() {
                let at = (g * octets_of_group + o) * BLOCK32 * BITS as usize / 8;
                let lines = octet.as_chunks_mut::<STEP_BYTES>().0;
                // SAFETY: a row has the bytes of all octets of its columns.
                unsafe { pack_octet::<BITS>(&rows, at, lines) };
            }
        }
    }

    fn rows(&self, from: &Strided<'_>, panel: usize) -> Rows {
        std::array::from_fn(|lane| {
            let row = panel * LANES + lane;
            let bytes = if row < self.source.rows { from.row(row) } else { &self.zeros[..from.row_bytes] };
            bytes.as_ptr()
        })
    }
}

/// Interleaves columns of 2 or 4 bytes: `out` is `[cols][16]`.
#[inline(always)]
fn columns(rows: &Rows, cols: usize, size: usize, out: &mut [u8]) {
    let whole = cols * size / BLOCK_BYTES * BLOCK_BYTES;
    for at in (0..whole).step_by(BLOCK_BYTES) {
        let out = &mut out[at * LANES..][..BLOCK_BYTES * LANES];
        for quad in 0..LANES / BLOCK {
            // SAFETY: a row has `cols` elements, of which these are within the whole blocks.
            let words = unsafe { transposed(rows, quad, at) };
            for (word, lanes) in words.iter().enumerate() {
                match size {
                    2 => {
                        // A word holds two columns of its lane.
                        for (half, shift) in [0, 16].into_iter().enumerate() {
                            let to = &mut out[((2 * word + half) * LANES + quad * BLOCK) * 2..][..BLOCK * 2];
                            for (to, word) in to.as_chunks_mut::<2>().0.iter_mut().zip(lanes) {
                                *to = ((word >> shift) as u16).to_le_bytes();
                            }
                        }
                    }
                    _ => store(&mut out[word * LANES * 4..][..LANES * 4], quad, lanes),
                }
            }
        }
    }
    for (lane, row) in rows.iter().enumerate() {
        for col in whole / size..cols {
            // SAFETY: within the row.
            let bytes = unsafe { std::slice::from_raw_parts(row.add(col * size), size) };
            out[(col * LANES + lane) * size..][..size].copy_from_slice(bytes);
        }
    }
}

/// Packs 32 columns of 16 rows, from byte `at` of the rows' bit streams on.
///
/// # Safety
/// Each row has `4 * BITS` bytes from there on.
#[inline(always)]
unsafe fn pack_octet<const BITS: u32>(rows: &Rows, at: usize, lines: &mut [[u8; STEP_BYTES]]) {
    match BITS {
        // A word is a step of its lane, or two that are to share a line.
        4 | 8 => {
            for (block, lines) in lines.chunks_exact_mut(BLOCK).enumerate() {
                for quad in 0..LANES / BLOCK {
                    // SAFETY: the rows have a block for each four lines.
                    let words = unsafe { transposed(rows, quad, at + block * BLOCK_BYTES) };
                    for (line, mut words) in lines.iter_mut().zip(words) {
                        if BITS == 4 {
                            words.iter_mut().for_each(|word| *word = two_steps(*word));
                        }
                        store(line, quad, &words);
                    }
                }
            }
        }
        _ => {
            let mut steps = [[0; LANES]; STEPS];
            for (index, step) in steps.iter_mut().enumerate() {
                let bits = BITS as usize;
                let first_bit = index * 4 * bits;
                // A word that holds all of the step and ends within the octet.
                let byte = (first_bit / 8).min(4 * bits - size_of::<u32>());
                for (word, row) in step.iter_mut().zip(rows) {
                    // SAFETY: within the octet's bytes.
                    let stored = unsafe { row.add(at + byte).cast::<[u8; 4]>().read() };
                    *word = one_step::<BITS>(u32::from_le_bytes(stored) >> (first_bit - 8 * byte));
                }
            }
            in_planes::<BITS>(&steps, lines);
        }
    }
}

/// Four levels in the lowest bits of a word, as bytes.
#[inline(always)]
fn one_step<const BITS: u32>(word: u32) -> u32 {
    let level = (1u32 << BITS) - 1;
    let pairs = (word & ((1 << (2 * BITS)) - 1)) | (word >> (2 * BITS)) << 16;
    (pairs & (level * 0x1_0001)) | (pairs & ((level << BITS) * 0x1_0001)) << (8 - BITS)
}

/// Eight levels of 4 bits: each byte of the result holds a level in its low bits, and the one four further on in its high bits.
#[inline(always)]
fn two_steps(word: u32) -> u32 {
    // In each half of the word, a byte of the first four levels, then one of the last four.
    let bytes = (word & 0xff00_00ff) | (word & 0x0000_ff00) << 8 | (word & 0x00ff_0000) >> 8;
    (bytes & 0xf00f_f00f) | (bytes & 0x00f0_00f0) << 4 | (bytes & 0x0f00_0f00) >> 4
}

/// Steps, packed to lines of as many as fit, plane by plane.
#[inline(always)]
fn in_planes<const BITS: u32>(steps: &[[u32; LANES]; STEPS], lines: &mut [[u8; STEP_BYTES]]) {
    let mut lines = lines.iter_mut();
    for &(width, first) in planes(BITS) {
        let mask = ((1u32 << width) - 1) * 0x0101_0101;
        for together in steps.chunks_exact((8 / width) as usize) {
            let Some(line) = lines.next() else { unreachable!("an octet has as many lines as bits") };
            let mut words = [0; LANES];
            for (i, step) in together.iter().enumerate() {
                for (word, step) in words.iter_mut().zip(step) {
                    *word |= (step >> first & mask) << (width * i as u32);
                }
            }
            for (to, word) in line.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                *to = word.to_le_bytes();
            }
        }
    }
}

/// Writes the words of four lanes to a line of sixteen.
#[inline(always)]
fn store(line: &mut [u8], quad: usize, words: &[u32; BLOCK]) {
    for (to, word) in line[quad * BLOCK_BYTES..][..BLOCK_BYTES].as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
}

/// Four words of four rows, from byte `at` on, the rows' first words first. The compiler does not find the shuffles by itself:
/// spelled out, they make all of packing twice as fast.
///
/// # Safety
/// The rows have 16 bytes from `at` on.
#[inline(always)]
unsafe fn transposed(rows: &Rows, quad: usize, at: usize) -> [[u32; BLOCK]; BLOCK] {
    // SAFETY: the caller's; the instructions are part of every CPU of these architectures, and a vector is its words.
    unsafe {
        let row = |index: usize| rows[quad * BLOCK + index].add(at);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::*;
            let load = |index| _mm_loadu_si128(row(index).cast());
            let (a, b, c, d) = (load(0), load(1), load(2), load(3));
            let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
            std::mem::transmute([
                _mm_unpacklo_epi64(ab, cd),
                _mm_unpackhi_epi64(ab, cd),
                _mm_unpacklo_epi64(ab_high, cd_high),
                _mm_unpackhi_epi64(ab_high, cd_high),
            ])
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::aarch64::*;
            let load = |index| vreinterpretq_u32_u8(vld1q_u8(row(index)));
            let (a, b, c, d) = (load(0), load(1), load(2), load(3));
            let wide = |x| vreinterpretq_u64_u32(x);
            let (ab, cd) = (wide(vzip1q_u32(a, b)), wide(vzip1q_u32(c, d)));
            let (ab_high, cd_high) = (wide(vzip2q_u32(a, b)), wide(vzip2q_u32(c, d)));
            std::mem::transmute([
                vzip1q_u64(ab, cd),
                vzip2q_u64(ab, cd),
                vzip1q_u64(ab_high, cd_high),
                vzip2q_u64(ab_high, cd_high),
            ])
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            std::array::from_fn(|word| {
                std::array::from_fn(|index| {
                    u32::from_le_bytes(row(index).add(word * 4).cast::<[u8; 4]>().read())
                })
            })
        }
    }
}
