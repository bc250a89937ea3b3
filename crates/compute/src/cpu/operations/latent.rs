//! Operations of latent attention.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::LatentSpec;
use crate::cpu::attention::latent::{
    HEADS_TOGETHER, LatentHeads, LatentPart, LatentScratch, attend_latent_on, write_latent_on,
};
use crate::cpu::layout::region::grown;
use crate::cpu::pointers::SendPtr;
use crate::cpu::rows::rms_norm_on;
use crate::cpu::threads::pool::for_rows;
use crate::cpu::{Buffer, CpuBackend, Linear};
use crate::step::{Step, StepSequence};

/// Computes some heads of a row of a sequence, in a thread's scratch.
type HeadsJob<'a> = dyn Fn(&mut LatentScratch, &StepSequence, usize, Range<usize>) + Sync + 'a;

/// The positions that were selected for a row.
pub(super) fn selected(selection: &Buffer, row: usize) -> &[f32] {
    let row = &selection.data[row * selection.width..][..selection.width];
    &row[1..=row[0] as usize]
}

impl CpuBackend {
    pub(super) fn prepare_latent_rows(
        &mut self,
        spec: &LatentSpec<Arc<[f32]>>,
        rows: Range<usize>,
        queries: &mut Buffer,
        latent: &mut Buffer,
    ) {
        let rotation = spec.rope.map(|rope| &self.rotations[rope]);
        let isa = self.isa;
        let normed = grown(&mut self.normed, spec.rank, 0.0);
        for row in rows {
            let queries = &mut queries.data[row * queries.width..][..spec.heads * spec.query_dim()];
            for query in queries.chunks_exact_mut(spec.query_dim()) {
                if let Some(rotation) = rotation {
                    rotation.apply(row, &mut query[spec.plain..]);
                }
                query.iter_mut().for_each(|x| *x *= spec.scale);
            }
            let latent = &mut latent.data[row * latent.width..][..spec.rank + spec.rotated];
            let (compressed, rotated) = latent.split_at_mut(spec.rank);
            // SAFETY: the instruction set was detected.
            unsafe { rms_norm_on(isa, compressed, &spec.norm.weight, spec.norm.eps, normed) };
            compressed.copy_from_slice(normed);
            if let Some(rotation) = rotation {
                rotation.apply(row, rotated);
            }
        }
    }

    pub(super) fn append_latent_rows(
        &mut self,
        (step, rows): (&Step, Range<usize>),
        latent: &Buffer,
        to: LatentPart,
    ) {
        let isa = self.isa;
        for_rows(&mut self.pool, rows.len(), &|part| {
            let part = rows.start + part.start..rows.start + part.end;
            for sequence in &step.sequences {
                let blocks = &step.blocks[sequence.blocks.clone()];
                for row in sequence.rows_within(&part) {
                    let tokens = sequence.position(row) + 1;
                    if !tokens.is_multiple_of(to.every) {
                        continue;
                    }
                    let token = &latent.data[row * latent.width..][..to.width()];
                    let (block, slot) = to.place(blocks, tokens / to.every - 1);
                    // SAFETY: the instruction set was detected; each token is one thread's.
                    unsafe { write_latent_on(isa, &to, block, slot, token) };
                }
            }
        });
    }

    pub(super) fn attend_latent_rows(
        &mut self,
        spec: &LatentSpec<Arc<[f32]>>,
        (step, rows): (&Step, Range<usize>),
        ([absorbed, queries], selection): ([&Buffer; 2], Option<&Buffer>),
        cache: LatentPart,
        out: &mut Buffer,
    ) {
        let (isa, rank, stride) = (self.isa, spec.rank, out.width);
        assert!(stride >= spec.heads * rank && out.rows >= rows.end, "the output lacks rows or columns");
        let to = SendPtr(out.data.as_mut_ptr());
        self.for_heads((step, rows), spec.heads, &|scratch, sequence, row, heads| {
            let of = LatentHeads {
                cache,
                blocks: &step.blocks[sequence.blocks.clone()],
                visible: sequence.position(row) + 1,
                selected: selection.map(|selection| selected(selection, row)),
                heads: heads.clone(),
                absorbed: &absorbed.data[row * absorbed.width..][..spec.heads * rank],
                queries: &queries.data[row * queries.width..][..spec.heads * spec.query_dim()],
                query_dim: spec.query_dim(),
            };
            // SAFETY: the instruction set was detected; each call has its own heads of a row of
            // `out`; tokens are not written while they are read.
            unsafe {
                let column = row * stride + heads.start * rank;
                let out = std::slice::from_raw_parts_mut(to.at(column), heads.len() * rank);
                attend_latent_on(isa, &of, scratch, out);
            }
        });
    }

    /// Calls `job` for some heads of a row at a time, on all threads, until all heads of these rows
    /// are done.
    pub(super) fn for_heads(
        &mut self,
        (step, rows): (&Step, Range<usize>),
        heads: usize,
        job: &HeadsJob<'_>,
    ) {
        // With few rows, each item has fewer heads, so that all threads have work.
        let work = (heads * rows.len()).div_ceil(self.pool.threads());
        let together = work.clamp(1, HEADS_TOGETHER);
        let pieces = heads.div_ceil(together);
        self.latent.resize_with(self.pool.threads(), LatentScratch::default);
        let scratch = SendPtr(self.latent.as_mut_ptr());
        let next = AtomicUsize::new(0);
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            let mut first = 0;
            let mut item = next.fetch_add(1, Ordering::Relaxed);
            for sequence in &step.sequences {
                let rows = sequence.rows_within(&rows);
                let count = rows.len() * pieces;
                while item < first + count {
                    let (row, piece) = (rows.start + (item - first) / pieces, (item - first) % pieces);
                    job(scratch, sequence, row, piece * together..heads.min((piece + 1) * together));
                    item = next.fetch_add(1, Ordering::Relaxed);
                }
                first += count;
            }
        });
    }

    /// A product for each head.
    pub(super) fn multiply_heads(
        &mut self,
        x: &Buffer,
        stride: usize,
        rows: Range<usize>,
        w: &[Linear],
        out: &mut Buffer,
    ) {
        out.shape(x.rows);
        for (rows, prompts) in self.alike(x.rows, &rows) {
            let out = out.output(rows.clone(), false);
            self.multiplier(prompts).run_heads(x, stride, rows, w, out);
        }
    }
}
