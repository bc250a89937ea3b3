//! Downloads a model into the cache.

use std::{
    collections::HashMap,
    fs::{self, File},
    sync::{Mutex, PoisonError, atomic::AtomicBool},
};

use crate::{
    cache::{RepoFolder, create_parent},
    client::RemoteFile,
    damage,
    download::Download,
    error::HubError,
    gguf::is_gguf,
    locate::Located,
    names::checked_name,
    options::PullOptions,
    parallel::in_parallel,
    pieces, platform,
    progress::PullEvent,
    sources::{Sources, Wanted},
};

/// Address of the models' pages; the rest of such an address is the model's name.
const PAGES: &str = "https://huggingface.co/";

/// Downloads a model's missing files and returns its folder. `repo` is org/name, or the address of
/// its page. With a colon and a quantization at the end, the model is the GGUF files of that
/// quantization. If an earlier pull of this revision finished and no file is missing or known to be
/// damaged, the network is not used, unless `refresh` is set. Peers are asked before the hub, but
/// only the hub knows the newest commit.
///
/// # Errors
/// See [`HubError`]. Downloaded bytes stay, and the next pull resumes there; only a file with a
/// wrong checksum is deleted.
pub fn pull(
    repo: &str,
    revision: &str,
    options: &PullOptions,
    progress: &(dyn Fn(PullEvent<'_>) + Sync),
) -> Result<Located, HubError> {
    let name = repo.strip_prefix(PAGES).map_or(repo, |name| name.trim_end_matches('/'));
    let asked = options.commit.as_deref().unwrap_or(revision);
    let (repo, quantization) = checked_name(name, &[revision, asked])?;
    if options.offline && options.refresh {
        return Err(HubError::OfflineUpdate { repo: repo.into() });
    }
    let folder = RepoFolder::new(&options.cache, repo);
    let located = |commit: &str, files: &[&str]| {
        let snapshot = folder.snapshot(commit);
        // A model of several GGUF files is named by its first file.
        let first = files.first().filter(|file| is_gguf(file));
        Located {
            folder: first.map_or_else(|| snapshot.clone(), |file| snapshot.join(file)),
            repo: Some(name.to_owned()),
            commit: Some(commit.to_owned()),
        }
    };
    let known = folder.commit(revision).filter(|known| options.commit.as_ref().is_none_or(|it| it == known));
    let known = known.and_then(|commit| Some((folder.complete(&commit, quantization)?, commit)));
    match known {
        Some((files, commit)) if !options.refresh => {
            return Ok(located(&commit, &files.iter().map(String::as_str).collect::<Vec<_>>()));
        }
        None if options.offline && options.peers.is_empty() => {
            return Err(HubError::Offline { repo: repo.into() });
        }
        _ => {}
    }
    let _lock = lock(&folder, repo)?;
    let sources = Sources::find(repo, asked, options, progress)?;
    let listing = &sources.listing;
    let commit = listing.sha.as_str();
    let files = listing.needed(repo, quantization)?;
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let stop = AtomicBool::new(false);
    let mut download = Download {
        sources: &sources,
        folder: &folder,
        repo,
        revision,
        commit,
        progress,
        stop: &stop,
        streams: 1,
    };

    let remotes = remote_files(&download, &files, options.jobs)?;
    let mut missing = missing(&folder, &files, &remotes)?;
    let bytes = missing.iter().fold(0_u64, |sum, (_, remote)| sum.saturating_add(remote.size));
    progress(PullEvent::Start { files: missing.len(), bytes, present: files.len() - missing.len() });
    check_space(&folder, repo, &missing, 0)?;
    // Largest file first, so that no worker downloads it alone at the end.
    missing.sort_by_key(|(_, remote)| std::cmp::Reverse(remote.size));
    download.streams = pieces::streams(missing.len().min(options.jobs));
    let numbered: Vec<_> = missing.iter().enumerate().collect();
    in_parallel(&numbered, options.jobs, &stop, |(number, (file, remote))| {
        download.blob(*number, file, remote)
    })?;

    for (file, remote) in files.iter().zip(&remotes) {
        folder.link(commit, file, &remote.etag)?;
    }
    let sized: Vec<(&str, u64)> = files.iter().copied().zip(remotes.iter().map(|it| it.size)).collect();
    folder.set_complete(commit, quantization, &sized)?;
    folder.forget_part(commit, quantization)?;
    folder.set_commit(revision, commit)?;
    Ok(located(commit, &files))
}

/// Locks a repository during a pull. The system releases the lock if the process dies.
pub(crate) fn lock(folder: &RepoFolder, repo: &str) -> Result<File, HubError> {
    let path = folder.lock();
    create_parent(&path)?;
    let file = File::create(&path).map_err(HubError::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(HubError::Busy { repo: repo.into(), lock: path }),
        Err(fs::TryLockError::Error(error)) => Err(HubError::io("lock", path)(error)),
    }
}

/// Etag and size of each file, in the order of `files`.
pub(crate) fn remote_files(
    download: &Download<'_>,
    files: &[&str],
    jobs: usize,
) -> Result<Vec<RemoteFile>, HubError> {
    let found = Mutex::new(vec![None; files.len()]);
    let numbered: Vec<(usize, &str)> = files.iter().copied().enumerate().collect();
    in_parallel(&numbered, jobs, download.stop, |&(index, file)| {
        let Download { repo, revision, commit, .. } = *download;
        let wanted = Wanted { repo, revision, file };
        let remote = download
            .sources
            .ask(&wanted, index, download.progress, |client| client.remote_file(repo, commit, file))?;
        found.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(remote);
        Ok(())
    })?;
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(found.into_iter().flatten().collect())
}

/// The files whose content is not in the cache; one of each group with the same content.
pub(crate) fn missing<'a>(
    folder: &RepoFolder,
    files: &[&'a str],
    remotes: &[RemoteFile],
) -> Result<Vec<(&'a str, RemoteFile)>, HubError> {
    let mut by_etag = HashMap::new();
    for (file, remote) in files.iter().zip(remotes) {
        let blob = folder.blob(&remote.etag);
        if folder.has_whole(remote) {
            continue;
        }
        if blob.exists() {
            // A blob that is damaged is downloaded again.
            fs::remove_file(&blob).map_err(HubError::io("delete", &blob))?;
            damage::unmark(&blob)?;
        }
        by_etag.entry(remote.etag.as_str()).or_insert((*file, remote.clone()));
    }
    Ok(by_etag.into_values().collect())
}

/// Checks that the disk has space for the bytes still to download: of missing files, and `more`.
pub(crate) fn check_space(
    folder: &RepoFolder,
    repo: &str,
    missing: &[(&str, RemoteFile)],
    more: u64,
) -> Result<(), HubError> {
    let path = folder.path();
    fs::create_dir_all(&path).map_err(HubError::io("create", &path))?;
    let remaining = |remote: &RemoteFile| {
        let present = match folder.partial_bytes(remote) {
            0 => fs::metadata(folder.part(&remote.etag)).map_or(0, |part| part.len()),
            present => present,
        };
        remote.size.saturating_sub(present)
    };
    let needed_bytes = missing.iter().fold(more, |sum, (_, remote)| sum.saturating_add(remaining(remote)));
    let available_bytes =
        platform::free_bytes(&path).map_err(HubError::io("measure the free space of", &path))?;
    if needed_bytes > available_bytes {
        return Err(HubError::NoSpace { repo: repo.into(), path, needed_bytes, available_bytes });
    }
    Ok(())
}
