//! Unpacks a block (32 columns of 16 rows) to the bytes that dot products multiply.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use crate::cpu::layout::matrix::{E2M1, IQ4, STEP_BYTES, STEPS, table};
use crate::cpu::simd::Simd;

/// Pairs of steps in a block.
pub(in crate::cpu) const STEP_PAIRS: usize = STEPS / 2;

/// The 8 steps of a block, as bytes.
///
/// # Safety
/// `p` points to a block of `BITS` bits; the CPU has `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn unpack_block32<S: Simd, const BITS: u32>(p: *const u8) -> [S::B; STEPS] {
    let [a, b] = unpack_pair::<S, BITS, 0>(p);
    let [c, d] = unpack_pair::<S, BITS, 1>(p);
    let [e, f] = unpack_pair::<S, BITS, 2>(p);
    let [g, h] = unpack_pair::<S, BITS, 3>(p);
    [a, b, c, d, e, f, g, h]
}

/// Two steps of a block: number `2 * PAIR` and the next one.
///
/// Uses no closures: a closure lacks the instruction set of the function around it, so each of its
/// operations can become a call (AVX2 took 16 times as long for 3 bits).
///
/// # Safety
/// As for [`unpack_block32`].
#[inline(always)]
pub(in crate::cpu) unsafe fn unpack_pair<S: Simd, const BITS: u32, const PAIR: usize>(
    p: *const u8,
) -> [S::B; 2] {
    match BITS {
        2 => bit_pairs::<S, PAIR>(p),
        3 => joined::<S, 2>(bit_pairs::<S, PAIR>(p), single_bits::<S, PAIR>(line::<S>(p, 2))),
        4 => nibbles::<S>(line::<S>(p, PAIR)),
        5 => joined::<S, 4>(nibbles::<S>(line::<S>(p, PAIR)), single_bits::<S, PAIR>(line::<S>(p, 4))),
        E2M1 | IQ4 => coded::<S, BITS>(nibbles::<S>(line::<S>(p, PAIR))),
        6 => joined::<S, 4>(nibbles::<S>(line::<S>(p, PAIR)), bit_pairs::<S, PAIR>(p.add(4 * STEP_BYTES))),
        _ => [line::<S>(p, 2 * PAIR), line::<S>(p, 2 * PAIR + 1)],
    }
}

#[inline(always)]
unsafe fn line<S: Simd>(p: *const u8, index: usize) -> S::B {
    S::load_b(p.add(index * STEP_BYTES))
}

/// Levels made of their lower `SHIFT` bits and their upper bits.
#[inline(always)]
unsafe fn joined<S: Simd, const SHIFT: u32>(low: [S::B; 2], high: [S::B; 2]) -> [S::B; 2] {
    [S::or_shl::<SHIFT>(low[0], high[0]), S::or_shl::<SHIFT>(low[1], high[1])]
}

/// The low and the high nibbles of a line.
#[inline(always)]
unsafe fn nibbles<S: Simd>(line: S::B) -> [S::B; 2] {
    [S::bits::<0, 4>(line), S::bits::<4, 4>(line)]
}

/// The levels of two steps of codes.
#[inline(always)]
unsafe fn coded<S: Simd, const BITS: u32>(codes: [S::B; 2]) -> [S::B; 2] {
    let Some(table) = (const { table(BITS) }) else { return codes };
    [S::levels(table, codes[0]), S::levels(table, codes[1])]
}

/// Two steps of 2-bit numbers, which are packed to two lines a block.
#[inline(always)]
unsafe fn bit_pairs<S: Simd, const PAIR: usize>(p: *const u8) -> [S::B; 2] {
    let line = line::<S>(p, PAIR / 2);
    match PAIR % 2 {
        0 => [S::bits::<0, 2>(line), S::bits::<2, 2>(line)],
        _ => [S::bits::<4, 2>(line), S::bits::<6, 2>(line)],
    }
}

/// Two steps of 1-bit numbers, which are packed to one line a block.
#[inline(always)]
unsafe fn single_bits<S: Simd, const PAIR: usize>(line: S::B) -> [S::B; 2] {
    match PAIR {
        0 => [S::bits::<0, 1>(line), S::bits::<1, 1>(line)],
        1 => [S::bits::<2, 1>(line), S::bits::<3, 1>(line)],
        2 => [S::bits::<4, 1>(line), S::bits::<5, 1>(line)],
        _ => [S::bits::<6, 1>(line), S::bits::<7, 1>(line)],
    }
}
