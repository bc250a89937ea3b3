//! Products of a few quantized rows on AMX: the same exact sums of integers as by byte dot products (`affine.rs`), but a tile takes
//! all rows at once, so that a batch that decodes reads its weights as fast as a single sequence.
//!
//! A group's levels are unpacked to a tile, which the rows' byte planes are multiplied with, and its sums are scaled by vectors. The
//! three run one group apart, so that none waits for what another has just stored, and the vectors work between a product's beginning
//! and the storing of its sums, some 50 cycles later.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tiles::{self, ByteProduct, Configured, Tile};
use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::block32::octet;
use crate::cpu::layout::fixed_point::HEADER_BYTES;
use crate::cpu::layout::matrix::{Matrix, OCTET, STEP_BYTES, STEPS, record_bytes};
use crate::cpu::product::affine::{Numbers, ahead, ahead_of_pair, scaled};
use crate::cpu::product::output::Output;
use crate::cpu::product::quantize::{BLOCK, QuantRows, TILE_ROWS};
use crate::cpu::simd::{LANES, avx512::Avx512};
use crate::source::Encoding;

/// Whether tiles are faster than byte dot products. With few rows both wait for the memory, which dot products ask more evenly; eight
/// rows of one plane are one block of those, five to seven are two. Four rows of two planes and many columns are more than the first-level
/// cache holds, which dot products read for each panel (docs/performance.md#batches).
pub(in crate::cpu) fn pays(rows: usize, planes: usize) -> bool {
    if planes == 1 { rows > 4 && rows != 8 } else { rows > 3 }
}
/// Two byte planes of each row.
const MAX_LINES: usize = 2 * TILE_ROWS;
/// Tiles of the widest group.
const GROUP_TILES: usize = 2;

/// What a thread works in: of the group at hand and the one before.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Memory {
    weights: [[Tile; GROUP_TILES]; 2],
    /// `[plane][row]`.
    sums: [[[i32; LANES]; MAX_LINES]; 2],
}

/// Rows times the given panels of a quantized matrix.
///
/// # Safety
/// `Isa::Amx` was detected, and as [`crate::cpu::product::matmul::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
    memory: &mut Memory,
) {
    let Encoding::Affine { bits, .. } = w.encoding else { unreachable!("quantized rows meet such only") };
    let lines = x.planes * x.tile_rows;
    let first = lines.min(TILE_ROWS) as u8;
    let second = lines as u8 - first;
    let deep = x.group.min(BLOCK) as u16;
    let (sums, activations) = (|rows| (rows, 64), |rows| (rows, deep));
    let unused = (0, 0);
    let _configured = Configured::with([
        sums(first),
        if second > 0 { sums(second) } else { unused },
        activations(first),
        if second > 0 { activations(second) } else { unused },
        ((deep / 4) as u8, 64),
        unused,
        unused,
        unused,
    ]);
    let product = if second > 0 { tiles::BYTES_OF_TWO } else { tiles::BYTES_OF_ONE };
    for panel in panels {
        for first in rows.clone().step_by(x.tile_rows) {
            let rows = first..rows.end.min(first + x.tile_rows);
            if x.planes == 1 {
                of_bits!(bits, [tile], [1], (w, panel, x, rows, &product, out, memory));
            } else {
                of_bits!(bits, [tile], [2], (w, panel, x, rows, &product, out, memory));
            }
        }
    }
}

/// A tile's rows times a panel.
#[inline(always)]
unsafe fn tile<const PLANES: usize, const BITS: u32>(
    w: &Matrix,
    panel: usize,
    x: &QuantRows,
    rows: Range<usize>,
    product: &ByteProduct,
    out: Output,
    memory: &mut Memory,
) {
    let (groups, group) = (x.groups(), x.group);
    let records = w.panels.as_ptr().add(panel * w.panel_bytes());
    let record = |g: usize| records.add(g * record_bytes(BITS, group));
    let q = x.bytes().add(x.offset(rows.start));
    let x_groups = x.groups_from(rows.start);
    let mut acc = [_mm512_setzero_ps(); TILE_ROWS];
    for g in 0..groups + 2 {
        let multiplied = g.checked_sub(1).filter(|g| *g < groups);
        if let Some(g) = multiplied {
            let weights = match BITS {
                8 => record(g).add(HEADER_BYTES),
                _ => memory.weights[g % 2].as_ptr().cast(),
            };
            let col = g * group;
            let rows = q.add(col / BLOCK * x.block_bytes() + col % BLOCK);
            (product.begin)(rows, x.block_bytes(), weights, group.div_ceil(BLOCK));
        }
        if g < groups {
            let record = record(g);
            ahead::<Avx512>(record);
            unpack::<BITS>(record.add(HEADER_BYTES), group, &mut memory.weights[g % 2]);
        }
        if let Some(g) = g.checked_sub(2) {
            let numbers = Numbers::<Avx512>::of::<BITS>(record(g));
            let sums = &memory.sums[g % 2];
            for m in 0..rows.len() {
                let planes: [__m512i; PLANES] = std::array::from_fn(|plane| {
                    _mm512_loadu_si512(sums[plane * x.tile_rows + m].as_ptr().cast())
                });
                acc[m] = numbers.add(acc[m], planes, *x_groups.add(g * x.tile_rows + m));
            }
        }
        if let Some(g) = multiplied {
            (product.store)(memory.sums[g % 2].as_mut_ptr().cast());
        }
    }
    for (row, acc) in rows.zip(acc) {
        scaled::<Avx512>(w, panel, row, *x.scales.as_ptr().add(row), acc, out);
    }
}

/// A group's levels as rows of tiles. Those of 8 bits lie so already.
#[inline(always)]
unsafe fn unpack<const BITS: u32>(packed: *const u8, group: usize, to: &mut [Tile; GROUP_TILES]) {
    let to = to.as_mut_ptr().cast::<__m512i>();
    for o in 0..group / OCTET {
        let packed = packed.add(o * BITS as usize * STEP_BYTES);
        let steps = octet::<Avx512, BITS>(packed);
        for (pair, steps) in steps.as_chunks::<2>().0.iter().enumerate() {
            ahead_of_pair::<Avx512, BITS>(packed, pair);
            if BITS < 8 {
                let to = to.add(o * STEPS + 2 * pair);
                _mm512_store_si512(to, steps[0]);
                _mm512_store_si512(to.add(1), steps[1]);
            }
        }
    }
}
