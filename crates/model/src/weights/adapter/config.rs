//! adapter_config.json, as PEFT and as MLX-LM write it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelError;

/// What an adapter's config says about its tensors.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    /// The file with the tensors.
    pub weights: PathBuf,
    /// Suffixes of a module's name in the names of its two tensors.
    pub down: &'static str,
    pub up: &'static str,
    /// True if tensors have the inputs first.
    pub transposed: bool,
    scaling: Scaling,
}

#[derive(Debug)]
enum Scaling {
    /// The same for all modules (MLX-LM).
    Scale(f32),
    /// Alpha divided by the rank, or by its root.
    Alpha { alpha: f32, by_root: bool, of_modules: BTreeMap<String, f32> },
}

/// PEFT's config, as far as it decides what is computed.
#[derive(Deserialize)]
#[serde(default)]
struct Peft {
    lora_alpha: f32,
    use_rslora: bool,
    alpha_pattern: Option<BTreeMap<String, f32>>,
}

impl Default for Peft {
    fn default() -> Self {
        // PEFT's.
        Self { lora_alpha: 8.0, use_rslora: false, alpha_pattern: None }
    }
}

/// MLX-LM's.
#[derive(Deserialize)]
struct Mlx {
    lora_parameters: MlxParameters,
}

#[derive(Deserialize)]
struct MlxParameters {
    scale: f32,
}

/// Fields of PEFT that change the computation, and the values with which they do not.
const NEUTRAL: [(&str, &[&str]); 12] = [
    ("use_dora", &["false"]),
    ("bias", &["\"none\""]),
    ("lora_bias", &["false"]),
    ("fan_in_fan_out", &["false"]),
    ("modules_to_save", &["[]"]),
    ("trainable_token_indices", &["[]", "{}"]),
    ("layer_replication", &["[]"]),
    ("target_parameters", &["[]"]),
    ("use_qalora", &["false"]),
    ("alora_invocation_tokens", &["[]"]),
    ("arrow_config", &[]),
    ("use_bdlora", &[]),
];

impl AdapterConfig {
    /// Reads the config of an adapter's folder.
    ///
    /// # Errors
    /// When it is missing or malformed, or asks for something unsupported.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let wrong = |reason: String| ModelError::Adapter { path: folder.to_owned(), reason };
        let path = folder.join("adapter_config.json");
        let text = std::fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => wrong(
                "there is no adapter_config.json: give a folder as PEFT or MLX-LM write it, with adapter_config.json and \
                 adapter_model.safetensors or adapters.safetensors"
                    .to_owned(),
            ),
            _ => ModelError::Io { path: path.clone(), source: error },
        })?;
        let malformed = |error: serde_json::Error| ModelError::Malformed {
            path: path.clone(),
            reason: error.to_string(),
        };
        let config: Value = serde_json::from_slice(&text).map_err(malformed)?;
        let file = |name: &str| {
            let path = folder.join(name);
            match path.is_file() {
                true => Ok(path),
                false => Err(wrong(format!("there is no {name}, which holds the adapter's weights"))),
            }
        };
        if config.get("peft_type").is_none() && config.get("lora_parameters").is_some() {
            if let Some(kind) = config.get("fine_tune_type").filter(|kind| *kind != "lora") {
                return Err(wrong(format!("fine_tune_type is {kind}: \"lora\" is supported")));
            }
            let of: Mlx = serde_json::from_value(config).map_err(malformed)?;
            return Ok(Self {
                weights: file("adapters.safetensors")?,
                down: ".lora_a",
                up: ".lora_b",
                transposed: true,
                scaling: Scaling::Scale(of.lora_parameters.scale),
            });
        }
        match config.get("peft_type") {
            Some(kind) if kind == "LORA" => {}
            Some(kind) => return Err(wrong(format!("peft_type is {kind}: \"LORA\" is supported"))),
            None => {
                return Err(wrong(
                    "adapter_config.json has neither peft_type nor lora_parameters".to_owned(),
                ));
            }
        }
        for (field, neutral) in NEUTRAL {
            let value = config.get(field).filter(|value| !value.is_null()).map(Value::to_string);
            if let Some(value) = value.filter(|value| !neutral.contains(&value.as_str())) {
                return Err(wrong(format!(
                    "{field} is {value}, which is not supported: merge the adapter into the model, or train without it"
                )));
            }
        }
        let of: Peft = serde_json::from_value(config).map_err(malformed)?;
        let of_modules = of.alpha_pattern.unwrap_or_default();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._".contains(c);
        if let Some(pattern) = of_modules.keys().find(|pattern| !pattern.chars().all(is_plain)) {
            return Err(wrong(format!("alpha_pattern has {pattern:?}: ends of module names are supported")));
        }
        Ok(Self {
            weights: file("adapter_model.safetensors")?,
            down: ".lora_A.weight",
            up: ".lora_B.weight",
            transposed: false,
            scaling: Scaling::Alpha { alpha: of.lora_alpha, by_root: of.use_rslora, of_modules },
        })
    }

    /// The module of a tensor, and whether the tensor is its first one.
    pub fn split(&self, tensor: &str) -> Option<(String, bool)> {
        let of = |end: &str| tensor.strip_suffix(end).map(str::to_owned);
        of(self.down).map(|module| (module, true)).or_else(|| of(self.up).map(|module| (module, false)))
    }

    /// The factor of a module's product of rank `rank`.
    pub fn scale(&self, module: &str, rank: usize) -> f32 {
        match &self.scaling {
            Scaling::Scale(scale) => *scale,
            Scaling::Alpha { alpha, by_root, of_modules } => {
                let is_end = |pattern: &str| {
                    let before = module.strip_suffix(pattern);
                    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
                };
                let own = of_modules.iter().find(|(pattern, _)| is_end(pattern)).map(|(_, alpha)| *alpha);
                let by = if *by_root { (rank as f32).sqrt() } else { rank as f32 };
                own.unwrap_or(*alpha) / by
            }
        }
    }
}
