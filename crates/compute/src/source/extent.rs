//! Where a window of a matrix lies in the tensors of a file.

use std::ops::Range;

use super::Strided;
use super::encoding::Encoding;
use super::integers::{IntegerLayout, per_word};

/// Bytes of a 32-bit word.
const WORD_BYTES: usize = 4;

/// Bytes of some rows of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Rows of the tensor.
    pub rows: Range<usize>,
    /// Bytes of each of these rows.
    pub bytes: Range<usize>,
    /// Bytes from the start of one row to the start of the next.
    pub stride: usize,
}

impl Extent {
    /// These bytes of a whole tensor.
    ///
    /// # Panics
    /// When the tensor is smaller.
    pub fn of<'a>(&self, tensor: &'a [u8]) -> Strided<'a> {
        let (rows, row_bytes) = (self.rows.len(), self.bytes.len());
        let bytes = match rows == 0 || row_bytes == 0 {
            true => &[],
            false => {
                let start = self.rows.start * self.stride + self.bytes.start;
                &tensor[start..start + (rows - 1) * self.stride + row_bytes]
            }
        };
        Strided { bytes, stride: self.stride, row_bytes }
    }

    /// A window of a tensor whose rows have `units` numbers, from row `rows.start` on.
    fn plain(rows: Range<usize>, units: Range<usize>, all_units: usize, unit_bytes: usize) -> Self {
        let bytes = units.start * unit_bytes..units.end * unit_bytes;
        Self { rows, bytes, stride: all_units * unit_bytes }
    }
}

/// The window of a matrix that extents are wanted of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixWindow {
    /// Rows and columns of the whole matrix.
    pub shape: [usize; 2],
    /// Rows of the window.
    pub rows: Range<usize>,
    /// Columns of the window: whole column units.
    pub cols: Range<usize>,
}

/// `of` in units of `unit`, rounded outward; 0 stands for one unit that holds all.
fn units(of: &Range<usize>, unit: usize) -> Range<usize> {
    match unit {
        0 => 0..1.min(of.len()),
        unit => of.start / unit..of.end.div_ceil(unit),
    }
}

/// Units of `unit` that hold `count`.
fn unit_count(count: usize, unit: usize) -> usize {
    units(&(0..count), unit).len()
}

impl Encoding {
    /// Where the elements of a window are.
    pub fn weight_extent(self, window: &MatrixWindow) -> Extent {
        let MatrixWindow { shape: [all_rows, all_cols], rows, cols } = window;
        match self {
            Self::Integers { layout: IntegerLayout::Gptq { .. }, bits, .. } => {
                Extent::plain(units(cols, per_word(bits)), rows.clone(), *all_rows, WORD_BYTES)
            }
            Self::Integers { layout: IntegerLayout::Awq, bits, .. } => {
                let per = per_word(bits);
                Extent::plain(cols.clone(), units(rows, per), unit_count(*all_rows, per), WORD_BYTES)
            }
            _ => Extent {
                rows: rows.clone(),
                bytes: self.weight_bytes(cols.start)..self.weight_bytes(cols.end),
                stride: self.weight_bytes(*all_cols),
            },
        }
    }

    /// Where the scales of a window are, for encodings that store them apart.
    pub fn scale_extent(self, window: &MatrixWindow) -> Extent {
        let MatrixWindow { shape: [all_rows, all_cols], rows, cols } = window;
        match self {
            Self::Fp8 { block: [block_rows, block_cols], scales } => {
                let all = unit_count(*all_cols, block_cols);
                Extent::plain(units(rows, block_rows), units(cols, block_cols), all, scales.bytes())
            }
            Self::Integers { layout, group, scales, .. } if !layout.has_rows() => {
                Extent::plain(units(cols, group), rows.clone(), *all_rows, scales.bytes())
            }
            Self::Integers { group, scales, .. } => {
                Extent::plain(rows.clone(), units(cols, group), unit_count(*all_cols, group), scales.bytes())
            }
            _ => Extent {
                rows: rows.clone(),
                bytes: self.scale_bytes(cols.start)..self.scale_bytes(cols.end),
                stride: self.scale_bytes(*all_cols),
            },
        }
    }

    /// Where the offsets or zeros of a window are, for encodings that store them apart.
    pub fn offset_extent(self, window: &MatrixWindow) -> Extent {
        let MatrixWindow { shape: [all_rows, all_cols], rows, cols } = window;
        match self {
            Self::Integers { layout: IntegerLayout::RowsWithZeros, bits, group, .. } => {
                let all = unit_count(*all_cols, group);
                Extent::plain(units(rows, per_word(bits)), units(cols, group), all, WORD_BYTES)
            }
            Self::Integers { bits, group, .. } => {
                let per = per_word(bits);
                Extent::plain(units(cols, group), units(rows, per), unit_count(*all_rows, per), WORD_BYTES)
            }
            _ => self.scale_extent(window),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Block, Float, Fp8Scales};
    use super::*;

    /// A window's first and last elements are where those of the whole matrix are.
    #[test]
    fn windows_lie_inside_of_the_whole() {
        let integers = |layout| Encoding::Integers { layout, bits: 4, group: 32, scales: Float::F16 };
        for encoding in [
            Encoding::Float(Float::BF16),
            Encoding::Blocks(Block::Q4_0),
            Encoding::Mxfp8,
            Encoding::Fp8 { block: [16, 32], scales: Fp8Scales::Float(Float::F32) },
            Encoding::Fp8 { block: [1, 0], scales: Fp8Scales::Float(Float::F32) },
            integers(IntegerLayout::Rows),
            integers(IntegerLayout::RowsWithZeros),
            integers(IntegerLayout::Gptq { add: 1 }),
            integers(IntegerLayout::Awq),
        ] {
            let shape = [48, 128];
            let whole = MatrixWindow { shape, rows: 0..48, cols: 0..128 };
            let part = MatrixWindow { shape, rows: 21..43, cols: 32..96 };
            for extent in [Encoding::weight_extent, Encoding::scale_extent, Encoding::offset_extent] {
                let (whole, part) = (extent(encoding, &whole), extent(encoding, &part));
                assert_eq!(whole.bytes.len(), whole.stride, "{encoding:?}: rows follow each other");
                assert_eq!(part.stride, whole.stride, "{encoding:?}");
                assert!(part.rows.end <= whole.rows.end && part.bytes.end <= whole.bytes.end, "{encoding:?}");
                let tensor = vec![0; whole.rows.len() * whole.stride];
                assert_eq!(whole.of(&tensor).bytes.len(), tensor.len());
                let strided = part.of(&tensor);
                assert_eq!(strided.row(part.rows.len() - 1).len(), part.bytes.len(), "{encoding:?}");
            }
        }
        let gptq = integers(IntegerLayout::Gptq { add: 1 });
        let part = MatrixWindow { shape: [48, 128], rows: 21..43, cols: 32..96 };
        assert_eq!(gptq.weight_extent(&part), Extent { rows: 4..12, bytes: 84..172, stride: 192 });
        assert_eq!(gptq.offset_extent(&part), Extent { rows: 1..3, bytes: 8..24, stride: 24 });
        let fp8 = Encoding::Fp8 { block: [16, 32], scales: Fp8Scales::Float(Float::F32) };
        assert_eq!(fp8.scale_extent(&part), Extent { rows: 1..3, bytes: 4..12, stride: 16 });
    }
}
