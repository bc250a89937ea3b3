//! Peak arithmetic: loops with the kernels' own instructions and nothing else, the upper bound of a
//! product's speed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::cpu::dispatch::entry;
use crate::cpu::isa::Isa;
use crate::cpu::product::numerics::{ActivationFormat, Numerics, takes_tiles};
use crate::cpu::product::quantize::Activations;
#[cfg(target_arch = "x86_64")]
use crate::cpu::product::{amx, bf16};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::threads::pool::Pool;
use crate::source::PackedFormat;

/// The arithmetic of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Byte dot products, summed in integers: products with quantized weights.
    Bytes,
    /// f32 multiply-adds: products with float weights, attention.
    Floats,
    /// bf16 dot products: products of prompts, with a matrix unit.
    Bf16,
    /// Tiles of bytes: products of more than a few rows of generated tokens, with a matrix unit.
    Tiles,
}

impl Arithmetic {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Bytes, Self::Floats, Self::Bf16, Self::Tiles];

    /// The arithmetic of a product of `rows` rows (`prompts`: prompt tokens) with weights of this
    /// encoding. Products of gated activations may differ.
    pub fn of_product(
        isa: Isa,
        activations: Activations,
        encoding: PackedFormat,
        (rows, prompts): (usize, bool),
    ) -> Self {
        match (Numerics { isa, activations, prompts }).format(encoding) {
            ActivationFormat::F32 => Self::Floats,
            ActivationFormat::Quantized { .. } if takes_tiles(isa, rows, activations.planes(false)) => {
                Self::Tiles
            }
            ActivationFormat::Quantized { .. } => Self::Bytes,
            ActivationFormat::Bf16 => Self::Bf16,
        }
    }

    /// Multiplications per vector instruction; `None` if vectors do not support this.
    const fn lanes(self) -> Option<usize> {
        match self {
            Self::Bytes => Some(4 * LANES),
            Self::Floats => Some(LANES),
            Self::Bf16 | Self::Tiles => None,
        }
    }

    /// The arithmetic of attention for `rows` rows of a sequence.
    pub fn of_attention(isa: Isa, activations: Activations, rows: usize) -> Self {
        let bf16 = activations.allows_bf16() && rows > 1 && isa.has_matrix_unit();
        if bf16 { Self::Bf16 } else { Self::Floats }
    }
}

/// Vectors that a pass reads. All of them stay in the first-level cache.
const VECTORS: usize = 256;

/// The numbers that the loops read.
struct Operands {
    bytes: [u8; VECTORS * 4],
    floats: [f32; VECTORS],
    start: [f32; LANES],
}

/// Multiplications and additions per second (a multiply-add counts as two) of `threads` threads
/// together.
///
/// Returns the median of the passes that fit into `time`, for the loop that is fastest on this
/// instruction set; 0 if the set lacks the unit.
pub fn operations_per_s(isa: Isa, arithmetic: Arithmetic, threads: usize, time: Duration) -> f64 {
    const PASSES: usize = 64;
    let operands = black_box(Operands {
        bytes: std::array::from_fn(|i| i as u8),
        floats: [1e-3; VECTORS],
        start: [1.0; LANES],
    });
    // A loop with few accumulators waits for their latency; one with many spills registers. The
    // best number depends on the instruction set.
    let loops: &[usize] = if arithmetic.lanes().is_some() { &[4, 8, 12] } else { &[1] };
    let mut pool = Pool::new(threads, None);
    let (mut rates, began) = (vec![Vec::new(); loops.len()], Instant::now());
    while began.elapsed() < time || rates[0].is_empty() {
        for (&chains, rates) in loops.iter().zip(&mut rates) {
            let pass = Instant::now();
            let operations = match (arithmetic.lanes(), unit_arithmetic(isa, arithmetic)) {
                (Some(lanes), _) => {
                    pool.run(&|_| {
                        let mut sum = 0.0;
                        for _ in 0..PASSES {
                            // SAFETY: the set was detected.
                            unsafe { pass_on(isa, &operands, arithmetic, chains, &mut sum) };
                        }
                        black_box(sum);
                    });
                    2 * lanes * VECTORS * chains * PASSES
                }
                (None, Some((multiply, operations))) => {
                    // SAFETY: the set was detected.
                    pool.run(&|_| unsafe { multiply(PASSES * VECTORS) });
                    operations * PASSES * VECTORS
                }
                (None, None) => return 0.0,
            };
            rates.push((operations * threads) as f64 / pass.elapsed().as_secs_f64());
        }
    }
    rates.iter_mut().map(|rates| median(rates)).fold(0.0, f64::max)
}

/// The median; 0 for an empty slice. Sorts the numbers.
pub fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let (below, above) = (numbers.len().saturating_sub(1) / 2, numbers.len() / 2);
    match (numbers.get(below), numbers.get(above)) {
        (Some(below), Some(above)) => (below + above) / 2.0,
        _ => 0.0,
    }
}

/// Runs this many passes.
type Passes = unsafe fn(usize);

/// The loop for a unit that only some instruction sets have, and the operations of one pass.
fn unit_arithmetic(isa: Isa, arithmetic: Arithmetic) -> Option<(Passes, usize)> {
    match (isa, arithmetic) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, Arithmetic::Bf16) => Some((amx::bf16_passes, amx::PASS_OPERATIONS[0])),
        #[cfg(target_arch = "x86_64")]
        (Isa::Amx, Arithmetic::Tiles) => Some((amx::byte_passes, amx::PASS_OPERATIONS[1])),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16, Arithmetic::Bf16) => Some((bf16::arithmetic, bf16::PASS_OPERATIONS)),
        _ => None,
    }
}

entry! {
    /// One pass of vector arithmetic.
    fn pass_on(from: &Operands, arithmetic: Arithmetic, chains: usize, out: &mut f32) = pass
}

/// One pass over the operands with `chains` accumulators.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn pass<S: Simd>(from: &Operands, arithmetic: Arithmetic, chains: usize, out: &mut f32) {
    // SAFETY: the caller's.
    unsafe {
        *out += match (arithmetic, chains) {
            (Arithmetic::Bytes, 4) => bytes::<S, 4>(from),
            (Arithmetic::Bytes, 8) => bytes::<S, 8>(from),
            (Arithmetic::Bytes, _) => bytes::<S, 12>(from),
            (Arithmetic::Floats, 4) => floats::<S, 4>(from),
            (Arithmetic::Floats, 8) => floats::<S, 8>(from),
            (Arithmetic::Floats, _) => floats::<S, 12>(from),
            (Arithmetic::Bf16 | Arithmetic::Tiles, _) => unreachable!("tiles are not vectors"),
        };
    }
}

/// # Safety
/// As [`pass`].
#[inline(always)]
unsafe fn bytes<S: Simd, const CHAINS: usize>(from: &Operands) -> f32 {
    // SAFETY: reads four bytes at each of the `VECTORS` multiples of four; weights begin at least a
    // vector before the end.
    unsafe {
        // Each accumulator has different weights; with equal weights the compiler would merge the
        // sums.
        let weights: [S::B; CHAINS] = std::array::from_fn(|c| S::load_b(from.bytes.as_ptr().add(16 * c)));
        let mut acc = [S::zero_i(); CHAINS];
        for i in 0..VECTORS {
            for c in 0..CHAINS {
                acc[c] = S::dot4(acc[c], weights[c], from.bytes.as_ptr().add(4 * i).cast());
            }
        }
        acc.into_iter().map(|acc| S::reduce_add(S::to_f(acc))).sum()
    }
}

/// # Safety
/// As [`pass`].
#[inline(always)]
unsafe fn floats<S: Simd, const CHAINS: usize>(from: &Operands) -> f32 {
    // SAFETY: `start` holds a vector; `i` is below `VECTORS`.
    unsafe {
        let start = S::load(from.start.as_ptr());
        let mut acc: [S::F; CHAINS] = std::array::from_fn(|c| S::mul(start, S::splat(c as f32)));
        for i in 0..VECTORS {
            let x = S::splat(from.floats[i]);
            for acc in &mut acc {
                *acc = S::fma(*acc, x, start);
            }
        }
        acc.into_iter().map(|acc| S::reduce_add(acc)).sum()
    }
}
