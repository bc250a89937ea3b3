//! Prepares activation rows for products: norms them and converts them to the formats that the
//! matrices need.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::LinearInput;
use crate::cpu::buffer::Buffer;
use crate::cpu::isa::Isa;
use crate::cpu::layout::bf16_rows::{Bf16Rows, round_row};
use crate::cpu::layout::matrix::{Linear, Matrix};
use crate::cpu::layout::region::grown;
use crate::cpu::pointers::SendPtr;
use crate::cpu::product::matmul::Input;
use crate::cpu::product::numerics::{ActivationFormat, Numerics};
use crate::cpu::product::quantize::{QuantRows, quantize_row_on};
use crate::cpu::rows::rms_norm_on;
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::{Pool, share};

/// Rows of floats, and the norm to apply to them: weight and epsilon.
#[derive(Debug, Clone, Copy)]
struct Incoming<'a> {
    data: SendPtr<f32>,
    stride: usize,
    norm: Option<(&'a [f32], f32)>,
}

impl Incoming<'_> {
    /// One row of `cols` numbers: the stored row, or the normed row in `normed`.
    ///
    /// # Safety
    /// The row is within the buffer, which no thread writes; `normed` holds `cols` numbers that no
    /// other thread uses.
    unsafe fn row(&self, isa: Isa, row: usize, cols: usize, normed: *mut f32) -> *const f32 {
        // SAFETY: the caller's; the instruction set was detected.
        unsafe {
            let x = self.data.at(row * self.stride).cast_const();
            let Some((weight, eps)) = self.norm else { return x };
            let out = std::slice::from_raw_parts_mut(normed, cols);
            rms_norm_on(isa, std::slice::from_raw_parts(x, cols), weight, eps, out);
            normed
        }
    }
}

/// Rows in the formats that the parts of a matrix need.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    numerics: Numerics,
    quantized: &'a [QuantRows],
    pub bf16: &'a Bf16Rows,
    floats: SendPtr<f32>,
    stride: usize,
}

impl<'a> Inputs<'a> {
    /// Converts rows to the formats that the parts of `w` need. All parts have `cols` columns.
    pub fn prepare(
        numerics: Numerics,
        pool: &mut Pool,
        space: &'a mut InputSpace,
        input: &'a LinearInput<'_, Buffer, Arc<[f32]>>,
        rows: Range<usize>,
        (w, cols): (&Linear, usize),
    ) -> Self {
        let (x, norm) = parts_of(input);
        let planes = numerics.activations.planes(matches!(input, LinearInput::Gated(_)));
        let given = x.bf16_rows(&rows);
        assert!(
            given.is_none() || x.width == cols && numerics.bf16_only(w),
            "rows are stored in the format that their next matrix needs"
        );
        let (isa, count) = (numerics.isa, rows.len());
        let InputSpace { quantized, bf16, floats, normed } = space;
        let first = SendPtr(x.data[rows.start * x.width..].as_ptr().cast_mut());
        let x = Incoming { data: first, stride: x.width, norm };
        let stride = cols.next_multiple_of(LANES);
        let normed = SendPtr(grown(normed, pool.threads() * stride, 0.0).as_mut_ptr());
        // SAFETY: the row is within the buffer; each thread has a normed row of its own.
        let row = |thread, row| unsafe { x.row(isa, row, cols, normed.at(thread * stride)) };
        let (mut has_floats, mut has_bf16, mut groups) = (norm.is_none(), given.is_some(), 0);
        for part in &w.parts {
            match numerics.format(part.format) {
                ActivationFormat::F32 if !std::mem::replace(&mut has_floats, true) => {
                    let to = SendPtr(grown(floats, count * cols, 0.0).as_mut_ptr());
                    // SAFETY: each row is written by one thread.
                    each_row(pool, count, &|thread, i| unsafe {
                        to.at(i * cols).copy_from_nonoverlapping(row(thread, i), cols);
                    });
                }
                ActivationFormat::Bf16 if !std::mem::replace(&mut has_bf16, true) => {
                    bf16.shape(count, cols);
                    let to = bf16.writer();
                    // SAFETY: each row is rounded by one thread.
                    each_row(pool, count, &|thread, i| unsafe { round_row(row(thread, i), i, to) });
                }
                ActivationFormat::Quantized { group }
                    if quantized[..groups].iter().all(|q| q.group != group) =>
                {
                    let to = nth(quantized, groups);
                    to.shape(count, cols, group, planes);
                    let to = to.writer();
                    // SAFETY: each row is quantized by one thread.
                    each_row(pool, count, &|thread, i| unsafe {
                        quantize_row_on(isa, row(thread, i), i, to)
                    });
                    groups += 1;
                }
                _ => {}
            }
        }
        let (floats, stride) =
            if norm.is_some() { (SendPtr(floats.as_mut_ptr()), cols) } else { (first, x.stride) };
        Self { numerics, quantized: &quantized[..groups], bf16: given.unwrap_or(bf16), floats, stride }
    }

    /// The rows in the format that a part needs.
    pub fn of(&self, part: &Matrix) -> Input<'a> {
        match self.numerics.format(part.format) {
            ActivationFormat::F32 => {
                // SAFETY: the address of the first row.
                let data = unsafe { self.floats.at(0) };
                Input::Floats { data, stride: self.stride }
            }
            ActivationFormat::Bf16 => Input::Bf16(self.bf16),
            ActivationFormat::Quantized { group } => match self.quantized.iter().find(|q| q.group == group) {
                Some(rows) => Input::Quantized(rows),
                None => unreachable!("quantized for every part"),
            },
        }
    }
}

/// The rows of an input, and the norm to apply to them: weight and epsilon.
fn parts_of<'a>(input: &'a LinearInput<'_, Buffer, Arc<[f32]>>) -> (&'a Buffer, Option<(&'a [f32], f32)>) {
    match input {
        LinearInput::Plain(x) | LinearInput::Gated(x) => (x, None),
        LinearInput::Normed { x, weight, eps } => (x, Some((&weight[..], *eps))),
    }
}

/// Element `index`, which is added if it is the first one missing.
fn nth(quantized: &mut Vec<QuantRows>, index: usize) -> &mut QuantRows {
    if index == quantized.len() {
        quantized.push(QuantRows::default());
    }
    &mut quantized[index]
}

/// Memory for prepared rows, reused by all products.
#[derive(Debug, Default)]
pub(super) struct InputSpace {
    /// Quantized rows of the current product, one entry per group size of its parts.
    quantized: Vec<QuantRows>,
    /// The same rows in bf16.
    bf16: Bf16Rows,
    /// The same rows as floats, if they are normed.
    floats: Vec<f32>,
    /// One normed row per thread.
    normed: Vec<f32>,
}

/// Calls `job(thread, row)` for each row, on all threads unless the rows are too few to be worth
/// waking the threads.
fn each_row(pool: &mut Pool, rows: usize, job: &(dyn Fn(usize, usize) + Sync)) {
    if rows < 4 {
        return (0..rows).for_each(|row| job(0, row));
    }
    let threads = pool.threads();
    pool.run(&|thread| share(rows, thread, threads).for_each(|row| job(thread, row)));
}
