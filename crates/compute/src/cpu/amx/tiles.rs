//! Tile registers and their instructions, which Rust 1.95 has as assembly only.

use std::arch::asm;

use super::Sums;

/// Bytes of a tile.
pub(super) const TILE_BYTES: usize = 1024;

/// Whether this process may use AMX: asks the CPU, and the system for its permission.
pub(in super::super) fn permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        /// Leaf 7, EDX: amx-tile and amx-int8.
        const FEATURES: u32 = 1 << 24 | 1 << 25;
        /// `ARCH_REQ_XCOMP_PERM` of `arch_prctl`, and the tile data's state component.
        const REQUEST_PERMISSION: libc::c_long = 0x1023;
        const TILE_DATA: libc::c_long = 18;
        // SAFETY: the call takes two numbers; it only allows the process to use more state.
        std::arch::x86_64::__cpuid_count(7, 0).edx & FEATURES == FEATURES
            && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// The thread's tiles, all 16 rows of 64 bytes, until this is dropped.
pub(super) struct Configured;

#[repr(C, align(64))]
struct Palette {
    id: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configured {
    /// # Safety
    /// AMX is [`permitted`].
    pub unsafe fn new() -> Self {
        let used = |value| std::array::from_fn(|tile| if tile < 8 { value } else { 0 });
        let palette = Palette {
            id: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: used(64),
            rows: used(16).map(|rows: u16| rows as u8),
        };
        // SAFETY: a valid palette; the CPU has the instruction.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const palette, options(nostack, readonly)) };
        Self
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // Tiles in use would be saved and loaded again at every switch of threads.
        // SAFETY: the CPU has the instruction, as there is a `Configured`.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// `product(rows, weights, sums, blocks, fresh)`: adds the products of a row tile's blocks with a panel's to the sums, or
/// begins new ones.
///
/// Contract: the tiles are [`Configured`]; `rows` and `weights` hold `blocks` (at least 1) blocks of their planes.
pub(super) type Product = unsafe fn(*const i8, *const u8, &mut Sums, usize, bool);

/// Writes a product of row planes and weight planes as one block of assembly: between its instructions, nobody else
/// may touch the tiles. tmm0 to tmm3 are the sums.
macro_rules! product {
    ($name:ident, $row_planes:literal, $weight_planes:literal, [$($sum:literal),*], [$($step:literal),* $(,)?]) => {
        unsafe fn $name(rows: *const i8, weights: *const u8, sums: &mut Sums, blocks: usize, fresh: bool) {
            // SAFETY: the contract of `Product`.
            unsafe {
                asm!(
                    "test {fresh}, {fresh}",
                    "jz 3f",
                    $(concat!("tilezero tmm", $sum),)*
                    "jmp 2f",
                    "3:",
                    $(concat!("tileloadd tmm", $sum, ", [{sums} + {line} + 1024 * ", $sum, "]"),)*
                    "2:",
                    $($step,)*
                    concat!("add {rows}, 1024 * ", $row_planes),
                    concat!("add {weights}, 1024 * ", $weight_planes),
                    "dec {blocks}",
                    "jnz 2b",
                    $(concat!("tilestored [{sums} + {line} + 1024 * ", $sum, "], tmm", $sum),)*
                    rows = inout(reg) rows => _,
                    weights = inout(reg) weights => _,
                    blocks = inout(reg) blocks => _,
                    sums = in(reg) std::ptr::from_mut(sums),
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

// Planes lie from the highest to the lowest; only the highest is signed in the weights, all are in the rows. Rows stream
// past with the hint to leave the first-level cache to the weights: 34 ns a block instead of 46.
product!(
    two_by_two,
    2,
    2,
    [0, 1, 2],
    [
        "tileloaddt1 tmm4, [{rows} + {line}]",
        "tileloadd tmm6, [{weights} + {line}]",
        "tdpbssd tmm2, tmm4, tmm6",
        "tileloaddt1 tmm5, [{rows} + {line} + 1024]",
        "tdpbssd tmm1, tmm5, tmm6",
        "tileloadd tmm7, [{weights} + {line} + 1024]",
        "tdpbsud tmm0, tmm5, tmm7",
        "tdpbsud tmm1, tmm4, tmm7",
    ]
);
product!(
    one_by_two,
    1,
    2,
    [0, 1],
    [
        "tileloaddt1 tmm4, [{rows} + {line}]",
        "tileloadd tmm6, [{weights} + {line}]",
        "tdpbssd tmm1, tmm4, tmm6",
        "tileloadd tmm7, [{weights} + {line} + 1024]",
        "tdpbsud tmm0, tmm4, tmm7",
    ]
);
product!(
    two_by_three,
    2,
    3,
    [0, 1, 2, 3],
    [
        "tileloaddt1 tmm4, [{rows} + {line}]",
        "tileloadd tmm6, [{weights} + {line}]",
        "tdpbssd tmm3, tmm4, tmm6",
        "tileloaddt1 tmm5, [{rows} + {line} + 1024]",
        "tdpbssd tmm2, tmm5, tmm6",
        "tileloadd tmm7, [{weights} + {line} + 1024]",
        "tdpbsud tmm1, tmm5, tmm7",
        "tdpbsud tmm2, tmm4, tmm7",
        "tileloadd tmm6, [{weights} + {line} + 2048]",
        "tdpbsud tmm0, tmm5, tmm6",
        "tdpbsud tmm1, tmm4, tmm6",
    ]
);
product!(
    one_by_three,
    1,
    3,
    [0, 1, 2],
    [
        "tileloaddt1 tmm4, [{rows} + {line}]",
        "tileloadd tmm6, [{weights} + {line}]",
        "tdpbssd tmm2, tmm4, tmm6",
        "tileloadd tmm7, [{weights} + {line} + 1024]",
        "tdpbsud tmm1, tmm4, tmm7",
        "tileloadd tmm6, [{weights} + {line} + 2048]",
        "tdpbsud tmm0, tmm4, tmm6",
    ]
);

/// The product for so many planes of rows and of weights.
pub(super) fn product(row_planes: usize, weight_planes: usize) -> Product {
    match (row_planes, weight_planes) {
        (1, 2) => one_by_two,
        (2, 2) => two_by_two,
        (1, _) => one_by_three,
        _ => two_by_three,
    }
}

/// Operations of a pass of [`arithmetic`].
pub(in super::super) const PASS_OPERATIONS: usize = 4 * 2 * 16 * 16 * 64;

/// Multiplies tiles and nothing else: what a product can come near to. Tiles of zeros would be a third faster.
///
/// # Safety
/// AMX is [`permitted`].
pub(in super::super) unsafe fn arithmetic(passes: usize) {
    #[repr(align(64))]
    struct Tile([u8; TILE_BYTES]);
    let tile = Tile([3; TILE_BYTES]);
    // SAFETY: the caller's; the tiles are configured, and read from one whole tile.
    unsafe {
        let _configured = Configured::new();
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "tileloadd tmm4, [{tile} + {line}]",
            "tileloadd tmm5, [{tile} + {line}]",
            "tileloadd tmm6, [{tile} + {line}]",
            "tileloadd tmm7, [{tile} + {line}]",
            "2:",
            "tdpbsud tmm0, tmm4, tmm6",
            "tdpbsud tmm1, tmm5, tmm6",
            "tdpbsud tmm2, tmm4, tmm7",
            "tdpbsud tmm3, tmm5, tmm7",
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
