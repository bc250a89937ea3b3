//! Products of a few quantized rows on AMX. The integer sums are the same as those of byte dot
//! products (`affine.rs`), but a tile processes all rows at once, so a decoding batch reads its
//! weights as fast as a single sequence does.
//!
//! Three stages per group: unpack the levels to a tile, multiply the tile with the rows' byte
//! planes, scale the sums with vectors. The stages run one group apart, so that none waits for a
//! value that another has just stored. Vectors work during the 50 cycles between the start of a
//! product and the storing of its sums.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tiles::{self, ByteProduct, Configured, Tile};
use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::block32::{unpack_block32, unpack_pair};
use crate::cpu::layout::matrix::{
    BLOCK32, Headers, Matrix, Record, STEP_BYTES, STEPS, block_bytes, shares_block,
};
use crate::cpu::product::affine::{GroupScales, ahead_of_lines, ahead_of_pair, scaled};
use crate::cpu::product::output::Output;
use crate::cpu::product::quantize::{LINE_COLUMNS, QuantRows, STRIP_ROWS};
use crate::cpu::simd::{LANES, avx512::Avx512};
use crate::source::PackedFormat;

/// True if tiles are faster than byte dot products.
///
/// With few rows both wait for memory, which dot products read more evenly. Dot products take eight
/// rows of one plane as one block, five to seven rows as two. Four rows of two planes and many
/// columns exceed the first-level cache, and dot products read them for each panel.
pub(in crate::cpu) fn pays(rows: usize, planes: usize) -> bool {
    if planes == 1 { rows > 4 && rows != 8 } else { rows > 3 }
}
/// Maximum rows of all planes: two planes of each row.
const MAX_PLANE_ROWS: usize = 2 * STRIP_ROWS;
/// Tiles of the widest group.
const GROUP_TILES: usize = 2;

/// Memory of one thread, for the current group and the one before.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct ExactScratch {
    weights: [[Tile; GROUP_TILES]; 2],
    /// Sums of each group: `[plane][row]`.
    sums: [[[i32; LANES]; MAX_PLANE_ROWS]; 2],
}

/// Rows times the given panels of a quantized matrix.
///
/// # Safety
/// `Isa::Amx` was detected; the other conditions are those of
/// [`crate::cpu::product::matmul::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &QuantRows,
    rows: Range<usize>,
    out: Output,
    scratch: &mut ExactScratch,
) {
    let PackedFormat::Affine { bits, .. } = w.format else {
        unreachable!("quantized rows are multiplied with quantized weights")
    };
    let lines = x.planes * x.strip_rows;
    let first = lines.min(STRIP_ROWS) as u8;
    let second = lines as u8 - first;
    let deep = x.group.min(LINE_COLUMNS) as u16;
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
        for first in rows.clone().step_by(x.strip_rows) {
            let rows = first..rows.end.min(first + x.strip_rows);
            if x.planes == 1 {
                of_bits!(bits, [strip], [1], (w, panel, x, rows, &product, out, scratch));
            } else {
                of_bits!(bits, [strip], [2], (w, panel, x, rows, &product, out, scratch));
            }
        }
    }
}

/// A strip of rows times a panel.
#[inline(always)]
unsafe fn strip<const PLANES: usize, const BITS: u32>(
    w: &Matrix,
    panel: usize,
    x: &QuantRows,
    rows: Range<usize>,
    product: &ByteProduct,
    out: Output,
    scratch: &mut ExactScratch,
) {
    let (groups, group) = (x.groups(), x.group);
    let records = w.panels.as_ptr().add(panel * w.panel_bytes());
    let place = GroupPlace::of::<BITS>(group, w.headers);
    let q = x.bytes().add(x.offset(rows.start));
    let x_groups = x.groups_from(rows.start);
    let mut acc = [_mm512_setzero_ps(); STRIP_ROWS];
    for g in 0..groups + 2 {
        let multiplied = g.checked_sub(1).filter(|g| *g < groups);
        if let Some(g) = multiplied {
            let weights = match BITS {
                8 => records.add(place.levels(g)),
                _ => scratch.weights[g % 2].as_ptr().cast(),
            };
            let col = g * group;
            let rows = q.add(col / LINE_COLUMNS * x.line_stride() + col % LINE_COLUMNS);
            (product.begin)(rows, x.line_stride(), weights, group.div_ceil(LINE_COLUMNS));
        }
        if g < groups {
            if place.within(g) == 0 {
                ahead_of_lines::<Avx512>(records.add(place.record(g)), place.of_record.header_bytes);
            }
            let to = &mut scratch.weights[g % 2];
            if shares_block(group) {
                unpack_half::<BITS>(records.add(place.shared_block(g)), g % 2, to);
            } else {
                unpack::<BITS>(records.add(place.block(g)), group, to);
            }
        }
        if let Some(g) = g.checked_sub(2) {
            let record = records.add(place.record(g));
            let scales = GroupScales::<Avx512>::of_record::<BITS>(record, place.within(g), w.headers);
            let sums = &scratch.sums[g % 2];
            for m in 0..rows.len() {
                let planes: [__m512i; PLANES] = std::array::from_fn(|plane| {
                    _mm512_loadu_si512(sums[plane * x.strip_rows + m].as_ptr().cast())
                });
                acc[m] = scales.add(acc[m], planes, *x_groups.add(g * x.strip_rows + m));
            }
        }
        if let Some(g) = multiplied {
            (product.store)(scratch.sums[g % 2].as_mut_ptr().cast());
        }
    }
    for (row, acc) in rows.zip(acc) {
        scaled::<Avx512>(w, panel, row, *x.scales.as_ptr().add(row), acc, out);
    }
}

/// Where the groups of a panel are, in bytes from its start.
#[derive(Clone, Copy)]
struct GroupPlace {
    of_record: Record,
    /// Groups of a record, as a power of two.
    shift: u32,
    /// Bytes of a group's blocks.
    block_bytes: usize,
    /// Bytes of a block.
    shared_bytes: usize,
    /// Bytes of a group's levels, in whole steps: for 8 bits only.
    level_bytes: usize,
}

impl GroupPlace {
    #[inline(always)]
    fn of<const BITS: u32>(group: usize, headers: Headers) -> Self {
        let of_record = Record::of(BITS, group, headers);
        Self {
            of_record,
            shift: (of_record.columns / group).trailing_zeros(),
            block_bytes: group / BLOCK32 * block_bytes(BITS),
            shared_bytes: block_bytes(BITS),
            level_bytes: group / (BLOCK32 / STEPS) * STEP_BYTES,
        }
    }

    /// The group's number in its record.
    #[inline(always)]
    fn within(self, group: usize) -> usize {
        group & ((1 << self.shift) - 1)
    }

    /// The group's record, which its headers begin.
    #[inline(always)]
    fn record(self, group: usize) -> usize {
        (group >> self.shift) * self.of_record.bytes
    }

    /// The block that the group shares.
    #[inline(always)]
    fn shared_block(self, group: usize) -> usize {
        self.record(group) + self.of_record.header_bytes + self.within(group) / 2 * self.shared_bytes
    }

    /// The first block of the group.
    #[inline(always)]
    fn block(self, group: usize) -> usize {
        self.record(group) + self.of_record.header_bytes + self.within(group) * self.block_bytes
    }

    /// The levels of 8 bits.
    #[inline(always)]
    fn levels(self, group: usize) -> usize {
        self.record(group) + self.of_record.header_bytes + self.within(group) * self.level_bytes
    }
}

/// Unpacks half of a block to tile rows.
#[inline(always)]
unsafe fn unpack_half<const BITS: u32>(packed: *const u8, half: usize, to: &mut [Tile; GROUP_TILES]) {
    let to = to.as_mut_ptr().cast::<__m512i>();
    let [first, second] = match half {
        0 => [unpack_pair::<Avx512, BITS, 0>(packed), unpack_pair::<Avx512, BITS, 1>(packed)],
        _ => [unpack_pair::<Avx512, BITS, 2>(packed), unpack_pair::<Avx512, BITS, 3>(packed)],
    };
    ahead_of_pair::<Avx512, BITS>(packed, 2 * half);
    ahead_of_pair::<Avx512, BITS>(packed, 2 * half + 1);
    if BITS < 8 {
        for (index, step) in first.into_iter().chain(second).enumerate() {
            _mm512_store_si512(to.add(index), step);
        }
    }
}

/// Unpacks a group's levels to tile rows. 8-bit levels are stored as tile rows already.
#[inline(always)]
unsafe fn unpack<const BITS: u32>(packed: *const u8, group: usize, to: &mut [Tile; GROUP_TILES]) {
    let to = to.as_mut_ptr().cast::<__m512i>();
    for o in 0..group / BLOCK32 {
        let packed = packed.add(o * block_bytes(BITS));
        let steps = unpack_block32::<Avx512, BITS>(packed);
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
