//! The CPU backend: packed weights, vector kernels chosen at run time, pinned threads.

mod attention;
mod buffer;
mod dispatch;
mod isa;
mod layout;
pub(crate) mod measure;
mod pointers;
mod product;
mod rows;
mod scratch;
pub mod simd;
#[cfg(test)]
mod tests;
mod threads;

use std::ops::Range;
use std::sync::Arc;

use thunder_collectives::{CommError, Group, Op, Stats};

use crate::backend::{AttentionSpec, Backend, ComputeError, InputOf, KvShape, Largest, LinearInput, Rope};
use crate::source::MatrixSource;
use crate::step::Step;
use attention::kv::Kv;
pub use buffer::Buffer;
pub use isa::Isa;
pub use layout::matrix::Linear;
use layout::matrix::Matrix;
use layout::region::Arena;
pub use measure::arithmetic as peak;
use pointers::SendPtr;
use pool::{Pool, for_rows};
use product::numerics::Numerics;
pub use product::quantize::Activations;
use product::{GatedOutput, MANY_ROWS, Product, Workspace};
pub use threads::pool;
pub use threads::reducer::Overlap;
use threads::reducer::Reducer;

/// Rows of a step's first part are a multiple of this: what tiles take.
const PART_ROWS: usize = 32;

/// How a [`CpuBackend`] works.
#[derive(Debug, Clone)]
pub struct CpuConfig {
    /// Threads, the calling one included.
    pub threads: usize,
    /// Threads that pack weights before the first step, if they are more.
    pub packing_threads: usize,
    /// Pin thread `i` to the core `first_core + i` of those that this process may run on, the computing thread itself when it
    /// calls [`CpuBackend::pin_caller`]. For cores that nothing else runs on; `None` lets the threads float.
    pub first_core: Option<usize>,
    /// The kernels' instruction set.
    pub isa: Isa,
    /// Precision of activations in products with quantized weights.
    pub activations: Activations,
    /// Whether prompts' sums over the ranks are hidden behind computing; the same on all ranks.
    pub overlap: Overlap,
}

impl CpuConfig {
    /// So many threads that float, and what is usual for the rest.
    pub fn new(threads: usize, isa: Isa, activations: Activations) -> Self {
        Self {
            threads,
            packing_threads: threads,
            first_core: None,
            isa,
            activations,
            overlap: Overlap::default(),
        }
    }
}

/// One rank's CPU.
#[derive(Debug)]
pub struct CpuBackend {
    pool: Pool,
    /// Packs weights; gone with the first step.
    packing: Option<Pool>,
    isa: Isa,
    activations: Activations,
    reducer: Reducer,
    arena: Arena,
    space: Workspace,
    step: Option<Rows>,
    /// Partial sums of each part of a step; the one that is under way is away.
    partial: [Option<Buffer>; 2],
    rotations: Vec<rows::Rotation>,
}

/// What rows the step at hand has.
#[derive(Debug, Clone, Copy)]
struct Rows {
    all: usize,
    /// Those of generated tokens, from the first on.
    generated: usize,
}

impl CpuBackend {
    /// A backend whose reductions go over `group`.
    pub fn new(config: &CpuConfig, group: Group) -> Self {
        let pool = Pool::new(config.threads, config.first_core);
        Self {
            space: Workspace::new(pool.threads()),
            packing: (config.packing_threads > config.threads)
                .then(|| Pool::new(config.packing_threads, None)),
            pool,
            isa: config.isa,
            activations: config.activations,
            reducer: Reducer::new(group, config.overlap),
            arena: Arena::default(),
            step: None,
            partial: [None, None],
            rotations: Vec::new(),
        }
    }

    /// The tensor-parallel group.
    pub fn group(&mut self) -> &mut Group {
        self.reducer.group()
    }

    /// Measures the group, so that it chooses what is fastest for each size, and that a step knows whether to hide its sums behind
    /// computing: they have rows of `width`, and this rank reads `weight_bytes` for each. All ranks call this together, idle.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn tune(&mut self, width: usize, weight_bytes: usize) -> Result<(), CommError> {
        self.reducer.tune(width * size_of::<f32>(), weight_bytes / self.pool.threads())
    }

    /// Reductions since the last call, and the time that this rank waited for them.
    pub fn reductions(&mut self) -> Stats {
        self.reducer.take_stats()
    }

    /// Pins the calling thread to the first of the backend's cores, if it has cores of its own.
    pub fn pin_caller(&self) {
        self.pool.pin_caller();
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// How many of so many rows, from the first on, are of generated tokens. These, and rows that were picked from a step, are
    /// multiplied exactly, so that a sequence's tokens do not depend on what else is in the batch; those of prompts may be bf16.
    fn generated(&self, rows: usize) -> usize {
        match self.step {
            Some(step) if step.all == rows => step.generated,
            Some(_) => rows,
            None if rows < MANY_ROWS => rows,
            None => 0,
        }
    }

    /// Rows that are multiplied alike, and whether they are prompts'.
    fn alike(&self, all: usize, rows: &Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> + use<> {
        let generated = self.generated(all);
        let parts =
            [(rows.start..generated.min(rows.end), false), (generated.max(rows.start)..rows.end, true)];
        parts.into_iter().filter(|(rows, _)| !rows.is_empty())
    }

    fn multiplier(&mut self, prompts: bool) -> Product<'_> {
        let numerics = Numerics { isa: self.isa, activations: self.activations, prompts };
        Product { numerics, pool: &mut self.pool, space: &mut self.space }
    }

    /// Multiplies rows, those of prompts apart from the others, and looks for the largest outputs of the first ones.
    fn product(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Linear,
        out: &mut Buffer,
        adds: bool,
        mut largest: Option<&mut [Largest]>,
    ) {
        let all = x.buffer().rows;
        out.shape(all);
        debug_assert!(w.rows <= out.width, "{} outputs do not fit {} columns", w.rows, out.width);
        for (rows, prompts) in self.alike(all, &rows) {
            let out = out.output(rows.clone(), adds);
            let largest = largest.as_deref_mut().map(|largest| &mut largest[rows.clone()]);
            self.multiplier(prompts).run(&x, rows, w, out, largest);
        }
    }

    /// `to[rows] += x[rows]`.
    fn add(&mut self, x: &Buffer, rows: Range<usize>, to: &mut Buffer) {
        let width = x.width;
        debug_assert_eq!(width, to.width);
        let to = SendPtr(to.data[rows.start * width..rows.end * width].as_mut_ptr());
        let x = &x.data[rows.start * width..rows.end * width];
        for_rows(&mut self.pool, rows.len(), &|rows| {
            // SAFETY: each row is one thread's.
            let to = unsafe { std::slice::from_raw_parts_mut(to.at(rows.start * width), rows.len() * width) };
            for (to, x) in to.iter_mut().zip(&x[rows.start * width..]) {
                *to += x;
            }
        });
    }
}

impl<Vector> LinearInput<'_, Buffer, Vector> {
    fn buffer(&self) -> &Buffer {
        match self {
            Self::Plain(x) | Self::Gated(x) | Self::Normed { x, .. } => x,
        }
    }
}

/// Which of a step's parts has these rows.
fn part_of(rows: &Range<usize>) -> usize {
    usize::from(rows.start > 0)
}

impl Backend for CpuBackend {
    type Matrix = Linear;
    type Vector = Arc<[f32]>;
    type Buffer = Buffer;
    type Kv = Kv;

    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Linear, ComputeError> {
        let pool = self.packing.as_mut().unwrap_or(&mut self.pool);
        let parts: Vec<Matrix> = parts
            .iter()
            .filter(|source| source.rows > 0)
            .map(|source| {
                Matrix::pack(source, &mut self.arena, pool).map_err(|error| ComputeError::Memory {
                    bytes: source.bytes(),
                    what: "weights",
                    reason: error.to_string(),
                })
            })
            .collect::<Result<_, _>>()?;
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok(Linear { parts, rows })
    }

    fn vector(&mut self, values: &[f32]) -> Self::Vector {
        values.into()
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<Buffer, ComputeError> {
        Ok(Buffer::new(rows, width))
    }

    fn kv_cache(&mut self, shape: KvShape) -> Result<Kv, ComputeError> {
        Kv::new(&shape)
    }

    fn matrix_bytes(matrix: &Linear) -> usize {
        matrix.parts.iter().map(Matrix::bytes).sum()
    }

    fn begin(&mut self, step: &Step, ropes: &[Rope]) -> [Range<usize>; 2] {
        self.packing = None;
        let (all, generated) = (step.rows(), step.generated());
        let half = (all / 2).next_multiple_of(PART_ROWS).min(all);
        let cut = if generated < all && self.reducer.overlaps(all) { half } else { all };
        self.step = Some(Rows { all, generated });
        self.rotations.resize_with(ropes.len(), rows::Rotation::default);
        for (rotation, rope) in self.rotations.iter_mut().zip(ropes) {
            rotation.compute(step, rope);
        }
        [0..cut, cut..all]
    }

    fn embed(&mut self, table: &Linear, ids: &[u32], first: u32, scale: f32, out: &mut Buffer) {
        out.shape(ids.len());
        for (&id, out) in ids.iter().zip(out.data.chunks_exact_mut(out.width)) {
            let row = id.checked_sub(first).map(|row| row as usize);
            match (row, table.parts.first()) {
                (Some(row), Some(part)) if row < part.rows => {
                    part.row(row, out);
                    if scale != 1.0 {
                        out.iter_mut().for_each(|x| *x *= scale);
                    }
                }
                _ => out.fill(0.0),
            }
        }
    }

    fn linear(&mut self, x: InputOf<'_, Self>, rows: Range<usize>, w: &Linear, out: &mut Buffer) {
        self.product(x, rows, w, out, false, None);
    }

    fn linear_largest(
        &mut self,
        x: InputOf<'_, Self>,
        w: &Linear,
        out: &mut Buffer,
        largest: &mut [Largest],
    ) {
        self.product(x, 0..largest.len(), w, out, false, Some(largest));
    }

    fn linear_reduce_add(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Linear,
        residual: &mut Buffer,
    ) -> Result<(), CommError> {
        if self.reducer.is_alone() {
            self.product(x, rows, w, residual, true, None);
            return Ok(());
        }
        let part = part_of(&rows);
        let mut partial = match self.partial[part].take() {
            Some(partial) => partial,
            None => Buffer::new(residual.capacity(), residual.width),
        };
        self.product(x, rows.clone(), w, &mut partial, false, None);
        if self.step.is_some_and(|step| rows.len() < step.all) {
            self.settle(residual)?;
            self.reducer.begin(partial, rows);
            return Ok(());
        }
        let width = partial.width;
        let sum = &mut partial.data[rows.start * width..rows.end * width];
        self.reducer.group().all_reduce(sum, Op::Sum)?;
        self.add(&partial, rows, residual);
        self.partial[part] = Some(partial);
        Ok(())
    }

    fn linear_gated(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        gate_up: &Linear,
        next: &Linear,
        out: &mut Buffer,
    ) {
        let all = x.buffer().rows;
        out.shape(all);
        assert_eq!(gate_up.rows, 2 * out.width, "gate and up have a row for each channel");
        for (rows, prompts) in self.alike(all, &rows) {
            let multiplier = self.multiplier(prompts);
            let out = if multiplier.gates_in_bf16(gate_up, next) {
                GatedOutput::Bf16(out.output_in_halves(rows.clone()))
            } else {
                GatedOutput::F32(out.output(rows.clone(), false))
            };
            multiplier.run_gated(&x, rows, gate_up, out);
        }
    }

    fn settle(&mut self, residual: &mut Buffer) -> Result<(), CommError> {
        if let Some((partial, rows)) = self.reducer.end()? {
            let part = part_of(&rows);
            self.add(&partial, rows, residual);
            self.partial[part] = Some(partial);
        }
        Ok(())
    }

    fn attention(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Buffer,
        kv: &mut Kv,
        layer: usize,
        out: &mut Buffer,
    ) {
        out.shape(step.rows());
        let rotation = spec.rope.map(|rope| &self.rotations[rope]);
        let halves = self.activations.allows_bf16();
        let scratch = SendPtr(self.space.scratch.as_mut_ptr());
        attention::run(
            &mut self.pool,
            (self.isa, halves),
            scratch,
            (spec, step, rows),
            rotation,
            qkv,
            kv,
            layer,
            out,
        );
    }

    fn all_reduce(&mut self, x: &mut Buffer) -> Result<(), CommError> {
        self.reducer.group().all_reduce(&mut x.data[..x.rows * x.width], Op::Sum)
    }

    fn take_rows(&mut self, x: &Buffer, rows: &[u32], out: &mut Buffer) {
        out.shape(rows.len());
        for (&row, out) in rows.iter().zip(out.data.chunks_exact_mut(x.width)) {
            out.copy_from_slice(&x.data[row as usize * x.width..][..x.width]);
        }
    }

    fn read<'a>(&'a self, x: &'a Buffer) -> &'a [f32] {
        &x.data[..x.rows * x.width]
    }

    fn write(&mut self, values: &[f32], x: &mut Buffer) {
        x.shape(values.len() / x.width);
        x.data[..values.len()].copy_from_slice(values);
    }
}
