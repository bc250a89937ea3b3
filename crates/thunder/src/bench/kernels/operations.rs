//! The operations to measure. Weights, keys, values and the states of recurrences are in memory
//! rather than in a cache; a router and the inputs of convolutions are small.

mod attention;
mod data;
mod products;
mod states;

use std::fmt;
use std::str::FromStr;

use thunder_compute::cpu::measure::arithmetic::Arithmetic;
use thunder_compute::{Activations, Backend, ComputeError, Float, Isa, KvFormat, PackedFormat};

pub use attention::Attention;
use attention::Latent;
use products::{Experts, Router, Swiglu};
pub use products::{MATRIX, Norm, Product};
use states::{Delta, GatedConv, Part, StateSpace};

/// Most rows of a step.
pub const MAX_ROWS: usize = 2048;

/// An operation, as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A product with weights.
    Linear(PackedFormat),
    /// Attention over a KV cache of this format.
    Attention(KvFormat),
    /// Attention over compressed vectors.
    Latent,
    /// The experts that rows have chosen.
    Experts,
    /// A norm, its product with a router's matrix, and the choice of experts.
    Router,
    /// A norm fused into a product with few outputs.
    Norm,
    /// Gated activations of a product with few inputs, fused into one with few outputs.
    Swiglu,
    /// A gated delta rule, or the convolution before it.
    Delta(Part),
    /// A state space with its convolution.
    StateSpace,
    /// A gated short convolution.
    GatedConv,
}

impl Operation {
    /// All operations, the most important first.
    pub fn all() -> Vec<Self> {
        let affine = |bits, group| PackedFormat::Affine { bits, group };
        let mut all = Vec::new();
        for bits in [4, 8, 2, 3, 5, 6] {
            all.extend([64, 32, 128].map(|group| Self::Linear(affine(bits, group))));
        }
        all.extend([Float::BF16, Float::F16].map(|float| Self::Linear(PackedFormat::Float(float))));
        all.extend([KvFormat::F16, KvFormat::Int8].map(Self::Attention));
        all.extend([Self::Latent, Self::Experts, Self::Router, Self::Norm, Self::Swiglu]);
        all.extend([Part::Rule, Part::Conv].map(Self::Delta));
        all.extend([Self::StateSpace, Self::GatedConv]);
        all
    }

    /// Allocates and fills its operands.
    pub fn subject<B: Backend + 'static>(self, backend: &mut B) -> Result<Box<dyn Subject<B>>, ComputeError> {
        Ok(match self {
            Self::Linear(format) => Box::new(Product::of_a_1b(format, backend)?),
            Self::Attention(format) => Box::new(Attention::in_memory(format, backend)?),
            Self::Latent => Box::new(Latent::new(backend)?),
            Self::Experts => Box::new(Experts::new(backend)?),
            Self::Router => Box::new(Router::new(backend)?),
            Self::Norm => Box::new(Norm::new(backend)?),
            Self::Swiglu => Box::new(Swiglu::new(backend)?),
            Self::Delta(part) => Box::new(Delta::new(part, backend)?),
            Self::StateSpace => Box::new(StateSpace::new(backend)?),
            Self::GatedConv => Box::new(GatedConv::new(backend)?),
        })
    }
}

impl FromStr for Operation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = Self::all().into_iter().chain([Self::Linear(PackedFormat::Float(Float::F32))]);
        all.into_iter().find(|operation| operation.to_string() == text).ok_or_else(|| {
            "must be BITS/GROUP with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128; bf16, f16, f32, attention, \
             attention-int8, latent, experts, router, norm, swiglu, delta-rule, conv, state-space or gated-conv"
                .to_owned()
        })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Linear(PackedFormat::Affine { bits, group }) => return write!(f, "{bits}/{group}"),
            Self::Linear(PackedFormat::Float(Float::BF16)) => "bf16",
            Self::Linear(PackedFormat::Float(Float::F16)) => "f16",
            Self::Linear(PackedFormat::Float(Float::F32)) => "f32",
            Self::Attention(KvFormat::F16) => "attention",
            Self::Attention(KvFormat::Int8) => "attention-int8",
            Self::Latent => "latent",
            Self::Experts => "experts",
            Self::Router => "router",
            Self::Norm => "norm",
            Self::Swiglu => "swiglu",
            Self::Delta(Part::Rule) => "delta-rule",
            Self::Delta(Part::Conv) => "conv",
            Self::StateSpace => "state-space",
            Self::GatedConv => "gated-conv",
        })
    }
}

/// The work of one run.
pub struct Work {
    /// Bytes of weights, keys and values that are read; of other operations, all bytes that are
    /// read and written.
    pub bytes: usize,
    /// Multiplications and additions. An activation counts once, whatever its size in bytes.
    pub operations: usize,
    /// The arithmetic of a CPU whose peak the operations are compared with.
    pub arithmetic: Arithmetic,
    /// Only operations of f32 are counted, not those of a product in the same kernels.
    #[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a GPU tells what its kernels use"))]
    pub counts_floats: bool,
}

/// A CPU's instruction set, and the precision of activations.
pub type How = (Isa, Activations);

/// An operation with its operands.
pub trait Subject<B: Backend> {
    /// Makes an input of `rows` rows and returns the work of a run.
    fn begin(&mut self, backend: &mut B, how: How, rows: usize) -> Result<Work, ComputeError>;

    /// Computes as many rows as [`Subject::begin`] was given.
    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError>;

    /// The buffer with the results.
    #[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "for devices that compute behind the host"))]
    fn out(&self) -> &B::Buffer;

    /// Computes several runs that follow each other without a wait of the host, and waits for them,
    /// on a device that computes behind the host.
    #[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "for devices that compute behind the host"))]
    fn series(&mut self, backend: &mut B, rows: usize, runs: u32) -> Result<(), ComputeError> {
        (0..runs).try_for_each(|_| self.run(backend, rows))?;
        let (_, width) = backend.extent(self.out());
        backend.read(self.out(), 0..1, &mut vec![0.0; width])
    }
}

#[cfg(test)]
mod tests {
    use thunder_collectives::Group;
    use thunder_compute::{CpuBackend, CpuConfig, Device};

    use super::*;

    #[test]
    fn every_operation_has_a_name_and_runs_with_one_row_and_with_a_prompt() {
        let how = (Isa::Portable, Activations::Auto);
        for operation in Operation::all() {
            assert_eq!(operation.to_string().parse(), Ok(operation));
            // Products differ in their weights only, and take a quarter of a gigabyte each.
            if matches!(operation, Operation::Linear(format) if format != (PackedFormat::Affine { bits: 4, group: 64 }))
            {
                continue;
            }
            let mut backend = CpuBackend::new(&CpuConfig::new(2, how.0, how.1), Group::solo());
            let mut subject = operation.subject(&mut backend).unwrap();
            for rows in [1, 4, 20] {
                let work = subject.begin(&mut backend, how, rows).unwrap();
                assert!(work.bytes > 0 && work.operations > 0, "{operation}");
                subject.series(&mut backend, rows, 2).unwrap();
                let (height, width) = backend.extent(subject.out());
                let mut out = vec![0.0; height * width];
                backend.read(subject.out(), 0..height, &mut out).unwrap();
                assert!(height >= rows && out.iter().all(|x| x.is_finite()), "{operation}, {rows} rows");
                assert!(out[..rows * width].iter().any(|x| *x != 0.0), "{operation}, {rows} rows");
            }
        }
    }
}
