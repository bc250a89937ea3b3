//! Memory-mapped safetensors files, by tensor name.

use std::collections::HashMap;
use std::path::{Component, Path};
use std::sync::atomic::{AtomicBool, Ordering};

use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors};
use serde::Deserialize;
use thunder_compute::source::FilePages;

use super::mapped::MappedFiles;
use crate::error::ModelError;

/// All tensors of a model folder.
#[derive(Debug)]
pub(super) struct SafetensorsFiles {
    files: MappedFiles,
    tensors: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    range: std::ops::Range<usize>,
    dtype: Dtype,
    shape: Vec<usize>,
    /// It was asked for.
    is_read: AtomicBool,
}

/// A tensor in its mapped file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, row-major.
    pub shape: &'a [usize],
    /// Its bytes, little-endian.
    pub bytes: &'a [u8],
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl SafetensorsFiles {
    /// Maps the files of a folder: those in model.safetensors.index.json, or model.safetensors.
    ///
    /// # Errors
    /// When a file is missing, truncated or malformed.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let mut weights = Self { files: MappedFiles::default(), tensors: HashMap::new() };
        let index = folder.join("model.safetensors.index.json");
        let names = match std::fs::read(&index) {
            Ok(bytes) => {
                let index: Index = serde_json::from_slice(&bytes).map_err(|error| ModelError::Malformed {
                    path: index.clone(),
                    reason: error.to_string(),
                })?;
                let mut names: Vec<String> = index.weight_map.into_values().collect();
                names.sort();
                names.dedup();
                names
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                vec!["model.safetensors".to_owned()]
            }
            Err(error) => return Err(ModelError::io(&index, "the list of weight files", error)),
        };
        for name in names {
            let mut parts = Path::new(&name).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                let reason =
                    format!("it names the weight file {name:?}: only files in the same folder are allowed");
                return Err(ModelError::Malformed { path: index, reason });
            }
            weights.map(&folder.join(name))?;
        }
        Ok(weights)
    }

    /// Maps one file.
    ///
    /// # Errors
    /// When it is missing, truncated or malformed.
    pub fn open_file(path: &Path) -> Result<Self, ModelError> {
        let mut weights = Self { files: MappedFiles::default(), tensors: HashMap::new() };
        weights.map(path)?;
        Ok(weights)
    }

    fn map(&mut self, path: &Path) -> Result<(), ModelError> {
        let file = self.files.add(path, "weights (safetensors)")?;
        let map = self.files.file(file);
        let malformed = |reason: String| ModelError::Malformed { path: path.to_owned(), reason };
        let (header, metadata) = SafeTensors::read_metadata(map).map_err(|error| {
            let actual = map.len() as u64;
            match (error, described_bytes(map)) {
                (SafeTensorError::MetadataIncompleteBuffer, Some(expected)) if actual < expected => {
                    ModelError::Truncated { path: path.to_owned(), actual, expected }
                }
                (SafeTensorError::MetadataIncompleteBuffer, Some(expected)) => malformed(format!(
                    "it has {actual} bytes, but its header describes only {expected}: download it again"
                )),
                (error, _) => malformed(format!("not a safetensors file: {error}")),
            }
        })?;
        let start = header + 8;
        self.files.note(&map[..start]);
        for (name, info) in metadata.tensors() {
            let range = start + info.data_offsets.0..start + info.data_offsets.1;
            let entry = Entry {
                file,
                range,
                dtype: info.dtype,
                shape: info.shape.clone(),
                is_read: AtomicBool::new(false),
            };
            self.tensors.insert(name, entry);
        }
        Ok(())
    }

    /// The files themselves.
    pub const fn files(&self) -> &MappedFiles {
        &self.files
    }

    /// A tensor by its name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let entry = self.tensors.get(name)?;
        entry.is_read.store(true, Ordering::Relaxed);
        let bytes = &self.files.file(entry.file)[entry.range.clone()];
        Some(Tensor { dtype: entry.dtype, shape: &entry.shape, bytes })
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors.keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Counts a tensor as read, if it exists, because its content is known.
    pub fn mark_read(&self, name: &str) {
        if let Some(entry) = self.tensors.get(name) {
            entry.is_read.store(true, Ordering::Relaxed);
        }
    }

    /// True if a tensor exists.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// True if a tensor belongs to this module.
    pub fn has_inside(&self, module: &str) -> bool {
        self.tensors.keys().any(|name| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.')))
    }

    /// The first tensor name with this ending, for hints and for finding a model's prefix.
    pub fn name_ending(&self, end: &str) -> Option<&str> {
        self.tensors.keys().map(String::as_str).filter(|name| name.ends_with(end)).min()
    }

    /// A name with this beginning, if there is one.
    pub fn name_starting(&self, begin: &str) -> Option<&str> {
        self.tensors.keys().map(String::as_str).find(|name| name.starts_with(begin))
    }

    /// A hash of names, types, shapes and places of all tensors, and of samples of their contents.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut entries: Vec<_> = self.tensors.iter().collect();
        entries.sort_unstable_by_key(|(name, _)| name.as_str());
        let described = entries.into_iter().map(|(name, entry)| {
            let bytes = &self.files.file(entry.file)[entry.range.clone()];
            (format!("{name} {:?} {:?} {:?}\n", entry.dtype, entry.shape, entry.range), bytes)
        });
        self.files.fingerprint(&described.collect::<Vec<_>>())
    }

    /// Names of the tensors that were not asked for, sorted.
    pub fn unread(&self) -> Vec<String> {
        let unread = self.tensors.iter().filter(|(_, entry)| !entry.is_read.load(Ordering::Relaxed));
        let mut names: Vec<String> = unread.map(|(name, _)| name.clone()).collect();
        names.sort_unstable();
        names
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.range.len() as u64).sum()
    }
}

/// The file length that a safetensors header describes.
fn described_bytes(file: &[u8]) -> Option<u64> {
    let (len, rest) = file.split_first_chunk::<8>()?;
    let len = u64::from_le_bytes(*len);
    let metadata: Metadata = serde_json::from_slice(rest.get(..usize::try_from(len).ok()?)?).ok()?;
    Some(8 + len + metadata.data_len() as u64)
}

impl FilePages for SafetensorsFiles {
    fn read(&self, bytes: &[u8], to: &mut [u8]) {
        self.files.read(bytes, to);
    }

    fn need(&self, bytes: &[u8]) {
        self.files.need(bytes);
    }

    fn release(&self, bytes: &[u8]) {
        self.files.release(bytes);
    }
}
