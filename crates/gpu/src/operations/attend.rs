//! Attention over caches of tokens.

use std::ops::Range;

use thunder_compute::{AttentionSpec, ComputeError, KvFormat, LatentSpec, Scoring};

use super::Outcome;
use super::leaving::Levels;
use crate::backend::{GpuBackend, StepTables, Tile};
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory, Vector};
use crate::caches::Caches;
use crate::kernel::{Attend, AttendMany, COMBINED, COUNTERS, Input, Kernel, splits_of};
use crate::proof::Family;
use crate::without::{Way, without};

/// Maximum bytes of splits. If there are more rows than fit, they are processed in turns.
const MAX_SPLIT_BYTES: usize = 64 << 20;

/// Multiplications and additions from which a dispatch is submitted separately.
pub(super) const MUCH_WORK: usize = 16 << 30;

/// Maximum multiplications and additions of a dispatch, so that none takes longer than a third of a
/// second.
pub(super) fn most_work(is_discrete: bool) -> usize {
    // Assumes at least 800 billion a second on discrete GPUs, and 200 billion on others.
    if is_discrete { 256 << 30 } else { 64 << 30 }
}

/// What queries attend to, and where results are written.
pub(super) struct Attention<'a> {
    pub caches: (&'a Caches, usize),
    pub latent: bool,
    pub queries: &'a Buffer,
    pub q_first: usize,
    pub q_head_stride: usize,
    pub absorbed: Option<&'a Buffer>,
    /// The KV head of each query head, in ascending order.
    pub kv_heads: Vec<u32>,
    pub sinks: Option<&'a Vector>,
    pub window: Option<usize>,
    pub scoring: Scoring,
    pub out: &'a Buffer,
    pub out_first: usize,
    pub out_dim: usize,
    /// How the attention kernel prepares queries and keys of generated tokens. It also appends keys
    /// and values.
    pub prepares: Option<&'a AttentionSpec<Vector>>,
}

impl<'a> Attention<'a> {
    /// Attention of heads over a cache of keys and values.
    fn of_heads(
        (spec, scoring): (&'a AttentionSpec<Vector>, Scoring),
        qkv: &'a Buffer,
        caches: (&'a Caches, usize),
        out: &'a Buffer,
    ) -> Self {
        let mut kv_heads = vec![0; spec.heads()];
        for (kv_head, queries) in spec.queries_of.iter().enumerate() {
            kv_heads[queries.clone()].fill(kv_head as u32);
        }
        Self {
            caches,
            latent: false,
            queries: qkv,
            q_first: 0,
            q_head_stride: spec.key_dim,
            absorbed: None,
            kv_heads,
            sinks: spec.sinks.as_ref(),
            window: spec.window,
            scoring,
            out,
            out_first: spec.out_column,
            out_dim: spec.value_dim,
            prepares: None,
        }
    }

    /// Maximum tokens that a row attends to, if there is one.
    fn reach(&self) -> Option<usize> {
        self.scoring.chunk.or(self.window.map(|window| window + self.after()))
    }

    /// Multiplications and additions for a row of a tile, at most.
    pub fn work_of(&self, tile: &Tile) -> usize {
        self.work((tile.end + self.after()).min(tile.newest + 1))
    }

    /// The kernels' arguments: tokens of a chunk, and the cap. 0 stands for none.
    pub fn scoring_arguments(&self) -> [usize; 2] {
        [self.scoring.chunk.unwrap_or(0), self.scoring.cap.unwrap_or(0.0).to_bits() as usize]
    }

    /// Later tokens that a token attends to: no position is as large as the most.
    pub fn after(&self) -> usize {
        self.scoring.after.min(1 << 30)
    }

    pub fn int8(&self) -> bool {
        self.caches.0.format == KvFormat::Int8
    }

    /// Widths of keys and values for kernels that work on heads; `None` for compressed vectors.
    pub fn widths(&self) -> Option<[usize; 2]> {
        let (_, keys, values) = self.caches.0.tokens(self.caches.1);
        (!self.latent).then_some([keys.width, values.width])
    }

    /// Widths of compressed vectors and of rotated parts, for kernels that read queries in quads;
    /// `None` for keys and values.
    pub fn latent_widths(&self) -> Option<[usize; 2]> {
        let (_, compressed, turned) = self.caches.0.tokens(self.caches.1);
        let are_quads = self.q_first.is_multiple_of(4) && self.q_head_stride.is_multiple_of(4);
        (self.latent && are_quads).then_some([compressed.width, turned.width])
    }

    /// Whether the heads' results fill whole blocks and the whole row, so that they can be stored
    /// as levels at once.
    pub fn has_blocks(&self) -> bool {
        self.out_dim.is_multiple_of(COMBINED)
            && self.out_first == 0
            && self.kv_heads.len() * self.out_dim == self.out.stride()
    }

    /// Multiplications and additions for a row that attends to `tokens`.
    pub fn work(&self, tokens: usize) -> usize {
        let (_, first, second) = self.caches.0.tokens(self.caches.1);
        let width = first.width + if self.latent { first.width + second.width } else { second.width };
        2 * self.kv_heads.len() * width * self.reach().map_or(tokens, |reach| reach.min(tokens))
    }
}

impl GpuBackend {
    pub(super) fn attend_heads(
        &mut self,
        spec: (&AttentionSpec<Vector>, Scoring),
        rows: Range<usize>,
        qkv: &Buffer,
        caches: (&Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        self.attend_all(rows, &Attention::of_heads(spec, qkv, caches, out))
    }

    /// Prepares queries and keys, fills the cache and attends. For generated tokens the attention
    /// kernel does all of this, unless a sequence has several: each would need the previous one's
    /// key.
    pub(super) fn prepare_and_attend(
        &mut self,
        spec: &AttentionSpec<Vector>,
        rows: Range<usize>,
        qkv: &Buffer,
        caches: (&Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        let tables = self.tables()?;
        let mut attention = Attention::of_heads((spec, Scoring::default()), qkv, caches, out);
        let generated = rows.start..rows.end.min(tables.generated);
        let can_prepare = tables.has_single_rows
            && !generated.is_empty()
            && spec.queries_of.iter().all(|queries| !queries.is_empty())
            && !without(Way::Whole)
            && self.many_for(&attention)?.is_some_and(AttendMany::can_prepare);
        if can_prepare {
            attention.prepares = Some(spec);
        }
        let others = if can_prepare { generated.end..rows.end } else { rows.clone() };
        self.prepare_and_append(spec, others, qkv, caches)?;
        self.attend_all(rows, &attention)
    }

    pub(super) fn attend_compressed(
        &mut self,
        spec: &LatentSpec<Vector>,
        rows: Range<usize>,
        [absorbed, queries]: [&Buffer; 2],
        caches: (&Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        let attention = Attention {
            caches,
            latent: true,
            queries,
            q_first: spec.plain,
            q_head_stride: spec.query_dim(),
            absorbed: Some(absorbed),
            kv_heads: vec![0; spec.heads],
            sinks: None,
            window: None,
            scoring: Scoring::default(),
            out,
            out_first: 0,
            out_dim: spec.rank,
            prepares: None,
        };
        self.attend_all(rows, &attention)
    }

    /// Attends: generated tokens' rows in splits, prompts' rows in one piece.
    fn attend_all(&mut self, rows: Range<usize>, attention: &Attention<'_>) -> Outcome {
        let tables = self.tables()?;
        if attention.kv_heads.is_empty() || rows.is_empty() {
            return Ok(());
        }
        self.attend_generated(&tables, rows.start..rows.end.min(tables.generated), attention)?;
        self.attend_prompts(&tables, rows.start.max(tables.generated)..rows.end, attention)
    }

    fn attend_generated(
        &mut self,
        tables: &StepTables,
        rows: Range<usize>,
        attention: &Attention<'_>,
    ) -> Outcome {
        if rows.is_empty() {
            return Ok(());
        }
        let many = self.many_for(attention)?;
        let splits = splits_of(tables.longest, attention.reach());
        let row_bytes = attention.kv_heads.len() * splits * (attention.out_dim + 2) * 4;
        let turn = (MAX_SPLIT_BYTES / row_bytes.max(1)).max(1);
        let is_whole = many.is_some_and(|form| form.whole);
        // There is one counter for each row and group of heads, and there are no more groups than
        // heads.
        let turn = if is_whole { turn.min(COUNTERS / attention.kv_heads.len()).max(1) } else { turn };
        for first in rows.clone().step_by(turn) {
            let rows = first..rows.end.min(first + turn);
            let bytes = rows.len() * row_bytes;
            if let Some(form) = many.filter(|form| form.whole) {
                let (place, bytes) = (&mut self.counted_parts, 4 * COUNTERS + bytes);
                let parts = Self::grown(&mut self.device, place, bytes, "splits of attention")?;
                self.attend_many(form, tables, rows, attention, (&parts, splits))?;
                continue;
            }
            let parts = Self::grown(&mut self.device, &mut self.parts, bytes, "splits of attention")?;
            if let Some(form) = many {
                self.attend_many(form, tables, rows.clone(), attention, (&parts, splits))?;
            } else if !self.attend_latent_shared(tables, rows.clone(), attention, (&parts, splits))? {
                self.attend_rows(tables, (rows.clone(), 0), attention, (&parts, splits))?;
            }
            self.combine(tables, rows, attention, &parts, splits)?;
        }
        Ok(())
    }

    fn attend_prompts(
        &mut self,
        tables: &StepTables,
        rows: Range<usize>,
        attention: &Attention<'_>,
    ) -> Outcome {
        if rows.is_empty() {
            return Ok(());
        }
        if let Some(kernel) = self.tiles_for(attention)? {
            return self.attend_tiles(&kernel, tables, rows, attention);
        }
        let longest = tables.tiles.iter().map(|tile| attention.work_of(tile)).max().unwrap_or(0);
        let turn = (MUCH_WORK / longest.max(1)).max(1);
        let attend = |backend: &mut Self, rows: Range<usize>, newest: usize| {
            for first in rows.clone().step_by(turn) {
                let rows = first..rows.end.min(first + turn);
                let is_much = rows.len() == turn;
                backend.record_scalars(rows.len() * longest)?;
                backend.attend_rows(tables, (rows, newest), attention, (&attention.out.memory, 0))?;
                if is_much {
                    backend.device.submit_long()?;
                }
            }
            Ok(())
        };
        if attention.after() == 0 {
            return attend(self, rows, 0);
        }
        // Rows of a dispatch have the same last token.
        tables.tiles.iter().try_for_each(|tile| {
            attend(self, tile.rows.start.max(rows.start)..tile.rows.end.min(rows.end), tile.newest)
        })
    }

    /// Attends with one workgroup for each head of a row: to `splits` parts, or directly to rows if
    /// `splits` is zero. `newest` is the position of the rows' last token, if rows attend to later
    /// tokens; otherwise it is not used.
    fn attend_rows(
        &mut self,
        tables: &StepTables,
        (rows, newest): (Range<usize>, usize),
        attention: &Attention<'_>,
        (out, splits): (&Memory, usize),
    ) -> Outcome {
        let (caches, cache) = attention.caches;
        let (kv_heads, first, second) = caches.tokens(cache);
        let heads = attention.kv_heads.len();
        let [chunk, cap] = attention.scoring_arguments();
        let out_stride = if splits > 0 { attention.out_dim + 2 } else { attention.out.stride() };
        let arguments = [
            rows.start,
            attention.queries.stride(),
            attention.q_first,
            attention.q_head_stride,
            first.width,
            second.width,
            first.words,
            second.words,
            out_stride,
            attention.out_first,
            attention.out_dim,
            kv_heads,
            tables.rows as usize,
            tables.blocks as usize,
            attention.window.unwrap_or(0),
            splits,
            heads,
            usize::from(attention.sinks.is_some()),
            attention.absorbed.map_or(0, Buffer::stride),
            chunk,
            cap,
            // A generated token is its sequence's last.
            if splits == 0 { attention.after() } else { 0 },
            newest,
        ]
        .map(|number| number as u32);
        let kv_of = self.table_of_heads(&attention.kv_heads)?;
        let absorbed = attention.absorbed.map_or(&self.nothing, |absorbed| &absorbed.memory);
        let sinks = attention.sinks.map_or(&self.nothing, |sinks| &sinks.memory);
        let queries = &attention.queries.memory;
        let mut buffers =
            vec![&tables.memory, queries, absorbed, &kv_of, sinks, &first.data, &second.data, out];
        buffers.extend(&first.scales);
        buffers.extend(&second.scales);
        let kernel = Kernel::Attend(Attend { latent: attention.latent, int8: attention.int8() });
        let groups = [heads as u32, rows.len() as u32, splits.max(1) as u32];
        self.device.dispatch(&kernel, &buffers, &arguments, groups)
    }

    fn combine(
        &mut self,
        tables: &StepTables,
        rows: Range<usize>,
        attention: &Attention<'_>,
        parts: &Memory,
        splits: usize,
    ) -> Outcome {
        let heads = attention.kv_heads.len();
        let arguments = [
            rows.start,
            heads,
            splits,
            attention.out_dim + 2,
            attention.out.stride(),
            attention.out_first,
            attention.out_dim,
            tables.rows as usize,
            attention.window.unwrap_or(0),
            usize::from(attention.sinks.is_some()),
            attention.out.stride() / BLOCK_COLUMNS,
            attention.scoring_arguments()[0],
        ]
        .map(|number| number as u32);
        let groups = [heads as u32, rows.len() as u32, attention.out_dim.div_ceil(COMBINED) as u32];
        let is_wanted = attention.has_blocks() && self.proving.is_none() && self.wants_levels();
        if !(is_wanted && self.takes(Family::CombinedLevels)?) {
            let sinks = attention.sinks.map_or(&self.nothing, |sinks| &sinks.memory);
            let buffers = [&tables.memory, sinks, parts, &attention.out.memory];
            return self.device.dispatch(&Kernel::Combine { levels: false }, &buffers, &arguments, groups);
        }
        let blocks = attention.out.stride() / BLOCK_COLUMNS;
        let Levels { levels, scales, .. } = self.levels_at(0, attention.out, blocks, Input::Bytes)?;
        let sinks = attention.sinks.map_or(&self.nothing, |sinks| &sinks.memory);
        let buffers = [&tables.memory, sinks, parts, &attention.out.memory, &levels, &scales];
        self.device.dispatch(&Kernel::Combine { levels: true }, &buffers, &arguments, groups)?;
        self.note_levels(attention.out, rows, (blocks, Input::Bytes, None), 0);
        Ok(())
    }

    /// Whether the next product reads attention's results as levels.
    pub(super) fn wants_levels(&self) -> bool {
        self.plain_input() == Input::Bytes && !without(Way::Levels)
    }

    /// Uploads a table about query heads, or returns the existing one.
    pub(super) fn table_of_heads(&mut self, table: &[u32]) -> Result<Memory, ComputeError> {
        if let Some(memory) = self.kv_heads.get(table) {
            return Ok(memory.clone());
        }
        let memory = self.device.filled(table, "a table of heads")?;
        self.kv_heads.insert(table.to_vec(), memory.clone());
        Ok(memory)
    }
}
