//! Delta rules, state spaces and convolutions, and their states.

use std::ops::Range;

use thunder_compute::{CachePart, ComputeError, Decays, DeltaSpec, GatedConvSpec, MAX_DRAFT, StateSpaceSpec};

use super::Outcome;
use super::rows::fits;
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Memory, Vector};
use crate::caches::{Cache, Caches};
use crate::kernel::{
    CONV_THREADS, Conv, HeldRecurrence, Kernel, MAX_KEY_COLUMNS, MAX_TAPS, Recurrence, Rule, STATE_COLUMNS,
};
use crate::proof::Family;
use crate::without::{Way, without};

/// From this many rows of a sequence on, several threads share the rows of a convolution's channel.
const SHARED_ROWS: usize = 64;

/// Multiplications and additions for a row and a number of a state: decay, what the state has for
/// the key, the change, and what it has for the query.
const WORK_OF_STATE: usize = 4;

/// A convolution of the first columns of rows.
pub(super) struct Convolution<'a> {
    pub taps: &'a Vector,
    pub bias: Option<&'a Vector>,
    pub channels: usize,
    pub kernel: usize,
}

/// A recurrence whose state is a matrix for each head. Columns are those of a row of `x`.
struct Heads<'a> {
    rule: Rule,
    /// First columns of queries, keys and values.
    firsts: [usize; 3],
    key_heads: usize,
    key_dim: usize,
    value_dim: usize,
    heads: usize,
    /// Consecutive heads that share a key.
    run: usize,
    /// Numbers of a sequence's state before the matrices.
    state_first: usize,
    unit_eps: f32,
    limits: [f32; 2],
    rates: &'a Vector,
    biases: &'a Vector,
    /// Factors of the heads' inputs that are added to the outputs.
    skips: Option<&'a Vector>,
    /// Columns of convolved rows.
    channels: usize,
    /// Columns of gates.
    gates: usize,
}

impl<'a> Heads<'a> {
    fn of_delta(spec: &'a DeltaSpec<Vector>, rule: Rule) -> Self {
        let keys = spec.key_heads * spec.key_dim;
        Self {
            rule,
            firsts: [0, keys, 2 * keys],
            key_heads: spec.key_heads,
            key_dim: spec.key_dim,
            value_dim: spec.value_dim,
            heads: spec.value_heads,
            run: spec.sharing_run(),
            state_first: spec.conv_numbers(),
            unit_eps: spec.unit_eps,
            limits: match spec.decays {
                Decays::Softplus => [0.0; 2],
                Decays::Bounded { lowest } => [lowest, 0.0],
            },
            rates: &spec.decay,
            biases: &spec.decay_bias,
            skips: None,
            channels: spec.channels(),
            gates: if rule == Rule::Delta { 2 * spec.value_heads } else { spec.value_heads },
        }
    }

    fn of_space(spec: &'a StateSpaceSpec<Vector>) -> Self {
        let vectors = spec.groups * spec.state_dim;
        let (least, most) = spec.time_limit;
        Self {
            rule: Rule::StateSpace,
            firsts: [spec.width() + vectors, spec.width(), 0],
            key_heads: spec.groups,
            key_dim: spec.state_dim,
            value_dim: spec.head_dim,
            heads: spec.heads,
            run: (spec.heads / spec.groups.max(1)).max(1),
            state_first: spec.conv_numbers(),
            unit_eps: 0.0,
            // Kernels need not know infinity.
            limits: [least, most.min(f32::MAX)],
            rates: &spec.rate,
            biases: &spec.time_bias,
            skips: Some(&spec.skip),
            channels: spec.channels(),
            gates: spec.heads,
        }
    }
}

impl GpuBackend {
    /// The convolution with SiLU, in place.
    pub(super) fn convolve(
        &mut self,
        of: &Convolution<'_>,
        rows: Range<usize>,
        x: &Buffer,
        caches: (&mut Caches, usize),
    ) -> Outcome {
        let bias = of.bias.map_or_else(|| self.nothing.clone(), |bias| bias.memory.clone());
        self.convolve_by(of, rows, x, caches, (&bias, 0, false))
    }

    pub(super) fn convolve_gated(
        &mut self,
        spec: &GatedConvSpec<Vector>,
        rows: Range<usize>,
        x: &Buffer,
        caches: (&mut Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        let GatedConvSpec { channels, kernel, ref taps } = *spec;
        let of = Convolution { taps, bias: None, channels, kernel };
        self.convolve_by(&of, rows, x, caches, (&out.memory, out.stride(), true))
    }

    /// `last` is the bias, or the memory of gated results with the distance of their rows.
    fn convolve_by(
        &mut self,
        of: &Convolution<'_>,
        rows: Range<usize>,
        x: &Buffer,
        (caches, cache): (&mut Caches, usize),
        (last, out_stride, gated): (&Memory, usize, bool),
    ) -> Outcome {
        fits("the taps of a convolution", of.kernel, MAX_TAPS, "at most 16")?;
        let tables = self.tables()?;
        let kept = match tables.has_drafts {
            true => Some(caches.kept(cache, (0, 2 * of.channels), &mut self.device)?),
            false => None,
        };
        // With 16 threads for a channel, neighbouring threads still read 32 bytes.
        let per_sequence = rows.len() / (tables.sequence_count as usize).max(1);
        let segments = if kept.is_none() && per_sequence >= SHARED_ROWS { 16 } else { 1 };
        let [read_at, write_at] = self.state_columns(caches)?;
        let (state, numbers) = caches.states(cache);
        let arguments = [
            rows.start,
            rows.end,
            x.stride(),
            out_stride,
            of.channels,
            of.kernel,
            tables.sequences as usize,
            numbers,
            usize::from(of.bias.is_some()),
            read_at,
            write_at,
            segments,
        ]
        .map(|number| number as u32);
        let mut buffers = vec![&tables.memory, &of.taps.memory, state, &x.memory, last];
        buffers.extend(&kept);
        let groups = [of.channels.div_ceil(CONV_THREADS / segments) as u32, tables.sequence_count, 1];
        let kernel = Kernel::Conv(Conv { gated, drafts: kept.is_some(), taps: Conv::space(of.kernel) });
        self.device.dispatch(&kernel, &buffers, &arguments, groups)
    }

    pub(super) fn apply_delta_rule(
        &mut self,
        spec: &DeltaSpec<Vector>,
        rows: Range<usize>,
        (qkv, gates): (&Buffer, &Buffer),
        caches: (&mut Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        let heads = Heads::of_delta(spec, Rule::Delta);
        self.recur(&heads, rows, (qkv, gates, None), caches, out)
    }

    pub(super) fn apply_channel_delta_rule(
        &mut self,
        spec: &DeltaSpec<Vector>,
        rows: Range<usize>,
        [qkv, beta, alpha]: [&Buffer; 3],
        caches: (&mut Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        let heads = Heads::of_delta(spec, Rule::ChannelDelta);
        self.recur(&heads, rows, (qkv, beta, Some(alpha)), caches, out)
    }

    pub(super) fn apply_state_space(
        &mut self,
        spec: &StateSpaceSpec<Vector>,
        rows: Range<usize>,
        (x, times): (&Buffer, &Buffer),
        caches: (&mut Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        self.recur(&Heads::of_space(spec), rows, (x, times, None), caches, out)
    }

    /// Advances states. `inputs` are convolved rows, gates of heads, and of columns if there are
    /// any.
    fn recur(
        &mut self,
        of: &Heads<'_>,
        rows: Range<usize>,
        (x, gates, of_columns): (&Buffer, &Buffer, Option<&Buffer>),
        (caches, cache): (&mut Caches, usize),
        out: &Buffer,
    ) -> Outcome {
        fits("the width of a key", of.key_dim, MAX_KEY_COLUMNS, "at most 512")?;
        let tables = self.tables()?;
        // Numbers of a row that are kept with a draft, besides those of the convolution.
        let widths = [of.gates, of_columns.map_or(0, |_| of.heads * of.key_dim)];
        let kept_width = widths[0] + widths[1];
        let mut kept = Vec::new();
        if tables.has_drafts {
            let copies = tables.sequence_count as usize * of.heads * of.key_dim * of.value_dim * 4;
            kept.push(caches.kept(cache, (0, 2 * of.channels), &mut self.device)?);
            kept.push(caches.kept(cache, (1, kept_width), &mut self.device)?);
            kept.push(Self::grown(&mut self.device, &mut self.parts, copies, "copies of states")?);
        }
        let held = match HeldRecurrence::of(of.rule, of.key_dim) {
            Some(form) if kept.is_empty() && !without(Way::Held) => {
                self.takes(Family::HeldState(form))?.then_some(form)
            }
            _ => None,
        };
        let of_prompts = rows.end.saturating_sub(rows.start.max(tables.generated));
        if of_prompts > 0 {
            self.record_scalars(of_prompts * of.heads * of.key_dim * of.value_dim * WORK_OF_STATE)?;
        }
        let [read_at, write_at] = self.state_columns(caches)?;
        let (state, numbers) = caches.states(cache);
        let [queries, keys, values] = of.firsts;
        let sizes = [
            rows.start,
            rows.end,
            x.stride(),
            gates.stride(),
            out.stride(),
            queries,
            keys,
            values,
            of.key_heads,
            of.key_dim,
            of.value_dim,
            of.heads,
            tables.sequences as usize,
            numbers,
            of.state_first,
            of.run,
            of_columns.map_or(0, Buffer::stride),
        ]
        .map(|number| number as u32);
        let numbers = [of.unit_eps, of.limits[0], of.limits[1]].map(f32::to_bits);
        let others = [of.channels, kept_width, read_at, write_at].map(|number| number as u32);
        let arguments = [&sizes[..], &numbers, &others].concat();
        let mut buffers = vec![
            &tables.memory,
            &of.rates.memory,
            &of.biases.memory,
            &x.memory,
            &gates.memory,
            state,
            &out.memory,
        ];
        buffers.extend(of.skips.map(|skips| &skips.memory));
        buffers.extend(of_columns.map(|of_columns| &of_columns.memory));
        buffers.extend(&kept);
        let parts = of.value_dim.div_ceil(STATE_COLUMNS) as u32;
        let groups = [of.heads as u32, tables.sequence_count, parts];
        let kernel = match held {
            Some(form) => Kernel::HeldRecurrence(form),
            None => Kernel::Recurrence(Recurrence { rule: of.rule, drafts: !kept.is_empty() }),
        };
        self.device.dispatch(&kernel, &buffers, &arguments, groups)?;
        let Some(kept) = kept.get(1) else { return Ok(()) };
        let mut column = 0;
        for (gates, width) in [Some(gates), of_columns].into_iter().flatten().zip(widths) {
            let sizes = [
                rows.start,
                rows.end,
                gates.stride(),
                tables.sequences as usize,
                MAX_DRAFT,
                kept_width,
                column,
                width,
            ];
            let arguments = sizes.map(|number| number as u32);
            let groups = [width.div_ceil(64) as u32, tables.sequence_count, MAX_DRAFT as u32];
            let buffers = [&tables.memory, &gates.memory, kept];
            self.device.dispatch(&Kernel::KeepDrafts, &buffers, &arguments, groups)?;
            column += width;
        }
        Ok(())
    }

    /// Columns of the table of sequences that say where states of these caches are read and
    /// written.
    fn state_columns(&mut self, caches: &Caches) -> Result<[usize; 2], ComputeError> {
        if caches.alternates
            && let Some(slots) = &mut self.slots
            && self.step.as_ref().is_some_and(|step| step.alternates)
        {
            slots.written();
        } else {
            self.device.cannot_repeat()?;
        }
        Ok(if caches.alternates { [6, 7] } else { [3, 3] })
    }

    /// The place of a slot's state in these caches.
    fn place_of(&self, caches: &Caches, slot: usize) -> usize {
        self.slots.as_ref().filter(|_| caches.alternates).map_or(slot, |slots| slots.place(slot))
    }

    /// The same for a part of caches.
    fn placed(&self, caches: &Caches, part: CachePart) -> CachePart {
        match part {
            CachePart::Slot(slot) => CachePart::Slot(self.place_of(caches, slot)),
            CachePart::Block(_) => part,
        }
    }

    pub(super) fn norm_gated_rows(
        &mut self,
        spec: &DeltaSpec<Vector>,
        z: &Buffer,
        rows: Range<usize>,
        x: &Buffer,
    ) -> Outcome {
        let arguments = [
            rows.start as u32,
            x.stride() as u32,
            z.stride() as u32,
            spec.value_dim as u32,
            spec.norm.eps.to_bits(),
        ];
        let buffers = [&spec.norm.weight.memory, &z.memory, &x.memory];
        let groups = [rows.len() as u32, spec.value_heads as u32, 1];
        self.device.dispatch(&Kernel::NormGated, &buffers, &arguments, groups)
    }

    /// Copies the states of one slot to another, in all caches.
    pub(super) fn copy_states(&mut self, caches: &Caches, from: usize, to: usize) -> Outcome {
        if from == to {
            return Ok(());
        }
        let [from, to] = [from, to].map(|slot| self.place_of(caches, slot));
        for cache in &caches.all {
            let Cache::State { numbers, data, .. } = cache else { continue };
            // A copy within one buffer is not allowed, so it goes through another buffer.
            let bytes = numbers * 4;
            let between = Self::grown(&mut self.device, &mut self.parts, bytes, "a state")?;
            self.device.copy((data, from * numbers), (&between, 0), *numbers)?;
            self.device.copy((&between, 0), (data, to * numbers), *numbers)?;
        }
        Ok(())
    }

    /// Appends the words of a part of all caches. They are gathered in one buffer, because a wait
    /// for the device costs more than the copy of a block.
    pub(super) fn read_cache_part(&mut self, caches: &Caches, part: CachePart, out: &mut Vec<u8>) -> Outcome {
        let places = caches.places(self.placed(caches, part));
        let words = places.iter().map(|(_, place)| place.len()).sum::<usize>();
        if words == 0 {
            return Ok(());
        }
        let gathered = Self::grown(&mut self.device, &mut self.parts, words * 4, "a block")?;
        let mut first = 0;
        for (memory, place) in places {
            self.device.copy((memory, place.start), (&gathered, first), place.len())?;
            first += place.len();
        }
        self.device.read(&gathered, 0..words, &mut self.words)?;
        out.extend_from_slice(bytemuck::cast_slice(&self.words));
        Ok(())
    }

    /// Writes these words to a part of all caches. Returns false if their number is wrong.
    pub(super) fn write_cache_part(
        &mut self,
        caches: &Caches,
        part: CachePart,
        bytes: &[u8],
    ) -> Result<bool, ComputeError> {
        let places = caches.places(self.placed(caches, part));
        let words = places.iter().map(|(_, place)| place.len()).sum::<usize>();
        if words * 4 != bytes.len() {
            return Ok(false);
        }
        let (chunks, _) = bytes.as_chunks();
        let mut rest = chunks.iter().map(|word| u32::from_le_bytes(*word));
        for (memory, place) in places {
            self.words.clear();
            self.words.extend(rest.by_ref().take(place.len()));
            self.device.overwrite(memory, place.start, &self.words)?;
        }
        Ok(true)
    }
}
