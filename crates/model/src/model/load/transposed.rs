//! Matrices of experts that files store as `[inputs, outputs]`, such as the unquantized stacks of
//! gpt-oss, Llama 4 and Qwen3-VL.

use std::ops::Range;

use thunder_compute::{Backend, Encoding, MatrixSource, RowOrder, Strided};

use super::sources::{ShardView, Window};
use super::upload::Upload;
use crate::error::ModelError;
use crate::weights::Role;

/// Where an expert's matrix lies.
pub(super) enum ExpertMatrix<'a> {
    /// `[outputs, inputs]`.
    AsOutputs(MatrixSource<'a>),
    /// `[inputs, outputs]`.
    Transposed(Transposed<'a>),
}

/// Some columns of a matrix `[inputs, outputs]`.
pub(super) struct Transposed<'a> {
    /// The window of the stored matrix that holds them.
    stored: MatrixSource<'a>,
    /// The first output's column in the window, and the distance in columns between two outputs.
    first: usize,
    step: usize,
    bias: Option<Vec<f32>>,
}

/// Outputs of a transposed matrix: a range of those that begin at a column and are `step` apart.
pub(super) struct Outputs {
    pub first: usize,
    pub step: usize,
    pub own: Range<usize>,
}

impl<'a> ExpertMatrix<'a> {
    pub const fn stored(&self) -> &MatrixSource<'a> {
        match self {
            Self::AsOutputs(source) => source,
            Self::Transposed(transposed) => &transposed.stored,
        }
    }

    /// The stored matrix, once for gates and ups that alternate in one.
    pub const fn listed(&self) -> Option<&MatrixSource<'a>> {
        match self {
            Self::Transposed(ups) if ups.step > 1 && ups.first > 0 => None,
            matrix => Some(matrix.stored()),
        }
    }

    /// Bytes that the matrix takes in memory.
    pub fn packed_bytes(&self) -> usize {
        match self {
            Self::AsOutputs(source) => source.packed_bytes(),
            // Plain numbers.
            Self::Transposed(_) => self.bytes(),
        }
    }

    /// Bytes that are read for this matrix.
    pub fn bytes(&self) -> usize {
        match self {
            Self::AsOutputs(source) => source.bytes(),
            Self::Transposed(transposed) => transposed.stored.bytes() / transposed.step,
        }
    }
}

impl<'a> Transposed<'a> {
    /// These outputs of the matrix of a role that is stored as `[inputs, columns]`, and some of its
    /// inputs.
    pub fn describe(
        view: &ShardView<'a>,
        role: Role,
        [inputs, columns]: [usize; 2],
        (rows, outputs): (Range<usize>, Outputs),
        bias: bool,
    ) -> Result<Self, ModelError> {
        let Outputs { first, step, own } = outputs;
        // Whole periods, so that the last output is included.
        let start = if step > 1 { own.start * step } else { first + own.start };
        let window = Window { rows, cols: start..start + own.len() * step, bias: false };
        let stored = view.matrix(role, [inputs, columns], window)?;
        if !matches!(stored.encoding, Encoding::Float(_)) {
            return Err(ModelError::Unsupported {
                field: "the layout of experts",
                value: format!("{:?}, transposed", stored.encoding),
                supported: "transposed stacks of plain numbers are".into(),
            });
        }
        let bias = match bias {
            true => {
                let all = view.weights.bias(role, columns)?;
                Some(own.map(|output| all[first + output * step]).collect())
            }
            false => None,
        };
        Ok(Self { stored, first: if step > 1 { first } else { 0 }, step, bias })
    }

    const fn outputs(&self) -> usize {
        self.stored.cols / self.step
    }

    /// The elements as `[outputs, inputs]`.
    fn bytes(&self) -> Vec<u8> {
        let Encoding::Float(float) = self.stored.encoding else {
            unreachable!("other encodings are refused")
        };
        let (size, inputs, outputs) = (float.bytes(), self.stored.rows, self.outputs());
        let mut bytes = vec![0; inputs * outputs * size];
        if bytes.is_empty() {
            return bytes;
        }
        // In blocks of outputs and of inputs, so that both sides stay in the cache.
        const BLOCK: usize = 64;
        for block in (0..outputs).step_by(BLOCK) {
            for first_input in (0..inputs).step_by(BLOCK) {
                for input in first_input..inputs.min(first_input + BLOCK) {
                    let row = self.stored.weight.row(input);
                    for output in block..outputs.min(block + BLOCK) {
                        let from = (self.first + output * self.step) * size;
                        let to = (output * inputs + input) * size;
                        bytes[to..to + size].copy_from_slice(&row[from..from + size]);
                    }
                }
            }
        }
        bytes
    }
}

/// Packs each of `all`, matrices with the same input, into one.
pub(super) fn upload_experts<B: Backend>(
    all: &[Vec<ExpertMatrix<'_>>],
    upload: &mut Upload<'_, B>,
) -> Result<Vec<B::Matrix>, ModelError> {
    let mut packed = Vec::with_capacity(all.len());
    let are_outputs = |matrices: &Vec<ExpertMatrix<'_>>| {
        matrices.iter().all(|matrix| matches!(matrix, ExpertMatrix::AsOutputs(_)))
    };
    for run in all.chunk_by(|one, next| are_outputs(one) && are_outputs(next)) {
        match run {
            [one] if !are_outputs(one) => packed.push(upload_turned(one, upload)?),
            run => {
                let sources = run.iter().map(|matrices| matrices.iter().map(ExpertMatrix::stored).cloned());
                packed.extend(upload.expert_matrices(&sources.map(Iterator::collect).collect::<Vec<_>>())?);
            }
        }
    }
    Ok(packed)
}

/// Packs matrices with the same input into one; some of them are transposed. The transposed ones
/// are in memory meanwhile.
fn upload_turned<B: Backend>(
    matrices: &[ExpertMatrix<'_>],
    upload: &mut Upload<'_, B>,
) -> Result<B::Matrix, ModelError> {
    let read_bytes = matrices.iter().map(ExpertMatrix::bytes).sum();
    if let [ExpertMatrix::Transposed(first), ..] = matrices
        && let Some(pages) = first.stored.pages
    {
        pages.need(first.stored.weight.bytes);
    }
    let turned: Vec<Option<Vec<u8>>> = matrices
        .iter()
        .map(|matrix| match matrix {
            ExpertMatrix::AsOutputs(_) => None,
            ExpertMatrix::Transposed(transposed) => Some(transposed.bytes()),
        })
        .collect();
    for matrix in matrices {
        if let ExpertMatrix::Transposed(Transposed { stored, .. }) = matrix
            && let Some(pages) = stored.pages
        {
            pages.release(stored.weight.bytes);
        }
    }
    let sources = matrices.iter().zip(&turned).map(|(matrix, turned)| match (matrix, turned) {
        (ExpertMatrix::Transposed(transposed), Some(bytes)) => {
            let row_bytes = bytes.len() / transposed.outputs().max(1);
            MatrixSource {
                rows: transposed.outputs(),
                cols: transposed.stored.rows,
                encoding: transposed.stored.encoding,
                weight: Strided { bytes, stride: row_bytes, row_bytes },
                scales: None,
                offsets: None,
                row_order: RowOrder::AsStored,
                first_row: 0,
                bias: transposed.bias.clone(),
                pages: None,
            }
        }
        (ExpertMatrix::AsOutputs(source), _) => source.clone(),
        (ExpertMatrix::Transposed(_), None) => unreachable!("transposed matrices were turned"),
    });
    upload.converted_expert(&sources.collect::<Vec<_>>(), read_bytes)
}
