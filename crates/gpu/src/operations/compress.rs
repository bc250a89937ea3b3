//! Tokens that are compressed, attention to them, and the last tokens of a sequence.

use std::collections::HashMap;
use std::ops::Range;

use thunder_compute::{CompressedSpec, CompressionSpec, ComputeError, KvFormat, RecentSpec, Step};

use super::Outcome;
use super::attend_shared::{Queries, Together};
use super::rows::fits;
use super::select::Part;
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Memory, Vector};
use crate::caches::Caches;
use crate::kernel::{Attended, Compress, KEPT, Kernel, MAX_COMPRESSED, MAX_LISTED, Select, splits_of};
use crate::proof::Family;

/// The last tokens' ids, as the host has written them to a buffer of states.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    of_slots: HashMap<usize, Vec<f32>>,
    /// When the buffer was last written, by the host.
    after: u64,
}

impl GpuBackend {
    /// Writes compressed tokens to the rows of their last tokens in `out`, then keeps the rows'
    /// values and gates.
    pub(super) fn compress_rows(
        &mut self,
        spec: &CompressionSpec<Vector>,
        (step, rows): (&Step, Range<usize>),
        (values, gates): (&Buffer, &Buffer),
        (state, numbers): (&Memory, usize),
        out: &Buffer,
    ) -> Outcome {
        fits("the width of a compressed token", spec.dim, MAX_COMPRESSED, "at most 1024")?;
        let tables = self.tables()?;
        let pairs = spec.rope.inverse_frequencies.len();
        let (rotations, at) = match pairs {
            0 => (self.nothing.clone(), 0),
            _ => self.device.table(&rotations_of(spec, step, &rows))?,
        };
        let [values_stride, gates_stride, out_stride] =
            [values, gates, out].map(|buffer| buffer.stride() as u32);
        let arguments = [
            rows.start as u32,
            values_stride,
            gates_stride,
            out_stride,
            tables.rows,
            spec.dim as u32,
            spec.width() as u32,
            spec.every as u32,
            spec.slots() as u32,
            numbers as u32,
            u32::from(spec.norm.is_some()),
            spec.norm.as_ref().map_or(0, |norm| norm.eps.to_bits()),
            pairs as u32,
            u32::from(spec.rope.interleaved),
            at,
        ];
        let weight = spec.norm.as_ref().map_or(&self.nothing, |norm| &norm.weight.memory).clone();
        let place_bias = &spec.place_bias.memory;
        let buffers = [
            &tables.memory,
            &values.memory,
            &gates.memory,
            place_bias,
            state,
            &weight,
            &rotations,
            &out.memory,
        ];
        let kernel = Kernel::Compress(Compress::Means);
        self.device.dispatch(&kernel, &buffers, &arguments, [rows.len() as u32, 1, 1])?;
        let arguments = [
            rows.start as u32,
            rows.end as u32,
            values_stride,
            gates_stride,
            tables.rows,
            spec.width() as u32,
            spec.every as u32,
            spec.slots() as u32,
            numbers as u32,
        ];
        let buffers = [&tables.memory, &values.memory, &gates.memory, place_bias, state];
        let groups = [spec.width().div_ceil(KEPT) as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Compress(Compress::Keep), &buffers, &arguments, groups)
    }

    pub(super) fn compress_to(
        &mut self,
        spec: &CompressionSpec<Vector>,
        (step, rows): (&Step, Range<usize>),
        inputs: (&Buffer, &Buffer),
        (caches, [state, entries]): (&Caches, [usize; 2]),
    ) -> Outcome {
        self.require(Family::Compression { int8: caches.format == KvFormat::Int8 })?;
        let mut vectors = self.spare(inputs.0.capacity(), spec.dim)?;
        vectors.shape(step.rows())?;
        self.compress_rows(spec, (step, rows.clone()), inputs, caches.states(state), &vectors)?;
        let (_, first, second) = caches.tokens(entries);
        self.append_vectors(rows.clone(), (&vectors, 0), 1, first)?;
        if second.width > 0 {
            self.append_vectors(rows, (&vectors, first.width), 1, second)?;
        }
        self.spares.push(vectors);
        Ok(())
    }

    pub(super) fn attend_compressed_rows(
        &mut self,
        spec: &CompressedSpec<Vector>,
        rows: Range<usize>,
        (queries, selection): (&Buffer, Option<&Buffer>),
        (caches, [single, compressed]): (&Caches, [usize; 2]),
        out: &Buffer,
    ) -> Outcome {
        if spec.heads == 0 {
            return Ok(());
        }
        fits("the width of a compressed token", spec.dim, MAX_LISTED, "at most 512")?;
        let (_, first, second) = caches.tokens(single);
        let (_, more_first, more_second) = caches.tokens(compressed);
        let int8 = first.scales.is_some();
        self.require(Family::Compression { int8 })?;
        let tables = self.tables()?;
        for part in Part::of_step(&tables, &rows) {
            let others = match (selection, spec.every) {
                (Some(selection), _) => selection.width - 1,
                (None, every) => every.map_or(0, |every| part.longest / every),
            };
            let tokens = part.longest.min(spec.window) + others;
            let splits = if part.is_prompt { 1 } else { splits_of(tokens, None) };
            let part_stride = spec.dim + 2;
            let (work, bytes) = (4 * spec.heads * spec.dim * tokens, spec.heads * splits * part_stride * 4);
            let of_part = |first| Queries { buffer: queries, first, of_head: spec.dim };
            let together = Together {
                tokens: Attended::Both,
                heads: spec.heads,
                queries: [of_part(0), of_part(first.width)],
                caches: &[[first, second], [more_first, more_second]],
                selection,
                window: spec.window,
                every: spec.every.unwrap_or(0),
                is_whole: part.is_prompt,
            };
            let form = self.shared_for(&together, part.rows.len() * splits)?;
            self.in_turns(&part, (work, bytes), |backend, rows, parts| {
                let add = |backend: &mut Self, rows| {
                    let sinks = Some(&spec.sinks);
                    backend.add_parts(rows, (parts, splits), sinks, (spec.heads, spec.dim), out)
                };
                if let Some(form) = form {
                    backend.attend_shared(form, &tables, rows.clone(), &together, (parts, splits))?;
                    return add(backend, rows);
                }
                let arguments = [
                    rows.start,
                    queries.stride(),
                    first.width,
                    second.width,
                    first.words,
                    second.words,
                    tables.rows as usize,
                    tables.blocks as usize,
                    spec.heads,
                    splits,
                    selection.map_or(0, Buffer::stride),
                    part_stride,
                    usize::from(part.is_prompt),
                    spec.window,
                    spec.every.unwrap_or(0),
                    usize::from(selection.is_some()),
                ]
                .map(|number| number as u32);
                let selected = selection.map_or(&backend.nothing, |selection| &selection.memory).clone();
                let mut buffers = vec![
                    &tables.memory,
                    &queries.memory,
                    &selected,
                    &first.data,
                    &second.data,
                    &more_first.data,
                    &more_second.data,
                    parts,
                ];
                let scales = [first, second, more_first, more_second];
                buffers.extend(scales.into_iter().flat_map(|vectors| &vectors.scales));
                let groups = [spec.heads as u32, rows.len() as u32, splits as u32];
                let kernel = Kernel::Select(Select::AttendBoth { int8 });
                backend.device.dispatch(&kernel, &buffers, &arguments, groups)?;
                add(backend, rows)
            })?;
        }
        Ok(())
    }

    /// Keeps tokens in states. The host does it, because it needs the ids. It reads only states
    /// that it has not written itself.
    pub(super) fn keep_recent(
        &mut self,
        spec: RecentSpec,
        (step, rows): (&Step, Range<usize>),
        (state, numbers): (&Memory, usize),
    ) -> Result<Vec<u32>, ComputeError> {
        let mut recent = Vec::with_capacity(rows.len() * spec.count);
        let of_state = self.recent.remove(&state.id);
        let mut known = of_state.filter(|known| known.after == state.written()).unwrap_or_default();
        let mut words = Vec::new();
        for sequence in &step.sequences {
            let of_sequence = sequence.rows_within(&rows);
            if of_sequence.is_empty() {
                continue;
            }
            let first = sequence.slot * numbers;
            let begins = sequence.position(of_sequence.start) == 0;
            let mut ids = match known.of_slots.remove(&sequence.slot) {
                Some(ids) => ids,
                None if begins => vec![0.0; numbers],
                None => {
                    self.read_words(state, first..first + numbers, &mut words)?;
                    words.iter().map(|word| f32::from_bits(*word)).collect()
                }
            };
            for row in of_sequence {
                spec.keep(&mut ids, sequence.position(row), step.tokens[row], &mut recent);
            }
            let written: Vec<u32> = ids.iter().map(|id| id.to_bits()).collect();
            self.device.overwrite(state, first, &written)?;
            known.of_slots.insert(sequence.slot, ids);
        }
        known.after = state.written();
        self.recent.insert(state.id, known);
        Ok(recent)
    }
}

/// Cosine and sine of each pair for the first token of the compressed token that ends at each row.
fn rotations_of(spec: &CompressionSpec<Vector>, step: &Step, rows: &Range<usize>) -> Vec<u32> {
    let mut words = Vec::with_capacity(2 * rows.len() * spec.rope.inverse_frequencies.len());
    for sequence in &step.sequences {
        for row in sequence.rows_within(rows) {
            let first = (sequence.position(row) + 1).saturating_sub(spec.every);
            words.extend(spec.rope.turns(first).flat_map(|(cos, sin)| [cos.to_bits(), sin.to_bits()]));
        }
    }
    words
}
