//! Sums over the experts that rows choose, mostly of generated tokens: a row has the same bits
//! whatever the others are.

use std::ops::Range;

use thunder_compute::ComputeError;

use super::Outcome;
use super::experts::{Experts, Set};
use super::leaving::Levels;
use super::matrices::{READ_BYTES, pieces};
use super::pairs::Sorted;
use super::products::{Operand, ProductArguments, floats};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::kernel::{Input, Leaves, Product, Role};
use crate::without::{Way, without};

/// Rows, and the experts that they choose.
struct Chosen<'a> {
    experts: &'a Experts,
    choices: &'a Buffer,
    rows: Range<usize>,
    of_row: usize,
}

impl Chosen<'_> {
    fn pairs(&self) -> usize {
        self.rows.len() * self.of_row
    }

    fn arguments(&self, set: &Set) -> ProductArguments {
        ProductArguments {
            shift: set.chunk.shift,
            rows: self.rows.clone(),
            choices: self.of_row,
            choice_stride: self.choices.stride(),
            choice_row: self.rows.start,
            ..Default::default()
        }
    }
}

/// Forms of down projections that need proofs.
struct DownForms {
    /// For one row: the form that stores levels of the next norm, and the norm's weights.
    leaves: Option<(Product, Memory)>,
    /// For each set, the form in which rows share weights. Empty: none does.
    shares: Vec<Option<Product>>,
    /// Rows that there is space for in results of pairs.
    most: usize,
}

impl GpuBackend {
    /// Computes the weighted sums over the rows' experts, and writes them to `out` or adds them.
    pub(super) fn sum_experts(
        &mut self,
        (x, rows): (&Buffer, Range<usize>),
        choices: &Buffer,
        experts: &Experts,
        out: &Buffer,
        adds: bool,
    ) -> Outcome {
        let generated = self.generated(x.rows).clamp(rows.start, rows.end);
        let prompts = generated..rows.end;
        let of_row = choices.width / 2;
        let pairs = prompts.len().min(self.rows_of_turn(experts, of_row, out.width)) * of_row;
        let forms = if pairs == 0 { None } else { self.pair_forms(experts, pairs)? };
        let of_rows = |rows| Chosen { experts, choices, rows, of_row };
        if generated > rows.start {
            self.sum_each(x, &of_rows(rows.start..generated), (out, adds))?;
        }
        if let Some(forms) = forms {
            return self.sum_pairs(&forms, (x, prompts), choices, experts, (out, adds));
        }
        let bytes_of_row = of_row * experts.bytes_of_one();
        for rows in pieces(&prompts, bytes_of_row, READ_BYTES, 1) {
            self.record_work(rows.len() * bytes_of_row, READ_BYTES)?;
            self.sum_each(x, &of_rows(rows), (out, adds))?;
        }
        Ok(())
    }

    /// The same by the kernels for generated tokens.
    fn sum_each(&mut self, x: &Buffer, chosen: &Chosen<'_>, (out, adds): (&Buffer, bool)) -> Outcome {
        let Chosen { experts, ref rows, of_row, .. } = *chosen;
        let mut channels = self.spare(x.capacity() * of_row, experts.channels)?;
        channels.shape(x.capacity() * of_row)?;
        // Done before anything is recorded, because a proof uses the same buffers for levels and
        // for sorted pairs.
        let most = self.rows_of_turn(experts, of_row, out.width).min(x.capacity());
        let forms = DownForms {
            leaves: match experts.down.as_slice() {
                [set] if adds && rows.len() == 1 && out.width == out.stride() => self.leaving_sum(set)?,
                _ => None,
            },
            shares: self.share_down(experts, (rows.len(), most), of_row)?,
            most,
        };
        let sorted = self.multiply_first(x, chosen, &channels)?;
        self.multiply_down(&channels, chosen, forms, sorted, (out, adds))?;
        if let Some(set) = experts.down.last().filter(|_| adds) {
            self.note_added(set.chunk.buffers[0].id, out);
        }
        self.spares.push(channels);
        Ok(())
    }

    /// Computes the channels of each pair of a row and an expert. Returns the pairs if they were
    /// sorted and include all, and how many a tile has.
    fn multiply_first(
        &mut self,
        x: &Buffer,
        chosen: &Chosen<'_>,
        channels: &Buffer,
    ) -> Result<Option<(Sorted, usize)>, ComputeError> {
        let Chosen { experts, choices, ref rows, of_row } = *chosen;
        let (wanted, role) = (self.plain_input(), experts.first_role());
        let is_one = experts.is_uniform && experts.has_all && experts.up.len() == 1;
        let mut sorted = None;
        for set in &experts.up {
            let share = self.share_form(set, role, rows.len(), of_row)?;
            let can_leave = is_one && experts.fills_blocks && share.is_none();
            let leaving = self.leaving_experts(set, role, can_leave)?;
            let operand = self.operand_for(set, x, rows.clone(), wanted, role)?;
            let arguments = ProductArguments {
                blocks: experts.blocks,
                outputs: experts.channels,
                biased: set.bias.is_some(),
                x_stride: operand.stride(),
                out_stride: channels.stride(),
                activation: experts.activation.unwrap_or_default(),
                ..chosen.arguments(set)
            };
            let bias = set.bias.as_ref();
            if let Some(form) = share {
                let pairs = self.sort_pairs(choices, rows, (&set.table, set.experts), form.batch)?;
                let (weights, to) = ((&set.chunk, bias), &channels.memory);
                self.record_sharing(form, weights, &operand, (&pairs, &set.table), arguments, to)?;
                sorted = is_one.then_some((pairs, form.batch));
                continue;
            }
            let extra = [&set.table, &choices.memory];
            let out = (&channels.memory, Some([of_row as u32, rows.len() as u32]));
            let Some(product) = leaving else {
                let weights = (set.weights(), bias);
                self.run_product(weights, &operand, role, &extra, &arguments, out)?;
                continue;
            };
            let (place, blocks) = (1 - operand.place, channels.stride() / BLOCK_COLUMNS);
            let wanted = self.gated_input();
            let Levels { levels, scales, .. } = self.levels_at(place, channels, blocks, wanted)?;
            let (weights, left) = ((&set.chunk, bias), [&levels, &scales]);
            self.record_leaving(product, weights, &operand, &extra, &arguments, out, &left)?;
            self.note_levels(channels, 0..chosen.pairs(), (blocks, wanted, None), place);
        }
        Ok(sorted)
    }

    /// Adds the down projections of the rows' experts, with their weights.
    fn multiply_down(
        &mut self,
        channels: &Buffer,
        chosen: &Chosen<'_>,
        mut forms: DownForms,
        mut sorted: Option<(Sorted, usize)>,
        (out, adds): (&Buffer, bool),
    ) -> Outcome {
        let Chosen { experts, choices, ref rows, of_row } = *chosen;
        let (wanted, role) = (self.gated_input(), Role::ExpertDown);
        let bias = experts.down_bias.as_ref();
        for (index, set) in experts.down.iter().enumerate() {
            let operand = self.operand_for(set, channels, 0..chosen.pairs(), wanted, role)?;
            let adds = adds || index > 0;
            let arguments = ProductArguments {
                outputs: out.width,
                biased: bias.is_some(),
                adds,
                x_stride: operand.stride(),
                out_row: rows.start,
                out_stride: out.stride(),
                ..chosen.arguments(set)
            };
            if let Some(&form) = forms.shares.get(index).and_then(Option::as_ref) {
                let is_one = experts.down.len() == 1;
                let pairs = match sorted.take().filter(|(_, batch)| is_one && *batch == form.batch) {
                    Some((pairs, _)) => pairs,
                    None => self.sort_pairs(choices, rows, (&set.table, set.experts), form.batch)?,
                };
                let mut results = self.spare(forms.most * of_row, out.width)?;
                results.shape(chosen.pairs())?;
                let arguments = ProductArguments { out_stride: results.stride(), ..arguments };
                let (weights, to) = ((&set.chunk, bias), &results.memory);
                self.record_sharing(form, weights, &operand, (&pairs, &set.table), arguments, to)?;
                self.add_pairs(choices, rows, (&results, &set.table), (out, adds))?;
                self.spares.push(results);
                continue;
            }
            let extra = [&set.table, &choices.memory];
            let to = (&out.memory, Some([1, rows.len() as u32]));
            let leaves = forms.leaves.take().filter(|(form, _)| form.input == operand.input);
            let Some((product, norm)) = leaves else {
                let weights = (set.weights(), bias);
                self.run_product(weights, &operand, role, &extra, &arguments, to)?;
                continue;
            };
            let (place, blocks) = (1 - operand.place, out.stride() / BLOCK_COLUMNS);
            let Levels { levels, scales, squares } = self.levels_at(place, out, blocks, Input::Bytes)?;
            let (weights, left) = ((&set.chunk, bias), [&norm, &levels, &scales, &squares]);
            self.record_leaving(product, weights, &operand, &extra, &arguments, to, &left)?;
            self.note_levels(out, rows.clone(), (blocks, Input::Bytes, Some(norm.id)), place);
        }
        Ok(())
    }

    /// The form that stores channels as levels, if it is correct and they can be stored so: each
    /// expert's channels must fill whole blocks.
    fn leaving_experts(
        &mut self,
        set: &Set,
        role: Role,
        can_leave: bool,
    ) -> Result<Option<Product>, ComputeError> {
        let leaves = Leaves::of(self.gated_input());
        if !can_leave || leaves == Leaves::Nothing {
            return Ok(None);
        }
        match self.proved_input(self.plain_input(), set.weights(), role, 1)? {
            Input::Floats => Ok(None),
            input => self.leaving_form(set.weights(), input, role, leaves, 1),
        }
    }

    /// The form that stores sums as levels of the norm that followed last time, and that norm's
    /// weights.
    fn leaving_sum(&mut self, set: &Set) -> Result<Option<(Product, Memory)>, ComputeError> {
        if !self.wants_levels() || without(Way::Sums) {
            return Ok(None);
        }
        let input = self.proved_input(self.gated_input(), set.weights(), Role::ExpertDown, 1)?;
        let Some(norm) = self.norms_after.get(&set.chunk.buffers[0].id).cloned() else { return Ok(None) };
        let form = self.leaving_form(set.weights(), input, Role::ExpertDown, Leaves::Normed, 1)?;
        Ok(form.map(|form| (form, norm)))
    }

    /// Rows of `x` in the format that experts read.
    fn operand_for(
        &mut self,
        set: &Set,
        x: &Buffer,
        rows: Range<usize>,
        wanted: Input,
        role: Role,
    ) -> Result<Operand, ComputeError> {
        match self.proved_input(wanted, set.weights(), role, 1)? {
            Input::Floats => Ok(floats(x)),
            levels => self.quantized(x, rows, x.stride() / BLOCK_COLUMNS, levels, None),
        }
    }
}
