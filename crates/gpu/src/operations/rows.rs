//! Operations on rows: norms, gates, sums, and rows that are picked, read or written.

use std::ops::Range;

use thunder_compute::{Activation, Choice, Choices, ComputeError, Curve, Largest, PartNorm};

use super::leaving::Levels;
use super::{Outcome, activation_arguments};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory, Vector};
use crate::follow::{Next, Vote};
use crate::kernel::{EDITED, Input, Kernel, MAX_NORM_BLOCKS, table_of, words_of};
use crate::matrix::Matrix;
use crate::proof::{Family, Weights};

/// Maximum workgroups of an operation whose threads may loop.
pub(crate) const MAX_GROUPS: usize = 4096;

/// Workgroups that search the largest number of a row, and threads of each.
const LARGEST_PARTS: usize = 64;
const LARGEST_THREADS: usize = 256;

impl GpuBackend {
    pub(crate) fn read_rows(&mut self, x: &Buffer, rows: Range<usize>, out: &mut [f32]) -> Outcome {
        let stride = x.stride();
        let mut words = std::mem::take(&mut self.words);
        let read = self.read_words(&x.memory, rows.start * stride..rows.end * stride, &mut words);
        for (out, row) in out.chunks_mut(x.width.max(1)).zip(words.chunks(stride)) {
            out.iter_mut().zip(row).for_each(|(out, word)| *out = f32::from_bits(*word));
        }
        self.words = words;
        read
    }

    /// Writes these rows to `x`, from row `first` on.
    pub(crate) fn write_rows(&mut self, x: &Buffer, first: usize, values: &[f32]) -> Outcome {
        let stride = x.stride();
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        for row in values.chunks(x.width.max(1)) {
            words.extend(row.iter().map(|value| value.to_bits()));
            words.resize(words.len().next_multiple_of(stride), 0);
        }
        let written = self.device.overwrite(&x.memory, first * stride, &words);
        self.words = words;
        written
    }

    pub(super) fn embed_rows(
        &mut self,
        table: &Matrix,
        ids: &[u32],
        first: u32,
        scale: f32,
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(ids.len())?;
        if table.chunks.is_empty() {
            return self.write_rows(out, 0, &vec![0.0; ids.len() * out.width]);
        }
        for chunk in &table.chunks {
            self.prove_embed(Weights { chunk, blocks: table.blocks })?;
        }
        let (memory, at) = self.token_table(ids, first)?;
        for chunk in &table.chunks {
            let weights = Weights { chunk, blocks: table.blocks };
            self.record_embed(weights, (&memory, at), [first, table.rows as u32], scale, out)?;
        }
        Ok(())
    }

    /// The table of these ids. The first of a step is that of its tokens, from which several
    /// embeddings can be read.
    fn token_table(&mut self, ids: &[u32], first: u32) -> Result<(Memory, u32), ComputeError> {
        if let Some(table) = self.tokens.table.as_ref().filter(|_| self.tokens.ids == ids) {
            return Ok(table.clone());
        }
        let table = self.device.table(ids)?;
        if self.tokens.table.is_none() {
            self.tokens.ids.clear();
            self.tokens.ids.extend_from_slice(ids);
            (self.tokens.first, self.tokens.table) = (first, Some(table.clone()));
            if let Some((_, tokens)) = &mut self.next {
                *tokens = Some(table.1);
            }
        }
        Ok(table)
    }

    /// Records the rows of `out` that come from this chunk of a table of `rows` rows.
    pub(crate) fn record_embed(
        &mut self,
        Weights { chunk, blocks }: Weights<'_>,
        (ids, at): (&Memory, u32),
        [first, rows]: [u32; 2],
        scale: f32,
        out: &Buffer,
    ) -> Outcome {
        let arguments = [
            blocks as u32,
            chunk.shift,
            at,
            out.rows as u32,
            first,
            rows,
            chunk.rows.start as u32,
            chunk.rows.len() as u32,
            out.width as u32,
            out.stride() as u32,
            scale.to_bits(),
        ];
        let mut buffers: Vec<_> = chunk.buffers.iter().collect();
        buffers.extend([ids, &out.memory]);
        self.device.dispatch(&Kernel::Embed(chunk.format), &buffers, &arguments, [out.rows as u32, 1, 1])
    }

    pub(super) fn norm_rows(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        (weight, eps): (&Vector, f32),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(x.rows)?;
        debug_assert!(weight.len >= x.width, "a norm has a weight for each column");
        let blocks = out.stride() / BLOCK_COLUMNS;
        // Products of prompts' rows do not use bytes.
        let is_generated = self.step.as_ref().is_some_and(|step| step.generated == step.all);
        let levels = is_generated
            && blocks <= MAX_NORM_BLOCKS
            && self.rounded_norms.contains(&weight.memory.id)
            && self.wants_levels()
            && self.takes(Family::NormedLevels)?;
        self.record_norm(x, rows.clone(), (weight, eps), out, levels)?;
        if levels {
            self.note_levels(out, rows, (blocks, Input::Bytes, None), 0);
        }
        self.note_normed(weight, out);
        Ok(())
    }

    /// Records a norm. If asked, it also stores [`Input::Bytes`] in the first place for levels.
    pub(crate) fn record_norm(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        (weight, eps): (&Vector, f32),
        out: &Buffer,
        levels: bool,
    ) -> Outcome {
        let strides = [x.stride() as u32, out.stride() as u32];
        let arguments = [x.width as u32, rows.start as u32, strides[0], strides[1], eps.to_bits()];
        let mut buffers = vec![&weight.memory, &x.memory, &out.memory];
        let left = match levels {
            true => Some(self.levels_at(0, out, out.stride() / BLOCK_COLUMNS, Input::Bytes)?),
            false => None,
        };
        if let Some(Levels { levels, scales, .. }) = &left {
            buffers.extend([levels, scales]);
        }
        self.device.dispatch(&Kernel::Norm { levels }, &buffers, &arguments, [rows.len() as u32, 1, 1])
    }

    /// Writes the sum of squares of each norm to a column of `out`.
    pub(super) fn sum_squares(
        &mut self,
        norms: &[PartNorm<Vector>],
        x: &Buffer,
        rows: Range<usize>,
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(x.rows)?;
        for (column, norm) in norms.iter().enumerate() {
            let (first, count) = (norm.counted.start, norm.counted.len());
            let arguments =
                [rows.start, x.stride(), first, count, out.stride(), column].map(|number| number as u32);
            let groups = [rows.len() as u32, 1, 1];
            self.device.dispatch(&Kernel::SquareSums, &[&x.memory, &out.memory], &arguments, groups)?;
        }
        Ok(())
    }

    /// Norms the columns of each norm in place, with sums of squares over all ranks.
    pub(super) fn norm_parts_by(
        &mut self,
        norms: &[PartNorm<Vector>],
        sums: &Buffer,
        rows: Range<usize>,
        x: &Buffer,
    ) -> Outcome {
        for (column, norm) in norms.iter().enumerate() {
            let (first, count) = (norm.columns.start, norm.columns.len());
            let [row, stride, first, count, sums_stride, column, width] =
                [rows.start, x.stride(), first, count, sums.stride(), column, norm.width]
                    .map(|number| number as u32);
            let arguments = [row, stride, first, count, sums_stride, column, width, norm.eps.to_bits()];
            let buffers = [&norm.weight.memory, &sums.memory, &x.memory];
            let groups = [rows.len() as u32, count.div_ceil(256), 1];
            self.device.dispatch(&Kernel::NormBySums, &buffers, &arguments, groups)?;
        }
        Ok(())
    }

    pub(super) fn gate_rows(
        &mut self,
        both: &Buffer,
        rows: Range<usize>,
        activation: Activation,
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(both.rows)?;
        let [kind, alpha, limit] = activation_arguments(activation);
        let (from, to) = (both.stride() as u32, out.stride() as u32);
        let arguments = [out.width as u32, rows.start as u32, from, to, kind, alpha, limit];
        let groups = [out.width.div_ceil(256) as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Gate, &[&both.memory, &out.memory], &arguments, groups)
    }

    pub(super) fn copy_row_columns(
        &mut self,
        (x, from): (&Buffer, usize),
        rows: Range<usize>,
        (out, to): (&mut Buffer, Range<usize>),
    ) -> Outcome {
        out.shape(x.rows)?;
        let arguments = [rows.start, x.stride(), from, out.stride(), to.start, to.len()];
        let groups = [to.len().div_ceil(256) as u32, rows.len() as u32, 1];
        let arguments = arguments.map(|number| number as u32);
        self.device.dispatch(&Kernel::CopyColumns, &[&x.memory, &out.memory], &arguments, groups)
    }

    pub(super) fn scale_rows(
        &mut self,
        columns: Range<usize>,
        factors: &[f32],
        rows: Range<usize>,
        x: &Buffer,
    ) -> Outcome {
        if columns.is_empty() || rows.is_empty() {
            return Ok(());
        }
        let words: Vec<u32> = factors[..rows.len()].iter().map(|factor| factor.to_bits()).collect();
        let (memory, at) = self.device.table(&words)?;
        let numbers = [rows.start, x.stride(), columns.start, columns.len(), at as usize];
        let groups = [columns.len().div_ceil(256) as u32, rows.len() as u32, 1];
        let arguments = numbers.map(|number| number as u32);
        self.device.dispatch(&Kernel::Scale, &[&memory, &x.memory], &arguments, groups)
    }

    pub(super) fn weigh_input_rows(&mut self, choices: &Buffer, rows: Range<usize>, x: &Buffer) -> Outcome {
        let arguments = [rows.start, x.stride(), x.width, choices.stride()].map(|number| number as u32);
        let buffers = [&choices.memory, &x.memory];
        self.device.dispatch(&Kernel::WeighInput, &buffers, &arguments, [rows.len() as u32, 1, 1])
    }

    pub(super) fn bend_rows(&mut self, curve: Curve, rows: Range<usize>, x: &Buffer) -> Outcome {
        let curve = match curve {
            Curve::SquaredRelu => 0,
            Curve::Relu => 1,
            Curve::Gelu => 2,
            Curve::GeluTanh => 3,
            Curve::Silu => 4,
            Curve::Tanh => 5,
        };
        let (first, count) = (rows.start * x.stride(), rows.len() * x.stride());
        let groups = count.div_ceil(256).min(MAX_GROUPS) as u32;
        let arguments = [first as u32, count as u32, groups, curve];
        self.device.dispatch(&Kernel::Bend, &[&x.memory], &arguments, [groups, 1, 1])
    }

    pub(crate) fn add_rows(&mut self, x: &Buffer, rows: Range<usize>, to: &mut Buffer) -> Outcome {
        debug_assert_eq!(x.width, to.width);
        let (first, count) = (rows.start * x.stride(), rows.len() * x.stride());
        let groups = count.div_ceil(256).min(MAX_GROUPS) as u32;
        let arguments = [first as u32, count as u32, groups];
        self.device.dispatch(&Kernel::Add, &[&x.memory, &to.memory], &arguments, [groups, 1, 1])
    }

    pub(super) fn pick_rows(&mut self, x: &Buffer, rows: &[u32], out: &mut Buffer) -> Outcome {
        out.shape(rows.len())?;
        debug_assert_eq!(x.width, out.width);
        let (memory, at) = self.device.table(rows)?;
        let arguments = [at, x.width as u32, x.stride() as u32];
        let buffers = [&memory, &x.memory, &out.memory];
        self.device.dispatch(&Kernel::TakeRows, &buffers, &arguments, [rows.len() as u32, 1, 1])
    }

    pub(super) fn find_largest(&mut self, x: &Buffer, largest: &mut [Largest]) -> Outcome {
        if x.width == 0 {
            largest.fill(Largest::NONE);
            if self.votes() {
                self.sums.vote(Vote { keeps: true, shares: false, gives: false });
            }
            return Ok(());
        }
        let rows = largest.len();
        let (results, parts) = self.record_largest(x, rows)?;
        if !self.votes() {
            let next = self.next_step((rows, parts, false), None);
            return self.read_pairs((&results, parts), next, None, largest, &mut []);
        }
        // Other ranks share theirs only if all ranks do.
        let next = self.next_step((rows, self.sums.size(), true), None);
        let can_share = next.is_some() || self.sums.shares;
        let shared = match next.is_some() && self.sums.shares {
            true => self.share_largest((&results, parts), rows)?,
            false => None,
        };
        match shared {
            Some(shared) => self.read_shared(&shared, next, largest),
            None => self.read_pairs((&results, parts), None, Some(can_share), largest, &mut []),
        }
    }

    /// Whether ranks vote on the step after this one. A rank proves kernels alone.
    fn votes(&self) -> bool {
        self.proving.is_none() && self.sums.votes()
    }

    /// Records the kernel that finds the largest number of each part of the first rows. Returns
    /// where they will be, and their number in each row.
    fn record_largest(&mut self, x: &Buffer, rows: usize) -> Result<(Memory, usize), ComputeError> {
        let part = x.width.div_ceil(LARGEST_PARTS).next_multiple_of(LARGEST_THREADS);
        let parts = x.width.div_ceil(part);
        let results = Self::grown(&mut self.device, &mut self.results, rows * parts * 8, "results")?;
        let arguments = [x.width as u32, x.stride() as u32, part as u32];
        let groups = [rows as u32, parts as u32, 1];
        self.device.dispatch(&Kernel::Largest, &[&x.memory, &results], &arguments, groups)?;
        Ok((results, parts))
    }

    /// The next step, if every row of this one gives a token for it.
    fn next_step(
        &mut self,
        (rows, parts, are_floats): (usize, usize, bool),
        last: Option<Vec<u32>>,
    ) -> Option<(Next, usize)> {
        let (table, tokens) = self.next.take()?;
        let next = Next { table, tokens: tokens? as usize, parts, are_floats, last };
        (self.step.as_ref()?.all == rows).then_some((next, rows))
    }

    /// Reads pairs of a column and a number, and takes the largest of each row's `parts`. `others`
    /// are the numbers after them.
    fn read_pairs(
        &mut self,
        (pairs, parts): (&Memory, usize),
        next: Option<(Next, usize)>,
        can_share: Option<bool>,
        found: &mut [Largest],
        others: &mut [f32],
    ) -> Outcome {
        let mut words = std::mem::take(&mut self.words);
        let of_pairs = 2 * parts * found.len();
        let range = 0..of_pairs + others.len();
        let read = self.read_largest_words((pairs, range), &mut words, next, can_share);
        others.iter_mut().zip(words.iter().skip(of_pairs)).for_each(|(to, word)| *to = f32::from_bits(*word));
        for (found, words) in found.iter_mut().zip(words.chunks_exact(2 * parts)) {
            let of = |pair: &[u32]| Largest { column: pair[0], value: f32::from_bits(pair[1]) };
            *found = words.chunks_exact(2).map(of).reduce(Largest::or).unwrap_or(Largest::NONE);
        }
        self.device.tell_tokens(found.iter().map(|found| found.column));
        self.words = words;
        read
    }

    /// Reads each row's largest number of each rank.
    fn read_shared(
        &mut self,
        shared: &Memory,
        next: Option<(Next, usize)>,
        largest: &mut [Largest],
    ) -> Outcome {
        let (ranks, rank, first) = (self.sums.size(), self.sums.rank, self.tokens.first);
        let mut words = std::mem::take(&mut self.words);
        let range = 0..2 * ranks * largest.len();
        let read = self.read_largest_words((shared, range), &mut words, next, Some(true));
        let of = |pair: &[u32; 2]| {
            let [column, value] = pair.map(f32::from_bits);
            Largest { column: column as u32, value }
        };
        let rows = || words.chunks_exact(2 * ranks).map(|row| row.as_chunks::<2>().0);
        for (largest, row) in largest.iter_mut().zip(rows()) {
            let own = of(&row[rank]);
            *largest = Largest { column: own.column.wrapping_sub(first), ..own };
        }
        let tokens = rows().map(|row| row.iter().map(of).reduce(Largest::or).map_or(0, |all| all.column));
        self.device.tell_tokens(tokens);
        self.words = words;
        read
    }

    pub(super) fn draw_tokens(
        &mut self,
        x: &Buffer,
        choices: &Choices<'_>,
        chosen: &mut [Largest],
        likely: &mut [f32],
    ) -> Outcome {
        let is_edited = choices.is_edited();
        if is_edited {
            self.record_edits(x, choices)?;
        }
        let (largest, parts) = self.record_largest(x, chosen.len())?;
        let words: Vec<u32> = choices.rows.iter().flat_map(words_of).collect();
        let (tables, at) = self.device.table(&words)?;
        let bytes = chosen.len() * 8 + likely.len() * 4;
        let to = Self::grown(&mut self.device, &mut self.chosen, bytes, "chosen tokens")?;
        let cap = choices.cap.filter(|_| !is_edited).unwrap_or(0.0).to_bits();
        let arguments = [x.width as u32, x.stride() as u32, parts as u32, at, cap];
        let buffers = [&x.memory, &largest, &tables, &to];
        let groups = [chosen.len() as u32, 1, 1];
        self.device.dispatch(&Kernel::Draw(self.device.draw), &buffers, &arguments, groups)?;
        if let Some(count) = choices.likely {
            let arguments = [x.width as u32, x.stride() as u32, chosen.len() as u32, count as u32, cap];
            self.device.dispatch(&Kernel::Likely, &[&x.memory, &to], &arguments, groups)?;
        }
        // The next step's changes depend on this one's tokens.
        let are_known = choices.next_draws.len() == choices.rows.len() && !is_edited;
        let of_next = are_known.then(|| {
            let drawn = choices.rows.iter().zip(choices.next_draws);
            drawn.flat_map(|(choice, draw)| words_of(&Choice { draw: *draw, ..*choice })).collect()
        });
        // With edits, even empty ones, only rank 0 chooses.
        let votes = self.votes() && choices.edits.is_empty();
        let of_next = of_next.filter(|_| votes || self.sums.size() == 1);
        let next = of_next.and_then(|last| self.next_step((chosen.len(), 1, false), Some(last)));
        self.read_pairs((&to, 1), next, votes.then_some(self.sums.shares), chosen, likely)
    }

    /// Limits and changes rows in place.
    fn record_edits(&mut self, x: &Buffer, choices: &Choices<'_>) -> Outcome {
        debug_assert_eq!(choices.edits.len(), choices.rows.len(), "the cap is for all rows");
        let mut table = std::mem::take(&mut self.words);
        table_of(choices.edits, &mut table);
        let placed = self.device.table(&table);
        self.words = table;
        let (tables, at) = placed?;
        let cap = choices.cap.unwrap_or(0.0).to_bits();
        let arguments = [x.width as u32, x.stride() as u32, at, cap];
        let groups = [x.width.div_ceil(EDITED) as u32, choices.edits.len() as u32, 1];
        self.device.dispatch(&Kernel::Edit, &[&tables, &x.memory], &arguments, groups)
    }

    /// For a device whose kernel is wrong.
    pub(super) fn choose_by_host(
        &mut self,
        x: &Buffer,
        choices: &Choices<'_>,
        chosen: &mut [Largest],
        likely: &mut [f32],
    ) -> Outcome {
        let mut values = vec![0.0; chosen.len() * x.width];
        self.read_rows(x, 0..chosen.len(), &mut values)?;
        choices.of_rows(values.chunks_exact(x.width), &mut self.choices, chosen, likely);
        Ok(())
    }
}

/// Fails unless kernels support `value`.
pub(super) fn fits(what: &'static str, value: usize, limit: usize, needs: &'static str) -> Outcome {
    if value <= limit { Ok(()) } else { Err(ComputeError::Shape { what, value, backend: "GPU", needs }) }
}
