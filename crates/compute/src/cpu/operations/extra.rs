//! Operations that few families need.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::{Backend, ComputeError, Device, LatentSpec, SelectionBlocks, SelectionSpec};
use crate::cpu::attention::latent::{LatentPart, LatentScratch};
use crate::cpu::attention::selection::{SelectionHeads, select_blocks_on, select_on};
use crate::cpu::pointers::SendPtr;
use crate::cpu::threads::pool::for_rows;
use crate::cpu::{Buffer, CpuBackend};
use crate::step::Step;

/// Selects for a row, in a thread's scratch, to a row of the selection.
type SelectJob<'a> = dyn Fn(usize, SelectionHeads<'_>, (&mut LatentScratch, &mut [f32])) + Sync + 'a;

impl CpuBackend {
    /// Changes rows in place, each on one thread.
    pub(super) fn change_each_row(
        &mut self,
        x: &mut Buffer,
        rows: Range<usize>,
        change: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        assert!(rows.end <= x.rows, "rows {rows:?} of {}", x.rows);
        let width = x.width;
        let to = SendPtr(x.data[rows.start * width..rows.end * width].as_mut_ptr());
        for_rows(&mut self.pool, rows.len(), &|part| {
            for index in part {
                // SAFETY: each row is one thread's.
                change(index, unsafe { std::slice::from_raw_parts_mut(to.at(index * width), width) });
            }
        });
    }

    pub(super) fn copy_row_columns(
        &mut self,
        (x, from): (&Buffer, usize),
        rows: Range<usize>,
        (out, to): (&mut Buffer, Range<usize>),
    ) {
        out.shape(x.rows);
        let first = rows.start;
        self.change_each_row(out, rows, &|index, out| {
            out[to.clone()].copy_from_slice(&x.data[(first + index) * x.width + from..][..to.len()]);
        });
    }

    /// Sums rows of both over the ranks, side by side.
    pub(super) fn reduce_joined(
        &mut self,
        [x, y]: [&mut Buffer; 2],
        rows: Range<usize>,
    ) -> Result<(), ComputeError> {
        let mut both = self.spare(x.capacity().max(rows.len()), x.width + y.width);
        both.shape(rows.len());
        for (row, joined) in rows.clone().zip(both.data.chunks_exact_mut(x.width + y.width)) {
            let (of_x, of_y) = joined.split_at_mut(x.width);
            of_x.copy_from_slice(&x.data[row * x.width..][..x.width]);
            of_y.copy_from_slice(&y.data[row * y.width..][..y.width]);
        }
        self.all_reduce(&mut both, 0..rows.len())?;
        for (row, joined) in rows.zip(both.data.chunks_exact(x.width + y.width)) {
            let (of_x, of_y) = joined.split_at(x.width);
            x.data[row * x.width..][..x.width].copy_from_slice(of_x);
            y.data[row * y.width..][..y.width].copy_from_slice(of_y);
        }
        self.give_back(both);
        Ok(())
    }

    /// Selects tokens for each row, within previously chosen blocks if there are any.
    pub(super) fn select_rows(
        &mut self,
        spec: &SelectionSpec,
        rows: (&Step, Range<usize>),
        (queries, weights): (&Buffer, &Buffer),
        (cache, within): (LatentPart, Option<(&Buffer, SelectionBlocks)>),
        selection: &mut Buffer,
    ) {
        assert_eq!(selection.width, spec.columns(), "a selection has its number, then positions");
        let isa = self.isa;
        self.select_for_rows(
            spec,
            rows,
            ((queries, weights), (cache, spec.chosen)),
            selection,
            &|row, of, to| {
                let within = within
                    .map(|(chosen, blocks)| (&chosen.data[row * chosen.width..][..chosen.width], blocks));
                let of = SelectionHeads { within, ..of };
                // SAFETY: the instruction set was detected; tokens are not written meanwhile.
                unsafe { select_on(isa, &of, to.0, to.1) };
            },
        );
    }

    pub(super) fn select_block_rows(
        &mut self,
        (spec, blocks): (&SelectionSpec, SelectionBlocks),
        rows: (&Step, Range<usize>),
        inputs: (&Buffer, &Buffer),
        cache: LatentPart,
        chosen: &mut Buffer,
    ) {
        assert_eq!(chosen.width, blocks.columns(), "a choice has its number, then blocks");
        let isa = self.isa;
        self.select_for_rows(spec, rows, (inputs, (cache, blocks.chosen)), chosen, &|_, of, to| {
            // SAFETY: as in `select_rows`.
            unsafe { select_blocks_on(isa, &of, blocks.keys, to.0, to.1) };
        });
    }

    /// Calls `select` for each row, in a thread's scratch.
    fn select_for_rows(
        &mut self,
        spec: &SelectionSpec,
        (step, rows): (&Step, Range<usize>),
        ((queries, weights), (cache, chosen)): ((&Buffer, &Buffer), (LatentPart, usize)),
        out: &mut Buffer,
        select: &SelectJob<'_>,
    ) {
        out.shape(step.rows());
        self.latent.resize_with(self.pool.threads(), LatentScratch::default);
        let scratch = SendPtr(self.latent.as_mut_ptr());
        let (to, width) = (SendPtr(out.data.as_mut_ptr()), out.width);
        let next = AtomicUsize::new(rows.start);
        // A row's cost grows with its position, so a thread claims the next one when it has
        // finished.
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            loop {
                let row = next.fetch_add(1, Ordering::Relaxed);
                if row >= rows.end {
                    return;
                }
                let Some(sequence) = step.sequences.iter().find(|of| of.rows.contains(&row)) else {
                    continue;
                };
                let of = SelectionHeads {
                    cache,
                    blocks: &step.blocks[sequence.blocks.clone()],
                    visible: spec.visible(sequence.position(row)),
                    chosen,
                    within: None,
                    queries: &queries.data[row * queries.width..][..spec.heads * spec.dim],
                    weights: &weights.data[row * weights.width..][..spec.heads],
                };
                // SAFETY: each row is one thread's.
                let out = unsafe { std::slice::from_raw_parts_mut(to.at(row * width), width) };
                select(row, of, (&mut *scratch, out));
            }
        });
    }

    pub(super) fn attend_selected_rows(
        &mut self,
        spec: &LatentSpec<Arc<[f32]>>,
        rows: (&Step, Range<usize>),
        [absorbed, queries, selection]: [&Buffer; 3],
        cache: LatentPart,
        out: &mut Buffer,
    ) {
        self.attend_latent_rows(spec, rows, ([absorbed, queries], Some(selection)), cache, out);
    }
}
