//! Products of prompts on AMX, in bf16: tiles of 16 rows × 32 columns, multiplied and added up in f32.
//!
//! Two panels' columns are unpacked to bf16 in the layout of tiles, as many as stay in the first-level cache, and multiplied
//! with all row tiles, two by two. The sums stay in tile registers for these columns and in [`Scratch`] between them.

mod attend;
mod exact;
mod target;
mod tiles;
mod unpack;

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::attention::Heads;
use crate::cpu::layout::bf16_rows::{CHUNK, FEW_TILES, HalfRows, HalfWriter, PANELS_TOGETHER, TILE_ROWS};
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::layout::region::{Array, HUGE_PAGE_BYTES, LINE_BYTES, Zero};
use crate::cpu::product::output::Output;
use crate::cpu::product::quantize::QuantRows;
use crate::cpu::simd::{LANES, Simd, avx512::Avx512};
pub(in crate::cpu) use exact::pays as exact_pays;
use target::{Adjacent, Gated, Target};
use tiles::{Configured, Product, Sums, Weights};
pub(in crate::cpu) use tiles::{PASS_OPERATIONS, multiply_bytes, multiply_halves};
use unpack::Panel;

/// Row tiles for which a chunk is unpacked once.
const ROW_TILES: usize = 32;
/// Pairs of panels that take turns at a chunk: their sums and the chunk's activations share the second-level cache.
const PAIRS: usize = PANELS_TOGETHER / 2;
/// Bytes of a pair of row tiles' next chunk that are asked for with each pair of panels.
const AHEAD_BYTES: usize = CHUNK * tiles::AHEAD_BYTES;

/// What a thread works in: 0.9 MiB in one huge page, as pages that lie anywhere compete for places of the second-level cache.
#[derive(Debug)]
pub(in crate::cpu) struct Scratch(Array<HugePage>);

#[derive(Debug)]
#[repr(C)]
struct HugePage {
    memory: Memory,
    _rest: [u8; HUGE_PAGE_BYTES - size_of::<Memory>()],
}

// SAFETY: numbers.
unsafe impl Zero for HugePage {}

#[derive(Debug)]
#[repr(C, align(64))]
struct Memory {
    product: ProductMemory,
    exact: exact::Memory,
    attention: attend::Memory,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct ProductMemory {
    weights: Weights,
    sums: [[Sums; ROW_TILES / 2]; PAIRS],
}

impl Default for Scratch {
    fn default() -> Self {
        Self(Array::zeroed(1))
    }
}

impl Scratch {
    fn memory(&mut self) -> &mut Memory {
        &mut self.0[0].memory
    }
}

/// Rows times the given panels of a matrix.
///
/// # Safety
/// `Isa::Amx` was detected, the matrix is quantized or of half floats, and as [`crate::cpu::product::matmul::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512fp16,avx512vnni,avx2,fma,f16c")]
pub(in crate::cpu) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &HalfRows,
    out: Output,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's; what has AMX has the other instructions.
    unsafe { pairs(&Adjacent { w, panels, out }, x, scratch) };
    // Streamed results must be there before other threads are told so.
    _mm_sfence();
}

/// As [`crate::cpu::product::matmul::multiply_gated`].
///
/// # Safety
/// As there.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512fp16,avx512bf16,avx512vnni,avx2,fma,f16c"
)]
pub(in crate::cpu) unsafe fn multiply_gated(
    gate_up: [&Matrix; 2],
    panels: Range<usize>,
    x: &HalfRows,
    out: HalfWriter<'_>,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's; what has AMX has the other instructions.
    unsafe { pairs(&Gated { gate_up, panels, out }, x, scratch) };
}

/// Rows times all pairs of panels.
///
/// # Safety
/// `Isa::Amx` was detected, the matrices are quantized or of half floats and have the rows' columns.
#[inline(always)]
unsafe fn pairs(target: &impl Target, x: &HalfRows, scratch: &mut Scratch) {
    let ProductMemory { weights, sums } = &mut scratch.memory().product;
    let row_tiles = x.rows.div_ceil(TILE_ROWS);
    if x.blocks() == 0 {
        // A rank without columns adds nothing to what the others have, but says so.
        let sums = &mut sums[0][0];
        *sums = [[[[0.0; LANES]; TILE_ROWS]; 2]; 2];
        for (pair, tile) in
            (0..target.pairs()).flat_map(|pair| (0..row_tiles).step_by(2).map(move |tile| (pair, tile)))
        {
            let rows = tile * TILE_ROWS..x.rows.min((tile + 2) * TILE_ROWS);
            // SAFETY: the caller's.
            unsafe { target.store(pair, rows, sums) };
        }
        return;
    }
    // SAFETY: the caller's.
    let _configured = unsafe { Configured::new() };
    for first_tile in (0..row_tiles).step_by(ROW_TILES) {
        let tiles = first_tile..row_tiles.min(first_tile + ROW_TILES);
        let in_turn = if tiles.len() > FEW_TILES { PAIRS } else { 1 };
        for first_pair in (0..target.pairs()).step_by(in_turn) {
            let together = first_pair..target.pairs().min(first_pair + in_turn);
            for first in (0..x.blocks()).step_by(CHUNK) {
                let blocks = first..x.blocks().min(first + CHUNK);
                for (index, (pair, sums)) in together.clone().zip(&mut *sums).enumerate() {
                    let (next, next_blocks) = if pair + 1 < together.end {
                        (pair + 1, blocks.clone())
                    } else if blocks.end < x.blocks() {
                        (together.start, blocks.end..x.blocks().min(blocks.end + CHUNK))
                    } else {
                        (together.end, 0..x.blocks().min(CHUNK))
                    };
                    // Where weights are read straight through, unpacking asks for them.
                    let next = if in_turn > 1 { target.pair(next) } else { [None; 2] };
                    let soon = Soon::of(next, next_blocks, index * AHEAD_BYTES);
                    // SAFETY: the panels and columns are the matrices', the tiles are configured.
                    unsafe {
                        for (side, panel) in target.pair(pair).into_iter().flatten().enumerate() {
                            unpack::chunk(panel, blocks.clone(), side, in_turn == 1, weights);
                        }
                        chunk(target, pair, x, tiles.clone(), blocks.clone(), weights, sums, &soon);
                    }
                }
            }
        }
    }
}

/// Quantized rows times the given panels of a quantized matrix.
///
/// # Safety
/// `Isa::Amx` was detected, and as [`crate::cpu::product::matmul::multiply`].
pub(in crate::cpu) unsafe fn multiply_exactly(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's; what has AMX has the other instructions.
    unsafe { exact::multiply(w, panels, x, rows, out, &mut scratch.memory().exact) };
}

/// As [`crate::cpu::attention::attend`], for many queries.
///
/// # Safety
/// `Isa::Amx` was detected, and as there.
pub(in crate::cpu) unsafe fn attend(heads: &Heads<'_>, scratch: &mut Scratch) {
    // SAFETY: the caller's; what has AMX has the other instructions.
    unsafe { attend::attend(heads, &mut scratch.memory().attention) };
}

/// What is asked for while a pair of panels is multiplied.
struct Soon<'a> {
    /// Packed weights that are multiplied next.
    weights: [&'a [u8]; 2],
    /// Where the part of the next chunk of activations begins.
    rows: usize,
}

impl<'a> Soon<'a> {
    /// These panels, in these blocks of columns.
    fn of(panels: [Option<Panel<'a>>; 2], blocks: Range<usize>, rows: usize) -> Self {
        let packed = |panel: Option<Panel<'a>>| panel.map_or(&[][..], |panel| unpack::packed(panel, &blocks));
        Self { weights: panels.map(packed), rows }
    }

    /// Asks for one part in `parts` of the weights.
    #[inline(always)]
    unsafe fn ask(&self, part: usize, parts: usize) {
        for weights in self.weights {
            let lines = weights.len().div_ceil(LINE_BYTES);
            for line in part * lines / parts..(part + 1) * lines / parts {
                // SAFETY: the CPU has AVX-512; asking for memory does no harm.
                unsafe { Avx512::prefetch(weights.as_ptr().wrapping_add(line * LINE_BYTES)) };
            }
        }
    }
}

/// Multiplies a chunk of a pair of panels with all of its row tiles; after the last chunk, the sums become results.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the state of the loops around it")]
unsafe fn chunk(
    target: &impl Target,
    pair: usize,
    x: &HalfRows,
    tiles: Range<usize>,
    blocks: Range<usize>,
    weights: &Weights,
    sums: &mut [Sums; ROW_TILES / 2],
    soon: &Soon<'_>,
) {
    let last = blocks.end == x.blocks();
    // The next chunk of activations is asked for while this one is multiplied, a part with each pair of panels.
    let next = if last { 0 } else { blocks.end };
    let parts = tiles.len().div_ceil(2);
    for (part, (tile, sums)) in tiles.clone().step_by(2).zip(sums).enumerate() {
        let rows = tile * TILE_ROWS..x.rows.min((tile + 2) * TILE_ROWS);
        let product: Product = if tile + 1 < tiles.end { tiles::two } else { tiles::one };
        // SAFETY: the caller's: tiles and blocks are the rows', the weights are unpacked, the CPU has AVX-512.
        unsafe {
            soon.ask(part, parts);
            product(
                [x.tile(tile, blocks.start), x.tile(tile + 1, blocks.start)],
                weights.as_ptr().cast(),
                sums,
                blocks.len(),
                blocks.start == 0,
                x.tile(tile, next).wrapping_add(soon.rows),
            );
            if last {
                target.store(pair, rows, sums);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_works_in_is_one_huge_page() {
        let mut scratch = Scratch::default();
        let memory = std::ptr::from_mut(scratch.memory());
        assert!(memory.addr().is_multiple_of(HUGE_PAGE_BYTES));
        assert_eq!(size_of::<HugePage>(), HUGE_PAGE_BYTES);
        assert_eq!(
            scratch.memory().product.sums[PAIRS - 1][ROW_TILES / 2 - 1][1][1][TILE_ROWS - 1],
            [0.0; LANES]
        );
    }
}
