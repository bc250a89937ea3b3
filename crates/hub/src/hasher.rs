//! Hashes a file while it is downloaded. A large file is hashed on its own thread, because a fast
//! link, the disk and the hash each need a core.

use std::{
    mem,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::{self, JoinHandle},
};

use crate::checksum::Checksum;

/// Files of at least this size are hashed by a thread.
const LARGE_BYTES: u64 = 8 << 20;
/// Pieces that wait for the thread.
const PIECES_WAITING: usize = 8;

/// The hash of the bytes so far.
pub(crate) enum Hasher {
    Here(Checksum),
    Thread { pieces: SyncSender<Vec<u8>>, spare: Receiver<Vec<u8>>, thread: JoinHandle<Checksum> },
}

impl Hasher {
    /// The hash for this etag; `size` is the file's size in bytes.
    pub(crate) fn new(etag: &str, size: u64) -> Self {
        let mut checksum = Checksum::for_etag(etag, size);
        if size < LARGE_BYTES || matches!(checksum, Checksum::Unknown) {
            return Self::Here(checksum);
        }
        let (pieces, incoming) = sync_channel::<Vec<u8>>(PIECES_WAITING);
        let (back, spare) = sync_channel(PIECES_WAITING);
        let work = move || {
            for piece in incoming {
                checksum.update(&piece);
                // The buffer is reused, unless the receiver is gone.
                let _ = back.try_send(piece);
            }
            checksum
        };
        match thread::Builder::new().name("hash".into()).spawn(work) {
            Ok(thread) => Self::Thread { pieces, spare, thread },
            Err(_) => Self::Here(Checksum::for_etag(etag, size)),
        }
    }

    /// Hashes the first `filled` bytes of `piece`. Afterwards `piece` is another buffer of the same
    /// length.
    pub(crate) fn update(&mut self, piece: &mut Vec<u8>, filled: usize) {
        match self {
            Self::Here(checksum) => checksum.update(&piece[..filled]),
            Self::Thread { pieces, spare, .. } => {
                let length = piece.len();
                let mut next = spare.try_recv().unwrap_or_default();
                next.resize(length, 0);
                let mut full = mem::replace(piece, next);
                full.truncate(filled);
                // Fails only if the thread has panicked, which `finish` reports.
                let _ = pieces.send(full);
            }
        }
    }

    /// The hash's name and value; `None` if the etag is not a hash.
    pub(crate) fn finish(self) -> Option<(&'static str, String)> {
        match self {
            Self::Here(checksum) => checksum.finish(),
            Self::Thread { pieces, thread, .. } => {
                drop(pieces);
                match thread.join() {
                    Ok(checksum) => checksum.finish(),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        }
    }
}
