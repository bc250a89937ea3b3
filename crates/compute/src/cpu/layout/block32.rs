//! Packed levels of 16 rows and 32 columns as bytes that dot products take.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use crate::cpu::layout::matrix::{STEP_BYTES, STEPS};
use crate::cpu::simd::Simd;

/// An octet's steps come in pairs.
pub(in crate::cpu) const PAIRS: usize = STEPS / 2;

/// The 8 steps of an octet, as bytes.
///
/// # Safety
/// An octet of `BITS` bits is there; the CPU has `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn octet<S: Simd, const BITS: u32>(p: *const u8) -> [S::B; STEPS] {
    let [a, b] = pair::<S, BITS, 0>(p);
    let [c, d] = pair::<S, BITS, 1>(p);
    let [e, f] = pair::<S, BITS, 2>(p);
    let [g, h] = pair::<S, BITS, 3>(p);
    [a, b, c, d, e, f, g, h]
}

/// Two steps of an octet, `2 * PAIR` and the next one. Without closures: those do not have the instruction set of the function around
/// them, so that each operation in them can be a call (AVX2 took 16 times as long for 3 bits).
///
/// # Safety
/// As for [`octet`].
#[inline(always)]
pub(in crate::cpu) unsafe fn pair<S: Simd, const BITS: u32, const PAIR: usize>(p: *const u8) -> [S::B; 2] {
    match BITS {
        2 => quarters::<S, PAIR>(p),
        3 => joined::<S, 2>(quarters::<S, PAIR>(p), eighths::<S, PAIR>(line::<S>(p, 2))),
        4 => halves::<S>(line::<S>(p, PAIR)),
        5 => joined::<S, 4>(halves::<S>(line::<S>(p, PAIR)), eighths::<S, PAIR>(line::<S>(p, 4))),
        6 => joined::<S, 4>(halves::<S>(line::<S>(p, PAIR)), quarters::<S, PAIR>(p.add(4 * STEP_BYTES))),
        _ => [line::<S>(p, 2 * PAIR), line::<S>(p, 2 * PAIR + 1)],
    }
}

#[inline(always)]
unsafe fn line<S: Simd>(p: *const u8, index: usize) -> S::B {
    S::load_b(p.add(index * STEP_BYTES))
}

/// Levels of their lower bits, `SHIFT` of them, and their upper ones.
#[inline(always)]
unsafe fn joined<S: Simd, const SHIFT: u32>(low: [S::B; 2], high: [S::B; 2]) -> [S::B; 2] {
    [S::or_shl::<SHIFT>(low[0], high[0]), S::or_shl::<SHIFT>(low[1], high[1])]
}

#[inline(always)]
unsafe fn halves<S: Simd>(line: S::B) -> [S::B; 2] {
    [S::bits::<0, 4>(line), S::bits::<4, 4>(line)]
}

/// Of two lines.
#[inline(always)]
unsafe fn quarters<S: Simd, const PAIR: usize>(p: *const u8) -> [S::B; 2] {
    let line = line::<S>(p, PAIR / 2);
    match PAIR % 2 {
        0 => [S::bits::<0, 2>(line), S::bits::<2, 2>(line)],
        _ => [S::bits::<4, 2>(line), S::bits::<6, 2>(line)],
    }
}

#[inline(always)]
unsafe fn eighths<S: Simd, const PAIR: usize>(line: S::B) -> [S::B; 2] {
    match PAIR {
        0 => [S::bits::<0, 1>(line), S::bits::<1, 1>(line)],
        1 => [S::bits::<2, 1>(line), S::bits::<3, 1>(line)],
        2 => [S::bits::<4, 1>(line), S::bits::<5, 1>(line)],
        _ => [S::bits::<6, 1>(line), S::bits::<7, 1>(line)],
    }
}
