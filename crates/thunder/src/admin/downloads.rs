//! Downloads that the dashboard starts, and the models on this machine's disk.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::bail;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thunder_hub::{PullEvent, PullOptions};

use crate::model_command::{cached_models, folder_bytes};

/// Maximum number of parallel downloads: one already uses the whole bandwidth.
const MOST_AT_ONCE: usize = 2;
/// Number of ended downloads to remember.
const MOST_KEPT: usize = 20;

/// The body of `POST /admin/downloads`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullBody {
    /// A name of the Hugging Face hub.
    pub model: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Running,
    Done,
    Failed,
}

#[derive(Debug, Clone, Serialize)]
struct Download {
    name: String,
    state: State,
    done: u64,
    total: u64,
    error: Option<String>,
    /// Bytes of each file so far.
    #[serde(skip)]
    files: BTreeMap<String, u64>,
}

/// Running downloads and the last ended ones, the latest first.
#[derive(Debug, Clone, Default)]
pub struct Downloads(Arc<Mutex<Vec<Download>>>);

impl Downloads {
    fn lock(&self) -> MutexGuard<'_, Vec<Download>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Downloads, and the complete models in the cache.
    ///
    /// # Errors
    /// When the cache cannot be read.
    pub fn list(&self) -> anyhow::Result<Value> {
        let root = thunder_hub::cache_root();
        let complete = |name: String| {
            let located = thunder_hub::locate_in(&name, &root).ok()?;
            Some(json!({ "name": name, "bytes": folder_bytes(&located.folder).ok()? }))
        };
        let mut names = cached_models(&root)?;
        names.sort();
        let available: Vec<_> = names.into_iter().filter_map(complete).collect();
        Ok(json!({ "available": available, "downloads": *self.lock() }))
    }

    /// Starts a download in the background.
    ///
    /// # Errors
    /// When it runs already, or too many do.
    pub fn start(&self, name: &str) -> anyhow::Result<Value> {
        {
            let mut downloads = self.lock();
            let running: Vec<&str> = downloads
                .iter()
                .filter(|download| download.state == State::Running)
                .map(|download| download.name.as_str())
                .collect();
            if running.contains(&name) {
                bail!("{name} is being downloaded already");
            }
            if running.len() >= MOST_AT_ONCE {
                bail!("{} are being downloaded: wait until one is complete", running.join(" and "));
            }
            downloads.retain(|download| download.name != name);
            let (name, files) = (name.to_owned(), BTreeMap::new());
            let download = Download { name, state: State::Running, done: 0, total: 0, error: None, files };
            downloads.insert(0, download);
            downloads.truncate(MOST_KEPT);
        }
        let (downloads, name) = (self.clone(), name.to_owned());
        std::thread::Builder::new().name("download".into()).spawn(move || {
            let options = PullOptions::from_env();
            let pulled = thunder_hub::pull(&name, "main", &options, &|event| downloads.note(&name, &event));
            downloads.change(&name, |download| match pulled {
                Ok(_) => (download.state, download.done) = (State::Done, download.total),
                Err(error) => (download.state, download.error) = (State::Failed, Some(error.to_string())),
            });
        })?;
        Ok(super::done())
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Download)) {
        if let Some(download) = self.lock().iter_mut().find(|download| download.name == name) {
            change(download);
        }
    }

    fn note(&self, name: &str, event: &PullEvent<'_>) {
        self.change(name, |download| match event {
            PullEvent::Start { bytes, .. } => download.total = *bytes,
            PullEvent::Bytes { file, done, .. } => {
                download.files.insert((*file).to_owned(), *done);
                download.done = download.files.values().sum();
            }
            _ => {}
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_the_sum_of_the_files() {
        let downloads = Downloads::default();
        let (name, files) = ("a/b".to_owned(), BTreeMap::new());
        downloads.lock().push(Download {
            name,
            state: State::Running,
            done: 0,
            total: 0,
            error: None,
            files,
        });
        downloads.note("a/b", &PullEvent::Start { files: 2, bytes: 100, present: 0 });
        for (file, done) in [("x", 10), ("y", 5), ("x", 40), ("y", 0)] {
            downloads.note("a/b", &PullEvent::Bytes { file, done, total: 50 });
        }
        let list = downloads.list().expect("the cache is there or empty");
        assert_eq!(
            (&list["downloads"][0]["done"], &list["downloads"][0]["total"]),
            (&json!(40), &json!(100))
        );
        let twice = downloads.start("a/b").expect_err("it runs");
        assert!(twice.to_string().contains("already"), "{twice}");
    }
}
