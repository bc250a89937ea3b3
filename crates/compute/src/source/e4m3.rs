//! 8-bit floats: E4M3 of the OCP 8-bit floating point specification, without infinities.
//!
//! E4M3 numbers span 18 powers of two, so they do not fit 8 evenly spaced bits. In groups of 32
//! they become 8-bit levels whose step is 1/8 of the distance of the group's largest numbers:
//! numbers of at least 1/8 of the group's largest power of two keep their value, smaller ones move
//! by at most 1/128 of it.

use super::encoding::Fp8Scales;
use super::{GroupReader, GroupScale, MatrixSource, Strided, mxfp4};

/// Columns that share a step.
pub(super) const GROUP: usize = 32;
/// Bits of a level.
pub(super) const LEVEL_BITS: u32 = 8;
/// The level of 0.
const ZERO: u16 = 128;

/// The exponent of a code, and its fraction in units of 1/8 of that power of two. 1 stands for 2⁻⁶,
/// and for the numbers below it.
#[inline(always)]
const fn parts(code: u8) -> (u16, u16) {
    let (exponent, fraction) = ((code >> 3 & 15) as u16, (code & 7) as u16);
    if exponent == 0 { (1, fraction) } else { (exponent, 8 + fraction) }
}

/// The level of a code in a group whose largest number has this exponent. In bytes, without shifts
/// by other than constants, for vectors.
#[inline(always)]
pub(crate) const fn level(code: u8, largest: u8) -> u8 {
    let (exponent, fraction) = (code >> 3 & 15, code & 7);
    let [exponent, fraction] = if exponent == 0 { [1, fraction] } else { [exponent, 8 + fraction] };
    let shift = largest - exponent;
    let mut level = fraction << 4;
    level = if shift & 1 != 0 { level >> 1 } else { level };
    level = if shift & 2 != 0 { level >> 2 } else { level };
    level = if shift & 4 != 0 { level >> 4 } else { level };
    level = if shift & 8 != 0 { 0 } else { level };
    let level = (level + 1) >> 1;
    if code < 128 { 128 + level } else { 128 - level }
}

/// The value of a code. 0x7f and 0xff are NaN.
#[inline(always)]
pub(super) fn value(code: u8) -> f32 {
    let (exponent, fraction) = parts(code);
    let size = match code & 0x7f {
        0x7f => f32::NAN,
        _ => f32::from(fraction) * power(i32::from(exponent) - 10),
    };
    if code < 128 { size } else { -size }
}

/// `2^exponent` for normal numbers.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// The largest code of a group without its sign. By halves: of a plain fold the compiler makes 32
/// steps.
#[inline(always)]
fn largest(codes: &[u8; GROUP]) -> u8 {
    let mut largest = [0; GROUP / 2];
    for half in codes.as_chunks::<{ GROUP / 2 }>().0 {
        for (largest, code) in largest.iter_mut().zip(half) {
            *largest = (code & 0x7f).max(*largest);
        }
    }
    let mut width = GROUP / 4;
    while width > 0 {
        for index in 0..width {
            largest[index] = largest[index].max(largest[index + width]);
        }
        width /= 2;
    }
    largest[0]
}

/// The scale of a group whose largest code is `largest`, at least 8; `scale` multiplies its
/// numbers.
#[inline(always)]
pub(crate) fn group_scale(largest: u8, scale: f32) -> GroupScale {
    // Garbage in a file must show in the results.
    let scale = if largest == 0x7f { f32::NAN } else { scale * power(i32::from(largest >> 3) - 13) };
    GroupScale { scale, offset: -f32::from(ZERO) * scale }
}

/// Writes the levels of a group of codes; `scale` multiplies them.
#[inline(always)]
fn group_levels(codes: &[u8; GROUP], levels: &mut [u8; GROUP], scale: f32) -> GroupScale {
    let largest = largest(codes).max(8);
    for (to, code) in levels.iter_mut().zip(codes) {
        *to = level(*code, largest >> 3);
    }
    group_scale(largest, scale)
}

/// The levels of a group.
#[inline(always)]
fn of_group(levels: &mut [u8]) -> &mut [u8; GROUP] {
    let Some(levels) = levels.first_chunk_mut() else { unreachable!("a group has {GROUP} levels") };
    levels
}

/// Rows of codes with a row of E8M0 scales apart, one for 32 columns: OCP's MXFP8.
pub(super) struct Mxfp8Reader<'a> {
    weight: Strided<'a>,
    scales: Strided<'a>,
}

impl<'a> Mxfp8Reader<'a> {
    pub fn new(source: &MatrixSource<'a>) -> Self {
        let Some(scales) = source.scales else { unreachable!("MXFP8 sources have scales") };
        Self { weight: source.weight, scales }
    }
}

impl GroupReader for Mxfp8Reader<'_> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let codes = &self.weight.row(row).as_chunks().0[group];
        group_levels(codes, of_group(levels), mxfp4::e8m0(self.scales.row(row)[group]))
    }

    fn scales(&mut self, row: usize, _width: usize, scales: &mut [GroupScale]) {
        for (to, bits) in scales.iter_mut().zip(self.scales.row(row)) {
            *to = GroupScale { scale: mxfp4::e8m0(*bits), offset: 0.0 };
        }
    }
}

/// Rows of codes with a scale for each block of rows and columns.
pub(super) struct BlockScaledReader<'a> {
    weight: Strided<'a>,
    scales: Strided<'a>,
    format: Fp8Scales,
    /// Rows and columns of a block; 0 stands for all.
    block: [usize; 2],
    /// Rows of the first block that lie before the window.
    before: usize,
}

impl<'a> BlockScaledReader<'a> {
    pub fn new(source: &MatrixSource<'a>, block: [usize; 2], format: Fp8Scales) -> Self {
        let Some(scales) = source.scales else { unreachable!("FP8 sources have scales") };
        let before = source.first_row.checked_rem(block[0]).unwrap_or(0);
        Self { weight: source.weight, scales, format, block, before }
    }
}

impl GroupReader for BlockScaledReader<'_> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, levels: &mut [u8]) -> GroupScale {
        let [rows, cols] = self.block;
        let at = [(self.before + row).checked_div(rows), (group * GROUP).checked_div(cols)];
        let [block_row, block_col] = at.map(|index| index.unwrap_or(0));
        let scale = self.format.at(self.scales.row(block_row), block_col);
        group_levels(&self.weight.row(row).as_chunks().0[group], of_group(levels), scale)
    }

    fn scales(&mut self, row: usize, _width: usize, scales: &mut [GroupScale]) {
        let [rows, cols] = self.block;
        let stored = self.scales.row((self.before + row).checked_div(rows).unwrap_or(0));
        let together = if cols == 0 { scales.len() } else { cols / GROUP };
        for (block, scales) in scales.chunks_mut(together.max(1)).enumerate() {
            scales.fill(GroupScale { scale: self.format.at(stored, block), offset: 0.0 });
        }
    }

    /// Block by block: a division for each group would take longer than the group.
    #[inline(always)]
    fn row_inlined(&mut self, row: usize, levels: &mut [u8], scales: &mut [GroupScale]) {
        let [rows, cols] = self.block;
        let stored = self.scales.row((self.before + row).checked_div(rows).unwrap_or(0));
        let together = if cols == 0 { scales.len() } else { cols / GROUP };
        let mut codes = self.weight.row(row).as_chunks().0.iter();
        let mut levels = levels.as_chunks_mut().0.iter_mut();
        for (block, scales) in scales.chunks_mut(together.max(1)).enumerate() {
            let factor = self.format.at(stored, block);
            for ((scale, codes), levels) in scales.iter_mut().zip(&mut codes).zip(&mut levels) {
                *scale = group_levels(codes, levels, factor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the specification's table: largest 448, smallest normal 2⁻⁶, smallest 2⁻⁹.
    #[test]
    fn codes_have_their_values() {
        for (code, expected) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 0.875 * 2f32.powi(-6)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0x7e, 448.0),
        ] {
            assert_eq!(value(code), expected, "{code:#x}");
            assert_eq!(value(code | 0x80), -expected, "{code:#x}");
        }
        assert!(value(0x7f).is_nan() && value(0xff).is_nan());
    }

    #[test]
    fn large_numbers_of_a_group_are_exact_and_small_ones_near() {
        for largest in 1..0x7f_u8 {
            let mut codes = [0; GROUP];
            let mut levels = [0; GROUP];
            for first in (0..=largest).step_by(GROUP - 1) {
                for (index, code) in codes.iter_mut().skip(1).enumerate() {
                    *code = (first + index as u8).min(largest) | (index as u8 & 1) << 7;
                }
                codes[0] = largest;
                let GroupScale { scale, offset } = group_levels(&codes, &mut levels, 3.0);
                let top = value(largest & 0x78).max(2f32.powi(-6));
                for (code, level) in codes.iter().zip(levels) {
                    let (exact, found) = (value(*code), (scale * f32::from(level) + offset) / 3.0);
                    let allowed = if exact.abs() >= top / 8.0 { 0.0 } else { top / 128.0 };
                    assert!(
                        (exact - found).abs() <= allowed,
                        "{code:#x} below {largest:#x}: {found} for {exact}"
                    );
                }
            }
        }
    }

    #[test]
    fn nan_shows_in_the_group() {
        let mut codes = [0x38; GROUP];
        codes[7] = 0xff;
        assert!(group_levels(&codes, &mut [0; GROUP], 1.0).scale.is_nan());
    }
}
