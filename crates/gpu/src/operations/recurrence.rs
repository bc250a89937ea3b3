//! Delta rules, state spaces and convolutions, and their states.

use std::ops::Range;

use thunder_compute::{
    CachePart, ComputeError, Decays, DeltaSpec, Extra, GatedConvSpec, StateSpaceSpec, Step,
};

use super::Outcome;
use super::rows::fits;
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Memory, Vector};
use crate::caches::{Cache, Caches};
use crate::kernel::{Kernel, MAX_KEY_COLUMNS, Recurrence, STATE_COLUMNS};

/// Maximum taps of a convolution that kernels have space for.
const MAX_TAPS: usize = 16;

/// Drafts in layers that keep a state are refused.
fn has_no_drafts(step: &Step) -> Outcome {
    match step.sequences.iter().any(|sequence| sequence.drafted + sequence.accepted > 0) {
        true => Err(ComputeError::Lacks(Extra::StateDrafts)),
        false => Ok(()),
    }
}

/// A recurrence whose state is a matrix for each head. Columns are those of a row of `x`.
struct Heads<'a> {
    form: Recurrence,
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
}

impl<'a> Heads<'a> {
    fn of_delta(spec: &'a DeltaSpec<Vector>, form: Recurrence) -> Self {
        let keys = spec.key_heads * spec.key_dim;
        Self {
            form,
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
        }
    }

    fn of_space(spec: &'a StateSpaceSpec<Vector>) -> Self {
        let vectors = spec.groups * spec.state_dim;
        let (least, most) = spec.time_limit;
        Self {
            form: Recurrence::StateSpace,
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
        }
    }
}

impl GpuBackend {
    pub(super) fn convolve(
        &mut self,
        (taps, bias): (&Vector, Option<&Vector>),
        [channels, kernel]: [usize; 2],
        (step, rows): (&Step, Range<usize>),
        x: &Buffer,
        (state, numbers): (&Memory, usize),
    ) -> Outcome {
        has_no_drafts(step)?;
        fits("the taps of a convolution", kernel, MAX_TAPS, "at most 16")?;
        let tables = self.tables()?;
        let arguments = [
            rows.start as u32,
            rows.end as u32,
            x.stride() as u32,
            channels as u32,
            kernel as u32,
            tables.sequences,
            numbers as u32,
            u32::from(bias.is_some()),
        ];
        let bias = bias.map_or(&self.nothing, |bias| &bias.memory);
        let buffers = [&tables.memory, &taps.memory, bias, state, &x.memory];
        let groups = [channels.div_ceil(64) as u32, tables.sequence_count, 1];
        self.device.dispatch(&Kernel::ShortConv, &buffers, &arguments, groups)
    }

    pub(super) fn convolve_gated(
        &mut self,
        spec: &GatedConvSpec<Vector>,
        (step, rows): (&Step, Range<usize>),
        x: &Buffer,
        (state, numbers): (&Memory, usize),
        out: &Buffer,
    ) -> Outcome {
        has_no_drafts(step)?;
        fits("the taps of a convolution", spec.kernel, MAX_TAPS, "at most 16")?;
        let tables = self.tables()?;
        let arguments = [
            rows.start as u32,
            rows.end as u32,
            x.stride() as u32,
            out.stride() as u32,
            spec.channels as u32,
            spec.kernel as u32,
            tables.sequences,
            numbers as u32,
        ];
        let buffers = [&tables.memory, &spec.taps.memory, &x.memory, state, &out.memory];
        let groups = [spec.channels.div_ceil(64) as u32, tables.sequence_count, 1];
        self.device.dispatch(&Kernel::GatedConv, &buffers, &arguments, groups)
    }

    pub(super) fn apply_delta_rule(
        &mut self,
        spec: &DeltaSpec<Vector>,
        rows: Range<usize>,
        (qkv, gates): (&Buffer, &Buffer),
        state: (&Memory, usize),
        out: &Buffer,
    ) -> Outcome {
        self.recur(&Heads::of_delta(spec, Recurrence::Delta), rows, (qkv, gates), (None, 0), state, out)
    }

    pub(super) fn apply_channel_delta_rule(
        &mut self,
        spec: &DeltaSpec<Vector>,
        rows: Range<usize>,
        [qkv, beta, alpha]: [&Buffer; 3],
        state: (&Memory, usize),
        out: &Buffer,
    ) -> Outcome {
        let heads = Heads::of_delta(spec, Recurrence::ChannelDelta);
        let times = (Some(&alpha.memory), alpha.stride());
        self.recur(&heads, rows, (qkv, beta), times, state, out)
    }

    pub(super) fn apply_state_space(
        &mut self,
        spec: &StateSpaceSpec<Vector>,
        rows: Range<usize>,
        (x, times): (&Buffer, &Buffer),
        state: (&Memory, usize),
        out: &Buffer,
    ) -> Outcome {
        let skips = (Some(&spec.skip.memory), 0);
        self.recur(&Heads::of_space(spec), rows, (x, times), skips, state, out)
    }

    /// `more` is what only some forms read: decays of columns with the distance of their rows, or
    /// the heads' factors of their inputs.
    fn recur(
        &mut self,
        of: &Heads<'_>,
        rows: Range<usize>,
        (x, gates): (&Buffer, &Buffer),
        (more, more_stride): (Option<&Memory>, usize),
        (state, numbers): (&Memory, usize),
        out: &Buffer,
    ) -> Outcome {
        fits("the width of a key", of.key_dim, MAX_KEY_COLUMNS, "at most 512")?;
        let tables = self.tables()?;
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
            more_stride,
        ]
        .map(|number| number as u32);
        let numbers = [of.unit_eps, of.limits[0], of.limits[1]].map(f32::to_bits);
        let arguments = [&sizes[..], &numbers].concat();
        let mut buffers = vec![
            &tables.memory,
            &of.rates.memory,
            &of.biases.memory,
            &x.memory,
            &gates.memory,
            state,
            &out.memory,
        ];
        buffers.extend(more);
        let parts = of.value_dim.div_ceil(STATE_COLUMNS) as u32;
        let groups = [of.heads as u32, tables.sequence_count, parts];
        self.device.dispatch(&Kernel::Recurrence(of.form), &buffers, &arguments, groups)
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
        for cache in &caches.all {
            let Cache::State { numbers, data } = cache else { continue };
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
        let places = caches.places(part);
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
        let places = caches.places(part);
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
