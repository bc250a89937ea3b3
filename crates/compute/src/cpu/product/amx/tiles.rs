//! Tile registers and their instructions, in assembly: Rust 1.95 has no stable intrinsics for AMX.

use std::arch::asm;

use crate::cpu::layout::bf16_rows::{CHUNK_DEPTH, TILE_ROWS};
use crate::cpu::simd::LANES;

/// 16 rows of 64 bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile(pub [[u8; 64]; TILE_ROWS]);

/// A chunk of two panels as tiles: `[column tile][panel]`. 32 KiB, two thirds of the first-level
/// cache.
pub(super) type WeightTiles = [[Tile; 2]; CHUNK_DEPTH];
/// Sums of two row tiles and two panels: `[row tile][panel]`.
pub(super) type TileSums = [[[[f32; LANES]; TILE_ROWS]; 2]; 2];

/// Proof that the thread's tiles are configured. Dropping it releases the tiles.
pub(super) struct Configured;

/// A tile's rows and the bytes of a row.
pub(super) type Shape = (u8, u16);

#[repr(C, align(64))]
struct Palette {
    id: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configured {
    /// Configures all tiles to 16 rows of 64 bytes.
    ///
    /// # Safety
    /// `Isa::Amx` was detected.
    pub unsafe fn new() -> Self {
        // SAFETY: the caller's.
        unsafe { Self::with([(16, 64); 8]) }
    }

    /// Configures tile `i` to `shapes[i]`.
    ///
    /// # Safety
    /// `Isa::Amx` was detected; tiles have at most 16 rows of 64 bytes.
    pub unsafe fn with(shapes: [Shape; 8]) -> Self {
        let mut palette =
            Palette { id: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (tile, (rows, bytes)) in shapes.into_iter().enumerate() {
            (palette.rows[tile], palette.row_bytes[tile]) = (rows, bytes);
        }
        // SAFETY: a valid palette; the CPU has the instruction.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const palette, options(nostack, readonly)) };
        Self
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // Without this, every thread switch would save and restore the tiles.
        // SAFETY: the CPU has the instruction, because a `Configured` exists.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// `product(rows, weights, sums, depth, fresh, ahead)`: multiplies one or two row tiles, `depth`
/// tiles deep, with two panels. Adds the products to the sums, or starts new sums if `fresh`.
/// Prefetches the next sums, and [`AHEAD_BYTES`] per tile at `ahead`.
///
/// Contract: the tiles are [`Configured`]; `rows` (the second pointer only if it is used) and
/// `weights` hold `depth` (at least 1) tiles; one more tile, which is loaded and not used, follows
/// the first rows.
pub(super) type TileProduct = unsafe fn([*const u8; 2], *const u8, &mut TileSums, usize, bool, *const u8);

/// Bytes that a [`TileProduct`] prefetches with each column tile.
pub(super) const AHEAD_BYTES: usize = 256;

/// Writes a product as one block of assembly, because no other code may use the tiles in between.
///
/// tmm0 to tmm3 are the sums, 4 and 5 the rows, 6 and 7 the weights. Rows are loaded with a hint
/// that leaves the first-level cache to the weights: 11 ns per tile product instead of 14;
/// prefetching sums and rows makes it 9.8. The first rows of a column tile are loaded while the
/// tile before is still multiplied, which gains 6 % in a loop of its own.
macro_rules! product {
    ($name:ident, [$($sum:literal),*], [$($step:literal),* $(,)?]) => {
        /// A [`TileProduct`] of one or two row tiles.
        pub(super) unsafe fn $name(
            [first, second]: [*const u8; 2],
            weights: *const u8,
            sums: &mut TileSums,
            depth: usize,
            fresh: bool,
            ahead: *const u8,
        ) {
            let sums = std::ptr::from_mut(sums);
            // SAFETY: the contract of `TileProduct`; a prefetch is harmless at any address.
            unsafe {
                asm!(
                    "tileloaddt1 tmm4, [{first} + {line}]",
                    "test {fresh}, {fresh}",
                    "jz 3f",
                    $(concat!("tilezero tmm", $sum),)*
                    "jmp 2f",
                    "3:",
                    $(concat!("tileloadd tmm", $sum, ", [{sums} + {line} + 1024 * ", $sum, "]"),)*
                    "2:",
                    $($step,)*
                    "prefetcht1 [{ahead}]",
                    "prefetcht1 [{ahead} + 64]",
                    "prefetcht1 [{ahead} + 128]",
                    "prefetcht1 [{ahead} + 192]",
                    "prefetcht0 [{next}]",
                    "prefetcht0 [{next} + 64]",
                    "prefetcht0 [{next} + 128]",
                    "prefetcht0 [{next} + 192]",
                    "add {first}, 1024",
                    "add {second}, 1024",
                    "add {weights}, 2048",
                    "add {ahead}, 256",
                    "add {next}, 256",
                    "dec {depth}",
                    "jnz 2b",
                    $(concat!("tilestored [{sums} + {line} + 1024 * ", $sum, "], tmm", $sum),)*
                    first = inout(reg) first => _,
                    second = inout(reg) second => _,
                    weights = inout(reg) weights => _,
                    depth = inout(reg) depth => _,
                    sums = in(reg) sums,
                    next = inout(reg) sums.wrapping_add(1) => _,
                    ahead = inout(reg) ahead => _,
                    line = in(reg) 64usize,
                    fresh = in(reg) usize::from(fresh),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

product!(
    two,
    [0, 1, 2, 3],
    [
        "tileloadd tmm6, [{weights} + {line}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloaddt1 tmm5, [{second} + {line}]",
        "tileloadd tmm7, [{weights} + {line} + 1024]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloaddt1 tmm4, [{first} + {line} + 1024]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7",
    ]
);
product!(
    one,
    [0, 1],
    [
        "tileloadd tmm6, [{weights} + {line}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{weights} + {line} + 1024]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloaddt1 tmm4, [{first} + {line} + 1024]",
    ]
);

/// The integer sums of a group: one or two row tiles of signed bytes times a weight tile of
/// unsigned bytes, `depth` tiles (of up to 64 columns) deep. The second row tile follows the first
/// in memory; a weight tile has 1 KiB.
///
/// Contract: the tiles are [`Configured`]: 0 and 1 for the sums, 2 and 3 for the rows, 4 for the
/// weights; pointers hold `depth` (at least 1) tiles; no other code uses the tiles between `begin`
/// and `store`.
#[derive(Clone, Copy)]
pub(super) struct ByteProduct {
    /// `begin(rows, row_stride, weights, depth)`.
    pub begin: unsafe fn(*const i8, usize, *const u8, usize),
    /// `store(sums)`.
    pub store: unsafe fn(*mut i32),
}

macro_rules! byte_product {
    ($name:ident, [$($zero:literal),*], [$($step:literal),* $(,)?], [$($store:literal),*]) => {
        /// A [`ByteProduct`] of one or two tiles.
        pub(super) const $name: ByteProduct = {
            unsafe fn begin(rows: *const i8, row_stride: usize, weights: *const u8, depth: usize) {
                // SAFETY: the contract of `ByteProduct`.
                unsafe {
                    asm!(
                        $($zero,)*
                        "2:",
                        $($step,)*
                        "add {rows}, {row_stride}",
                        "add {weights}, 1024",
                        "dec {depth}",
                        "jnz 2b",
                        rows = inout(reg) rows => _,
                        row_stride = in(reg) row_stride,
                        weights = inout(reg) weights => _,
                        depth = inout(reg) depth => _,
                        line = in(reg) 64usize,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                        options(nostack, readonly),
                    );
                }
            }
            unsafe fn store(sums: *mut i32) {
                // SAFETY: the contract of `ByteProduct`. Assembly with side effects keeps its
                // order; no other code uses the tiles.
                unsafe { asm!($($store,)* sums = in(reg) sums, line = in(reg) 64usize, options(nostack)) };
            }
            ByteProduct { begin, store }
        };
    };
}

byte_product!(
    BYTES_OF_ONE,
    ["tilezero tmm0"],
    ["tileloadd tmm4, [{weights} + {line}]", "tileloadd tmm2, [{rows} + {line}]", "tdpbsud tmm0, tmm2, tmm4",],
    ["tilestored [{sums} + {line}], tmm0"]
);
byte_product!(
    BYTES_OF_TWO,
    ["tilezero tmm0", "tilezero tmm1"],
    [
        "tileloadd tmm4, [{weights} + {line}]",
        "tileloadd tmm2, [{rows} + {line}]",
        "tdpbsud tmm0, tmm2, tmm4",
        "tileloadd tmm3, [{rows} + {line} + 1024]",
        "tdpbsud tmm1, tmm3, tmm4",
    ],
    ["tilestored [{sums} + {line}], tmm0", "tilestored [{sums} + {line} + 1024], tmm1"]
);

/// Writes a loop that multiplies tiles and does nothing else: the upper bound of a product's speed.
/// Tiles of zeros would be faster.
macro_rules! arithmetic {
    ($name:ident, $multiply:literal) => {
        /// # Safety
        /// `Isa::Amx` was detected.
        pub(in crate::cpu) unsafe fn $name(passes: usize) {
            // As bf16, 0x3c3c is 0.0115.
            let tile = Tile([[0x3c; 64]; TILE_ROWS]);
            // SAFETY: the caller's; the tiles are configured and loaded from one whole tile.
            unsafe {
                let _configured = Configured::new();
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "tileloadd tmm4, [{tile} + {line}]",
                    "tileloadd tmm5, [{tile} + {line}]",
                    "tileloadd tmm6, [{tile} + {line}]",
                    "tileloadd tmm7, [{tile} + {line}]",
                    "2:",
                    concat!($multiply, " tmm0, tmm4, tmm6"),
                    concat!($multiply, " tmm1, tmm4, tmm7"),
                    concat!($multiply, " tmm2, tmm5, tmm6"),
                    concat!($multiply, " tmm3, tmm5, tmm7"),
                    "dec {passes}",
                    "jnz 2b",
                    tile = in(reg) tile.0.as_ptr(),
                    line = in(reg) 64usize,
                    passes = inout(reg) passes.max(1) => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
            }
        }
    };
}

/// Multiplications and additions of one pass of [`bf16_passes`] and of [`byte_passes`].
pub(in crate::cpu) const PASS_OPERATIONS: [usize; 2] = [4 * 2 * 16 * 16 * 32, 4 * 2 * 16 * 16 * 64];

arithmetic!(bf16_passes, "tdpbf16ps");
arithmetic!(byte_passes, "tdpbsud");
