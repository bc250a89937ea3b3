//! GGUF: one file, or several, with the weights, the architecture, the tokenizer and the chat
//! template of a model.
//!
//! [`container`] reads a file's header without copying it, [`config`] says it in config.json's
//! words, so that [`arch`](crate::arch) reads one language only, and [`weights`] finds tensors by
//! role. Facts about the format: github.com/ggml-org/ggml, docs/gguf.md, and the `gguf` package.

mod config;
mod container;
mod files;
mod names;
mod pre_tokenizers;
mod text;
mod tokenizer;
mod types;
mod values;
mod weights;

use std::path::Path;
use std::sync::Arc;

pub(crate) use config::spec;
pub(crate) use files::GgufFiles;
pub(crate) use text::{chat_template, end_tokens, generation};
pub(crate) use tokenizer::tokenizer;
pub use weights::GgufWeights;

use crate::error::ModelError;

/// True if a path is that of a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// Opens a model's file, or all of its files if it is split.
pub(crate) fn open(path: &Path) -> Result<Arc<GgufFiles>, ModelError> {
    GgufFiles::open(path).map(Arc::new)
}
