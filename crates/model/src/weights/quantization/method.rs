//! `quantization_config` of quantizers other than MLX's, by `quant_method`.

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelError;

/// A quantizer's settings. The tensors show which modules are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::weights) enum Method {
    /// gpt-oss: OCP's MXFP4 in tensors `_blocks` and `_scales`.
    Mxfp4,
    /// E4M3 floats with a scale for each block of rows and columns; 0 means all.
    Fp8 { block: [usize; 2] },
    /// GPTQ, with groups of this many columns; 0 means all.
    Gptq {
        bits: u32,
        group: usize,
        /// Added to stored zeros.
        add: u8,
    },
    /// AWQ, 4 bits.
    Awq { group: usize },
    /// Integers of compressed-tensors.
    Packed { bits: u32, group: usize, zeros: bool },
    /// MXFP4 of compressed-tensors.
    PackedMxfp4,
}

/// Fields of `quantization_config`, of all methods.
#[derive(Debug, Deserialize)]
struct Fields {
    quant_method: String,
    bits: Option<u32>,
    group_size: Option<i64>,
    checkpoint_format: Option<String>,
    version: Option<String>,
    fmt: Option<String>,
    weight_block_size: Option<[usize; 2]>,
    format: Option<String>,
    #[serde(default)]
    config_groups: serde_json::Map<String, Value>,
}

/// `weights` of a group of compressed-tensors.
#[derive(Debug, Deserialize, PartialEq)]
struct Weights {
    num_bits: u32,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default = "symmetric")]
    symmetric: bool,
    strategy: Option<String>,
    group_size: Option<i64>,
    block_structure: Option<[usize; 2]>,
}

const fn symmetric() -> bool {
    true
}

impl Method {
    /// Reads a `quantization_config`.
    pub fn read(value: &Value, malformed: impl Fn(String) -> ModelError) -> Result<Self, ModelError> {
        let fields = Fields::deserialize(value).map_err(|error| malformed(error.to_string()))?;
        match fields.quant_method.as_str() {
            "mxfp4" => Ok(Self::Mxfp4),
            "fp8" => fields.fp8(),
            "gptq" => fields.gptq(),
            "awq" => fields.awq(),
            "compressed-tensors" => fields.compressed(malformed),
            other => unsupported(
                "quantization_config.quant_method",
                format!("{other:?}"),
                "MLX's quantization, mxfp4, fp8, gptq, awq and compressed-tensors are",
            ),
        }
    }
}

impl Fields {
    fn fp8(&self) -> Result<Method, ModelError> {
        match self.fmt.as_deref() {
            None | Some("e4m3" | "float8_e4m3fn") => {}
            Some(other) => return unsupported("quantization_config.fmt", format!("{other:?}"), "e4m3 is"),
        }
        fp8(self.weight_block_size.unwrap_or([0, 0]))
    }

    fn gptq(&self) -> Result<Method, ModelError> {
        let bits = self.bits.unwrap_or(4);
        if ![4, 8].contains(&bits) {
            return unsupported("quantization_config.bits", format!("{bits} (gptq)"), "4 and 8 are");
        }
        let add = match self.checkpoint_format.as_deref() {
            None | Some("gptq") => 1,
            Some("gptq_v2") => 0,
            Some(other) => {
                return unsupported(
                    "quantization_config.checkpoint_format",
                    format!("{other:?}"),
                    "gptq and gptq_v2 are",
                );
            }
        };
        Ok(Method::Gptq { bits, group: group(self.group_size)?, add })
    }

    fn awq(&self) -> Result<Method, ModelError> {
        match (self.bits, self.version.as_deref()) {
            (Some(bits), _) if bits != 4 => {
                unsupported("quantization_config.bits", format!("{bits} (awq)"), "4 is")
            }
            (_, Some(version)) if !version.eq_ignore_ascii_case("gemm") => {
                unsupported("quantization_config.version", format!("{version:?} (awq)"), "gemm is")
            }
            _ => Ok(Method::Awq { group: group(self.group_size)? }),
        }
    }

    fn compressed(&self, malformed: impl Fn(String) -> ModelError) -> Result<Method, ModelError> {
        let mut all = Vec::new();
        for (name, value) in &self.config_groups {
            let weights = Weights::deserialize(&value["weights"])
                .map_err(|error| malformed(format!("config_groups.{name}.weights: {error}")))?;
            all.push(weights);
        }
        let Some(weights) = all.first() else { return Err(malformed("it has no config_groups".into())) };
        if all.iter().any(|other| other != weights) {
            return unsupported(
                "quantization_config.config_groups",
                format!("{} groups with different weights", all.len()),
                "one kind of weights is",
            );
        }
        let format = self.format.as_deref().unwrap_or("none");
        let strategy = weights.strategy.as_deref().unwrap_or("tensor");
        match (format, weights.kind.as_str(), weights.num_bits, strategy) {
            ("pack-quantized", "int", bits @ (4 | 8), "group" | "channel") => Ok(Method::Packed {
                bits,
                group: if strategy == "channel" { 0 } else { group(weights.group_size)? },
                zeros: !weights.symmetric,
            }),
            ("mxfp4-pack-quantized", "float", 4, "group") if group(weights.group_size)? == 32 => {
                Ok(Method::PackedMxfp4)
            }
            ("float-quantized" | "naive-quantized", "float", 8, "channel") => fp8([1, 0]),
            ("float-quantized" | "naive-quantized", "float", 8, "tensor") => fp8([0, 0]),
            ("float-quantized" | "naive-quantized", "float", 8, "block") => {
                fp8(weights.block_structure.unwrap_or([128, 128]))
            }
            (format, kind, bits, strategy) => unsupported(
                "quantization_config.format",
                format!("{format:?} with {bits} bits of type {kind:?} by {strategy}"),
                "pack-quantized int of 4 and 8 bits by group or channel, mxfp4-pack-quantized in groups of 32, and \
                 float-quantized float of 8 bits by channel, tensor or block are",
            ),
        }
    }
}

fn unsupported<T>(field: &'static str, value: String, supported: &str) -> Result<T, ModelError> {
    Err(ModelError::Unsupported { field, value, supported: supported.to_owned() })
}

/// Columns of a group; 0 for all.
fn group(size: Option<i64>) -> Result<usize, ModelError> {
    match size.unwrap_or(128) {
        -1 => Ok(0),
        size @ 32..=1_048_576 if size % 32 == 0 => Ok(size as usize),
        other => unsupported(
            "quantization_config.group_size",
            other.to_string(),
            "multiples of 32, and -1 for a whole row, are",
        ),
    }
}

fn fp8(block: [usize; 2]) -> Result<Method, ModelError> {
    match block[1].is_multiple_of(32) && block.iter().all(|size| *size <= 1 << 20) {
        true => Ok(Method::Fp8 { block }),
        false => unsupported(
            "quantization_config.weight_block_size",
            format!("{block:?}"),
            "blocks with a multiple of 32 columns are",
        ),
    }
}
