//! Products: rows are brought into the form that a matrix is multiplied with, then all threads multiply.

use std::ops::Range;
use std::sync::Arc;

use super::halves::{FEW_TILES, HalfRows, PANELS_TOGETHER, TILE_ROWS};
use super::isa::{self, Isa};
use super::matmul::{Input, Output};
use super::matrix::{Matrix, SendPtr};
use super::pool::{Pieces, Pool, share};
use super::quantize::{Activations, QuantRows};
use super::simd::LANES;
use super::{Buffer, Linear, grown};
use crate::backend::{Largest, LinearInput};
use crate::source::Encoding;

/// Without a step, so many rows are a prompt.
pub(super) const MANY_ROWS: usize = 9;

/// How activations enter a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
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
    pub fn of(encoding: Encoding, prompts: bool, isa: Isa, activations: Activations) -> Self {
        match (activations, encoding) {
            _ if prompts && activations.allows_halves() && isa::takes_halves(isa, encoding) => Self::Halves,
            (Activations::F32, _) | (_, Encoding::Float(_)) => Self::Floats,
            (_, Encoding::Affine { group, .. }) => Self::Integers { group },
        }
    }
}

/// Rows on their way into a product.
#[derive(Debug, Clone, Copy)]
struct Incoming<'a> {
    data: SendPtr<f32>,
    stride: usize,
    made: Made<'a>,
}

/// What is made of them.
#[derive(Debug, Clone, Copy)]
enum Made<'a> {
    Themselves,
    Norm { weight: &'a [f32], eps: f32 },
    Gated,
}

impl<'a> Incoming<'a> {
    fn new(input: &LinearInput<'a, Buffer, Arc<[f32]>>) -> Self {
        let (x, made) = match input {
            LinearInput::Plain(x) => (x, Made::Themselves),
            LinearInput::Normed { x, weight, eps } => (x, Made::Norm { weight, eps: *eps }),
            LinearInput::Gated(x) => (x, Made::Gated),
        };
        Self { data: SendPtr(x.data.as_ptr().cast_mut()), stride: x.width, made }
    }

    /// Whether the rows are not there yet.
    fn is_made(&self) -> bool {
        !matches!(self.made, Made::Themselves)
    }

    /// One row of `cols` numbers, made in `room` if it is not there already.
    ///
    /// # Safety
    /// The row is within the buffer, which nobody writes; `room` holds `cols` numbers that nobody else uses.
    unsafe fn row(&self, isa: Isa, row: usize, cols: usize, room: *mut f32) -> *const f32 {
        // SAFETY: the caller's; the instruction set was detected.
        unsafe {
            let x = self.data.at(row * self.stride).cast_const();
            let slice = |from: *const f32| std::slice::from_raw_parts(from, cols);
            match self.made {
                Made::Themselves => return x,
                Made::Norm { weight, eps } => {
                    isa::rms_norm(isa, slice(x), weight, eps, std::slice::from_raw_parts_mut(room, cols));
                }
                Made::Gated => {
                    let out = std::slice::from_raw_parts_mut(room, cols);
                    isa::swiglu(isa, slice(x), slice(x.add(cols)), out);
                }
            }
            room
        }
    }
}

/// What products work in.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// Quantized inputs of the product at hand, one for each group size among its parts.
    quantized: Vec<QuantRows>,
    /// The same rows in bf16.
    halves: HalfRows,
    /// The same rows as floats, where they are made of others.
    floats: Vec<f32>,
    /// A row for each thread.
    rooms: Vec<f32>,
    /// What each thread found, `[threads][rows]`.
    largest: Vec<Largest>,
    /// Which panels are taken.
    pieces: Pieces,
    /// One for each thread.
    pub scratch: Vec<isa::Scratch>,
}

impl Workspace {
    pub fn new(threads: usize) -> Self {
        let scratch = (0..threads).map(|_| isa::Scratch::default()).collect();
        Self { scratch, pieces: Pieces::new(threads), ..Self::default() }
    }
}

/// Rows times a matrix.
pub(super) struct Product<'a> {
    pub isa: Isa,
    pub activations: Activations,
    pub pool: &'a mut Pool,
    pub space: &'a mut Workspace,
    /// Whether the rows are prompts', which may be rounded to bf16.
    pub prompts: bool,
}

impl Product<'_> {
    /// `out[r] = x[r] · Wᵀ + bias`, or adds that. Where it is asked for, each thread looks for the largest of its outputs while
    /// they are in its cache.
    pub fn run(
        &mut self,
        x: &LinearInput<'_, Buffer, Arc<[f32]>>,
        rows: Range<usize>,
        w: &Linear,
        out: Output,
        largest: Option<&mut [Largest]>,
    ) {
        let Some(cols) = w.parts.first().map(|part| part.cols) else { return };
        let x = Incoming::new(x);
        self.prepare(&x, rows.clone(), w, cols);
        let Workspace { quantized, halves, floats, scratch, largest: found, pieces, .. } = &mut *self.space;
        // SAFETY: the rows are within the buffer.
        let plain = unsafe { SendPtr(x.data.at(rows.start * x.stride)) };
        let (data, stride) =
            if x.is_made() { (SendPtr(floats.as_mut_ptr()), cols) } else { (plain, x.stride) };
        let (isa, activations, prompts) = (self.isa, self.activations, self.prompts);
        let panels: usize = w.parts.iter().map(Matrix::panel_count).sum();
        let (threads, scratch) = (self.pool.threads(), SendPtr(scratch.as_mut_ptr()));
        let wanted = largest.as_ref().map_or(0, |largest| largest.len());
        let found = grown(found, threads * wanted, Largest::NONE);
        found.fill(Largest::NONE);
        let each = SendPtr(found.as_mut_ptr());
        pieces.reset(panels, least_panels(w, rows.len()));
        let pieces = &*pieces;
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            while let Some(piece) = pieces.next(thread) {
                let (mut first_panel, mut column) = (0, 0);
                for part in &w.parts {
                    let count = part.panel_count();
                    let within = |panel: usize| panel.clamp(first_panel, first_panel + count) - first_panel;
                    let mine = within(piece.start)..within(piece.end);
                    let first_column = column;
                    first_panel += count;
                    column += part.rows;
                    if mine.is_empty() {
                        continue;
                    }
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
                    let mine_columns = mine.start * LANES..part.rows.min(mine.end * LANES);
                    // SAFETY: input and output have the part's shape, each panel's columns are written by one thread, and a
                    // thread has places of its own for the largest of each row.
                    unsafe {
                        let out = out.starting_at(first_column);
                        isa::matmul(isa, part, mine, input, out, scratch);
                        for row in 0..wanted {
                            let from = out.data.add(row * out.stride + mine_columns.start);
                            let outputs = std::slice::from_raw_parts(from, mine_columns.len());
                            let first = (first_column + mine_columns.start) as u32;
                            isa::largest(isa, outputs, first, &mut *each.at(thread * wanted + row));
                        }
                    }
                }
            }
        });
        for (row, largest) in largest.into_iter().flatten().enumerate() {
            *largest =
                found.iter().skip(row).step_by(wanted).fold(Largest::NONE, |best, found| best.or(*found));
        }
    }

    /// Brings the rows into the forms that the parts of `w` need.
    fn prepare(&mut self, x: &Incoming<'_>, rows: Range<usize>, w: &Linear, cols: usize) {
        let (isa, count) = (self.isa, rows.len());
        let Workspace { quantized, halves, floats, rooms, .. } = &mut *self.space;
        let room = cols.next_multiple_of(LANES);
        let rooms = SendPtr(grown(rooms, self.pool.threads() * room, 0.0).as_mut_ptr());
        // SAFETY: the row is within the buffer; each thread has a room of its own.
        let row = |thread, row| unsafe { x.row(isa, rows.start + row, cols, rooms.at(thread * room)) };
        let (mut integers, mut halved, mut floated) = (0, false, false);
        for part in &w.parts {
            match Form::of(part.encoding, self.prompts, isa, self.activations) {
                Form::Floats => {
                    if x.is_made() && !std::mem::replace(&mut floated, true) {
                        let to = SendPtr(grown(floats, count * cols, 0.0).as_mut_ptr());
                        // SAFETY: each row is written by one thread.
                        each_row(self.pool, count, &|thread, i| unsafe {
                            to.at(i * cols).copy_from_nonoverlapping(row(thread, i), cols);
                        });
                    }
                }
                Form::Halves => {
                    if !std::mem::replace(&mut halved, true) {
                        halves.shape(count, cols);
                        let writer = halves.writer();
                        // SAFETY: each row is rounded by one thread.
                        each_row(self.pool, count, &|thread, i| unsafe {
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
                    quantized.shape(count, cols, group, self.activations);
                    let writer = quantized.writer();
                    // SAFETY: each row is quantized by one thread.
                    each_row(self.pool, count, &|thread, i| unsafe {
                        isa::quantize_row(isa, row(thread, i), i, writer);
                    });
                    integers += 1;
                }
            }
        }
    }
}

/// The least panels that a thread takes at a time.
fn least_panels(w: &Linear, rows: usize) -> usize {
    /// With few rows: what takes some microseconds to read, beside which a call is nothing.
    const FEW_ROWS_BYTES: usize = 32 << 10;
    if rows > FEW_TILES * TILE_ROWS {
        return PANELS_TOGETHER;
    }
    let panel_bytes = w.parts.iter().map(Matrix::panel_bytes).max().unwrap_or(0);
    // Matrix units take panels in pairs.
    (FEW_ROWS_BYTES / panel_bytes.max(1)).max(1).next_multiple_of(2)
}

/// Calls a job with a thread and each of its rows. Few rows are not worth a hand-over to the threads.
fn each_row(pool: &mut Pool, rows: usize, job: &(dyn Fn(usize, usize) + Sync)) {
    if rows < 4 {
        return (0..rows).for_each(|row| job(0, row));
    }
    let threads = pool.threads();
    pool.run(&|thread| share(rows, thread, threads).for_each(|row| job(thread, row)));
}
