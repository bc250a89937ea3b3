//! Packing of any quantized format, group by group.

use super::codes;
use super::planes::in_planes;
#[cfg(target_arch = "x86_64")]
use super::transpose::transposed_all;
use super::transpose::{QUAD, QUAD_BYTES, Rows, transposed};
use super::words::{Line, Panel, Words};
use super::write_header;
use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::fixed_point::FixedPoint;
use crate::cpu::layout::matrix::{
    BLOCK32, E2M1, FACTOR_BYTES, FACTOR_COLUMNS, Headers, IQ4, Record, STEP_BYTES, STEPS, block_bytes,
    format_of,
};
use crate::cpu::simd::LANES;
use crate::cpu::simd::widest::{Work, widest};
use crate::source::blocks::tables;
use crate::source::{
    Encoding, GroupReader, GroupScale, MatrixSource, PackedFormat, RowOrder, Strided, e4m3, mxfp4,
};

/// Packs panels of a matrix whose format has a [`GroupReader`].
pub(super) struct GroupPacker<'a> {
    reader: Box<dyn GroupReader + 'a>,
    row_order: RowOrder,
    /// Stored rows before those of the source's tensors.
    before: usize,
    rows: usize,
    cols: usize,
    bits: u32,
    group: usize,
    /// The middle level of each group is 0.
    symmetric: bool,
    headers: Headers,
    /// The file's words, where these become lines without levels between.
    words: Option<Words<'a>>,
    /// The file's E4M3 numbers, where 16 rows of them become lines at once, and the row of lanes
    /// beyond the matrix.
    e4m3: Option<(Strided<'a>, Vec<u8>)>,
    /// Levels or codes of a panel, `[16][cols]`, or its lines; 0 in lanes beyond the matrix.
    levels: Vec<u8>,
    /// Of each group of a panel, for 16 rows; 0 in lanes beyond the matrix.
    scales: Vec<[f32; LANES]>,
    offsets: Vec<[f32; LANES]>,
    /// Of scales and of offsets, for each 256 columns of a panel.
    factors: Vec<[[f32; LANES]; 2]>,
    /// Of one row.
    row: Vec<GroupScale>,
    row_factors: Vec<[f32; 2]>,
}

impl<'a> GroupPacker<'a> {
    /// `None` for plain numbers. `lines`: memory for [`Words`]; without it, the levels of each row
    /// are read.
    pub fn new(
        source: &MatrixSource<'a>,
        before: usize,
        headers: Headers,
        lines: Option<&'a mut Vec<Line>>,
    ) -> Option<Self> {
        let PackedFormat::Affine { bits, group } = format_of(source.encoding) else { return None };
        let (rows, cols) = (source.rows, source.cols);
        let numbers = || vec![[0.0; LANES]; cols / group];
        let blocks = if headers.factored { cols / FACTOR_COLUMNS } else { 0 };
        let is_e4m3 = matches!(source.encoding, Encoding::Fp8 { .. } | Encoding::Mxfp8) && lines.is_some();
        let words = lines.and_then(|lines| Words::new(source, lines));
        Some(Self {
            reader: source.groups()?,
            row_order: source.row_order,
            before,
            rows,
            cols,
            bits,
            group,
            symmetric: source.encoding.is_symmetric(),
            headers,
            levels: vec![0; if words.is_some() { 0 } else { LANES * cols }],
            words,
            e4m3: is_e4m3.then(|| (source.weight, vec![0; cols])),
            scales: numbers(),
            offsets: numbers(),
            factors: vec![[[0.0; LANES]; 2]; blocks],
            row: vec![GroupScale::default(); cols / group],
            row_factors: vec![[0.0; 2]; blocks],
        })
    }

    /// Packs one panel and sets the units of its rows. `WIDE`: on a CPU with AVX-512.
    #[inline(always)]
    pub fn panel<const WIDE: bool>(&mut self, panel: usize, units: &mut [f32; LANES], out: &mut [u8]) {
        match (self.e4m3.is_some(), WIDE) {
            (true, true) => self.read_e4m3::<true>(panel),
            (true, false) => widest(ReadE4m3(self, panel)),
            (false, _) => self.read(panel),
        }
        of_bits!(self.bits, [Self::write], [WIDE], (self, panel, units, out));
    }

    /// Stored rows of a panel's lanes, from the first of the source's tensors.
    fn lanes(&self, panel: usize) -> [Option<usize>; LANES] {
        let outputs = panel * LANES..self.rows.min((panel + 1) * LANES);
        std::array::from_fn(|lane| {
            let output = outputs.start + lane;
            outputs.contains(&output).then(|| self.row_order.stored(output) - self.before)
        })
    }

    fn read(&mut self, panel: usize) {
        let lanes = self.lanes(panel);
        let present = lanes.iter().flatten().count();
        if present < LANES {
            self.levels.fill(0);
            self.scales.iter_mut().chain(&mut self.offsets).for_each(|numbers| numbers.fill(0.0));
            self.factors.as_flattened_mut().iter_mut().for_each(|numbers| numbers.fill(0.0));
        }
        for (lane, row) in lanes.into_iter().flatten().enumerate() {
            if self.words.is_some() {
                self.reader.scales(row, self.group, &mut self.row);
            } else {
                let levels = &mut self.levels[lane * self.cols..][..self.cols];
                self.reader.row(row, levels, &mut self.row);
                match self.bits {
                    E2M1 => widest(Encode(levels, mxfp4::code)),
                    IQ4 => widest(Encode(levels, tables::code)),
                    _ => {}
                }
            }
            self.reader.factors(row, &mut self.row_factors);
            for (to, factors) in self.factors.iter_mut().zip(&self.row_factors) {
                (to[0][lane], to[1][lane]) = (factors[0], factors[1]);
            }
            let numbers = self.scales.iter_mut().zip(&mut self.offsets);
            for ((scales, offsets), row) in numbers.zip(&self.row) {
                (scales[lane], offsets[lane]) = (row.scale, row.offset);
            }
        }
    }

    /// As [`Self::read`], for E4M3 numbers. `WIDE`: on a CPU with AVX-512.
    #[inline(always)]
    fn read_e4m3<const WIDE: bool>(&mut self, panel: usize) {
        let lanes = self.lanes(panel);
        let Some((weight, zeros)) = &self.e4m3 else { unreachable!("the file has E4M3 numbers") };
        let rows: Rows = lanes.map(|row| row.map_or(&**zeros, |row| weight.row(row)).as_ptr());
        let blocks = self.levels.as_chunks_mut::<STEP_BYTES>().0.chunks_exact_mut(STEPS);
        let mut present = 0;
        for (lane, row) in lanes.into_iter().flatten().enumerate() {
            self.reader.scales(row, self.group, &mut self.row);
            self.scales.iter_mut().zip(&self.row).for_each(|(scales, row)| scales[lane] = row.scale);
            present = lane + 1;
        }
        let numbers = self.scales.iter_mut().zip(&mut self.offsets);
        for ((index, lines), (scales, offsets)) in blocks.enumerate().zip(numbers) {
            // SAFETY: a row has these 32 columns; `WIDE` with AVX-512.
            let largest = unsafe { codes::block::<WIDE>(&rows, index * BLOCK32, lines) };
            for lane in 0..LANES {
                let GroupScale { scale, offset } = e4m3::group_scale(largest[lane], scales[lane]);
                (scales[lane], offsets[lane]) = (scale, offset);
            }
            if present < LANES {
                scales[present..].fill(0.0);
                offsets[present..].fill(0.0);
                lines.iter_mut().for_each(|line| line[present * size_of::<u32>()..].fill(0));
            }
        }
    }

    #[inline(always)]
    fn write<const WIDE: bool, const BITS: u32>(
        &mut self,
        panel: usize,
        units: &mut [f32; LANES],
        out: &mut [u8],
    ) {
        let lanes = self.lanes(panel);
        let fixed = FixedPoint::of(BITS);
        *units = fixed.units(self.scales.iter().zip(&self.offsets));
        if self.headers.factored {
            *units = FixedPoint::powers_of_two(*units);
        }
        let mut factors = self.factors.iter();
        let inverse = FixedPoint::inverse(units);
        let (mut column, mut numbers) = (0, self.scales.iter().zip(&self.offsets));
        let words = match &self.e4m3 {
            Some(_) => Some(Panel::Lines(self.levels.as_chunks().0)),
            None => self.words.as_mut().map(|words| words.panel(panel, lanes)),
        };
        let rows: Rows = match words {
            Some(_) => [std::ptr::null(); LANES],
            None => std::array::from_fn(|lane| self.levels[lane * self.cols..].as_ptr()),
        };
        let record = Record::of(BITS, self.group, self.headers);
        for bytes in out.chunks_exact_mut(record.bytes) {
            let (mut headers, blocks) = bytes.split_at_mut(record.header_bytes);
            let factors = if self.headers.factored { factors.next() } else { None };
            if let Some(factors) = factors {
                let (to, rest) = headers.split_at_mut(FACTOR_BYTES);
                let encoded = fixed.encode_factors(&inverse, factors);
                for (to, factor) in to.as_chunks_mut::<2>().0.iter_mut().zip(encoded.as_flattened()) {
                    *to = factor.to_le_bytes();
                }
                headers = rest;
            }
            let group_bytes = self.headers.group_bytes();
            let headers = headers.chunks_exact_mut(group_bytes).take(record.columns / self.group);
            for (header, (scales, offsets)) in headers.zip(&mut numbers) {
                if let Some(factors) = factors {
                    write_bytes(header, factors, [scales, offsets]);
                    continue;
                }
                let encoded = match self.symmetric {
                    true => fixed.encode_symmetric(&inverse, scales),
                    false => fixed.encode(&inverse, scales, offsets),
                };
                write_header(header, &encoded);
            }
            for lines in blocks.chunks_exact_mut(block_bytes(BITS)) {
                let lines = lines.as_chunks_mut::<STEP_BYTES>().0;
                // SAFETY: the words, or a row of levels, a byte each, have these 32 columns; `WIDE`
                // with AVX-512.
                unsafe {
                    match &words {
                        Some(words) => words.block::<WIDE, BITS>(column, lines),
                        None => in_planes::<WIDE, BITS>(&steps::<WIDE>(&rows, column), lines),
                    }
                }
                column += BLOCK32;
            }
        }
    }
}

/// Reads a panel of E4M3 numbers.
struct ReadE4m3<'a, 'b>(&'a mut GroupPacker<'b>, usize);

impl Work for ReadE4m3<'_, '_> {
    #[inline(always)]
    fn run(self) {
        self.0.read_e4m3::<false>(self.1);
    }
}

/// Writes the 16 scales of a group in units of their factors, and the offsets if the header has
/// room for them.
#[inline(always)]
fn write_bytes(header: &mut [u8], factors: &[[f32; LANES]; 2], numbers: [&[f32; LANES]; 2]) {
    /// Adding this leaves the nearest integer in the lowest bits; saturating casts are slow.
    const ROUNDING: f32 = 1.5 * (1 << 23) as f32;
    for ((to, factors), numbers) in header.as_chunks_mut::<LANES>().0.iter_mut().zip(factors).zip(numbers) {
        for lane in 0..LANES {
            // A number is an exact product of its factor, which may be 0.
            to[lane] = (numbers[lane] / factors[lane] + ROUNDING).to_bits() as u8;
        }
    }
}

/// Makes codes of levels.
struct Encode<'a, F>(&'a mut [u8], F);

impl<F: Fn(u8) -> u8> Work for Encode<'_, F> {
    #[inline(always)]
    fn run(self) {
        for level in self.0 {
            *level = self.1(*level);
        }
    }
}

/// 32 columns of levels from `column`: 4 columns of a row are the bytes of a word.
///
/// # Safety
/// The rows have these columns; the CPU has AVX-512 if `WIDE`.
#[inline(always)]
pub(super) unsafe fn steps<const WIDE: bool>(rows: &Rows, column: usize) -> [[u32; LANES]; STEPS] {
    let mut steps = [[0; LANES]; STEPS];
    for (first, steps) in (column..).step_by(QUAD_BYTES).zip(steps.chunks_exact_mut(QUAD)) {
        #[cfg(target_arch = "x86_64")]
        if WIDE {
            // SAFETY: the caller's.
            let words = unsafe { transposed_all(rows, first) };
            for (step, words) in steps.iter_mut().zip(words) {
                // SAFETY: a step has the words of a register.
                unsafe { std::arch::x86_64::_mm512_storeu_si512(step.as_mut_ptr().cast(), words) };
            }
            continue;
        }
        for quad in 0..LANES / QUAD {
            // SAFETY: the caller's.
            let words = unsafe { transposed(rows, quad, first) };
            for (step, words) in steps.iter_mut().zip(words) {
                step[quad * QUAD..][..QUAD].copy_from_slice(&words);
            }
        }
    }
    steps
}
