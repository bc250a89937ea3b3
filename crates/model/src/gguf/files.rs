//! The files of one model: a single one, or `NAME-00001-of-0000N.gguf` and the following.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::container::{Fault, Header, TensorInfo};
use thunder_compute::FilePages;

use super::values::{Metadata, Value};
use crate::error::ModelError;
use crate::weights::MappedFiles;

/// What a missing file is for.
const WHAT: &str = "weights (GGUF)";

/// The mapped files of a model, with their headers.
#[derive(Debug)]
pub(crate) struct GgufFiles {
    /// The first file.
    path: PathBuf,
    pub(super) files: MappedFiles,
    /// Of the first file.
    values: BTreeMap<String, Value>,
    /// Of all files, with the file's number.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
}

impl GgufFiles {
    /// Opens a model by any one of its files.
    ///
    /// # Errors
    /// When a file is missing, truncated or malformed.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let first = part_of(path).map_or_else(|| path.to_owned(), |(stem, _, count)| part(&stem, 1, count));
        let mut files = MappedFiles::default();
        let header = header(&mut files, &first)?;
        let mut opened = Self {
            path: first,
            files,
            values: header.values,
            tensors: header.tensors.into_iter().map(|(name, info)| (name, (0, info))).collect(),
        };
        opened.open_rest()?;
        Ok(opened)
    }

    /// Opens the files after the first.
    fn open_rest(&mut self) -> Result<(), ModelError> {
        let number = |key: &str| self.metadata().unsigned(key).map_err(|reason| self.malformed(reason));
        let count = number("split.count")?.unwrap_or(1).max(1);
        let (this, total) = (number("split.no")?.unwrap_or(0), number("split.tensors.count")?);
        let name = part_of(&self.path);
        match &name {
            Some((_, _, named)) if u64::from(*named) != count => {
                let reason = format!("its name says that it is one of {named} files, its content of {count}");
                return Err(self.malformed(reason));
            }
            None if count > 1 => {
                let reason = format!(
                    "it is one of {count} files (split.count): their names must end in -00001-of-{count:05}.gguf, …"
                );
                return Err(self.malformed(reason));
            }
            _ => {}
        }
        if this != 0 {
            return Err(self.malformed(format!("it is part {} of the model, not the first", this + 1)));
        }
        if let Some((stem, _, count)) = name {
            for number in 2..=count {
                self.add(&part(&stem, number, count), u64::from(number) - 1)?;
            }
        }
        match total {
            Some(total) if total != self.tensors.len() as u64 => Err(self.malformed(format!(
                "split.tensors.count is {total}, but the {count} files have {} tensors",
                self.tensors.len()
            ))),
            _ => Ok(()),
        }
    }

    fn add(&mut self, path: &Path, expected: u64) -> Result<(), ModelError> {
        let header = header(&mut self.files, path)?;
        let file = self.files.count() - 1;
        let malformed = |reason| ModelError::Malformed { path: path.to_owned(), reason };
        let metadata = Metadata { values: &header.values, file: self.files.file(file) };
        let this = metadata.unsigned("split.no").map_err(malformed)?;
        if this != Some(expected) {
            let found = this.map_or("no part of a model".to_owned(), |this| format!("part {}", this + 1));
            return Err(malformed(format!("it is {found}, not part {} as its name says", expected + 1)));
        }
        for (name, info) in header.tensors {
            if self.tensors.insert(name.clone(), (file, info)).is_some() {
                return Err(malformed(format!("tensor {name:?} is in an earlier file too")));
            }
        }
        Ok(())
    }

    /// The first file, for error texts.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An error about the first file.
    pub fn malformed(&self, reason: String) -> ModelError {
        ModelError::Malformed { path: self.path.clone(), reason }
    }

    /// The metadata of the model.
    pub(super) fn metadata(&self) -> Metadata<'_> {
        Metadata { values: &self.values, file: self.files.file(0) }
    }

    /// The header was read and may leave memory.
    pub(super) fn release_header(&self) {
        let file = self.files.file(0);
        let end =
            self.tensors.values().filter(|(file, _)| *file == 0).map(|(_, info)| info.bytes.start).min();
        self.files.release(&file[..end.unwrap_or(file.len())]);
    }

    /// A tensor and its bytes.
    pub(super) fn tensor(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        let (file, info) = self.tensors.get(name)?;
        Some((info, &self.files.file(*file)[info.bytes.clone()]))
    }

    /// All tensors by name, with their bytes.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo, &[u8])> {
        self.tensors
            .iter()
            .map(|(name, (file, info))| (name.as_str(), info, &self.files.file(*file)[info.bytes.clone()]))
    }
}

/// Maps a file and reads its header.
fn header(files: &mut MappedFiles, path: &Path) -> Result<Header, ModelError> {
    let number = files.add(path, WHAT)?;
    let file = files.file(number);
    let header = Header::parse(file).map_err(|fault| match fault {
        Fault::Malformed(reason) => ModelError::Malformed { path: path.to_owned(), reason },
        Fault::Truncated(expected) => {
            ModelError::Truncated { path: path.to_owned(), actual: file.len() as u64, expected }
        }
    })?;
    files.note(&file[..header.bytes]);
    Ok(header)
}

/// The stem, the number and the count of a name like `STEM-00002-of-00005.gguf`.
fn part_of(path: &Path) -> Option<(PathBuf, u32, u32)> {
    const DIGITS: usize = 5;
    let name = path.file_name()?.to_str()?;
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| {
        let valid = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
        valid.then(|| text.parse::<u32>().ok()).flatten()
    };
    let (number, count) = (digits(number)?, digits(count)?);
    (number >= 1 && number <= count).then(|| (path.with_file_name(stem), number, count))
}

/// The name of a part.
fn part(stem: &Path, number: u32, count: u32) -> PathBuf {
    let mut name = stem.as_os_str().to_owned();
    name.push(format!("-{number:05}-of-{count:05}.gguf"));
    name.into()
}
