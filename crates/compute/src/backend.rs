//! What a model asks of a device.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thunder_collectives::CommError;

use crate::source::MatrixSource;
use crate::step::Step;

/// Why a backend could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ComputeError {
    /// Memory could not be had. Nothing was changed.
    #[error("cannot allocate {bytes} bytes for {what}: {reason}")]
    Memory {
        /// The size asked for.
        bytes: usize,
        /// What it was for.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
    /// A shape that the kernels do not serve.
    #[error("{what} is {value}, but the {backend} backend needs {needs}")]
    Shape {
        /// The quantity.
        what: &'static str,
        /// Its value.
        value: usize,
        /// Who refuses.
        backend: &'static str,
        /// What would be accepted.
        needs: &'static str,
    },
    /// A collective failed; the group is unusable afterwards.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Rotary position embedding: `theta(i) = position * inverse_frequencies[i]`, on the first `2 * len` dimensions of a head,
/// dimension `i` paired with `i + len`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// One for each pair of dimensions, radians a token.
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies cosine and sine (YaRN's attention factor); 1 otherwise.
    pub amplitude: f32,
}

/// One layer's attention on this rank.
#[derive(Debug, Clone)]
pub struct AttentionSpec<V> {
    /// Width of a head.
    pub head_dim: usize,
    /// For each local KV head, the local query heads that read it: ascending, none twice.
    pub queries_of: Vec<Range<usize>>,
    /// Multiplies the scores, 1/√head_dim as a rule.
    pub scale: f32,
    /// A token sees this many tokens up to itself; `None`: all.
    pub window: Option<usize>,
    /// RMS norm of each query and key head before rotation.
    pub qk_norm: Option<QkNorm<V>>,
    /// Which of the model's [`Rope`]s rotates; `None`: no rotation.
    pub rope: Option<usize>,
    /// Queries grow by `1 + beta * ln(1 + floor(position / original))` (Llama 4's and Ministral 3's temperature tuning).
    pub temperature: Option<(f32, usize)>,
    /// First column of the output that the heads fill; see the model's column windows.
    pub out_column: usize,
}

/// Weights of the norms of query and key heads.
#[derive(Debug, Clone)]
pub struct QkNorm<V> {
    /// Length head_dim.
    pub query: V,
    /// Length head_dim.
    pub key: V,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl<V> AttentionSpec<V> {
    /// Local query heads.
    pub fn heads(&self) -> usize {
        self.queries_of.last().map_or(0, |range| range.end)
    }

    /// Local KV heads.
    pub fn kv_heads(&self) -> usize {
        self.queries_of.len()
    }

    /// Width of the fused projection: queries, keys, values.
    pub fn qkv_width(&self) -> usize {
        (self.heads() + 2 * self.kv_heads()) * self.head_dim
    }
}

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// Half-precision floats.
    #[default]
    F16,
    /// Bytes, with a scale in f32 for each head's key and value of a token: little more than half of the memory, which long
    /// contexts are read from at each token.
    Int8,
}

impl KvFormat {
    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Bytes beside the numbers for each head's key of a token, and as many for its value.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F16 => 0,
            Self::Int8 => size_of::<f32>(),
        }
    }
}

/// The size of a KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvShape {
    /// How numbers are kept.
    pub format: KvFormat,
    /// The layers on this rank.
    pub layers: Vec<KvLayer>,
    /// Blocks of [`crate::step::KV_BLOCK_TOKENS`] tokens.
    pub blocks: usize,
}

/// What one layer keeps of a token on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayer {
    /// KV heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Bytes that one token takes in all layers, keys and values.
    pub fn bytes_per_token(&self) -> usize {
        let of_head = |dim: usize| 2 * (dim * self.format.bytes() + self.format.scale_bytes());
        self.layers.iter().map(|layer| layer.heads * of_head(layer.head_dim)).sum()
    }
}

/// The largest of a row's outputs: the first, where several are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest {
    /// Its column.
    pub column: u32,
    /// Its value.
    pub value: f32,
}

impl Largest {
    /// Of no outputs.
    pub const NONE: Self = Self { column: 0, value: f32::NEG_INFINITY };

    /// Of these outputs and others.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let before = other.value == self.value && other.column < self.column;
        if other.value > self.value || before { other } else { self }
    }
}

/// Rows of activations that a product multiplies, or what is made of them on the way to it, which never lies in memory as a whole.
#[derive(Debug)]
pub enum LinearInput<'a, Buffer, Vector> {
    /// The rows themselves.
    Plain(&'a Buffer),
    /// What [`Backend::linear_gated`] made: a few of these are far larger than the others, which a backend that rounds them has to
    /// bear in mind.
    Gated(&'a Buffer),
    /// `x / sqrt(mean(x²) + eps) * weight`.
    Normed {
        /// The rows.
        x: &'a Buffer,
        /// One for each column.
        weight: &'a Vector,
        /// Added to the mean of squares.
        eps: f32,
    },
}

/// The rows that a backend's product takes.
pub type InputOf<'a, B> = LinearInput<'a, <B as Backend>::Buffer, <B as Backend>::Vector>;

/// One rank's device: memory, and the operations of a transformer on it.
///
/// A buffer is `[rows, width]` in f32, as far as operations do not say otherwise. Operations work on rows of the current step;
/// reductions over ranks go through the tensor-parallel group that the backend was made with, so that a device may use its own wires
/// for them.
pub trait Backend {
    /// Weights, packed for this device.
    type Matrix;
    /// A vector of weights.
    type Vector: Clone;
    /// Activations.
    type Buffer;
    /// Keys and values of all layers.
    type Kv;

    /// Packs matrices that share their input into one, `[Σ rows, cols]`: outputs come one after the other.
    ///
    /// # Errors
    /// When memory runs out or the shape is not served.
    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Self::Matrix, ComputeError>;
    /// Uploads a vector.
    fn vector(&mut self, values: &[f32]) -> Self::Vector;
    /// A zeroed buffer for up to `rows` rows.
    ///
    /// # Errors
    /// When memory runs out.
    fn buffer(&mut self, rows: usize, width: usize) -> Result<Self::Buffer, ComputeError>;
    /// An empty cache.
    ///
    /// # Errors
    /// When memory runs out or the shape is not served.
    fn kv_cache(&mut self, shape: KvShape) -> Result<Self::Kv, ComputeError>;
    /// Bytes that a packed matrix takes.
    fn matrix_bytes(matrix: &Self::Matrix) -> usize;

    /// Begins a step: computes rotations, and says in which parts the layers should take its rows, one after the other. The second
    /// part may be empty. Called before any operation of the step.
    fn begin(&mut self, step: &Step, ropes: &[Rope]) -> [Range<usize>; 2];
    /// `out[r] = scale * table[ids[r] - first]`; zero where the table does not hold the id.
    fn embed(&mut self, table: &Self::Matrix, ids: &[u32], first: u32, scale: f32, out: &mut Self::Buffer);
    /// `out = x · Wᵀ + bias`, for these rows.
    fn linear(&mut self, x: InputOf<'_, Self>, rows: Range<usize>, w: &Self::Matrix, out: &mut Self::Buffer);
    /// As [`Backend::linear`] for the first rows, as many as there are places in `largest`, which gets the largest output of each.
    fn linear_largest(
        &mut self,
        x: InputOf<'_, Self>,
        w: &Self::Matrix,
        out: &mut Self::Buffer,
        largest: &mut [Largest],
    );
    /// `residual += all_reduce(x · Wᵀ + bias)`, for these rows: the end of each half of a layer. The sum runs over the
    /// tensor-parallel group, in rank order. If the step has two parts, that of one may be under way, and not added yet, until this
    /// is called for the other, or [`Backend::settle`].
    ///
    /// # Errors
    /// When a peer was lost.
    fn linear_reduce_add(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Self::Matrix,
        residual: &mut Self::Buffer,
    ) -> Result<(), CommError>;
    /// `out = silu(x · Gᵀ + g) * (x · Uᵀ + u)`, for these rows, where `gate_up` was packed of G and U. What follows is a product of
    /// the same rows of `out` with `next`, before others are made: the device may leave them in the form that this takes, for nothing
    /// else to read.
    fn linear_gated(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        gate_up: &Self::Matrix,
        next: &Self::Matrix,
        out: &mut Self::Buffer,
    );
    /// Waits for what [`Backend::linear_reduce_add`] left under way, and adds it.
    ///
    /// # Errors
    /// When a peer was lost.
    fn settle(&mut self, residual: &mut Self::Buffer) -> Result<(), CommError>;
    /// Normalises and rotates queries and keys of these rows of `qkv`, appends keys and values to the cache, and attends. The
    /// keys and values of earlier rows must have been appended.
    #[allow(clippy::too_many_arguments, reason = "the operation's operands")]
    fn attention(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Self::Buffer,
        kv: &mut Self::Kv,
        layer: usize,
        out: &mut Self::Buffer,
    );
    /// Sums over the tensor-parallel group, in rank order.
    ///
    /// # Errors
    /// When a peer was lost.
    fn all_reduce(&mut self, x: &mut Self::Buffer) -> Result<(), CommError>;
    /// `out[i] = x[rows[i]]`.
    fn take_rows(&mut self, x: &Self::Buffer, rows: &[u32], out: &mut Self::Buffer);
    /// The rows of a buffer in host memory, contiguous.
    fn read<'a>(&'a self, x: &'a Self::Buffer) -> &'a [f32];
    /// Overwrites the current rows of a buffer.
    fn write(&mut self, values: &[f32], x: &mut Self::Buffer);
}
