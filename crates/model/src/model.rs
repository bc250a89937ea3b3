//! One rank's part of a model: its weights, packed, and the pass through them.

mod load;

use std::ops::Range;

use thunder_compute::{AttentionSpec, Backend, ComputeError, Largest, LinearInput, Rope, Step};

pub use load::{Capacity, Progress, ShardFootprint, lookup_bytes, shard_footprints};

/// The weights and buffers of one rank.
pub struct Model<B: Backend> {
    ropes: Vec<Rope>,
    embedding: Option<Vocabulary<B>>,
    layers: Vec<Layer<B>>,
    head: Option<Head<B>>,
    kv: B::Kv,
    buffers: Buffers<B>,
}

/// Rows of an embedding table.
struct Vocabulary<B: Backend> {
    matrix: B::Matrix,
    rows: Range<usize>,
}

/// From the residual stream to logits.
struct Head<B: Backend> {
    norm: B::Vector,
    eps: f32,
    /// `None`: the embedding serves.
    matrix: Option<B::Matrix>,
    rows: Range<usize>,
}

struct Layer<B: Backend> {
    norms: [B::Vector; 2],
    eps: f32,
    mixer: Mixer<B>,
    feed_forward: FeedForward<B>,
}

enum Mixer<B: Backend> {
    Attention(Box<Attention<B>>),
}

struct Attention<B: Backend> {
    spec: AttentionSpec<B::Vector>,
    qkv: B::Matrix,
    out: B::Matrix,
    qkv_buffer: usize,
    heads_buffer: usize,
}

enum FeedForward<B: Backend> {
    Gated { gate_up: B::Matrix, down: B::Matrix, channels_buffer: usize },
}

/// Activations of a step. Those of layers are shared by all layers of the same width.
struct Buffers<B: Backend> {
    residual: B::Buffer,
    last: B::Buffer,
    logits: B::Buffer,
    largest: Vec<Largest>,
    inner: Vec<B::Buffer>,
}

impl<B: Backend> Model<B> {
    /// Computes a step on this rank's layers. The first stage begins with the step's tokens, the others with `hidden`,
    /// `[rows, hidden]` as the stage before them left it. Every rank of the stage must call this with the same step.
    ///
    /// # Errors
    /// When a peer was lost.
    pub fn forward(
        &mut self,
        backend: &mut B,
        step: &Step,
        hidden: Option<&[f32]>,
    ) -> Result<(), ComputeError> {
        let Buffers { residual, last, logits, largest, inner } = &mut self.buffers;
        let parts = backend.begin(step, &self.ropes);
        match (&self.embedding, hidden) {
            (_, Some(hidden)) => backend.write(hidden, residual),
            (Some(table), None) => {
                backend.embed(&table.matrix, &step.tokens, table.rows.start as u32, 1.0, residual);
                // Each rank holds some rows of the table and made zeros for the others.
                backend.all_reduce(residual)?;
            }
            (None, None) => unreachable!("a stage without the embedding is given hidden states"),
        }
        let parts = || parts.iter().filter(|rows| !rows.is_empty()).cloned();
        for (index, layer) in self.layers.iter().enumerate() {
            let Layer { norms: [mixer_norm, feed_forward_norm], eps, mixer, feed_forward } = layer;
            for rows in parts() {
                match mixer {
                    Mixer::Attention(a) => {
                        let [qkv, heads] = pair(inner, a.qkv_buffer, a.heads_buffer);
                        let x = LinearInput::Normed { x: &*residual, weight: mixer_norm, eps: *eps };
                        backend.linear(x, rows.clone(), &a.qkv, qkv);
                        backend.attention(&a.spec, step, rows.clone(), qkv, &mut self.kv, index, heads);
                        backend.linear_reduce_add(LinearInput::Plain(heads), rows, &a.out, residual)?;
                    }
                }
            }
            for rows in parts() {
                match feed_forward {
                    FeedForward::Gated { gate_up, down, channels_buffer } => {
                        let channels = &mut inner[*channels_buffer];
                        let x = LinearInput::Normed { x: &*residual, weight: feed_forward_norm, eps: *eps };
                        backend.linear_gated(x, rows.clone(), gate_up, down, channels);
                        backend.linear_reduce_add(LinearInput::Gated(channels), rows, down, residual)?;
                    }
                }
            }
        }
        backend.settle(residual)?;
        if let Some(head) = &self.head
            && !step.logit_rows.is_empty()
        {
            backend.take_rows(residual, &step.logit_rows, last);
            let matrix = head.matrix.as_ref().or(self.embedding.as_ref().map(|table| &table.matrix));
            if let Some(matrix) = matrix {
                let x = LinearInput::Normed { x: &*last, weight: &head.norm, eps: head.eps };
                largest.resize(step.logit_rows.len(), Largest::NONE);
                backend.linear_largest(x, matrix, logits, largest);
            }
        }
        Ok(())
    }

    /// Bytes of the weights that are read for one sum over the ranks: the largest half of a layer.
    pub fn bytes_per_reduction(&self) -> usize {
        let halves = self.layers.iter().flat_map(|layer| {
            let Mixer::Attention(attention) = &layer.mixer;
            let FeedForward::Gated { gate_up, down, .. } = &layer.feed_forward;
            [[&attention.qkv, &attention.out], [gate_up, down]]
        });
        halves.map(|half| half.into_iter().map(B::matrix_bytes).sum()).max().unwrap_or(0)
    }

    /// After [`Model::forward`]: the residual stream, for the next stage, `[rows, hidden]`.
    pub fn hidden<'a>(&'a self, backend: &'a B) -> &'a [f32] {
        backend.read(&self.buffers.residual)
    }

    /// After [`Model::forward`] on the last stage: logits of this rank's vocabulary rows, `[logit rows, rows]`.
    pub fn logits<'a>(&'a self, backend: &'a B) -> &'a [f32] {
        backend.read(&self.buffers.logits)
    }

    /// After [`Model::forward`] on the last stage: the largest logit of each row among this rank's vocabulary rows.
    pub fn largest_logits(&self) -> &[Largest] {
        &self.buffers.largest
    }

    /// The vocabulary rows of which this rank makes logits.
    pub fn vocab_rows(&self) -> Range<usize> {
        self.head.as_ref().map_or(0..0, |head| head.rows.clone())
    }
}

/// Two different buffers at once.
fn pair<T>(buffers: &mut [T], a: usize, b: usize) -> [&mut T; 2] {
    match buffers.get_disjoint_mut([a, b]) {
        Ok(pair) => pair,
        Err(_) => unreachable!("buffers of different roles are different"),
    }
}
