//! Rows on their way into products: what is made of them, in the forms that matrices are multiplied with.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::LinearInput;
use crate::cpu::buffer::Buffer;
use crate::cpu::isa::Isa;
use crate::cpu::layout::bf16_rows::{HalfRows, round_row};
use crate::cpu::layout::matrix::{Linear, Matrix};
use crate::cpu::layout::region::grown;
use crate::cpu::pointers::SendPtr;
use crate::cpu::product::matmul::Input;
use crate::cpu::product::numerics::{ActivationFormat, Numerics};
use crate::cpu::product::quantize::{QuantRows, quantize_row_on};
use crate::cpu::rows::rms_norm_on;
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::{Pool, share};

/// Rows of floats, and what is made of them.
#[derive(Debug, Clone, Copy)]
struct Incoming<'a> {
    data: SendPtr<f32>,
    stride: usize,
    norm: Option<(&'a [f32], f32)>,
}

impl Incoming<'_> {
    /// One row of `cols` numbers, made in `room` if it is not there already.
    ///
    /// # Safety
    /// The row is within the buffer, which nobody writes; `room` holds `cols` numbers that nobody else uses.
    unsafe fn row(&self, isa: Isa, row: usize, cols: usize, room: *mut f32) -> *const f32 {
        // SAFETY: the caller's; the instruction set was detected.
        unsafe {
            let x = self.data.at(row * self.stride).cast_const();
            let Some((weight, eps)) = self.norm else { return x };
            let out = std::slice::from_raw_parts_mut(room, cols);
            rms_norm_on(isa, std::slice::from_raw_parts(x, cols), weight, eps, out);
            room
        }
    }
}

/// Rows in the forms that the parts of a matrix take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    numerics: Numerics,
    quantized: &'a [QuantRows],
    pub halves: &'a HalfRows,
    floats: SendPtr<f32>,
    stride: usize,
}

impl<'a> Inputs<'a> {
    /// Brings rows into the forms that the parts of `w`, which have so many columns, take.
    pub fn prepare(
        numerics: Numerics,
        pool: &mut Pool,
        space: &'a mut InputSpace,
        input: &'a LinearInput<'_, Buffer, Arc<[f32]>>,
        rows: Range<usize>,
        (w, cols): (&Linear, usize),
    ) -> Self {
        let (x, norm) = match input {
            LinearInput::Plain(x) | LinearInput::Gated(x) => (x, None),
            LinearInput::Normed { x, weight, eps } => (x, Some((&weight[..], *eps))),
        };
        let planes = numerics.activations.planes(matches!(input, LinearInput::Gated(_)));
        let there = x.halved(&rows);
        assert!(
            there.is_none() || x.width == cols && numerics.bf16_only(w),
            "rows are kept in the form that their next matrix takes"
        );
        let (isa, count) = (numerics.isa, rows.len());
        let InputSpace { quantized, halves, floats, rooms } = space;
        let first = SendPtr(x.data[rows.start * x.width..].as_ptr().cast_mut());
        let x = Incoming { data: first, stride: x.width, norm };
        let room = cols.next_multiple_of(LANES);
        let rooms = SendPtr(grown(rooms, pool.threads() * room, 0.0).as_mut_ptr());
        // SAFETY: the row is within the buffer; each thread has a room of its own.
        let row = |thread, row| unsafe { x.row(isa, row, cols, rooms.at(thread * room)) };
        let (mut integers, mut halved, mut floated) = (0, there.is_some(), norm.is_none());
        for part in &w.parts {
            match numerics.format(part.encoding) {
                ActivationFormat::F32 => {
                    if !std::mem::replace(&mut floated, true) {
                        let to = SendPtr(grown(floats, count * cols, 0.0).as_mut_ptr());
                        // SAFETY: each row is written by one thread.
                        each_row(pool, count, &|thread, i| unsafe {
                            to.at(i * cols).copy_from_nonoverlapping(row(thread, i), cols);
                        });
                    }
                }
                ActivationFormat::Bf16 => {
                    if !std::mem::replace(&mut halved, true) {
                        halves.shape(count, cols);
                        let writer = halves.writer();
                        // SAFETY: each row is rounded by one thread.
                        each_row(pool, count, &|thread, i| unsafe {
                            round_row(row(thread, i), i, writer);
                        });
                    }
                }
                ActivationFormat::Quantized { group } => {
                    if quantized[..integers].iter().any(|q| q.group == group) {
                        continue;
                    }
                    if integers == quantized.len() {
                        quantized.push(QuantRows::default());
                    }
                    let quantized = &mut quantized[integers];
                    quantized.shape(count, cols, group, planes);
                    let writer = quantized.writer();
                    // SAFETY: each row is quantized by one thread.
                    each_row(pool, count, &|thread, i| unsafe {
                        quantize_row_on(isa, row(thread, i), i, writer);
                    });
                    integers += 1;
                }
            }
        }
        let (floats, stride) =
            if norm.is_some() { (SendPtr(floats.as_mut_ptr()), cols) } else { (first, x.stride) };
        Self { numerics, quantized: &quantized[..integers], halves: there.unwrap_or(halves), floats, stride }
    }

    /// The rows as a part takes them.
    pub fn of(&self, part: &Matrix) -> Input<'a> {
        match self.numerics.format(part.encoding) {
            ActivationFormat::F32 => {
                // SAFETY: the address of the first row.
                let data = unsafe { self.floats.at(0) };
                Input::Floats { data, stride: self.stride }
            }
            ActivationFormat::Bf16 => Input::Halves(self.halves),
            ActivationFormat::Quantized { group } => match self.quantized.iter().find(|q| q.group == group) {
                Some(rows) => Input::Quantized(rows),
                None => unreachable!("quantized for every part"),
            },
        }
    }
}

/// Where rows are prepared; allocates only when more is needed than ever before.
#[derive(Debug, Default)]
pub(super) struct InputSpace {
    /// Quantized inputs of the product at hand, one for each group size among its parts.
    quantized: Vec<QuantRows>,
    /// The same rows in bf16.
    halves: HalfRows,
    /// The same rows as floats, where they are made of others.
    floats: Vec<f32>,
    /// A row for each thread.
    rooms: Vec<f32>,
}

/// Calls a job with a thread and each of its rows. Few rows are not worth a hand-over to the threads.
fn each_row(pool: &mut Pool, rows: usize, job: &(dyn Fn(usize, usize) + Sync)) {
    if rows < 4 {
        return (0..rows).for_each(|row| job(0, row));
    }
    let threads = pool.threads();
    pool.run(&|thread| share(rows, thread, threads).for_each(|row| job(thread, row)));
}
