//! How config.json says that matrices are quantized: MLX's `quantization`, or the
//! `quantization_config` of other quantizers.

mod method;

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelError;
pub(super) use method::Method;

/// How the matrices of a folder are quantized.
#[derive(Debug, Default)]
pub struct Quantization {
    scheme: Option<Scheme>,
}

#[derive(Debug)]
enum Scheme {
    Mlx {
        default: Settings,
        /// Modules with settings of their own.
        modules: HashMap<String, Settings>,
    },
    Other(Method),
}

/// MLX's quantization of a module.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub group_size: usize,
    pub bits: u32,
    pub mode: Mode,
}

/// MLX's modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Affine,
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

impl Quantization {
    /// True if matrices are quantized by default.
    pub fn is_any(&self) -> bool {
        self.scheme.is_some()
    }

    /// MLX's settings of a quantized module; `None` if config.json has none at all.
    pub(super) fn of(&self, module: &str) -> Option<&Settings> {
        match &self.scheme {
            Some(Scheme::Mlx { default, modules }) => Some(modules.get(module).unwrap_or(default)),
            _ => None,
        }
    }

    /// Another quantizer's settings.
    pub(super) fn method(&self) -> Option<&Method> {
        match &self.scheme {
            Some(Scheme::Other(method)) => Some(method),
            _ => None,
        }
    }

    /// Reads the quantization from a parsed config.json; `path` is for error texts.
    ///
    /// # Errors
    /// When config.json asks for a quantization that is not supported.
    pub fn read(config: &Value, path: &Path) -> Result<Self, ModelError> {
        let field = |name: &str| {
            let inner = config.get("text_config").and_then(|text| text.get(name));
            config.get(name).or(inner).filter(|value| !value.is_null())
        };
        let malformed = |reason: String| ModelError::Malformed {
            path: path.to_owned(),
            reason: format!("quantization: {reason}"),
        };
        let scheme = match (field("quantization"), field("quantization_config")) {
            (None, None) => None,
            // Other quantizers write `quantization_config` only. MLX writes both, without a method.
            (None, Some(value)) if value.get("quant_method").is_some() => {
                Some(Scheme::Other(Method::read(value, malformed)?))
            }
            (Some(value), _) | (None, Some(value)) => Some(mlx(value, malformed)?),
        };
        Ok(Self { scheme })
    }
}

fn mlx(value: &Value, malformed: impl Fn(String) -> ModelError) -> Result<Scheme, ModelError> {
    let default = Settings::read(value, &malformed)?;
    let mut modules = HashMap::new();
    for (name, value) in value.as_object().into_iter().flatten() {
        // `false` marks an unquantized module; its missing scales say the same.
        if value.is_object() {
            modules.insert(name.clone(), Settings::read(value, &malformed)?);
        }
    }
    Ok(Scheme::Mlx { default, modules })
}

impl Settings {
    fn read(value: &Value, malformed: impl Fn(String) -> ModelError) -> Result<Self, ModelError> {
        #[derive(Deserialize)]
        struct Fields {
            group_size: usize,
            bits: u32,
            mode: Option<String>,
        }
        let fields = Fields::deserialize(value).map_err(|error| malformed(error.to_string()))?;
        let (bits, group_size) = (fields.bits, fields.group_size);
        let name = fields.mode.as_deref().unwrap_or("affine");
        let (mode, widths, groups): (_, &[u32], &[usize]) = match name {
            "affine" => (Mode::Affine, &[2, 3, 4, 5, 6, 8], &[32, 64, 128]),
            "mxfp4" => (Mode::Mxfp4, &[4], &[32]),
            "mxfp8" => (Mode::Mxfp8, &[8], &[32]),
            "nvfp4" => (Mode::Nvfp4, &[4], &[16]),
            other => {
                return Err(ModelError::Unsupported {
                    field: "quantization.mode",
                    value: format!("{other:?}"),
                    supported: "affine, mxfp4, mxfp8 and nvfp4 are".into(),
                });
            }
        };
        if widths.contains(&bits) && groups.contains(&group_size) {
            return Ok(Self { group_size, bits, mode });
        }
        let supported = match mode {
            Mode::Affine => "2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128 are".into(),
            _ => format!("{} bits in groups of {} are", widths[0], groups[0]),
        };
        Err(ModelError::Unsupported {
            field: "quantization",
            value: format!("{name} with {bits} bits in groups of {group_size}"),
            supported,
        })
    }
}
