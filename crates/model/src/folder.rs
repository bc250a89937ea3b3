//! A model folder, or a GGUF file: configuration, tokenizer, chat template and weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use crate::arch::{self, TokenIds};
use crate::chat::{ChatError, ChatTemplate};
use crate::error::ModelError;
use crate::gguf::{self, GgufFiles, GgufWeights};
use crate::sentence;
use crate::spec::ModelSpec;
use crate::tokenizer::{Tokenizer, TokenizerError};
use crate::weights::{Adapter, HuggingFace, LayerRole, Quantization, WeightSource};

/// A model folder, opened. Opening reads configuration files and weight headers only.
#[derive(Debug)]
pub struct ModelFolder {
    /// The folder, or the GGUF file.
    pub path: PathBuf,
    /// The architecture.
    pub spec: ModelSpec,
    /// The weights.
    pub weights: Box<dyn WeightSource>,
    /// Low-rank adapters that are loaded with the weights; number `i` is adapter `i + 1` of a step.
    pub adapters: Vec<Adapter>,
    /// generation_config.json.
    pub generation: GenerationConfig,
    /// The files that also hold the tokenizer and the chat template.
    pub(crate) gguf: Option<Arc<GgufFiles>>,
}

/// generation_config.json: the sampling that the model's authors recommend.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    /// False: greedy decoding.
    pub do_sample: Option<bool>,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Nucleus sampling: probability mass of the candidates.
    pub top_p: Option<f32>,
    /// Number of candidates; 0 and -1 mean all.
    pub top_k: Option<i64>,
    /// Smallest probability of a candidate, relative to the likeliest.
    pub min_p: Option<f32>,
    /// Penalty on tokens that have occurred.
    pub repetition_penalty: Option<f32>,
    #[serde(rename = "eos_token_id")]
    pub(crate) eos: Option<TokenIds>,
}

impl ModelFolder {
    /// Opens a folder or a GGUF file. Any file of a split model can be given.
    ///
    /// # Errors
    /// When a file is missing or malformed, or the architecture is unknown.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if gguf::is_gguf(path) && !path.is_dir() {
            return Self::open_gguf(path);
        }
        if !path.is_dir() {
            return Err(ModelError::Missing {
                path: path.to_owned(),
                needs: "config.json, weights and a tokenizer",
            });
        }
        let (config, config_path) = read_config(path)?;
        let mut spec = arch::spec(&config, &config_path)?;
        sentence::complete(&mut spec, path)?;
        let quantization = Quantization::read(&config, &config_path)?;
        let generation = GenerationConfig::read(path)?;
        if let Some(eos) = generation.eos.clone() {
            spec.eos = eos.into_vec();
        }
        let weights = Box::new(HuggingFace::open(path, quantization)?);
        keep_ahead(&mut spec, &*weights);
        Ok(Self { path: path.to_owned(), spec, weights, adapters: Vec::new(), generation, gguf: None })
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let files = gguf::open(path)?;
        let mut spec = gguf::spec(&files)?;
        spec.eos = gguf::end_tokens(&files)?;
        let weights = Box::new(GgufWeights::new(Arc::clone(&files), &spec)?);
        keep_ahead(&mut spec, &*weights);
        let generation = gguf::generation(&files)?;
        Ok(Self { path: path.to_owned(), spec, weights, adapters: Vec::new(), generation, gguf: Some(files) })
    }

    /// Adds a low-rank adapter to be loaded with the weights.
    ///
    /// # Errors
    /// When a file is missing or malformed, or the adapter changes what cannot be changed here.
    pub fn add_adapter(&mut self, name: &str, path: &Path) -> Result<(), ModelError> {
        self.adapters.push(Adapter::open(name, path, &self.spec)?);
        Ok(())
    }

    /// The folder's tokenizer.
    ///
    /// # Errors
    /// When it is missing or malformed.
    pub fn tokenizer(&self) -> Result<Arc<Tokenizer>, TokenizerError> {
        match &self.gguf {
            Some(files) => gguf::tokenizer(files),
            None => Tokenizer::load(&self.path),
        }
        .map(Arc::new)
    }

    /// The folder's chat template, if it has one.
    ///
    /// # Errors
    /// When it is malformed.
    pub fn chat_template(&self) -> Result<Option<Arc<ChatTemplate>>, ChatError> {
        let template = match &self.gguf {
            Some(files) => gguf::chat_template(files)?,
            None => ChatTemplate::load(&self.path)?,
        };
        Ok(template.map(Arc::new))
    }
}

/// The files of many quantized models lack the layer that predicts further tokens, which is then
/// not used.
fn keep_ahead(spec: &mut ModelSpec, weights: &dyn WeightSource) {
    let number = spec.layers.len();
    let roles = [
        LayerRole::AheadProjection,
        LayerRole::AheadEmbeddingNorm,
        LayerRole::AheadHiddenNorm,
        LayerRole::AheadOutputNorm,
        LayerRole::MixerNorm,
    ];
    if !roles.iter().all(|role| weights.has(role.of(number))) {
        spec.ahead = None;
    }
}

impl GenerationConfig {
    /// Refuses defaults with which every request would be refused.
    pub(crate) fn check(&self) -> Result<(), String> {
        let sampled = |value: Option<f32>| value.filter(|_| self.do_sample == Some(true));
        for (field, value, least, most) in [
            ("temperature", sampled(self.temperature), 0.0, 2.0),
            ("top_p", sampled(self.top_p), f32::MIN_POSITIVE, 1.0),
            ("min_p", sampled(self.min_p), 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 0.01, 10.0),
        ] {
            if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
                let from =
                    if least == f32::MIN_POSITIVE { "above 0".into() } else { format!("at least {least}") };
                return Err(format!("{field} is {value}: it must be {from} and at most {most}"));
            }
        }
        Ok(())
    }

    fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("generation_config.json");
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| error.to_string())
                .and_then(|config: Self| config.check().map(|()| config))
                .map_err(|reason| ModelError::Malformed { path, reason }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(ModelError::io(&path, "sampling defaults", error)),
        }
    }
}

/// The text, with Python's `Infinity`, which JSON does not have, replaced as in transformers 5:
/// `{"__float__": "Infinity"}`.
fn with_named_infinities(text: Vec<u8>) -> Vec<u8> {
    const WORD: &[u8] = b"Infinity";
    if !text.windows(WORD.len()).any(|bytes| bytes == WORD) {
        return text;
    }
    let mut named = Vec::with_capacity(text.len());
    let (mut at, mut in_text) = (0, false);
    while at < text.len() {
        if !in_text && text[at..].starts_with(WORD) {
            named.extend_from_slice(br#"{"__float__": "Infinity"}"#);
            at += WORD.len();
            continue;
        }
        match text[at] {
            // The character after a backslash is part of the text.
            b'\\' if in_text && at + 1 < text.len() => {
                named.push(text[at]);
                at += 1;
            }
            b'"' => in_text = !in_text,
            _ => {}
        }
        named.push(text[at]);
        at += 1;
    }
    named
}

/// The parsed config.json of a folder, and its path for error texts.
fn read_config(folder: &Path) -> Result<(serde_json::Value, PathBuf), ModelError> {
    let path = folder.join("config.json");
    let bytes = std::fs::read(&path)
        .map_err(|error| ModelError::io(&path, "its architecture (config.json)", error))?;
    let value: serde_json::Value = serde_json::from_slice(&with_named_infinities(bytes))
        .map_err(|error| ModelError::Malformed { path: path.clone(), reason: error.to_string() })?;
    if !value.is_object() {
        return Err(ModelError::Malformed { path, reason: "not a JSON object".into() });
    }
    Ok((value, path))
}

#[cfg(test)]
mod tests {
    use super::with_named_infinities;

    #[test]
    fn pythons_infinity_is_read_and_texts_are_kept() {
        let text = br#"{"a": [0.0, Infinity], "b \" Infinity": "Infinity \\", "c": Infinity}"#;
        let named = with_named_infinities(text.to_vec());
        let value: serde_json::Value = serde_json::from_slice(&named).expect("it is JSON");
        assert_eq!(value["a"][1]["__float__"], "Infinity");
        assert_eq!(value["b \" Infinity"], "Infinity \\");
        assert_eq!(value["c"]["__float__"], "Infinity");
    }
}
