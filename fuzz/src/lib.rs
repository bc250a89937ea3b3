//! What the fuzz targets share: a folder of this process, and reading a model as far as `thunder
//! plan` does.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use thunder_compute::KvFormat;
use thunder_model::model::shard_footprints;
use thunder_model::{ModelError, ModelFolder, Parallelism, ShardPlan};

/// Zeros after an input, in place of tensors: a file without them is refused before its metadata is
/// looked at. They take no room on disk.
pub const TENSOR_BYTES: u64 = 8 << 20;

/// A text with words, marks, other scripts and white space for tokenizers.
const TEXT: &str = "Hello  wörld, 日本語 1234 <s>'s\n\t🦀</s>";

/// A folder for the files of this process.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("thunder-fuzz-{}", std::process::id()));
        fs::create_dir_all(&path).expect("the folder for temporary files can be written");
        path
    })
}

/// Writes a file of the folder: these bytes, then zeros up to a length.
pub fn write(name: &str, bytes: &[u8], len: u64) -> PathBuf {
    let path = folder().join(name);
    let mut file = File::create(&path).expect("the folder can be written");
    file.write_all(bytes).and_then(|()| file.set_len(len.max(bytes.len() as u64))).expect("there is room");
    path
}

/// Reads all of a model that is read before its weights are packed.
///
/// # Errors
/// When the model is refused.
pub fn read(path: &Path) -> Result<(), ModelError> {
    let folder = ModelFolder::open(path)?;
    if let Ok(tokenizer) = folder.tokenizer() {
        use_tokenizer(&tokenizer);
    }
    drop(folder.chat_template());
    for mode in [Parallelism::Tensor, Parallelism::Pipeline] {
        let plan = ShardPlan::new(&folder.spec, mode, &[1.0, 2.0])?;
        shard_footprints(&folder, &plan, KvFormat::F16)?;
    }
    Ok(())
}

/// Tokens of a text and back.
pub fn use_tokenizer(tokenizer: &thunder_model::tokenizer::Tokenizer) {
    if let Ok(tokens) = tokenizer.encode(TEXT, true) {
        tokenizer.decode(&tokens, false);
    }
}
