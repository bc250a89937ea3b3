//! What a rank reads for the parts of an encoder around its layers. All ranks of a stage have these
//! parts whole, because they are small and a text's vector is computed once.

use std::path::Path;

use safetensors::SafeTensors;
use thunder_compute::{Backend, LayerNorm, MatrixSource};

use super::sources::{ShardView, Window, of_floats};
use super::upload::Upload;
use crate::error::ModelError;
use crate::model::encoder::{Dense, Encoder, EncoderHead, EncoderInput};
use crate::pooling::Pooling;
use crate::spec::{DenseFrom, DenseShape, EmbeddingNorm, EncoderSpec, PositionsShape};
use crate::weights::{Role, float_tensor};

/// An encoder's parts around its layers.
pub(in crate::model) struct EncoderSources<'a> {
    vocab: usize,
    input: Option<InputSources<'a>>,
    head: Option<HeadSources<'a>>,
}

/// What is added to the embedding.
struct InputSources<'a> {
    positions: Option<(MatrixSource<'a>, PositionsShape)>,
    types: Option<MatrixSource<'a>>,
    norm: Option<LayerNorm>,
}

/// From hidden states to a text's result.
struct HeadSources<'a> {
    centered: bool,
    norm: Option<Vec<f32>>,
    pooling: Pooling,
    dense: Vec<(DenseSource<'a>, DenseShape)>,
}

/// A product's weights.
enum DenseSource<'a> {
    Model(MatrixSource<'a>),
    /// Row-major floats in f32, and the bias.
    File(Vec<u8>, Option<Vec<f32>>),
}

impl<'a> EncoderSources<'a> {
    pub fn describe(view: &ShardView<'a>, folder: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let (hidden, vocab) = (view.spec.hidden, view.spec.vocab);
        let table = |role, rows: usize| {
            let window = Window { rows: 0..rows, cols: 0..hidden, bias: false };
            view.matrix(role, [rows, hidden], window)
        };
        let input = match view.shard.is_first() {
            true => Some(InputSources {
                positions: match spec.positions {
                    Some(shape) => Some((table(Role::Positions, shape.rows)?, shape)),
                    None => None,
                },
                types: match spec.types {
                    0 => None,
                    types => Some(table(Role::TokenTypes, types)?),
                },
                norm: match spec.embedding_norm {
                    EmbeddingNorm::None => None,
                    EmbeddingNorm::Plain => Some(view.layer_norm(Role::EmbeddingNorm, None)?),
                    EmbeddingNorm::Biased => {
                        Some(view.layer_norm(Role::EmbeddingNorm, Some(Role::EmbeddingNormBias))?)
                    }
                },
            }),
            false => None,
        };
        let dense = |shape: &DenseShape| {
            let role = match &shape.from {
                DenseFrom::Pooler => Role::Pooler,
                DenseFrom::Classifier => Role::Classifier,
                DenseFrom::Folder(name) => {
                    return Ok((read_dense(&folder.join(name), shape)?, shape.clone()));
                }
            };
            let window = Window { rows: 0..shape.outputs, cols: 0..shape.inputs, bias: shape.bias };
            let matrix = view.matrix(role, [shape.outputs, shape.inputs], window)?;
            Ok::<_, ModelError>((DenseSource::Model(matrix), shape.clone()))
        };
        let head = match view.shard.is_last() {
            true => Some(HeadSources {
                centered: view.spec.centered,
                norm: spec.output_norm.then(|| view.norm(Role::OutputNorm, hidden)).transpose()?,
                pooling: spec.pooling.clone(),
                dense: spec.dense.iter().map(dense).collect::<Result<_, _>>()?,
            }),
            false => None,
        };
        Ok(Self { vocab, input, head })
    }

    /// All matrices of the model's own files.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource<'a>> {
        let positions = self.input.iter().filter_map(|input| Some(&input.positions.as_ref()?.0));
        let types = self.input.iter().filter_map(|input| input.types.as_ref());
        let dense = self.head.iter().flat_map(|head| &head.dense);
        positions.chain(types).chain(dense.filter_map(|(source, _)| match source {
            DenseSource::Model(matrix) => Some(matrix),
            DenseSource::File(..) => None,
        }))
    }

    /// Packs the parts; results have at most `rows` rows.
    pub fn upload<B: Backend>(
        self,
        (rows, norm_eps): (usize, f32),
        upload: &mut Upload<'_, B>,
    ) -> Result<Encoder<B>, ModelError> {
        let input = match self.input {
            Some(InputSources { positions, types, norm }) => Some(EncoderInput {
                positions: match positions {
                    Some((table, shape)) => Some((upload.matrix(&[table])?, shape.first)),
                    None => None,
                },
                types: types.map(|table| upload.matrix(&[table])).transpose()?,
                norm,
            }),
            None => None,
        };
        let dense = |(source, shape): (DenseSource<'_>, DenseShape), upload: &mut Upload<'_, B>| {
            let matrix = match source {
                DenseSource::Model(matrix) => upload.matrix(&[matrix])?,
                DenseSource::File(bytes, bias) => {
                    let matrix = of_floats(&bytes, [shape.outputs, shape.inputs]);
                    upload.converted(MatrixSource { bias, ..matrix }, 0)?
                }
            };
            Ok::<_, ModelError>(Dense {
                matrix,
                curve: shape.curve,
                out: upload.buffer(rows, shape.outputs)?,
            })
        };
        let head = match self.head {
            Some(HeadSources { centered, norm, pooling, dense: all }) => Some(EncoderHead {
                centered,
                norm: norm.map(|weights| upload.norm(&weights, norm_eps)).transpose()?,
                pooling,
                dense: all.into_iter().map(|of| dense(of, upload)).collect::<Result<_, _>>()?,
            }),
            None => None,
        };
        Ok(Encoder { vocab: self.vocab, input, head })
    }
}

/// Reads the weights of a folder of sentence-transformers.
fn read_dense<'a>(folder: &Path, shape: &DenseShape) -> Result<DenseSource<'a>, ModelError> {
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).map_err(|error| ModelError::io(&path, "a product's weights", error))?;
    let malformed = |reason: String| ModelError::Malformed { path: path.clone(), reason };
    let file = SafeTensors::deserialize(&bytes).map_err(|error| malformed(error.to_string()))?;
    let floats = |name: &str, shape: &[usize]| float_tensor(&file, name, shape).map_err(malformed);
    let weights = floats("linear.weight", &[shape.outputs, shape.inputs])?;
    let bias = shape.bias.then(|| floats("linear.bias", &[shape.outputs])).transpose()?;
    Ok(DenseSource::File(weights.into_iter().flat_map(f32::to_le_bytes).collect(), bias))
}
