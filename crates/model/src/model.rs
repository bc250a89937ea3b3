//! One rank's part of a model: its weights, packed, and the pass through them.

mod adapters;
mod ahead;
mod both;
mod channel_delta;
mod compressed;
mod encoder;
mod engram;
mod feed_forward;
mod gated_conv;
mod layer_inputs;
mod load;
mod mix;
mod mixer;
mod norms;
mod place;
mod selection;
mod shared;
mod state_space;
mod streams;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::ops::Range;

use thunder_compute::{Backend, CachePart, Choices, ComputeError, Largest, Norm, Rope, Step};

use ahead::Ahead;
use encoder::Encoder;
use engram::Engram;
use feed_forward::FeedForward;
use layer_inputs::{LayerInput, LayerInputs};
pub use load::{
    Capacity, FileRanges, Progress, ShardFootprint, check_present, shard_footprints, shard_ranges,
};
use mix::Mix;
use mixer::Mixer;
use norms::{After, Before, Norms, normed};
pub use place::Place;
use place::Watch;
use streams::{Carried, Connection, PartConnection};

/// The weights, caches and buffers of one rank.
pub struct Model<B: Backend> {
    ropes: Vec<Rope>,
    /// True if norms of the residual stream subtract its mean first.
    centered: bool,
    embedding_scale: f32,
    /// Logits become `cap * tanh(logit / cap)`.
    logit_cap: Option<f32>,
    /// Maximum rows that have logits.
    logit_rows: usize,
    /// Residual streams.
    streams: usize,
    /// If parts read them by weights of the part before.
    carried: Option<Carried>,
    embedding: Option<Vocabulary<B>>,
    inputs: Option<LayerInputs<B>>,
    layers: Vec<Layer<B>>,
    /// The number of `layers[0]` in the whole model.
    first_layer: usize,
    head: Option<Head<B>>,
    /// If the model is an encoder; then it has no `head`.
    encoder: Option<Encoder<B>>,
    /// Predicts further tokens.
    ahead: Option<Ahead<B>>,
    /// Number of sums of the residual stream that were put aside by the previous stage, and by the
    /// end of this stage.
    sums: [usize; 2],
    caches: B::Caches,
    buffers: Buffers<B>,
}

/// Rows of an embedding table.
struct Vocabulary<B: Backend> {
    matrix: B::Matrix,
    rows: Range<usize>,
}

/// From the residual stream to logits.
struct Head<B: Backend> {
    mix: Option<Mix>,
    norm: Norm<B::Vector>,
    /// Set if there are several residual streams; the norm has its own weights.
    connection: Option<Connection<B>>,
    /// `None`: the embedding serves.
    matrix: Option<B::Matrix>,
    rows: Range<usize>,
}

/// A mixer and a feed-forward, each added to the residual stream.
struct Layer<B: Backend> {
    /// Multiplies the residual stream after the layer.
    scale: f32,
    /// Vectors added to the residual streams before the mixer.
    engram: Option<Engram<B>>,
    /// What the layer does with its input.
    input: Option<LayerInput<B>>,
    /// Of mixer and feed-forward, if there are several residual streams.
    connections: Option<[PartConnection<B>; 2]>,
    /// The norm that both parts read, if they share one.
    shared_norm: Option<Norm<B::Vector>>,
    /// Of what the mixer reads, and of what the feed-forward reads.
    mixes: Option<[Mix; 2]>,
    mixer_norms: Norms<B>,
    mixer: Mixer<B>,
    feed_forward_norms: Norms<B>,
    feed_forward: FeedForward<B>,
}

/// Activations of a step.
struct Buffers<B: Backend> {
    residual: B::Buffer,
    /// The residual streams side by side, if there are several.
    streams: B::Buffer,
    /// Norms that a layer's parts share, or mixes of the residual stream's sums.
    shared_norm: B::Buffer,
    /// Sums of the residual stream that were put aside.
    sums: Vec<B::Buffer>,
    last: B::Buffer,
    logits: B::Buffer,
    /// Shared by all layers that use the same role and width.
    inner: Vec<B::Buffer>,
}

/// The data that layers use during a step.
struct Pass<'a, B: Backend> {
    backend: &'a mut B,
    step: &'a Step,
    residual: &'a mut B::Buffer,
    streams: &'a mut B::Buffer,
    normed: &'a mut B::Buffer,
    sums: &'a mut [B::Buffer],
    inner: &'a mut [B::Buffer],
    caches: &'a mut B::Caches,
}

impl<B: Backend> Layer<B> {
    /// The place of the feed-forward's weights of residual streams, if the next layer reads by
    /// them.
    fn carried(&self) -> Option<Carried> {
        let [mixer, feed_forward] = self.connections.as_ref()?;
        let is_carried = mixer.reading_buffer != mixer.weights_buffer;
        is_carried.then_some(Carried { buffer: feed_forward.weights_buffer })
    }

    fn mix(&self, centered: bool, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        if matches!(self.mixer, Mixer::None) {
            return Ok(());
        }
        // If an operation reads the stream itself, it would read the mean too.
        let reads_stream = matches!(self.mixer_norms.before, Before::Stream);
        center(centered && !reads_stream, rows.clone(), pass)?;
        if let Some(norm) = &self.shared_norm {
            let Pass { backend, residual, normed, .. } = pass;
            backend.rms_norm(residual, rows.clone(), norm, normed)?;
        }
        if let Some([mix, after]) = &self.mixes {
            mix.apply(rows.clone(), pass)?;
            if after.sums > mix.sums {
                mix.put_aside(rows.clone(), pass)?;
            }
        }
        self.mixer.forward(&self.mixer_norms, rows.clone(), pass)?;
        self.mixer_norms.norm_stream(rows, pass)
    }

    fn feed(&self, centered: bool, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        center(centered && self.shared_norm.is_none(), rows.clone(), pass)?;
        if let Some([_, mix]) = &self.mixes {
            mix.apply(rows.clone(), pass)?;
        }
        self.feed_forward.forward(&self.feed_forward_norms, rows.clone(), pass)?;
        self.feed_forward_norms.norm_stream(rows.clone(), pass)?;
        if let Some(input) = &self.input {
            input.add(rows.clone(), pass)?;
        }
        if self.scale == 1.0 {
            return Ok(());
        }
        let Pass { backend, residual, .. } = pass;
        // Families with a scale apply a norm to what they add, so no sum is pending here.
        let (_, width) = backend.extent(residual);
        backend.scale(0..width, &vec![self.scale; rows.len()], rows, residual)
    }
}

/// Computes a layer part for some rows at a time. A part with a connection has its own residual
/// stream, and its sum is complete before it is mixed with the others.
fn around<B: Backend>(
    connection: Option<&PartConnection<B>>,
    parts: impl Iterator<Item = Range<usize>> + Clone,
    pass: &mut Pass<'_, B>,
    part: impl Fn(Range<usize>, &mut Pass<'_, B>) -> Result<(), ComputeError>,
) -> Result<(), ComputeError> {
    for rows in parts.clone() {
        if let Some(connection) = connection {
            connection.read(rows.clone(), pass)?;
        }
        part(rows, pass)?;
    }
    let Some(connection) = connection else { return Ok(()) };
    pass.backend.settle(pass.residual)?;
    parts.into_iter().try_for_each(|rows| connection.write(rows, pass))
}

/// Subtracts the mean of each row from the residual stream. This changes nothing else, because
/// every reader subtracts the mean.
fn center<B: Backend>(
    centered: bool,
    rows: Range<usize>,
    pass: &mut Pass<'_, B>,
) -> Result<(), ComputeError> {
    let Pass { backend, residual, .. } = pass;
    if !centered {
        return Ok(());
    }
    let (_, width) = backend.extent(residual);
    backend.center(std::slice::from_ref(&(0..width)), rows, residual)
}

/// Several distinct buffers at the same time.
///
/// # Panics
/// When two are the same: buffers of different roles are different.
fn disjoint<T, const N: usize>(buffers: &mut [T], indices: [usize; N]) -> [&mut T; N] {
    match buffers.get_disjoint_mut(indices) {
        Ok(buffers) => buffers,
        Err(_) => unreachable!("buffers of different roles are different"),
    }
}

impl<B: Backend> Model<B> {
    /// Computes a step on this rank's layers. The first stage begins with the step's tokens, the
    /// others with `hidden`, `[rows, stream_width]`, the output of the previous stage. Every rank
    /// of the stage must call this with the same step.
    ///
    /// # Errors
    /// When a peer is lost or the backend fails.
    pub fn forward(
        &mut self,
        backend: &mut B,
        step: &Step,
        hidden: Option<&[f32]>,
    ) -> Result<(), ComputeError> {
        self.forward_watched(backend, step, hidden, None)
    }

    /// Computes a step like [`Model::forward`], and checks the residual stream after each part.
    /// Returns the first part with numbers that are not finite. Every rank of the stage must call
    /// this. Repeating a step changes no keys and values, but advances states.
    ///
    /// # Errors
    /// When a peer is lost or the backend fails.
    pub fn first_not_finite(
        &mut self,
        backend: &mut B,
        step: &Step,
        hidden: Option<&[f32]>,
    ) -> Result<Place, ComputeError> {
        let mut watch = Watch::new();
        self.forward_watched(backend, step, hidden, Some(&mut watch))?;
        Ok(watch.first())
    }

    fn forward_watched(
        &mut self,
        backend: &mut B,
        step: &Step,
        hidden: Option<&[f32]>,
        mut watch: Option<&mut Watch>,
    ) -> Result<(), ComputeError> {
        let Buffers { residual, streams, shared_norm, sums, last, logits, inner } = &mut self.buffers;
        let mut parts = backend.begin(step, &self.ropes)?;
        if self.encoder.is_some() {
            // Tokens attend to later ones, whose keys must exist.
            parts = [0..step.rows(), step.rows()..step.rows()];
        }
        match (&self.embedding, hidden) {
            (_, Some(hidden)) if self.streams > 1 => backend.write(hidden, streams)?,
            (_, Some(hidden)) => {
                let (_, width) = backend.extent(residual);
                let streams = [&mut *residual].into_iter().chain(&mut *sums);
                for (stream, hidden) in streams.zip(hidden.chunks_exact(step.rows() * width)) {
                    backend.write(hidden, stream)?;
                }
            }
            (Some(table), None) => {
                let ids = match &self.encoder {
                    Some(encoder) => Cow::Owned(encoder.ids(step)),
                    None => Cow::Borrowed(&step.tokens[..]),
                };
                backend.embed(
                    &table.matrix,
                    &ids,
                    table.rows.start as u32,
                    self.embedding_scale,
                    residual,
                )?;
                // Each rank has some rows of the table, and zeros for the others.
                backend.all_reduce(residual, 0..step.rows())?;
                if let Some(Encoder { vocab, input: Some(input), .. }) = &self.encoder {
                    input.add(*vocab, (backend, step), residual)?;
                }
                if let Some(inputs) = &self.inputs {
                    inputs.make((backend, step), residual, inner)?;
                }
                let (_, width) = backend.extent(residual);
                // Streams begin alike.
                for first in (0..self.streams).filter(|_| self.streams > 1).map(|stream| stream * width) {
                    backend.copy_columns((residual, 0), 0..step.rows(), (streams, first..first + width))?;
                }
                if let Some(carried) = &self.carried {
                    carried.begin(step.rows(), backend, inner)?;
                }
            }
            (None, None) => unreachable!("a stage without the embedding is given hidden states"),
        }
        let parts = || parts.iter().filter(|rows| !rows.is_empty()).cloned();
        let centered = self.centered;
        let caches = &mut self.caches;
        let mut pass = Pass { backend, step, residual, streams, normed: shared_norm, sums, inner, caches };
        let mut look = |place, pass: &mut _| watch.as_mut().map_or(Ok(()), |watch| watch.look(place, pass));
        if self.embedding.is_some() {
            look(Place::EMBEDDING, &mut pass)?;
        }
        for (layer, number) in self.layers.iter().zip(self.first_layer..) {
            let [mixer, feed_forward] =
                layer.connections.as_ref().map_or([None; 2], |[a, b]| [Some(a), Some(b)]);
            if let Some(engram) = &layer.engram {
                engram.add(&mut pass)?;
            }
            around(mixer, parts(), &mut pass, |rows, pass| layer.mix(centered, rows, pass))?;
            look(Place::mixer(number), &mut pass)?;
            around(feed_forward, parts(), &mut pass, |rows, pass| layer.feed(centered, rows, pass))?;
            look(Place::feed_forward(number), &mut pass)?;
        }
        pass.backend.settle(pass.residual)?;
        if let Some(Encoder { head: Some(head), .. }) = &mut self.encoder
            && !step.logit_rows.is_empty()
        {
            return head.forward((pass.backend, step), pass.residual, last);
        }
        if let Some(head) = &self.head
            && !step.logit_rows.is_empty()
        {
            if let Some(mix) = &head.mix {
                mix.apply(0..step.rows(), &mut pass)?;
            }
            let Pass { backend, residual, streams, normed: mixed, inner, .. } = pass;
            let stream = if head.mix.is_some() { mixed } else { residual };
            match self.streams {
                1 => backend.take_rows(stream, &step.logit_rows, last)?,
                count => {
                    let ((height, _), (_, width)) = (backend.extent(last), backend.extent(streams));
                    let mut taken = backend.scratch(height.max(step.logit_rows.len()), width)?;
                    backend.take_rows(streams, &step.logit_rows, &mut taken)?;
                    match (&head.connection, &self.carried) {
                        (Some(connection), _) => {
                            connection.collapse_last(backend, &taken, step.logit_rows.len(), last)?;
                        }
                        (None, Some(carried)) => {
                            let rows = (&step.logit_rows[..], &*inner);
                            carried.collapse_last(backend, (&taken, count), rows, last)?;
                        }
                        (None, None) => streams::mean(backend, (&taken, count), step.logit_rows.len(), last)?,
                    }
                    backend.give_back(taken);
                }
            }
            if centered {
                let (_, width) = backend.extent(last);
                backend.center(std::slice::from_ref(&(0..width)), 0..step.logit_rows.len(), last)?;
            }
            let matrix = head.matrix.as_ref().or(self.embedding.as_ref().map(|table| &table.matrix));
            if let Some(matrix) = matrix {
                let x = normed::<B>(last, &head.norm);
                backend.linear_largest(x, step.logit_rows.len(), matrix, logits)?;
            }
        }
        Ok(())
    }

    /// Bytes of the weights that are read for one all-reduce: the largest mixer or feed-forward.
    pub fn bytes_per_reduction(&self) -> usize {
        let bytes = |layer: &Layer<B>| layer.mixer.bytes().max(layer.feed_forward.bytes());
        self.layers.iter().map(bytes).max().unwrap_or(0)
    }

    /// Numbers in a row of [`Model::forward`]'s input: the residual stream, and the sums that
    /// earlier stages have put aside.
    pub fn hidden_width(&self, hidden: usize) -> usize {
        hidden * (1 + self.sums[0])
    }

    /// After [`Model::forward`] of `step`: copies the residual stream, for the next stage. `out`
    /// becomes `[rows, stream_width]`, and the same of each sum that was put aside.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn read_hidden(&self, backend: &mut B, step: &Step, out: &mut Vec<f32>) -> Result<(), ComputeError> {
        let Buffers { residual, streams, sums, .. } = &self.buffers;
        let residual = if self.streams > 1 { streams } else { residual };
        let (_, width) = backend.extent(residual);
        let stream = step.rows() * width;
        out.resize((1 + self.sums[1]) * stream, 0.0);
        for (x, out) in [residual].into_iter().chain(sums).zip(out.chunks_exact_mut(stream)) {
            backend.read(x, 0..step.rows(), out)?;
        }
        Ok(())
    }

    /// After [`Model::forward`] of `step` on the last stage: copies the logits of this rank's
    /// vocabulary rows. `out` becomes `[logit rows, vocabulary rows]`.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn read_logits(&self, backend: &mut B, step: &Step, out: &mut Vec<f32>) -> Result<(), ComputeError> {
        let rows = step.logit_rows.len();
        out.resize(rows * self.vocab_rows().len(), 0.0);
        backend.read(&self.buffers.logits, 0..rows, out)?;
        if let Some(cap) = self.logit_cap {
            out.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
        }
        Ok(())
    }

    /// After [`Model::forward`] of `step` on the last stage: the hidden states after the last norm,
    /// of the rows that want logits; of an encoder, the results of these rows' texts. `out` holds
    /// `[logit rows, result width]`.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn read_normed(&self, backend: &mut B, step: &Step, out: &mut [f32]) -> Result<(), ComputeError> {
        if let Some(Encoder { head: Some(head), .. }) = &self.encoder {
            return backend.read(head.results(&self.buffers.last), 0..step.logit_rows.len(), out);
        }
        let Some(head) = &self.head else { unreachable!("the last stage has the last norm") };
        let ((height, width), rows) = (backend.extent(&self.buffers.last), 0..step.logit_rows.len());
        let mut normed = backend.scratch(height, width)?;
        backend.rms_norm(&self.buffers.last, rows.clone(), &head.norm, &mut normed)?;
        backend.read(&normed, rows, out)?;
        backend.give_back(normed);
        Ok(())
    }

    /// After [`Model::forward`] of `step` on the last stage: the largest logit of each row among
    /// this rank's vocabulary rows.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn read_largest(
        &self,
        backend: &mut B,
        step: &Step,
        out: &mut Vec<Largest>,
    ) -> Result<(), ComputeError> {
        out.resize(step.logit_rows.len(), Largest::NONE);
        backend.read_largest(&self.buffers.logits, out)?;
        if let Some(cap) = self.logit_cap {
            out.iter_mut().for_each(|largest| largest.value = cap * (largest.value / cap).tanh());
        }
        Ok(())
    }

    /// After [`Model::forward`] of `step` on the last stage: the logits of all `vocab` tokens, of
    /// the rows that want logits. All ranks of the stage call this together. Give the result back
    /// to the backend.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn gather_logits(
        &self,
        backend: &mut B,
        step: &Step,
        vocab: usize,
    ) -> Result<B::Buffer, ComputeError> {
        let rows = 0..step.logit_rows.len();
        let mut all = backend.scratch(self.logit_rows, vocab)?;
        backend.clear(rows.clone(), &mut all)?;
        backend.copy_columns((&self.buffers.logits, 0), rows.clone(), (&mut all, self.vocab_rows()))?;
        // Each rank has its tokens' logits, and zeros for the others.
        backend.all_reduce(&mut all, rows)?;
        Ok(all)
    }

    /// After [`Model::forward`] of `step` on the last stage: a chosen token for each row, and its
    /// logit. The model's cap takes the place of that of `choices`. `all`: the logits of all
    /// tokens, if this rank has not computed all of them.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn read_chosen(
        &self,
        backend: &mut B,
        all: Option<&B::Buffer>,
        choices: &Choices<'_>,
        out: &mut Vec<Largest>,
        likely: &mut Vec<f32>,
    ) -> Result<(), ComputeError> {
        let rows = choices.rows.len();
        out.resize(rows, Largest::NONE);
        likely.clear();
        likely.resize(rows * choices.likely_words(), 0.0);
        let logits = all.unwrap_or(&self.buffers.logits);
        backend.read_chosen(logits, &Choices { cap: self.logit_cap, ..*choices }, out, likely)
    }

    /// Copies the states that the sequence in slot `from` has, to `to`.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn copy_slot(&mut self, backend: &mut B, from: usize, to: usize) -> Result<(), ComputeError> {
        backend.copy_slot(&mut self.caches, from, to)
    }

    /// Appends the bytes of a block or of a sequence's states, in the backend's format.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn read_cache(
        &mut self,
        backend: &mut B,
        part: CachePart,
        out: &mut Vec<u8>,
    ) -> Result<(), ComputeError> {
        backend.read_cache(&mut self.caches, part, out)
    }

    /// Writes bytes of [`Model::read_cache`] to a block or to a slot's states. Returns false if
    /// there are too few or too many.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn write_cache(
        &mut self,
        backend: &mut B,
        part: CachePart,
        bytes: &[u8],
    ) -> Result<bool, ComputeError> {
        backend.write_cache(&mut self.caches, part, bytes)
    }

    /// The vocabulary rows whose logits this rank computes.
    pub fn vocab_rows(&self) -> Range<usize> {
        self.head.as_ref().map_or(0..0, |head| head.rows.clone())
    }
}
