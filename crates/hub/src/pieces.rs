//! Downloads the rest of a large file from peers over several connections. One connection uses only
//! one core at each end, because its bytes are encrypted one after the other.
//!
//! Pieces are written in order, so the file on the disk is always a beginning of the whole file,
//! which a later pull can resume.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    sync::{Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

use crate::{
    client::{Client, RemoteFile},
    download::{Download, content_range},
    failure::Failure,
    progress::PullEvent,
};

/// Bytes of a piece: a few round trips' worth on a fast link.
pub(crate) const PIECE_BYTES: u64 = 4 << 20;
/// A rest below this size is downloaded over one connection.
pub(crate) const LEAST_BYTES: u64 = 4 * PIECE_BYTES;
/// Connections of a pull, divided among its parallel files.
pub(crate) const MOST_STREAMS: usize = 8;
/// Maximum connections of one file: with more, its hash would be the limit.
const MOST_STREAMS_OF_FILE: usize = 4;
/// Maximum number of pieces that may wait for their turn, for each connection.
const PIECES_AHEAD: usize = 2;

/// Connections for each of several parallel files.
pub(crate) fn streams(files_at_once: usize) -> usize {
    (MOST_STREAMS / files_at_once.max(1)).clamp(1, MOST_STREAMS_OF_FILE)
}

/// The pieces that were requested, have arrived, and are written.
struct Window {
    state: Mutex<State>,
    changed: Condvar,
    /// Byte at which the first piece begins.
    start: u64,
    /// Pieces in all.
    pieces: u64,
    /// The file's size in bytes.
    size: u64,
    most_ahead: u64,
}

#[derive(Default)]
struct State {
    /// The first piece that no connection has taken.
    next: u64,
    /// Pieces that a failed connection has given back.
    returned: BTreeSet<u64>,
    /// Pieces that wait for their turn.
    arrived: BTreeMap<u64, Vec<u8>>,
    /// The piece whose turn it is.
    turn: u64,
    /// Connections that go on.
    working: usize,
    /// No more pieces are wanted.
    ended: bool,
    /// Buffers to use again.
    spare: Vec<Vec<u8>>,
}

impl Window {
    fn new(start: u64, size: u64, streams: usize) -> Self {
        let state = State { working: streams, ..State::default() };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            start,
            pieces: (size - start).div_ceil(PIECE_BYTES),
            size,
            most_ahead: (streams * PIECES_AHEAD) as u64,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// First byte of a piece, and the byte after its last.
    fn range(&self, piece: u64) -> (u64, u64) {
        let first = self.start + piece * PIECE_BYTES;
        (first, (first + PIECE_BYTES).min(self.size))
    }

    /// A piece to fetch, and a buffer for it; `None` when all are taken.
    fn take(&self) -> Option<(u64, Vec<u8>)> {
        let mut state = self.lock();
        loop {
            if state.ended {
                return None;
            }
            let piece = state.returned.pop_first().or_else(|| {
                let is_near = state.next < self.pieces && state.next < state.turn + self.most_ahead;
                is_near.then(|| {
                    state.next += 1;
                    state.next - 1
                })
            });
            if let Some(piece) = piece {
                let mut buffer = state.spare.pop().unwrap_or_default();
                drop(state);
                let (first, end) = self.range(piece);
                buffer.resize((end - first) as usize, 0);
                return Some((piece, buffer));
            }
            // Another connection may give one of the last pieces back.
            if state.turn + state.arrived.len() as u64 >= self.pieces {
                return None;
            }
            state = self.wait(state);
        }
    }

    fn arrived(&self, piece: u64, bytes: Vec<u8>) {
        self.lock().arrived.insert(piece, bytes);
        self.changed.notify_all();
    }

    /// A connection ends and gives `piece` back for another connection.
    fn leave(&self, piece: Option<u64>) {
        let mut state = self.lock();
        state.returned.extend(piece);
        state.working -= 1;
        self.changed.notify_all();
    }

    fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// The next piece in order; `None` when all have arrived, or no connection can fetch it.
    fn next(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        loop {
            let turn = state.turn;
            if let Some(bytes) = state.arrived.remove(&turn) {
                state.turn += 1;
                self.changed.notify_all();
                return Some(bytes);
            }
            if turn == self.pieces || state.working == 0 || state.ended {
                return None;
            }
            state = self.wait(state);
        }
    }

    fn give_back(&self, buffer: Vec<u8>) {
        self.lock().spare.push(buffer);
    }
}

impl Download<'_> {
    /// Fetches a file's bytes from `start` to its end and passes them to `write` in order. Ends
    /// early if no peer sends more bytes, another file fails, or `write` fails. Returns the names
    /// of the peers that sent bytes.
    pub(crate) fn in_pieces<E>(
        &self,
        peers: &[&Client],
        file: &str,
        remote: &RemoteFile,
        start: u64,
        mut write: impl FnMut(&mut Vec<u8>) -> Result<(), E>,
    ) -> (BTreeSet<String>, Result<(), E>) {
        let streams = self.streams.max(1);
        let window = Window::new(start, remote.size, streams);
        let used = Mutex::new(BTreeSet::new());
        let written = thread::scope(|scope| {
            for number in 0..streams {
                let (window, used) = (&window, &used);
                scope.spawn(move || self.bring(peers, number, file, window, used));
            }
            let written = loop {
                let Some(mut bytes) = window.next() else { break Ok(()) };
                if let Err(error) = write(&mut bytes) {
                    break Err(error);
                }
                window.give_back(bytes);
            };
            window.end();
            written
        });
        (used.into_inner().unwrap_or_else(PoisonError::into_inner), written)
    }

    /// One connection: fetches pieces until there are no more, or every peer has failed.
    fn bring(
        &self,
        peers: &[&Client],
        number: usize,
        file: &str,
        window: &Window,
        used: &Mutex<BTreeSet<String>>,
    ) {
        let mut turn = number;
        let mut named = None;
        while let Some((piece, mut buffer)) = window.take() {
            let (first, end) = window.range(piece);
            let (mut filled, mut failed) = (0, 0);
            while filled < buffer.len() {
                let peer = peers[turn % peers.len()];
                if named != Some(&peer.name) {
                    named = Some(&peer.name);
                    (self.progress)(PullEvent::Source { file, from: &peer.name });
                }
                let before = filled;
                let range = (first + filled as u64, end, window.size);
                let fetched = self.fetch(peer, file, range, &mut buffer, &mut filled);
                if filled > before {
                    used.lock().unwrap_or_else(PoisonError::into_inner).insert(peer.name.clone());
                    failed = 0;
                }
                let Err(failure) = fetched else { continue };
                if self.stop.load(Ordering::Relaxed) {
                    return window.leave(Some(piece));
                }
                let reason = &failure.reason;
                (self.progress)(PullEvent::Retry { file, reason, wait: Duration::ZERO });
                (turn, failed) = (turn + 1, failed + 1);
                if failed >= peers.len() {
                    return window.leave(Some(piece));
                }
            }
            window.arrived(piece, buffer);
        }
        window.leave(None);
    }

    /// Fills the rest of a piece from one peer. `range`: the first byte, the one after the last,
    /// and the file's size.
    fn fetch(
        &self,
        peer: &Client,
        file: &str,
        range: (u64, u64, u64),
        buffer: &mut [u8],
        filled: &mut usize,
    ) -> Result<(), Failure> {
        let (first, end, size) = range;
        let response = peer.content(self.repo, self.commit, file, first, Some(end))?;
        if response.status().as_u16() != 206 || content_range(&response) != Some((first, size)) {
            return Err(Failure::permanent(format!("it does not send bytes from {first} of {size}")));
        }
        let mut body = response.into_body().into_reader();
        while *filled < buffer.len() {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Failure::permanent("another file has failed"));
            }
            let read = body.read(&mut buffer[*filled..]);
            match read.map_err(|error| Failure::transient(error.to_string()))? {
                0 => return Err(Failure::transient("the connection broke")),
                count => *filled += count,
            }
        }
        // Reads the end of the answer; otherwise the connection could not be reused.
        body.read(&mut [0; 1]).map_err(|error| Failure::transient(error.to_string()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_in_order_and_returned_ones_are_taken_again() {
        let window = Window::new(10, 10 + 2 * PIECE_BYTES + 5, 2);
        assert_eq!(window.pieces, 3);
        let (first, buffer) = window.take().expect("a piece");
        let (second, other) = window.take().expect("a piece");
        assert_eq!((first, second, buffer.len() as u64), (0, 1, PIECE_BYTES));
        window.arrived(second, other);
        window.leave(Some(first));
        // The remaining connection takes the pieces that the other one left.
        let (again, buffer) = window.take().expect("a piece");
        assert_eq!(again, 0);
        window.arrived(again, buffer);
        let (last, buffer) = window.take().expect("a piece");
        assert_eq!((last, buffer.len()), (2, 5));
        assert_eq!(window.next().map(|bytes| bytes.len() as u64), Some(PIECE_BYTES));
        assert_eq!(window.next().map(|bytes| bytes.len() as u64), Some(PIECE_BYTES));
        window.arrived(last, buffer);
        assert_eq!((window.take(), window.next().map(|bytes| bytes.len())), (None, Some(5)));
        assert_eq!(window.next(), None);
    }

    #[test]
    fn the_reader_ends_when_nobody_brings_more() {
        let window = Window::new(0, 3 * PIECE_BYTES, 1);
        let (piece, buffer) = window.take().expect("a piece");
        window.arrived(piece, buffer);
        window.leave(Some(1));
        assert!(window.next().is_some());
        assert_eq!(window.next(), None);
    }

    #[test]
    fn connections_are_divided_among_files() {
        assert_eq!([0, 1, 2, 3, 4, 100].map(streams), [4, 4, 4, 2, 2, 1]);
    }
}
