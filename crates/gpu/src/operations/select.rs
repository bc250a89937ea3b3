//! The selection of tokens by an indexer's scores, and latent attention to selected tokens.

use std::ops::Range;

use thunder_compute::{ComputeError, KvFormat, LatentSpec, SelectionBlocks, SelectionSpec};

use super::Outcome;
use super::attend::MUCH_WORK;
use super::attend_shared::{Queries, Together};
use super::rows::fits;
use crate::backend::{GpuBackend, StepTables};
use crate::buffer::{Buffer, Memory, Vector};
use crate::caches::Caches;
use crate::kernel::{Attended, BLOCKS_OF_GROUP, KEYS_OF_GROUP, Kernel, MAX_INDEX, SCORED, Select, splits_of};
use crate::proof::Family;

/// Maximum bytes of scores, or of splits of attention. If there are more rows than fit, they are
/// processed in turns.
const MAX_BYTES: usize = 64 << 20;

/// What is chosen.
#[derive(Clone, Copy)]
pub(super) enum Among<'a> {
    /// Keys.
    All,
    /// Blocks of keys.
    Blocks(SelectionBlocks),
    /// Keys in blocks that were chosen before.
    Within(&'a Buffer, SelectionBlocks),
}

impl Among<'_> {
    /// The most that are chosen, and the number of keys of each.
    fn chosen(self, spec: &SelectionSpec) -> (usize, usize) {
        match self {
            Self::Blocks(blocks) => (blocks.chosen, blocks.keys),
            _ => (spec.chosen, 1),
        }
    }

    /// Numbers after a row's scores.
    fn after_scores(self, keys: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Blocks(blocks) => keys.div_ceil(blocks.keys),
            Self::Within(..) => 1,
        }
    }
}

/// Rows of a step that an operation processes alike.
pub(super) struct Part {
    pub rows: Range<usize>,
    /// Upper bound of the number of tokens that they attend to.
    pub longest: usize,
    pub is_prompt: bool,
}

impl Part {
    /// The rows of generated tokens, and those of prompts.
    pub fn of_step(tables: &StepTables, rows: &Range<usize>) -> Vec<Self> {
        let middle = tables.generated.clamp(rows.start, rows.end);
        let of_prompts = tables.tiles.iter().map(|tile| tile.end).max().unwrap_or(0);
        let generated = Self { rows: rows.start..middle, longest: tables.longest, is_prompt: false };
        let prompts = Self { rows: middle..rows.end, longest: of_prompts, is_prompt: true };
        [generated, prompts].into_iter().filter(|part| !part.rows.is_empty()).collect()
    }
}

impl GpuBackend {
    /// Calls `record` for as many rows at a time as a submission and the scratch memory allow.
    pub(super) fn in_turns(
        &mut self,
        part: &Part,
        (work, bytes): (usize, usize),
        mut record: impl FnMut(&mut Self, Range<usize>, &Memory) -> Outcome,
    ) -> Outcome {
        let by_work = (MUCH_WORK / work.max(1)).max(1);
        let turn = (MAX_BYTES / bytes.max(1)).max(1).min(by_work);
        for first in part.rows.clone().step_by(turn) {
            let rows = first..part.rows.end.min(first + turn);
            let scratch =
                Self::grown(&mut self.device, &mut self.parts, rows.len() * bytes, "scores of tokens")?;
            let is_much = rows.len() == by_work;
            if part.is_prompt {
                self.record_scalars(rows.len() * work)?;
            }
            record(self, rows, &scratch)?;
            if is_much && part.is_prompt {
                self.device.submit_long()?;
            }
        }
        Ok(())
    }

    pub(super) fn select_rows(
        &mut self,
        spec: &SelectionSpec,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        (caches, cache): (&Caches, usize),
        (among, out): (Among<'_>, &Buffer),
    ) -> Outcome {
        fits("the width of an indexer's key", spec.dim, MAX_INDEX, "at most 128")?;
        let int8 = caches.format == KvFormat::Int8;
        self.require(match among {
            Among::All => Family::Selection { int8 },
            Among::Blocks(_) | Among::Within(..) => Family::Pooling { int8 },
        })?;
        let (chosen, of_each) = among.chosen(spec);
        // If a row has no more keys, all are chosen, whatever their scores.
        let most_unscored = if let Among::Within(..) = among { 0 } else { chosen * of_each };
        let tables = self.tables()?;
        for part in Part::of_step(&tables, &rows) {
            let keys = (part.longest / spec.every).next_multiple_of(SCORED).max(SCORED);
            let work = 2 * spec.heads * spec.dim * keys;
            let stride = keys + among.after_scores(keys);
            self.in_turns(&part, (work, 4 * stride), |backend, rows, scores| {
                if keys > most_unscored {
                    let (caches, limits) = ((caches, cache), [most_unscored, keys, stride]);
                    backend.score_keys(spec, &tables, rows.clone(), inputs, caches, (scores, limits))?;
                    backend.limit_scores(spec, &tables, rows.clone(), among, (scores, keys, stride))?;
                }
                let first = if let Among::Blocks(_) = among { keys } else { 0 };
                let limited = if let Among::Within(..) = among { keys } else { 0 };
                let arguments = [
                    rows.start,
                    stride,
                    chosen,
                    out.stride(),
                    tables.rows as usize,
                    spec.every,
                    first,
                    of_each,
                    limited,
                ]
                .map(|number| number as u32);
                let buffers = [&tables.memory, scores, &out.memory];
                let kernel = Kernel::Select(Select::Best);
                backend.device.dispatch(&kernel, &buffers, &arguments, [rows.len() as u32, 1, 1])
            })?;
        }
        Ok(())
    }

    /// Scores blocks by their keys' scores, or removes the scores of keys outside of blocks.
    fn limit_scores(
        &mut self,
        spec: &SelectionSpec,
        tables: &StepTables,
        rows: Range<usize>,
        among: Among<'_>,
        (scores, keys, stride): (&Memory, usize, usize),
    ) -> Outcome {
        let (Among::Blocks(blocks) | Among::Within(_, blocks)) = among else { return Ok(()) };
        let arguments = [tables.rows as usize, spec.every, blocks.keys, stride, keys, rows.start];
        let arguments = arguments.map(|number| number as u32);
        match among {
            Among::Within(chosen, _) => {
                let arguments = [&arguments[..], &[chosen.stride() as u32]].concat();
                let buffers = [&tables.memory, &chosen.memory, scores];
                let groups = [keys.div_ceil(KEYS_OF_GROUP) as u32, rows.len() as u32, 1];
                self.device.dispatch(&Kernel::Select(Select::Within), &buffers, &arguments, groups)
            }
            _ => {
                let all = keys.div_ceil(blocks.keys);
                let groups = [all.div_ceil(BLOCKS_OF_GROUP) as u32, rows.len() as u32, 1];
                let buffers = [&tables.memory, scores];
                self.device.dispatch(&Kernel::Select(Select::Blocks), &buffers, &arguments, groups)
            }
        }
    }

    fn score_keys(
        &mut self,
        spec: &SelectionSpec,
        tables: &StepTables,
        rows: Range<usize>,
        (queries, weights): (&Buffer, &Buffer),
        (caches, cache): (&Caches, usize),
        (scores, [most_unscored, keys, stride]): (&Memory, [usize; 3]),
    ) -> Outcome {
        let (_, first, second) = caches.tokens(cache);
        let arguments = [
            rows.start,
            queries.stride(),
            weights.stride(),
            spec.heads,
            first.width,
            second.width,
            first.words,
            second.words,
            tables.rows as usize,
            tables.blocks as usize,
            spec.every,
            most_unscored,
            stride,
        ]
        .map(|number| number as u32);
        let mut buffers =
            vec![&tables.memory, &queries.memory, &weights.memory, &first.data, &second.data, scores];
        buffers.extend(&first.scales);
        buffers.extend(&second.scales);
        let kernel = Kernel::Select(Select::Scores { int8: first.scales.is_some() });
        self.device.dispatch(&kernel, &buffers, &arguments, [(keys / SCORED) as u32, rows.len() as u32, 1])
    }

    /// Generated tokens' rows attend in splits, prompts' rows in one piece.
    pub(super) fn attend_selected_rows(
        &mut self,
        spec: &LatentSpec<Vector>,
        rows: Range<usize>,
        [absorbed, queries, selection]: [&Buffer; 3],
        (caches, cache): (&Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        if spec.heads == 0 {
            return Ok(());
        }
        let (_, first, second) = caches.tokens(cache);
        let int8 = first.scales.is_some();
        self.require(Family::Selection { int8 })?;
        let tables = self.tables()?;
        for part in Part::of_step(&tables, &rows) {
            let tokens = part.longest.min(selection.width - 1).max(1);
            let splits = if part.is_prompt { 1 } else { splits_of(tokens, None) };
            let part_stride = first.width + 2;
            let work = 2 * spec.heads * (2 * first.width + second.width) * tokens;
            let bytes = spec.heads * splits * part_stride * 4;
            let together = Together {
                tokens: Attended::Selected,
                heads: spec.heads,
                queries: [
                    Queries { buffer: absorbed, first: 0, of_head: first.width },
                    Queries { buffer: queries, first: spec.plain, of_head: spec.query_dim() },
                ],
                caches: &[[first, second]],
                selection: Some(selection),
                window: 0,
                every: 1,
                is_whole: part.is_prompt,
            };
            let form = self.shared_for(&together, part.rows.len() * splits)?;
            self.in_turns(&part, (work, bytes), |backend, rows, parts| {
                if let Some(form) = form {
                    backend.attend_shared(form, &tables, rows.clone(), &together, (parts, splits))?;
                    return backend.add_parts(rows, (parts, splits), None, (spec.heads, first.width), out);
                }
                let arguments = [
                    rows.start,
                    queries.stride(),
                    spec.plain,
                    spec.query_dim(),
                    first.width,
                    second.width,
                    first.words,
                    second.words,
                    tables.rows as usize,
                    tables.blocks as usize,
                    spec.heads,
                    splits,
                    absorbed.stride(),
                    selection.stride(),
                    part_stride,
                    usize::from(part.is_prompt),
                ]
                .map(|number| number as u32);
                let mut buffers = vec![
                    &tables.memory,
                    &queries.memory,
                    &absorbed.memory,
                    &selection.memory,
                    &first.data,
                    &second.data,
                    parts,
                ];
                buffers.extend(&first.scales);
                buffers.extend(&second.scales);
                let groups = [spec.heads as u32, rows.len() as u32, splits as u32];
                let kernel = Kernel::Select(Select::Attend { int8 });
                backend.device.dispatch(&kernel, &buffers, &arguments, groups)?;
                backend.add_parts(rows, (parts, splits), None, (spec.heads, first.width), out)
            })?;
        }
        Ok(())
    }

    /// Adds splits of attention to tokens in a list.
    pub(super) fn add_parts(
        &mut self,
        rows: Range<usize>,
        (parts, splits): (&Memory, usize),
        sinks: Option<&Vector>,
        (heads, width): (usize, usize),
        out: &Buffer,
    ) -> Result<(), ComputeError> {
        let arguments =
            [rows.start, heads, splits, width + 2, out.stride(), width, usize::from(sinks.is_some())]
                .map(|number| number as u32);
        let sinks = sinks.map_or(&self.nothing, |sinks| &sinks.memory).clone();
        let buffers = [&sinks, parts, &out.memory];
        let groups = [heads as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Select(Select::Combine), &buffers, &arguments, groups)
    }
}
