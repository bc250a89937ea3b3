//! Work before attention: queries and keys are prepared, keys and values are appended to the cache.

use std::ops::Range;

use thunder_compute::{AttentionSpec, LatentSpec};

use super::Outcome;
use super::rows::fits;
use crate::backend::{GpuBackend, StepTables};
use crate::buffer::{Buffer, Vector};
use crate::caches::{Caches, Vectors};
use crate::kernel::{Kernel, MAX_KEY};

/// Heads of rows that are prepared in place.
struct PreparedHeads<'a> {
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

impl GpuBackend {
    fn prepare(
        &mut self,
        tables: &StepTables,
        rows: Range<usize>,
        heads: &PreparedHeads<'_>,
        x: &Buffer,
    ) -> Outcome {
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
        let queries = PreparedHeads {
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
        let keys = PreparedHeads {
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
        let of_queries = PreparedHeads {
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
        let of_latent = PreparedHeads {
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

    /// [`Self::prepare_latent_of`], and its compressed vectors to the cache, in one kernel.
    /// `latent` stays unprepared.
    pub(super) fn prepare_and_append_latent_of(
        &mut self,
        spec: &LatentSpec<Vector>,
        rows: Range<usize>,
        (queries, latent): (&Buffer, &Buffer),
        (caches, cache): (&Caches, usize),
    ) -> Outcome {
        let width = spec.query_dim().max(spec.rank + spec.rotated);
        fits("the width of a head", width, MAX_KEY, "at most 1024")?;
        let tables = self.tables()?;
        let (_, first, second) = caches.tokens(cache);
        let rope = spec.rope.map(|rope| tables.ropes[rope]);
        let arguments = [
            rows.start as u32,
            queries.stride() as u32,
            spec.heads as u32,
            spec.query_dim() as u32,
            spec.plain as u32,
            spec.scale.to_bits(),
            latent.stride() as u32,
            spec.rank as u32,
            spec.rotated as u32,
            spec.norm.eps.to_bits(),
            rope.map_or(0, |rope| rope.pairs),
            rope.map_or(0, |rope| u32::from(rope.interleaved)),
            rope.map_or(0, |rope| rope.first),
            tables.rows,
            tables.blocks,
            first.words as u32,
            second.words as u32,
        ];
        let norm = &spec.norm.weight.memory;
        let mut buffers = vec![&tables.memory, &tables.memory, norm, &queries.memory, &latent.memory];
        buffers.extend([&first.data, &second.data]);
        buffers.extend(&first.scales);
        buffers.extend(&second.scales);
        let kernel = Kernel::PrepareLatent { int8: first.scales.is_some() };
        let groups = [rows.len() as u32, spec.heads as u32 + 1, 1];
        self.device.dispatch(&kernel, &buffers, &arguments, groups)
    }

    /// Appends `heads` vectors of each row, which start at a column of `x`.
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
            to.every as u32,
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

    /// [`Self::prepare_heads_of`] and [`Self::append_heads`] in one kernel. Keys in `qkv` stay
    /// unprepared.
    pub(crate) fn prepare_and_append(
        &mut self,
        spec: &AttentionSpec<Vector>,
        rows: Range<usize>,
        qkv: &Buffer,
        (caches, cache): (&Caches, usize),
    ) -> Outcome {
        fits("the width of a head", spec.key_dim.max(spec.value_dim), MAX_KEY, "at most 1024")?;
        let tables = self.tables()?;
        let (kv_heads, keys, values) = caches.tokens(cache);
        let rope = spec.rope.map(|rope| tables.ropes[rope]);
        let norm = spec.qk_norm.as_ref();
        let (beta, original) = spec.temperature.unwrap_or((0.0, 0));
        let arguments = [
            rows.start as u32,
            qkv.stride() as u32,
            spec.heads() as u32,
            kv_heads as u32,
            spec.key_dim as u32,
            spec.value_dim as u32,
            keys.words as u32,
            values.words as u32,
            u32::from(norm.is_some()),
            norm.map_or(0, |norm| norm.eps.to_bits()),
            rope.map_or(0, |rope| rope.pairs),
            rope.map_or(0, |rope| u32::from(rope.interleaved)),
            rope.map_or(0, |rope| rope.first),
            tables.rows,
            tables.blocks,
            spec.scale.to_bits(),
            beta.to_bits(),
            original as u32,
        ];
        let [query_norm, key_norm] =
            norm.map_or([&self.nothing; 2], |norm| [&norm.query.memory, &norm.key.memory]);
        let mut buffers =
            vec![&tables.memory, &tables.memory, query_norm, key_norm, &qkv.memory, &keys.data, &values.data];
        buffers.extend(&keys.scales);
        buffers.extend(&values.scales);
        let kernel = Kernel::PrepareAppend { int8: keys.scales.is_some() };
        let groups = [rows.len() as u32, (spec.heads() + 2 * kv_heads) as u32, 1];
        self.device.dispatch(&kernel, &buffers, &arguments, groups)
    }
}
