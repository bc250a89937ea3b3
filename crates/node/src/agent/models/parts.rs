//! What one rank reads of a model that its node lacks: the ranges are computed from the headers by
//! `thunder serve --ranges`, since this crate knows no models, and only they are fetched.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::Deserialize;
use thunder_cluster::watched::reason;
use thunder_hub::{PullOptions, WantedFile};

use super::super::Agent;
use super::RankPart;
use super::headers::HEADERS_FOLDER;
use crate::report::{JobState, of_bytes};

/// Of a model's weight files, the percentage from which they are fetched whole: that can be checked
/// by their hashes.
const WHOLE_FROM_PERCENT: u64 = 90;
/// Time for another fetch of the same model to end, and the interval at which it is looked at.
const BUSY_LIMIT: Duration = Duration::from_secs(60);
const BUSY_PAUSE: Duration = Duration::from_millis(200);

/// What `thunder serve --ranges` prints.
#[derive(Deserialize)]
struct RangesOfRank {
    files: Vec<RangesOfFile>,
}

/// What a rank reads of a file.
#[derive(Deserialize)]
struct RangesOfFile {
    path: String,
    size: u64,
    /// Bytes that are not there.
    lacking: u64,
    runs: Vec<String>,
}

impl Agent {
    /// Whether all that a rank reads of a model is on this node's disk, where the whole is not.
    /// Blocks.
    pub(super) fn has_part(&self, model: &str, part: &RankPart) -> bool {
        let found = thunder_hub::part_in(model, &self.0.options.models.cache);
        let ranges = found.and_then(|found| self.ranges_of(&found.path, part).ok());
        ranges.is_some_and(|ranges| ranges.files.iter().all(|file| file.lacking == 0))
    }

    /// Fetches what a rank reads of a model; `None` if that is hardly less than all, or cannot be
    /// said. Blocks.
    pub(super) fn pull_part(
        &self,
        id: u64,
        (model, revision): (&str, &str),
        part: &RankPart,
        options: &PullOptions,
    ) -> Option<JobState> {
        let failed = |error: thunder_hub::HubError| Some(JobState::Failed(error.to_string()));
        let headers = self.0.folder.file(HEADERS_FOLDER);
        let headers = match thunder_hub::fetch_headers(model, revision, options, &headers) {
            Ok(headers) => headers,
            Err(error) => return failed(error),
        };
        let ranges = match self.ranges_of(&headers.folder, part) {
            Ok(ranges) => ranges,
            Err(why) => {
                self.0.log.add(format!("{model} comes whole: {why}"));
                return None;
            }
        };
        let wanted: Vec<WantedFile> = ranges.files.iter().filter_map(RangesOfFile::wanted).collect();
        let bytes: u64 = wanted.iter().flat_map(|file| &file.runs).map(thunder_parts::Run::bytes).sum();
        let all: u64 = ranges.files.iter().map(|file| file.size).sum();
        if wanted.len() < ranges.files.len() || bytes * 100 >= all * WHOLE_FROM_PERCENT {
            return None;
        }
        let options = PullOptions { commit: headers.commit, ..options.clone() };
        let note = |event: thunder_hub::PullEvent<'_>| self.0.jobs.note(id, &event);
        // A fetch for an earlier group of this model may still run.
        let began = Instant::now();
        let pulled = loop {
            match thunder_hub::pull_part(model, revision, &options, &wanted, &note) {
                Err(thunder_hub::HubError::Busy { .. }) if began.elapsed() < BUSY_LIMIT => {
                    std::thread::sleep(BUSY_PAUSE);
                }
                pulled => break pulled,
            }
        };
        match pulled {
            Ok(_) => {
                let named = if revision == "main" { model.to_owned() } else { format!("{model}@{revision}") };
                let part = thunder_hub::part_in(&named, &options.cache);
                Some(JobState::Done(part.map_or_else(
                    || "it is there already".to_owned(),
                    |part| format!("part: {}", of_bytes(part.present, part.total)),
                )))
            }
            Err(error) => failed(error),
        }
    }

    /// What a rank reads of the model at a path. Blocks.
    fn ranges_of(&self, path: &Path, part: &RankPart) -> Result<RangesOfRank, String> {
        let rank = format!("{}/{}", part.rank, part.ranks);
        let mut command = self.serve_command(path.as_os_str(), &part.arguments, "none");
        let output = command.args(["--ranges", &rank]).stdin(Stdio::null()).output();
        let output = output.map_err(|error| format!("{}: {error}", self.0.options.program.display()))?;
        serde_json::from_slice(&output.stdout).map_err(|error| {
            let said = String::from_utf8_lossy(&output.stderr);
            reason(said.lines()).map_or_else(|| error.to_string(), str::to_owned)
        })
    }
}

impl RangesOfFile {
    fn wanted(&self) -> Option<WantedFile> {
        let runs = self.runs.iter().map(|run| run.parse().ok()).collect::<Option<_>>()?;
        Some(WantedFile { path: self.path.clone().into(), runs })
    }
}
