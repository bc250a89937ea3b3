//! The watch's thread, which sleeps on the connections to all other ranks.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::frame::{ABORT, AbortReason, BYE, FRAME_BYTES, HEARTBEAT, PING, PONG, frame};
use crate::platform;

/// How long a leaving rank waits until the others have read its goodbye. Only a stopped or
/// unreachable rank takes that long.
pub(super) const GOODBYE_LIMIT: Duration = Duration::from_secs(1);

/// Why a group has failed, as far as the watch knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection to this rank broke.
    Lost(usize),
    /// Rank `by` gave up and blames `rank`.
    Aborted { by: usize, rank: usize, why: AbortReason },
}

pub(super) struct WatchState {
    pub failed: AtomicBool,
    pub failure: OnceLock<Failure>,
    pub departed: Vec<AtomicBool>,
    /// Set when a rank's watch answers a ping.
    pub answered: Vec<AtomicBool>,
}

impl WatchState {
    pub fn fail(&self, failure: Failure) {
        // The first failure is closest to the cause.
        if self.failure.set(failure).is_ok() {
            self.failed.store(true, Ordering::Release);
        }
    }
}

pub(super) struct Peer {
    pub rank: usize,
    pub stream: TcpStream,
    pub remote: bool,
    pub frame: [u8; FRAME_BYTES],
    pub filled: usize,
}

pub(super) struct WatchThread {
    pub rank: usize,
    pub peers: Vec<Peer>,
    pub pipe: UnixStream,
    pub state: Arc<WatchState>,
}

impl WatchThread {
    pub fn run(mut self, heartbeat: Option<Duration>) {
        let mut set = Vec::with_capacity(self.peers.len() + 1);
        let mut last_beat = Instant::now();
        loop {
            set.clear();
            set.push(readable(&self.pipe));
            set.extend(self.peers.iter().map(|peer| readable(&peer.stream)));
            let limit = heartbeat.map(|period| period.saturating_sub(last_beat.elapsed()));
            if platform::poll(&mut set, limit).is_err() {
                // Without poll no rank can be watched; failing is better than silence.
                self.state.fail(Failure::Lost(self.rank));
                return;
            }
            // Decided by the clock alone: two watches that sent at every wake-up would keep each
            // other awake.
            if heartbeat.is_some_and(|period| last_beat.elapsed() >= period) {
                last_beat = Instant::now();
                let beat = frame(HEARTBEAT, self.rank, self.rank, 0);
                for peer in self.peers.iter().filter(|peer| peer.remote) {
                    // A full or broken connection is noticed below.
                    let _ = (&peer.stream).write(&beat);
                }
            }
            if set[0].revents != 0 && !self.forward_commands() {
                return self.say_goodbye();
            }
            let mut index = 0;
            while index < self.peers.len() {
                if self.peers[index].read_frames(&self.state) {
                    index += 1;
                    continue;
                }
                let gone = self.peers.swap_remove(index).rank;
                if self.state.failure.get() == Some(&Failure::Lost(gone)) {
                    // Before the goodbye: a rank that has not noticed yet would consider this
                    // rank's end the cause.
                    self.send_to_all(&frame(ABORT, self.rank, gone, AbortReason::Lost as u8));
                }
                // Wakes the rank's thread if it sleeps in an operation.
                let _ = self.pipe.write(&[1]);
            }
        }
    }

    /// Passes commands on to all ranks. False when the group has been dropped.
    fn forward_commands(&mut self) -> bool {
        let mut command = [0; FRAME_BYTES];
        loop {
            match self.pipe.read(&mut command) {
                Ok(0) => return false,
                Ok(_) => self.send_to_all(&command),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
    }

    /// Says goodbye, and waits until all ranks have closed their connections in response.
    fn say_goodbye(mut self) {
        self.send_to_all(&frame(BYE, self.rank, self.rank, 0));
        for peer in &self.peers {
            // Fails if the peer has already ended.
            let _ = peer.stream.shutdown(Shutdown::Write);
        }
        let begin = Instant::now();
        let mut set = Vec::with_capacity(self.peers.len());
        while !self.peers.is_empty() && begin.elapsed() < GOODBYE_LIMIT {
            set.clear();
            set.extend(self.peers.iter().map(|peer| readable(&peer.stream)));
            if platform::poll(&mut set, Some(GOODBYE_LIMIT.saturating_sub(begin.elapsed()))).is_err() {
                return;
            }
            self.peers.retain(Peer::is_open);
        }
    }

    fn send_to_all(&self, frame: &[u8]) {
        for peer in &self.peers {
            // Fails for a rank that is already lost.
            let _ = (&peer.stream).write(frame);
        }
    }
}

/// What to poll to read from a stream.
fn readable(stream: &impl AsRawFd) -> libc::pollfd {
    libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

impl Peer {
    /// Discards what has arrived. False when the peer has closed the connection.
    fn is_open(&self) -> bool {
        match (&self.stream).read(&mut [0; 512]) {
            Ok(count) => count > 0,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// Reads what has arrived. False when this peer will send nothing more.
    fn read_frames(&mut self, state: &WatchState) -> bool {
        loop {
            match self.stream.read(&mut self.frame[self.filled..]) {
                Ok(0) => {
                    state.fail(Failure::Lost(self.rank));
                    return false;
                }
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(_) => {
                    state.fail(Failure::Lost(self.rank));
                    return false;
                }
            }
            if self.filled < FRAME_BYTES {
                continue;
            }
            self.filled = 0;
            let [kind, why, by0, by1, rank0, rank1, ..] = self.frame;
            let by = usize::from(u16::from_le_bytes([by0, by1]));
            let rank = usize::from(u16::from_le_bytes([rank0, rank1]));
            match kind {
                BYE => {
                    state.departed[self.rank].store(true, Ordering::Release);
                    return false;
                }
                PING => {
                    // Fails if the peer is lost, which is about to be noticed.
                    let _ = self.stream.write(&frame(PONG, 0, 0, 0));
                }
                PONG => state.answered[self.rank].store(true, Ordering::Relaxed),
                HEARTBEAT => {}
                ABORT if rank < state.departed.len() && by == self.rank => {
                    state.fail(Failure::Aborted { by, rank, why: AbortReason::from_wire(why) });
                    return false;
                }
                // Not a frame of this version; its meaning is unknown.
                _ => {
                    state.fail(Failure::Lost(self.rank));
                    return false;
                }
            }
        }
    }
}
