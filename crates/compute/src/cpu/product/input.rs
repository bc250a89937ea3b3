//! Rows on their way into products: what is made of them, in the forms that matrices are multiplied with.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::LinearInput;
use crate::cpu::isa::{self, Isa};
use crate::cpu::layout::bf16_rows::HalfRows;
use crate::cpu::layout::matrix::{Matrix, SendPtr};
use crate::cpu::product::matmul::Input;
use crate::cpu::product::quantize::{Activations, QuantRows};
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::{Pool, share};
use crate::cpu::{Buffer, Linear, grown};
use crate::source::Encoding;

/// How activations enter a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) enum Form {
    Floats,
    /// Quantized, with sums of groups of `group` columns.
    Integers {
        group: usize,
    },
    /// In bf16.
    Halves,
}

/// What decides that.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Manner {
    pub isa: Isa,
    pub activations: Activations,
    /// Whether the rows are prompts', which may be rounded to bf16.
    pub prompts: bool,
}

impl Manner {
    /// The form of rows that meet such weights.
    pub fn form(self, encoding: Encoding) -> Form {
        let Self { isa, activations, prompts } = self;
        match (activations, encoding) {
            _ if prompts && activations.allows_halves() && isa::takes_halves(isa, encoding) => Form::Halves,
            (Activations::F32, _) | (_, Encoding::Float(_)) => Form::Floats,
            (_, Encoding::Affine { group, .. }) => Form::Integers { group },
        }
    }

    /// Whether a matrix takes these rows in bf16 only.
    pub fn halves_only(self, w: &Linear) -> bool {
        w.parts.iter().all(|part| self.form(part.encoding) == Form::Halves)
    }
}

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
            isa::rms_norm(isa, std::slice::from_raw_parts(x, cols), weight, eps, out);
            room
        }
    }
}

/// Rows in the forms that the parts of a matrix take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    manner: Manner,
    quantized: &'a [QuantRows],
    pub halves: &'a HalfRows,
    floats: SendPtr<f32>,
    stride: usize,
}

impl<'a> Inputs<'a> {
    /// Brings rows into the forms that the parts of `w`, which have so many columns, take.
    pub fn prepare(
        manner: Manner,
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
        let planes = manner.activations.planes(matches!(input, LinearInput::Gated(_)));
        let there = x.halved(&rows);
        assert!(
            there.is_none() || x.width == cols && manner.halves_only(w),
            "rows are kept in the form that their next matrix takes"
        );
        let (isa, count) = (manner.isa, rows.len());
        let InputSpace { quantized, halves, floats, rooms } = space;
        let first = SendPtr(x.data[rows.start * x.width..].as_ptr().cast_mut());
        let x = Incoming { data: first, stride: x.width, norm };
        let room = cols.next_multiple_of(LANES);
        let rooms = SendPtr(grown(rooms, pool.threads() * room, 0.0).as_mut_ptr());
        // SAFETY: the row is within the buffer; each thread has a room of its own.
        let row = |thread, row| unsafe { x.row(isa, row, cols, rooms.at(thread * room)) };
        let (mut integers, mut halved, mut floated) = (0, there.is_some(), norm.is_none());
        for part in &w.parts {
            match manner.form(part.encoding) {
                Form::Floats => {
                    if !std::mem::replace(&mut floated, true) {
                        let to = SendPtr(grown(floats, count * cols, 0.0).as_mut_ptr());
                        // SAFETY: each row is written by one thread.
                        each_row(pool, count, &|thread, i| unsafe {
                            to.at(i * cols).copy_from_nonoverlapping(row(thread, i), cols);
                        });
                    }
                }
                Form::Halves => {
                    if !std::mem::replace(&mut halved, true) {
                        halves.shape(count, cols);
                        let writer = halves.writer();
                        // SAFETY: each row is rounded by one thread.
                        each_row(pool, count, &|thread, i| unsafe {
                            isa::round_row(row(thread, i), i, writer);
                        });
                    }
                }
                Form::Integers { group } => {
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
                        isa::quantize_row(isa, row(thread, i), i, writer);
                    });
                    integers += 1;
                }
            }
        }
        let (floats, stride) =
            if norm.is_some() { (SendPtr(floats.as_mut_ptr()), cols) } else { (first, x.stride) };
        Self { manner, quantized: &quantized[..integers], halves: there.unwrap_or(halves), floats, stride }
    }

    /// The rows as a part takes them.
    pub fn of(&self, part: &Matrix) -> Input<'a> {
        match self.manner.form(part.encoding) {
            // SAFETY: the first row.
            Form::Floats => Input::Floats { data: unsafe { self.floats.at(0) }, stride: self.stride },
            Form::Halves => Input::Halves(self.halves),
            Form::Integers { group } => match self.quantized.iter().find(|q| q.group == group) {
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
