//! Operands of the operations: what a layer's attention, recurrence or product is, on one rank.

use std::ops::Range;

use super::cache::CacheKind;

/// Rotary position embedding: `theta(i) = position * inverse_frequencies[i]`. It rotates the first
/// `2 * len` dimensions of a head in pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// One per pair of dimensions, in radians per token.
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies cosine and sine (YaRN's attention factor); usually 1.
    pub amplitude: f32,
    /// Dimension `2i` is rotated with `2i + 1`; else `i` with `i + len`.
    pub interleaved: bool,
}

impl Rope {
    /// Cosine and sine of each pair at a position.
    pub fn turns(&self, position: usize) -> impl Iterator<Item = (f32, f32)> {
        self.inverse_frequencies.iter().map(move |frequency| {
            let (sin, cos) = (position as f64 * f64::from(*frequency)).sin_cos();
            (cos as f32 * self.amplitude, sin as f32 * self.amplitude)
        })
    }

    /// Rotates the first dimensions of a head by these turns, or back.
    pub fn rotate(&self, turns: &[(f32, f32)], back: bool, head: &mut [f32]) {
        for (i, (cos, sin)) in turns.iter().enumerate() {
            let (first, second) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + turns.len()) };
            let (a, b, sin) = (head[first], head[second], if back { -sin } else { *sin });
            head[first] = a * cos - b * sin;
            head[second] = b * cos + a * sin;
        }
    }
}

/// RMS norm of a vector: `x / sqrt(mean(x²) + eps) * weight`.
#[derive(Debug, Clone)]
pub struct Norm<V> {
    /// One per column.
    pub weight: V,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl<V> Norm<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<Norm<W>, E> {
        Ok(Norm { weight: f(self.weight)?, eps: self.eps })
    }
}

/// RMS norm of a vector that is divided over ranks by columns: the norm of all query heads, or of
/// all key heads, as one vector.
#[derive(Debug, Clone)]
pub struct PartNorm<V> {
    /// This rank's columns, of a buffer that may have more.
    pub columns: Range<usize>,
    /// The columns whose squares this rank adds to the sum. Each column counts on one rank only.
    pub counted: Range<usize>,
    /// One for each of `columns`.
    pub weight: V,
    /// Columns of the whole vector.
    pub width: usize,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl<V> PartNorm<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<PartNorm<W>, E> {
        let Self { columns, counted, weight, width, eps } = self;
        Ok(PartNorm { weight: f(weight)?, columns, counted, width, eps })
    }

    /// Factor of a row's columns, given the sum of squares over all ranks.
    pub fn factor(&self, sum: f32) -> f32 {
        1.0 / (sum / self.width as f32 + self.eps).sqrt()
    }
}

/// One layer's attention on this rank. The fused projection `qkv` has columns of all queries, then
/// keys, then values.
#[derive(Debug, Clone)]
pub struct AttentionSpec<V> {
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// For each local KV head, the local query heads that read it: ascending and disjoint.
    pub queries_of: Vec<Range<usize>>,
    /// Multiplies the scores, usually 1/√key_dim.
    pub scale: f32,
    /// A token attends to this many tokens, itself included; `None`: to all.
    pub window: Option<usize>,
    /// Norms of each query and key head before rotation.
    pub qk_norm: Option<QkNorm<V>>,
    /// Index of the model's [`Rope`]; `None`: no rotation.
    pub rope: Option<usize>,
    /// For each local query head, a score in the softmax without a value (gpt-oss's attention
    /// sinks).
    pub sinks: Option<V>,
    /// Queries grow by `1 + beta * ln(1 + floor(position / original))` (temperature tuning of Llama
    /// 4 and Ministral 3).
    pub temperature: Option<(f32, usize)>,
    /// First column of the output that the heads fill; see the model's column windows.
    pub out_column: usize,
}

/// Weights of the norms of query and key heads.
#[derive(Debug, Clone)]
pub struct QkNorm<V> {
    /// `[key_dim]`.
    pub query: V,
    /// `[key_dim]`.
    pub key: V,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl<V> QkNorm<V> {
    fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<QkNorm<W>, E> {
        Ok(QkNorm { query: f(self.query)?, key: f(self.key)?, eps: self.eps })
    }
}

impl<V> AttentionSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<AttentionSpec<W>, E> {
        Ok(AttentionSpec {
            qk_norm: self.qk_norm.map(|norm| norm.try_map(f)).transpose()?,
            sinks: self.sinks.map(f).transpose()?,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            queries_of: self.queries_of,
            scale: self.scale,
            window: self.window,
            rope: self.rope,
            temperature: self.temperature,
            out_column: self.out_column,
        })
    }

    /// Local query heads.
    pub fn heads(&self) -> usize {
        self.queries_of.last().map_or(0, |range| range.end)
    }

    /// Local KV heads.
    pub fn kv_heads(&self) -> usize {
        self.queries_of.len()
    }

    /// Columns of the fused projection.
    pub fn qkv_width(&self) -> usize {
        (self.heads() + self.kv_heads()) * self.key_dim + self.kv_heads() * self.value_dim
    }

    /// First column of a query head in the fused projection.
    pub fn query_column(&self, head: usize) -> usize {
        head * self.key_dim
    }

    /// First column of a KV head's key in the fused projection.
    pub fn key_column(&self, kv_head: usize) -> usize {
        (self.heads() + kv_head) * self.key_dim
    }

    /// First column of a KV head's value in the fused projection.
    pub fn value_column(&self, kv_head: usize) -> usize {
        (self.heads() + self.kv_heads()) * self.key_dim + kv_head * self.value_dim
    }

    /// The cache that this attention needs.
    pub fn cache(&self) -> CacheKind {
        CacheKind::Heads { heads: self.kv_heads(), key_dim: self.key_dim, value_dim: self.value_dim }
    }

    /// Factor of queries at `position`.
    pub fn query_scale(&self, position: usize) -> f32 {
        let temperature = self
            .temperature
            .map_or(1.0, |(beta, original)| 1.0 + beta * ((position / original) as f32).ln_1p());
        self.scale * temperature
    }

    /// First position that a token at `position` attends to.
    pub fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// One layer's latent attention on this rank (DeepSeek V2's MLA). A query head has `plain` columns
/// that are multiplied with keys computed from the compressed vector, then `rotated` columns that
/// are multiplied with the key part that all heads share.
#[derive(Debug, Clone)]
pub struct LatentSpec<V> {
    /// Local query heads.
    pub heads: usize,
    /// Width of the compressed vector.
    pub rank: usize,
    /// Width of the rotated part.
    pub rotated: usize,
    /// Width of a query's part that is not rotated.
    pub plain: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Norm of the compressed vector.
    pub norm: Norm<V>,
    /// Index of the model's [`Rope`], of `rotated / 2` frequencies; `None`: no rotation.
    pub rope: Option<usize>,
}

impl<V> LatentSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<LatentSpec<W>, E> {
        Ok(LatentSpec {
            norm: self.norm.try_map(f)?,
            heads: self.heads,
            rank: self.rank,
            rotated: self.rotated,
            plain: self.plain,
            scale: self.scale,
            rope: self.rope,
        })
    }

    /// Columns of a query head.
    pub fn query_dim(&self) -> usize {
        self.plain + self.rotated
    }

    /// The cache that this attention needs.
    pub fn cache(&self) -> CacheKind {
        CacheKind::Latent { rank: self.rank, rotated: self.rotated, every: 1 }
    }
}

/// Which value heads of a delta rule share a key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HeadSharing {
    /// Consecutive: the key heads of 6 value heads are 0 0 0 1 1 1.
    #[default]
    Grouped,
    /// Alternating: 0 1 0 1 0 1. llama.cpp's files have this order for some families.
    Tiled,
}

/// Factor of a delta rule's state, given `rate` (`A_log`) and `time`, the sum of a token's number
/// and the time's bias.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Decays {
    /// `exp(-exp(rate) * softplus(time))`.
    #[default]
    Softplus,
    /// `exp(lowest * sigmoid(exp(rate) * time))`, never below `exp(lowest)` (Kimi K3, GLM-5.3).
    Bounded {
        /// The logarithm of the strongest decay, below 0.
        lowest: f32,
    },
}

impl Decays {
    /// A factor by its definition.
    pub fn of(self, rate: f32, time: f32) -> f32 {
        match self {
            // For large times, e^time overflows and softplus(time) is time.
            Self::Softplus => {
                let softplus = if time > 20.0 { time } else { time.exp().ln_1p() };
                (-rate.exp() * softplus).exp()
            }
            Self::Bounded { lowest } => (lowest / (1.0 + (-rate.exp() * time).exp())).exp(),
        }
    }
}

/// One layer's gated delta rule on this rank, with the short convolution before it (Gated DeltaNet,
/// arXiv 2412.06464, as in Qwen3-Next). The state of a sequence is the convolution's last inputs,
/// `[kernel - 1, channels]`, then for each value head a matrix `[key_dim, value_dim]`.
#[derive(Debug, Clone)]
pub struct DeltaSpec<V> {
    /// Local key heads. Queries have as many.
    pub key_heads: usize,
    /// Local value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Which of them share a key head.
    pub sharing: HeadSharing,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    /// The taps, `[channels, kernel]`, the current token's last.
    pub taps: V,
    /// Added to the sum of a query's or key's squares when it is made a unit vector. Differs from
    /// the epsilon of the model's norms.
    pub unit_eps: f32,
    /// How decays are made; [`super::Backend::delta_rule`] has [`Decays::Softplus`] only.
    pub decays: Decays,
    /// `A_log`, `[value_heads]`.
    pub decay: V,
    /// `dt_bias`, `[value_heads]`.
    pub decay_bias: V,
    /// Norm of each value head's output, `[value_dim]`.
    pub norm: Norm<V>,
}

impl<V> DeltaSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<DeltaSpec<W>, E> {
        Ok(DeltaSpec {
            taps: f(self.taps)?,
            decay: f(self.decay)?,
            decay_bias: f(self.decay_bias)?,
            norm: self.norm.try_map(f)?,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            sharing: self.sharing,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            kernel: self.kernel,
            unit_eps: self.unit_eps,
            decays: self.decays,
        })
    }

    /// Consecutive value heads that share a key head. The next ones have the next key head, and
    /// after the last key head the first one follows.
    pub fn sharing_run(&self) -> usize {
        match self.sharing {
            HeadSharing::Grouped => (self.value_heads / self.key_heads.max(1)).max(1),
            HeadSharing::Tiled => 1,
        }
    }

    /// The key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        value_head / self.sharing_run() % self.key_heads.max(1)
    }

    /// Columns that the convolution works on: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Number of values in a sequence's state that the convolution keeps; the matrices follow.
    pub fn conv_numbers(&self) -> usize {
        (self.kernel - 1) * self.channels()
    }

    /// The cache that this layer needs.
    pub fn cache(&self) -> CacheKind {
        let matrices = self.value_heads * self.key_dim * self.value_dim;
        CacheKind::State { numbers: self.conv_numbers() + matrices }
    }
}

/// The largest of a row's outputs; the first one where several are equal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest {
    /// Its column.
    pub column: u32,
    /// Its value.
    pub value: f32,
}

impl Largest {
    /// The largest of no outputs.
    pub const NONE: Self = Self { column: 0, value: f32::NEG_INFINITY };

    /// The larger of two; the smaller column if they are equal. NaN counts as the largest.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self.value.is_nan() || other.value.is_nan() {
            return if self.value.is_nan() { self } else { other };
        }
        let before = other.value == self.value && other.column < self.column;
        if other.value > self.value || before { other } else { self }
    }

    /// The largest of a row; NaN or infinite if one of its values is.
    pub fn of(row: &[f32]) -> Self {
        row.iter()
            .enumerate()
            .fold(Self::NONE, |best, (column, &value)| best.or(Self { column: column as u32, value }))
    }
}

impl<Buffer, Vector> Clone for LinearInput<'_, Buffer, Vector> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Buffer, Vector> Copy for LinearInput<'_, Buffer, Vector> {}

/// Input rows of a product: a buffer, or what an operation computes from one for the product.
#[derive(Debug)]
pub enum LinearInput<'a, Buffer, Vector> {
    /// The rows of a buffer.
    Plain(&'a Buffer),
    /// Rows that [`super::Backend::linear_gated`] made. A few of their numbers are far larger than
    /// the rest, which matters to a backend that quantizes activations.
    Gated(&'a Buffer),
    /// The rows of a buffer whose product decides between different computations, such as a
    /// router's. A backend that rounds activations must do it finely, and in the same way for
    /// prompts and generated tokens.
    Precise(&'a Buffer),
    /// The rows' RMS norm, `x / sqrt(mean(x²) + eps) * weight`.
    Normed {
        /// The rows.
        x: &'a Buffer,
        /// One per column.
        weight: &'a Vector,
        /// Added to the mean of squares.
        eps: f32,
    },
}

/// Packed matrices of heads, all of one shape.
#[derive(Debug)]
pub struct Heads<M> {
    /// Number of heads.
    pub count: usize,
    /// One for each head, or one that has the rows of all heads.
    pub matrices: Vec<M>,
}
