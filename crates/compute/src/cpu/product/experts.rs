//! Products of rows with their chosen experts. Rows are gathered by expert, so that each expert's
//! weights are read once, and only if a row chose the expert.
//!
//! Experts are taken in *waves*, which bound the memory of gathered rows. A wave has two stages:
//! gate and up with the activation, then down. Threads share the panels of all experts of a wave.

use std::ops::Range;

use super::input::{PreparedRows, There, each_row};
use super::matmul::{Input, multiply_on};
use super::numerics::Numerics;
use super::output::Output;
use super::{GateResults, Product, Workspace, gate_and_up, min_claim, panels_together};
use crate::backend::{Activation, Expert};
use crate::cpu::buffer::Buffer;
use crate::cpu::isa::Isa;
use crate::cpu::layout::bf16_rows::PANELS_TOGETHER;
use crate::cpu::layout::matrix::{Linear, Matrix};
use crate::cpu::layout::region::grown;
use crate::cpu::pointers::SendPtr;
use crate::cpu::scratch::Scratch;
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::{Pool, WorkQueue};

/// A wave has at least this many rows, unless the step has fewer.
const LEAST_WAVE_ROWS: usize = 64;

/// The experts of one layer.
#[derive(Debug)]
pub struct Experts {
    experts: Vec<Expert<Linear>>,
    /// `None`: channels are `max(up, 0)²`, and `gate_up` is `up`.
    activation: Option<Activation>,
    /// Outputs of an expert.
    width: usize,
}

impl Experts {
    pub(in crate::cpu) fn new(experts: Vec<Expert<Linear>>, activation: Option<Activation>) -> Self {
        let width = experts.iter().map(|expert| expert.down.rows).max().unwrap_or(0);
        Self { experts, activation, width }
    }

    /// Channels of an expert.
    fn channels(&self, expert: usize) -> usize {
        let rows = self.experts[expert].gate_up.rows;
        if self.activation.is_some() { rows / 2 } else { rows }
    }

    /// Gate and up of an expert, or up twice; `None` if there are no channels.
    fn gate_and_up(&self, expert: usize) -> Option<[&Matrix; 2]> {
        let w = &self.experts[expert].gate_up;
        match self.activation {
            Some(_) => gate_and_up(w),
            None => w.parts.first().map(|up| [up, up]),
        }
    }
}

/// A row that chose an expert.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    row: u32,
    weight: f32,
}

/// An expert that some rows chose.
#[derive(Debug, Clone)]
struct Active {
    expert: usize,
    /// Its part of [`ExpertSpace::taken`].
    taken: Range<usize>,
    /// Index of its prepared rows.
    place: usize,
    /// Where its rows of channels begin, counted in floats.
    channels: usize,
}

/// Memory that products with experts reuse.
#[derive(Debug, Default)]
pub(super) struct ExpertSpace {
    /// Chosen experts in ascending order.
    active: Vec<Active>,
    /// Rows by expert, then in their own order.
    taken: Vec<Taken>,
    /// Rows of each expert.
    counts: Vec<usize>,
    /// The experts of a wave, those with the most rows first.
    by_rows: Vec<usize>,
    /// Input rows of the wave's experts, by place.
    inputs: Vec<PreparedRows>,
    /// Gated activations of the wave's experts, by place, for the down projections.
    gated: Vec<PreparedRows>,
    /// Gated activations of the wave's experts.
    channels: Vec<f32>,
    /// One weighted row of each thread.
    weighted: Vec<f32>,
    /// Results of a down projection, per thread.
    sums: Vec<f32>,
}

impl ExpertSpace {
    /// Sorts rows by their chosen experts. Experts without weights on this rank are skipped.
    fn gather(&mut self, rows: Range<usize>, choices: &Buffer, experts: &Experts) {
        let Self { active, taken, counts, .. } = self;
        let of_row = |row: usize| {
            let (indices, weights) =
                choices.data[row * choices.width..][..choices.width].split_at(choices.width / 2);
            indices.iter().map(|index| *index as usize).zip(weights)
        };
        counts.clear();
        counts.resize(experts.experts.len(), 0);
        for row in rows.clone() {
            of_row(row).for_each(|(expert, _)| counts[expert] += 1);
        }
        active.clear();
        let mut end = 0;
        for (expert, count) in counts.iter_mut().enumerate() {
            let Expert { gate_up, down_bias, .. } = &experts.experts[expert];
            if *count > 0 && (gate_up.rows > 0 || down_bias.is_some()) {
                active.push(Active { expert, taken: end..end + *count, place: 0, channels: 0 });
                end += *count;
                // From here on, the place of the expert's next row.
                *count = end - *count;
            } else {
                *count = usize::MAX;
            }
        }
        taken.clear();
        taken.resize(end, Taken::default());
        for row in rows {
            for (expert, &weight) in of_row(row) {
                if counts[expert] != usize::MAX {
                    taken[counts[expert]] = Taken { row: row as u32, weight };
                    counts[expert] += 1;
                }
            }
        }
    }

    /// The next wave: active experts from `first` on, with at most `rows` rows unless one expert
    /// has more. Assigns a place and space for its channels to each. Returns the wave's end and all
    /// channels. Experts with many rows have the first places, so that all places together hold
    /// little more than one wave.
    fn next_wave(&mut self, first: usize, rows: usize, experts: &Experts) -> (usize, usize) {
        let Self { active, by_rows, inputs, gated, .. } = self;
        let start = active[first].taken.start;
        let fits = |active: &&Active| active.taken.end - start <= rows;
        let wave = active[first..].iter().take_while(fits).count().max(1);
        let wave = &mut active[first..first + wave];
        by_rows.clear();
        by_rows.extend(0..wave.len());
        by_rows.sort_unstable_by_key(|&index| std::cmp::Reverse(wave[index].taken.len()));
        let mut channels = 0;
        for (place, &index) in by_rows.iter().enumerate() {
            let active = &mut wave[index];
            (active.place, active.channels) = (place, channels);
            channels += active.taken.len() * experts.channels(active.expert);
        }
        let places = inputs.len().max(wave.len());
        inputs.resize_with(places, PreparedRows::default);
        gated.resize_with(places, PreparedRows::default);
        (first + wave.len(), channels)
    }
}

impl Product<'_> {
    /// Adds to `out` the weighted sums of the experts that these rows of `x` chose. The first row
    /// of `out` is `rows.start`.
    pub fn add_experts(
        self,
        x: &Buffer,
        rows: Range<usize>,
        choices: &Buffer,
        experts: &Experts,
        out: Output,
    ) {
        let Self { numerics, pool, space } = self;
        let Workspace { results, queue, scratch, experts: own, .. } = space;
        let scratch = SendPtr(scratch.as_mut_ptr());
        own.gather(rows.clone(), choices, experts);
        let mut first = 0;
        while first < own.active.len() {
            let (end, channels) = own.next_wave(first, rows.len().max(LEAST_WAVE_ROWS), experts);
            let wave = first..end;
            let mut run = Run { numerics, pool, queue, scratch, experts, own, wave };
            run.gate_and_up(x, channels, results);
            run.weigh();
            run.down(rows.start, out);
            first = end;
        }
    }
}

/// One wave's products.
struct Run<'a> {
    numerics: Numerics,
    pool: &'a mut Pool,
    queue: &'a mut WorkQueue,
    /// One entry per thread.
    scratch: SendPtr<Scratch>,
    experts: &'a Experts,
    own: &'a mut ExpertSpace,
    /// Part of [`ExpertSpace::active`].
    wave: Range<usize>,
}

const NOTHING_THERE: There = There { floats: false, bf16: false };

impl Run<'_> {
    /// Gathers rows of `x` and computes `channels` floats of gated activations.
    fn gate_and_up(&mut self, x: &Buffer, channels: usize, results: &mut Vec<f32>) {
        let Self { numerics, pool, queue, scratch, experts, own, wave } = self;
        let ExpertSpace { active, taken, inputs, channels: all_channels, .. } = &mut **own;
        let (numerics, scratch, wave, cols) = (*numerics, *scratch, &active[wave.clone()], x.width);
        let parts = |active: &Active| experts.gate_and_up(active.expert);
        let planes = numerics.activations.planes(false);
        let (mut panels, mut bytes, mut of_thread) = (0, 0, 0);
        for active in wave {
            let Some([gate, up]) = parts(active) else { continue };
            let rows = &taken[active.taken.clone()];
            let w = &experts.experts[active.expert].gate_up;
            let to = inputs[active.place].shape(numerics, w, [rows.len(), cols], planes, NOTHING_THERE);
            each_row(pool, rows.len(), &|_, i| {
                let row = &x.data[rows[i].row as usize * cols..][..cols];
                // SAFETY: each row is one thread's.
                unsafe { to.write(row.as_ptr(), i) };
            });
            panels += gate.panel_count();
            bytes = bytes.max(gate.panel_bytes() + up.panel_bytes());
            of_thread = of_thread.max(rows.len() * 2 * panels_together(rows.len()) * LANES);
        }
        let most = wave.iter().map(|active| active.taken.len()).max().unwrap_or(0);
        let channels = SendPtr(grown(all_channels, channels, 0.0).as_mut_ptr());
        let results = SendPtr(grown(results, pool.threads() * of_thread, 0.0).as_mut_ptr());
        queue.reset(panels, min_claim(bytes, most, PANELS_TOGETHER / 2)..=usize::MAX);
        let (queue, inputs) = (&**queue, &*inputs);
        pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let (scratch, results) = unsafe { (&mut *scratch.at(thread), results.at(thread * of_thread)) };
            while let Some(claimed) = queue.next(thread) {
                let counts = |active: &Active| parts(active).map_or(0, |[gate, _]| gate.panel_count());
                for (active, panels) in claimed_panels(wave, claimed, counts) {
                    let Some(gate_up) = parts(active) else { continue };
                    let rows = active.taken.len();
                    let (together, width) = (panels_together(rows), gate_up[0].rows);
                    let inputs = inputs[active.place].inputs(numerics, cols);
                    for first in panels.clone().step_by(together) {
                        let panels = first..panels.end.min(first + together);
                        let results = GateResults { data: results, width: together * LANES, rows };
                        // SAFETY: the input has the parts' shape, the results have room for the
                        // panels, the channels for the expert's rows, and each panel's columns are
                        // written by one thread.
                        unsafe {
                            let out = channels.at(active.channels);
                            let out = Output { data: out, stride: width, rows, adds: false };
                            let gates = (gate_up, experts.activation);
                            results.gate(numerics.isa, gates, panels, &inputs, out, scratch);
                        }
                    }
                }
            }
        });
    }

    /// Multiplies gated activations with their experts' weights, and prepares them for the down
    /// projections.
    fn weigh(&mut self) {
        let Self { numerics, pool, experts, own, wave, .. } = self;
        let ExpertSpace { active, taken, gated, channels, weighted, .. } = &mut **own;
        let planes = numerics.activations.planes(true);
        for active in &active[wave.clone()] {
            let down = &experts.experts[active.expert].down;
            let Some(width) = down.parts.first().map(|part| part.cols).filter(|width| *width > 0) else {
                continue;
            };
            let rows = &taken[active.taken.clone()];
            let to = gated[active.place].shape(*numerics, down, [rows.len(), width], planes, NOTHING_THERE);
            let stride = width.next_multiple_of(LANES);
            let weighted = SendPtr(grown(weighted, pool.threads() * stride, 0.0).as_mut_ptr());
            let channels = &channels[active.channels..];
            each_row(pool, rows.len(), &|thread, i| {
                // SAFETY: each thread has its own weighted row; each row is one thread's.
                unsafe {
                    let row = std::slice::from_raw_parts_mut(weighted.at(thread * stride), width);
                    for (to, x) in row.iter_mut().zip(&channels[i * width..][..width]) {
                        *to = x * rows[i].weight;
                    }
                    to.write(row.as_ptr(), i);
                }
            });
        }
    }

    /// Adds the down projections to the rows of `out`, starting with row `first_row`.
    fn down(&mut self, first_row: usize, out: Output) {
        let Self { numerics, pool, queue, scratch, experts, own, wave } = self;
        let ExpertSpace { active, taken, gated, sums, .. } = &mut **own;
        let (numerics, scratch, wave) = (*numerics, *scratch, &active[wave.clone()]);
        let part =
            |active: &Active| experts.experts[active.expert].down.parts.first().filter(|part| part.cols > 0);
        let most = wave.iter().map(|active| active.taken.len()).max().unwrap_or(0);
        let bytes: usize = wave.iter().filter_map(part).map(Matrix::panel_bytes).sum();
        let together = panels_together(most);
        let of_thread = most * together * LANES;
        let sums = SendPtr(grown(sums, pool.threads() * of_thread, 0.0).as_mut_ptr());
        queue.reset(experts.width.div_ceil(LANES), min_claim(bytes, most, PANELS_TOGETHER / 2)..=usize::MAX);
        let (queue, gated) = (&**queue, &*gated);
        pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let (scratch, sums) = unsafe { (&mut *scratch.at(thread), sums.at(thread * of_thread)) };
            while let Some(claimed) = queue.next(thread) {
                for active in wave {
                    let rows = &taken[active.taken.clone()];
                    let at = |row: u32| out.row(row as usize - first_row);
                    if let Some(part) = part(active) {
                        let x = gated[active.place].inputs(numerics, part.cols).of(part);
                        let product = Down { isa: numerics.isa, part, x };
                        // SAFETY: the rows were prepared for the part; `out` has the rows; their
                        // columns of the claimed panels are this thread's.
                        unsafe {
                            match rows {
                                [one] => product.add_row(claimed.clone(), at(one.row), scratch),
                                _ => {
                                    let to = rows.iter().map(|taken| at(taken.row));
                                    product.add_rows(claimed.clone(), to, (sums, together), scratch);
                                }
                            }
                        }
                    }
                    if let Some(bias) = &experts.experts[active.expert].down_bias {
                        let columns = claimed.start * LANES..experts.width.min(claimed.end * LANES);
                        for taken in rows {
                            // SAFETY: as above.
                            let to = unsafe {
                                let to = at(taken.row).add(columns.start);
                                std::slice::from_raw_parts_mut(to, columns.len())
                            };
                            for (to, bias) in to.iter_mut().zip(&bias[columns.clone()]) {
                                *to += taken.weight * bias;
                            }
                        }
                    }
                }
            }
        });
    }
}

/// The down projection of one expert's prepared rows.
struct Down<'a> {
    isa: Isa,
    part: &'a Matrix,
    x: Input<'a>,
}

impl Down<'_> {
    /// Adds the panels' results of the only row to `to`.
    ///
    /// # Safety
    /// `to` has the panels' columns, which are this thread's; one row was prepared.
    unsafe fn add_row(self, panels: Range<usize>, to: *mut f32, scratch: &mut Scratch) {
        let out = Output { data: to, stride: 0, rows: 1, adds: true };
        // SAFETY: the caller's.
        unsafe { multiply_on(self.isa, self.part, panels, self.x, out, scratch) };
    }

    /// Adds the panels' results of each row to the next of `to`, through `sums`, which has space
    /// for `together` panels of all rows.
    ///
    /// # Safety
    /// As for [`Down::add_row`], for each row.
    unsafe fn add_rows(
        self,
        panels: Range<usize>,
        to: impl ExactSizeIterator<Item = *mut f32> + Clone,
        (sums, together): (*mut f32, usize),
        scratch: &mut Scratch,
    ) {
        let (rows, width) = (to.len(), together * LANES);
        for first in panels.clone().step_by(together) {
            let panels = first..panels.end.min(first + together);
            let columns = panels.start * LANES..self.part.rows.min(panels.end * LANES);
            // Kernels count columns from the matrix's first panel on.
            let data = sums.wrapping_sub(columns.start);
            let out = Output { data, stride: width, rows, adds: false };
            // SAFETY: the caller's.
            unsafe {
                multiply_on(self.isa, self.part, panels, self.x, out, scratch);
                for (row, to) in to.clone().enumerate() {
                    let sums = std::slice::from_raw_parts(sums.add(row * width), columns.len());
                    let to = std::slice::from_raw_parts_mut(to.add(columns.start), columns.len());
                    to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
                }
            }
        }
    }
}

/// The experts that own some of the claimed panels, and their own panels. An expert has `count`
/// panels.
fn claimed_panels(
    wave: &[Active],
    claimed: Range<usize>,
    count: impl Fn(&Active) -> usize,
) -> impl Iterator<Item = (&Active, Range<usize>)> {
    let mut before = 0;
    wave.iter().filter_map(move |active| {
        let (first, end) = (before, before + count(active));
        before = end;
        let own = |panel: usize| panel.clamp(first, end) - first;
        let panels = own(claimed.start)..own(claimed.end);
        (!panels.is_empty()).then_some((active, panels))
    })
}
