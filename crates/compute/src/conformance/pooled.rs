//! Compressed tokens before they are normed, choices within blocks of keys, the last tokens.

use super::data::{BLOCKS_OF_SLOT, SLOTS, columns, filled, step, workload};
use super::extra::inputs;
use super::{Suite, Work};
use crate::backend::{
    Backend, CacheShape, CompressionSpec, ComputeError, Extra, KvFormat, LatentSpec, Norm, RecentSpec, Rope,
    SelectionBlocks, SelectionSpec,
};

struct Pooled<'a> {
    compression: &'a CompressionSpec<Vec<f32>>,
    selection: SelectionSpec,
    blocks: SelectionBlocks,
    /// Values and gates, the chooser's queries and weights.
    rows: [&'a [Vec<f32>]; 4],
}

/// The selection of each row; other columns have arbitrary content.
fn selected(rows: &[f32], width: usize) -> impl Iterator<Item = f32> {
    rows.chunks(width).flat_map(|row| &row[..=row[0] as usize]).copied()
}

impl Work for Pooled<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let Self { selection: spec, blocks, .. } = self;
        let dim = spec.dim;
        let compression = self.compression.clone().try_map(&mut |values| backend.vector(&values))?;
        let mut caches = backend.caches(&CacheShape {
            format: KvFormat::F16,
            caches: vec![compression.state(), spec.cache()],
            blocks: SLOTS * BLOCKS_OF_SLOT,
            slots: SLOTS,
        })?;
        let append = LatentSpec {
            heads: 0,
            rank: dim / 2,
            rotated: dim / 2,
            plain: 0,
            scale: 1.0,
            norm: Norm { weight: backend.vector(&vec![1.0; dim / 2])?, eps: 1e-6 },
            rope: None,
        };
        let mut results = Vec::new();
        for pieces in workload() {
            let step = step(&pieces, SLOTS);
            let widths = [dim, dim, spec.heads * dim, spec.heads];
            let mut buffers = Vec::new();
            for (rows, width) in self.rows.iter().zip(widths) {
                buffers.push(filled(backend, &inputs(rows, width, &pieces), width)?);
            }
            let Ok([values, gates, queries, weights]) = <[B::Buffer; 4]>::try_from(buffers) else {
                unreachable!("there is a buffer for each width")
            };
            let mut pooled = backend.buffer(step.rows(), dim)?;
            let mut chosen = backend.buffer(step.rows(), blocks.columns())?;
            let mut all = backend.buffer(step.rows(), spec.columns())?;
            let mut within = backend.buffer(step.rows(), spec.columns())?;
            for rows in backend.begin(&step, &[])? {
                let state = (&mut caches, 0);
                backend.pool(&compression, &step, rows.clone(), (&values, &gates), state, &mut pooled)?;
                results.extend(columns(backend, &pooled, rows.clone(), (dim, dim))?);
                // f16 holds signs exactly: a rounded key could change what is selected.
                backend.change_rows(&mut pooled, rows.clone(), &|_, row| {
                    row.iter_mut().for_each(|x| *x = x.signum());
                })?;
                backend.append_latent(&append, &step, rows.clone(), &pooled, (&mut caches, 1))?;
                let inputs = (&queries, &weights);
                let from = (&mut caches, 1);
                backend.select_blocks(spec, *blocks, &step, rows.clone(), inputs, from, &mut chosen)?;
                backend.select(spec, &step, rows.clone(), inputs, (&mut caches, 1), &mut all)?;
                let (inputs, from) = ([&queries, &weights, &chosen], (&mut caches, 1));
                backend.select_within(spec, *blocks, &step, rows, inputs, from, &mut within)?;
            }
            for (buffer, width) in
                [(&chosen, blocks.columns()), (&all, spec.columns()), (&within, spec.columns())]
            {
                results.extend(selected(&columns(backend, buffer, 0..step.rows(), (width, width))?, width));
            }
        }
        Ok(results)
    }
}

struct Recent(RecentSpec);

impl Work for Recent {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let mut caches = backend.caches(&CacheShape {
            format: KvFormat::F16,
            caches: vec![self.0.cache()],
            blocks: SLOTS * BLOCKS_OF_SLOT,
            slots: SLOTS,
        })?;
        let mut results = Vec::new();
        for (number, pieces) in workload().into_iter().enumerate() {
            let mut step = step(&pieces, SLOTS);
            step.tokens.iter_mut().zip(1000 * number as u32 + 1..).for_each(|(token, id)| *token = id);
            for rows in backend.begin(&step, &[])? {
                let recent = backend.recent_tokens(self.0, &step, rows, (&mut caches, 0))?;
                results.extend(
                    recent.into_iter().map(|id| if id == RecentSpec::NONE { -1.0 } else { id as f32 }),
                );
            }
        }
        Ok(results)
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn pooled(&mut self) {
        if self.backend.offers(Extra::Pooling) {
            for (every, keys, chosen) in [(2, 4, 3), (1, 8, 5), (1, 5, 40), (32, 1, 1)] {
                let dim = 32;
                let compression = CompressionSpec {
                    dim,
                    every,
                    overlaps: false,
                    place_bias: self.random.numbers(every * dim),
                    norm: None,
                    rope: Rope { inverse_frequencies: Vec::new(), amplitude: 1.0, interleaved: true },
                };
                let selection = SelectionSpec { heads: 3, dim, chosen: 7, every };
                let rows = [dim, dim, 3 * dim, 3].map(|width| self.of_slots(width));
                let work = Pooled {
                    compression: &compression,
                    selection,
                    blocks: SelectionBlocks { keys, chosen },
                    rows: rows.each_ref().map(Vec::as_slice),
                };
                let case = format!("means of {every} tokens, {chosen} blocks of {keys} keys");
                self.compare(case, self.limits.rows, work);
            }
        }
        if self.backend.offers(Extra::RecentTokens) {
            for count in [1, 3] {
                self.compare(format!("the last {count} tokens"), 0.0, Recent(RecentSpec { count }));
            }
        }
    }
}
