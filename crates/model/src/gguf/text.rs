//! What a file's metadata says about texts, the tokenizer aside: chat template, tokens that end a
//! text, sampling.

use serde_json::{Map, Value, json};

use super::files::GgufFiles;
use super::tokenizer::Tokens;
use crate::chat::{ChatError, ChatTemplate};
use crate::error::ModelError;
use crate::folder::GenerationConfig;

/// Tokens that end an answer. Files name one of them (`eos_token_id`), but many models have
/// several.
const ENDS: [&str; 15] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
];

/// The token ids that end a text.
///
/// # Errors
/// When the metadata is malformed.
pub(crate) fn end_tokens(files: &GgufFiles) -> Result<Vec<u32>, ModelError> {
    let read = || -> Result<Vec<u32>, String> {
        let metadata = files.metadata();
        let mut ends = Vec::new();
        for name in ["eos", "eot", "eom"] {
            let id = metadata.unsigned(&format!("tokenizer.ggml.{name}_token_id"))?;
            ends.extend(id.and_then(|id| u32::try_from(id).ok()));
        }
        if let Some(tokens) = Tokens::read(metadata)? {
            let ids = (0..tokens.texts.len()).filter(|id| ENDS.contains(&tokens.texts[*id]));
            ends.extend(ids.filter(|id| tokens.is_special(*id)).map(|id| id as u32));
        }
        ends.sort_unstable();
        ends.dedup();
        Ok(ends)
    };
    let ends = read().map_err(|reason| files.malformed(reason));
    files.release_header();
    ends
}

/// The sampling that the file recommends.
///
/// # Errors
/// When the metadata is malformed.
pub(crate) fn generation(files: &GgufFiles) -> Result<GenerationConfig, ModelError> {
    let read = || -> Result<GenerationConfig, String> {
        let metadata = files.metadata();
        let float = |name: &str| {
            Ok::<_, String>(metadata.float(&format!("general.sampling.{name}"))?.map(|number| number as f32))
        };
        let top_k = metadata.float("general.sampling.top_k")?.map(|k| k as i64);
        let temperature = float("temp")?;
        let config = GenerationConfig {
            do_sample: temperature.map(|temperature| temperature > 0.0),
            temperature,
            top_p: float("top_p")?,
            top_k,
            min_p: float("min_p")?,
            repetition_penalty: float("penalty_repeat")?,
            ..GenerationConfig::default()
        };
        config.check().map(|()| config)
    };
    read().map_err(|reason| files.malformed(reason))
}

/// The chat template of a file, if it has one.
///
/// # Errors
/// When it is malformed.
pub(crate) fn chat_template(files: &GgufFiles) -> Result<Option<ChatTemplate>, ChatError> {
    let path = files.path().display().to_string();
    let config = template_config(files).map_err(|reason| ChatError::Load { path: path.clone(), reason })?;
    ChatTemplate::new(&path, &config["chat_template"], &config)
}

/// `chat_template` and the special tokens as tokenizer_config.json has them.
fn template_config(files: &GgufFiles) -> Result<Value, String> {
    let metadata = files.metadata();
    let mut config = Map::new();
    if let Some(template) = metadata.text("tokenizer.chat_template")? {
        let mut templates = vec![json!({ "name": "default", "template": template })];
        for name in metadata.texts("tokenizer.chat_templates")?.unwrap_or_default() {
            if let Some(template) = metadata.text(&format!("tokenizer.chat_template.{name}"))? {
                templates.push(json!({ "name": name, "template": template }));
            }
        }
        config.insert("chat_template".into(), templates.into());
    }
    let tokens = Tokens::read(metadata)?;
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        let id = metadata.unsigned(&format!("tokenizer.ggml.{key}_token_id"))?;
        let text =
            id.zip(tokens.as_ref()).and_then(|(id, tokens)| tokens.texts.get(usize::try_from(id).ok()?));
        if let Some(text) = text {
            config.insert(format!("{name}_token"), (*text).into());
        }
    }
    Ok(config.into())
}
