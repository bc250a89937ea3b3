//! The parts of an encoder around its layers: vectors that are added to the embedding, and the
//! computation of a text's vector or score from hidden states.

use std::ops::Range;

use thunder_compute::{Backend, ComputeError, Curve, LayerNorm, LinearInput, Norm, Step, StepSequence};

use crate::pooling::Pooling;

/// An encoder's parts around its layers.
pub(super) struct Encoder<B: Backend> {
    /// Rows of the embedding; tokens of later types have ids from there on.
    pub vocab: usize,
    /// On the first stage.
    pub input: Option<EncoderInput<B>>,
    /// On the last stage.
    pub head: Option<EncoderHead<B>>,
}

/// Vectors that are added to the embedding.
pub(super) struct EncoderInput<B: Backend> {
    /// Vectors of positions, and the row of a text's first token.
    pub positions: Option<(B::Matrix, usize)>,
    /// Vectors of token types.
    pub types: Option<B::Matrix>,
    pub norm: Option<LayerNorm>,
}

/// From hidden states to a text's result.
pub(super) struct EncoderHead<B: Backend> {
    /// The norm subtracts the mean first.
    pub centered: bool,
    /// Of hidden states.
    pub norm: Option<Norm<B::Vector>>,
    pub pooling: Pooling,
    /// Products of the text's vector, one after the other.
    pub dense: Vec<Dense<B>>,
}

/// A dense layer that is applied to a text's vector.
pub(super) struct Dense<B: Backend> {
    pub matrix: B::Matrix,
    pub curve: Option<Curve>,
    /// Its results.
    pub out: B::Buffer,
}

impl<B: Backend> Encoder<B> {
    /// The step's ids in the embedding, without their types.
    pub fn ids(&self, step: &Step) -> Vec<u32> {
        step.tokens.iter().map(|token| token % self.vocab as u32).collect()
    }
}

impl<B: Backend> EncoderInput<B> {
    /// Adds vectors of positions and types to the embedding, and norms the sum.
    pub fn add(
        &self,
        vocab: usize,
        (backend, step): (&mut B, &Step),
        residual: &mut B::Buffer,
    ) -> Result<(), ComputeError> {
        let ((height, width), rows) = (backend.extent(residual), 0..step.rows());
        let mut vectors = backend.scratch(height, width)?;
        if let Some((table, first)) = &self.positions {
            let positions = |of: &StepSequence| of.start + first..of.end() + first;
            let ids: Vec<u32> =
                step.sequences.iter().flat_map(positions).map(|position| position as u32).collect();
            backend.embed(table, &ids, 0, 1.0, &mut vectors)?;
            backend.add(&vectors, rows.clone(), residual)?;
        }
        if let Some(table) = &self.types {
            let ids: Vec<u32> = step.tokens.iter().map(|token| token / vocab as u32).collect();
            backend.embed(table, &ids, 0, 1.0, &mut vectors)?;
            backend.add(&vectors, rows.clone(), residual)?;
        }
        backend.give_back(vectors);
        match &self.norm {
            Some(norm) => backend.layer_norm(norm, rows, residual),
            None => Ok(()),
        }
    }
}

impl<B: Backend> EncoderHead<B> {
    /// Computes one vector for each sequence that wants a result, in `pooled`, and its products.
    pub fn forward(
        &mut self,
        (backend, step): (&mut B, &Step),
        hidden: &mut B::Buffer,
        pooled: &mut B::Buffer,
    ) -> Result<(), ComputeError> {
        match &self.norm {
            Some(norm) => {
                let (height, width) = backend.extent(hidden);
                if self.centered {
                    backend.center(std::slice::from_ref(&(0..width)), 0..step.rows(), hidden)?;
                }
                let mut normed = backend.scratch(height, width)?;
                backend.rms_norm(hidden, 0..step.rows(), norm, &mut normed)?;
                self.pool((backend, step), &normed, pooled)?;
                backend.give_back(normed);
            }
            None => self.pool((backend, step), hidden, pooled)?,
        }
        let mut x: &B::Buffer = pooled;
        for Dense { matrix, curve, out } in &mut self.dense {
            let rows = 0..step.logit_rows.len();
            backend.linear(LinearInput::Precise(x), rows.clone(), matrix, out)?;
            if let Some(curve) = curve {
                backend.bend(*curve, rows, out)?;
            }
            x = out;
        }
        Ok(())
    }

    fn pool(
        &self,
        (backend, step): (&mut B, &Step),
        hidden: &B::Buffer,
        pooled: &mut B::Buffer,
    ) -> Result<(), ComputeError> {
        let wanted = || {
            step.logit_rows.iter().filter_map(|row| {
                step.sequences.iter().find(|sequence| sequence.rows.contains(&(*row as usize)))
            })
        };
        match &self.pooling {
            Pooling::Mean => {
                let texts = wanted().map(|sequence| sequence.rows.clone());
                mean(backend, (hidden, step.rows()), texts, pooled)
            }
            Pooling::FirstToken => {
                let first: Vec<u32> = wanted().map(|sequence| sequence.rows.start as u32).collect();
                backend.take_rows(hidden, &first, pooled)
            }
            Pooling::LastToken => backend.take_rows(hidden, &step.logit_rows, pooled),
            Pooling::Other(name) => unreachable!("opening a folder refuses the pooling {name}"),
        }
    }

    /// Where the results of [`EncoderHead::forward`] are.
    pub fn results<'a>(&'a self, pooled: &'a B::Buffer) -> &'a B::Buffer {
        self.dense.last().map_or(pooled, |dense| &dense.out)
    }
}

/// `out[i]` = the mean of the rows `texts[i]` of the first `rows` rows of `x`.
fn mean<B: Backend>(
    backend: &mut B,
    (x, rows): (&B::Buffer, usize),
    texts: impl Iterator<Item = Range<usize>>,
    out: &mut B::Buffer,
) -> Result<(), ComputeError> {
    let (_, width) = backend.extent(x);
    let mut all = vec![0.0; rows * width];
    backend.read(x, 0..rows, &mut all)?;
    let mut means = Vec::new();
    for text in texts {
        let start = means.len();
        means.resize(start + width, 0.0);
        let count = text.len() as f32;
        for row in all[text.start * width..text.end * width].chunks_exact(width) {
            means[start..].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        means[start..].iter_mut().for_each(|sum| *sum /= count);
    }
    backend.write(&means, out)
}
