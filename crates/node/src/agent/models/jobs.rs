//! Jobs on the models of this node's disk: pulling, updating, verifying. Each runs on a thread of
//! its own, and is shown in the node's report.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use thunder_hub::{PullEvent, PullOptions};

use super::super::Agent;
use super::super::host::unix_s;
use super::{RankPart, Work};
use crate::report::{JobReport, JobState, of_bytes};

/// Jobs that are remembered; the oldest that has ended is forgotten first.
const MOST_KEPT: usize = 16;
/// Jobs that run at a time: one uses the whole link already.
const MOST_AT_ONCE: usize = 4;
/// Files of a job whose bytes are counted. More than any model has.
const MOST_FILES: usize = 10_000;

/// Jobs of this node.
#[derive(Debug, Default)]
pub(in crate::agent) struct Jobs(Mutex<JobList>);

#[derive(Debug, Default)]
struct JobList {
    /// Number of the last job. Begins at the time, so that a restarted agent's are others.
    last: u64,
    jobs: VecDeque<Job>,
}

#[derive(Debug)]
struct Job {
    report: JobReport,
    revision: String,
    part: Option<RankPart>,
    /// Bytes of each file so far.
    files: BTreeMap<String, u64>,
    began: Instant,
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, JobList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All jobs, for the node's report.
    pub fn reports(&self) -> Vec<JobReport> {
        self.lock().jobs.iter().map(|job| job.report.clone()).collect()
    }

    /// Enters a job; `Err` with the number of one that does the same already.
    fn enter(
        &self,
        work: Work,
        model: &str,
        revision: &str,
        part: Option<RankPart>,
    ) -> Result<Result<u64, u64>, String> {
        let mut list = self.lock();
        let running = || list.jobs.iter().filter(|job| job.report.state == JobState::Running);
        // A job that brings all of a model brings any part of it.
        let is_same = |job: &&Job| {
            (&*job.report.model, job.report.work, &*job.revision) == (model, work, revision)
                && (job.part.is_none() || job.part == part)
        };
        if let Some(same) = running().find(is_same) {
            return Ok(Err(same.report.id));
        }
        if running().count() >= MOST_AT_ONCE {
            return Err(format!("{MOST_AT_ONCE} jobs with models run here already: try again later"));
        }
        if list.jobs.len() >= MOST_KEPT
            && let Some(oldest) = list.jobs.iter().position(|job| job.report.state != JobState::Running)
        {
            list.jobs.remove(oldest);
        }
        list.last = (list.last + 1).max(unix_s() << 10);
        let (id, from) = (list.last, Vec::new());
        let model = model.to_owned();
        let state = JobState::Running;
        let report = JobReport { id, model, work, from, done: 0, total: 0, took_ms: 0, commit: None, state };
        let (revision, files, began) = (revision.to_owned(), BTreeMap::new(), Instant::now());
        list.jobs.push_back(Job { report, revision, part, files, began });
        Ok(Ok(id))
    }

    fn change(&self, id: u64, change: impl FnOnce(&mut Job)) {
        if let Some(job) = self.lock().jobs.iter_mut().find(|job| job.report.id == id) {
            change(job);
            job.report.took_ms = job.began.elapsed().as_millis() as u64;
        }
    }

    pub(super) fn note(&self, id: u64, event: &PullEvent<'_>) {
        self.change(id, |job| match event {
            PullEvent::Start { bytes, .. } => job.report.total = *bytes,
            PullEvent::Source { from, .. } if !job.report.from.iter().any(|known| known == from) => {
                job.report.from.push((*from).to_owned());
            }
            PullEvent::Bytes { file, done, .. } => {
                if job.files.len() < MOST_FILES || job.files.contains_key(*file) {
                    job.files.insert((*file).to_owned(), *done);
                }
                job.report.done = job.files.values().sum();
            }
            _ => {}
        });
    }
}

impl Agent {
    /// Begins a job, or finds the one that does the same already. Returns its number. `commit`: of
    /// the revision, if a node has asked the hub already.
    pub(super) fn begin_job(
        &self,
        work: Work,
        model: String,
        revision: String,
        commit: Option<String>,
        part: Option<RankPart>,
    ) -> Result<u64, String> {
        let id = match self.0.jobs.enter(work, &model, &revision, part.clone())? {
            Ok(id) => id,
            Err(same) => return Ok(same),
        };
        let (agent, peers) = (self.clone(), self.weight_peers());
        let verb = format!("{work:?}").to_lowercase();
        self.0.log.add(format!("{verb} of {model} begins"));
        tokio::task::spawn_blocking(move || {
            let refresh = work == Work::Update && commit.is_none();
            let options = PullOptions { peers, refresh, commit, ..agent.0.options.models.clone() };
            let state = agent.work(id, work, (&model, &revision), part.as_ref(), &options);
            agent.0.log.add(format!("{verb} of {model}: {state}"));
            agent.0.jobs.change(id, |job| {
                if matches!(state, JobState::Done(_)) {
                    job.report.done = job.report.total.max(job.report.done);
                }
                job.report.state = state;
            });
            agent.0.version.send_modify(|version| *version += 1);
        });
        self.0.version.send_modify(|version| *version += 1);
        Ok(id)
    }

    /// Does a job. Blocks.
    fn work(
        &self,
        id: u64,
        work: Work,
        (model, revision): (&str, &str),
        part: Option<&RankPart>,
        options: &PullOptions,
    ) -> JobState {
        let failed = |error: thunder_hub::HubError| JobState::Failed(error.to_string());
        let named = if revision == "main" { model.to_owned() } else { format!("{model}@{revision}") };
        let present = thunder_hub::locate_in(&named, &options.cache);
        if work == Work::Verify {
            let part = if present.is_err() { thunder_hub::part_in(&named, &options.cache) } else { None };
            let place = match &part {
                Some(part) => Ok((part.path.clone(), part.present)),
                None => present.map(|located| (located.folder.clone(), bytes_of(&located.folder))),
            };
            let verified = place.and_then(|(path, bytes)| {
                self.0.jobs.change(id, |job| job.report.total = bytes);
                thunder_hub::verify(&path, &|bytes| {
                    self.0.jobs.change(id, |job| job.report.done += bytes);
                })
            });
            let what = part.map(|part| format!(", part: {}", of_bytes(part.present, part.total)));
            let what = what.unwrap_or_default();
            return match verified {
                Err(error) => failed(error),
                Ok(found) if found.damaged.is_empty() => {
                    JobState::Done(format!("{} files are right{what}", found.right))
                }
                Ok(found) => {
                    let files: Vec<String> =
                        found.damaged.iter().map(|file| file.display().to_string()).collect();
                    JobState::Failed(format!(
                        "damaged: {}; `thunder model pull {model} --nodes {}` downloads them again",
                        files.join(", "),
                        self.0.options.name
                    ))
                }
            };
        }
        let damaged = match &present {
            Ok(located) => thunder_hub::is_damaged(located, &options.cache),
            Err(_) => Ok(false),
        };
        let is_damaged = match damaged {
            Ok(is_damaged) => is_damaged,
            Err(error) => return failed(error),
        };
        if work == Work::Pull && present.is_ok() && !is_damaged {
            return JobState::Done("it is there already".to_owned());
        }
        if let Some(part) = part.filter(|_| work == Work::Pull && present.is_err())
            && let Some(state) = self.pull_part(id, (model, revision), part, options)
        {
            return state;
        }
        let before = present.ok().and_then(|located| located.commit);
        match thunder_hub::pull(model, revision, options, &|event| self.0.jobs.note(id, &event)) {
            Err(error) => failed(error),
            Ok(located) => {
                self.0.jobs.change(id, |job| job.report.commit.clone_from(&located.commit));
                let is_same = before.is_some() && located.commit == before;
                JobState::Done(match located.commit {
                    _ if is_same && is_damaged => "its damaged files came again".to_owned(),
                    _ if is_same => "it is up to date".to_owned(),
                    commit => format!("it is complete ({})", commit.unwrap_or_default()),
                })
            }
        }
    }
}

/// Bytes of a model's files.
fn bytes_of(model: &std::path::Path) -> u64 {
    let length = |path: &std::path::Path| std::fs::metadata(path).map_or(0, |found| found.len());
    if model.is_file() {
        return thunder_hub::gguf_parts(model).iter().map(|part| length(part)).sum();
    }
    let entries = std::fs::read_dir(model).into_iter().flatten().flatten();
    entries.map(|entry| length(&entry.path())).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_job_is_entered_once_and_old_ones_are_forgotten() {
        let jobs = Jobs::default();
        let first = jobs.enter(Work::Pull, "a/b", "main", None).unwrap().unwrap();
        assert_eq!(jobs.enter(Work::Pull, "a/b", "main", None).unwrap(), Err(first));
        let part = |rank| Some(RankPart { rank, ranks: 3, arguments: Vec::new() });
        assert_eq!(jobs.enter(Work::Pull, "a/b", "main", part(1)).unwrap(), Err(first), "all of it comes");
        assert!(jobs.enter(Work::Verify, "a/b", "main", None).unwrap().is_ok(), "another job");
        for number in 0..2 {
            assert!(jobs.enter(Work::Pull, &format!("a/{number}"), "main", None).unwrap().is_ok());
        }
        let error = jobs.enter(Work::Pull, "a/other", "main", None).unwrap_err();
        assert!(error.contains("4 jobs"), "{error}");
        for number in 0..40 {
            let id = jobs.reports().last().unwrap().id;
            jobs.change(id, |job| job.report.state = JobState::Done(String::new()));
            jobs.enter(Work::Pull, &format!("b/{number}"), "main", None).unwrap().unwrap();
        }
        assert_eq!(jobs.reports().len(), MOST_KEPT);
        assert!(jobs.reports().iter().any(|job| job.id == first), "one that runs is kept");
    }

    #[test]
    fn progress_is_the_sum_of_the_files_and_sources_are_named_once() {
        let jobs = Jobs::default();
        let id = jobs.enter(Work::Pull, "a/b", "main", None).unwrap().unwrap();
        jobs.note(id, &PullEvent::Start { files: 2, bytes: 100, present: 0 });
        for (file, from) in [("x", "bee"), ("y", "bee"), ("x", "cat")] {
            jobs.note(id, &PullEvent::Source { file, from });
        }
        for (file, done) in [("x", 10), ("y", 5), ("x", 40), ("y", 0)] {
            jobs.note(id, &PullEvent::Bytes { file, done, total: 50 });
        }
        let report = &jobs.reports()[0];
        assert_eq!(
            (report.done, report.total, &report.from[..]),
            (40, 100, &["bee".into(), "cat".into()][..])
        );
    }
}
