//! Tensors of GGUF files by role.

use std::sync::Arc;

use thunder_compute::{Encoding, FilePages, Float, RowOrder};

use super::config;
use super::container::TensorInfo;
use super::files::GgufFiles;
use super::names::{Name, bias_of, names_of};
use super::types::TensorType;
use crate::error::ModelError;
use crate::spec::{MixerSpec, ModelSpec};
use crate::weights::mapped::absent_indices;
use crate::weights::{LayerRole, MappedFiles, Role, StoredMatrix, WeightSource};

/// The weights of a model's GGUF files.
#[derive(Debug)]
pub struct GgufWeights {
    files: Arc<GgufFiles>,
    /// Width of the heads of queries and keys, if their rows are stored in pairs.
    paired_heads: Option<usize>,
    /// Layers have one norm, whatever they are.
    one_norm: bool,
}

impl GgufWeights {
    /// The weights of opened files.
    ///
    /// # Errors
    /// When the architecture is unknown.
    pub(crate) fn new(files: Arc<GgufFiles>, spec: &ModelSpec) -> Result<Self, ModelError> {
        let family = config::family(&files).map_err(|reason| files.malformed(reason))?;
        let width = spec.layers.iter().find_map(|layer| match &layer.mixer {
            MixerSpec::Attention(attention) => Some(attention.head_dim),
            _ => None,
        });
        let paired_heads = width.filter(|width| family.paired_heads && width.is_multiple_of(2));
        Ok(Self { files, paired_heads, one_norm: family.state_spaces == config::StateSpaces::Apart })
    }

    /// The name that the files use for a role, or the usual one if they have none.
    fn name(&self, role: Role) -> Result<Name, ModelError> {
        let role = match role {
            Role::Layer(layer, LayerRole::FeedForwardNorm) if self.one_norm => LayerRole::MixerNorm.of(layer),
            role => role,
        };
        let mut names = names_of(role);
        let found = names.iter().position(|name| self.files.tensor(&name.tensor).is_some());
        if names.is_empty() {
            return Err(ModelError::NoTensor {
                name: format!("{role:?}"),
                hint: " by any known name".into(),
            });
        }
        Ok(names.swap_remove(found.unwrap_or(0)))
    }

    fn tensor(&self, name: &str) -> Result<(&TensorInfo, &[u8]), ModelError> {
        self.files.tensor(name).ok_or_else(|| ModelError::NoTensor {
            name: name.to_owned(),
            hint: ": the file is incomplete or of another architecture than it says".into(),
        })
    }

    /// A tensor of this shape, the outermost dimension first.
    fn shaped(&self, name: &str, shape: &[usize]) -> Result<(Encoding, &[u8]), ModelError> {
        let (info, bytes) = self.tensor(name)?;
        let encoding = encoding(name, info.kind)?;
        // Dimensions of 1 may be written or not.
        let significant =
            |sizes: &mut dyn Iterator<Item = usize>| sizes.filter(|size| *size != 1).collect::<Vec<_>>();
        let found = significant(&mut info.dimensions.iter().rev().copied());
        if found != significant(&mut shape.iter().copied()) {
            return Err(ModelError::Shape {
                name: name.to_owned(),
                actual: format!("{} {:?}", info.kind.name, info.dimensions),
                expected: format!("{:?}", shape.iter().rev().collect::<Vec<_>>()),
            });
        }
        Ok((encoding, bytes))
    }

    /// The numbers of a tensor that is no matrix.
    fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let (encoding, bytes) = self.shaped(name, shape)?;
        let (bytes, _) = self.files.files.noted_copy(bytes);
        let mut numbers = vec![0.0; shape.iter().product()];
        decoded(name, encoding)?.decode(&bytes, &mut numbers);
        match numbers.iter().position(|number| !number.is_finite()) {
            Some(at) => Err(ModelError::NotFinite { name: name.to_owned(), at, value: numbers[at] }),
            None => Ok(numbers),
        }
    }

    /// True if `ffn_up` has the rows of a gate as well: twice as many as `ffn_down` has columns.
    /// Names end in `end`.
    fn has_gate_in_up(&self, layer: usize, end: &str) -> bool {
        let size = |name: &str, axis: usize| {
            let (info, _) = self.files.tensor(&format!("blk.{layer}.{name}{end}.weight"))?;
            info.dimensions.get(axis).copied()
        };
        match (size("ffn_up", 1), size("ffn_down", 0)) {
            (Some(rows), Some(channels)) => channels.checked_mul(2) == Some(rows),
            _ => false,
        }
    }

    /// The shape of a tensor that has as many numbers as `shape`, else `shape`.
    fn rows_of(&self, name: &str, shape: &[usize]) -> Result<Vec<usize>, ModelError> {
        let (info, _) = self.tensor(name)?;
        let numbers = |sizes: &[usize]| sizes.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        Ok(match numbers(&info.dimensions) == numbers(shape) {
            true => info.dimensions.iter().rev().copied().collect(),
            false => shape.to_vec(),
        })
    }

    fn row_order(&self, role: Role) -> RowOrder {
        match (role, self.paired_heads) {
            (Role::Layer(_, LayerRole::Query | LayerRole::Key), Some(width)) => RowOrder::Paired { width },
            _ => RowOrder::AsStored,
        }
    }
}

impl WeightSource for GgufWeights {
    fn has(&self, role: Role) -> bool {
        match role {
            Role::Layer(layer, LayerRole::GateUp) => return self.has_gate_in_up(layer, ""),
            Role::Layer(layer, LayerRole::SharedGateUp) => return self.has_gate_in_up(layer, "_shexp"),
            _ => {}
        }
        names_of(role).iter().any(|name| self.files.tensor(&name.tensor).is_some())
    }

    fn format(&self, role: Role) -> Result<Encoding, ModelError> {
        let name = self.name(role)?.tensor;
        encoding(&name, self.tensor(&name)?.0.kind)
    }

    fn matrix(&self, role: Role, shape: [usize; 2]) -> Result<StoredMatrix<'_>, ModelError> {
        let Name { tensor, stacked } = self.name(role)?;
        let [rows, cols] = shape;
        let (encoding, weight) = match role.in_stack() {
            Some((index, count)) if stacked => {
                let (encoding, bytes) = self.shaped(&tensor, &[count, rows, cols])?;
                let one = bytes.len() / count;
                (encoding, &bytes[index * one..][..one])
            }
            _ => self.shaped(&tensor, &shape)?,
        };
        // A matrix of a stack of one may have rows that are no whole blocks, if shapes agree by
        // chance.
        if cols % encoding.column_unit() != 0 {
            return Err(ModelError::Shape {
                name: tensor,
                actual: format!("in blocks of {} columns", encoding.column_unit()),
                expected: format!("{cols} columns, which are no whole number of blocks"),
            });
        }
        let row_order = self.row_order(role);
        if let RowOrder::Paired { width } = row_order
            && !rows.is_multiple_of(width)
        {
            return Err(ModelError::Shape {
                name: tensor,
                actual: format!("{rows} rows"),
                expected: format!("whole heads of {width}"),
            });
        }
        let pages: Option<&dyn FilePages> = Some(self);
        let (scales, offsets, rows_apart) = (None, None, 1);
        Ok(StoredMatrix { rows, cols, encoding, weight, scales, offsets, row_order, rows_apart, pages })
    }

    fn bias(&self, role: Role, len: usize) -> Result<Vec<f32>, ModelError> {
        let Name { tensor, stacked } = self.name(role)?;
        let name = bias_of(&tensor);
        let stored = match role.in_stack() {
            Some((index, count)) if stacked => {
                let all = self.numbers(&name, &[count, len])?;
                all[index * len..][..len].to_vec()
            }
            _ => self.numbers(&name, &[len])?,
        };
        let order = self.row_order(role);
        Ok((0..len).map(|output| stored[order.stored(output)]).collect())
    }

    fn vector(&self, role: Role, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let name = self.name(role)?.tensor;
        let mut numbers = match role {
            // A row for each group.
            Role::Layer(_, LayerRole::DeltaNorm) => self.numbers(&name, &self.rows_of(&name, shape)?)?,
            _ => self.numbers(&name, shape)?,
        };
        if matches!(role, Role::Layer(_, LayerRole::DeltaLogRate)) {
            // Files have the rate itself, below zero.
            let is_there = self.files.files.note(self.tensor(&name)?.1);
            if let Some(at) = numbers.iter().position(|rate| is_there && *rate >= 0.0) {
                return Err(ModelError::Shape {
                    name,
                    actual: format!("{} at {at}", numbers[at]),
                    expected: "rates below 0".into(),
                });
            }
            numbers.iter_mut().for_each(|rate| *rate = (-*rate).ln());
        }
        Ok(numbers)
    }

    fn indices(&self, role: Role, shape: &[usize]) -> Result<Vec<u32>, ModelError> {
        let name = self.name(role)?.tensor;
        let (info, bytes) = self.tensor(&name)?;
        if !self.files.files.note(bytes) {
            return Ok(absent_indices(shape));
        }
        let wrong = || ModelError::Shape {
            name: name.clone(),
            actual: format!("{} {:?}", info.kind.name, info.dimensions),
            expected: format!("I32 {:?}, from 0 on", shape.iter().rev().collect::<Vec<_>>()),
        };
        if info.kind.name != "I32" || !info.dimensions.iter().rev().eq(shape) {
            return Err(wrong());
        }
        let numbers = bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
        numbers.map(|number| u32::try_from(number).map_err(|_| wrong())).collect()
    }

    fn bytes(&self) -> u64 {
        self.files.tensors().map(|(_, _, bytes)| bytes.len() as u64).sum()
    }

    fn is_quantized(&self) -> bool {
        self.files.tensors().any(|(_, info, _)| matches!(info.kind.encoding, Some(Encoding::Blocks(_))))
    }

    fn files(&self) -> &MappedFiles {
        &self.files.files
    }

    fn fingerprint(&self) -> [u8; 32] {
        let described = self.files.tensors().map(|(name, info, bytes)| {
            (format!("{name} {} {:?} {:?}\n", info.kind.name, info.dimensions, info.bytes), bytes)
        });
        self.files.files.fingerprint(&described.collect::<Vec<_>>())
    }
}

impl FilePages for GgufWeights {
    fn read(&self, bytes: &[u8], to: &mut [u8]) {
        self.files.files.read(bytes, to);
    }

    fn need(&self, bytes: &[u8]) {
        self.files.files.need(bytes);
    }

    fn release(&self, bytes: &[u8]) {
        self.files.files.release(bytes);
    }
}

fn encoding(name: &str, kind: TensorType) -> Result<Encoding, ModelError> {
    kind.encoding.ok_or_else(|| ModelError::UnsupportedType {
        name: name.to_owned(),
        kind: kind.name,
        supported: TensorType::supported(),
    })
}

fn decoded(name: &str, encoding: Encoding) -> Result<Float, ModelError> {
    match encoding {
        Encoding::Float(float) => Ok(float),
        _ => Err(ModelError::Shape {
            name: name.to_owned(),
            actual: "quantized".into(),
            expected: "F32, F16 or BF16".into(),
        }),
    }
}
