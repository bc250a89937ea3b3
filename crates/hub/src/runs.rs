//! Runs of a file's bytes: asked of a source, read from the disk, checked.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    path::Path,
};

use sha2::{Digest as _, Sha256};
use thunder_parts::{Ranges, Record, Run};

use crate::{
    checksum::hex,
    client::Client,
    download::{Download, content_range},
    error::HubError,
    failure::Failure,
};

/// Bytes that are asked for at once, and have one digest.
pub(crate) const PIECE_BYTES: u64 = 4 << 20;
/// Runs that are asked for at once: they must fit into the head of a request.
pub(crate) const PIECE_RUNS: usize = 256;
/// Ranges that the hub is asked for together are at most this far from each other.
const HUB_GAP_BYTES: u64 = 256 << 10;
/// Header of a request for runs of a file, and of the answer: the SHA-256 of its body.
pub(crate) const RUNS_HEADER: &str = "x-thunder-runs";
pub(crate) const DIGEST_HEADER: &str = "x-thunder-sha256";

impl Client {
    /// Bytes of a file and their SHA-256; a peer's are compared with its own.
    pub(crate) fn runs(
        &self,
        download: &Download<'_>,
        file: &str,
        size: u64,
        runs: &[Run],
    ) -> Result<(Vec<u8>, String), Failure> {
        let &Download { repo, commit, .. } = download;
        let mut bytes = vec![0; runs.iter().map(Run::bytes).sum::<u64>() as usize];
        let broken = |error: io::Error| Failure::transient(format!("the connection broke: {error}"));
        if self.is_peer {
            let response = self.content_of_runs(repo, commit, file, runs)?;
            let digest = response.headers().get(DIGEST_HEADER).and_then(|digest| digest.to_str().ok());
            let digest = digest.map(str::to_owned);
            let Some(digest) = digest.filter(|_| response.status().as_u16() == 206) else {
                return Err(Failure::permanent("it sends no parts of files: is it of an older version?"));
            };
            let mut body = response.into_body().into_reader();
            body.read_exact(&mut bytes).map_err(broken)?;
            // The end of the answer, or the connection would not be used again.
            body.read(&mut [0; 1]).map_err(broken)?;
            return match hex(&Sha256::digest(&bytes)) {
                found if found == digest => Ok((bytes, digest)),
                found => Err(Failure::transient(format!(
                    "its bytes have the sha256 {found}, and it says {digest}"
                ))),
            };
        }
        let mut rest = &mut bytes[..];
        for together in Ranges::of(runs).filled(HUB_GAP_BYTES).iter() {
            let response = self.content(repo, commit, file, together.start, Some(together.end))?;
            let is_whole = response.status().as_u16() == 200 && together == (0..size);
            let is_part =
                response.status().as_u16() == 206 && content_range(&response) == Some((together.start, size));
            if !is_part && !is_whole {
                return Err(Failure::permanent("the server did not send the bytes that were asked for"));
            }
            let mut body = response.into_body().into_reader();
            let mut at = together.start;
            for range in runs.iter().flat_map(|run| run.ranges()) {
                if range.start < together.start || range.start >= together.end {
                    continue;
                }
                let skipped = io::copy(&mut (&mut body).take(range.start - at), &mut io::sink());
                if skipped.map_err(broken)? < range.start - at {
                    return Err(Failure::transient("the connection broke"));
                }
                let (here, after) =
                    std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
                body.read_exact(here).map_err(broken)?;
                (rest, at) = (after, range.end);
            }
        }
        let digest = hex(&Sha256::digest(&bytes));
        Ok((bytes, digest))
    }
}

/// The bytes of runs, one after the other.
pub(crate) fn read_runs(file: &mut File, runs: &[Run]) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; runs.iter().map(Run::bytes).sum::<u64>() as usize];
    let mut rest = &mut bytes[..];
    for range in runs.iter().flat_map(|run| run.ranges()) {
        let (here, after) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
        file.seek(SeekFrom::Start(range.start))?;
        file.read_exact(here)?;
        rest = after;
    }
    Ok(bytes)
}

/// Checks the pieces of a weight file that is there in part against their digests. Those that are
/// wrong leave the record, so that the next pull fetches them again. Calls `read` with the bytes of
/// each piece. Returns whether all were right.
pub(crate) fn verify_part(file: &Path, record: &Record, read: &dyn Fn(u64)) -> Result<bool, HubError> {
    let file = fs::canonicalize(file).map_err(HubError::io("look at", file))?;
    let mut opened = File::open(&file).map_err(HubError::io("read", &file))?;
    let mut right = Vec::new();
    for piece in &record.pieces {
        let bytes = read_runs(&mut opened, &piece.runs).map_err(HubError::io("read", &file))?;
        read(bytes.len() as u64);
        if piece.digest.as_ref().is_none_or(|digest| *digest == hex(&Sha256::digest(&bytes))) {
            right.push(piece.clone());
        }
    }
    let all_right = right.len() == record.pieces.len();
    if !all_right {
        Record { pieces: right }.write(&file).map_err(HubError::io("write", Record::path_of(&file)))?;
    }
    Ok(all_right)
}
