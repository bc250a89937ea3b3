//! How an embedding model's folder wants hidden states made into one vector: the file
//! `1_Pooling/config.json` of sentence-transformers.

use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// How a text's hidden states become one vector.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The last token's, which attends to all others. Also the default if the folder does not say.
    #[default]
    LastToken,
    /// The first token's.
    FirstToken,
    /// The mean of all.
    Mean,
    /// Another way, by its name in the file.
    Other(String),
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LastToken => "lasttoken",
            Self::FirstToken => "cls_token",
            Self::Mean => "mean_tokens",
            Self::Other(name) => name,
        })
    }
}

impl Pooling {
    /// Reads it from a model folder.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("1_Pooling").join("config.json");
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            // A GGUF file is not a folder.
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => return Ok(Self::default()),
            Err(error) => return Err(ModelError::io(&path, "how to pool hidden states", error)),
        };
        let config: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| ModelError::Malformed { path: path.clone(), reason: error.to_string() })?;
        Self::of(&config).map_err(|reason| ModelError::Malformed { path, reason })
    }

    fn of(config: &Map<String, Value>) -> Result<Self, String> {
        let set = |(field, value): (&String, &Value)| {
            let mode = field.strip_prefix("pooling_mode_")?;
            (value == &Value::Bool(true)).then(|| mode.to_owned())
        };
        let named = config.get("pooling_mode").and_then(Value::as_str).map(str::to_owned);
        let mut modes: Vec<String> = config.iter().filter_map(set).chain(named).collect();
        modes.dedup();
        match modes.as_slice() {
            [] => Err("it names no pooling_mode".into()),
            [one] if one == "lasttoken" => Ok(Self::LastToken),
            [one] if one == "cls_token" || one == "cls" => Ok(Self::FirstToken),
            [one] if one == "mean_tokens" || one == "mean" => Ok(Self::Mean),
            [one] => Ok(Self::Other(one.clone())),
            several => Ok(Self::Other(several.join(" and "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_modes_of_sentence_transformers_are_told_apart() {
        let of = |config: Value| Pooling::of(config.as_object().unwrap());
        let other = |name: &str| Ok(Pooling::Other(name.to_owned()));
        let qwen = json!({"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true, "include_prompt": true});
        assert_eq!(of(qwen), Ok(Pooling::LastToken));
        assert_eq!(of(json!({"pooling_mode": "lasttoken"})), Ok(Pooling::LastToken));
        assert_eq!(of(json!({"pooling_mode_cls_token": true})), Ok(Pooling::FirstToken));
        assert_eq!(of(json!({"pooling_mode": "mean"})), Ok(Pooling::Mean));
        assert_eq!(of(json!({"pooling_mode_max_tokens": true})), other("max_tokens"));
        let both = json!({"pooling_mode_cls_token": true, "pooling_mode_lasttoken": true});
        assert_eq!(of(both), other("cls_token and lasttoken"));
        assert!(of(json!({})).is_err());
    }

    #[test]
    fn a_folder_that_does_not_say_pools_the_last_token() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Pooling::read(folder.path()).unwrap(), Pooling::LastToken);
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, "").unwrap();
        assert_eq!(Pooling::read(&file).unwrap(), Pooling::LastToken);
        std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        std::fs::write(folder.path().join("1_Pooling/config.json"), "[").unwrap();
        assert!(Pooling::read(folder.path()).unwrap_err().to_string().contains("1_Pooling"));
    }
}
