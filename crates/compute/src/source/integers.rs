//! Integers of 4 or 8 bits with a scale for each group of a row, as quantizers for GPUs store them:
//! GPTQ, AWQ and compressed-tensors. Levels, scales and zeros are kept as they are.
//!
//! A weight is `scale * (level − zero)`. All pack numbers into little-endian 32-bit words.

use super::{Float, GroupReader, GroupScale, MatrixSource, Strided};

/// Bits of a word.
const WORD_BITS: usize = 32;
/// Bytes of a word.
const WORD_BYTES: usize = 4;

/// Where integers lie in their tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntegerLayout {
    /// compressed-tensors: words of a row's columns, `[rows, words]`; scales `[rows, groups]`. The
    /// zero is the middle level.
    Rows,
    /// compressed-tensors with zeros: as [`IntegerLayout::Rows`], and zeros in words of rows,
    /// `[words, groups]`.
    RowsWithZeros,
    /// GPTQ: words of columns, `[words, rows]`; scales `[groups, rows]`; zeros in words of rows,
    /// `[groups, words]`.
    Gptq {
        /// Added to stored zeros: 1 in the first version of the format, 0 in the second.
        add: u8,
    },
    /// AWQ, 4 bits: words of rows, `[columns, words]`, eight rows in the order 0, 2, 4, 6, 1, 3,
    /// 5, 7; zeros likewise, `[groups, words]`; scales `[groups, rows]`.
    Awq,
}

impl IntegerLayout {
    /// True if the tensor of levels has a row for each row of the matrix.
    pub(super) const fn has_rows(self) -> bool {
        matches!(self, Self::Rows | Self::RowsWithZeros)
    }

    /// True if zeros are stored.
    pub(super) const fn has_zeros(self) -> bool {
        !matches!(self, Self::Rows)
    }
}

/// Numbers of this many bits in a word.
pub(super) const fn per_word(bits: u32) -> usize {
    WORD_BITS / bits as usize
}

/// Columns of a group in memory, if a group in the file has `group` columns; 0 stands for all.
pub(super) const fn packed_group(group: usize) -> usize {
    if group == 0 || group.is_multiple_of(128) {
        128
    } else if group.is_multiple_of(64) {
        64
    } else {
        32
    }
}

/// Reads integers of any layout.
pub(super) struct IntegerReader<'a> {
    layout: IntegerLayout,
    bits: u32,
    group: usize,
    float: Float,
    weight: Strided<'a>,
    scales: Strided<'a>,
    zeros: Option<Strided<'a>>,
    /// Rows of the first word that lie before the window.
    before: usize,
}

impl<'a> IntegerReader<'a> {
    pub fn new(
        source: &MatrixSource<'a>,
        layout: IntegerLayout,
        bits: u32,
        group: usize,
        float: Float,
    ) -> Self {
        let Some(scales) = source.scales else { unreachable!("integers have scales") };
        assert_eq!(source.offsets.is_some(), layout.has_zeros(), "zeros, where the layout has them");
        let before = source.first_row % per_word(bits);
        Self { layout, bits, group, float, weight: source.weight, scales, zeros: source.offsets, before }
    }

    /// Number `index` of a row of words.
    #[inline(always)]
    fn number(&self, words: &[u8], index: usize) -> u8 {
        let bit = index * self.bits as usize;
        words[bit / 8] >> (bit % 8) & self.mask()
    }

    fn mask(&self) -> u8 {
        ((1u16 << self.bits) - 1) as u8
    }

    /// The zero of a row in a group of the file.
    fn zero(&self, row: usize, group: usize) -> u8 {
        let Some(zeros) = &self.zeros else { return 1 << (self.bits - 1) };
        let row = self.before + row;
        match self.layout {
            IntegerLayout::Rows => unreachable!("these integers have no zeros"),
            IntegerLayout::RowsWithZeros => {
                let (word, within) = (row / per_word(self.bits), row % per_word(self.bits));
                self.number(&zeros.row(word)[group * WORD_BYTES..], within)
            }
            IntegerLayout::Gptq { add } => self.number(zeros.row(group), row).wrapping_add(add) & self.mask(),
            IntegerLayout::Awq => self.number(zeros.row(group), awq_place(row)),
        }
    }
}

/// Where AWQ's words have the number of a row.
const fn awq_place(row: usize) -> usize {
    let within = row % 8;
    row - within + within / 2 + 4 * (within % 2)
}

impl GroupReader for IntegerReader<'_> {
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let first = group * levels.len();
        match self.layout {
            IntegerLayout::Rows | IntegerLayout::RowsWithZeros => {
                let words = self.weight.row(row);
                for (index, level) in levels.iter_mut().enumerate() {
                    *level = self.number(words, first + index);
                }
            }
            IntegerLayout::Gptq { .. } => {
                let per_word = per_word(self.bits);
                for (index, levels) in levels.chunks_exact_mut(per_word).enumerate() {
                    let word = &self.weight.row(first / per_word + index)[row * WORD_BYTES..];
                    for (index, level) in levels.iter_mut().enumerate() {
                        *level = self.number(word, index);
                    }
                }
            }
            IntegerLayout::Awq => {
                let place = awq_place(self.before + row);
                for (index, level) in levels.iter_mut().enumerate() {
                    *level = self.number(self.weight.row(first + index), place);
                }
            }
        }
        let group = first.checked_div(self.group).unwrap_or(0);
        let scale = match self.layout.has_rows() {
            true => self.float.at(self.scales.row(row), group),
            false => self.float.at(self.scales.row(group), row),
        };
        GroupScale { scale, offset: -f32::from(self.zero(row, group)) * scale }
    }
}
