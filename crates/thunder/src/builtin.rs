//! The model that comes with the program.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use etcetera::BaseStrategy;
use sha2::{Digest, Sha256};

/// The name of the built-in model wherever a command takes a MODEL.
pub const NAME: &str = "builtin";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../../builtin/model/", $name)) as &[u8])),*]
    };
}

const FILES: [(&str, &[u8]); 6] = files![
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// The folder of the built-in model, written to the user's cache on first use.
///
/// # Errors
/// When the cache cannot be written.
pub fn folder() -> anyhow::Result<PathBuf> {
    let mut hasher = Sha256::new();
    for (name, bytes) in FILES {
        hasher.update(name);
        hasher.update(bytes);
    }
    let id: String = hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let place = |cache: PathBuf| -> anyhow::Result<PathBuf> {
        let cache = cache.join("thunderhead");
        let folder = cache.join(format!("builtin-{id}"));
        if !is_whole(&folder) {
            write(&cache, &folder)
                .with_context(|| format!("cannot write the built-in model to {}", folder.display()))?;
        }
        Ok(folder)
    };
    let usual = etcetera::choose_base_strategy().map(|base| base.cache_dir());
    match usual.map_err(Into::into).and_then(&place) {
        Ok(folder) => Ok(folder),
        // The home folder may be read-only, as in a container or a service.
        Err(error) => place(std::env::temp_dir()).map_err(|_| error),
    }
}

/// Whether a folder contains exactly these files. Parts of a cache may have been removed, and other
/// users may write to a temporary folder.
fn is_whole(folder: &Path) -> bool {
    FILES.iter().all(|(name, bytes)| fs::read(folder.join(name)).is_ok_and(|found| found == *bytes))
}

/// Writes the files to a temporary folder and renames it, so that no other process sees an
/// incomplete model.
fn write(cache: &Path, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(cache)?;
    let new = tempfile::tempdir_in(cache)?;
    for (name, bytes) in FILES {
        fs::write(new.path().join(name), bytes)?;
    }
    match fs::rename(new.path(), folder) {
        // Another process was faster.
        Err(_) if is_whole(folder) => Ok(()),
        // An incomplete model is there: move it away.
        Err(_) if folder.exists() => {
            let aside = tempfile::tempdir_in(cache)?;
            fs::rename(folder, aside.path().join("replaced"))?;
            Ok(fs::rename(new.path(), folder)?)
        }
        renamed => Ok(renamed?),
    }
}
