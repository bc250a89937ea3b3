//! Safetensors under Hugging Face's or MLX's names, plain or in MLX's affine quantization.

use std::path::Path;

use safetensors::tensor::Dtype;
use thunder_compute::{Encoding, FilePages, Float, RowOrder};

use super::names::{Name, Names};
use super::quantization::MXFP4;
use super::safetensors::{SafetensorsFiles, Tensor};
use super::{Quantization, Role, StoredMatrix, WeightSource};
use crate::error::ModelError;

/// The safetensors files of a folder.
#[derive(Debug)]
pub struct HuggingFace {
    files: SafetensorsFiles,
    names: Names,
    quantization: Quantization,
}

impl HuggingFace {
    /// Maps the files of a folder: those in model.safetensors.index.json, or model.safetensors.
    ///
    /// # Errors
    /// When a file is missing, truncated or malformed.
    pub fn open(folder: &Path, quantization: Quantization) -> Result<Self, ModelError> {
        let files = SafetensorsFiles::open(folder)?;
        let names = Names::find(&files);
        Ok(Self { files, names, quantization })
    }

    /// The name that the files use for a role, or the first possible one if they have none.
    /// `suffix` completes a module.
    fn name(&self, role: Role, suffix: &str) -> Name {
        let mut names = self.names.of(role);
        // A stack may be a parameter of its own and not a module's weight.
        let has = |name: &Name| {
            self.files.has(&format!("{}{suffix}", name.path)) || name.stacked && self.files.has(&name.path)
        };
        let found = names.iter().position(has);
        names.swap_remove(found.unwrap_or(0))
    }

    /// The tensor of a module's elements.
    fn weight_name(&self, module: &str) -> String {
        let weight = format!("{module}.weight");
        if !self.files.has(&weight) && self.files.has(module) { module.to_owned() } else { weight }
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        self.files.get(name).ok_or_else(|| {
            let mut end: Vec<_> = name.rsplit('.').take(3).collect();
            end.reverse();
            let other = self.files.name_ending(&end.join(".")).map(|other| format!("; there is {other:?}"));
            let other = other.unwrap_or_default();
            let hint =
                format!("{other}: the folder is incomplete or of another architecture than its config says");
            ModelError::NoTensor { name: name.to_owned(), hint }
        })
    }

    /// A tensor that must have this shape and, if given, type.
    fn shaped(&self, name: &str, shape: &[usize], dtype: Option<Dtype>) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.tensor(name)?;
        if tensor.shape != shape || dtype.is_some_and(|dtype| dtype != tensor.dtype) {
            let expected = match dtype {
                Some(dtype) => format!("{dtype:?} {shape:?}"),
                None => format!("{shape:?}"),
            };
            return Err(ModelError::Shape {
                name: name.to_owned(),
                actual: format!("{:?} {:?}", tensor.dtype, tensor.shape),
                expected,
            });
        }
        Ok(tensor)
    }

    fn encoding(&self, module: &str) -> Result<Encoding, ModelError> {
        let weight = self.weight_name(module);
        let tensor = self.tensor(&weight)?;
        let scales = format!("{module}.scales");
        let Some(scales_tensor) = self.files.get(&scales) else {
            return Ok(Encoding::Float(float(&weight, &tensor)?));
        };
        let settings = self.quantization.of(module).ok_or_else(|| ModelError::Shape {
            name: weight.clone(),
            actual: "quantized (it has scales)".into(),
            expected: "unquantized: config.json has no \"quantization\"".into(),
        })?;
        if settings.mode == MXFP4 {
            return Ok(Encoding::Mxfp4);
        }
        let scales = float(&scales, &scales_tensor)?;
        Ok(Encoding::Affine { bits: settings.bits, group: settings.group_size, scales })
    }

    /// The tensor at `name`, or one expert's or head's part of it if the name is that of a stack.
    fn part(
        &self,
        name: &str,
        stack: Option<Role>,
        shape: &[usize],
        dtype: Option<Dtype>,
    ) -> Result<Tensor<'_>, ModelError> {
        let Some((index, count)) = stack.and_then(Role::in_stack) else {
            return self.shaped(name, shape, dtype);
        };
        let all = self.shaped(name, &[&[count], shape].concat(), dtype)?;
        let bytes = all.bytes.len() / count;
        Ok(Tensor { bytes: &all.bytes[index * bytes..][..bytes], ..all })
    }
}

impl WeightSource for HuggingFace {
    fn has(&self, role: Role) -> bool {
        let names = self.names.of(role);
        names
            .iter()
            .any(|name| ["", ".weight"].iter().any(|end| self.files.has(&format!("{}{end}", name.path))))
    }

    fn format(&self, role: Role) -> Result<Encoding, ModelError> {
        self.encoding(&self.name(role, ".weight").path)
    }

    fn matrix(&self, role: Role, shape: [usize; 2]) -> Result<StoredMatrix<'_>, ModelError> {
        let Name { path, stacked } = self.name(role, ".weight");
        let stack = stacked.then_some(role);
        let encoding = self.encoding(&path)?;
        let ([rows, cols], weight) = (shape, self.weight_name(&path));
        let plain = StoredMatrix {
            rows,
            cols,
            encoding,
            weight: &[],
            scales: None,
            offsets: None,
            row_order: RowOrder::AsStored,
            pages: Some(self),
        };
        let (bits, group) = match encoding {
            Encoding::Affine { bits, group, .. } => (bits, group),
            Encoding::Mxfp4 => (4, encoding.column_unit()),
            _ => return Ok(StoredMatrix { weight: self.part(&weight, stack, &shape, None)?.bytes, ..plain }),
        };
        if cols % group != 0 {
            return Err(ModelError::Shape {
                name: weight,
                actual: format!("quantized in groups of {group}"),
                expected: format!("{cols} columns, which are no whole number of groups"),
            });
        }
        let words = [rows, cols * bits as usize / 32];
        let weight = self.part(&weight, stack, &words, Some(Dtype::U32))?.bytes;
        let Encoding::Affine { scales, .. } = encoding else {
            let scales = format!("{path}.scales");
            let scales = self.part(&scales, stack, &[rows, cols / group], Some(Dtype::U8))?.bytes;
            return Ok(StoredMatrix { weight, scales: Some(scales), ..plain });
        };
        let numbers = |end: &str| {
            let name = format!("{path}.{end}");
            let tensor = self.part(&name, stack, &[rows, cols / group], None)?;
            if float(&name, &tensor)? != scales {
                return Err(ModelError::Shape {
                    name,
                    actual: format!("{:?}", tensor.dtype),
                    expected: format!("{scales:?}, as the scales are"),
                });
            }
            Ok(Some(tensor.bytes))
        };
        Ok(StoredMatrix { weight, scales: numbers("scales")?, offsets: numbers("biases")?, ..plain })
    }

    fn bias(&self, role: Role, len: usize) -> Result<Vec<f32>, ModelError> {
        let Name { path, stacked } = self.name(role, ".weight");
        let name = format!("{path}.bias");
        let tensor = self.part(&name, stacked.then_some(role), &[len], None)?;
        decode(&name, &tensor, len)
    }

    fn vector(&self, role: Role, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let name = self.name(role, "").path;
        let tensor = self.tensor(&name)?;
        // Axes of one do not count: MLX moves them in convolutions, and ERNIE has one before the
        // router's correction.
        let long = |shape: &[usize]| shape.iter().copied().filter(|&len| len != 1).collect::<Vec<_>>();
        match long(tensor.shape) == long(shape) {
            true => decode(&name, &tensor, shape.iter().product()),
            false => decode(&name, &self.shaped(&name, shape, None)?, shape.iter().product()),
        }
    }

    /// MLX-LM adds the one to the norms of a model with a delta rule, and tells a converted folder
    /// by its convolutions, `[channels, taps, 1]`. It leaves the norms of other models alone.
    fn norms_less_one(&self) -> bool {
        let convolution =
            self.files.name_ending("linear_attn.conv1d.weight").and_then(|name| self.files.get(name));
        convolution.is_none_or(|tensor| tensor.shape.get(1) == Some(&1))
    }

    fn bytes(&self) -> u64 {
        self.files.bytes()
    }

    fn unread(&self) -> Vec<String> {
        self.files.unread()
    }

    fn is_quantized(&self) -> bool {
        self.quantization.is_any()
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.files.fingerprint()
    }
}

impl FilePages for HuggingFace {
    fn need(&self, bytes: &[u8]) {
        self.files.need(bytes);
    }

    fn release(&self, bytes: &[u8]) {
        self.files.release(bytes);
    }
}

fn decode(name: &str, tensor: &Tensor<'_>, len: usize) -> Result<Vec<f32>, ModelError> {
    let mut values = vec![0.0; len];
    float(name, tensor)?.decode(tensor.bytes, &mut values);
    match values.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(ModelError::NotFinite { name: name.to_owned(), at, value: values[at] }),
        None => Ok(values),
    }
}

fn float(name: &str, tensor: &Tensor<'_>) -> Result<Float, ModelError> {
    match tensor.dtype {
        Dtype::F32 => Ok(Float::F32),
        Dtype::F16 => Ok(Float::F16),
        Dtype::BF16 => Ok(Float::BF16),
        other => Err(ModelError::Shape {
            name: name.to_owned(),
            actual: format!("{other:?}"),
            expected: "F32, F16 or BF16 (or U32 with scales)".into(),
        }),
    }
}
