//! The files of sentence-transformers next to an encoder's weights: modules.json lists what follows
//! the encoder, and `1_Pooling/config.json` says how hidden states become one vector.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use thunder_compute::Curve;

use crate::error::ModelError;
use crate::pooling::Pooling;
use crate::spec::{DenseFrom, DenseShape, ModelSpec};

/// A line of modules.json.
#[derive(Debug, Deserialize)]
struct Module {
    path: String,
    #[serde(rename = "type")]
    class: String,
}

/// config.json of a product after the pooling.
#[derive(Debug, Deserialize)]
struct Dense {
    in_features: usize,
    out_features: usize,
    #[serde(default = "yes")]
    bias: bool,
    #[serde(default)]
    activation_function: Option<String>,
}

const fn yes() -> bool {
    true
}

/// sentence_bert_config.json.
#[derive(Debug, Deserialize)]
struct Limits {
    #[serde(default)]
    max_seq_length: Option<usize>,
}

/// Adds what a folder says to the spec of an encoder that makes vectors. Without such files, the
/// vector is the mean of all hidden states, as in sentence-transformers.
///
/// # Errors
/// When a file cannot be read, or asks for what is not supported.
pub(crate) fn complete(spec: &mut ModelSpec, folder: &Path) -> Result<(), ModelError> {
    let Some(encoder) = spec.encoder.as_mut().filter(|encoder| !encoder.scores) else { return Ok(()) };
    if folder.join("1_Pooling").join("config.json").is_file() {
        encoder.pooling = Pooling::read(folder)?;
    }
    if let Pooling::Other(name) = &encoder.pooling {
        return Err(ModelError::Unsupported {
            field: "1_Pooling/config.json: pooling_mode",
            value: name.clone(),
            supported: "mean_tokens, cls_token and lasttoken are".into(),
        });
    }
    let modules: Vec<Module> = read_if_there(&folder.join("modules.json"))?.unwrap_or_default();
    let mut width = spec.hidden;
    for Module { path, class } in modules {
        match class.rsplit('.').next().unwrap_or_default() {
            // Vectors are given the length 1 in any case.
            "Transformer" | "Pooling" | "Normalize" => {}
            "Dense" => {
                let dense = read_dense(folder, path)?;
                if dense.inputs != width {
                    let reason = format!("its in_features is {}, but it is given {width}", dense.inputs);
                    let path = folder.join("modules.json");
                    return Err(ModelError::Malformed { path, reason });
                }
                width = dense.outputs;
                encoder.dense.push(dense);
            }
            _ => {
                return Err(ModelError::Unsupported {
                    field: "modules.json: type",
                    value: class,
                    supported: "Transformer, Pooling, Dense and Normalize of sentence-transformers are"
                        .into(),
                });
            }
        }
    }
    let limits: Option<Limits> = read_if_there(&folder.join("sentence_bert_config.json"))?;
    if let Some(most) = limits.and_then(|limits| limits.max_seq_length).filter(|most| *most > 1) {
        spec.context = spec.context.min(most);
    }
    Ok(())
}

fn read_dense(folder: &Path, path: String) -> Result<DenseShape, ModelError> {
    let file = folder.join(&path).join("config.json");
    // The path is one of the model's files: it must lead to no others.
    let is_inside = !path.is_empty() && !path.contains(['/', '\\']) && path != "..";
    let read = if is_inside { read_if_there(&file)? } else { None };
    let Some(Dense { in_features: inputs, out_features: outputs, bias, activation_function }) = read else {
        return Err(ModelError::Missing { path: file, needs: "a product of sentence-transformers" });
    };
    let curve = match activation_function.as_deref().and_then(|name| name.rsplit('.').next()) {
        None | Some("Identity") => None,
        Some("Tanh") => Some(Curve::Tanh),
        Some("ReLU") => Some(Curve::Relu),
        Some("GELU") => Some(Curve::Gelu),
        Some(other) => {
            return Err(ModelError::Unsupported {
                field: "activation_function",
                value: other.to_owned(),
                supported: "Identity, Tanh, ReLU and GELU are".into(),
            });
        }
    };
    if inputs == 0 || outputs == 0 {
        return Err(ModelError::Malformed { path: file, reason: "its sizes are 0".into() });
    }
    Ok(DenseShape { from: DenseFrom::Folder(path), inputs, outputs, bias, curve })
}

fn read_if_there<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ModelError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| ModelError::Malformed { path: path.to_owned(), reason: error.to_string() }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ModelError::io(path, "what follows the encoder", error)),
    }
}
