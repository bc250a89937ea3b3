//! Latent attention on small data, as in [`super::families`].

use thunder_compute::{Backend, ComputeError, KvFormat, LatentSpec, Norm, Rope};

use super::families::{cache_shape, compared_rows, filled, format, last_rows, steps};
use super::{Family, Numbers, compress, select};
use crate::backend::GpuBackend;
use crate::kernel::{AttendShared, Attended, UNIT};

/// Shapes of latent attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct LatentShape {
    heads: usize,
    rank: usize,
    rotated: usize,
    plain: usize,
}

impl LatentShape {
    /// Widths for which no kernel that shares vectors has a form.
    pub const ODD: Self = Self { heads: 2, rank: 18, rotated: 6, plain: 5 };

    /// More heads than a workgroup has. One of the forms attends without rotated parts.
    pub fn of(form: AttendShared) -> Self {
        let rotated = if form == form.with_fewest_heads() { 0 } else { 8 * UNIT };
        Self { heads: form.heads + 1, rank: form.columns - UNIT, rotated, plain: 20 }
    }

    pub fn spec<B: Backend>(
        self,
        backend: &mut B,
        (numbers, rope): (&mut Numbers, Option<usize>),
    ) -> Result<LatentSpec<B::Vector>, ComputeError> {
        let Self { heads, rank, rotated, plain } = self;
        let norm = Norm { weight: numbers.take(rank), eps: 1e-6 };
        let spec = LatentSpec { heads, rank, rotated, plain, scale: 0.3, norm, rope };
        spec.try_map(&mut |values| backend.vector(&values))
    }

    /// Columns of absorbed queries, of queries, and of compressed vectors with their rotated parts.
    pub fn widths(self) -> [usize; 3] {
        [self.heads * self.rank, self.heads * (self.plain + self.rotated), self.rank + self.rotated]
    }
}

/// Results of attention of the last rows of each step.
pub(super) fn run<B: Backend>(
    backend: &mut B,
    shape: LatentShape,
    format: KvFormat,
) -> Result<Vec<Vec<f32>>, ComputeError> {
    let mut numbers = Numbers(3);
    let spec = shape.spec(backend, (&mut numbers, Some(0)))?;
    let inverse_frequencies = (0..spec.rotated / 2).map(|pair| 0.3f32.powi(pair as i32)).collect();
    let rope = Rope { inverse_frequencies, amplitude: 1.0, interleaved: true };
    let mut caches = backend.caches(&cache_shape(format, spec.cache()))?;
    let mut results = Vec::new();
    for step in steps() {
        let mut random = |width: usize| (numbers.take(step.rows() * width), width);
        let [absorbed, queries, latent] = shape.widths().map(&mut random);
        let absorbed = filled(backend, &absorbed.0, absorbed.1)?;
        let mut queries = filled(backend, &queries.0, queries.1)?;
        let mut latent = filled(backend, &latent.0, latent.1)?;
        let mut out = backend.buffer(step.rows(), shape.widths()[0])?;
        let rows = 0..step.rows();
        backend.begin(&step, std::slice::from_ref(&rope))?;
        let inputs = (&mut queries, &mut latent);
        if results.is_empty() {
            backend.prepare_latent(&spec, &step, rows.clone(), inputs.0, inputs.1)?;
            backend.append_latent(&spec, &step, rows.clone(), &latent, (&mut caches, 0))?;
        } else {
            backend.prepare_and_append_latent(&spec, &step, rows.clone(), inputs, (&mut caches, 0))?;
        }
        let rows = compared_rows(&step);
        backend.attend_latent(&spec, &step, rows, &absorbed, &queries, (&mut caches, 0), &mut out)?;
        results.push(last_rows(backend, &out, &step)?);
    }
    Ok(results)
}

/// Results of heads that attend together.
pub(super) fn shared<B: Backend>(backend: &mut B, form: AttendShared) -> Result<Vec<Vec<f32>>, ComputeError> {
    let shape = LatentShape::of(form);
    match form.tokens {
        Attended::All => run(backend, shape, format(form.int8)),
        Attended::Selected => Ok(select::run(backend, shape, form.int8)?.into_iter().flatten().collect()),
        Attended::Both => compress::run(backend, shape.heads, form.columns, form.int8),
    }
}

/// Compares the bits of heads' results with those of the form with the fewest heads, because the
/// number of rows decides which one is used.
pub(super) fn same_bits(
    backend: &mut GpuBackend,
    form: AttendShared,
) -> Result<Result<(), String>, ComputeError> {
    let few = form.with_fewest_heads();
    if form == few {
        return Ok(Ok(()));
    }
    let found = shared(backend, form)?;
    backend.proving = Some(Family::Shared(few));
    let expected = shared(backend, form)?;
    backend.proving = Some(Family::Shared(form));
    Ok(if found == expected { Ok(()) } else { Err(format!("its bits are not those of {} heads", few.heads)) })
}
