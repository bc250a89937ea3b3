//! MLX's affine format: bit streams are moved as 32-bit words, and the levels in a word are put in
//! the kernels' order for all lanes at once, about as fast as memory is copied.

use super::planes::in_planes;
#[cfg(target_arch = "x86_64")]
use super::transpose::transposed_all;
use super::transpose::{QUAD, QUAD_BYTES, Rows, store, transposed};
use crate::cpu::layout::matrix::{STEP_BYTES, STEPS};
use crate::cpu::simd::LANES;

/// Packs 32 columns of 16 rows, from byte `at` of the rows' bit streams. `WIDE`: with AVX-512.
///
/// # Safety
/// Each row has `4 * BITS` bytes from `at`; the CPU has AVX-512 if `WIDE`.
#[inline(always)]
pub(super) unsafe fn pack_block32<const WIDE: bool, const BITS: u32>(
    rows: &Rows,
    at: usize,
    lines: &mut [[u8; STEP_BYTES]],
) {
    match BITS {
        // A word is one step of its lane, or two steps that share a line.
        4 | 8 => {
            for (index, lines) in lines.chunks_exact_mut(QUAD).enumerate() {
                let at = at + index * QUAD_BYTES;
                #[cfg(target_arch = "x86_64")]
                if WIDE {
                    // SAFETY: as below; the caller's for AVX-512.
                    unsafe { pack_quad::<BITS>(rows, at, lines) };
                    continue;
                }
                for quad in 0..LANES / QUAD {
                    // SAFETY: the rows have 16 bytes for each four lines.
                    let words = unsafe { transposed(rows, quad, at) };
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
                // A word that holds all of the step and ends within the 32 columns.
                let byte = (first_bit / 8).min(4 * bits - size_of::<u32>());
                for (word, row) in step.iter_mut().zip(rows) {
                    // SAFETY: within the 32 columns's bytes.
                    let stored = unsafe { row.add(at + byte).cast::<[u8; 4]>().read() };
                    *word = one_step::<BITS>(u32::from_le_bytes(stored) >> (first_bit - 8 * byte));
                }
            }
            // SAFETY: the caller's.
            unsafe { in_planes::<WIDE, BITS>(&steps, lines) };
        }
    }
}

/// Packs 16 bytes of each row, from byte `at`, to four lines: 4 or 8 bits. 2.7 times as fast as
/// four rows at a time.
///
/// # Safety
/// The rows have 16 bytes from `at`; the CPU has AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn pack_quad<const BITS: u32>(rows: &Rows, at: usize, lines: &mut [[u8; STEP_BYTES]]) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's; a line is a register.
    unsafe {
        let order =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
        let kept = _mm512_set1_epi32(0xf00f_f00f_u32 as i32);
        let (from_below, from_above) = (_mm512_set1_epi32(0x0f00_0f00), _mm512_set1_epi32(0x00f0_00f0));
        for (line, words) in lines.iter_mut().zip(transposed_all(rows, at)) {
            let packed = match BITS {
                // As `two_steps`.
                4 => {
                    let bytes = _mm512_shuffle_epi8(words, order);
                    let raised = _mm512_and_si512(_mm512_slli_epi32::<4>(bytes), from_below);
                    let lowered = _mm512_and_si512(_mm512_srli_epi32::<4>(bytes), from_above);
                    _mm512_or_si512(_mm512_and_si512(bytes, kept), _mm512_or_si512(raised, lowered))
                }
                _ => words,
            };
            _mm512_storeu_si512(line.as_mut_ptr().cast(), packed);
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

/// Eight levels of 4 bits: byte `i` of the result holds level `i` in its low bits and level `i + 4`
/// in its high bits.
#[inline(always)]
pub(super) fn two_steps(word: u32) -> u32 {
    // Each 16 bits hold a byte of the first four levels, then a byte of the last four.
    let bytes = (word & 0xff00_00ff) | (word & 0x0000_ff00) << 8 | (word & 0x00ff_0000) >> 8;
    (bytes & 0xf00f_f00f) | (bytes & 0x00f0_00f0) << 4 | (bytes & 0x0f00_0f00) >> 4
}
