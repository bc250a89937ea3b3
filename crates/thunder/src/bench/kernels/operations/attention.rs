//! Attention over filled caches.

use thunder_compute::cpu::measure::arithmetic::Arithmetic;
use thunder_compute::{
    AttentionSpec, Backend, CacheKind, CacheShape, ComputeError, KvFormat, LatentSpec, Norm, Step,
};

use super::data::{BLOCKS, CONTEXT, SEQUENCES, Steps, filled, numbers, push, sequences_of};
use super::{How, MAX_ROWS, Subject, Work};

/// Heads of an 8B model.
const HEAD_DIM: usize = 128;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
/// With the sequences, the KV cache has 512 MiB in f16, and a little more than half of it in int8.
const LAYERS: usize = 4;

/// DeepSeek V3's attention, on one of eight ranks.
const LATENT_HEADS: usize = 16;
const RANK: usize = 512;
const ROTATED: usize = 64;
const PLAIN: usize = 128;
/// With the sequences, 576 MiB.
const LATENT_LAYERS: usize = 16;

/// Sequences with filled KV caches, used in turn.
pub struct Attention<B: Backend> {
    spec: AttentionSpec<B::Vector>,
    caches: B::Caches,
    bytes_per_token: usize,
    steps: Steps,
    qkv: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Attention<B> {
    /// With caches that come from memory.
    pub fn in_memory(format: KvFormat, backend: &mut B) -> Result<Self, ComputeError> {
        Self::new(format, LAYERS, backend)
    }

    /// With this many layers, each of which takes 128 MiB in f16.
    pub fn new(format: KvFormat, layers: usize, backend: &mut B) -> Result<Self, ComputeError> {
        let spec = spec((0..KV_HEADS).map(|head| {
            let group = HEADS / KV_HEADS;
            head * group..(head + 1) * group
        }));
        Ok(Self {
            caches: filled_cache(format, layers, backend)?,
            bytes_per_token: shape(format, layers, kind()).bytes_per_token() / layers,
            steps: Steps::new(layers, Some(HEAD_DIM)),
            qkv: backend.buffer(MAX_ROWS, spec.qkv_width())?,
            out: backend.buffer(MAX_ROWS, HEADS * HEAD_DIM)?,
            spec,
        })
    }
}

/// Tokens that a step of `rows` rows reads, and pairs of a row and a token that it attends to.
fn tokens_and_pairs(rows: usize) -> (usize, usize) {
    match rows {
        ..=SEQUENCES => (rows * CONTEXT, rows * CONTEXT),
        _ => (CONTEXT, (CONTEXT - rows + 1..=CONTEXT).sum()),
    }
}

fn of_attention((isa, activations): How, rows: usize) -> Arithmetic {
    Arithmetic::of_attention(isa, activations, rows / sequences_of(rows))
}

impl<B: Backend> Subject<B> for Attention<B> {
    fn begin(&mut self, backend: &mut B, how: How, rows: usize) -> Result<Work, ComputeError> {
        backend.write(&numbers(rows * self.spec.qkv_width()), &mut self.qkv)?;
        self.steps.restart();
        let (tokens, pairs) = tokens_and_pairs(rows);
        Ok(Work {
            bytes: tokens * self.bytes_per_token,
            // A visible token takes one product for its score and one for the weighted sum.
            operations: 2 * 2 * pairs * HEADS * HEAD_DIM,
            arithmetic: of_attention(how, rows),
            counts_floats: false,
        })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { spec, caches, steps, qkv, out, .. } = self;
        let (step, layer) = steps.next(backend, rows)?;
        backend.attention(spec, step, 0..rows, qkv, (caches, layer), out)
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}

fn spec<V>(queries_of: impl Iterator<Item = std::ops::Range<usize>>) -> AttentionSpec<V> {
    AttentionSpec {
        key_dim: HEAD_DIM,
        value_dim: HEAD_DIM,
        queries_of: queries_of.collect(),
        scale: 1.0,
        window: None,
        qk_norm: None,
        rope: Some(0),
        sinks: None,
        temperature: None,
        out_column: 0,
    }
}

fn kind() -> CacheKind {
    CacheKind::Heads { heads: KV_HEADS, key_dim: HEAD_DIM, value_dim: HEAD_DIM }
}

fn shape(format: KvFormat, layers: usize, kind: CacheKind) -> CacheShape {
    CacheShape { format, caches: vec![kind; layers], blocks: BLOCKS, slots: SEQUENCES }
}

/// A KV cache with all sequences and layers filled, by attention without queries.
fn filled_cache<B: Backend>(
    format: KvFormat,
    layers: usize,
    backend: &mut B,
) -> Result<B::Caches, ComputeError> {
    let mut caches = backend.caches(&shape(format, layers, kind()))?;
    let spec = AttentionSpec { rope: None, ..spec((0..KV_HEADS).map(|_| 0..0)) };
    let mut qkv = filled(CONTEXT, spec.qkv_width(), backend)?;
    let mut out = backend.buffer(CONTEXT, 1)?;
    fill(layers, backend, |backend, step, layer| {
        backend.attention(&spec, step, 0..CONTEXT, &mut qkv, (&mut caches, layer), &mut out)
    })?;
    Ok(caches)
}

/// Calls `append` for the whole context of each sequence in each layer.
fn fill<B: Backend>(
    layers: usize,
    backend: &mut B,
    mut append: impl FnMut(&mut B, &Step, usize) -> Result<(), ComputeError>,
) -> Result<(), ComputeError> {
    let mut step = Step::default();
    for sequence in 0..SEQUENCES {
        step.clear();
        push(&mut step, sequence, 0, CONTEXT);
        backend.begin(&step, &[])?;
        (0..layers).try_for_each(|layer| append(backend, &step, layer))?;
    }
    Ok(())
}

/// Sequences with filled caches of compressed vectors, used in turn.
pub struct Latent<B: Backend> {
    spec: LatentSpec<B::Vector>,
    caches: B::Caches,
    steps: Steps,
    queries: B::Buffer,
    latent: B::Buffer,
    absorbed: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Latent<B> {
    pub fn new(backend: &mut B) -> Result<Self, ComputeError> {
        let spec = LatentSpec {
            heads: LATENT_HEADS,
            rank: RANK,
            rotated: ROTATED,
            plain: PLAIN,
            // Queries are scaled in place, by every run.
            scale: 1.0,
            norm: Norm { weight: backend.vector(&[1.0; RANK])?, eps: 1e-6 },
            rope: Some(0),
        };
        let mut caches = backend.caches(&shape(KvFormat::F16, LATENT_LAYERS, spec.cache()))?;
        let latent = filled(CONTEXT, RANK + ROTATED, backend)?;
        fill(LATENT_LAYERS, backend, |backend, step, layer| {
            backend.append_latent(&spec, step, 0..CONTEXT, &latent, (&mut caches, layer))
        })?;
        Ok(Self {
            caches,
            steps: Steps::new(LATENT_LAYERS, Some(ROTATED)),
            queries: backend.buffer(1, LATENT_HEADS * spec.query_dim())?,
            latent,
            absorbed: backend.buffer(1, LATENT_HEADS * RANK)?,
            out: backend.buffer(1, LATENT_HEADS * RANK)?,
            spec,
        })
    }
}

impl<B: Backend> Subject<B> for Latent<B> {
    fn begin(&mut self, backend: &mut B, _: How, rows: usize) -> Result<Work, ComputeError> {
        self.queries = filled(rows, LATENT_HEADS * self.spec.query_dim(), backend)?;
        self.latent = filled(rows, RANK + ROTATED, backend)?;
        self.absorbed = filled(rows, LATENT_HEADS * RANK, backend)?;
        self.out = backend.buffer(rows, LATENT_HEADS * RANK)?;
        self.steps.restart();
        let (tokens, pairs) = tokens_and_pairs(rows);
        Ok(Work {
            bytes: tokens * self.spec.cache().bytes_per_token(KvFormat::F16),
            operations: 2 * pairs * LATENT_HEADS * (RANK + ROTATED + RANK),
            arithmetic: Arithmetic::Floats,
            counts_floats: false,
        })
    }

    fn run(&mut self, backend: &mut B, rows: usize) -> Result<(), ComputeError> {
        let Self { spec, caches, steps, queries, latent, absorbed, out } = self;
        let (step, layer) = steps.next(backend, rows)?;
        let inputs = (&mut *queries, latent);
        backend.prepare_and_append_latent(spec, step, 0..rows, inputs, (&mut *caches, layer))?;
        backend.attend_latent(spec, step, 0..rows, absorbed, queries, (caches, layer), out)
    }

    fn out(&self) -> &B::Buffer {
        &self.out
    }
}
