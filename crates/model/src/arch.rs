//! From config.json to a [`ModelSpec`]. A family of architectures is a file in this folder.

mod config;
#[cfg(test)]
mod damaged_tests;
mod decoder;
mod deepseek4;
mod deepseek41;
mod delta;
mod encoder;
mod engram;
mod experts;
mod family;
mod gemma4;
mod glm53;
mod granite4;
mod kimi;
mod latent;
mod lfm2;
mod mimo;
mod minicpm;
mod minimax3;
mod modernbert;
mod nemotron;
mod rope;
mod selection;
mod streams;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelError;
use crate::spec::ModelSpec;
use family::families;

/// Values of `model_type` that wrap one of the others in `text_config`.
const WRAPPERS: [&str; 11] = [
    "mistral3",
    "kimi_k25",
    "kimi_k3",
    "kimi_vl",
    "llama4",
    "cohere2_vision",
    "exaone4_5",
    "glm4v",
    "glm46v",
    "glm4v_moe",
    "minimax_m3_vl",
];

/// Supported values of `model_type`.
pub fn known() -> impl Iterator<Item = &'static str> {
    families()
        .map(|family| family.name)
        .chain(WRAPPERS)
        .chain(encoder::FAMILIES.map(|family| family.name))
        .chain([modernbert::NAME])
}

/// One token id or a list of them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// Encoders that are not read, with a text of their own.
const OTHER_ENCODERS: [&str; 9] =
    ["albert", "deberta-v2", "distilbert", "electra", "mpnet", "new", "nomic_bert", "t5", "xlm-roberta-xl"];

/// Reads the architecture from a parsed config.json; `path` is for error texts.
///
/// # Errors
/// When the architecture is unknown, or a field is missing, contradictory or unsupported.
pub fn spec(config: &Value, path: &Path) -> Result<ModelSpec, ModelError> {
    let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
    let name = config.get("model_type").and_then(Value::as_str);
    let name = name.ok_or_else(|| malformed("it has no \"model_type\"".into()))?;
    if OTHER_ENCODERS.contains(&name) {
        return Err(ModelError::Encoder { name: name.to_owned() });
    }
    if let Some(family) = encoder::FAMILIES.iter().find(|family| family.name == name) {
        return encoder::spec(config, family, path);
    }
    if name == modernbert::NAME {
        return modernbert::spec(config, path);
    }
    if known().all(|known| known != name) {
        return Err(ModelError::UnknownArchitecture { name: name.to_owned() });
    }
    let text = config.get("text_config").unwrap_or(config);
    let mut text = text.clone();
    // A wrapped config may have these fields outside only.
    for field in ["eos_token_id", "tie_word_embeddings", "model_type"] {
        if let (Some(inner), Some(value)) = (text.as_object_mut(), config.get(field)) {
            inner.entry(field).or_insert_with(|| value.clone());
        }
    }
    let inner = text.get("model_type").and_then(Value::as_str).unwrap_or(name);
    let family = families().find(|family| family.name == inner);
    let family = family.ok_or_else(|| match inner == name {
        true => {
            malformed(format!("a {name:?} needs a \"text_config\" with the model_type of its language model"))
        }
        false => ModelError::UnknownArchitecture { name: inner.to_owned() },
    })?;
    decoder::spec(&text, family, path)
}
