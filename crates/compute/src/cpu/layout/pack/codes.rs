//! E4M3 numbers become levels of 8 bits, 16 rows at once: see `source/e4m3.rs`, which does the same
//! for one row.

use super::groups::steps;
use super::transpose::Rows;
use super::words::Line;
use crate::cpu::simd::LANES;
use crate::source::e4m3::level;

/// The largest code of each row in a block, without signs.
pub(super) type Largest = [u8; LANES];

/// Writes the lines of 32 columns from `column`, which are a group. `WIDE`: with AVX-512.
///
/// # Safety
/// The rows have these columns, a byte each; the CPU has AVX-512 if `WIDE`.
#[inline(always)]
pub(super) unsafe fn block<const WIDE: bool>(rows: &Rows, column: usize, lines: &mut [Line]) -> Largest {
    // SAFETY: the caller's.
    let steps = unsafe { steps::<WIDE>(rows, column) };
    let mut largest = [0u8; 4 * LANES];
    for (line, step) in lines.iter_mut().zip(&steps) {
        for (to, word) in line.as_chunks_mut().0.iter_mut().zip(step) {
            *to = word.to_le_bytes();
        }
        for (largest, code) in largest.iter_mut().zip(&*line) {
            *largest = (code & 0x7f).max(*largest);
        }
    }
    let mut of_rows = [0u32; LANES];
    let mut exponents = [[0; 4]; LANES];
    let rows = largest.as_chunks().0.iter().zip(&mut of_rows).zip(&mut exponents);
    for ((bytes, largest), exponents) in rows {
        let word = u32::from_le_bytes(*bytes);
        // The least exponent is 1.
        *largest = (word & 0xff).max(word >> 8 & 0xff).max(word >> 16 & 0xff).max(word >> 24).max(8);
        *exponents = ((*largest >> 3) * 0x0101_0101).to_le_bytes();
    }
    for line in lines {
        for (code, exponent) in line.iter_mut().zip(exponents.as_flattened()) {
            *code = level(*code, *exponent);
        }
    }
    of_rows.map(|largest| largest as u8)
}
