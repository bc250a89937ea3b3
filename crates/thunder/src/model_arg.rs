//! MODEL, for all commands.

use std::ffi::{OsStr, OsString};

use clap::Args;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};

use crate::builtin;
use crate::model_command::cached_models;

/// MODEL where the built-in model is the default.
#[derive(Args, Debug, Clone)]
pub struct ModelArg {
    /// `builtin`, a folder, a GGUF file, or the name of a model in the Hugging Face cache
    #[arg(value_name = "MODEL", default_value = builtin::NAME, add = completer())]
    model: OsString,
    /// The same as MODEL: other servers have this option
    #[arg(long = "model", value_name = "MODEL", hide = true, conflicts_with = "model", add = completer())]
    named: Option<OsString>,
}

impl ModelArg {
    /// The requested model.
    pub fn name(&self) -> &OsStr {
        self.named.as_ref().unwrap_or(&self.model)
    }
}

/// Completes models of the cache, and folders.
pub fn completer() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let named = current.to_str().map(|text| {
            let cached = cached_models(&thunder_hub::cache_root()).unwrap_or_default();
            let all = std::iter::once(builtin::NAME.to_owned()).chain(cached);
            all.filter(|name| name.starts_with(text)).map(CompletionCandidate::new).collect()
        });
        let mut candidates: Vec<_> = named.unwrap_or_default();
        candidates.extend(PathCompleter::dir().complete(current));
        candidates
    })
}
