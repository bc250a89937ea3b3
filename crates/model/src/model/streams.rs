//! Several residual streams. Layer parts read and write them by weights computed from the streams.

use std::ops::Range;

use thunder_compute::{Backend, ComputeError, LinearInput, Norm, StreamSpec};

use super::{Pass, disjoint};

/// How the streams are read, and written.
pub(super) struct Connection<B: Backend> {
    pub spec: StreamSpec,
    /// Computes the streams' weights. Every rank has the whole matrix, so that weights need not be
    /// sent.
    pub matrix: B::Matrix,
    /// A norm of all streams as one vector, without weights.
    pub unit: Norm<B::Vector>,
}

/// A layer part's connection to the streams. The part reads the norm of the weighted streams, and
/// adds its result to a residual stream that is zero.
pub(super) struct PartConnection<B: Backend> {
    pub streams: Connection<B>,
    /// Of what the part reads.
    pub norm: Norm<B::Vector>,
    pub normed_buffer: usize,
    pub weights_buffer: usize,
    /// The weights by which the part reads: its own, or those of the previous part.
    pub reading_buffer: usize,
}

impl<B: Backend> Connection<B> {
    /// Makes the weights of these rows' streams.
    fn weigh(
        &self,
        backend: &mut B,
        rows: Range<usize>,
        streams: &B::Buffer,
        [normed, weights]: [&mut B::Buffer; 2],
    ) -> Result<(), ComputeError> {
        backend.rms_norm(streams, rows.clone(), &self.unit, normed)?;
        backend.linear(LinearInput::Precise(normed), rows.clone(), &self.matrix, weights)?;
        backend.weigh_streams(&self.spec, rows, weights)
    }

    /// Collapses the first `rows` rows of the streams to `out`, for the last norm.
    pub fn collapse_last(
        &self,
        backend: &mut B,
        streams: &B::Buffer,
        rows: usize,
        out: &mut B::Buffer,
    ) -> Result<(), ComputeError> {
        let (height, width) = backend.extent(streams);
        let mut normed = backend.scratch(height, width)?;
        let mut weights = backend.scratch(height, self.spec.columns())?;
        self.weigh(backend, 0..rows, streams, [&mut normed, &mut weights])?;
        backend.collapse_streams(&self.spec, (&weights, streams), 0..rows, out)?;
        backend.give_back(weights);
        backend.give_back(normed);
        Ok(())
    }
}

/// A sum of `count` streams by weights that are given.
fn given(count: usize) -> StreamSpec {
    StreamSpec { streams: count, scale: [1.0; 3], base: vec![0.0; count], iterations: 0, eps: 0.0 }
}

/// The mean of the first `rows` rows' streams, for the last norm.
pub(super) fn mean<B: Backend>(
    backend: &mut B,
    (streams, count): (&B::Buffer, usize),
    rows: usize,
    out: &mut B::Buffer,
) -> Result<(), ComputeError> {
    let mut weights = backend.scratch(rows, count)?;
    backend.write(&vec![1.0 / count as f32; rows * count], &mut weights)?;
    backend.collapse_streams(&given(count), (&weights, streams), 0..rows, out)?;
    backend.give_back(weights);
    Ok(())
}

/// Weights by which the part after the one that made them reads the streams.
pub(super) struct Carried {
    /// The buffer of feed-forwards.
    pub buffer: usize,
}

impl Carried {
    /// Before the first part, which reads the first stream.
    pub fn begin<B: Backend>(
        &self,
        rows: usize,
        backend: &mut B,
        inner: &mut [B::Buffer],
    ) -> Result<(), ComputeError> {
        let weights = &mut inner[self.buffer];
        let (_, columns) = backend.extent(weights);
        let mut first = vec![0.0; rows * columns];
        first.iter_mut().step_by(columns).for_each(|weight| *weight = 1.0);
        backend.write(&first, weights)
    }

    /// Collapses the streams of `rows` for the last norm. `streams` contains them.
    pub fn collapse_last<B: Backend>(
        &self,
        backend: &mut B,
        (streams, count): (&B::Buffer, usize),
        (rows, inner): (&[u32], &[B::Buffer]),
        out: &mut B::Buffer,
    ) -> Result<(), ComputeError> {
        let (_, columns) = backend.extent(&inner[self.buffer]);
        let mut weights = backend.scratch(rows.len(), columns)?;
        backend.take_rows(&inner[self.buffer], rows, &mut weights)?;
        backend.collapse_streams(&given(count), (&weights, streams), 0..rows.len(), out)?;
        backend.give_back(weights);
        Ok(())
    }
}

impl<B: Backend> PartConnection<B> {
    /// Before the part: the norm of what it reads is in [`Pass::normed`], and the residual stream
    /// is zero.
    pub fn read(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, residual, streams, normed, inner, .. } = pass;
        let [all_normed, weights] = disjoint(inner, [self.normed_buffer, self.weights_buffer]);
        self.streams.weigh(*backend, rows.clone(), streams, [all_normed, weights])?;
        let reading = &inner[self.reading_buffer];
        backend.collapse_streams(&self.streams.spec, (reading, streams), rows.clone(), residual)?;
        backend.rms_norm(residual, rows.clone(), &self.norm, normed)?;
        backend.clear(rows, residual)
    }

    /// After the part, with its sum complete: mixes the streams and adds the part's result.
    pub fn write(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, residual, streams, inner, .. } = pass;
        let weights = &inner[self.weights_buffer];
        backend.expand_streams(&self.streams.spec, (weights, residual), rows, streams)
    }
}
