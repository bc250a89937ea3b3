//! Products of many quantized rows on AMX: tiles of 16 rows × 64 bytes, multiplied and added up in 32-bit integers.
//!
//! A chunk of a panel is unpacked to whole weights (`fixed.rs`) as byte planes, in the layout of a tile, and multiplied
//! with every tile of rows while it lies in the first-level cache. The sums of a tile stay in tile registers for a chunk
//! and in [`Scratch`] between chunks. They are exact, so the results have the bits that byte dot products give.

mod tiles;
mod unpack;

use std::arch::x86_64::*;
use std::ops::Range;

use super::affine::finish;
use super::fixed::Fixed;
use super::matmul::Output;
use super::matrix::{Matrix, OCTET, record_bytes};
use super::quantize::{BLOCK, QuantRows, TILE_ROWS, WHOLE_TILES_FROM};
use super::simd::LANES;
use crate::source::Encoding;
use tiles::{Configured, TILE_BYTES};
pub(super) use tiles::{PASS_OPERATIONS, arithmetic, permitted};

/// Row tiles for which a chunk is unpacked once. Their activations must stay in the second-level cache from panel to
/// panel, and so must the sums of `PANELS` panels.
const ROW_TILES: usize = 16;
/// Panels that take turns at a chunk of columns.
const PANELS: usize = 8;
/// Bytes of an unpacked chunk: two thirds of the first-level cache.
const CHUNK_BYTES: usize = 32 << 10;
/// Sums of one weight each: products of planes `i` and `j` belong to `256^(i + j)`.
const SUMS: usize = 4;
/// With more columns, sums of bytes could overflow 32 bits.
const MAX_COLS: usize = 32 << 10;

/// Sums of a row tile and a panel.
type Sums = [[[i32; LANES]; TILE_ROWS]; SUMS];

/// What a thread works in.
#[derive(Debug)]
pub(super) struct Scratch(Box<Memory>);

#[derive(Debug)]
#[repr(C, align(64))]
struct Memory {
    weights: [u8; CHUNK_BYTES],
    sums: [[Sums; ROW_TILES]; PANELS],
}

impl Default for Scratch {
    fn default() -> Self {
        // SAFETY: integers, for which zero is a value. Not `Box::new`, which would build it on the stack first.
        Self(unsafe { Box::new_zeroed().assume_init() })
    }
}

/// Whether [`multiply`] takes this product.
pub(super) fn takes(w: &Matrix, x: &QuantRows) -> bool {
    x.rows >= WHOLE_TILES_FROM && w.cols <= MAX_COLS
}

/// Rows times the given panels of a quantized matrix.
///
/// # Safety
/// AMX is [`permitted`], [`takes`] is true, and as [`super::matmul::panel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    out: Output,
    scratch: &mut Scratch,
) {
    let Encoding::Affine { bits, group, .. } = w.encoding else {
        unreachable!("quantized rows meet such only")
    };
    let planes = Fixed::of(bits).planes;
    let chunk = CHUNK_BYTES / (planes * TILE_BYTES);
    let product = tiles::product(x.planes, planes);
    let memory = &mut *scratch.0;
    // SAFETY: the caller's.
    let _configured = unsafe { Configured::new() };
    let row_tiles = x.rows.div_ceil(TILE_ROWS);
    for first_tile in (0..row_tiles).step_by(ROW_TILES) {
        let tiles = first_tile..row_tiles.min(first_tile + ROW_TILES);
        // With few rows the weights are what is waited for: then they are read straight through.
        let together = if tiles.len() > 2 { PANELS } else { 1 };
        for first_panel in panels.clone().step_by(together) {
            let panels = first_panel..panels.end.min(first_panel + together);
            for first in (0..x.blocks()).step_by(chunk) {
                let blocks = first..x.blocks().min(first + chunk);
                for (panel, sums) in panels.clone().zip(&mut memory.sums) {
                    // SAFETY: the panel and the columns are the matrix's, the scratch holds the chunk, and the tiles
                    // are configured.
                    unsafe {
                        let records = w.panels.as_ptr().add(panel * w.panel_bytes());
                        unpack::chunk(bits, group, records, blocks.clone(), w.cols, &mut memory.weights);
                        for (tile, sums) in tiles.clone().zip(sums) {
                            let rows = x.bytes().add(tile * x.tile_bytes() + blocks.start * x.block_bytes());
                            product(rows, memory.weights.as_ptr(), sums, blocks.len(), first == 0);
                        }
                    }
                }
            }
            for (panel, sums) in panels.zip(&memory.sums) {
                for (tile, sums) in tiles.clone().zip(sums) {
                    let rows = tile * TILE_ROWS..x.rows.min((tile + 1) * TILE_ROWS);
                    for (lane_row, row) in rows.enumerate() {
                        // SAFETY: the CPU has AVX-512.
                        let total = unsafe { total(&sums[..x.planes + planes - 1], lane_row) };
                        // SAFETY: the row is one of the output's.
                        unsafe { finish(w, panel, row, x.scales[row], &total, out) };
                    }
                }
            }
        }
    }
}

/// A row's sums put together.
#[inline(always)]
unsafe fn total(sums: &[[[i32; LANES]; TILE_ROWS]], row: usize) -> [f64; LANES] {
    // SAFETY: each row is one vector; the caller's CPU has the instructions.
    unsafe {
        let mut total = [_mm512_setzero_pd(); 2];
        for sum in sums.iter().rev() {
            let sum = _mm512_loadu_si512(sum[row].as_ptr().cast());
            let halves = [_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64::<1>(sum)];
            for (total, half) in total.iter_mut().zip(halves) {
                *total = _mm512_fmadd_pd(*total, _mm512_set1_pd(256.0), _mm512_cvtepi32_pd(half));
            }
        }
        std::mem::transmute(total)
    }
}
