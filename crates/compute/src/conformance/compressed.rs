//! Attention to compressed tokens, several residual streams, and given experts.

use super::data::{BLOCKS_OF_SLOT, SLOTS, columns, filled, step, workload};
use super::extra::inputs;
use super::{Suite, Work};
use crate::backend::{
    Backend, CacheShape, CompressedSpec, CompressionSpec, ComputeError, Extra, KvFormat, LatentSpec, Norm,
    Rope, RouterSpec, Scores, SelectionSpec, SharedExpert, StreamSpec,
};

struct Streams<'a> {
    spec: &'a StreamSpec,
    width: usize,
    weights: &'a [f32],
    streams: &'a [f32],
    result: &'a [f32],
}

impl Work for Streams<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (spec, width) = (self.spec, self.width);
        let (all, columns_of_weights) = (spec.streams * width, spec.columns());
        let count = self.result.len() / width;
        let mut weights = filled(backend, self.weights, columns_of_weights)?;
        let mut streams = filled(backend, self.streams, all)?;
        let result = filled(backend, self.result, width)?;
        let mut read = backend.buffer(count, width)?;
        for rows in [0..count / 2, count / 2..count] {
            backend.weigh_streams(spec, rows.clone(), &mut weights)?;
            backend.collapse_streams(spec, (&weights, &streams), rows.clone(), &mut read)?;
            if columns_of_weights > spec.streams {
                backend.expand_streams(spec, (&weights, &result), rows, &mut streams)?;
            }
        }
        let mut results = columns(backend, &weights, 0..count, (columns_of_weights, columns_of_weights))?;
        results.extend(columns(backend, &read, 0..count, (width, width))?);
        results.extend(columns(backend, &streams, 0..count, (all, all))?);
        Ok(results)
    }
}

/// Rotations there and back.
struct Rotated<'a> {
    rope: &'a Rope,
    x: &'a [f32],
    width: usize,
}

impl Work for Rotated<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let count = self.x.len() / self.width;
        let mut x = filled(backend, self.x, self.width)?;
        let positions: Vec<usize> = (0..count).map(|row| 7 * row + 1).collect();
        let last = self.width - 2 * self.rope.inverse_frequencies.len();
        backend.rotate_parts((self.rope, false), &positions, &[1, last], 0..count, &mut x)?;
        backend.rotate_parts((self.rope, true), &positions[1..], &[last], 1..count, &mut x)?;
        columns(backend, &x, 0..count, (self.width, self.width))
    }
}

struct Members<'a> {
    every: usize,
    positions: &'a [usize],
    selected: &'a [f32],
}

impl Work for Members<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (count, width) = (self.positions.len(), 1 + 3 * self.every);
        let selected = filled(backend, self.selected, 3)?;
        let mut selection = backend.buffer(count, width)?;
        backend.select_members(self.every, self.positions, (&selected, 0..count), &mut selection)?;
        // Columns that no token fills have arbitrary contents.
        let all = columns(backend, &selection, 0..count, (width, width))?;
        Ok(all.chunks(width).flat_map(|row| &row[..=row[0] as usize]).copied().collect())
    }
}

/// Values that are added to streams.
struct Values<'a> {
    streams: usize,
    width: usize,
    weights: &'a [f32],
    made: &'a [f32],
    x: &'a [f32],
}

impl Work for Values<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (all, count) = (self.streams * self.width, self.x.len() / self.streams / self.width);
        let mut x = filled(backend, self.x, all)?;
        let made = filled(backend, self.made, all + self.width)?;
        backend.add_values((self.weights, 1e-5), &made, count / 2..count, &mut x)?;
        columns(backend, &x, 0..count, (all, all))
    }
}

struct Assigned<'a> {
    spec: &'a RouterSpec<Vec<f32>>,
    assigned: &'a [u16],
    logits: &'a [f32],
}

impl Work for Assigned<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let (rows, width) = (self.assigned.len() / spec.chosen, 2 * spec.choices());
        let logits = filled(backend, self.logits, spec.logits())?;
        let mut choices = backend.buffer(rows, width)?;
        let middle = rows / 2;
        let (first, second) = self.assigned.split_at(middle * spec.chosen);
        backend.route_assigned(&spec, first, &logits, 0..middle, &mut choices)?;
        backend.route_assigned(&spec, second, &logits, middle..rows, &mut choices)?;
        columns(backend, &choices, 0..rows, (width, width))
    }
}

struct Compressed<'a> {
    spec: &'a CompressedSpec<Vec<f32>>,
    compression: &'a CompressionSpec<Vec<f32>>,
    selection: Option<SelectionSpec>,
    /// Queries, single tokens, values, gates; the indexer's queries, weights and keys.
    rows: [&'a [Vec<f32>]; 7],
    format: KvFormat,
}

impl Work for Compressed<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let compression = self.compression.clone().try_map(&mut |values| backend.vector(&values))?;
        // The indexer's keys are those of each group's last token. They are signs, which f16
        // represents exactly, because a rounded key could change the selection.
        let selection = self.selection.unwrap_or(SelectionSpec { heads: 1, dim: 32, chosen: 1, every: 1 });
        let mut place_bias = vec![0.0; (self.compression.every * 2 - 1) * selection.dim];
        place_bias.extend(vec![60.0; selection.dim]);
        let keys = CompressionSpec {
            dim: selection.dim,
            every: self.compression.every,
            place_bias,
            overlaps: true,
            norm: Some(Norm { weight: vec![1.0; selection.dim], eps: 1e-30 }),
            rope: Rope { inverse_frequencies: vec![0.0; 8], amplitude: 1.0, interleaved: true },
        };
        let keys = keys.try_map(&mut |values| backend.vector(&values))?;
        let mut caches = backend.caches(&CacheShape {
            format: self.format,
            caches: vec![spec.cache(), compression.cache(), compression.state(), keys.cache(), keys.state()],
            blocks: SLOTS * BLOCKS_OF_SLOT,
            slots: SLOTS,
        })?;
        let single = LatentSpec {
            heads: 0,
            rank: spec.dim - spec.rotated,
            rotated: spec.rotated,
            plain: 0,
            scale: 1.0,
            norm: Norm { weight: backend.vector(&vec![1.0; spec.dim - spec.rotated])?, eps: 1e-6 },
            rope: None,
        };
        let out_width = spec.heads * spec.dim;
        let (heads, dim) = (selection.heads, selection.dim);
        let width = compression.width();
        let widths = [out_width, spec.dim, width, width, heads * dim, heads, 2 * dim];
        let mut results = Vec::new();
        for pieces in workload() {
            let step = step(&pieces, SLOTS);
            let mut buffers = Vec::new();
            for (rows, width) in self.rows.iter().zip(widths) {
                buffers.push(filled(backend, &inputs(rows, width, &pieces), width)?);
            }
            let Ok([queries, tokens, values, gates, index_queries, weights, index]) =
                <[B::Buffer; 7]>::try_from(buffers)
            else {
                unreachable!("there is a buffer for each width")
            };
            let mut selected = backend.buffer(step.rows(), selection.columns())?;
            let mut out = backend.buffer(step.rows(), out_width)?;
            for rows in backend.begin(&step, &[])? {
                backend.append_latent(&single, &step, rows.clone(), &tokens, (&mut caches, 0))?;
                let inputs = (&values, &gates);
                backend.compress(&compression, &step, rows.clone(), inputs, (&mut caches, [2, 1]))?;
                let selected = match self.selection {
                    Some(spec) => {
                        let to = (&mut caches, [4, 3]);
                        backend.compress(&keys, &step, rows.clone(), (&index, &index), to)?;
                        let (inputs, from) = ((&index_queries, &weights), (&mut caches, 3));
                        backend.select(&spec, &step, rows.clone(), inputs, from, &mut selected)?;
                        Some(&selected)
                    }
                    None => None,
                };
                let (inputs, from) = ((&queries, selected), (&mut caches, [0, 1]));
                backend.attend_compressed(&spec, &step, rows, inputs, from, &mut out)?;
            }
            results.extend(columns(backend, &out, 0..step.rows(), (out_width, out_width))?);
        }
        Ok(results)
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn streams(&mut self) {
        for (streams, width, rows, iterations) in [(4, 40, 5, 20), (2, 33, 1, 1), (4, 64, 3, 0)] {
            // No iteration: the weights of the last stream.
            let columns = if iterations == 0 { streams } else { StreamSpec::all_columns(streams) };
            let spec = StreamSpec {
                streams,
                scale: [0.7, 1.3, 0.9],
                base: self.random.numbers(columns),
                iterations,
                eps: 1e-6,
            };
            let weights = self.random.numbers(rows * columns);
            let (x, result) =
                (self.random.numbers(rows * streams * width), self.random.numbers(rows * width));
            let work = Streams { spec: &spec, width, weights: &weights, streams: &x, result: &result };
            self.compare(format!("{streams} streams of {width}, {rows} rows"), self.limits.rows, work);
        }
        for (interleaved, pairs, rows) in [(true, 8, 5), (false, 3, 1)] {
            let inverse_frequencies = self.random.numbers(pairs);
            let rope = Rope { inverse_frequencies, amplitude: 1.0, interleaved };
            let width = 5 * pairs + 2;
            let x = self.random.numbers(rows * width);
            let work = Rotated { rope: &rope, x: &x, width };
            self.compare(format!("rotations of {pairs} pairs, {rows} rows"), self.limits.rows, work);
        }
        for (every, rows) in [(4, 5), (1, 3)] {
            // How many were selected, and which.
            let selected: Vec<f32> = (0..rows).flat_map(|row| [2.0, row as f32, row as f32 + 2.0]).collect();
            let positions: Vec<usize> = (0..rows).map(|row| (row + 3) * every + row % every).collect();
            let work = Members { every, positions: &positions, selected: &selected };
            self.compare(format!("members of {rows} rows by {every}"), 0.0, work);
        }
        for (streams, width, rows) in [(4, 40, 1), (1, 33, 5), (4, 270, 70)] {
            let [weights, made, x] = [streams * width, rows * (streams + 1) * width, rows * streams * width]
                .map(|count| self.random.numbers(count));
            let work = Values { streams, width, weights: &weights, made: &made, x: &x };
            let case = format!("values added to {streams} streams of {width}, {rows} rows");
            self.compare(case, self.limits.rows, work);
        }
        for (shared, rows, experts) in [
            (SharedExpert::Plain, 5, 9),
            (SharedExpert::None, 1, 9),
            (SharedExpert::Gated, 4, 9),
            (SharedExpert::Plain, 70, 256),
        ] {
            let spec = RouterSpec {
                experts,
                chosen: 3,
                scores: if rows == 1 { Scores::Sigmoid } else { Scores::RootSoftplus },
                correction: None,
                groups: None,
                renormalise: true,
                scale: 1.5,
                shared,
            };
            let of_row = |row: u16| [(row + 7) % 9, row, row + 2];
            let assigned: Vec<u16> = (0..rows as u16).flat_map(of_row).collect();
            let logits = self.random.numbers(rows * spec.logits());
            let work = Assigned { spec: &spec, assigned: &assigned, logits: &logits };
            let case = format!("given experts of {rows} rows among {experts}, {shared:?}");
            self.compare(case, self.limits.rows, work);
        }
    }

    pub(super) fn compressed(&mut self) {
        if !self.backend.offers(Extra::Compression) {
            return;
        }
        for (heads, dim, every, overlaps, chosen, format) in [
            (3, 48, 4, true, Some(6), KvFormat::F16),
            (20, 64, 4, true, None, KvFormat::F16),
            (2, 48, 32, false, None, KvFormat::F16),
            (2, 32, 64, false, None, KvFormat::Int8),
            (5, 32, 8, true, Some(40), KvFormat::F16),
        ] {
            let rope = Rope {
                inverse_frequencies: vec![1.0, 0.3, 0.1, 0.01, 0.2, 0.03, 0.5, 0.7],
                amplitude: 1.0,
                interleaved: true,
            };
            let sinks = self.random.numbers(heads);
            let spec = CompressedSpec { heads, dim, rotated: 16, window: 21, every: Some(every), sinks };
            let width = if overlaps { 2 * dim } else { dim };
            let compression = CompressionSpec {
                dim,
                every,
                overlaps,
                place_bias: self.random.numbers(every * width),
                norm: overlaps.then(|| Norm { weight: self.random.numbers(dim), eps: 1e-6 }),
                rope,
            };
            let selection = chosen.map(|chosen| SelectionSpec { heads: 3, dim: 32, chosen, every });
            let index_heads = selection.map_or(1, |of| of.heads);
            let widths = [heads * dim, dim, width, width, index_heads * 32, index_heads, 64];
            let mut rows = widths.map(|width| self.of_slots(width));
            rows[6].iter_mut().flatten().for_each(|x| *x = x.signum());
            let rows = rows.each_ref().map(Vec::as_slice);
            let limit = match format {
                KvFormat::F16 => self.limits.attention,
                KvFormat::Int8 => self.limits.attention_int8,
            };
            let work = Compressed { spec: &spec, compression: &compression, selection, rows, format };
            let case = format!("{heads} heads of {dim} to tokens compressed by {every}, {chosen:?} of them");
            self.compare(case, limit, work);
        }
    }
}
