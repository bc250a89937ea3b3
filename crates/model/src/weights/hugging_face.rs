//! From tensors in files to the rows and columns that a rank takes of them.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde_json::Value;
use thunder_compute::{Encoding, FilePages, Float, MatrixSource, Strided};

use crate::error::ModelError;
use crate::weights::{Tensor, Weights};

/// How the matrices of a folder are quantized: MLX's `quantization` of config.json.
#[derive(Debug, Default)]
pub struct Quantization {
    default: Option<Settings>,
    modules: HashMap<String, Settings>,
}

#[derive(Debug, Clone, Deserialize)]
struct Settings {
    group_size: usize,
    bits: u32,
    #[serde(default = "affine")]
    mode: String,
}

fn affine() -> String {
    "affine".to_owned()
}

impl Quantization {
    /// Whether matrices are quantized, but for what names itself otherwise.
    pub fn is_any(&self) -> bool {
        self.default.is_some()
    }

    /// Reads it from a parsed config.json.
    ///
    /// # Errors
    /// When there is one and it is of a kind that is not supported.
    pub fn read(config: &Value, path: &Path) -> Result<Self, ModelError> {
        let Some(value) = config.get("quantization").or_else(|| config.get("quantization_config")) else {
            return Ok(Self::default());
        };
        // Other quantizers write only `quantization_config`; what MLX writes there names no method.
        if let Some(method) = value.get("quant_method").and_then(Value::as_str)
            && config.get("quantization").is_none()
        {
            return Err(ModelError::Unsupported {
                field: "quantization_config.quant_method",
                value: format!("{method:?}"),
                supported: "MLX's affine quantization is".into(),
            });
        }
        let malformed = |error: serde_json::Error| ModelError::Malformed {
            path: path.to_owned(),
            reason: format!("quantization: {error}"),
        };
        let default = Settings::deserialize(value).map_err(malformed)?;
        let mut modules = HashMap::new();
        for (name, value) in value.as_object().into_iter().flatten() {
            // `false` marks a module that is left as it is, which the files tell as well.
            if value.is_object() {
                modules.insert(name.clone(), Settings::deserialize(value).map_err(malformed)?);
            }
        }
        for settings in std::iter::once(&default).chain(modules.values()) {
            if settings.mode != "affine" {
                return Err(ModelError::Unsupported {
                    field: "quantization.mode",
                    value: format!("{:?}", settings.mode),
                    supported: "affine is".into(),
                });
            }
            if ![2, 3, 4, 5, 6, 8].contains(&settings.bits) || ![32, 64, 128].contains(&settings.group_size) {
                return Err(ModelError::Unsupported {
                    field: "quantization",
                    value: format!("{} bits in groups of {}", settings.bits, settings.group_size),
                    supported: "2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128 are".into(),
                });
            }
        }
        Ok(Self { default: Some(default), modules })
    }
}

/// Makes a rank's [`MatrixSource`]s.
pub struct Loader<'a> {
    weights: &'a Weights,
    quantization: &'a Quantization,
    pages: Option<&'a dyn FilePages>,
}

/// Which rows and columns of a `[out, in]` matrix are taken, and whether its bias is.
#[derive(Debug, Clone)]
pub struct Window {
    /// Output features.
    pub rows: Range<usize>,
    /// Input features.
    pub cols: Range<usize>,
    /// Take the bias of the rows.
    pub bias: bool,
}

impl<'a> Loader<'a> {
    /// A loader that tells `pages` what is read.
    pub fn new(
        weights: &'a Weights,
        quantization: &'a Quantization,
        pages: Option<&'a dyn FilePages>,
    ) -> Self {
        Self { weights, quantization, pages }
    }

    /// The file's tensors.
    pub fn weights(&self) -> &'a Weights {
        self.weights
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'a>, ModelError> {
        self.weights.get(name).ok_or_else(|| {
            let end: String =
                name.rsplit('.').take(3).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join(".");
            let other = self.weights.name_ending(&end).map(|other| format!("; there is {other:?}"));
            let other = other.unwrap_or_default();
            let hint =
                format!("{other}: the folder is incomplete or of another architecture than its config says");
            ModelError::NoTensor { name: name.to_owned(), hint }
        })
    }

    /// How the matrix at `path` is stored.
    ///
    /// # Errors
    /// When it is missing or of a type that is not known.
    pub fn encoding(&self, path: &str) -> Result<Encoding, ModelError> {
        let weight = format!("{path}.weight");
        let tensor = self.tensor(&weight)?;
        let scales = format!("{path}.scales");
        let Some(scales) = self.weights.get(&scales) else {
            return Ok(Encoding::Float(float(&weight, &tensor)?));
        };
        let settings = self.quantization.modules.get(path).or(self.quantization.default.as_ref());
        let settings = settings.ok_or_else(|| ModelError::Shape {
            name: weight.clone(),
            actual: "quantized (it has scales)".into(),
            expected: "unquantized: config.json has no \"quantization\"".into(),
        })?;
        let scales = float(&format!("{path}.scales"), &scales)?;
        Ok(Encoding::Affine { bits: settings.bits, group: settings.group_size, scales })
    }

    /// The window of the matrix `[out, in]` at `path`.
    ///
    /// # Errors
    /// When a tensor is missing or not of the shape that the config implies.
    pub fn matrix(
        &self,
        path: &str,
        shape: [usize; 2],
        window: &Window,
    ) -> Result<MatrixSource<'a>, ModelError> {
        let encoding = self.encoding(path)?;
        let [out, input] = shape;
        let (rows, cols) = (&window.rows, &window.cols);
        let weight_bits = match encoding {
            Encoding::Float(float) => 8 * float.bytes(),
            Encoding::Affine { bits, group, .. } => {
                if input % group != 0 {
                    return Err(ModelError::Shape {
                        name: format!("{path}.weight"),
                        actual: format!("quantized in groups of {group}"),
                        expected: format!("{input} columns, which are no whole number of groups"),
                    });
                }
                bits as usize
            }
        };
        let weight = match encoding {
            Encoding::Float(_) => self.shaped(&format!("{path}.weight"), &[out, input], None)?,
            Encoding::Affine { .. } => {
                self.shaped(&format!("{path}.weight"), &[out, input * weight_bits / 32], Some(Dtype::U32))?
            }
        };
        let scales = match encoding {
            Encoding::Float(_) => None,
            Encoding::Affine { group, scales, .. } => {
                let bits = 8 * scales.bytes();
                let columns = cols.start / group..cols.end / group;
                let part = |name: &str| {
                    let name = format!("{path}.{name}");
                    let tensor = self.shaped(&name, &[out, input / group], None)?;
                    if float(&name, &tensor)? != scales {
                        return Err(ModelError::Shape {
                            name,
                            actual: format!("{:?}", tensor.dtype),
                            expected: format!("{scales:?}, as the scales are"),
                        });
                    }
                    Ok(strided(tensor.bytes, input / group * bits / 8, rows, &columns, bits))
                };
                Some((part("scales")?, part("biases")?))
            }
        };
        let bias = match window.bias {
            true => Some(self.vector(&format!("{path}.bias"), out)?[rows.clone()].to_vec()),
            false => None,
        };
        Ok(MatrixSource {
            rows: rows.len(),
            cols: cols.len(),
            encoding,
            weight: strided(weight.bytes, input * weight_bits / 8, rows, cols, weight_bits),
            scales,
            bias,
            pages: self.pages,
        })
    }

    /// A vector of `len` numbers.
    ///
    /// # Errors
    /// When it is missing or of another shape.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.shaped(name, &[len], None)?;
        let mut values = vec![0.0; len];
        float(name, &tensor)?.decode(tensor.bytes, &mut values);
        Ok(values)
    }

    fn shaped(&self, name: &str, shape: &[usize], dtype: Option<Dtype>) -> Result<Tensor<'a>, ModelError> {
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
}

fn strided<'a>(
    bytes: &'a [u8],
    stride: usize,
    rows: &Range<usize>,
    cols: &Range<usize>,
    bits: usize,
) -> Strided<'a> {
    // Windows begin at whole groups of at least 32 elements, so at whole bytes.
    let row_bytes = cols.len() * bits / 8;
    let start = if rows.is_empty() { 0 } else { rows.start * stride + cols.start * bits / 8 };
    Strided { bytes: &bytes[start..], stride, row_bytes }
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
