//! Interleaving 16 rows: squares of 4 rows × 4 words are transposed in registers.

use crate::cpu::simd::LANES;

/// Rows, and 32-bit words of a row, that are transposed at once.
pub(super) const QUAD: usize = 4;
/// Bytes of a row that are transposed at once.
pub(super) const QUAD_BYTES: usize = QUAD * size_of::<u32>();

/// The rows of one panel in the file. Lanes beyond the matrix point to zeros.
pub(super) type Rows = [*const u8; LANES];

/// Interleaves columns of 2 or 4 bytes: `out` is `[cols][16]`. `WIDE`: with AVX-512.
#[inline(always)]
pub(super) fn columns<const WIDE: bool>(rows: &Rows, cols: usize, size: usize, out: &mut [u8]) {
    let whole = cols * size / QUAD_BYTES * QUAD_BYTES;
    for at in (0..whole).step_by(QUAD_BYTES) {
        let out = &mut out[at * LANES..][..QUAD_BYTES * LANES];
        #[cfg(target_arch = "x86_64")]
        if WIDE {
            // SAFETY: as below; `WIDE` on CPUs with AVX-512.
            unsafe { quad_of_columns(rows, at, size, out) };
            continue;
        }
        for quad in 0..LANES / QUAD {
            // SAFETY: a row has `cols` elements, of which these are within the whole blocks.
            let words = unsafe { transposed(rows, quad, at) };
            for (word, lanes) in words.iter().enumerate() {
                match size {
                    2 => {
                        // A word holds two columns of its lane.
                        for (column, shift) in [0, 16].into_iter().enumerate() {
                            let to = &mut out[((2 * word + column) * LANES + quad * QUAD) * 2..][..QUAD * 2];
                            for (to, word) in to.as_chunks_mut::<2>().0.iter_mut().zip(lanes) {
                                *to = ((word >> shift) as u16).to_le_bytes();
                            }
                        }
                    }
                    _ => store(&mut out[word * LANES * 4..][..LANES * 4], quad, lanes),
                }
            }
        }
    }
    for (lane, row) in rows.iter().enumerate() {
        for col in whole / size..cols {
            // SAFETY: within the row.
            let bytes = unsafe { std::slice::from_raw_parts(row.add(col * size), size) };
            out[(col * LANES + lane) * size..][..size].copy_from_slice(bytes);
        }
    }
}

/// Interleaves 16 bytes of each row from byte `at`: columns of 2 or 4 bytes.
///
/// # Safety
/// As for [`transposed_all`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn quad_of_columns(rows: &Rows, at: usize, size: usize, out: &mut [u8]) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's; each store fills its chunk.
    unsafe {
        for (words, out) in transposed_all(rows, at).into_iter().zip(out.chunks_exact_mut(LANES * 4)) {
            match size {
                2 => {
                    // A word holds two columns of its lane.
                    let (first, second) = out.split_at_mut(LANES * 2);
                    _mm256_storeu_si256(first.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(words));
                    let words = _mm512_srli_epi32::<16>(words);
                    _mm256_storeu_si256(second.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(words));
                }
                _ => _mm512_storeu_si512(out.as_mut_ptr().cast(), words),
            }
        }
    }
}

/// Four words of all rows from byte `at`. As [`transposed`], with a word of 16 rows in a register.
///
/// # Safety
/// The rows have 16 bytes from `at`; the CPU has AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn transposed_all(rows: &Rows, at: usize) -> [std::arch::x86_64::__m512i; QUAD] {
    use std::arch::x86_64::*;
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (each_fourth(rows, 0, at), each_fourth(rows, 1, at));
        let (c, d) = (each_fourth(rows, 2, at), each_fourth(rows, 3, at));
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ]
    }
}

/// 16 bytes from byte `at` of rows `first`, `first + 4`, `first + 8` and `first + 12`.
///
/// # Safety
/// As for [`transposed_all`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn each_fourth(rows: &Rows, first: usize, at: usize) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::*;
    // SAFETY: the caller's.
    unsafe {
        let all = _mm512_castsi128_si512(_mm_loadu_si128(rows[first].add(at).cast()));
        let all = _mm512_inserti32x4::<1>(all, _mm_loadu_si128(rows[first + QUAD].add(at).cast()));
        let all = _mm512_inserti32x4::<2>(all, _mm_loadu_si128(rows[first + 2 * QUAD].add(at).cast()));
        _mm512_inserti32x4::<3>(all, _mm_loadu_si128(rows[first + 3 * QUAD].add(at).cast()))
    }
}

/// Writes the words of four lanes to a line of 16 lanes.
#[inline(always)]
pub(super) fn store(line: &mut [u8], quad: usize, words: &[u32; QUAD]) {
    for (to, word) in line[quad * QUAD_BYTES..][..QUAD_BYTES].as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
}

/// Four words of four rows from byte `at`; the rows' first words come first. The compiler does not
/// find these shuffles, and they make all of packing twice as fast.
///
/// # Safety
/// The rows have 16 bytes from `at`.
#[inline(always)]
pub(super) unsafe fn transposed(rows: &Rows, quad: usize, at: usize) -> [[u32; QUAD]; QUAD] {
    // SAFETY: the caller's; the instructions are part of every CPU of these architectures, and a
    // vector is its words.
    unsafe {
        let row = |index: usize| rows[quad * QUAD + index].add(at);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::*;
            let load = |index| _mm_loadu_si128(row(index).cast());
            let (a, b, c, d) = (load(0), load(1), load(2), load(3));
            let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
            std::mem::transmute([
                _mm_unpacklo_epi64(ab, cd),
                _mm_unpackhi_epi64(ab, cd),
                _mm_unpacklo_epi64(ab_high, cd_high),
                _mm_unpackhi_epi64(ab_high, cd_high),
            ])
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::aarch64::*;
            let load = |index| vreinterpretq_u32_u8(vld1q_u8(row(index)));
            let (a, b, c, d) = (load(0), load(1), load(2), load(3));
            let wide = |x| vreinterpretq_u64_u32(x);
            let (ab, cd) = (wide(vzip1q_u32(a, b)), wide(vzip1q_u32(c, d)));
            let (ab_high, cd_high) = (wide(vzip2q_u32(a, b)), wide(vzip2q_u32(c, d)));
            std::mem::transmute([
                vzip1q_u64(ab, cd),
                vzip2q_u64(ab, cd),
                vzip1q_u64(ab_high, cd_high),
                vzip2q_u64(ab_high, cd_high),
            ])
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            std::array::from_fn(|word| {
                std::array::from_fn(|index| {
                    u32::from_le_bytes(row(index).add(word * 4).cast::<[u8; 4]>().read())
                })
            })
        }
    }
}
