//! The layer that predicts further tokens: see [`crate::spec::AheadSpec`].
//!
//! At a position it reads the model's hidden state after the last norm, and the token that follows.
//! What it says of its own keys and values is kept at the same position, in a cache of its own.

use std::ops::Range;

use thunder_compute::{Backend, ComputeError, Norm, Step};

use super::{Buffers, Layer, Model, Pass, normed};

/// The layer that predicts further tokens, on a rank that computes logits.
pub(super) struct Ahead<B: Backend> {
    pub layer: Layer<B>,
    pub embedding_norm: Norm<B::Vector>,
    pub hidden_norm: Norm<B::Vector>,
    /// The projection's columns for the embedding, and those for the hidden state.
    pub of_embedding: B::Matrix,
    pub of_hidden: B::Matrix,
    /// Before the output head.
    pub output_norm: Norm<B::Vector>,
    /// Its input for the next position is normed by `output_norm`.
    pub chains_normed: bool,
}

impl<B: Backend> Model<B> {
    /// True if this rank has the layer that predicts further tokens.
    pub fn predicts_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Makes the layer that predicts further tokens read the step's rows, after [`Model::forward`]
    /// of `step` and after its results were read. `next` has the token after each row's. Where it
    /// is unknown, a later [`Model::predict`] at the row's position compensates. All ranks that
    /// have the layer call this together.
    ///
    /// # Errors
    /// When a peer is lost or the backend fails.
    pub fn read_ahead(&mut self, backend: &mut B, step: &Step, next: &[u32]) -> Result<(), ComputeError> {
        let Some(head) = &self.head else { unreachable!("the layer is where the output head is") };
        let parts = backend.begin(step, &self.ropes)?;
        let mut hidden = self.stream_like(backend, step)?;
        backend.rms_norm(&self.buffers.residual, 0..step.rows(), &head.norm, &mut hidden)?;
        self.pass_ahead(backend, parts, (step, next), hidden)
    }

    /// Predicts further tokens. A row's token follows its position, and `hidden`, `[rows, hidden]`,
    /// has the hidden states at the positions: from [`Model::read_normed`], or for the next
    /// position from [`Model::read_chained`]. The predictions of the rows of `step` that want
    /// logits are then read like the model's logits. All ranks that have the layer call this
    /// together.
    ///
    /// # Errors
    /// When a peer is lost or the backend fails.
    pub fn predict(&mut self, backend: &mut B, step: &Step, hidden: &[f32]) -> Result<(), ComputeError> {
        let parts = backend.begin(step, &self.ropes)?;
        let mut states = self.stream_like(backend, step)?;
        backend.write(hidden, &mut states)?;
        self.pass_ahead(backend, parts, (step, &step.tokens), states)?;
        let (Some(ahead), Some(head)) = (&self.ahead, &self.head) else { return Ok(()) };
        if step.logit_rows.is_empty() {
            return Ok(());
        }
        let Buffers { residual, last, logits, .. } = &mut self.buffers;
        backend.take_rows(residual, &step.logit_rows, last)?;
        let matrix = head.matrix.as_ref().or(self.embedding.as_ref().map(|table| &table.matrix));
        match matrix {
            Some(matrix) => {
                let x = normed::<B>(last, &ahead.output_norm);
                backend.linear_largest(x, step.logit_rows.len(), matrix, logits)
            }
            None => Ok(()),
        }
    }

    /// After [`Model::predict`] of `step`: substitutes for the hidden states at the positions after
    /// those of the rows that want logits. `out` becomes `[logit rows, hidden]`.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn read_chained(&self, backend: &mut B, step: &Step, out: &mut Vec<f32>) -> Result<(), ComputeError> {
        let last = &self.buffers.last;
        let ((height, width), rows) = (backend.extent(last), 0..step.logit_rows.len());
        out.resize(rows.len() * width, 0.0);
        let Some(ahead) = self.ahead.as_ref().filter(|ahead| ahead.chains_normed) else {
            return backend.read(last, rows, out);
        };
        let mut normed = backend.scratch(height, width)?;
        backend.rms_norm(last, rows.clone(), &ahead.output_norm, &mut normed)?;
        backend.read(&normed, rows, out)?;
        backend.give_back(normed);
        Ok(())
    }

    /// A buffer for the step's rows, as wide as the residual stream, which may have fewer rows now.
    fn stream_like(&self, backend: &mut B, step: &Step) -> Result<B::Buffer, ComputeError> {
        let (height, width) = backend.extent(&self.buffers.residual);
        backend.scratch(height.max(step.rows()), width)
    }

    /// Computes the layer's output, in the residual stream, from hidden states and the tokens that
    /// follow them.
    fn pass_ahead(
        &mut self,
        backend: &mut B,
        parts: [Range<usize>; 2],
        (step, next): (&Step, &[u32]),
        hidden: B::Buffer,
    ) -> Result<(), ComputeError> {
        let (mut embedded, mut sum) = (self.stream_like(backend, step)?, self.stream_like(backend, step)?);
        let (Some(ahead), Some(table)) = (&self.ahead, &self.embedding) else {
            unreachable!("a rank with the layer has the embedding")
        };
        let Buffers { residual, streams, shared_norm, sums, inner, .. } = &mut self.buffers;
        let rows = 0..step.rows();
        backend.embed(&table.matrix, next, table.rows.start as u32, 1.0, &mut embedded)?;
        backend.all_reduce(&mut embedded, rows.clone())?;
        let of_hidden = normed::<B>(&hidden, &ahead.hidden_norm);
        backend.linear(of_hidden, rows.clone(), &ahead.of_hidden, residual)?;
        let of_embedding = normed::<B>(&embedded, &ahead.embedding_norm);
        backend.linear(of_embedding, rows.clone(), &ahead.of_embedding, &mut sum)?;
        backend.add(&sum, rows, residual)?;
        [hidden, embedded, sum].into_iter().for_each(|buffer| backend.give_back(buffer));
        let parts = || parts.iter().filter(|rows| !rows.is_empty()).cloned();
        let mut pass = Pass {
            backend,
            step,
            residual,
            streams,
            normed: shared_norm,
            sums,
            inner,
            caches: &mut self.caches,
        };
        for rows in parts() {
            ahead.layer.mix(false, rows, &mut pass)?;
        }
        for rows in parts() {
            ahead.layer.feed(false, rows, &mut pass)?;
        }
        let Pass { backend, residual, .. } = pass;
        backend.settle(residual)
    }
}
