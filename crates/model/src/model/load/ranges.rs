//! The bytes of a model's weight files that a rank reads, so that a node need not have the others.

use std::path::PathBuf;

use thunder_compute::Strided;
use thunder_parts::{Ranges, Run};

use super::sources::Sources;
use crate::error::ModelError;
use crate::folder::ModelFolder;
use crate::plan::ShardPlan;

/// The part of a file that a rank reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRanges {
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub size: u64,
    /// Where the bytes are. Runs may overlap.
    pub runs: Vec<Run>,
    /// The part of these bytes that is missing.
    pub lacking: u64,
}

/// The bytes of each weight file that rank `rank` reads: headers, its windows of matrices,
/// everything that is not a matrix, and the samples by which ranks compare their files. A folder
/// that has only the files' headers gives the same result. Open the folder only for this, because
/// earlier reads count too.
///
/// # Errors
/// When the model is one whose ranks read further files, or a tensor is missing or has another
/// shape than the config implies.
pub fn shard_ranges(
    folder: &ModelFolder,
    plan: &ShardPlan,
    rank: usize,
) -> Result<Vec<FileRanges>, ModelError> {
    if folder.spec.encoder.is_some() {
        return Err(ModelError::Unsupported {
            field: "the kind of model",
            value: "an encoder".into(),
            supported: "ranks read parts of decoders' files only".into(),
        });
    }
    let files = folder.weights.files();
    let sources = Sources::describe(folder, plan.shard(rank))?;
    folder.weights.fingerprint();
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); files.count()];
    for matrix in sources.matrices() {
        for part in [Some(&matrix.weight), matrix.scales.as_ref(), matrix.offsets.as_ref()] {
            let found = part.and_then(|part| Some((files.find(part.bytes)?, run_of(part)?)));
            if let Some(((file, range), run)) = found {
                runs[file].push(Run { first: range.start as u64, ..run });
            }
        }
    }
    for (file, range) in files.take_noted() {
        runs[file].extend((!range.is_empty()).then(|| Run::of(range)));
    }
    let ranges = files.files().zip(runs).map(|((path, size, present), runs)| {
        let lacking = present.map_or(0, |present| Ranges::of(&runs).minus(present).bytes());
        FileRanges { path: path.to_owned(), size, runs, lacking }
    });
    Ok(ranges.collect())
}

/// Checks that all bytes that rank `rank` reads are present, for files that are present in part.
///
/// # Errors
/// [`ModelError::Part`] if some are not.
pub fn check_present(folder: &ModelFolder, plan: &ShardPlan, rank: usize) -> Result<(), ModelError> {
    let files = folder.weights.files();
    if files.files().all(|(_, _, present)| present.is_none()) {
        return Ok(());
    }
    // Of descriptions of other ranks.
    files.take_noted();
    let part = |rank, lacking| ModelError::Part { path: folder.path.clone(), rank, lacking };
    if folder.spec.encoder.is_some() {
        return Err(part(rank, None));
    }
    let lacking: u64 = shard_ranges(folder, plan, rank)?.iter().map(|file| file.lacking).sum();
    if lacking > 0 { Err(part(rank, Some(lacking))) } else { Ok(()) }
}

/// The rows of a window, from the byte 0 on; `None` if it has none.
fn run_of(part: &Strided<'_>) -> Option<Run> {
    let Strided { bytes, stride, row_bytes } = *part;
    let len = bytes.len() as u64;
    match (len, row_bytes < stride && row_bytes > 0) {
        (0, _) => None,
        (_, false) => Some(Run::of(0..len)),
        (_, true) => {
            let (len, stride) = (row_bytes as u64, stride as u64);
            Some(Run { first: 0, len, stride, count: (bytes.len() as u64 - len) / stride + 1 })
        }
    }
}
