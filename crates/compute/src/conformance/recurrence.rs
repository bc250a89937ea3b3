//! The gated delta rule and its states.

use super::data::{Piece, SLOTS, columns, filled, moved, step, workload};
use super::{Suite, Work};
use crate::backend::{Backend, CacheShape, ComputeError, Decays, DeltaSpec, HeadSharing, KvFormat, Norm};

struct Delta<'a> {
    spec: &'a DeltaSpec<Vec<f32>>,
    /// By sequence, `[positions][width]`.
    qkv: &'a [Vec<f32>],
    gates: &'a [Vec<f32>],
    z: &'a [Vec<f32>],
}

impl Delta<'_> {
    fn step<B: Backend>(
        &self,
        backend: &mut B,
        (spec, pieces): (&DeltaSpec<B::Vector>, &[Piece]),
        caches: &mut B::Caches,
    ) -> Result<Vec<f32>, ComputeError> {
        let step = step(pieces, SLOTS + 1);
        let rows = |of_slot: &[Vec<f32>], width: usize| -> Vec<f32> {
            // The copied sequence continues with the inputs of the original.
            let of = |p: &Piece| &of_slot[p.slot % SLOTS][p.start * width..(p.start + p.tokens) * width];
            pieces.iter().flat_map(of).copied().collect()
        };
        let (channels, gate_width) = (spec.channels(), 2 * spec.value_heads);
        let width = spec.value_heads * spec.value_dim;
        let mut qkv = filled(backend, &rows(self.qkv, channels), channels)?;
        let gates = filled(backend, &rows(self.gates, gate_width), gate_width)?;
        let z = filled(backend, &rows(self.z, width), width)?;
        let mut out = backend.buffer(step.rows(), width)?;
        for rows in backend.begin(&step, &[])? {
            backend.short_conv(spec, &step, rows.clone(), &mut qkv, (caches, 0))?;
            backend.delta_rule(spec, &step, rows.clone(), (&qkv, &gates), (caches, 0), &mut out)?;
            backend.norm_gated(spec, &z, rows, &mut out)?;
        }
        columns(backend, &out, 0..step.rows(), (width, width))
    }
}

impl Work for Delta<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let shape =
            CacheShape { format: KvFormat::F16, caches: vec![spec.cache()], blocks: 1, slots: SLOTS + 1 };
        let mut caches = backend.caches(&shape)?;
        let mut results = Vec::new();
        for pieces in workload() {
            results.extend(self.step(backend, (&spec, &pieces), &mut caches)?);
        }
        // Slot 0 is at position 73. A copy of it continues as it would have.
        backend.copy_slot(&mut caches, 0, SLOTS)?;
        caches = moved(backend, &shape, caches)?;
        for slot in [SLOTS, 0] {
            let piece = Piece { slot, start: 73, tokens: 9 };
            results.extend(self.step(backend, (&spec, &[piece]), &mut caches)?);
        }
        Ok(results)
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn recurrence(&mut self) {
        use HeadSharing::{Grouped, Tiled};
        for (key_heads, value_heads, sharing, key_dim, value_dim, kernel) in [
            (1, 1, Grouped, 16, 16, 4),
            (2, 6, Grouped, 24, 20, 4),
            (2, 6, Tiled, 24, 20, 4),
            (4, 4, Grouped, 64, 48, 2),
            (3, 3, Tiled, 8, 37, 3),
        ] {
            let channels = 2 * key_heads * key_dim + value_heads * value_dim;
            let spec = DeltaSpec {
                key_heads,
                value_heads,
                sharing,
                key_dim,
                value_dim,
                kernel,
                taps: self.random.numbers(channels * kernel),
                // Large enough to be noticed.
                unit_eps: 0.25,
                decays: Decays::Softplus,
                decay: self.random.numbers(value_heads),
                decay_bias: self.random.numbers(value_heads),
                norm: Norm { weight: self.random.numbers(value_dim), eps: 1e-6 },
            };
            let mut of_slots = |width: usize| -> Vec<Vec<f32>> {
                (0..SLOTS).map(|_| self.random.numbers(120 * width)).collect()
            };
            let (qkv, gates) = (of_slots(channels), of_slots(2 * value_heads));
            let z = of_slots(value_heads * value_dim);
            let case = format!(
                "delta rule of {value_heads} heads of {key_dim} × {value_dim} on {key_heads} keys, {sharing:?}, {kernel} taps"
            );
            let work = Delta { spec: &spec, qkv: &qkv, gates: &gates, z: &z };
            self.compare(case, self.limits.rows, work);
        }
    }
}
