//! Products of prompts on AMX, in bf16: tiles of 16 rows × 32 columns, multiplied and added up in f32.
//!
//! Two panels' columns are unpacked to bf16 in the layout of tiles, as many as stay in the first-level cache, and multiplied
//! with all row tiles, two by two. The sums stay in tile registers for these columns and in [`Scratch`] between them.

mod attend;
mod exact;
mod tiles;
mod unpack;

use std::arch::x86_64::*;
use std::ops::Range;

use super::attention::Heads;
use super::halves::{BLOCK, CHUNK, HalfRows, TILE_ROWS};
use super::matmul::{Output, finish};
use super::matrix::Matrix;
use super::quantize::QuantRows;
use super::simd::{LANES, avx512::Avx512};
use tiles::{Configured, Product};
pub(super) use tiles::{PASS_OPERATIONS, arithmetic, permitted};

/// Row tiles for which a chunk is unpacked once.
const ROW_TILES: usize = 32;
/// Pairs of panels that take turns at a chunk: their sums and the chunk's activations share the second-level cache.
const PAIRS: usize = 8;
/// Bytes of a pair of row tiles' next chunk that are asked for with each pair of panels.
const AHEAD_BYTES: usize = CHUNK * tiles::AHEAD_BYTES;
/// Row tiles up to which the weights are what is waited for: then they are read straight through.
const FEW_ROW_TILES: usize = 2;

/// 16 rows of 64 bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Tile([[u8; 64]; TILE_ROWS]);

/// A chunk of two panels: `[block][panel]`, a tile each. 32 KiB, two thirds of the first-level cache.
type Weights = [[Tile; 2]; CHUNK];
/// Sums of two row tiles and two panels: `[row tile][panel]`.
type Sums = [[[[f32; LANES]; TILE_ROWS]; 2]; 2];

/// What a thread works in: 0.9 MiB.
#[derive(Debug)]
pub(super) struct Scratch {
    product: Box<Memory>,
    exact: Box<exact::Memory>,
    attention: Box<attend::Memory>,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct Memory {
    weights: Weights,
    sums: [[Sums; ROW_TILES / 2]; PAIRS],
}

impl Default for Scratch {
    fn default() -> Self {
        // SAFETY: numbers, for which zero is a value. Not `Box::new`, which would build them on the stack first.
        unsafe {
            Self {
                product: Box::new_zeroed().assume_init(),
                exact: Box::new_zeroed().assume_init(),
                attention: Box::new_zeroed().assume_init(),
            }
        }
    }
}

/// Rows times the given panels of a matrix.
///
/// # Safety
/// AMX is [`permitted`], the matrix is quantized or of half floats, and as [`super::matmul::panel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512fp16,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &HalfRows,
    out: Output,
    scratch: &mut Scratch,
) {
    let Memory { weights, sums } = &mut *scratch.product;
    // SAFETY: the caller's.
    let _configured = unsafe { Configured::new() };
    let row_tiles = x.rows.div_ceil(TILE_ROWS);
    for first_tile in (0..row_tiles).step_by(ROW_TILES) {
        let tiles = first_tile..row_tiles.min(first_tile + ROW_TILES);
        let pairs = if tiles.len() > FEW_ROW_TILES { PAIRS } else { 1 };
        for first_panel in panels.clone().step_by(2 * pairs) {
            let panels = first_panel..panels.end.min(first_panel + 2 * pairs);
            for first in (0..x.blocks()).step_by(CHUNK) {
                let blocks = first..x.blocks().min(first + CHUNK);
                for (index, (panel, sums)) in panels.clone().step_by(2).zip(&mut *sums).enumerate() {
                    let pair = panel..panels.end.min(panel + 2);
                    // SAFETY: the panels and columns are the matrix's, the tiles are configured.
                    unsafe {
                        for (side, panel) in pair.clone().enumerate() {
                            unpack::chunk(w, panel, blocks.clone(), side, weights);
                        }
                        let ahead = index * AHEAD_BYTES;
                        chunk(w, pair, x, tiles.clone(), blocks.clone(), weights, sums, ahead, out);
                    }
                }
            }
        }
    }
    // Streamed results must be there before other threads are told so.
    _mm_sfence();
}

/// Whether [`multiply_exactly`] takes so many rows.
pub(super) fn takes_quantized(rows: usize) -> bool {
    rows >= exact::FROM_ROWS
}

/// Quantized rows times the given panels of a quantized matrix.
///
/// # Safety
/// AMX is [`permitted`], and as [`super::matmul::panel`].
pub(super) unsafe fn multiply_exactly(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's; what has AMX has the other instructions.
    unsafe { exact::multiply(w, panels, x, rows, out, &mut scratch.exact) };
}

/// As [`super::attention::attend`], for many queries.
///
/// # Safety
/// AMX is [`permitted`], and as there.
pub(super) unsafe fn attend(heads: &Heads<'_>, scratch: &mut Scratch) {
    // SAFETY: the caller's; what has AMX has the other instructions.
    unsafe { attend::attend(heads, &mut scratch.attention) };
}

/// Multiplies a chunk of a pair of panels with all of its row tiles; after the last chunk, the sums become results.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the state of the loops around it")]
unsafe fn chunk(
    w: &Matrix,
    panels: Range<usize>,
    x: &HalfRows,
    tiles: Range<usize>,
    blocks: Range<usize>,
    weights: &Weights,
    sums: &mut [Sums; ROW_TILES / 2],
    ahead: usize,
    out: Output,
) {
    let last = blocks.end == x.blocks();
    // The next chunk of activations is asked for while this one is multiplied, a part with each pair of panels.
    let next = if last { 0 } else { blocks.end };
    for (tile, sums) in tiles.clone().step_by(2).zip(sums) {
        let rows = tile * TILE_ROWS..x.rows.min((tile + 2) * TILE_ROWS);
        let product: Product = if tile + 1 < tiles.end { tiles::two } else { tiles::one };
        // SAFETY: the caller's: tiles and blocks are the rows', the weights are unpacked, the CPU has AVX-512.
        unsafe {
            product(
                [x.tile(tile, blocks.start), x.tile(tile + 1, blocks.start)],
                weights.as_ptr().cast(),
                sums,
                blocks.len(),
                blocks.start == 0,
                x.tile(tile, next).wrapping_add(ahead),
            );
            if last {
                for row in rows {
                    let sums = &sums[row / TILE_ROWS - tile];
                    for (panel, sums) in panels.clone().zip(sums) {
                        store(w, panel, row, &sums[row % TILE_ROWS], out);
                    }
                }
            }
        }
    }
}

/// Brings a row's sums to the weights' scale, and stores them past the caches: with many rows, the output is larger than they
/// are, and lines would be read from memory to be written.
#[inline(always)]
unsafe fn store(w: &Matrix, panel: usize, row: usize, sums: &[f32; LANES], out: Output) {
    // SAFETY: the caller's; units are as many as the panels' rows, or none.
    unsafe {
        let mut sums = _mm512_loadu_ps(sums.as_ptr());
        if !w.units.is_empty() {
            let units = _mm512_loadu_ps(w.units.as_ptr().add(panel * LANES));
            sums = _mm512_mul_ps(sums, _mm512_mul_ps(units, _mm512_set1_ps(unpack::unit(w.encoding))));
        }
        let to = out.data.add(row * out.stride + panel * LANES);
        if w.bias.is_empty() && !out.adds && (panel + 1) * LANES <= w.rows && to.cast::<__m512>().is_aligned()
        {
            _mm512_stream_ps(to, sums);
        } else {
            finish::<Avx512>(w, panel, row, sums, out);
        }
    }
}
