//! Lines of a quantized panel, see `layout/matrix.rs`.

use crate::cpu::layout::matrix::{STEP_BYTES, STEPS, planes};
use crate::cpu::simd::LANES;

/// Packs the steps of 32 columns to lines, plane by plane; a line holds as many steps as fit.
#[inline(always)]
pub(super) fn in_planes<const BITS: u32>(steps: &[[u32; LANES]; STEPS], lines: &mut [[u8; STEP_BYTES]]) {
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
