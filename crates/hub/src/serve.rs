//! Answers requests for the models of a cache in the hub's form: the list of a revision's files, a
//! file's size and hash, and its content from any byte on. The caller must pass only connections of
//! clients that may read the models.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde_json::json;
use sha2::{Digest as _, Sha256};
use thunder_parts::Run;

use crate::{
    cache::RepoFolder,
    checksum::hex,
    damage,
    names::{check_repo_name, is_safe_path},
    runs::{self, DIGEST_HEADER, RUNS_HEADER, read_runs},
    served::served_files,
};

/// Maximum size of a request's head.
const LONGEST_HEAD_BYTES: usize = 16 << 10;
/// Maximum number of headers of a request.
const MOST_HEADERS: usize = 32;
/// Bytes of a file to read at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Counters for a caller that shows the progress.
pub trait Served {
    /// More bytes of a file were sent.
    fn sent(&self, bytes: u64);
}

impl Served for () {
    fn sent(&self, _bytes: u64) {}
}

/// Answers requests on a connection until the client closes it. Only files of models in `cache`
/// that are complete are sent. The stream should limit the time of each read and write.
///
/// # Errors
/// When the connection fails, is too slow, or what comes is no HTTP.
pub fn serve(stream: &mut (impl Read + Write), cache: &Path, served: &dyn Served) -> io::Result<()> {
    let mut bytes = Vec::new();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let request = loop {
            if let Some((request, length)) = Request::parse(&bytes)? {
                bytes.drain(..length);
                break request;
            }
            if bytes.len() >= LONGEST_HEAD_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the request's head is too long"));
            }
            match stream.read(&mut piece[..LONGEST_HEAD_BYTES])? {
                0 => return Ok(()),
                count => bytes.extend_from_slice(&piece[..count]),
            }
        };
        let is_head = request.method == "HEAD";
        let answer = if is_head || request.method == "GET" {
            answer(&request, cache)
        } else {
            Answer::failed(405, "", "only GET and HEAD are answered")
        };
        stream.write_all(answer.head.as_bytes())?;
        match answer.body {
            _ if is_head => {}
            Body::Text(text) => stream.write_all(text.as_bytes())?,
            Body::Bytes(bytes) => {
                stream.write_all(&bytes)?;
                served.sent(bytes.len() as u64);
            }
            Body::File { mut file, mut left } => {
                while left > 0 {
                    let wanted = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    let count = file.read(&mut piece[..wanted])?;
                    if count == 0 {
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter"));
                    }
                    stream.write_all(&piece[..count])?;
                    served.sent(count as u64);
                    left -= count as u64;
                }
            }
        }
        stream.flush()?;
    }
}

struct Request {
    method: String,
    /// Decoded.
    path: String,
    /// First and, if given, last byte of `Range`.
    range: Option<(u64, Option<u64>)>,
    /// Parts of a file that are wanted in one answer.
    runs: Option<Vec<Run>>,
}

impl Request {
    /// A request that begins `bytes`, and the length of its head; `None` if more bytes are needed.
    fn parse(bytes: &[u8]) -> io::Result<Option<(Self, usize)>> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let parsed = request.parse(bytes).map_err(|error| invalid(error.to_string()))?;
        let httparse::Status::Complete(length) = parsed else { return Ok(None) };
        let range = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case("range"));
        let range = range.and_then(|header| std::str::from_utf8(header.value).ok()).and_then(range_of);
        let runs = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case(RUNS_HEADER));
        let runs = runs.map(|header| {
            let text = std::str::from_utf8(header.value).map_err(|error| invalid(error.to_string()))?;
            text.split(' ').map(|run| run.parse().map_err(invalid)).collect::<io::Result<Vec<Run>>>()
        });
        let runs = runs.transpose()?;
        let path = unescape(request.path.unwrap_or_default()).ok_or_else(|| invalid("bad path".into()))?;
        Ok(Some((Self { method: request.method.unwrap_or_default().to_owned(), path, range, runs }, length)))
    }
}

/// The range of `bytes=FIRST-` or `bytes=FIRST-LAST`. Other forms are ignored, as HTTP allows.
fn range_of(text: &str) -> Option<(u64, Option<u64>)> {
    let (first, last) = text.trim().strip_prefix("bytes=")?.split_once('-')?;
    let last = if last.is_empty() { None } else { Some(last.parse().ok()?) };
    Some((first.parse().ok()?, last))
}

/// A path without percent-encoding.
fn unescape(path: &str) -> Option<String> {
    let (mut bytes, mut rest) = (Vec::new(), path.as_bytes().iter());
    while let Some(byte) = rest.next() {
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let mut digit = || char::from(*rest.next()?).to_digit(16);
        bytes.push((digit()? * 16 + digit()?) as u8);
    }
    String::from_utf8(bytes).ok()
}

struct Answer {
    head: String,
    body: Body,
}

enum Body {
    Text(String),
    Bytes(Vec<u8>),
    File { file: File, left: u64 },
}

impl Answer {
    fn failed(status: u16, code: &str, message: &str) -> Self {
        let reason = match status {
            404 => "Not Found",
            405 => "Method Not Allowed",
            416 => "Range Not Satisfiable",
            _ => "Error",
        };
        let head = format!(
            "HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\nx-error-code: {code}\r\nx-error-message: {message}\r\n\r\n"
        );
        Self { head, body: Body::Text(String::new()) }
    }
}

fn answer(request: &Request, cache: &Path) -> Answer {
    let path = request.path.strip_prefix('/').unwrap_or(&request.path);
    let listed = path.strip_prefix("api/models/").and_then(|rest| rest.split_once("/revision/"));
    if let Some((repo, revision)) = listed {
        return list(cache, repo, revision)
            .unwrap_or_else(|| Answer::failed(404, "RepoNotFound", "this machine lacks the model"));
    }
    let found = path.split_once("/resolve/").and_then(|(repo, rest)| {
        let (commit, file) = rest.split_once('/')?;
        find(cache, repo, commit, file)
    });
    match found {
        None => Answer::failed(404, "EntryNotFound", "this machine lacks the file"),
        // Whoever gets a part cannot check it by the file's hash.
        Some((blob, ..)) if request.runs.is_some() && damage::is_marked(&blob) => {
            Answer::failed(404, "EntryNotFound", "a check has found the file damaged")
        }
        Some((blob, etag, commit)) => match &request.runs {
            Some(runs) => send_runs(&blob, runs),
            None => send(&blob, &etag, &commit, request.range),
        }
        .unwrap_or_else(|_| Answer::failed(404, "EntryNotFound", "the file cannot be read")),
    }
}

/// The repository's folder and the commit of a revision, if both names are valid and exist here.
fn repo_folder(cache: &Path, repo: &str, revision: &str) -> Option<(RepoFolder, String)> {
    check_repo_name(repo).ok()?;
    let folder = is_safe_path(revision).then(|| RepoFolder::new(cache, repo))?;
    let commit = folder.commit(revision)?;
    Some((folder, commit))
}

fn list(cache: &Path, repo: &str, revision: &str) -> Option<Answer> {
    let (folder, commit) = repo_folder(cache, repo, revision)?;
    let files = served_files(&folder.snapshot(&commit));
    if files.is_empty() {
        return None;
    }
    let files: Vec<_> = files.iter().map(|file| json!({ "rfilename": file })).collect();
    let text = json!({ "sha": commit, "siblings": files }).to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        text.len()
    );
    Some(Answer { head, body: Body::Text(text) })
}

/// The blob of a file, its etag, and the commit. Only a link into the cache's blobs has an etag and
/// is sent.
fn find(cache: &Path, repo: &str, commit: &str, file: &str) -> Option<(PathBuf, String, String)> {
    let (folder, commit) = repo_folder(cache, repo, commit)?;
    let link = is_safe_path(file).then(|| folder.snapshot(&commit).join(file))?;
    let target = std::fs::read_link(link).ok()?;
    let etag = target.file_name()?.to_str()?.to_owned();
    let blob = folder.blob(&etag);
    // The blob itself must be a file, because a link could point anywhere.
    let is_file = std::fs::symlink_metadata(&blob).is_ok_and(|metadata| metadata.is_file());
    (is_file && is_safe_path(&etag)).then_some((blob, etag, commit))
}

fn send(blob: &Path, etag: &str, commit: &str, range: Option<(u64, Option<u64>)>) -> io::Result<Answer> {
    let mut file = File::open(blob)?;
    let size = file.metadata()?.len();
    let common = format!("etag: \"{etag}\"\r\nx-repo-commit: {commit}\r\naccept-ranges: bytes\r\n");
    let Some((first, last)) = range else {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n{common}\r\n");
        return Ok(Answer { head, body: Body::File { file, left: size } });
    };
    let end = last.map_or(size, |last| last.saturating_add(1).min(size));
    if first >= end {
        return Ok(Answer::failed(416, "", "the file is not that long"));
    }
    file.seek(SeekFrom::Start(first))?;
    let (left, last) = (end - first, end - 1);
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\ncontent-length: {left}\r\ncontent-range: bytes {first}-{last}/{size}\r\n\
         {common}\r\n"
    );
    Ok(Answer { head, body: Body::File { file, left } })
}

/// Parts of a file, one after the other, with the SHA-256 of all.
fn send_runs(blob: &Path, runs: &[Run]) -> io::Result<Answer> {
    let mut file = File::open(blob)?;
    let size = file.metadata()?.len();
    let (bytes, count) = runs.iter().fold((0u64, 0u64), |(bytes, count), run| {
        (bytes.saturating_add(run.len.saturating_mul(run.count)), count.saturating_add(run.count))
    });
    if bytes > runs::PIECE_BYTES || count > bytes || runs.iter().any(|run| run.end() > size) {
        return Ok(Answer::failed(416, "", "the file is not that long, or these are too many bytes at once"));
    }
    let bytes = read_runs(&mut file, runs)?;
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\ncontent-length: {}\r\n{DIGEST_HEADER}: {}\r\n\r\n",
        bytes.len(),
        hex(&Sha256::digest(&bytes))
    );
    Ok(Answer { head, body: Body::Bytes(bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_paths_are_read() {
        assert_eq!(range_of("bytes=5-"), Some((5, None)));
        assert_eq!(range_of("bytes=5-9"), Some((5, Some(9))));
        for other in ["bytes=-5", "items=1-2", "bytes=a-", "bytes=1-2,4-5", ""] {
            assert_eq!(range_of(other), None, "{other}");
        }
        assert_eq!(unescape("/a%20b%2f").as_deref(), Some("/a b/"));
        assert_eq!((unescape("%2"), unescape("%zz"), unescape("%ff")), (None, None, None));
    }
}
