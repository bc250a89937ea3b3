//! The operations that a transformer is made of, behind one backend trait, with CPU kernels.
//!
//! A [`Backend`] holds one rank's weights, buffers and KV cache and computes on them; models are written once against it.
//! It knows nothing of architectures, requests or files: weights come as a [`MatrixSource`], a step of work as a [`Step`].

pub mod backend;
pub mod cpu;
pub mod memory;
pub mod source;
pub mod step;

pub use backend::{
    AttentionSpec, Backend, ComputeError, InputOf, KvFormat, KvLayer, KvShape, Largest, LinearInput, QkNorm,
    Rope,
};
pub use cpu::{Activations, CpuBackend, CpuConfig, Isa, Overlap};
pub use source::{Encoding, FilePages, Float, MatrixSource, Strided};
pub use step::{Step, StepSequence};
