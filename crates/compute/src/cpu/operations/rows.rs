//! Operations on rows: embedding, norms, gate, largest outputs.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Activation, Largest, Norm, PartNorm};
use crate::cpu::pointers::SendPtr;
use crate::cpu::rows::{gate_on, largest_on, rms_norm_on, square_sum};
use crate::cpu::threads::pool::for_rows;
use crate::cpu::{Buffer, CpuBackend, Linear};

impl CpuBackend {
    pub(super) fn embed_rows(
        &mut self,
        table: &Linear,
        ids: &[u32],
        first: u32,
        scale: f32,
        out: &mut Buffer,
    ) {
        out.shape(ids.len());
        let width = out.width;
        let to = SendPtr(out.data[..ids.len() * width].as_mut_ptr());
        for_rows(&mut self.pool, ids.len(), &|rows| {
            for row in rows {
                // SAFETY: each row is one thread's.
                let out = unsafe { std::slice::from_raw_parts_mut(to.at(row * width), width) };
                let id = ids[row].checked_sub(first).map(|id| id as usize);
                match (id, table.parts.first()) {
                    (Some(id), Some(part)) if id < part.rows => {
                        part.row(id, out);
                        if scale != 1.0 {
                            out.iter_mut().for_each(|x| *x *= scale);
                        }
                    }
                    _ => out.fill(0.0),
                }
            }
        });
    }

    pub(super) fn norm_rows(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        norm: &Norm<Arc<[f32]>>,
        out: &mut Buffer,
    ) {
        let isa = self.isa;
        assert_eq!([norm.weight.len(), out.width], [x.width; 2], "a norm keeps the width");
        self.map_rows(x, rows, out, &|x, out| {
            // SAFETY: the instruction set was detected.
            unsafe { rms_norm_on(isa, x, &norm.weight, norm.eps, out) };
        });
    }

    pub(super) fn square_sum_rows(
        &mut self,
        norms: &[PartNorm<Arc<[f32]>>],
        x: &Buffer,
        rows: Range<usize>,
        out: &mut Buffer,
    ) {
        assert_eq!(out.width, norms.len(), "a row of sums has one for each norm");
        self.map_rows(x, rows, out, &|x, out| {
            for (norm, out) in norms.iter().zip(out) {
                *out = square_sum(&x[norm.counted.clone()]);
            }
        });
    }

    pub(super) fn norm_rows_by_sums(
        &mut self,
        norms: &[PartNorm<Arc<[f32]>>],
        sums: &Buffer,
        rows: Range<usize>,
        x: &mut Buffer,
    ) {
        let width = x.width;
        assert!(rows.end <= x.rows && rows.end <= sums.rows, "rows {rows:?} of {}", x.rows);
        let to = SendPtr(x.data.as_mut_ptr());
        for_rows(&mut self.pool, rows.len(), &|part| {
            for row in rows.start + part.start..rows.start + part.end {
                // SAFETY: each row is one thread's.
                let x = unsafe { std::slice::from_raw_parts_mut(to.at(row * width), width) };
                for (norm, sum) in norms.iter().zip(&sums.data[row * sums.width..]) {
                    let factor = norm.factor(*sum);
                    let columns = x[norm.columns.clone()].iter_mut();
                    columns.zip(&norm.weight[..]).for_each(|(x, weight)| *x *= weight * factor);
                }
            }
        });
    }

    pub(super) fn gate_rows(
        &mut self,
        gate_up: &Buffer,
        rows: Range<usize>,
        activation: Activation,
        out: &mut Buffer,
    ) {
        let isa = self.isa;
        assert_eq!(gate_up.width, 2 * out.width, "gate and up have a column for each channel");
        self.map_rows(gate_up, rows, out, &|gate_up, out| {
            let (gate, up) = gate_up.split_at(out.len());
            // SAFETY: the instruction set was detected.
            unsafe { gate_on(isa, activation, gate, up, out) };
        });
    }

    /// Calls `job` with each row and its row of `out`, on all threads.
    fn map_rows(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        out: &mut Buffer,
        job: &(dyn Fn(&[f32], &mut [f32]) + Sync),
    ) {
        out.shape(x.rows);
        let (from_width, width) = (x.width, out.width);
        let to = SendPtr(out.data[rows.start * width..rows.end * width].as_mut_ptr());
        let from = &x.data[rows.start * from_width..rows.end * from_width];
        for_rows(&mut self.pool, rows.len(), &|rows| {
            for row in rows {
                // SAFETY: each row is one thread's.
                let out = unsafe { std::slice::from_raw_parts_mut(to.at(row * width), width) };
                job(&from[row * from_width..][..from_width], out);
            }
        });
    }

    pub(super) fn find_largest(&self, x: &Buffer, largest: &mut [Largest]) {
        if let Some(found) = x.largest.get(..largest.len()) {
            largest.copy_from_slice(found);
            return;
        }
        // A rank may have no part of the vocabulary.
        if x.width == 0 {
            return largest.fill(Largest::NONE);
        }
        for (largest, row) in largest.iter_mut().zip(x.data.chunks_exact(x.width)) {
            *largest = Largest::NONE;
            // SAFETY: the instruction set was detected.
            unsafe { largest_on(self.isa, row, 0, largest) };
        }
    }
}
