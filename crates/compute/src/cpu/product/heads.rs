//! Products of heads: some columns of each row with a separate matrix, such as latent attention's
//! projections to and from the compressed vector. All heads share one pass of the threads.

use std::ops::Range;

use super::input::{PreparedRows, There};
use super::matmul::multiply_on;
use super::output::Output;
use super::{Product, Workspace, min_claim, within};
use crate::cpu::buffer::Buffer;
use crate::cpu::layout::bf16_rows::PANELS_TOGETHER;
use crate::cpu::layout::matrix::{Linear, Matrix};
use crate::cpu::pointers::SendPtr;
use crate::cpu::threads::pool::for_rows;

/// The rows' columns that belong to one head, in the format of its matrix.
#[derive(Debug, Default)]
pub(super) struct HeadSpace {
    inputs: Vec<PreparedRows>,
}

impl Product<'_> {
    /// `out[r][h] = W_h · x[r][h]`, where `x[r][h]` begins at column `h * stride` and `out[r][h]`
    /// at `h * W_h.rows`. All matrices have one shape. The first row of `out` is `rows.start`.
    pub fn run_heads(self, x: &Buffer, stride: usize, rows: Range<usize>, w: &[Linear], out: Output) {
        let Self { numerics, pool, space } = self;
        let Some((first, cols)) = w.first().and_then(|w| Some((w, w.parts.first()?.cols))) else { return };
        let Workspace { queue, scratch, heads: HeadSpace { inputs }, .. } = space;
        let (count, width) = (rows.len(), first.rows);
        assert!(x.data.len() >= rows.end * x.width && x.width >= (w.len() - 1) * stride + cols);
        assert!(out.stride >= w.len() * width && out.rows == count, "the output lacks rows or columns");
        if inputs.len() < w.len() {
            inputs.resize_with(w.len(), PreparedRows::default);
        }
        let prepared = SendPtr(inputs.as_mut_ptr());
        let start = |head: usize| x.data[rows.start * x.width + head * stride..].as_ptr();
        let planes = numerics.activations.planes(false);
        for_rows(pool, w.len(), &|heads| {
            for head in heads {
                // SAFETY: each head is one thread's; its columns are within the buffer, which no
                // thread writes.
                unsafe {
                    let there = There { floats: true, bf16: false };
                    let to = (*prepared.at(head)).shape(numerics, &w[head], [count, cols], planes, there);
                    (0..count).for_each(|row| to.write(start(head).add(row * x.width), row));
                }
            }
        });
        let panels: usize = first.parts.iter().map(Matrix::panel_count).sum();
        let panel_bytes = first.parts.iter().map(Matrix::panel_bytes).max().unwrap_or(0);
        // Matrix units process panels in pairs.
        queue.reset(
            w.len() * panels,
            min_claim(panel_bytes, count, PANELS_TOGETHER).next_multiple_of(2)..=usize::MAX,
        );
        let (queue, inputs, scratch) = (&*queue, &*inputs, SendPtr(scratch.as_mut_ptr()));
        pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            while let Some(claimed) = queue.next(thread) {
                let mut next = claimed.start;
                while next < claimed.end {
                    let (head, from) = (next / panels, next % panels);
                    let to = panels.min(from + claimed.end - next);
                    let x = inputs[head].inputs(numerics, cols).with_floats(start(head), x.width);
                    for (part, panels, first_column) in within(&w[head], from..to) {
                        // SAFETY: input and output have the part's shape; each panel's columns are
                        // written by one thread.
                        unsafe {
                            let out = out.starting_at(head * width + first_column);
                            multiply_on(numerics.isa, part, panels, x.of(part), out, scratch);
                        }
                    }
                    next += to - from;
                }
            }
        });
    }
}
