//! The gated delta rule and its states.

use std::ops::Range;

use thunder_compute::{CachePart, ComputeError, DeltaSpec};

use super::Outcome;
use super::rows::fits;
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Memory, Vector};
use crate::caches::{Cache, Caches};
use crate::kernel::Kernel;

/// Maximum taps of a convolution, and maximum columns of a key, that kernels have space for.
const MAX_TAPS: usize = 16;
const MAX_KEY_COLUMNS: usize = 512;

impl GpuBackend {
    pub(super) fn convolve(
        &mut self,
        spec: &DeltaSpec<Vector>,
        rows: Range<usize>,
        x: &Buffer,
        (state, numbers): (&Memory, usize),
    ) -> Outcome {
        fits("the taps of a convolution", spec.kernel, MAX_TAPS, "at most 16")?;
        let tables = self.tables()?;
        let arguments = [
            rows.start as u32,
            rows.end as u32,
            x.stride() as u32,
            spec.channels() as u32,
            spec.kernel as u32,
            tables.sequences,
            numbers as u32,
        ];
        let buffers = [&tables.memory, &spec.taps.memory, state, &x.memory];
        let groups = [spec.channels().div_ceil(64) as u32, tables.sequence_count, 1];
        self.device.dispatch(&Kernel::ShortConv, &buffers, &arguments, groups)
    }

    pub(super) fn apply_delta_rule(
        &mut self,
        spec: &DeltaSpec<Vector>,
        rows: Range<usize>,
        (qkv, gates): (&Buffer, &Buffer),
        (state, numbers): (&Memory, usize),
        out: &Buffer,
    ) -> Outcome {
        fits("the width of a key", spec.key_dim, MAX_KEY_COLUMNS, "at most 512")?;
        let tables = self.tables()?;
        let arguments = [
            rows.start,
            rows.end,
            qkv.stride(),
            gates.stride(),
            out.stride(),
            spec.key_heads,
            spec.value_heads,
            spec.key_dim,
            spec.value_dim,
            tables.sequences as usize,
            numbers,
            spec.conv_numbers(),
            spec.sharing_run(),
        ]
        .map(|number| number as u32);
        let arguments = [&arguments[..], &[spec.unit_eps.to_bits()]].concat();
        let buffers = [
            &tables.memory,
            &spec.decay.memory,
            &spec.decay_bias.memory,
            &qkv.memory,
            &gates.memory,
            state,
            &out.memory,
        ];
        let groups = [spec.value_heads as u32, tables.sequence_count, 1];
        self.device.dispatch(&Kernel::DeltaRule, &buffers, &arguments, groups)
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
