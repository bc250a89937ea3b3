//! Which instructions the kernels use, and the kernels' entry points: one `#[target_feature]` function for each set.

use std::ops::Range;

use super::attention::{Arrivals, Heads, arrive as arrive_rows, attend};
use super::layout::bf16_rows::{HalfRows, HalfWriter};
use super::layout::matrix::Matrix;
use super::measure::arithmetic::{Arithmetic, Operands, pass};
use super::measure::bandwidth::sum;
use super::product::matmul::{self, Input, Output};
use super::product::quantize::RowWriter;
#[cfg(target_arch = "x86_64")]
use super::product::{amx, bf16};
use super::rows;
#[cfg(target_arch = "aarch64")]
use super::simd::neon::Neon;
use super::simd::{Simd, portable::Portable};
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2::Avx2, avx512::Avx512};
use crate::backend::Largest;
use crate::source::{Encoding, Float};
use crate::step::StepSequence;

/// An instruction set that this program has kernels for and this CPU can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The same with byte dot products.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same with dot products of bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The same with AMX.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON with dot products.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with dot products of unsigned and signed bytes.
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
}

/// Activations that are multiplied with one panel after the other: what stays in the second-level cache beside the weights, which
/// are read again for the next rows.
const CACHED_INPUT_BYTES: usize = 512 << 10;

/// What a thread works in.
#[cfg(target_arch = "x86_64")]
pub(super) use amx::Scratch;
/// What a thread works in: nothing.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Debug, Default)]
pub(super) struct Scratch;

impl Isa {
    /// The environment variable that forces a set.
    pub const VARIABLE: &str = "THUNDER_KERNEL";

    /// The fastest that this CPU has, or the one that `THUNDER_KERNEL` names.
    ///
    /// # Errors
    /// When the variable names a set that is unknown or that the CPU lacks; the text says which there are.
    pub fn detect() -> Result<Self, String> {
        let best = Self::available().pop().unwrap_or(Self::Portable);
        match std::env::var(Self::VARIABLE) {
            Err(_) => Ok(best),
            Ok(name) => Self::named(&name).map_err(|error| format!("{}={name}: {error}", Self::VARIABLE)),
        }
    }

    /// The set of this name.
    ///
    /// # Errors
    /// When it is unknown or the CPU lacks it; the text says which there are.
    pub fn named(name: &str) -> Result<Self, String> {
        let available = Self::available();
        available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<_> = available.into_iter().map(Self::name).collect();
            format!("this CPU runs {}", names.join(", "))
        })
    }

    /// All that this CPU can run, the fastest last.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if Avx2::<false>::detected() {
            all.push(Self::Avx2);
            if Avx2::<true>::detected() {
                all.push(Self::AvxVnni);
            }
        }
        #[cfg(target_arch = "x86_64")]
        if Avx512::detected() {
            all.push(Self::Avx512);
            if bf16::detected() {
                all.push(Self::Avx512Bf16);
            }
            if amx::permitted() {
                all.push(Self::Amx);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if Neon::<false>::detected() {
            all.push(Self::Neon);
            if Neon::<true>::detected() {
                all.push(Self::NeonI8mm);
            }
        }
        all
    }

    /// The name that `THUNDER_KERNEL` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => "i8mm",
        }
    }
}

/// Writes an entry point that instantiates a generic kernel for each instruction set.
macro_rules! entry {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// `isa` was detected on this CPU, and the kernel's own conditions hold.
        pub(super) unsafe fn $name(isa: Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Avx2<false>>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
            unsafe fn avxvnni($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Avx2<true>>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod")]
            unsafe fn neon($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Neon<false>>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,dotprod,i8mm")]
            unsafe fn i8mm($($arg: $ty),*) {
                // SAFETY: the caller's conditions.
                unsafe { $generic::<Neon<true>>($($arg),*) }
            }
            // SAFETY: the caller's conditions.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::AvxVnni => avxvnni($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon => neon($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    Isa::NeonI8mm => i8mm($($arg),*),
                    Isa::Portable => $generic::<Portable>($($arg),*),
                }
            }
        }
    };
}

/// Rows times the given panels of a matrix.
///
/// # Safety
/// `isa` was detected on this CPU, and the kernel's own conditions hold.
pub(super) unsafe fn matmul(
    isa: Isa,
    w: &Matrix,
    panels: Range<usize>,
    x: Input<'_>,
    out: Output,
    scratch: &mut Scratch,
) {
    // SAFETY: the caller's conditions.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        match x {
            Input::Halves(rows) if isa == Isa::Amx => return amx::multiply(w, panels, rows, out, scratch),
            Input::Halves(x) => {
                for rows in cached_rows(Input::Halves(x), w.cols, out.rows) {
                    bf16::multiply(w, panels.clone(), x, rows, out);
                }
                return;
            }
            Input::Quantized(x) if takes_tiles(isa, out.rows, x.planes) => {
                for rows in cached_rows(Input::Quantized(x), w.cols, out.rows) {
                    amx::multiply_exactly(w, panels.clone(), x, rows, out, scratch);
                }
                return;
            }
            _ => {}
        }
        #[cfg(not(target_arch = "x86_64"))]
        let Scratch = scratch;
        vectors(isa, w, panels, x, out);
    }
}

/// Whether prompts are multiplied with such weights in bf16. Without a matrix unit, that is faster only where integers are no choice.
pub fn takes_halves(isa: Isa, encoding: Encoding) -> bool {
    match (isa, encoding) {
        (_, Encoding::Float(Float::F32)) => false,
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, _) | (Isa::Avx512Bf16, Encoding::Float(_)) => true,
        _ => false,
    }
}

/// Whether there is a matrix unit that attends to prompts in bf16, and stores their gated activations so.
pub(super) fn has_matrix_unit(isa: Isa) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => true,
        _ => false,
    }
}

/// `silu(x · Gᵀ + g) * (x · Uᵀ + u)` for the given panels of gate and up, in bf16.
///
/// # Safety
/// The CPU [`has_matrix_unit`], and takes the rows in halves with both matrices, which have one shape; `out` has these rows and the
/// matrices' rows as columns; nobody else writes those of the panels.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no matrix unit is used there"))]
pub(super) unsafe fn gated_halves(
    gate_up: [&Matrix; 2],
    panels: Range<usize>,
    x: &HalfRows,
    out: HalfWriter<'_>,
    scratch: &mut Scratch,
) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's conditions.
    unsafe {
        amx::multiply_gated(gate_up, panels, x, out, scratch);
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("there is no matrix unit");
}

/// Rounds a row to bf16.
///
/// # Safety
/// The CPU [`takes_halves`], `x` holds a row's columns, and no other thread writes that row.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no matrix unit is used there"))]
pub(super) unsafe fn round_row(x: *const f32, row: usize, to: HalfWriter<'_>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's conditions; what takes halves has the instructions.
    unsafe {
        to.round(row, x);
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("nothing takes halves");
}

entry! {
    /// Products by vectors.
    fn vectors(w: &Matrix, panels: Range<usize>, x: Input<'_>, out: Output) = multiply
}
entry! {
    /// Quantizes a row.
    fn quantize_row(x: *const f32, row: usize, to: RowWriter<'_>) = quantize
}
entry! {
    /// One row's norm.
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = norm
}
entry! {
    /// One row's gated activation.
    fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) = gated
}
entry! {
    /// The largest of a row's outputs and of what was so before.
    fn largest(outputs: &[f32], first: u32, best: &mut Largest) = larger
}
/// Queries of one KV head over its sequence's keys and values; a prompt's in bf16 where that is allowed and there is a matrix unit.
///
/// # Safety
/// `isa` was detected on this CPU, and the kernel's own conditions hold.
pub(super) unsafe fn attention(isa: Isa, halves: bool, heads: &Heads<'_>, scratch: &mut Scratch) {
    // SAFETY: the caller's conditions.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if halves && isa == Isa::Amx && heads.of_prompt() {
            return amx::attend(heads, scratch);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let (_, Scratch) = (halves, scratch);
        attention_by_vectors(isa, heads);
    }
}

entry! {
    /// Queries by vectors.
    fn attention_by_vectors(heads: &Heads<'_>) = attend
}

entry! {
    /// Queries made ready, keys and values written to the cache.
    fn arrive(from: &Arrivals<'_>, sequence: &StepSequence, rows: Range<usize>, kv_heads: Range<usize>) = arrive_rows
}

entry! {
    /// Reads bytes.
    fn sum_bytes(bytes: &[u8], out: &mut f32) = sum
}
entry! {
    /// Multiplies and adds.
    fn arithmetic(from: &Operands, arithmetic: Arithmetic, chains: usize, out: &mut f32) = pass
}

/// Multiplies something so many times.
pub(super) type Passes = unsafe fn(usize);

/// What multiplies by a unit that only some sets have, and the operations of a pass.
pub(super) fn unit_arithmetic(isa: Isa, arithmetic: Arithmetic) -> Option<(Passes, usize)> {
    match (isa, arithmetic) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, Arithmetic::Halves) => Some((amx::multiply_halves, amx::PASS_OPERATIONS[0])),
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, Arithmetic::Tiles) => Some((amx::multiply_bytes, amx::PASS_OPERATIONS[1])),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16, Arithmetic::Halves) => Some((bf16::arithmetic, bf16::PASS_OPERATIONS)),
        _ => None,
    }
}

/// Whether so many rows of so many byte planes are multiplied by tiles.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no matrix unit is used there"))]
pub(super) fn takes_tiles(isa: Isa, rows: usize, planes: usize) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => amx::exact_pays(rows, planes),
        _ => false,
    }
}

#[inline(always)]
unsafe fn multiply<S: Simd>(w: &Matrix, panels: Range<usize>, x: Input<'_>, out: Output) {
    for rows in cached_rows(x, w.cols, out.rows) {
        // SAFETY: the caller's conditions.
        unsafe { matmul::multiply::<S>(w, panels.clone(), x, rows, out) };
    }
}

/// All rows, in parts that stay in the cache.
#[inline(always)]
fn cached_rows(x: Input<'_>, cols: usize, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let together = x.rows_of(CACHED_INPUT_BYTES, cols);
    (0..rows).step_by(together).map(move |first| first..rows.min(first + together))
}

#[inline(always)]
unsafe fn quantize<S: Simd>(x: *const f32, row: usize, to: RowWriter<'_>) {
    // SAFETY: the caller's conditions.
    unsafe { to.quantize::<S>(row, x) };
}

#[inline(always)]
unsafe fn norm<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: the CPU has `S`.
    unsafe { rows::rms_norm::<S>(x, weight, eps, out) };
}

#[inline(always)]
unsafe fn gated<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: the CPU has `S`.
    unsafe { rows::swiglu::<S>(gate, up, out) };
}

#[inline(always)]
unsafe fn larger<S: Simd>(outputs: &[f32], first: u32, best: &mut Largest) {
    // SAFETY: the CPU has `S`.
    unsafe { rows::largest::<S>(outputs, first, best) };
}
