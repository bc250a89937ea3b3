//! The watch knows which ranks are alive: a thread that sleeps on one connection to each rank, and
//! reports to the rank's own thread.
//!
//! When a process ends, in whatever way, the kernel closes its connections, so the other ranks'
//! threads wake at once. A rank that gives up tells all others over the same connections. Between
//! hosts a heartbeat makes the kernel notice a cut cable (see `limit_unacknowledged`); inside a
//! host nothing is sent and no thread wakes. A rank that leaves in good order keeps its connections
//! until the others have read its goodbye: closing a connection that still receives bytes would
//! reset it, and unsent bytes, including the goodbye, would be lost.

mod frame;
mod thread;

pub(crate) use frame::AbortReason;
pub(crate) use thread::Failure;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::platform;
use frame::{ABORT, PING, frame};
use thread::{Peer, WatchState, WatchThread};

/// Number of heartbeats within the loss limit.
const HEARTBEATS: u32 = 6;
/// How long the kernel waits for an acknowledgement before it sends again. Only then does its own
/// time limit start.
const FIRST_REPEAT: Duration = Duration::from_millis(200);

/// The rank thread's side of the watch. Dropping it says goodbye to the other ranks and waits until
/// their watches have read it.
pub(crate) struct Watch {
    state: Arc<WatchState>,
    /// Carries commands to the thread. Bytes from the thread wake a rank that sleeps in `poll`.
    pipe: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(
        rank: usize,
        connections: Vec<Option<TcpStream>>,
        remote: &[bool],
        loss_limit: Duration,
    ) -> io::Result<Self> {
        let (pipe, theirs) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let state = Arc::new(WatchState {
            failed: AtomicBool::new(false),
            failure: OnceLock::new(),
            departed: connections.iter().map(|_| AtomicBool::new(false)).collect(),
            answered: connections.iter().map(|connection| AtomicBool::new(connection.is_none())).collect(),
        });
        // At worst a cable is cut right after a heartbeat: the next one is the first that is not
        // acknowledged.
        let heartbeat = loss_limit / HEARTBEATS;
        let unacknowledged = loss_limit.saturating_sub(heartbeat + FIRST_REPEAT);
        let mut peers = Vec::new();
        for (peer, stream) in connections.into_iter().enumerate() {
            let Some(stream) = stream else { continue };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            if remote[peer] {
                platform::limit_unacknowledged(&stream, unacknowledged)?;
            }
            peers.push(Peer { rank: peer, stream, remote: remote[peer], frame: [0; 8], filled: 0 });
        }
        let heartbeat = peers.iter().any(|peer| peer.remote).then_some(heartbeat);
        let watcher = WatchThread { rank, peers, pipe: theirs, state: state.clone() };
        let thread = std::thread::Builder::new()
            .name("thunder-watch".to_owned())
            .spawn(move || watcher.run(heartbeat))?;
        Ok(Self { state, pipe, thread: Some(thread) })
    }

    /// The failure of the group, if it has failed. Cheap enough for a spinning wait.
    pub fn failure(&self) -> Option<Failure> {
        if !self.state.failed.load(Ordering::Acquire) {
            return None;
        }
        self.state.failure.get().copied()
    }

    /// True when a rank has left in good order: what it has sent is valid, and no more will come.
    pub fn departed(&self, rank: usize) -> bool {
        self.state.departed[rank].load(Ordering::Acquire)
    }

    /// Gives the group up and tells all ranks which rank is to blame.
    pub fn abort(&self, by: usize, rank: usize, why: AbortReason) {
        self.state.fail(Failure::Aborted { by, rank, why });
        // A full pipe means that the thread is busy with commands; it then reads the failure.
        let _ = (&self.pipe).write(&frame(ABORT, by, rank, why as u8));
    }

    /// Asks every process for a sign of life; see `silent`.
    pub fn ping(&self, rank: usize) {
        let others = self.state.answered.iter().enumerate().filter(|(peer, _)| *peer != rank);
        others.for_each(|(_, answered)| answered.store(false, Ordering::Relaxed));
        // A full pipe means that the thread has not run for long; all ranks then appear silent.
        let _ = (&self.pipe).write(&frame(PING, rank, rank, 0));
    }

    /// The first rank that has neither left nor answered the last ping.
    pub fn silent(&self) -> Option<usize> {
        (0..self.state.answered.len())
            .find(|rank| !self.state.answered[*rank].load(Ordering::Relaxed) && !self.departed(*rank))
    }

    /// Becomes readable when the group fails or a rank departs.
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }

    /// Removes wake-ups from the descriptor.
    pub fn drain(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.pipe).read(&mut bytes), Ok(count) if count == bytes.len()) {}
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The thread ends when the pipe is closed.
        let _ = self.pipe.shutdown(Shutdown::Write);
        if let Some(thread) = self.thread.take() {
            // The thread has no result, and its panic has been printed.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Instant;

    use super::frame::{BYE, FRAME_BYTES, HEARTBEAT};
    use super::thread::GOODBYE_LIMIT;
    use super::*;

    const LOSS_LIMIT: Duration = Duration::from_millis(600);

    /// The watch of rank 0, whose only peer is on another host, and the peer's end of the
    /// connection.
    fn watch() -> (Watch, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = listener.accept().unwrap().0;
        (Watch::start(0, vec![None, Some(ours)], &[false, true], LOSS_LIMIT).unwrap(), theirs)
    }

    fn limit_receive_buffer(listener: &TcpListener, bytes: libc::c_int) {
        let length = size_of_val(&bytes) as libc::socklen_t;
        let (socket, value) = (listener.as_raw_fd(), (&raw const bytes).cast());
        // SAFETY: the pointer and length describe `bytes`.
        let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, value, length) };
        assert_eq!(result, 0);
    }

    fn kinds(frames: &[u8]) -> Vec<u8> {
        frames.chunks(FRAME_BYTES).map(|frame| frame[0]).collect()
    }

    /// Two watches that answered each other's heartbeats never slept, and a goodbye was queued
    /// behind what they had sent.
    #[test]
    fn heartbeats_keep_their_pace_whatever_arrives() {
        const PERIODS: u32 = 4;
        let (watch, mut peer) = watch();
        let period = LOSS_LIMIT / HEARTBEATS;
        let begin = Instant::now();
        while begin.elapsed() < period * PERIODS + period / 2 {
            peer.write_all(&frame(HEARTBEAT, 1, 1, 0)).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        let due = (begin.elapsed().as_millis() / period.as_millis()) as usize;
        let mut bytes = [0; 64 << 10];
        let count = peer.read(&mut bytes).unwrap();
        let beats = kinds(&bytes[..count]).iter().filter(|kind| **kind == HEARTBEAT).count();
        assert!((2..=due).contains(&beats), "{beats} heartbeats, {due} were due");
        drop(peer);
        drop(watch);
    }

    /// Bytes that arrive at a closed socket reset it, and its unsent bytes are lost, including the
    /// goodbye.
    #[test]
    fn bytes_after_the_goodbye_do_not_destroy_it() {
        // More answers than fit into the peer's buffer, so that the goodbye waits behind them.
        const PINGS: usize = 1000;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        limit_receive_buffer(&listener, 4096);
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut peer = listener.accept().unwrap().0;
        let watch = Watch::start(0, vec![None, Some(ours)], &[false, true], LOSS_LIMIT).unwrap();
        peer.write_all(&frame(PING, 1, 1, 0).repeat(PINGS)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        std::thread::scope(|scope| {
            scope.spawn(|| drop(watch));
            std::thread::sleep(Duration::from_millis(50));
            peer.write_all(&frame(HEARTBEAT, 1, 1, 0)).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            let mut bytes = Vec::new();
            let result = peer.read_to_end(&mut bytes);
            let kinds = kinds(&bytes);
            assert_eq!(kinds.last(), Some(&BYE), "{} frames, then {result:?}", kinds.len());
            drop(peer);
        });
    }

    #[test]
    fn a_goodbye_to_a_deaf_peer_ends_at_its_limit() {
        let (watch, peer) = watch();
        let begin = Instant::now();
        drop(watch);
        assert!((GOODBYE_LIMIT..2 * GOODBYE_LIMIT).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        drop(peer);
    }

    #[test]
    fn two_ranks_that_leave_at_once_do_not_wait_for_each_other() {
        let leave = || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let two = listener.accept().unwrap().0;
            let one = Watch::start(0, vec![None, Some(one)], &[false, true], LOSS_LIMIT).unwrap();
            let two = Watch::start(1, vec![Some(two), None], &[true, false], LOSS_LIMIT).unwrap();
            let begin = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| drop(one));
                scope.spawn(|| drop(two));
            });
            begin.elapsed()
        };
        // A busy machine may hold one of them up.
        let soonest = (0..5).map(|_| leave()).find(|took| *took < GOODBYE_LIMIT / 2);
        assert!(soonest.is_some(), "each time they waited for {:?} at least", GOODBYE_LIMIT / 2);
    }
}
