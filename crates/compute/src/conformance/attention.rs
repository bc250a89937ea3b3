//! Attention over every kind of token cache.

use super::data::{BLOCKS_OF_SLOT, MOVED_BEFORE, Piece, SLOTS, columns, filled, moved, step, workload};
use super::{Suite, Work};
use crate::backend::{
    AttentionSpec, Backend, CacheShape, ComputeError, KvFormat, LatentSpec, Norm, QkNorm, Rope,
};

/// Input rows of each piece of a workload, by its sequence's positions: a position has the same
/// inputs in any pieces.
fn inputs(of_slot: &[Vec<f32>], width: usize, pieces: &[Piece]) -> Vec<f32> {
    let rows =
        |piece: &Piece| &of_slot[piece.slot][piece.start * width..(piece.start + piece.tokens) * width];
    pieces.iter().flat_map(rows).copied().collect()
}

struct Attention<'a> {
    spec: &'a AttentionSpec<Vec<f32>>,
    ropes: &'a [Rope],
    format: KvFormat,
    qkv: &'a [Vec<f32>],
    fused: bool,
}

impl Work for Attention<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let (width, outputs) = (spec.qkv_width(), spec.out_column + spec.heads() * spec.value_dim);
        let shape = CacheShape {
            format: self.format,
            caches: vec![spec.cache(); 2],
            blocks: SLOTS * BLOCKS_OF_SLOT,
            slots: SLOTS,
        };
        let mut caches = backend.caches(&shape)?;
        let mut results = Vec::new();
        for (index, pieces) in workload().into_iter().enumerate() {
            if index == MOVED_BEFORE {
                caches = moved(backend, &shape, caches)?;
            }
            let step = step(&pieces, SLOTS);
            let mut qkv = filled(backend, &inputs(self.qkv, width, &pieces), width)?;
            let mut out = filled(backend, &vec![0.0; step.rows() * outputs], outputs)?;
            for rows in backend.begin(&step, self.ropes)? {
                if self.fused {
                    backend.attention(&spec, &step, rows, &mut qkv, (&mut caches, 1), &mut out)?;
                } else {
                    backend.prepare_heads(&spec, &step, rows.clone(), &mut qkv)?;
                    backend.append(&spec, &step, rows.clone(), &qkv, (&mut caches, 1))?;
                    backend.attend(&spec, &step, rows, &qkv, (&mut caches, 1), &mut out)?;
                }
            }
            results.extend(columns(backend, &out, 0..step.rows(), (outputs, outputs))?);
        }
        Ok(results)
    }
}

struct Latent<'a> {
    spec: &'a LatentSpec<Vec<f32>>,
    ropes: &'a [Rope],
    format: KvFormat,
    absorbed: &'a [Vec<f32>],
    queries: &'a [Vec<f32>],
    latent: &'a [Vec<f32>],
}

impl Work for Latent<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let LatentSpec { heads, rank, rotated, .. } = *self.spec;
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let shape = CacheShape {
            format: self.format,
            caches: vec![spec.cache()],
            blocks: SLOTS * BLOCKS_OF_SLOT,
            slots: SLOTS,
        };
        let mut caches = backend.caches(&shape)?;
        let (query_width, out_width) = (heads * spec.query_dim(), heads * rank);
        let mut results = Vec::new();
        for (index, pieces) in workload().into_iter().enumerate() {
            if index == MOVED_BEFORE {
                caches = moved(backend, &shape, caches)?;
            }
            let step = step(&pieces, SLOTS);
            let absorbed = filled(backend, &inputs(self.absorbed, out_width, &pieces), out_width)?;
            let mut queries = filled(backend, &inputs(self.queries, query_width, &pieces), query_width)?;
            let latent_width = rank + rotated;
            let mut latent = filled(backend, &inputs(self.latent, latent_width, &pieces), latent_width)?;
            let mut out = backend.buffer(step.rows(), out_width)?;
            for rows in backend.begin(&step, self.ropes)? {
                let of = rows.clone();
                if index.is_multiple_of(2) {
                    let inputs = (&mut queries, &mut latent);
                    backend.prepare_and_append_latent(&spec, &step, of, inputs, (&mut caches, 0))?;
                } else {
                    backend.prepare_latent(&spec, &step, of.clone(), &mut queries, &mut latent)?;
                    backend.append_latent(&spec, &step, of, &latent, (&mut caches, 0))?;
                }
                backend.attend_latent(&spec, &step, rows, &absorbed, &queries, (&mut caches, 0), &mut out)?;
            }
            results.extend(columns(backend, &out, 0..step.rows(), (out_width, out_width))?);
        }
        Ok(results)
    }
}

fn rope(pairs: usize, interleaved: bool) -> Rope {
    let inverse_frequencies = (0..pairs).map(|i| 0.6f32.powi(i as i32)).collect();
    Rope { inverse_frequencies, amplitude: 1.1, interleaved }
}

impl<B: Backend> Suite<'_, B> {
    /// A random row for each position of each sequence.
    fn rows_of_slots(&mut self, width: usize) -> Vec<Vec<f32>> {
        (0..SLOTS).map(|_| self.random.numbers(120 * width)).collect()
    }

    fn limit_of(&self, format: KvFormat) -> f32 {
        match format {
            KvFormat::F16 => self.limits.attention,
            KvFormat::Int8 => self.limits.attention_int8,
        }
    }

    pub(super) fn attention(&mut self) {
        let (single, shared, uneven) = (vec![0..1], vec![0..4, 4..8], vec![0..1, 1..2, 2..5]);
        for (key_dim, value_dim, window, norm, queries_of, out_column) in [
            (16, 16, None, false, single, 0),
            (64, 64, Some(20), true, shared.clone(), 5),
            (128, 128, None, true, uneven, 0),
            (96, 64, None, false, shared, 0),
            (48, 80, Some(33), true, vec![0..3], 32),
            // Gemma 4's layers without a window.
            (512, 512, None, true, vec![0..2], 0),
        ] {
            let qk_norm = norm.then(|| QkNorm {
                query: self.random.numbers(key_dim),
                key: self.random.numbers(key_dim),
                eps: 1e-5,
            });
            let temperature = window.map(|_| (0.3, 16));
            // Above and below the scores.
            let heads = queries_of.last().map_or(0, |range: &std::ops::Range<usize>| range.end);
            let sinks = (value_dim >= 80)
                .then(|| self.random.numbers(heads).iter().map(|x| 4.0 * x).collect::<Vec<_>>());
            let spec = AttentionSpec {
                key_dim,
                value_dim,
                queries_of,
                scale: 1.0 / (key_dim as f32).sqrt(),
                window,
                qk_norm,
                rope: norm.then_some(1),
                sinks,
                temperature,
                out_column,
            };
            let qkv = self.rows_of_slots(spec.qkv_width());
            let ropes = [rope(2, false), rope(key_dim / 4, window.is_some())];
            for format in [KvFormat::F16, KvFormat::Int8] {
                for fused in [false, true] {
                    let queries = &spec.queries_of;
                    let case = format!(
                        "attention of {queries:?}, widths {key_dim} and {value_dim}, window {window:?}, {format:?}, fused {fused}"
                    );
                    let work = Attention { spec: &spec, ropes: &ropes, format, qkv: &qkv, fused };
                    self.compare(case, self.limit_of(format), work);
                }
            }
        }
    }

    pub(super) fn latent_attention(&mut self) {
        for (heads, rank, rotated, plain) in [(1, 32, 16, 16), (5, 64, 32, 48), (20, 128, 64, 128)] {
            let norm = Norm { weight: self.random.numbers(rank), eps: 1e-6 };
            let spec = LatentSpec { heads, rank, rotated, plain, scale: 0.3, norm, rope: Some(0) };
            let ropes = [rope(rotated / 2, heads > 1)];
            let absorbed = self.rows_of_slots(heads * rank);
            let queries = self.rows_of_slots(heads * spec.query_dim());
            let latent = self.rows_of_slots(rank + rotated);
            for format in [KvFormat::F16, KvFormat::Int8] {
                let case = format!("latent attention of {heads} heads, {rank} + {rotated}, {format:?}");
                let (absorbed, queries, latent) = (&absorbed, &queries, &latent);
                let work = Latent { spec: &spec, ropes: &ropes, format, absorbed, queries, latent };
                self.compare(case, self.limit_of(format), work);
            }
        }
    }
}
