//! Operands of attention to compressed tokens and of several residual streams (DeepSeek V4).

use super::cache::CacheKind;
use super::spec::{Norm, Rope};
use crate::step::MAX_DRAFT;

/// One layer's attention to single tokens in a window and to earlier compressed ones, on this rank.
/// All heads share one vector for each token, which is both key and value.
#[derive(Debug, Clone)]
pub struct CompressedSpec<V> {
    /// Local query heads.
    pub heads: usize,
    /// Width of a head, and of a token's vector.
    pub dim: usize,
    /// The last columns of these, which are rotated.
    pub rotated: usize,
    /// Single tokens that a token attends to, itself included.
    pub window: usize,
    /// Tokens that a compressed one is made of; `None`: the layer has none.
    pub every: Option<usize>,
    /// For each local head, a score in the softmax without a value.
    pub sinks: V,
}

impl<V> CompressedSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<CompressedSpec<W>, E> {
        let Self { heads, dim, rotated, window, every, sinks } = self;
        Ok(CompressedSpec { heads, dim, rotated, window, every, sinks: f(sinks)? })
    }

    /// The cache of single tokens.
    pub const fn cache(&self) -> CacheKind {
        CacheKind::Latent { rank: self.dim - self.rotated, rotated: self.rotated, every: 1 }
    }

    /// First position that a token at `position` attends to as a single token.
    pub const fn first_visible(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window)
    }

    /// Compressed tokens that a token at `position` may attend to.
    pub fn compressed(&self, position: usize) -> usize {
        self.every.map_or(0, |every| (position + 1) / every)
    }
}

/// How a layer compresses tokens. Each `every` tokens become one: for each column, the mean of
/// their values, weighted by the softmax of their gates. The result is normed, and its last columns
/// are rotated for the position of its first token.
///
/// The state of a sequence is `[slots][values, gates]`, the slot of a position being `position %
/// slots`. There are more slots than a compressed token needs, so a wrong draft overwrites nothing
/// that is still needed, and states need not be taken back.
#[derive(Debug, Clone)]
pub struct CompressionSpec<V> {
    /// Width of a compressed token.
    pub dim: usize,
    /// Tokens that become one.
    pub every: usize,
    /// A compressed token also includes the tokens before its own. Values and gates then have two
    /// parts of `dim` columns: the first is for the next compressed token, the second for the
    /// token's own.
    pub overlaps: bool,
    /// Added to the gates, `[every][width]`.
    pub place_bias: V,
    /// Norm of a compressed token, if there is one.
    pub norm: Option<Norm<V>>,
    /// The rotation; of no frequencies if there is none.
    pub rope: Rope,
}

impl<V> CompressionSpec<V> {
    /// The same with other vectors: `f` uploads each one.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn try_map<W, E>(self, f: &mut impl FnMut(V) -> Result<W, E>) -> Result<CompressionSpec<W>, E> {
        let Self { dim, every, overlaps, place_bias, norm, rope } = self;
        let (place_bias, norm) = (f(place_bias)?, norm.map(|norm| norm.try_map(f)).transpose()?);
        Ok(CompressionSpec { dim, every, overlaps, place_bias, norm, rope })
    }

    /// Columns of values, and of gates.
    pub const fn width(&self) -> usize {
        if self.overlaps { 2 * self.dim } else { self.dim }
    }

    /// Number of tokens in the state: those for the next compressed token, and as many as wrong
    /// drafts may have written after them.
    pub const fn slots(&self) -> usize {
        MAX_DRAFT + if self.overlaps { 2 * self.every } else { self.every }
    }

    /// The state of tokens that are not compressed yet.
    pub const fn state(&self) -> CacheKind {
        CacheKind::State { numbers: self.slots() * 2 * self.width() }
    }

    /// The cache of compressed tokens.
    pub const fn cache(&self) -> CacheKind {
        let rotated = 2 * self.rope.inverse_frequencies.len();
        CacheKind::Latent { rank: self.dim - rotated, rotated, every: self.every }
    }

    /// The tokens of a compressed one whose last token is at `position`: their slots, and the first
    /// column of the values to use.
    pub fn members(&self, position: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
        let (slots, every) = (self.slots(), self.every);
        let before = if self.overlaps && position >= 2 * every - 1 { every } else { 0 };
        let own = if self.overlaps { self.dim } else { 0 };
        let first = position + 1 - every;
        (first - before..=position).map(move |at| (at % slots, if at < first { 0 } else { own }))
    }
}

/// The last tokens of each sequence, which a layer keeps.
///
/// The state of a sequence is their ids, the slot of a position being `position % slots`; there are
/// more than are read, for wrong drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecentSpec {
    /// Tokens before each token that are read.
    pub count: usize,
}

impl RecentSpec {
    /// Stands for a token before the first one.
    pub const NONE: u32 = u32::MAX;

    /// Tokens in the state.
    pub const fn slots(&self) -> usize {
        self.count + 1 + MAX_DRAFT
    }

    /// The cache that keeps them.
    pub const fn cache(&self) -> CacheKind {
        CacheKind::State { numbers: self.slots() }
    }

    /// Stores the token at `position`. Returns the tokens before it, the last one first.
    pub fn keep(&self, state: &mut [f32], position: usize, id: u32, out: &mut Vec<u32>) {
        // Ids are below 2^24, so f32 represents them exactly.
        state[position % self.slots()] = id as f32;
        out.extend((1..=self.count).map(|back| match position.checked_sub(back) {
            Some(before) => state[before % self.slots()] as u32,
            None => Self::NONE,
        }));
    }
}

/// How a layer part reads several residual streams and writes to them (hyper-connections, arXiv
/// 2409.19606, with mixtures on the Birkhoff polytope, arXiv 2512.24880).
///
/// A row of weights is `[pre, post, mix]`: the part reads `Σ_j pre[j] * stream_j`; afterwards
/// stream k is `post[k] * result + Σ_j mix[j][k] * stream_j`. Where the streams become the last
/// one, a row is `[pre]`.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamSpec {
    /// Streams.
    pub streams: usize,
    /// Multiplies the products of pre, of post and of mix.
    pub scale: [f32; 3],
    /// Added to them, one for each column of a row.
    pub base: Vec<f32>,
    /// How often rows and columns of mix are divided by their sums.
    pub iterations: usize,
    /// Added to weights and to sums.
    pub eps: f32,
}

impl StreamSpec {
    /// Columns of a row.
    pub const fn columns(&self) -> usize {
        self.base.len()
    }

    /// Columns of a row with post and mix.
    pub const fn all_columns(streams: usize) -> usize {
        (2 + streams) * streams
    }

    /// A row of weights, in place, from the products of the streams' norm.
    pub fn weigh(&self, row: &mut [f32]) {
        let n = self.streams;
        for (column, (x, base)) in row.iter_mut().zip(&self.base).enumerate() {
            *x = *x * self.scale[(column / n).min(2)] + base;
        }
        let (pre, rest) = row.split_at_mut(n);
        pre.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp()) + self.eps);
        if rest.is_empty() {
            return;
        }
        let (post, mix) = rest.split_at_mut(n);
        post.iter_mut().for_each(|x| *x = 2.0 / (1.0 + (-*x).exp()));
        for row in mix.chunks_exact_mut(n) {
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter_mut().for_each(|x| *x = (*x - largest).exp());
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|x| *x = *x / sum + self.eps);
        }
        for iteration in 0..self.iterations {
            if iteration > 0 {
                for row in mix.chunks_exact_mut(n) {
                    let sum = row.iter().sum::<f32>() + self.eps;
                    row.iter_mut().for_each(|x| *x /= sum);
                }
            }
            for column in 0..n {
                let sum = (0..n).map(|row| mix[row * n + column]).sum::<f32>() + self.eps;
                (0..n).for_each(|row| mix[row * n + column] /= sum);
            }
        }
    }

    /// The input of a part, from a row of streams.
    pub fn collapse(&self, weights: &[f32], streams: &[f32], out: &mut [f32]) {
        out.fill(0.0);
        for (weight, stream) in weights[..self.streams].iter().zip(streams.chunks_exact(out.len())) {
            out.iter_mut().zip(stream).for_each(|(out, x)| *out += weight * x);
        }
    }

    /// Mixes a row of streams and adds a part's result.
    pub fn expand(&self, weights: &[f32], result: &[f32], streams: &mut [f32]) {
        let n = self.streams;
        let (post, mix) = weights[n..].split_at(n);
        let width = result.len();
        let mut before = vec![0.0; n];
        for (column, x) in result.iter().enumerate() {
            before.iter_mut().enumerate().for_each(|(j, x)| *x = streams[j * width + column]);
            for (k, post) in post.iter().enumerate() {
                let mixed: f32 = before.iter().enumerate().map(|(j, x)| mix[j * n + k] * x).sum();
                streams[k * width + column] = post * x + mixed;
            }
        }
    }
}

/// Minimum magnitude whose root is used in a gate.
const LEAST_DOT: f32 = 1e-6;

/// Adds a value to each of several residual streams (engram, DeepSeek V4.1). `made` has a key for
/// each stream, and then the value. The value is multiplied with the sigmoid of the signed root of
/// the dot product of the stream's norm, weighted by `weights`, with its key's norm.
pub(crate) fn add_value((weights, eps): (&[f32], f32), made: &[f32], streams: &mut [f32]) {
    let (keys, value) = made.split_at(weights.len());
    let parts = streams.chunks_exact_mut(value.len()).zip(keys.chunks_exact(value.len()));
    for ((stream, key), weights) in parts.zip(weights.chunks_exact(value.len())) {
        let gate = value_gate(stream, (key, weights), eps);
        stream.iter_mut().zip(value).for_each(|(x, value)| *x += gate * value);
    }
}

fn value_gate(stream: &[f32], (key, weights): (&[f32], &[f32]), eps: f32) -> f32 {
    let (mut dot, mut of_stream, mut of_key) = (0.0, 0.0, 0.0);
    for ((x, key), weight) in stream.iter().zip(key).zip(weights) {
        dot += f64::from(x * weight * key);
        of_stream += f64::from(x * x);
        of_key += f64::from(key * key);
    }
    let (width, eps) = (stream.len() as f64, f64::from(eps));
    let norms = ((of_stream / width + eps) * (of_key / width + eps)).sqrt();
    let dot = (dot / norms / width.sqrt()) as f32;
    let root = dot.abs().max(LEAST_DOT).sqrt().copysign(dot);
    1.0 / (1.0 + (-root).exp())
}
