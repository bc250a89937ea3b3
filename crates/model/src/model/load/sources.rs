//! The only description of what a rank reads. Plans, the check that a model fits, and loading use
//! it.

use std::ops::Range;

use thunder_compute::{
    CacheKind, CacheShape, Encoding, Extra, Float, KvFormat, LayerNorm, MatrixSource, RowOrder, Strided,
};

use super::ahead::AheadSources;
use super::encoder::EncoderSources;
use super::layer::LayerSources;
use super::layer_inputs::LayerInputsSources;
use super::streams::ConnectionSources;
use crate::error::ModelError;
use crate::folder::ModelFolder;
use crate::model::mix::Mix;
use crate::plan::Shard;
use crate::spec::{ModelSpec, StreamReading};
use crate::weights::{Adapter, LayerRole, Role, WeightSource};

/// Everything that a rank reads from the files.
pub(super) struct Sources<'a> {
    pub embedding: Option<(MatrixSource<'a>, Range<usize>)>,
    pub inputs: Option<LayerInputsSources<'a>>,
    pub layers: Vec<LayerSources<'a>>,
    pub head: Option<HeadSources<'a>>,
    /// Set if the model is an encoder, which has no `head`.
    pub encoder: Option<EncoderSources<'a>>,
    /// On ranks with an output head, if the model has such a layer.
    pub ahead: Option<AheadSources<'a>>,
}

/// The output head and its norm.
pub(super) struct HeadSources<'a> {
    /// The mix of the residual stream's sums that the norm reads.
    pub mix: Option<Mix>,
    pub norm: Vec<f32>,
    /// If there are several residual streams.
    pub connection: Option<ConnectionSources<'a>>,
    /// `None`: the embedding serves.
    pub matrix: Option<MatrixSource<'a>>,
    pub rows: Range<usize>,
}

/// One rank's view of a model's weights.
#[derive(Clone, Copy)]
pub(super) struct ShardView<'a> {
    pub spec: &'a ModelSpec,
    pub shard: Shard<'a>,
    pub weights: &'a dyn WeightSource,
    pub adapters: &'a [Adapter],
}

/// Rows and columns of an `[outputs, inputs]` matrix.
#[derive(Debug, Clone)]
pub(super) struct Window {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    /// Take the bias of the rows.
    pub bias: bool,
}

/// Rows of a matrix that contains the matrices of several projections, interleaved by heads.
#[derive(Debug, Clone)]
pub(super) struct Runs {
    /// The first row of the projection.
    pub first: usize,
    /// Rows of the projection that follow each other.
    pub run: usize,
    /// From one head's rows to the next one's.
    pub stride: usize,
    /// The range of the projection's outputs to use.
    pub outputs: Range<usize>,
}

impl Runs {
    /// The row of an output.
    const fn row(&self, output: usize) -> usize {
        self.first + output / self.run * self.stride + output % self.run
    }
}

impl<'a> ShardView<'a> {
    /// Some outputs of a projection that shares its matrix with others, with the bias of these rows
    /// if there is one.
    pub fn runs(
        &self,
        role: Role,
        shape: [usize; 2],
        runs: &Runs,
        bias: bool,
    ) -> Result<MatrixSource<'a>, ModelError> {
        let (outputs, stored) = (runs.outputs.clone(), self.weights.matrix(role, shape)?);
        if stored.row_order != RowOrder::AsStored {
            return Err(ModelError::Unsupported {
                field: "the order of rows",
                value: format!("{:?} of {role:?}", stored.row_order),
                supported: "rows of a matrix with several projections in the order of their heads are".into(),
            });
        }
        let start = runs.row(outputs.start);
        let end = outputs.clone().next_back().map_or(start, |last| runs.row(last) + 1);
        let bias = match bias {
            true => {
                let all = self.weights.bias(role, shape[0])?;
                Some(outputs.clone().map(|output| all[runs.row(output)]).collect())
            }
            false => None,
        };
        Ok(MatrixSource {
            bias,
            row_order: RowOrder::Runs { run: runs.run, stride: runs.stride, skip: outputs.start % runs.run },
            rows: outputs.len(),
            ..stored.window(start..end, 0..shape[1])
        })
    }

    /// A norm's weights, in the form in which they multiply.
    pub fn norm(&self, role: Role, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut weights = self.weights.vector(role, &[len])?;
        if self.spec.norms_less_one && self.weights.norms_less_one() {
            weights.iter_mut().for_each(|weight| *weight += 1.0);
        }
        Ok(weights)
    }

    /// A LayerNorm of the residual stream.
    pub fn layer_norm(&self, weight: Role, bias: Option<Role>) -> Result<LayerNorm, ModelError> {
        let vector = |role| self.weights.vector(role, &[self.spec.hidden]);
        let bias = bias.map_or_else(|| Ok(vec![0.0; self.spec.hidden]), vector)?;
        Ok(LayerNorm { weight: vector(weight)?, bias, eps: self.spec.norm_eps })
    }

    /// How the residual stream's sums are mixed, if `sums` of them were put aside; `None` if the
    /// model does not mix sums. Some files include the norm's weights in the scores' vector.
    pub fn mix(&self, [norm, score]: [Role; 2], sums: usize) -> Result<Option<Mix>, ModelError> {
        if self.spec.residual_block.is_none() {
            return Ok(None);
        }
        let hidden = self.spec.hidden;
        let mut weight = self.weights.vector(score, &[1, hidden])?;
        if self.weights.has(norm) {
            let norm = self.weights.vector(norm, &[hidden])?;
            weight.iter_mut().zip(norm).for_each(|(weight, norm)| *weight *= norm);
        }
        Ok(Some(Mix { weight, eps: self.spec.norm_eps, sums }))
    }

    /// A window of the matrix of a role.
    pub fn matrix(
        &self,
        role: Role,
        shape: [usize; 2],
        window: Window,
    ) -> Result<MatrixSource<'a>, ModelError> {
        let Window { rows, cols, bias } = window;
        let bias = match bias {
            true => Some(self.weights.bias(role, shape[0])?[rows.clone()].to_vec()),
            false => None,
        };
        Ok(MatrixSource { bias, ..self.weights.matrix(role, shape)?.window(rows, cols) })
    }

    /// A vector of `len` numbers of a layer.
    pub fn vector(&self, layer: usize, role: LayerRole, len: usize) -> Result<Vec<f32>, ModelError> {
        self.weights.vector(role.of(layer), &[len])
    }

    /// This rank's rows of a table of `[rows, columns]`, which is divided like the vocabulary.
    pub fn table(
        &self,
        role: Role,
        [rows, cols]: [usize; 2],
    ) -> Result<(MatrixSource<'a>, Range<usize>), ModelError> {
        let own = self.shard.vocab(rows);
        let window = Window { rows: own.clone(), cols: 0..cols, bias: false };
        Ok((self.matrix(role, [rows, cols], window)?, own))
    }

    /// This rank's rows of a matrix over the vocabulary.
    fn vocabulary(&self, role: Role) -> Result<(MatrixSource<'a>, Range<usize>), ModelError> {
        self.table(role, [self.spec.vocab, self.spec.hidden])
    }
}

impl<'a> Sources<'a> {
    /// Describes a rank's part. Reads headers, norms and biases, no matrices.
    pub fn describe(folder: &'a ModelFolder, shard: Shard<'a>) -> Result<Self, ModelError> {
        let view =
            ShardView { spec: &folder.spec, shard, weights: &*folder.weights, adapters: &folder.adapters };
        // Whoever predicts further tokens embeds the next ones.
        let ahead = view.spec.ahead.as_ref().filter(|_| shard.is_last());
        let embedding = match shard.is_first() || ahead.is_some() {
            true => Some(view.vocabulary(Role::Embedding)?),
            false => None,
        };
        let encoder = view.spec.encoder.as_ref();
        let encoder = encoder.map(|spec| EncoderSources::describe(&view, &folder.path, spec)).transpose()?;
        let head = match shard.is_last() && encoder.is_none() {
            true => Some(HeadSources::describe(&view, is_tied(folder), embedding.is_some())?),
            false => None,
        };
        let ahead = ahead.map(|ahead| AheadSources::describe(&view, ahead)).transpose()?;
        let inputs = LayerInputsSources::describe(&view)?;
        let layers = shard.layers().map(|layer| LayerSources::describe(&view, layer));
        Ok(Self { embedding, inputs, layers: layers.collect::<Result<_, _>>()?, head, encoder, ahead })
    }

    /// The rank's layers, that which predicts further tokens last.
    pub fn layers(&self) -> impl Iterator<Item = &LayerSources<'a>> {
        self.layers.iter().chain(self.ahead.as_ref().map(|ahead| &ahead.layer))
    }

    /// Operations that the rank needs and that some backends lack, each once.
    pub fn needs(&self) -> Vec<Extra> {
        let mut all = Vec::new();
        for operation in self.layers().flat_map(LayerSources::needs) {
            if !all.contains(&operation) {
                all.push(operation);
            }
        }
        all
    }

    /// All matrices that the rank reads.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        let layers = self.layers.iter().flat_map(LayerSources::matrices);
        let of_encoder = self.encoder.iter().flat_map(EncoderSources::matrices);
        let embedding = self.embedding.as_ref().map(|(matrix, _)| matrix);
        let connection = self.head.iter().flat_map(|head| head.connection.as_ref());
        let head = self.head.as_ref().and_then(|head| head.matrix.as_ref());
        let ahead = self.ahead.iter().flat_map(AheadSources::matrices);
        let connection = connection.map(ConnectionSources::matrix);
        let of_inputs = self.inputs.iter().flat_map(LayerInputsSources::matrices);
        layers.chain(of_encoder).chain(of_inputs).chain(embedding).chain(connection).chain(head).chain(ahead)
    }

    /// Bytes that the rank reads of matrices and of adapters.
    pub fn bytes(&self) -> u64 {
        let adapters: u64 = self.layers.iter().map(LayerSources::adapter_bytes).sum();
        adapters + self.matrices().map(|matrix| matrix.bytes() as u64).sum::<u64>()
    }

    /// Bytes that matrices and adapters take in memory.
    pub fn held_bytes(&self) -> u64 {
        let of_layers = self.layers.iter().map(|layer| layer.adapter_bytes() + layer.converted_bytes());
        of_layers.sum::<u64>() + self.matrices().map(|matrix| matrix.packed_bytes() as u64).sum::<u64>()
    }

    /// Bytes in memory of the layer that predicts further tokens, which not every step reads.
    pub fn ahead_bytes(&self) -> u64 {
        self.ahead.iter().flat_map(AheadSources::matrices).map(|matrix| matrix.packed_bytes() as u64).sum()
    }

    /// Bytes of tables in memory; a token reads only a few rows.
    pub fn table_bytes(&self) -> u64 {
        let of_inputs = self.inputs.as_ref().map_or(0, LayerInputsSources::table_bytes);
        of_inputs + self.layers.iter().map(LayerSources::table_bytes).sum::<u64>()
    }

    /// Bytes in memory of the embedding, unless it is also the rank's output head.
    pub fn lookup_bytes(&self) -> u64 {
        let is_head = self.head.as_ref().is_some_and(|head| head.matrix.is_none());
        self.embedding.iter().filter(|_| !is_head).map(|(table, _)| table.packed_bytes() as u64).sum()
    }

    /// Bytes in memory of the matrices of routed experts.
    pub fn routed_bytes(&self) -> u64 {
        self.layers.iter().map(LayerSources::routed_bytes).sum()
    }

    /// The caches of the rank's layers.
    pub fn cache_shape(&self, format: KvFormat, blocks: usize, slots: usize) -> CacheShape {
        let mut caches: Vec<CacheKind> = self.layers().flat_map(LayerSources::caches).collect();
        if self.encoder.is_some() {
            // In the order in which `Upload::cache` numbers them.
            let mut kinds: Vec<CacheKind> = Vec::new();
            caches.retain(|kind| {
                !kinds.contains(kind) && {
                    kinds.push(*kind);
                    true
                }
            });
        }
        CacheShape { format, caches, blocks, slots }
    }
}

impl<'a> HeadSources<'a> {
    /// With a tied head, a rank without an embedding reads the embedding's rows itself.
    fn describe(view: &ShardView<'a>, tied: bool, has_embedding: bool) -> Result<Self, ModelError> {
        let mut norm = view.norm(Role::OutputNorm, view.spec.hidden)?;
        norm.iter_mut().for_each(|weight| *weight *= view.spec.logit_scale);
        let rows = view.shard.vocab(view.spec.vocab);
        let matrix = match (tied, has_embedding) {
            (true, true) => None,
            (true, false) => Some(view.vocabulary(Role::Embedding)?.0),
            (false, _) => Some(view.vocabulary(Role::OutputHead)?.0),
        };
        let weighted = view.spec.streams.filter(|streams| streams.reading == StreamReading::Weighted);
        let connection = weighted.map(|shape| ConnectionSources::of_output(view, shape)).transpose()?;
        let mix =
            view.mix([Role::OutputMixNorm, Role::OutputMix], view.spec.sums_before(view.spec.layers.len()))?;
        Ok(Self { mix, norm, connection, matrix, rows })
    }
}

/// Layer `layer` reads what layer `source` keeps of tokens.
pub(super) fn of_other_rank(layer: usize, source: usize) -> ModelError {
    ModelError::Plan(format!(
        "layer {layer} reads what layer {source} keeps of tokens, which would be on another rank: use \
         --parallel tensor"
    ))
}

/// A matrix of `[rows, cols]` little-endian floats in f32.
pub(super) fn of_floats(bytes: &[u8], [rows, cols]: [usize; 2]) -> MatrixSource<'_> {
    let row_bytes = cols * size_of::<f32>();
    MatrixSource {
        rows,
        cols,
        encoding: Encoding::Float(Float::F32),
        weight: Strided { bytes, stride: row_bytes, row_bytes },
        scales: None,
        offsets: None,
        row_order: RowOrder::AsStored,
        first_row: 0,
        bias: None,
        pages: None,
    }
}

/// True if the output head is the embedding.
fn is_tied(folder: &ModelFolder) -> bool {
    folder.spec.tied.unwrap_or(!folder.weights.has(Role::OutputHead))
}

/// Number of heads that are not divided: the smallest number whose columns fill whole groups of
/// `unit` columns.
pub(super) fn whole_groups(head_columns: usize, unit: usize) -> usize {
    let (mut a, mut b) = (unit, head_columns);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    unit / a.max(1)
}
