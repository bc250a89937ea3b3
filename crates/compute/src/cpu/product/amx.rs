//! Products of prompts on AMX, in bf16: tiles of 16 rows × 32 columns, summed in f32.
//!
//! A chunk (16 column tiles) of two panels is unpacked to bf16 tiles, which stay in the first-level
//! cache, and multiplied with all row tiles, two at a time. The sums stay in tile registers within
//! a chunk, and in [`Scratch`] between chunks.

mod attend;
mod exact;
mod target;
mod tiles;
mod unpack;

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::attention::heads::Heads;
use crate::cpu::layout::bf16_rows::{
    Bf16Rows, Bf16Writer, CHUNK_DEPTH, FEW_TILES, PANELS_TOGETHER, TILE_ROWS,
};
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::layout::region::{Array, HUGE_PAGE_BYTES, LINE_BYTES, Zero};
use crate::cpu::product::output::Output;
use crate::cpu::product::quantize::QuantRows;
use crate::cpu::simd::{LANES, Simd, avx512::Avx512};
pub(in crate::cpu) use exact::pays as exact_pays;
use target::{AdjacentPanels, GatedPanels, Target};
use tiles::{Configured, TileProduct, TileSums, WeightTiles};
pub(in crate::cpu) use tiles::{PASS_OPERATIONS, bf16_passes, byte_passes};
use unpack::Panel;

/// Row tiles that share one unpacking of a chunk.
const CHUNK_ROW_TILES: usize = 32;
/// Pairs of panels that are multiplied with a chunk of activations in turn. Their sums and the
/// activations share the second-level cache.
const PANEL_PAIRS: usize = PANELS_TOGETHER / 2;
/// Bytes of the next activation chunk (of two row tiles) that are prefetched with each pair of
/// panels.
const AHEAD_BYTES: usize = CHUNK_DEPTH * tiles::AHEAD_BYTES;

/// Memory of one thread: 0.9 MiB in one huge page. Scattered small pages would compete for sets of
/// the second-level cache.
#[derive(Debug)]
pub(in crate::cpu) struct Scratch(Array<HugePage>);

#[derive(Debug)]
#[repr(C)]
struct HugePage {
    parts: ScratchParts,
    _rest: [u8; HUGE_PAGE_BYTES - size_of::<ScratchParts>()],
}

// SAFETY: all fields are numbers.
unsafe impl Zero for HugePage {}

#[derive(Debug)]
#[repr(C, align(64))]
struct ScratchParts {
    product: ProductScratch,
    exact: exact::ExactScratch,
    attention: attend::AttentionScratch,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct ProductScratch {
    weights: WeightTiles,
    sums: [[TileSums; CHUNK_ROW_TILES / 2]; PANEL_PAIRS],
}

impl Default for Scratch {
    fn default() -> Self {
        Self(Array::zeroed(1))
    }
}

impl Scratch {
    fn parts(&mut self) -> &mut ScratchParts {
        &mut self.0[0].parts
    }
}

/// Rows times the given panels of a matrix.
///
/// # Safety
/// `Isa::Amx` was detected; the matrix is quantized or of 16-bit floats; the other conditions are
/// those of [`crate::cpu::product::matmul::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512fp16,avx512vnni,avx2,fma,f16c")]
pub(in crate::cpu) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &Bf16Rows,
    out: Output,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's; a CPU with AMX has the other instructions.
    unsafe { pairs(&AdjacentPanels { w, panels, out }, x, scratch) };
    // Streaming stores must finish before other threads learn that this thread is done.
    _mm_sfence();
}

/// [`crate::cpu::product::matmul::multiply_gated`] on AMX.
///
/// # Safety
/// As for that function; `Isa::Amx` was detected.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512fp16,avx512bf16,avx512vnni,avx2,fma,f16c"
)]
pub(in crate::cpu) unsafe fn multiply_gated(
    gate_up: [&Matrix; 2],
    panels: Range<usize>,
    x: &Bf16Rows,
    out: Bf16Writer<'_>,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's; a CPU with AMX has the other instructions.
    unsafe { pairs(&GatedPanels { gate_up, panels, out }, x, scratch) };
}

/// Rows times all pairs of panels.
///
/// # Safety
/// `Isa::Amx` was detected; the matrices are quantized or of 16-bit floats and have as many columns
/// as the rows.
#[inline(always)]
unsafe fn pairs(target: &impl Target, x: &Bf16Rows, scratch: &mut Scratch) {
    let ProductScratch { weights, sums } = &mut scratch.parts().product;
    let row_tiles = x.rows.div_ceil(TILE_ROWS);
    if x.depth() == 0 {
        // A rank without columns stores zeros: it adds nothing to the other ranks' sums.
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
    for first_tile in (0..row_tiles).step_by(CHUNK_ROW_TILES) {
        let tiles = first_tile..row_tiles.min(first_tile + CHUNK_ROW_TILES);
        let in_turn = if tiles.len() > FEW_TILES { PANEL_PAIRS } else { 1 };
        for first_pair in (0..target.pairs()).step_by(in_turn) {
            let together = first_pair..target.pairs().min(first_pair + in_turn);
            for first in (0..x.depth()).step_by(CHUNK_DEPTH) {
                let depth = first..x.depth().min(first + CHUNK_DEPTH);
                for (index, (pair, sums)) in together.clone().zip(&mut *sums).enumerate() {
                    let (next, next_depth) = if pair + 1 < together.end {
                        (pair + 1, depth.clone())
                    } else if depth.end < x.depth() {
                        (together.start, depth.end..x.depth().min(depth.end + CHUNK_DEPTH))
                    } else {
                        (together.end, 0..x.depth().min(CHUNK_DEPTH))
                    };
                    // With few row tiles, weights are read in order and unpacking prefetches them.
                    let next = if in_turn > 1 { target.pair(next) } else { [None; 2] };
                    let prefetch = Prefetch::of(next, next_depth, index * AHEAD_BYTES);
                    // SAFETY: panels and columns are within the matrices; the tiles are configured.
                    unsafe {
                        for (side, panel) in target.pair(pair).into_iter().flatten().enumerate() {
                            unpack::chunk(panel, depth.clone(), side, in_turn == 1, weights);
                        }
                        chunk(target, pair, x, tiles.clone(), depth.clone(), weights, sums, &prefetch);
                    }
                }
            }
        }
    }
}

/// Quantized rows times the given panels of a quantized matrix.
///
/// # Safety
/// `Isa::Amx` was detected; the other conditions are those of
/// [`crate::cpu::product::matmul::multiply`].
pub(in crate::cpu) unsafe fn multiply_exactly(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's; a CPU with AMX has the other instructions.
    unsafe { exact::multiply(w, panels, x, rows, out, &mut scratch.parts().exact) };
}

/// Attention of many queries in bf16.
///
/// # Safety
/// `Isa::Amx` was detected; pointers and ranges of `heads` describe the step's buffers.
pub(in crate::cpu) unsafe fn attend(heads: &Heads<'_>, scratch: &mut Scratch) {
    // SAFETY: the caller's; a CPU with AMX has the other instructions.
    unsafe { attend::attend(heads, &mut scratch.parts().attention) };
}

/// The data to prefetch while a pair of panels is multiplied.
struct Prefetch<'a> {
    /// The packed weights of the next product.
    weights: [&'a [u8]; 2],
    /// Offset into the next chunk of activations.
    rows: usize,
}

impl<'a> Prefetch<'a> {
    /// The column tiles `depth` of these panels.
    fn of(panels: [Option<Panel<'a>>; 2], depth: Range<usize>, rows: usize) -> Self {
        let packed = |panel: Option<Panel<'a>>| panel.map_or(&[][..], |panel| unpack::packed(panel, &depth));
        Self { weights: panels.map(packed), rows }
    }

    /// Prefetches part number `part` of `parts` equal parts of the weights.
    #[inline(always)]
    unsafe fn prefetch_part(&self, part: usize, parts: usize) {
        for weights in self.weights {
            let lines = weights.len().div_ceil(LINE_BYTES);
            for line in part * lines / parts..(part + 1) * lines / parts {
                // SAFETY: the CPU has AVX-512; a prefetch is harmless at any address.
                unsafe { Avx512::prefetch(weights.as_ptr().wrapping_add(line * LINE_BYTES)) };
            }
        }
    }
}

/// Multiplies a chunk of a pair of panels with all row tiles. After the last chunk, stores the
/// results.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the state of the loops around it")]
unsafe fn chunk(
    target: &impl Target,
    pair: usize,
    x: &Bf16Rows,
    tiles: Range<usize>,
    depth: Range<usize>,
    weights: &WeightTiles,
    sums: &mut [TileSums; CHUNK_ROW_TILES / 2],
    prefetch: &Prefetch<'_>,
) {
    let last = depth.end == x.depth();
    // The next chunk of activations is prefetched while this one is multiplied, a part with each
    // pair of panels.
    let next = if last { 0 } else { depth.end };
    let parts = tiles.len().div_ceil(2);
    for (part, (tile, sums)) in tiles.clone().step_by(2).zip(sums).enumerate() {
        let rows = tile * TILE_ROWS..x.rows.min((tile + 2) * TILE_ROWS);
        let product: TileProduct = if tile + 1 < tiles.end { tiles::two } else { tiles::one };
        // SAFETY: the caller's: tiles and depth are within the rows, the weights are unpacked, the
        // CPU has AVX-512.
        unsafe {
            prefetch.prefetch_part(part, parts);
            product(
                [x.tile(tile, depth.start), x.tile(tile + 1, depth.start)],
                weights.as_ptr().cast(),
                sums,
                depth.len(),
                depth.start == 0,
                x.tile(tile, next).wrapping_add(prefetch.rows),
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
    fn a_threads_scratch_is_one_huge_page() {
        let mut scratch = Scratch::default();
        let parts = std::ptr::from_mut(scratch.parts());
        assert!(parts.addr().is_multiple_of(HUGE_PAGE_BYTES));
        assert_eq!(size_of::<HugePage>(), HUGE_PAGE_BYTES);
        assert_eq!(
            scratch.parts().product.sums[PANEL_PAIRS - 1][CHUNK_ROW_TILES / 2 - 1][1][1][TILE_ROWS - 1],
            [0.0; LANES]
        );
    }
}
