//! The operations that a transformer is made of, behind the [`Backend`] trait, with CPU kernels.
//!
//! A [`Backend`] holds one rank's weights, buffers and caches and computes on them; models are
//! written once against it. It knows nothing of architectures, requests or files: weights come as a
//! [`MatrixSource`], work as a [`Step`].
//!
//! ```
//! use thunder_collectives::Group;
//! use thunder_compute::{Activations, Backend, CpuBackend, CpuConfig, Device, Encoding, Float};
//! use thunder_compute::{Isa, MatrixSource, RowOrder, Strided};
//!
//! let weights: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|w| w.to_le_bytes()).collect();
//! let source = MatrixSource {
//!     rows: 2,
//!     cols: 2,
//!     encoding: Encoding::Float(Float::F32),
//!     weight: Strided { bytes: &weights, stride: 8, row_bytes: 8 },
//!     scales: None,
//!     offsets: None,
//!     row_order: RowOrder::AsStored,
//!     first_row: 0,
//!     bias: None,
//!     pages: None,
//! };
//! let config = CpuConfig::new(1, Isa::detect()?, Activations::Auto);
//! let mut backend = CpuBackend::new(&config, Group::solo());
//! let w = backend.matrix(&[source])?;
//! let (mut x, mut y) = (backend.buffer(1, 2)?, backend.buffer(1, 2)?);
//! backend.write(&[10.0, 1.0], &mut x)?;
//! backend.product(&x, 0..1, &w, &mut y)?;
//! let mut result = [0.0; 2];
//! backend.read(&y, 0..1, &mut result)?;
//! assert_eq!(result, [12.0, 34.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod backend;
pub mod choice;
pub mod conformance;
pub mod cpu;
pub mod memory;
pub mod reference;
pub mod source;
pub mod step;

pub use backend::{
    Activation, AttentionSpec, Backend, CacheKind, CachePart, CacheShape, CompressedSpec, CompressionSpec,
    ComputeError, Curve, Decays, DeltaSpec, Device, Expert, ExpertGroups, Extra, GatedConvSpec, HeadSharing,
    Heads, InputOf, KvFormat, Largest, LatentSpec, LayerNorm, LinearInput, Norm, PartNorm, QkNorm,
    RareOperations, RecentSpec, Rope, Rounding, RouterSpec, Scores, Scoring, SelectionBlocks, SelectionSpec,
    SharedExpert, StateSpaceSpec, StreamSpec,
};
pub use choice::{Choice, ChoiceScratch, Choices, RowEdits, TokenEdit};
pub use cpu::{Activations, CpuBackend, CpuConfig, Isa, Overlap};
pub use reference::Reference;
pub use source::{
    Block, Encoding, Extent, FilePages, Float, Fp8Scales, GroupReader, GroupScale, IntegerLayout,
    MatrixSource, MatrixWindow, PackedFormat, RowOrder, Strided,
};
pub use step::{MAX_DRAFT, Step, StepSequence};
