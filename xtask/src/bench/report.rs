//! The result of a run of `cargo xtask bench`.

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

/// Changes whenever a field changes its meaning.
pub const FORMAT: u32 = 1;

/// One run on one machine. Lists of rounds keep their order: round `i` of thunder ran right before
/// round `i` of its peer.
#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Report {
    pub format: u32,
    pub machine: Machine,
    /// Abbreviated hash; ends with `-dirty` if tracked files differed from the commit.
    pub commit: String,
    /// UTC, as 2026-11-22.
    pub date: String,
    /// The command that made this report.
    pub command: String,
    pub seconds: u64,
    /// Memory bandwidth for threads that only read.
    pub memory: Vec<Memory>,
    pub decode: Vec<Speed>,
    pub batches: Vec<Batch>,
    pub prefill: Vec<Speed>,
    /// One model on several ranks and threads, decoding and reading a prompt.
    pub ranks: Vec<Ranks>,
    pub all_reduce: Vec<AllReduce>,
    /// The whole process, from its start to the first token, in seconds.
    pub start: Vec<Start>,
    pub builtin: Vec<Builtin>,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Machine {
    pub name: String,
    pub cpu: String,
    pub cores: usize,
    pub memory_bytes: u64,
    pub system: String,
    /// The instruction set that the kernels use.
    pub kernel: String,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Memory {
    pub threads: usize,
    pub bytes_per_s: f64,
}

/// Tokens a second of one sequence, for each round.
#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Speed {
    pub model: Model,
    pub threads: usize,
    pub tokens_per_s: Vec<f64>,
    /// Share of the memory bandwidth (decode) or of the arithmetic's peak (prefill); 1 is all of
    /// it.
    pub share: Vec<f64>,
    pub peer: Option<Peer>,
    pub command: String,
}

#[derive(Serialize, Deserialize, Debug, PartialEq, Clone)]
pub struct Model {
    /// The name for `thunder model synth --arch`.
    pub shape: String,
    pub bits: u32,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Peer {
    pub name: String,
    pub tokens_per_s: Vec<f64>,
    pub command: String,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Batch {
    pub model: Model,
    pub threads: usize,
    pub sequences: usize,
    /// For all sequences together; the median from `thunder bench decode`.
    pub tokens_per_s: f64,
    /// Speed of a sequence relative to its speed alone.
    pub kept: f64,
    pub command: String,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Ranks {
    pub model: Model,
    pub ranks: usize,
    pub threads_per_rank: usize,
    /// `shm` or `tcp`; empty for one rank.
    pub transport: String,
    pub decode_tokens_per_s: Vec<f64>,
    pub prefill_tokens_per_s: Vec<f64>,
    /// Share of decoding spent in all-reduces.
    pub reduce_share: Vec<f64>,
    pub command: String,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct AllReduce {
    pub ranks: usize,
    /// `shm` or `tcp`.
    pub transport: String,
    pub bytes: u64,
    pub median_us: Vec<f64>,
    /// Open MPI's, if it was measured.
    pub mpi_median_us: Vec<f64>,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Start {
    pub model: Model,
    pub threads: usize,
    pub seconds: Vec<f64>,
    pub command: String,
}

#[derive(Serialize, Deserialize, Debug, PartialEq)]
pub struct Builtin {
    pub ranks: usize,
    pub tokens_per_s: f64,
    pub time_to_first_token_s: f64,
}

impl Report {
    /// Reads a result of this format.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
        let report: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is no result of `cargo xtask bench`", path.display()))?;
        ensure!(
            report.format == FORMAT,
            "{} has format {}, this xtask reads {FORMAT}",
            path.display(),
            report.format
        );
        Ok(report)
    }

    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(path, text).with_context(|| format!("could not write {}", path.display()))
    }
}

/// The median; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

/// The median of the rounds' ratios `ours / theirs`, or `None` without a peer's rounds.
pub fn ratio(ours: &[f64], theirs: &[f64]) -> Option<f64> {
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
    (!ratios.is_empty()).then(|| median(&ratios))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios_are_of_rounds() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        assert!(median(&[]).is_nan());
        // The ratio of the medians would be 2.
        assert_eq!(ratio(&[2.0, 8.0, 9.0], &[4.0, 4.0, 3.0]), Some(2.0));
        assert_eq!(ratio(&[2.0, 8.0, 9.0], &[8.0, 4.0, 1.0]), Some(2.0));
        assert_eq!(ratio(&[1.0], &[]), None);
    }

    #[test]
    fn every_committed_result_can_be_read_and_the_document_quotes_one_of_them() {
        let folder = crate::repository().join("bench/results");
        let mut results = Vec::new();
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let report = Report::read(&path).unwrap();
                assert!(path.file_stem().unwrap().to_str().unwrap().ends_with(&report.date), "{path:?}");
                assert!(
                    report.decode.iter().all(|row| row.tokens_per_s.len() == row.share.len()),
                    "{path:?}"
                );
                results.push((path, report));
            }
        }
        let text = fs::read_to_string(crate::repository().join("docs/performance.md")).unwrap();
        let Some(name) = super::super::tables::quoted(&text) else { return };
        let found = results.iter().find(|(path, _)| path.ends_with(name));
        let (_, report) =
            found.unwrap_or_else(|| panic!("docs/performance.md quotes {name}, which is not there"));
        let replaced = super::super::tables::replace(&text, name, report).unwrap();
        assert!(replaced == text, "docs/performance.md differs from its result: cargo xtask bench --tables");
    }
}
