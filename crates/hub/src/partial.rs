//! Parts of a model: what one rank reads of its weight files, and all of its other files.
//!
//! A weight file that is there in part is a sparse file of the whole length in `blobs`, with a
//! [`Record`] next to it. Links to it are in a folder of their own, so that nothing that looks for
//! the model takes it for the whole.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use thunder_parts::{Piece, Ranges, Record, Run};

use crate::{
    cache::{RepoFolder, create_parent},
    checksum::Checksum,
    client::RemoteFile,
    download::Download,
    error::HubError,
    gguf::is_gguf,
    names::checked_name,
    options::PullOptions,
    parallel::in_parallel,
    part_folder::present,
    pieces::MOST_STREAMS,
    progress::PullEvent,
    pull::{check_space, lock, missing, remote_files},
    runs::{PIECE_BYTES, PIECE_RUNS},
    sources::{Sources, Turns},
};

/// Gaps up to this are fetched too: rows that are so near to each other cost more to name.
const NEAR_BYTES: u64 = 1 << 10;
/// Bytes after which the disk gets them, and the record names them.
const PORTION_BYTES: u64 = 16 << 20;

/// What is wanted of a weight file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedFile {
    /// A path that ends in the file's name in the repository.
    pub path: PathBuf,
    /// The bytes. Runs may overlap.
    pub runs: Vec<Run>,
}

/// Fetches some bytes of a model's weight files, and its other files whole. What is there already
/// is not fetched again: a model that is whole is left alone, a weight file that is whole is used.
/// Sources are asked as by [`pull`](crate::pull()). Returns the part's folder, or its first GGUF
/// file.
///
/// Bytes of peers come with a digest that the peer has made while it read them. What is written has
/// that digest, and the record keeps it for [`verify`](crate::verify()). The hub gives none.
///
/// # Errors
/// See [`HubError`]. Bytes that have come stay, and are in the record.
pub fn pull_part(
    name: &str,
    revision: &str,
    options: &PullOptions,
    wanted: &[WantedFile],
    progress: &(dyn Fn(PullEvent<'_>) + Sync),
) -> Result<PathBuf, HubError> {
    let asked = options.commit.as_deref().unwrap_or(revision);
    let (repo, quantization) = checked_name(name, &[revision, asked])?;
    let folder = RepoFolder::new(&options.cache, repo);
    let _lock = lock(&folder, repo)?;
    let sources = Sources::find(repo, asked, options, progress)?;
    let commit = sources.listing.sha.as_str();
    let files = sources.listing.needed(repo, quantization)?;
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let stop = AtomicBool::new(false);
    let download = Download {
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
    let all = || files.iter().copied().zip(&remotes);
    let (others, of_others): (Vec<&str>, Vec<RemoteFile>) =
        all().filter(|(file, _)| !is_weights(file)).map(|(file, remote)| (file, remote.clone())).unzip();
    let small = missing(&folder, &others, &of_others)?;
    let mut gaps = Vec::new();
    for (file, remote) in all().filter(|(file, _)| is_weights(file)) {
        if folder.has_whole(remote) {
            continue;
        }
        let path = folder.partial(&remote.etag);
        let runs = wanted.iter().find(|wanted| wanted.path.ends_with(Path::new(file)));
        let runs = runs.map_or_else(|| Ranges::whole(remote.size), |wanted| Ranges::of(&wanted.runs));
        let lacking = runs.filled(NEAR_BYTES).minus(&present(&path, remote.size)?);
        gaps.push(Gap { file, remote, path, lacking });
    }
    let bytes: u64 = gaps.iter().map(|gap| gap.lacking.bytes()).sum();
    let total = small.iter().map(|(_, remote)| remote.size).sum::<u64>() + bytes;
    let with_gaps = gaps.iter().filter(|gap| !gap.lacking.is_empty()).count();
    let files_missing = small.len() + with_gaps;
    progress(PullEvent::Start { files: files_missing, bytes: total, present: files.len() - files_missing });
    check_space(&folder, repo, &small, bytes)?;
    in_parallel(&small, options.jobs, &stop, |(file, remote)| download.blob(0, file, remote))?;
    download.fill(&gaps, options.jobs)?;
    let part = folder.part_folder(commit, quantization);
    for (file, remote) in all() {
        let whole = folder.has_whole(remote) || !is_weights(file);
        let blob = if whole { folder.blob(&remote.etag) } else { folder.partial(&remote.etag) };
        folder.link_in(&part, file, &blob)?;
    }
    folder.set_part_commit(revision, quantization, commit)?;
    let first = files.first().filter(|file| is_gguf(file));
    Ok(first.map_or_else(|| part.clone(), |file| part.join(file)))
}

fn is_weights(file: &str) -> bool {
    file.ends_with(".safetensors") || is_gguf(file)
}

/// What a file lacks.
struct Gap<'a> {
    file: &'a str,
    remote: &'a RemoteFile,
    path: PathBuf,
    lacking: Ranges,
}

/// A file that is being filled.
struct Filling {
    path: PathBuf,
    file: Mutex<File>,
    /// Bytes that have come.
    done: AtomicU64,
    /// Pieces that are written and not in the record, and their bytes.
    waiting: Mutex<(Vec<Piece>, u64)>,
}

impl Filling {
    /// Opens a file of this size, or makes one that is all hole.
    fn open(path: &Path, size: u64) -> Result<Self, HubError> {
        create_parent(path)?;
        let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        let file = open.map_err(HubError::io("open", path))?;
        let length = file.metadata().map_err(HubError::io("look at", path))?.len();
        let record = Record::of(path).map_err(HubError::io("read", Record::path_of(path)))?;
        // Without a line that was cut short, and there before the file has its length.
        let record = record.filter(|_| length == size).unwrap_or_default();
        record.write(path).map_err(HubError::io("write", Record::path_of(path)))?;
        file.set_len(size).map_err(HubError::io("write", path))?;
        let (done, waiting) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { path: path.to_owned(), file: Mutex::new(file), done, waiting })
    }

    fn waiting(&self) -> MutexGuard<'_, (Vec<Piece>, u64)> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a piece. Returns how many bytes have come so far.
    fn write(&self, piece: Piece, bytes: &[u8]) -> io::Result<u64> {
        let mut rest = bytes;
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        for range in piece.runs.iter().flat_map(|run| run.ranges()) {
            let (here, after) = rest.split_at((range.end - range.start) as usize);
            file.seek(SeekFrom::Start(range.start))?;
            file.write_all(here)?;
            rest = after;
        }
        drop(file);
        let mut waiting = self.waiting();
        waiting.0.push(piece);
        waiting.1 += bytes.len() as u64;
        let is_due = waiting.1 >= PORTION_BYTES;
        drop(waiting);
        if is_due {
            self.flush()?;
        }
        Ok(self.done.fetch_add(bytes.len() as u64, Ordering::Relaxed) + bytes.len() as u64)
    }

    /// Enters what was written in the record, once the disk has it.
    fn flush(&self) -> io::Result<()> {
        let (pieces, _) = std::mem::take(&mut *self.waiting());
        if pieces.is_empty() {
            return Ok(());
        }
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).try_clone()?;
        file.sync_data()?;
        Record::append(&self.path, &pieces)
    }
}

impl Download<'_> {
    /// Fetches what files lack, over several connections at once.
    fn fill(&self, gaps: &[Gap<'_>], jobs: usize) -> Result<(), HubError> {
        let files: Vec<Filling> =
            gaps.iter().map(|gap| Filling::open(&gap.path, gap.remote.size)).collect::<Result<_, _>>()?;
        let mut pieces: Vec<(usize, usize, Vec<Run>)> = Vec::new();
        for (index, gap) in gaps.iter().enumerate() {
            for runs in gap.lacking.cut(PIECE_BYTES, PIECE_RUNS) {
                pieces.push((pieces.len(), index, runs));
            }
        }
        let has_peers = self.sources.clients.iter().any(|client| client.is_peer);
        let lost = Mutex::new(BTreeSet::new());
        let filled = in_parallel(&pieces, if has_peers { MOST_STREAMS } else { jobs }, self.stop, |piece| {
            let (number, index, runs) = piece;
            let (gap, filling) = (&gaps[*index], &files[*index]);
            let (bytes, digest) = self.piece(*number, gap, runs, &lost)?;
            let written = filling.write(Piece { digest: Some(digest), runs: runs.clone() }, &bytes);
            let done = written.map_err(HubError::io("write", &gap.path))?;
            (self.progress)(PullEvent::Bytes { file: gap.file, done, total: gap.lacking.bytes() });
            Ok(())
        });
        // What has come is kept, whatever has failed.
        let flushed: Result<Vec<()>, HubError> = files
            .iter()
            .map(|filling| filling.flush().map_err(HubError::io("write", &filling.path)))
            .collect();
        filled?;
        flushed?;
        gaps.iter().for_each(|gap| (self.progress)(PullEvent::Done { file: gap.file }));
        Ok(())
    }

    /// The bytes of a piece, and their digest. `lost`: peers that have failed.
    fn piece(
        &self,
        number: usize,
        gap: &Gap<'_>,
        runs: &[Run],
        lost: &Mutex<BTreeSet<String>>,
    ) -> Result<(Vec<u8>, String), HubError> {
        let lost = || lost.lock().unwrap_or_else(PoisonError::into_inner);
        let without: Vec<String> = lost().iter().cloned().collect();
        let mut turns = Turns::new(&self.sources.clients, number, &without);
        if turns.is_empty() {
            lost().clear();
            turns = Turns::new(&self.sources.clients, number, &[]);
        }
        loop {
            let client = turns.client();
            let event = PullEvent::Source { file: gap.file, from: &client.name };
            if self.sources.clients.len() > 1 {
                (self.progress)(event);
            }
            let failure = match client.runs(self, gap.file, gap.remote.size, runs) {
                Ok(found) => return Ok(found),
                Err(failure) => failure,
            };
            if client.is_peer {
                lost().insert(client.name.clone());
            }
            let reason = failure.reason.clone();
            match turns.failed(failure) {
                Ok(wait) => (self.progress)(PullEvent::Retry { file: gap.file, reason: &reason, wait }),
                Err((failure, attempts)) => {
                    return Err(client.error(self.repo, self.revision, gap.file, failure, attempts));
                }
            }
        }
    }

    /// Makes a whole blob of a file that is there in part. False if there is none, or if its
    /// content is wrong: it is deleted then.
    pub(crate) fn complete(&self, file: &str, remote: &RemoteFile) -> Result<bool, HubError> {
        let path = self.folder.partial(&remote.etag);
        let there = present(&path, remote.size)?;
        if there.is_empty() {
            return Ok(false);
        }
        let lacking = Ranges::whole(remote.size).minus(&there);
        self.fill(&[Gap { file, remote, path: path.clone(), lacking }], self.streams.max(1))?;
        if self.stop.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let mut checksum = Checksum::for_etag(&remote.etag, remote.size);
        let mut opened = File::open(&path).map_err(HubError::io("read", &path))?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            match opened.read(&mut buffer).map_err(HubError::io("read", &path))? {
                0 => break,
                count => checksum.update(&buffer[..count]),
            }
        }
        let is_right = checksum.finish().is_none_or(|(_, actual)| actual == remote.etag);
        let record = Record::path_of(&path);
        if is_right {
            // Ranks that have it open go on reading it.
            let blob = self.folder.blob(&remote.etag);
            fs::rename(&path, &blob).map_err(HubError::io("rename", &path))?;
        } else {
            let reason = "what was there of it in part is wrong";
            (self.progress)(PullEvent::Retry { file, reason, wait: Duration::ZERO });
            fs::remove_file(&path).map_err(HubError::io("delete", &path))?;
        }
        fs::remove_file(&record).map_err(HubError::io("delete", &record))?;
        Ok(is_right)
    }
}
