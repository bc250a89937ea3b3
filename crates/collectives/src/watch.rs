//! Who is still there: a thread that sleeps on one connection to each rank, and tells the rank's own thread.
//!
//! The kernel closes a process's connections when it ends, however it ends, so the others' threads wake up at once. A
//! rank that gives up tells all others over the same connections. Between hosts a heartbeat makes the kernel notice a
//! cut cable (see `limit_unacknowledged`); inside a host nothing is sent and nobody wakes up. Who leaves in good order keeps
//! its connections until the others have read its goodbye: closing one under what still comes in would reset it, and
//! what it has not yet sent, the goodbye too, would be lost.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::platform;

/// Heartbeats within the limit after which a rank is lost.
const HEARTBEATS: u32 = 6;
/// How long the kernel waits for an acknowledgement before it sends again, which is when its own clock starts.
const FIRST_REPEAT: Duration = Duration::from_millis(200);
/// How long a rank that leaves waits until the others have heard it. Only who is stopped or cut off takes as long.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
const FRAME_BYTES: usize = 8;
const BYE: u8 = 1;
const HEARTBEAT: u8 = 2;
const ABORT: u8 = 3;
const PING: u8 = 4;
const PONG: u8 = 5;

/// Why a group is of no use any more, as the watch knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The connection to this rank broke.
    Lost(usize),
    /// Rank `by` gave up and blames `rank`.
    Aborted { by: usize, rank: usize, why: Why },
}

/// Why a rank gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Why {
    Lost = 1,
    Stalled,
    Mismatch,
    LinkFailed,
}

impl Why {
    fn from_wire(value: u8) -> Self {
        match value {
            2 => Self::Stalled,
            3 => Self::Mismatch,
            4 => Self::LinkFailed,
            _ => Self::Lost,
        }
    }
}

struct Shared {
    failed: AtomicBool,
    verdict: OnceLock<Verdict>,
    departed: Vec<AtomicBool>,
    /// Set when a rank's watch answers a ping.
    answered: Vec<AtomicBool>,
}

impl Shared {
    fn fail(&self, verdict: Verdict) {
        // The first verdict is nearest to the cause.
        if self.verdict.set(verdict).is_ok() {
            self.failed.store(true, Ordering::Release);
        }
    }
}

/// The rank thread's side of the watch. Dropping it says goodbye to the others, and waits until their watches have heard it.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    /// Commands to the thread; what comes back wakes a rank that sleeps in `poll`.
    pipe: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(
        rank: usize,
        anchors: Vec<Option<TcpStream>>,
        remote: &[bool],
        loss_limit: Duration,
    ) -> io::Result<Self> {
        let (pipe, theirs) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            failed: AtomicBool::new(false),
            verdict: OnceLock::new(),
            departed: anchors.iter().map(|_| AtomicBool::new(false)).collect(),
            answered: anchors.iter().map(|anchor| AtomicBool::new(anchor.is_none())).collect(),
        });
        // A cable is cut right after a heartbeat at worst: the next one is the first that is not acknowledged.
        let heartbeat = loss_limit / HEARTBEATS;
        let unacknowledged = loss_limit.saturating_sub(heartbeat + FIRST_REPEAT);
        let mut peers = Vec::new();
        for (peer, stream) in anchors.into_iter().enumerate() {
            let Some(stream) = stream else { continue };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            if remote[peer] {
                platform::limit_unacknowledged(&stream, unacknowledged)?;
            }
            peers.push(Peer { rank: peer, stream, remote: remote[peer], frame: [0; 8], filled: 0 });
        }
        let heartbeat = peers.iter().any(|peer| peer.remote).then_some(heartbeat);
        let watcher = Watcher { rank, peers, pipe: theirs, shared: shared.clone() };
        let thread = std::thread::Builder::new()
            .name("thunder-watch".to_owned())
            .spawn(move || watcher.run(heartbeat))?;
        Ok(Self { shared, pipe, thread: Some(thread) })
    }

    /// Whether the group has failed; cheap enough for a spinning wait.
    pub fn verdict(&self) -> Option<Verdict> {
        if !self.shared.failed.load(Ordering::Acquire) {
            return None;
        }
        self.shared.verdict.get().copied()
    }

    /// Whether a rank has left in good order: what it has sent is good, more will not come.
    pub fn departed(&self, rank: usize) -> bool {
        self.shared.departed[rank].load(Ordering::Acquire)
    }

    /// Gives the group up and tells everyone whom to blame.
    pub fn abort(&self, by: usize, rank: usize, why: Why) {
        self.shared.fail(Verdict::Aborted { by, rank, why });
        // A full pipe means that the thread is awake with commands to do; it looks at the verdict then.
        let _ = (&self.pipe).write(&frame(ABORT, by, rank, why as u8));
    }

    /// Asks every process for a sign of life; see `silent`.
    pub fn ping(&self, rank: usize) {
        let others = self.shared.answered.iter().enumerate().filter(|(peer, _)| *peer != rank);
        others.for_each(|(_, answered)| answered.store(false, Ordering::Relaxed));
        // A full pipe means that the thread has not run for long; it will look as if all were silent.
        let _ = (&self.pipe).write(&frame(PING, rank, rank, 0));
    }

    /// The first rank that has neither left nor answered the last ping.
    pub fn silent(&self) -> Option<usize> {
        (0..self.shared.answered.len())
            .find(|rank| !self.shared.answered[*rank].load(Ordering::Relaxed) && !self.departed(*rank))
    }

    /// Becomes readable when the group fails or a rank departs.
    pub fn descriptor(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }

    /// Takes wake-ups off the descriptor.
    pub fn drain(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.pipe).read(&mut bytes), Ok(count) if count == bytes.len()) {}
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The thread ends when the pipe does.
        let _ = self.pipe.shutdown(Shutdown::Write);
        if let Some(thread) = self.thread.take() {
            // It has no result, and a panic there has been printed.
            let _ = thread.join();
        }
    }
}

fn frame(kind: u8, by: usize, rank: usize, why: u8) -> [u8; FRAME_BYTES] {
    let (by, rank) = ((by as u16).to_le_bytes(), (rank as u16).to_le_bytes());
    [kind, why, by[0], by[1], rank[0], rank[1], 0, 0]
}

struct Peer {
    rank: usize,
    stream: TcpStream,
    remote: bool,
    frame: [u8; FRAME_BYTES],
    filled: usize,
}

struct Watcher {
    rank: usize,
    peers: Vec<Peer>,
    pipe: UnixStream,
    shared: Arc<Shared>,
}

impl Watcher {
    fn run(mut self, heartbeat: Option<Duration>) {
        let mut set = Vec::with_capacity(self.peers.len() + 1);
        let mut last_beat = Instant::now();
        loop {
            set.clear();
            set.push(readable(&self.pipe));
            set.extend(self.peers.iter().map(|peer| readable(&peer.stream)));
            let limit = heartbeat.map(|period| period.saturating_sub(last_beat.elapsed()));
            if platform::poll(&mut set, limit).is_err() {
                // Without poll nobody can be watched; silence would be worse than an end.
                self.shared.fail(Verdict::Lost(self.rank));
                return;
            }
            // By the clock alone: two that sent at every wake-up would keep each other awake.
            if heartbeat.is_some_and(|period| last_beat.elapsed() >= period) {
                last_beat = Instant::now();
                let beat = frame(HEARTBEAT, self.rank, self.rank, 0);
                for peer in self.peers.iter().filter(|peer| peer.remote) {
                    // A full or broken connection shows itself below.
                    let _ = (&peer.stream).write(&beat);
                }
            }
            if set[0].revents != 0 && !self.command() {
                return self.leave();
            }
            let mut index = 0;
            while index < self.peers.len() {
                if self.peers[index].listen(&self.shared) {
                    index += 1;
                    continue;
                }
                let gone = self.peers.swap_remove(index).rank;
                if self.shared.verdict.get() == Some(&Verdict::Lost(gone)) {
                    // Before the goodbye: who has not noticed yet would take this rank's end for the cause.
                    self.tell_all(&frame(ABORT, self.rank, gone, Why::Lost as u8));
                }
                // Whoever sleeps in an operation looks at the news.
                let _ = self.pipe.write(&[1]);
            }
        }
    }

    /// Passes an abort on to everyone. False when the group has been dropped.
    fn command(&mut self) -> bool {
        let mut command = [0; FRAME_BYTES];
        loop {
            match self.pipe.read(&mut command) {
                Ok(0) => return false,
                Ok(_) => self.tell_all(&command),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
    }

    /// Says goodbye, and waits until everyone has closed the connection in answer.
    fn leave(mut self) {
        self.tell_all(&frame(BYE, self.rank, self.rank, 0));
        for peer in &self.peers {
            // Fails where the peer has ended already.
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

    fn tell_all(&self, frame: &[u8]) {
        for peer in &self.peers {
            // Who cannot be told is lost already.
            let _ = (&peer.stream).write(frame);
        }
    }
}

/// What to wait for to read from it.
fn readable(stream: &impl AsRawFd) -> libc::pollfd {
    libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

impl Peer {
    /// Throws away what has come. False when the peer has closed the connection.
    fn is_open(&self) -> bool {
        match (&self.stream).read(&mut [0; 512]) {
            Ok(count) => count > 0,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// Reads what has come. False when there is nothing more to expect from this peer.
    fn listen(&mut self, shared: &Shared) -> bool {
        loop {
            match self.stream.read(&mut self.frame[self.filled..]) {
                Ok(0) => {
                    shared.fail(Verdict::Lost(self.rank));
                    return false;
                }
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(_) => {
                    shared.fail(Verdict::Lost(self.rank));
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
                    shared.departed[self.rank].store(true, Ordering::Release);
                    return false;
                }
                PING => {
                    // Whoever cannot be answered is about to be noticed.
                    let _ = self.stream.write(&frame(PONG, 0, 0, 0));
                }
                PONG => shared.answered[self.rank].store(true, Ordering::Relaxed),
                HEARTBEAT => {}
                ABORT if rank < shared.departed.len() && by == self.rank => {
                    shared.fail(Verdict::Aborted { by, rank, why: Why::from_wire(why) });
                    return false;
                }
                // It is no rank of this version; what it means nobody can tell.
                _ => {
                    shared.fail(Verdict::Lost(self.rank));
                    return false;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const LOSS_LIMIT: Duration = Duration::from_millis(600);

    /// The watch of rank 0, whose only peer is on another host, and the peer's end of the connection.
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

    /// Two that answered each other's heartbeats never slept, and a goodbye was queued behind what they had sent.
    #[test]
    fn heartbeats_keep_their_pace_whatever_comes_in() {
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

    /// A socket that is closed is reset by what still comes, and what it has not yet sent is lost: the goodbye too.
    #[test]
    fn what_comes_after_the_goodbye_does_not_destroy_it() {
        // More answers than the peer has room for, so that the goodbye waits behind them.
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
    fn a_goodbye_to_who_does_not_listen_takes_no_longer_than_its_limit() {
        let (watch, peer) = watch();
        let begin = Instant::now();
        drop(watch);
        assert!((GOODBYE_LIMIT..2 * GOODBYE_LIMIT).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        drop(peer);
    }

    #[test]
    fn two_that_leave_at_once_do_not_wait_for_each_other() {
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
        assert!(begin.elapsed() < GOODBYE_LIMIT / 2, "{:?}", begin.elapsed());
    }
}
