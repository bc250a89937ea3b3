//! Prepares activation rows for products: norms them and converts them to the formats that the
//! matrices need.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::LinearInput;
use crate::cpu::buffer::Buffer;
use crate::cpu::isa::Isa;
use crate::cpu::layout::bf16_rows::{Bf16Rows, Bf16Writer, round_row};
use crate::cpu::layout::matrix::{Linear, Matrix};
use crate::cpu::layout::region::grown;
use crate::cpu::pointers::SendPtr;
use crate::cpu::product::matmul::Input;
use crate::cpu::product::numerics::{ActivationFormat, Numerics};
use crate::cpu::product::quantize::{QuantRows, QuantWriter, quantize_row_on};
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
        let uneven = matches!(input, LinearInput::Gated(_) | LinearInput::Precise(_));
        let given = x.bf16_rows(&rows);
        assert!(
            given.is_none() || x.width == cols && numerics.bf16_only(w),
            "rows are stored in the format that their next matrix needs"
        );
        let (isa, count) = (numerics.isa, rows.len());
        let InputSpace { prepared, one_row } = space;
        let first = SendPtr(x.data[rows.start * x.width..].as_ptr().cast_mut());
        let x = Incoming { data: first, stride: x.width, norm };
        let stride = cols.next_multiple_of(LANES);
        let normed = SendPtr(grown(one_row, pool.threads() * stride, 0.0).as_mut_ptr());
        let there = There { floats: norm.is_none(), bf16: given.is_some() };
        let to = prepared.shape(numerics, w, [count, cols], numerics.activations.planes(uneven), there);
        if to.writes() {
            // SAFETY: the row is within the buffer; each thread has a normed row of its own, and
            // each row is one thread's.
            each_row(pool, count, &|thread, i| unsafe {
                to.write(x.row(isa, i, cols, normed.at(thread * stride)), i);
            });
        }
        let prepared = prepared.inputs(numerics, cols);
        let floats = if norm.is_none() { (first, x.stride) } else { (prepared.floats, prepared.stride) };
        Self { bf16: given.unwrap_or(prepared.bf16), floats: floats.0, stride: floats.1, ..prepared }
    }

    /// The same rows, with floats at `first` and `stride` from row to row.
    pub fn with_floats(self, first: *const f32, stride: usize) -> Self {
        Self { floats: SendPtr(first.cast_mut()), stride, ..self }
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
        LinearInput::Plain(x) | LinearInput::Gated(x) | LinearInput::Precise(x) => (x, None),
        LinearInput::Normed { x, weight, eps } => (x, Some((&weight[..], *eps))),
    }
}

/// Memory for the input of products, reused by all.
#[derive(Debug, Default)]
pub(super) struct InputSpace {
    prepared: PreparedRows,
    /// One row of each thread.
    one_row: Vec<f32>,
}

/// Rows converted for products.
#[derive(Debug, Default)]
pub(super) struct PreparedRows {
    /// Quantized rows, one entry per group size of the matrix's parts.
    quantized: Vec<QuantRows>,
    /// Entries in use.
    groups: usize,
    /// The same rows in bf16.
    bf16: Bf16Rows,
    /// The same rows as floats.
    floats: Vec<f32>,
}

/// Formats in which the rows already exist.
#[derive(Debug, Clone, Copy)]
pub(super) struct There {
    pub floats: bool,
    pub bf16: bool,
}

/// Different group sizes of the parts of one matrix.
const GROUP_SIZES: usize = 4;

impl PreparedRows {
    /// Makes room for rows in the formats that the parts of `w` need, except those that already
    /// exist.
    pub fn shape(
        &mut self,
        numerics: Numerics,
        w: &Linear,
        [rows, cols]: [usize; 2],
        planes: usize,
        there: There,
    ) -> RowWriter<'_> {
        let Self { quantized, groups, bf16, floats } = self;
        *groups = 0;
        let mut to =
            RowWriter { isa: numerics.isa, cols, floats: None, bf16: None, quantized: [None; GROUP_SIZES] };
        let (mut wants_floats, mut wants_bf16) = (false, false);
        for part in &w.parts {
            match numerics.format(part.format) {
                ActivationFormat::F32 => wants_floats = !there.floats,
                ActivationFormat::Bf16 => wants_bf16 = !there.bf16,
                ActivationFormat::Quantized { group } => {
                    if quantized[..*groups].iter().all(|q| q.group != group) {
                        if *groups == quantized.len() {
                            quantized.push(QuantRows::default());
                        }
                        quantized[*groups].shape(rows, cols, group, planes);
                        *groups += 1;
                    }
                }
            }
        }
        assert!(*groups <= GROUP_SIZES, "a matrix has parts with {groups} group sizes");
        if wants_floats {
            to.floats = Some(SendPtr(grown(floats, rows * cols, 0.0).as_mut_ptr()));
        }
        if wants_bf16 {
            bf16.shape(rows, cols);
            to.bf16 = Some(bf16.writer());
        }
        for (to, rows) in to.quantized.iter_mut().zip(&mut quantized[..*groups]) {
            *to = Some(rows.writer());
        }
        to
    }

    /// The rows that were written, of `cols` columns.
    pub fn inputs(&self, numerics: Numerics, cols: usize) -> Inputs<'_> {
        let floats = SendPtr(self.floats.as_ptr().cast_mut());
        Inputs { numerics, quantized: &self.quantized[..self.groups], bf16: &self.bf16, floats, stride: cols }
    }
}

/// Converts rows to several formats; threads share it.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowWriter<'a> {
    isa: Isa,
    cols: usize,
    floats: Option<SendPtr<f32>>,
    bf16: Option<Bf16Writer<'a>>,
    quantized: [Option<QuantWriter<'a>>; GROUP_SIZES],
}

impl RowWriter<'_> {
    /// True if there is a format to convert to.
    fn writes(&self) -> bool {
        self.floats.is_some() || self.bf16.is_some() || self.quantized[0].is_some()
    }

    /// Converts one row.
    ///
    /// # Safety
    /// `x` holds the columns; no other thread writes this row.
    pub unsafe fn write(&self, x: *const f32, row: usize) {
        // SAFETY: the caller's; the instruction set was detected.
        unsafe {
            if let Some(to) = self.floats {
                to.at(row * self.cols).copy_from_nonoverlapping(x, self.cols);
            }
            if let Some(to) = self.bf16 {
                round_row(x, row, to);
            }
            for to in self.quantized.iter().map_while(|to| *to) {
                quantize_row_on(self.isa, x, row, to);
            }
        }
    }
}

/// Calls `job(thread, row)` for each row, on all threads unless the rows are too few to be worth
/// waking the threads.
pub(in crate::cpu) fn each_row(pool: &mut Pool, rows: usize, job: &(dyn Fn(usize, usize) + Sync)) {
    if rows < 4 {
        return (0..rows).for_each(|row| job(0, row));
    }
    let threads = pool.threads();
    pool.run(&|thread| share(rows, thread, threads).for_each(|row| job(thread, row)));
}
