//! Fetches the parts of a model that a plan reads: its configuration and the headers of its weight
//! files.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use thunder_parts::{Piece, Record, Run};

use crate::{
    client::Client,
    download::content_range,
    error::HubError,
    failure::Failure,
    gguf::is_gguf,
    locate::Located,
    names::checked_name,
    options::PullOptions,
    parallel::in_parallel,
    sources::{Sources, Wanted},
};

/// Bytes of a safetensors file in the first request. Longer headers need a second request.
const FIRST_BYTES: u64 = 64 << 10;
/// Maximum header size, as in the format's own library.
const LONGEST_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of a GGUF model's first file. Its header contains the vocabulary, about 15 MB for 262,144
/// tokens.
const GGUF_BYTES: u64 = 32 << 20;
/// Bytes of the other files of a split GGUF model: a table of tensors.
const GGUF_PART_BYTES: u64 = 1 << 20;
/// Maximum size of a configuration file. The index of a model with 100,000 tensors has about 10 MB.
const LONGEST_CONFIGURATION_BYTES: u64 = 64 << 20;

/// Number of commits of a model, or quantizations, whose headers are kept: another command may
/// still read the previous ones.
const KEPT_COMMITS: usize = 3;
/// Age above which an incomplete folder belongs to a killed call.
const PARTIAL_LIVES: Duration = Duration::from_secs(3600);

/// Number of calls so far, so that parallel calls write to different folders.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Makes a folder or a GGUF file in `into` that can be opened like the model: the configuration,
/// and weight files of full length with only their headers. The rest of each file is a hole that
/// takes no space. A record says what is there. The result of an earlier call for the same
/// commit is reused. The sources are those of [`pull`](crate::pull()).
///
/// # Errors
/// See [`HubError`].
pub fn fetch_headers(
    name: &str,
    revision: &str,
    options: &PullOptions,
    into: &Path,
) -> Result<Located, HubError> {
    let asked = options.commit.as_deref().unwrap_or(revision);
    let (repo, quantization) = checked_name(name, &[revision, asked])?;
    let sources = Sources::find(repo, asked, options, &|_| {})?;
    let commit = sources.listing.sha.as_str();
    let (full_name, commit_name) = (name.to_owned(), commit.to_owned());
    let needed = sources.listing.needed(repo, quantization)?;
    let wanted: Vec<(usize, &String)> = needed.iter().filter(|file| is_read(file)).enumerate().collect();
    let quantization = quantization.map(|of| format!(".{}", of.to_uppercase())).unwrap_or_default();
    let (of_repo, name) = (into.join(repo.replace('/', "--")), format!("{commit}{quantization}"));
    let folder = of_repo.join(&name);
    let gguf = needed.first().filter(|file| is_gguf(file));
    let found = Located {
        folder: gguf.map_or_else(|| folder.clone(), |file| folder.join(file)),
        repo: Some(full_name),
        commit: Some(commit_name),
    };
    if folder.is_dir() {
        return Ok(found);
    }
    // Renamed when it is complete, because other commands may fetch the same in the meantime.
    let number = CALLS.fetch_add(1, Ordering::Relaxed);
    let new = of_repo.join(format!("{name}.new-{}-{number}", std::process::id()));
    let stop = AtomicBool::new(false);
    let fetched = in_parallel(&wanted, options.jobs, &stop, |(number, file)| {
        let wanted = Wanted { repo, revision, file };
        let ask = |client: &Client| begin(client, repo, commit, file, *number);
        let (bytes, size) = sources.ask(&wanted, *number, &|_| {}, ask)?;
        let path = new.join(file);
        crate::cache::create_parent(&path)?;
        let mut made = File::create(&path).map_err(HubError::io("create", &path))?;
        let written = made.write_all(&bytes).and_then(|()| made.set_len(size)).and_then(|()| {
            // What reads the file is to know that the rest is no zeros.
            let header = Piece { digest: None, runs: vec![Run::of(0..bytes.len() as u64)] };
            let is_part = !bytes.is_empty() && (bytes.len() as u64) < size;
            if is_part { Record { pieces: vec![header] }.write(&path) } else { Ok(()) }
        });
        written.map_err(HubError::io("write", &path))
    });
    if let Err(error) = fetched {
        // The rest of the folder does no harm, and the first error is more helpful.
        let _ = fs::remove_dir_all(&new);
        return Err(error);
    }
    match fs::rename(&new, &folder) {
        // Another call was faster.
        Err(_) if folder.is_dir() => fs::remove_dir_all(&new).map_err(HubError::io("delete", new))?,
        renamed => renamed.map_err(HubError::io("rename", new))?,
    }
    prune(&of_repo);
    Ok(found)
}

/// Deletes the headers of all commits except the latest ones, and the folders of killed calls.
fn prune(of_repo: &Path) {
    let made = |entry: fs::DirEntry| {
        let is_partial = entry.file_name().to_string_lossy().contains(".new-");
        Some((entry.metadata().ok()?.modified().ok()?, is_partial, entry.path()))
    };
    let mut folders: Vec<_> =
        fs::read_dir(of_repo).into_iter().flatten().flatten().filter_map(made).collect();
    folders.sort_by_key(|(made, ..)| std::cmp::Reverse(*made));
    let (partial, whole): (Vec<_>, Vec<_>) = folders.into_iter().partition(|(_, is_partial, _)| *is_partial);
    let is_old = |made: &SystemTime| made.elapsed().is_ok_and(|age| age > PARTIAL_LIVES);
    let partial = partial.into_iter().filter(|(made, ..)| is_old(made));
    for (.., folder) in whole.into_iter().skip(KEPT_COMMITS).chain(partial) {
        // Another call may delete it too; the next call tries again.
        let _ = fs::remove_dir_all(&folder);
    }
}

/// Whether a plan reads a file.
fn is_read(file: &str) -> bool {
    [".safetensors", ".gguf", "config.json", ".index.json"].iter().any(|end| file.ends_with(end))
        || file == "modules.json"
}

/// The beginning of a file, as far as a plan reads it, and the file's length. `number`: its place
/// among the model's files.
fn begin(
    client: &Client,
    repo: &str,
    commit: &str,
    file: &str,
    number: usize,
) -> Result<(Vec<u8>, u64), Failure> {
    let size = client.remote_file(repo, commit, file)?.size;
    let read = |bytes: u64| read_first(client, repo, commit, file, bytes.min(size));
    let bytes = if is_gguf(file) {
        read(if number == 0 { GGUF_BYTES } else { GGUF_PART_BYTES })?
    } else if file.ends_with(".safetensors") {
        let bytes = read(FIRST_BYTES)?;
        let header = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
        match header.saturating_add(8) {
            length if length <= bytes.len() as u64 => bytes,
            _ if header > LONGEST_HEADER_BYTES => {
                return Err(Failure::permanent(format!("its header claims to have {header} bytes")));
            }
            length => read(length)?,
        }
    } else if size > LONGEST_CONFIGURATION_BYTES {
        return Err(Failure::permanent(format!("it has {size} bytes: too many for a configuration")));
    } else {
        read(size)?
    };
    Ok((bytes, size))
}

/// The first bytes of a file, which must have at least this many.
fn read_first(client: &Client, repo: &str, commit: &str, file: &str, count: u64) -> Result<Vec<u8>, Failure> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let response = client.content(repo, commit, file, 0, Some(count))?;
    let is_beginning = match response.status().as_u16() {
        206 => content_range(&response).is_some_and(|(first, _)| first == 0),
        // A server without ranges sends the whole file.
        status => status == 200,
    };
    if !is_beginning {
        return Err(Failure::permanent("the server did not send the file's beginning"));
    }
    let mut bytes = Vec::new();
    let read = response.into_body().into_reader().take(count).read_to_end(&mut bytes);
    read.map_err(|error| Failure::transient(error.to_string()))?;
    if (bytes.len() as u64) < count {
        let reason = format!("the connection broke after {} of {count} bytes", bytes.len());
        return Err(Failure::transient(reason));
    }
    Ok(bytes)
}
