//! Attention by kernels that share keys and values, among the query heads of a KV head or among the
//! rows of a prompt.

use std::ops::Range;

use thunder_compute::ComputeError;

use super::Outcome;
use super::attend::{Attention, MUCH_WORK, most_work};
use super::leaving::Levels;
use crate::backend::{GpuBackend, StepTables, TILE_WORDS};
use crate::buffer::{BLOCK_COLUMNS, Memory};
use crate::kernel::{
    ATTENDED_ROWS, AttendLatent, AttendLatentMatrices, AttendMany, AttendMatrices, AttendTiles, HEADS, Input,
    Kernel, LATENT_ROWS, LEAVES, NEIGHBOURS, NORMS, PREPARES, SINKS, UNIT,
};
use crate::proof::Family;
use crate::without::{Way, without};

/// Ends a group's entry. It is not a valid KV head, so a table of groups never equals one of KV
/// heads.
const END_OF_ENTRY: u32 = u32::MAX;

/// Query heads of each KV head, in groups that are no larger than a form's: KV head, first query
/// head, count.
fn groups(kv_heads: &[u32]) -> impl Iterator<Item = [usize; 3]> {
    let most = HEADS[HEADS.len() - 1];
    let mut first = 0;
    kv_heads.chunk_by(|a, b| a == b).flat_map(move |chunk| {
        let begin = first;
        first += chunk.len();
        let kv_head = chunk[0] as usize;
        (0..chunk.len()).step_by(most).map(move |at| [kv_head, begin + at, (chunk.len() - at).min(most)])
    })
}

impl GpuBackend {
    /// The form for a KV head's query heads, if there is one and it is correct.
    pub(super) fn many_for(&mut self, attention: &Attention<'_>) -> Result<Option<AttendMany>, ComputeError> {
        let Some(widths) = attention.widths() else { return Ok(None) };
        let most = groups(&attention.kv_heads).map(|[.., count]| count).max().unwrap_or(0);
        for form in self.many_forms(most, widths, attention.int8()) {
            if self.takes(Family::Many(form))? {
                return Ok(Some(form));
            }
        }
        Ok(None)
    }

    /// The forms for this many query heads of a KV head, the best one first.
    pub(super) fn many_forms(
        &self,
        queries: usize,
        widths: [usize; 2],
        int8: bool,
    ) -> impl Iterator<Item = AttendMany> + use<> {
        let of = move |whole| AttendMany::of(queries, widths, int8, whole);
        [true, false].into_iter().skip(usize::from(!self.has_shared_results)).filter_map(of)
    }

    /// The kernel for prompts' rows, if there is one and it is correct: by matrices if activations
    /// may be rounded to f16, otherwise by tiles.
    pub(super) fn tiles_for(&mut self, attention: &Attention<'_>) -> Result<Option<Kernel>, ComputeError> {
        let (latent, widths) = match attention.latent {
            true => (true, attention.latent_widths()),
            false => (false, attention.widths()),
        };
        let Some(widths) = widths else { return Ok(None) };
        for family in self.prompt_families(latent, widths, attention.int8()) {
            if self.takes(family)? {
                return Ok(Some(family.kernels()[0]));
            }
        }
        Ok(None)
    }

    /// The kernels of attention for prompts' rows, the best one first.
    pub(super) fn prompt_families(&self, latent: bool, widths: [usize; 2], int8: bool) -> Vec<Family> {
        let may_round = self.proving.is_some() || self.config.activations.allows_bf16();
        let by_matrices = may_round && self.has_attention_matrices() && !without(Way::Prompts);
        let mut all = Vec::new();
        if latent {
            let matrices = AttendLatentMatrices::of(widths, int8).filter(|_| by_matrices);
            all.extend(matrices.map(Family::LatentMatrices));
            all.extend(AttendLatent::of(widths, int8).map(Family::LatentTiles));
        } else {
            let matrices = AttendMatrices::of(widths, int8).filter(|_| by_matrices);
            all.extend(matrices.map(Family::Matrices));
            all.extend(AttendTiles::of(widths, int8).map(Family::Tiles));
        }
        all
    }

    /// Whether the device has the matrices that the attention kernel needs.
    pub(crate) fn has_attention_matrices(&self) -> bool {
        self.device.matrix_side == Some(16) && self.has_subgroups
    }

    /// Attends with all query heads of a KV head: to parts, or to rows if the form adds its splits.
    pub(super) fn attend_many(
        &mut self,
        form: AttendMany,
        tables: &StepTables,
        rows: Range<usize>,
        attention: &Attention<'_>,
        (parts, splits): (&Memory, usize),
    ) -> Outcome {
        let (caches, cache) = attention.caches;
        let (kv_heads, keys, values) = caches.tokens(cache);
        let spec = attention.prepares;
        let norm = spec.and_then(|spec| spec.qk_norm.as_ref());
        let rope = spec.and_then(|spec| spec.rope).map(|rope| tables.ropes[rope]);
        let (beta, original) = spec.and_then(|spec| spec.temperature).unwrap_or((0.0, 0));
        let leaves =
            attention.has_blocks() && form.can_leave() && (self.proving.is_some() || self.wants_levels());
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let flags = flag(spec.is_some(), PREPARES)
            | flag(norm.is_some(), NORMS)
            | flag(rope.is_some_and(|rope| rope.interleaved), NEIGHBOURS)
            | flag(attention.sinks.is_some(), SINKS)
            | flag(leaves, LEAVES);
        let entries: Vec<u32> = groups(&attention.kv_heads)
            .flat_map(|[kv_head, first, count]| [kv_head as u32, first as u32, count as u32, END_OF_ENTRY])
            .collect();
        let chain = (rows.len() * entries.len() / 4 * splits / self.busy_groups).clamp(1, splits);
        let blocks = attention.out.stride() / BLOCK_COLUMNS;
        let [chunk, cap] = attention.scoring_arguments();
        let arguments = [
            rows.start as u32,
            attention.queries.stride() as u32,
            keys.width as u32,
            values.width as u32,
            attention.kv_heads.len() as u32,
            kv_heads as u32,
            splits as u32,
            tables.rows,
            tables.blocks,
            attention.window.unwrap_or(0) as u32,
            flags,
            norm.map_or(0, |norm| norm.eps.to_bits()),
            rope.map_or(0, |rope| rope.pairs),
            rope.map_or(0, |rope| rope.first),
            spec.map_or(0, |spec| spec.scale.to_bits()),
            beta.to_bits(),
            original as u32,
            attention.out.stride() as u32,
            attention.out_first as u32,
            blocks as u32,
            chain as u32,
            chunk as u32,
            cap as u32,
        ];
        let table = self.table_of_heads(&entries)?;
        let levels = match form.whole {
            true => Some(self.levels_at(0, attention.out, blocks, Input::Bytes)?),
            false => None,
        };
        let queries = &attention.queries.memory;
        let mut buffers = vec![&tables.memory, queries, &table, &keys.data, &values.data, parts];
        match (&keys.scales, &values.scales) {
            (Some(of_keys), Some(of_values)) => buffers.extend([of_keys, of_values]),
            _ => {
                buffers.extend(norm.map_or([&self.nothing; 2], |norm| [&norm.query.memory, &norm.key.memory]))
            }
        }
        if let Some(Levels { levels, scales, .. }) = &levels {
            let sinks = attention.sinks.map_or(&self.nothing, |sinks| &sinks.memory);
            buffers.extend([&attention.out.memory, sinks, levels, scales]);
        }
        let groups = [(entries.len() / 4) as u32, rows.len() as u32, splits.div_ceil(chain) as u32];
        self.device.dispatch(&Kernel::AttendMany(form), &buffers, &arguments, groups)?;
        if leaves {
            self.note_levels(attention.out, rows, (blocks, Input::Bytes, None), 0);
        }
        Ok(())
    }

    /// Attends with tiles of prompts' rows, in dispatches of bounded work.
    pub(super) fn attend_tiles(
        &mut self,
        kernel: &Kernel,
        tables: &StepTables,
        rows: Range<usize>,
        attention: &Attention<'_>,
    ) -> Outcome {
        let tiles = &tables.tiles;
        let from = tiles.partition_point(|tile| tile.rows.end <= rows.start);
        let to = tiles.partition_point(|tile| tile.rows.start < rows.end);
        let most = most_work(self.device.is_discrete);
        let mut first = from;
        while first < to {
            let (mut work, mut end) = (0, first);
            while end < to && (end == first || work < most) {
                work += ATTENDED_ROWS * attention.work_of(&tiles[end]);
                end += 1;
            }
            self.record_scalars(work)?;
            self.dispatch_tiles(kernel, tables, first..end, &rows, attention)?;
            if work >= MUCH_WORK {
                self.device.submit_long()?;
            }
            first = end;
        }
        Ok(())
    }

    fn dispatch_tiles(
        &mut self,
        kernel: &Kernel,
        tables: &StepTables,
        tiles: Range<usize>,
        rows: &Range<usize>,
        attention: &Attention<'_>,
    ) -> Outcome {
        let (caches, cache) = attention.caches;
        let (kv_heads, keys, values) = caches.tokens(cache);
        let [chunk, cap] = attention.scoring_arguments();
        let queries = attention.absorbed.unwrap_or(attention.queries);
        let mut arguments = vec![
            queries.stride() / 4,
            keys.width / UNIT,
            values.width / UNIT,
            attention.out.stride(),
            attention.out_first,
            attention.out_dim,
            kv_heads,
            tables.blocks as usize,
            attention.window.unwrap_or(0),
            tables.first_tile as usize + TILE_WORDS * tiles.start,
            tiles.len(),
            rows.start,
            rows.end,
            usize::from(attention.sinks.is_some()),
            chunk,
            cap,
            attention.after(),
        ];
        if attention.latent {
            let of_turned = [attention.queries.stride(), attention.q_first, attention.q_head_stride];
            arguments.extend(of_turned.map(|numbers| numbers / 4));
        }
        let arguments: Vec<u32> = arguments.into_iter().map(|number| number as u32).collect();
        let kv_of = self.table_of_heads(&attention.kv_heads)?;
        let sinks = attention.sinks.map_or(&self.nothing, |sinks| &sinks.memory);
        let (queries, out) = (&queries.memory, &attention.out.memory);
        let mut buffers = vec![&tables.memory, queries, &kv_of, sinks, &keys.data, &values.data, out];
        buffers.extend(&keys.scales);
        buffers.extend(&values.scales);
        let mut parts = tiles.len();
        if attention.latent {
            buffers.push(&attention.queries.memory);
            parts *= ATTENDED_ROWS / LATENT_ROWS;
        }
        let groups = [attention.kv_heads.len() as u32, parts as u32, 1];
        self.device.dispatch(kernel, &buffers, &arguments, groups)
    }
}
