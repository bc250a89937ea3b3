//! The CPU backend: packed weights, vector kernels chosen at run time, pinned threads.

mod affine;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod buffer;
mod dequantized;
mod fixed;
mod halves;
mod isa;
mod kv;
mod matmul;
mod matrix;
mod memory;
mod pack;
pub mod peak;
pub mod pool;
mod quantize;
mod rows;
pub mod simd;
pub(crate) mod stream;
#[cfg(test)]
mod tests;

use std::ops::Range;

use thunder_collectives::{CommError, Group, Op};

use crate::backend::{AttentionSpec, Backend, ComputeError, KvShape, Rope};
use crate::source::{Encoding, MatrixSource};
use crate::step::Step;
pub use buffer::Buffer;
use halves::HalfRows;
pub use isa::Isa;
use kv::Kv;
use matmul::Input;
use matrix::{Matrix, SendPtr};
use memory::Arena;
use pool::{Pool, share};
pub use quantize::Activations;
use quantize::QuantRows;

/// How a [`CpuBackend`] works.
#[derive(Debug, Clone)]
pub struct CpuConfig {
    /// Threads, the calling one included.
    pub threads: usize,
    /// Pin thread `i` to the core `first_core + i` of those that this process may run on, the computing thread itself when it
    /// calls [`CpuBackend::pin_caller`]. For cores that nothing else runs on; `None` lets the threads float.
    pub first_core: Option<usize>,
    /// The kernels' instruction set.
    pub isa: Isa,
    /// Precision of activations in products with quantized weights.
    pub activations: Activations,
}

/// One rank's CPU.
#[derive(Debug)]
pub struct CpuBackend {
    pool: Pool,
    isa: Isa,
    activations: Activations,
    group: Group,
    arena: Arena,
    /// Quantized inputs of the product at hand, one for each group size among its parts.
    quantized: Vec<QuantRows>,
    /// The same in bf16.
    halves: HalfRows,
    /// Rows of the step at hand, and how many of them, from the first on, are of generated tokens; none before the first step.
    step: Option<(usize, usize)>,
    /// One for each thread.
    scratch: Vec<isa::Scratch>,
    rotations: Vec<rows::Rotation>,
}

/// Matrices that share their input, one after the other.
#[derive(Debug)]
pub struct Linear {
    parts: Vec<Matrix>,
    rows: usize,
}

impl CpuBackend {
    /// A backend whose reductions go over `group`.
    pub fn new(config: &CpuConfig, group: Group) -> Self {
        let pool = Pool::new(config.threads, config.first_core);
        Self {
            scratch: (0..pool.threads()).map(|_| isa::Scratch::default()).collect(),
            pool,
            isa: config.isa,
            activations: config.activations,
            group,
            arena: Arena::default(),
            quantized: Vec::new(),
            halves: HalfRows::default(),
            step: None,
            rotations: Vec::new(),
        }
    }

    /// The tensor-parallel group.
    pub fn group(&mut self) -> &mut Group {
        &mut self.group
    }

    /// Pins the calling thread to the first of the backend's cores, if it has cores of its own.
    pub fn pin_caller(&self) {
        self.pool.pin_caller();
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// How many of so many rows, from the first on, are of generated tokens. These, and rows that were picked from a step, are multiplied
    /// exactly, so that a sequence's tokens do not depend on what else is in the batch; those of prompts may be bf16.
    fn generated(&self, rows: usize) -> usize {
        match self.step {
            Some((all, generated)) if all == rows => generated,
            Some(_) => rows,
            None if rows < MANY_ROWS => rows,
            None => 0,
        }
    }

    /// Brings rows of `x` into the forms that the parts of `w` need.
    fn prepare(&mut self, x: &Buffer, rows: Range<usize>, w: &Linear, prompts: bool) {
        // SAFETY: the rows are within the buffer.
        let data = SendPtr(unsafe { x.data.as_ptr().add(rows.start * x.width) }.cast_mut());
        let (isa, stride, count) = (self.isa, x.width, rows.len());
        let (mut used, mut halved) = (0, false);
        for part in &w.parts {
            match Form::of(part.encoding, prompts, self.isa, self.activations) {
                Form::Floats => {}
                Form::Halves => {
                    if std::mem::replace(&mut halved, true) {
                        continue;
                    }
                    self.halves.shape(count, part.cols);
                    let writer = self.halves.writer();
                    for_rows(&mut self.pool, count, &|rows| {
                        // SAFETY: the rows are within `x`, which nobody writes; each is rounded by one thread.
                        unsafe { isa::round_rows(isa, data.at(0), stride, rows, part.cols, writer) }
                    });
                }
                Form::Integers { group } => {
                    if self.quantized[..used].iter().any(|q| q.group == group) {
                        continue;
                    }
                    if used == self.quantized.len() {
                        self.quantized.push(QuantRows::default());
                    }
                    let quantized = &mut self.quantized[used];
                    quantized.shape(count, part.cols, group, self.activations);
                    let writer = quantized.writer();
                    for_rows(&mut self.pool, count, &|rows| {
                        // SAFETY: the rows are within `x`, which nobody writes; each is quantized by one thread.
                        unsafe { isa::quantize_rows(isa, data.at(0), stride, rows, writer) }
                    });
                    used += 1;
                }
            }
        }
    }

    /// Multiplies some rows.
    fn multiply(&mut self, x: &Buffer, rows: Range<usize>, w: &Linear, prompts: bool, out: &mut Buffer) {
        self.prepare(x, rows.clone(), w, prompts);
        let (isa, activations, quantized, halves) =
            (self.isa, self.activations, &self.quantized, &self.halves);
        // SAFETY: the rows are within the buffer.
        let data = SendPtr(unsafe { x.data.as_ptr().add(rows.start * x.width) }.cast_mut());
        let (stride, out) = (x.width, out.output(rows));
        let panels: usize = w.parts.iter().map(Matrix::panel_count).sum();
        let (threads, scratch) = (self.pool.threads(), SendPtr(self.scratch.as_mut_ptr()));
        self.pool.run(&|thread| {
            let range = share(panels, thread, threads);
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            let (mut first_panel, mut column) = (0, 0);
            for part in &w.parts {
                let count = part.panel_count();
                let mine = range.start.clamp(first_panel, first_panel + count) - first_panel
                    ..range.end.clamp(first_panel, first_panel + count) - first_panel;
                let input = match Form::of(part.encoding, prompts, isa, activations) {
                    // SAFETY: the first row.
                    Form::Floats => Input::Floats { data: unsafe { data.at(0) }, stride },
                    Form::Halves => Input::Halves(halves),
                    Form::Integers { group } => {
                        let Some(rows) = quantized.iter().find(|q| q.group == group) else {
                            unreachable!("quantized for every part")
                        };
                        Input::Quantized(rows)
                    }
                };
                // SAFETY: input and output have the part's shape, a thread writes its own panels' columns.
                unsafe {
                    isa::matmul(isa, part, mine, input, out.starting_at(column), scratch);
                }
                first_panel += count;
                column += part.rows;
            }
        });
    }
}

/// Without a step, so many rows are a prompt.
const MANY_ROWS: usize = 9;

/// How activations enter a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Floats,
    /// Quantized, with sums of groups of `group` columns.
    Integers {
        group: usize,
    },
    /// In bf16.
    Halves,
}

impl Form {
    /// For such weights, and rows of prompts or others.
    fn of(encoding: Encoding, prompts: bool, isa: Isa, activations: Activations) -> Self {
        match (activations, encoding) {
            (Activations::Auto, encoding) if prompts && isa::takes_halves(isa, encoding) => Self::Halves,
            (Activations::F32, _) | (_, Encoding::Float(_)) => Self::Floats,
            (_, Encoding::Affine { group, .. }) => Self::Integers { group },
        }
    }
}

/// Few rows are not worth a hand-over to the threads.
fn for_rows(pool: &mut Pool, rows: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
    if rows < 4 { job(0..rows) } else { pool.split(rows, job) }
}

impl Backend for CpuBackend {
    type Matrix = Linear;
    type Vector = std::sync::Arc<[f32]>;
    type Buffer = Buffer;
    type Kv = Kv;

    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Linear, ComputeError> {
        let parts: Vec<Matrix> = parts
            .iter()
            .filter(|source| source.rows > 0)
            .map(|source| {
                Matrix::pack(source, &mut self.arena, &mut self.pool).map_err(|error| ComputeError::Memory {
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

    fn begin(&mut self, step: &Step, ropes: &[Rope]) {
        self.step = Some((step.rows(), step.generated()));
        self.rotations.resize_with(ropes.len(), rows::Rotation::default);
        for (rotation, rope) in self.rotations.iter_mut().zip(ropes) {
            rotation.compute(step, rope);
        }
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

    fn rms_norm(&mut self, x: &Buffer, weight: &Self::Vector, eps: f32, out: &mut Buffer) {
        out.shape(x.rows);
        let (isa, to, width) = (self.isa, SendPtr(out.data.as_mut_ptr()), x.width);
        for_rows(&mut self.pool, x.rows, &|range| {
            for row in range {
                let x = &x.data[row * width..][..width];
                // SAFETY: each row of the output is written by one thread.
                let out = unsafe { std::slice::from_raw_parts_mut(to.at(row * width), width) };
                // SAFETY: the instruction set was detected.
                unsafe { isa::rms_norm(isa, x, weight, eps, out) };
            }
        });
    }

    fn linear(&mut self, x: &Buffer, w: &Linear, out: &mut Buffer) {
        out.shape(x.rows);
        debug_assert!(w.rows <= out.width, "{} outputs do not fit {} columns", w.rows, out.width);
        let generated = self.generated(x.rows);
        for (rows, prompts) in [(0..generated, false), (generated..x.rows, true)] {
            if !rows.is_empty() {
                self.multiply(x, rows, w, prompts, out);
            }
        }
    }

    fn attention(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        qkv: &mut Buffer,
        kv: &mut Kv,
        layer: usize,
        out: &mut Buffer,
    ) {
        out.shape(step.rows());
        let rotation = spec.rope.map(|rope| &self.rotations[rope]);
        let halves = self.activations == Activations::Auto;
        let scratch = SendPtr(self.scratch.as_mut_ptr());
        attention::run(
            &mut self.pool,
            (self.isa, halves),
            scratch,
            spec,
            step,
            rotation,
            qkv,
            kv,
            layer,
            out,
        );
    }

    fn swiglu(&mut self, gate_up: &Buffer, out: &mut Buffer) {
        out.shape(gate_up.rows);
        let (isa, to, width) = (self.isa, SendPtr(out.data.as_mut_ptr()), out.width);
        for_rows(&mut self.pool, gate_up.rows, &|range| {
            for row in range {
                let (gate, up) = gate_up.data[row * gate_up.width..][..2 * width].split_at(width);
                // SAFETY: each row of the output is written by one thread.
                let out = unsafe { std::slice::from_raw_parts_mut(to.at(row * width), width) };
                // SAFETY: the instruction set was detected.
                unsafe { isa::swiglu(isa, gate, up, out) };
            }
        });
    }

    fn add(&mut self, x: &Buffer, y: &mut Buffer) {
        let len = x.rows * x.width;
        for (y, x) in y.data[..len].iter_mut().zip(&x.data[..len]) {
            *y += x;
        }
    }

    fn all_reduce(&mut self, x: &mut Buffer) -> Result<(), CommError> {
        self.group.all_reduce(&mut x.data[..x.rows * x.width], Op::Sum)
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
