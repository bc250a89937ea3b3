//! Packing of any quantized format, group by group.

use super::planes::in_planes;
use super::write_header;
use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::fixed_point::{FixedPoint, HEADER_BYTES};
use crate::cpu::layout::matrix::{BLOCK32, STEP_BYTES, STEPS, record_bytes};
use crate::cpu::simd::LANES;
use crate::source::{GroupReader, GroupScale, MatrixSource, PackedFormat};

/// Columns of a step.
const STEP_COLUMNS: usize = BLOCK32 / STEPS;

/// Packs panels of a matrix whose format has a [`GroupReader`].
pub(super) struct GroupPacker<'a> {
    reader: Box<dyn GroupReader + 'a>,
    rows: usize,
    cols: usize,
    bits: u32,
    group: usize,
    /// Levels of a panel, `[16][cols]`; 0 in lanes beyond the matrix.
    levels: Vec<u8>,
    /// Of each group of a panel, for 16 rows; 0 in lanes beyond the matrix.
    scales: Vec<[f32; LANES]>,
    offsets: Vec<[f32; LANES]>,
}

impl<'a> GroupPacker<'a> {
    /// `None` for plain numbers.
    pub fn new(source: &MatrixSource<'a>) -> Option<Self> {
        let PackedFormat::Affine { bits, group } = source.encoding.packed() else { return None };
        let (rows, cols) = (source.rows, source.cols);
        let numbers = vec![[0.0; LANES]; cols / group];
        let levels = vec![0; LANES * cols];
        let reader = source.groups()?;
        Some(Self { reader, rows, cols, bits, group, levels, scales: numbers.clone(), offsets: numbers })
    }

    /// Packs one panel and sets the units of its rows.
    pub fn panel(&mut self, panel: usize, units: &mut [f32; LANES], out: &mut [u8]) {
        self.read(panel);
        of_bits!(self.bits, [Self::write], [], (self, units, out));
    }

    fn read(&mut self, panel: usize) {
        let first = panel * LANES;
        let present = LANES.min(self.rows - first);
        if present < LANES {
            self.levels.fill(0);
            self.scales.iter_mut().chain(&mut self.offsets).for_each(|numbers| numbers.fill(0.0));
        }
        for (lane, levels) in self.levels.chunks_exact_mut(self.cols.max(1)).take(present).enumerate() {
            for (group, levels) in levels.chunks_exact_mut(self.group).enumerate() {
                let GroupScale { scale, offset } = self.reader.group(first + lane, group, levels);
                (self.scales[group][lane], self.offsets[group][lane]) = (scale, offset);
            }
        }
    }

    fn write<const BITS: u32>(&mut self, units: &mut [f32; LANES], out: &mut [u8]) {
        let fixed = FixedPoint::of(BITS);
        *units = fixed.units(self.scales.iter().zip(&self.offsets));
        let inverse = FixedPoint::inverse(units);
        let mut column = 0;
        for (g, record) in out.chunks_exact_mut(record_bytes(BITS, self.group)).enumerate() {
            let (header, blocks) = record.split_at_mut(HEADER_BYTES);
            write_header(header, &fixed.encode(&inverse, &self.scales[g], &self.offsets[g]));
            for lines in blocks.chunks_exact_mut(BITS as usize * STEP_BYTES) {
                in_planes::<BITS>(&self.steps(column), lines.as_chunks_mut::<STEP_BYTES>().0);
                column += BLOCK32;
            }
        }
    }

    /// 32 columns from `column`: 4 columns of a row are the bytes of a word.
    fn steps(&self, column: usize) -> [[u32; LANES]; STEPS] {
        std::array::from_fn(|step| {
            std::array::from_fn(|lane| {
                let at = lane * self.cols + column + step * STEP_COLUMNS;
                let bytes = &self.levels[at..][..STEP_COLUMNS];
                u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
            })
        })
    }
}
