//! Lines of a quantized panel, see `layout/matrix.rs`.

use crate::cpu::layout::matrix::{STEP_BYTES, STEPS, planes};
use crate::cpu::simd::LANES;

/// Packs the steps of 32 columns to lines, plane by plane; a line holds as many steps as fit.
///
/// # Safety
/// The CPU has AVX-512 if `WIDE`.
#[inline(always)]
pub(super) unsafe fn in_planes<const WIDE: bool, const BITS: u32>(
    steps: &[[u32; LANES]; STEPS],
    lines: &mut [[u8; STEP_BYTES]],
) {
    #[cfg(target_arch = "x86_64")]
    if WIDE {
        // SAFETY: the caller's.
        return unsafe { in_wide_planes::<BITS>(steps, lines) };
    }
    let mut lines = lines.iter_mut();
    for &(width, first) in planes(BITS) {
        let mask = ((1u32 << width) - 1) * 0x0101_0101;
        for together in steps.chunks_exact((8 / width) as usize) {
            let Some(line) = lines.next() else { unreachable!("32 columns have as many lines as bits") };
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

/// [`in_planes`] with registers: from the loops above compilers make gathers.
///
/// # Safety
/// The CPU has AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn in_wide_planes<const BITS: u32>(steps: &[[u32; LANES]; STEPS], lines: &mut [[u8; STEP_BYTES]]) {
    use std::arch::x86_64::*;
    let mut lines = lines.iter_mut();
    for &(width, first) in planes(BITS) {
        for together in steps.chunks_exact((8 / width) as usize) {
            let Some(line) = lines.next() else { unreachable!("32 columns have as many lines as bits") };
            // SAFETY: the caller's; steps and lines are registers.
            unsafe {
                let mask = _mm512_set1_epi8(((1u32 << width) - 1) as i8);
                let mut words = _mm512_setzero_si512();
                for (i, step) in together.iter().enumerate() {
                    let step = _mm512_loadu_si512(step.as_ptr().cast());
                    let levels = _mm512_srl_epi32(step, _mm_cvtsi32_si128(first as i32));
                    let place = _mm_cvtsi32_si128(width as i32 * i as i32);
                    words = _mm512_or_si512(words, _mm512_sll_epi32(_mm512_and_si512(levels, mask), place));
                }
                _mm512_storeu_si512(line.as_mut_ptr().cast(), words);
            }
        }
    }
}
