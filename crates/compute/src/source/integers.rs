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
    turned: Turned,
    /// Scales of the file's groups, of one row.
    numbers: Vec<f32>,
    /// Scales of rows that lie next to each other in the file, for each of its groups.
    turned_scales: Vec<[GroupScale; TURNED]>,
    /// Which rows: this many times [`TURNED`] come before.
    scales_block: Option<usize>,
}

/// Levels of rows that lie next to each other in each column of the file.
#[derive(Default)]
struct Turned {
    levels: Vec<u8>,
    /// From one row to the next. No power of two, or all rows would share few lines of a cache.
    stride: usize,
    /// Which rows: this many times [`TURNED`] come before.
    block: Option<usize>,
}

/// Rows that are turned together: a cache line of GPTQ's words.
const TURNED: usize = 16;
/// Cache lines that are read together: the memory answers several at a time.
const TOGETHER: usize = 8;

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
        let turned = Turned { stride: source.cols + 64, ..Turned::default() };
        let (weight, zeros) = (source.weight, source.offsets);
        Self {
            layout,
            bits,
            group,
            float,
            weight,
            scales,
            zeros,
            before,
            turned,
            numbers: Vec::new(),
            turned_scales: Vec::new(),
            scales_block: None,
        }
    }

    /// Number `index` of a row of words.
    #[inline(always)]
    fn number(&self, words: &[u8], index: usize) -> u8 {
        let bit = index * self.bits as usize;
        words[bit / 8] >> (bit % 8) & self.mask()
    }

    #[inline(always)]
    fn mask(&self) -> u8 {
        ((1u16 << self.bits) - 1) as u8
    }

    /// The zero of a row in a group of the file.
    #[inline(always)]
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

    /// The scale of a row in the group that begins at column `first`.
    #[inline(always)]
    fn scale(&self, row: usize, first: usize) -> GroupScale {
        let group = first.checked_div(self.group).unwrap_or(0);
        let scale = match self.layout.has_rows() {
            true => self.float.at(self.scales.row(row), group),
            false => self.float.at(self.scales.row(group), row),
        };
        GroupScale { scale, offset: -f32::from(self.zero(row, group)) * scale }
    }

    /// Reads the scales of the rows of a block, unless they are there.
    fn turn_scales(&mut self, block: usize) {
        if self.scales_block == Some(block) {
            return;
        }
        self.scales_block = Some(block);
        let first = block * TURNED;
        let mut turned = std::mem::take(&mut self.turned_scales);
        turned.resize(self.scales.bytes.len().div_ceil(self.scales.stride.max(1)), Default::default());
        for (group, turned) in turned.iter_mut().enumerate() {
            let mut numbers = [0.0; TURNED];
            self.float.decode(&self.scales.row(group)[first * self.float.bytes()..], &mut numbers);
            let rows = TURNED.min(self.scales.row_bytes / self.float.bytes() - first);
            for (lane, (to, scale)) in turned[..rows].iter_mut().zip(numbers).enumerate() {
                *to = GroupScale { scale, offset: -f32::from(self.zero(first + lane, group)) * scale };
            }
        }
        self.turned_scales = turned;
    }

    /// Turns all columns of the rows of a block, unless they are there.
    #[inline(always)]
    fn turn(&mut self, block: usize) {
        if self.turned.block == Some(block) {
            return;
        }
        self.turned.block = Some(block);
        let (stride, cols) = (self.turned.stride, self.turned.stride - 64);
        self.turned.levels.resize(TURNED * stride, 0);
        let rows = self.turned.levels.chunks_exact_mut(stride);
        match self.layout {
            IntegerLayout::Awq => {
                let mut rows: Vec<&mut [[u8; 8]]> = rows.map(|row| row.as_chunks_mut().0).collect();
                for first in (0..cols).step_by(8) {
                    let words: [u64; 8] =
                        std::array::from_fn(|col| eight_bytes(&self.weight.row(first + col)[8 * block..]));
                    for (odd, shift) in [0, 4].into_iter().enumerate() {
                        for (byte, levels) in
                            transposed(words.map(|word| (word >> shift) & LOW)).iter().enumerate()
                        {
                            rows[awq_row(2 * byte + odd)][first / 8] = levels.to_le_bytes();
                        }
                    }
                }
            }
            _ => {
                let per_word = per_word(self.bits);
                let mut rows: Vec<&mut [u8]> = rows.collect();
                let mut words = [[[0; WORD_BYTES]; TURNED]; TOGETHER];
                for first in (0..cols / per_word).step_by(TOGETHER) {
                    let count = TOGETHER.min(cols / per_word - first);
                    for (word, to) in words[..count].iter_mut().enumerate() {
                        let stored = self.weight.row(first + word)[TURNED * WORD_BYTES * block..].as_chunks();
                        to.iter_mut().zip(stored.0).for_each(|(to, word)| *to = *word);
                    }
                    for (lane, row) in rows.iter_mut().enumerate() {
                        let levels = &mut row[first * per_word..][..count * per_word];
                        for (word, to) in words.iter().zip(levels.chunks_exact_mut(per_word)) {
                            match self.bits {
                                4 => to.copy_from_slice(&spread(u32::from_le_bytes(word[lane]))),
                                _ => to.copy_from_slice(&word[lane]),
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The lower nibble of each byte.
const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// The nibbles of a word, the lowest first.
#[inline(always)]
fn spread(word: u32) -> [u8; 8] {
    let mut wide = u64::from(word);
    for (shift, mask) in [(16, 0x0000_ffff_0000_ffff), (8, 0x00ff_00ff_00ff_00ff), (4, LOW)] {
        wide = (wide | (wide << shift)) & mask;
    }
    wide.to_le_bytes()
}

/// The first eight bytes, or four at the end of a window, and zeros.
#[inline(always)]
fn eight_bytes(bytes: &[u8]) -> u64 {
    match bytes.first_chunk() {
        Some(eight) => u64::from_le_bytes(*eight),
        None => bytes.first_chunk().map_or(0, |four| u64::from(u32::from_le_bytes(*four))),
    }
}

/// Rows and columns of eight bytes by eight, exchanged.
#[inline(always)]
fn transposed(mut rows: [u64; 8]) -> [u64; 8] {
    for (distance, mask) in
        [(4, 0x0000_0000_ffff_ffff), (2, 0x0000_ffff_0000_ffff), (1, 0x00ff_00ff_00ff_00ff)]
    {
        for row in (0..8).filter(|row| row & distance == 0) {
            let exchanged = ((rows[row] >> (8 * distance)) ^ rows[row + distance]) & mask;
            rows[row + distance] ^= exchanged;
            rows[row] ^= exchanged << (8 * distance);
        }
    }
    rows
}

/// Where AWQ's words have the number of a row.
const fn awq_place(row: usize) -> usize {
    let within = row % 8;
    row - within + within / 2 + 4 * (within % 2)
}

/// The row whose number AWQ's words have at a place.
const fn awq_row(place: usize) -> usize {
    let within = place % 8;
    place - within + 2 * (within % 4) + within / 4
}

impl GroupReader for IntegerReader<'_> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let first = group * levels.len();
        match self.layout {
            IntegerLayout::Rows | IntegerLayout::RowsWithZeros => {
                let bytes = &self.weight.row(row)[first * self.bits as usize / 8..];
                match self.bits {
                    4 => {
                        for (pair, byte) in levels.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                            *pair = [byte & 15, byte >> 4];
                        }
                    }
                    _ => levels.copy_from_slice(&bytes[..levels.len()]),
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
        self.scale(row, first)
    }

    fn scales(&mut self, row: usize, width: usize, scales: &mut [GroupScale]) {
        // Groups in memory are parts of the file's.
        let parts = if self.group == 0 { scales.len() } else { self.group / width };
        let parts = scales.chunks_mut(parts.max(1)).enumerate();
        if !self.layout.has_rows() {
            self.turn_scales(row / TURNED);
            parts.for_each(|(group, parts)| parts.fill(self.turned_scales[group][row % TURNED]));
            return;
        }
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.resize(self.scales.row_bytes / self.float.bytes(), 0.0);
        self.float.decode(self.scales.row(row), &mut numbers);
        for ((group, parts), scale) in parts.zip(&numbers) {
            let offset = -f32::from(self.zero(row, group)) * scale;
            parts.fill(GroupScale { scale: *scale, offset });
        }
        self.numbers = numbers;
    }

    /// Where columns are stored, sixteen rows are read at once: each column lies in another page.
    #[inline(always)]
    fn row_inlined(&mut self, row: usize, levels: &mut [u8], scales: &mut [GroupScale]) {
        let width = levels.len() / scales.len().max(1);
        let place = match self.layout {
            IntegerLayout::Rows | IntegerLayout::RowsWithZeros => {
                for (group, scale) in scales.iter_mut().enumerate() {
                    *scale = self.group(row, group, &mut levels[group * width..][..width]);
                }
                return;
            }
            IntegerLayout::Gptq { .. } => row,
            // Words begin with a row before the window.
            IntegerLayout::Awq => self.before + row,
        };
        self.turn(place / TURNED);
        levels.copy_from_slice(&self.turned.levels[place % TURNED * self.turned.stride..][..levels.len()]);
        for (group, scale) in scales.iter_mut().enumerate() {
            *scale = self.scale(row, group * width);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_and_bytes_change_places() {
        assert_eq!(spread(0xfedc_ba98), [8, 9, 10, 11, 12, 13, 14, 15]);
        let rows =
            std::array::from_fn(|row| u64::from_le_bytes(std::array::from_fn(|col| (10 * row + col) as u8)));
        for (col, turned) in transposed(rows).iter().enumerate() {
            assert_eq!(turned.to_le_bytes(), std::array::from_fn(|row| (10 * row + col) as u8));
        }
        for row in 0..16 {
            assert_eq!(awq_row(awq_place(row)), row);
        }
    }
}
