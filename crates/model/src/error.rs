//! Errors of loading and planning a model.

use std::path::{Path, PathBuf};

/// Added to the remedies where macOS limits what the GPU may hold.
const GPU_LIMIT: &str = if cfg!(target_os = "macos") {
    "; if a GPU computes, `thunder mac tune --model MODEL` raises what macOS lets it hold (iogpu.wired_limit_mb)"
} else {
    ""
};

/// Why a model could not be loaded, planned or written. Each text names the file or value that was
/// wrong, and what to do if that is known.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file is missing.
    #[error("{}: no such file: a model folder needs {needs}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// What the file is for.
        needs: &'static str,
    },
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file's content is not what its name promises.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file ends early.
    #[error(
        "{}: truncated: it has {actual} bytes, but its header describes {expected}: download it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its length.
        actual: u64,
        /// The length in its header.
        expected: u64,
    },
    /// Only a part of a model is present.
    #[error(
        "{}: this machine holds a part of the model, and not {} that rank {rank} reads: `thunder model pull` \
         completes it", path.display(), lacking.map_or("all".into(), |bytes| format!("the {}", human_bytes(bytes)))
    )]
    Part {
        /// The model.
        path: PathBuf,
        /// The rank.
        rank: usize,
        /// Bytes that it reads and that are not there, if its ranges are known.
        lacking: Option<u64>,
    },
    /// The config names an unknown architecture.
    #[error("unknown architecture {name:?}: known are {}", crate::arch::known().collect::<Vec<_>>().join(", "))]
    UnknownArchitecture {
        /// `model_type` of config.json.
        name: String,
    },
    /// The config is of an unsupported encoder.
    #[error(
        "{name:?} is an encoder of a kind that is not supported: take one of the kinds bert, xlm-roberta and modernbert, e.g. \
         BAAI/bge-base-en-v1.5 or intfloat/multilingual-e5-base, or a model made of a decoder, e.g. \
         Qwen/Qwen3-Embedding-0.6B"
    )]
    Encoder {
        /// `model_type` of config.json.
        name: String,
    },
    /// The config asks for something unsupported.
    #[error("config.json: {field} is {value}, which is not supported: {supported}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is supported.
        supported: String,
    },
    /// A tensor is not in the files.
    #[error("tensor {name:?} is not in the model's files{hint}")]
    NoTensor {
        /// Its name.
        name: String,
        /// A possible reason.
        hint: String,
    },
    /// A tensor has another type or shape than the config implies.
    #[error("tensor {name:?} is {actual}, but the config asks for {expected}")]
    Shape {
        /// Its name.
        name: String,
        /// Its element type and shape.
        actual: String,
        /// What the config implies.
        expected: String,
    },
    /// A tensor has numbers that are none.
    #[error("tensor {name:?} has {value} at place {at}: the file is damaged, download it again")]
    NotFinite {
        /// Its name.
        name: String,
        /// The first place, row-major.
        at: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A tensor has a type that weights are not read from.
    #[error(
        "tensor {name:?} is {kind}, which is not supported: supported are {supported}; take another quantization of the \
         model"
    )]
    UnsupportedType {
        /// Its name.
        name: String,
        /// GGUF's name of the type.
        kind: &'static str,
        /// The types that are supported.
        supported: String,
    },
    /// The model cannot be split as asked.
    #[error("{0}")]
    Plan(String),
    /// The weights and the cache are larger than the memory.
    #[error(
        "the model does not fit: rank {rank} needs {} for weights and {} for a KV cache of {tokens} tokens, together {}, \
         but may use {} of its {}: a tenth stays free for buffers and other programs; use more ranks, a smaller context \
         (--context), fewer bits, or a larger --memory if it was given{}",
        human_bytes(*weights), human_bytes(*kv), human_bytes(weights + kv), human_bytes(*usable),
        human_bytes(*available), GPU_LIMIT
    )]
    DoesNotFit {
        /// The rank that lacks memory.
        rank: usize,
        /// Bytes of its weights.
        weights: u64,
        /// Bytes of its cache.
        kv: u64,
        /// Tokens of the cache.
        tokens: usize,
        /// Bytes that weights and cache may use.
        usable: u64,
        /// Bytes available. A part of them stays free.
        available: u64,
    },
    /// An adapter cannot be used with the model.
    #[error("adapter {}: {reason}", path.display())]
    Adapter {
        /// Its folder.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The caller stopped the loading.
    #[error("the loading was stopped")]
    Stopped,
    /// A model of this shape cannot be written.
    #[error("cannot write {name}: {reason}")]
    Synth {
        /// The shape.
        name: String,
        /// Why.
        reason: String,
    },
    /// The folder for a new model is not empty.
    #[error("{}: the folder is not empty: give a new one, or delete it if it is not needed", path.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// The disk is too small for a new model.
    #[error(
        "{what} takes {}, but {} has {} free: free some, or give a folder on another disk",
        human_bytes(*needed), path.display(), human_bytes(*available)
    )]
    NoSpace {
        /// The model.
        what: String,
        /// A folder on that disk.
        path: PathBuf,
        /// Bytes of the model.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// The backend refused.
    #[error(transparent)]
    Compute(#[from] thunder_compute::ComputeError),
}

impl ModelError {
    /// Wraps an I/O error; for a missing file, the error says what the file is needed for.
    pub fn io(path: &Path, needs: &'static str, source: std::io::Error) -> Self {
        let path = path.to_owned();
        if source.kind() == std::io::ErrorKind::NotFound {
            Self::Missing { path, needs }
        } else {
            Self::Io { path, source }
        }
    }
}

/// Bytes with a unit, in powers of 1024.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
