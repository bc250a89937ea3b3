//! Attention over caches of tokens.

use std::ops::Range;

use thunder_compute::{AttentionSpec, ComputeError, KvFormat, LatentSpec};

use super::Outcome;
use super::rows::fits;
use crate::backend::{GpuBackend, StepTables};
use crate::buffer::{Buffer, Memory, Vector};
use crate::caches::{Caches, Vectors};
use crate::kernel::{Attend, Kernel, MAX_KEY};

/// Tokens of a split of a generated token's attention. A split begins at a multiple, so results do
/// not depend on the batch. Prompts' rows have one split.
const SPLIT_TOKENS: usize = 256;

/// Bytes of splits at most. More rows than fit are attended in turns.
const MAX_SPLIT_BYTES: usize = 64 << 20;

/// Heads of rows to prepare in place.
struct Heads<'a> {
    first: usize,
    stride: usize,
    count: usize,
    width: usize,
    norm: Option<(&'a Vector, usize, f32)>,
    rope: Option<usize>,
    rotate_from: usize,
    scale: f32,
    temperature: Option<(f32, usize)>,
}

/// What queries attend to, and where results go.
struct Attention<'a> {
    caches: (&'a Caches, usize),
    latent: bool,
    queries: &'a Buffer,
    q_first: usize,
    q_head_stride: usize,
    absorbed: Option<&'a Buffer>,
    kv_heads: Vec<u32>,
    sinks: Option<&'a Vector>,
    window: usize,
    out: &'a Buffer,
    out_first: usize,
    out_dim: usize,
}

impl GpuBackend {
    fn prepare(&mut self, tables: &StepTables, rows: Range<usize>, heads: &Heads<'_>, x: &Buffer) -> Outcome {
        fits("the width of a head", heads.width, MAX_KEY, "at most 1024")?;
        let rope = heads.rope.map(|rope| tables.ropes[rope]);
        let (weight, norm_width, eps) =
            heads.norm.map_or((&self.nothing, 0, 0.0), |(weight, width, eps)| (&weight.memory, width, eps));
        let (beta, original) = heads.temperature.unwrap_or((0.0, 0));
        let arguments = [
            rows.start as u32,
            x.stride() as u32,
            heads.first as u32,
            heads.stride as u32,
            heads.width as u32,
            norm_width as u32,
            eps.to_bits(),
            heads.rotate_from as u32,
            rope.map_or(0, |rope| rope.pairs),
            rope.map_or(0, |rope| u32::from(rope.interleaved)),
            rope.map_or(0, |rope| rope.first),
            tables.rows,
            heads.scale.to_bits(),
            beta.to_bits(),
            original as u32,
        ];
        let buffers = [&tables.memory, &tables.memory, weight, &x.memory];
        let groups = [rows.len() as u32, heads.count as u32, 1];
        self.device.dispatch(&Kernel::Prepare, &buffers, &arguments, groups)
    }

    pub(super) fn prepare_heads_of(
        &mut self,
        spec: &AttentionSpec<Vector>,
        rows: Range<usize>,
        qkv: &mut Buffer,
    ) -> Outcome {
        let tables = self.tables()?;
        let norm = |of_query: bool| {
            spec.qk_norm
                .as_ref()
                .map(|norm| (if of_query { &norm.query } else { &norm.key }, spec.key_dim, norm.eps))
        };
        let queries = Heads {
            first: 0,
            stride: spec.key_dim,
            count: spec.heads(),
            width: spec.key_dim,
            norm: norm(true),
            rope: spec.rope,
            rotate_from: 0,
            scale: spec.scale,
            temperature: spec.temperature,
        };
        self.prepare(&tables, rows.clone(), &queries, qkv)?;
        let keys = Heads {
            first: spec.key_column(0),
            count: spec.kv_heads(),
            norm: norm(false),
            scale: 1.0,
            temperature: None,
            ..queries
        };
        self.prepare(&tables, rows, &keys, qkv)
    }

    pub(super) fn prepare_latent_of(
        &mut self,
        spec: &LatentSpec<Vector>,
        rows: Range<usize>,
        queries: &mut Buffer,
        latent: &mut Buffer,
    ) -> Outcome {
        let tables = self.tables()?;
        let of_queries = Heads {
            first: 0,
            stride: spec.query_dim(),
            count: spec.heads,
            width: spec.query_dim(),
            norm: None,
            rope: spec.rope,
            rotate_from: spec.plain,
            scale: spec.scale,
            temperature: None,
        };
        self.prepare(&tables, rows.clone(), &of_queries, queries)?;
        let of_latent = Heads {
            first: 0,
            stride: 0,
            count: 1,
            width: spec.rank + spec.rotated,
            norm: Some((&spec.norm.weight, spec.rank, spec.norm.eps)),
            rope: spec.rope,
            rotate_from: spec.rank,
            scale: 1.0,
            temperature: None,
        };
        self.prepare(&tables, rows, &of_latent, latent)
    }

    /// Appends `heads` vectors of each row, which begin at a column of `x`.
    pub(super) fn append_vectors(
        &mut self,
        rows: Range<usize>,
        (x, column): (&Buffer, usize),
        heads: usize,
        to: &Vectors,
    ) -> Outcome {
        let tables = self.tables()?;
        let arguments = [
            rows.start as u32,
            x.stride() as u32,
            column as u32,
            to.width as u32,
            heads as u32,
            to.words as u32,
            tables.rows,
            tables.blocks,
        ];
        let mut buffers = vec![&tables.memory, &x.memory, &to.data];
        buffers.extend(&to.scales);
        let kernel = Kernel::Append { int8: to.scales.is_some() };
        self.device.dispatch(&kernel, &buffers, &arguments, [rows.len() as u32, heads as u32, 1])
    }

    pub(super) fn append_heads(
        &mut self,
        spec: &AttentionSpec<Vector>,
        rows: Range<usize>,
        qkv: &Buffer,
        (caches, cache): (&Caches, usize),
    ) -> Outcome {
        let (heads, keys, values) = caches.tokens(cache);
        self.append_vectors(rows.clone(), (qkv, spec.key_column(0)), heads, keys)?;
        self.append_vectors(rows, (qkv, spec.value_column(0)), heads, values)
    }

    pub(super) fn attend_heads(
        &mut self,
        spec: &AttentionSpec<Vector>,
        rows: Range<usize>,
        qkv: &Buffer,
        caches: (&Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        let mut kv_heads = vec![0; spec.heads()];
        for (kv_head, queries) in spec.queries_of.iter().enumerate() {
            kv_heads[queries.clone()].fill(kv_head as u32);
        }
        let attention = Attention {
            caches,
            latent: false,
            queries: qkv,
            q_first: 0,
            q_head_stride: spec.key_dim,
            absorbed: None,
            kv_heads,
            sinks: spec.sinks.as_ref(),
            window: spec.window.unwrap_or(0),
            out,
            out_first: spec.out_column,
            out_dim: spec.value_dim,
        };
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
            window: 0,
            out,
            out_first: 0,
            out_dim: spec.rank,
        };
        self.attend_all(rows, &attention)
    }

    /// Generated tokens' rows in splits, prompts' in one.
    fn attend_all(&mut self, rows: Range<usize>, attention: &Attention<'_>) -> Outcome {
        let tables = self.tables()?;
        let heads = attention.kv_heads.len();
        if heads == 0 || rows.is_empty() {
            return Ok(());
        }
        let kv_of = self.table_of_heads(&attention.kv_heads)?;
        let generated = rows.start..rows.end.min(tables.generated);
        let splits = tables.longest.div_ceil(SPLIT_TOKENS);
        if splits > 1 && !generated.is_empty() {
            let row_bytes = heads * splits * (attention.out_dim + 2) * 4;
            let turn = (MAX_SPLIT_BYTES / row_bytes).max(1);
            for first in generated.clone().step_by(turn) {
                let rows = first..generated.end.min(first + turn);
                let bytes = rows.len() * row_bytes;
                let parts = Self::grown(&mut self.device, &mut self.parts, bytes, "splits of attention")?;
                self.attend_rows(&tables, rows.clone(), attention, (&kv_of, &parts), splits)?;
                self.combine(&tables, rows, attention, &parts, splits)?;
            }
        } else if !generated.is_empty() {
            self.attend_rows(&tables, generated, attention, (&kv_of, &attention.out.memory), 1)?;
        }
        let prompts = rows.start.max(tables.generated)..rows.end;
        if prompts.is_empty() {
            return Ok(());
        }
        self.attend_rows(&tables, prompts, attention, (&kv_of, &attention.out.memory), 1)
    }

    fn attend_rows(
        &mut self,
        tables: &StepTables,
        rows: Range<usize>,
        attention: &Attention<'_>,
        (kv_of, out): (&Memory, &Memory),
        splits: usize,
    ) -> Outcome {
        let (caches, cache) = attention.caches;
        let (kv_heads, first, second) = caches.tokens(cache);
        let heads = attention.kv_heads.len();
        let out_stride = if splits > 1 { attention.out_dim + 2 } else { attention.out.stride() };
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
            attention.window,
            splits,
            SPLIT_TOKENS,
            heads,
            usize::from(attention.sinks.is_some()),
            attention.absorbed.map_or(0, Buffer::stride),
        ]
        .map(|number| number as u32);
        let absorbed = attention.absorbed.map_or(&self.nothing, |absorbed| &absorbed.memory);
        let sinks = attention.sinks.map_or(&self.nothing, |sinks| &sinks.memory);
        let queries = &attention.queries.memory;
        let mut buffers =
            vec![&tables.memory, queries, absorbed, kv_of, sinks, &first.data, &second.data, out];
        buffers.extend(&first.scales);
        buffers.extend(&second.scales);
        let int8 = caches.format == KvFormat::Int8;
        let kernel = Kernel::Attend(Attend { latent: attention.latent, int8 });
        let groups = [heads as u32, rows.len() as u32, splits as u32];
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
            SPLIT_TOKENS,
            attention.out_dim + 2,
            attention.out.stride(),
            attention.out_first,
            attention.out_dim,
            tables.rows as usize,
            attention.window,
            usize::from(attention.sinks.is_some()),
        ]
        .map(|number| number as u32);
        let sinks = attention.sinks.map_or(&self.nothing, |sinks| &sinks.memory);
        let buffers = [&tables.memory, sinks, parts, &attention.out.memory];
        let groups = [heads as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Combine, &buffers, &arguments, groups)
    }

    /// The KV head of each query head, on the device.
    fn table_of_heads(&mut self, kv_heads: &[u32]) -> Result<Memory, ComputeError> {
        if let Some(memory) = self.kv_heads.get(kv_heads) {
            return Ok(memory.clone());
        }
        let memory = self.device.filled(kv_heads, "a table of heads")?;
        self.kv_heads.insert(kv_heads.to_vec(), memory.clone());
        Ok(memory)
    }
}
