//! MLX's quantization settings.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelError;

/// MLX's name of OCP's MXFP4.
pub(super) const MXFP4: &str = "mxfp4";

/// How the matrices of a folder are quantized: MLX's `quantization` in config.json.
#[derive(Debug, Default)]
pub struct Quantization {
    default: Option<Settings>,
    /// Modules with settings of their own.
    modules: HashMap<String, Settings>,
}

/// Quantization of a module.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Settings {
    pub group_size: usize,
    pub bits: u32,
    #[serde(default = "affine")]
    pub mode: String,
}

fn affine() -> String {
    "affine".to_owned()
}

impl Quantization {
    /// True if matrices are quantized unless a module says otherwise.
    pub fn is_any(&self) -> bool {
        self.default.is_some()
    }

    /// The settings of a quantized module; `None` if config.json has none at all.
    pub(super) fn of(&self, module: &str) -> Option<&Settings> {
        self.modules.get(module).or(self.default.as_ref())
    }

    /// Reads the quantization from a parsed config.json; `path` is for error texts.
    ///
    /// # Errors
    /// When config.json asks for a quantization that is not supported.
    pub fn read(config: &Value, path: &Path) -> Result<Self, ModelError> {
        let Some(value) = config.get("quantization").or_else(|| config.get("quantization_config")) else {
            return Ok(Self::default());
        };
        // Other quantizers write `quantization_config` only. MLX writes both, without a method.
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
            // `false` marks an unquantized module; its missing scales say the same.
            if value.is_object() {
                modules.insert(name.clone(), Settings::deserialize(value).map_err(malformed)?);
            }
        }
        for settings in std::iter::once(&default).chain(modules.values()) {
            if !["affine", MXFP4].contains(&settings.mode.as_str()) {
                return Err(ModelError::Unsupported {
                    field: "quantization.mode",
                    value: format!("{:?}", settings.mode),
                    supported: "affine and mxfp4 are".into(),
                });
            }
            if settings.mode == MXFP4 && (settings.bits, settings.group_size) != (4, 32) {
                return Err(ModelError::Unsupported {
                    field: "quantization",
                    value: format!("mxfp4 with {} bits in groups of {}", settings.bits, settings.group_size),
                    supported: "4 bits in groups of 32 are".into(),
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
