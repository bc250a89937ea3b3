//! Downloads a model into the cache.

use std::{
    collections::HashMap,
    fs::{self, File},
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    HubError, Located,
    cache::{self, RepoFolder, check_repo_name, create_parent, is_safe_path},
    client::{Client, LIST, Remote},
    download::Download,
    listing::Listing,
    platform,
};

/// How a pull goes on. Several files may report in turn, from several threads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// What the model consists of is known.
    Start {
        /// Files to fetch.
        files: usize,
        /// Bytes of these files.
        bytes: u64,
        /// Files that the cache has already.
        present: usize,
    },
    /// A part of a file is on the disk.
    Bytes {
        /// The file.
        file: &'a str,
        /// Its bytes so far. Falls back when a server makes it begin again.
        done: u64,
        /// All its bytes.
        total: u64,
    },
    /// An attempt failed, and after a wait another is made now.
    Retry {
        /// The file.
        file: &'a str,
        /// What went wrong.
        reason: &'a str,
        /// How long was waited.
        wait: Duration,
    },
    /// A file is whole and has the right checksum.
    Done {
        /// The file.
        file: &'a str,
    },
}

/// From where, to where and how to download.
#[derive(Debug, Clone)]
pub struct PullOptions {
    /// The hub's address.
    pub endpoint: String,
    /// Sent to the hub, and to no other host.
    pub token: Option<String>,
    /// The cache's folder.
    pub cache: PathBuf,
    /// Files at a time. More help where one connection is slower than the line, and cost the server more.
    pub jobs: usize,
    /// Attempts at a file without a byte gained before it is an error.
    pub attempts: u32,
    /// The wait after the first failed attempt; doubled after each, up to 30 s.
    pub first_wait: Duration,
    /// For how long a connection may bring nothing before it counts as broken.
    pub stall: Duration,
    /// Never use the network: succeed only if all is there.
    pub offline: bool,
    /// Ask the hub whether there is a newer commit even if all is there.
    pub refresh: bool,
}

impl PullOptions {
    /// What huggingface_hub's environment variables say: HF_ENDPOINT, HF_TOKEN (or the file of `hf auth login`),
    /// HF_HUB_CACHE and its kin, HF_HUB_OFFLINE.
    pub fn from_env() -> Self {
        let offline = cache::env("HF_HUB_OFFLINE")
            .is_some_and(|value| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"));
        Self {
            endpoint: cache::env("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            token: cache::token_from(&cache::env),
            cache: cache::cache_root(),
            jobs: 4,
            attempts: 5,
            first_wait: Duration::from_millis(500),
            stall: Duration::from_secs(30),
            offline,
            refresh: false,
        }
    }
}

/// Downloads a model, or what is missing of it, and returns its folder. If an earlier pull of this revision was
/// finished and nothing is missing, the network is not used (unless `refresh` is set).
///
/// # Errors
/// See [`HubError`]. What has come stays, and the next pull goes on from there; only a file with a wrong checksum
/// is deleted.
pub fn pull(
    repo: &str,
    revision: &str,
    options: &PullOptions,
    progress: &(dyn Fn(Event<'_>) + Sync),
) -> Result<Located, HubError> {
    let bad_name = |reason: String| HubError::BadName { name: repo.into(), folder: repo.into(), reason };
    check_repo_name(repo).map_err(bad_name)?;
    if !is_safe_path(revision) {
        return Err(bad_name(format!("{revision:?} is not a revision")));
    }
    let folder = RepoFolder::new(&options.cache, repo);
    let located = |commit: &str| Located {
        folder: folder.snapshot(commit),
        repo: Some(repo.to_owned()),
        commit: Some(commit.to_owned()),
    };
    let known = folder.commit(revision).filter(|commit| folder.is_complete(commit));
    match known {
        Some(commit) if options.offline || !options.refresh => return Ok(located(&commit)),
        None if options.offline => return Err(HubError::Offline { repo: repo.into() }),
        _ => {}
    }
    let _lock = lock(&folder, repo)?;
    let client = Client::new(
        &options.endpoint,
        options.token.clone(),
        options.attempts,
        options.first_wait,
        options.stall,
    )?;
    let answer = client
        .retrying(
            || client.listing(repo, revision),
            |failure, wait| progress(Event::Retry { file: LIST, reason: &failure.reason, wait }),
        )
        .map_err(|(failure, attempts)| client.error(repo, revision, LIST, failure, attempts))?;
    let listing = Listing::parse(repo, &answer)?;
    let commit = listing.sha.as_str();
    let files = listing.needed(repo)?;
    let stop = AtomicBool::new(false);
    let download =
        Download { client: &client, folder: &folder, repo, revision, commit, progress, stop: &stop };

    let remotes = remotes(&download, &files, options.jobs)?;
    let mut missing = missing(&folder, &files, &remotes)?;
    let bytes = missing.iter().fold(0_u64, |sum, (_, remote)| sum.saturating_add(remote.size));
    progress(Event::Start { files: missing.len(), bytes, present: files.len() - missing.len() });
    check_space(&folder, repo, &missing)?;
    // The largest first: so no worker is left alone with it at the end.
    missing.sort_by_key(|(_, remote)| std::cmp::Reverse(remote.size));
    in_parallel(&missing, options.jobs, &stop, |(file, remote)| download.blob(file, remote).map(|_| ()))?;

    for (file, remote) in files.iter().zip(&remotes) {
        folder.link(commit, file, &remote.etag)?;
    }
    folder.set_complete(commit, &files)?;
    folder.set_commit(revision, commit)?;
    Ok(located(commit))
}

/// Held for as long as a pull runs; the system frees it if the process dies.
fn lock(folder: &RepoFolder, repo: &str) -> Result<File, HubError> {
    let path = folder.lock();
    create_parent(&path)?;
    let file = File::create(&path).map_err(HubError::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(HubError::Busy { repo: repo.into(), lock: path }),
        Err(fs::TryLockError::Error(error)) => Err(HubError::io("lock", path)(error)),
    }
}

/// Etag and size of each file.
fn remotes(download: &Download<'_>, files: &[&str], jobs: usize) -> Result<Vec<Remote>, HubError> {
    let found = Mutex::new(vec![None; files.len()]);
    let numbered: Vec<(usize, &str)> = files.iter().copied().enumerate().collect();
    in_parallel(&numbered, jobs, download.stop, |&(index, file)| {
        let client = download.client;
        let remote = client
            .retrying(
                || client.remote(download.repo, download.commit, file),
                |failure, wait| (download.progress)(Event::Retry { file, reason: &failure.reason, wait }),
            )
            .map_err(|(failure, attempts)| {
                client.error(download.repo, download.revision, file, failure, attempts)
            })?;
        found.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(remote);
        Ok(())
    })?;
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(found.into_iter().flatten().collect())
}

/// The files whose content the cache does not have; of files with the same content, one.
fn missing<'a>(
    folder: &RepoFolder,
    files: &[&'a str],
    remotes: &[Remote],
) -> Result<Vec<(&'a str, Remote)>, HubError> {
    let mut by_etag = HashMap::new();
    for (file, remote) in files.iter().zip(remotes) {
        let blob = folder.blob(&remote.etag);
        match fs::metadata(&blob) {
            Ok(metadata) if metadata.len() == remote.size => continue,
            // Of another length: broken. It is made anew.
            Ok(_) => fs::remove_file(&blob).map_err(HubError::io("delete", &blob))?,
            Err(_) => {}
        }
        by_etag.entry(remote.etag.as_str()).or_insert((*file, remote.clone()));
    }
    Ok(by_etag.into_values().collect())
}

/// Whether the disk has room for what is still to come.
fn check_space(folder: &RepoFolder, repo: &str, missing: &[(&str, Remote)]) -> Result<(), HubError> {
    let path = folder.path();
    fs::create_dir_all(&path).map_err(HubError::io("create", &path))?;
    let still = |remote: &Remote| {
        let there = fs::metadata(folder.part(&remote.etag)).map_or(0, |part| part.len());
        remote.size.saturating_sub(there)
    };
    let needed_bytes = missing.iter().fold(0_u64, |sum, (_, remote)| sum.saturating_add(still(remote)));
    let available_bytes =
        platform::free_bytes(&path).map_err(HubError::io("measure the free space of", &path))?;
    if needed_bytes > available_bytes {
        return Err(HubError::NoSpace { repo: repo.into(), path, needed_bytes, available_bytes });
    }
    Ok(())
}

/// Does the work for all items, `jobs` at a time. The first error stops the others, and is returned.
fn in_parallel<T: Sync>(
    items: &[T],
    jobs: usize,
    stop: &AtomicBool,
    work: impl Fn(&T) -> Result<(), HubError> + Sync,
) -> Result<(), HubError> {
    let next = AtomicUsize::new(0);
    let first_error = Mutex::new(None);
    let worker = || {
        while !stop.load(Ordering::Relaxed)
            && let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed))
        {
            if let Err(error) = work(item) {
                stop.store(true, Ordering::Relaxed);
                first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, items.len().max(1)) {
            scope.spawn(worker);
        }
    });
    first_error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
