//! Shared memory: one ring of bytes in each direction, and a socket that wakes a sleeping peer.
//!
//! The writer copies, then publishes `head`. The reader sees `head`, reads in place, then publishes
//! `tail`. See `wakeup` for how a sleeping side is woken.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{Closed, Interest, Link, wakeup};
use crate::Transport;
use crate::platform::{self, Mapping, Process};

/// Messages start on a cache line, so that vector loads from the ring do not straddle two.
const ALIGN: u64 = 64;
/// While it copies a long message, the writer publishes after this many bytes, so that the reader
/// works at the same time.
const PUBLISH_BYTES: usize = 16 << 10;

/// The control words of one direction, each in its own pair of cache lines, because processors
/// prefetch lines in pairs.
#[repr(C, align(128))]
struct Control {
    head: Word<AtomicU64>,
    tail: Word<AtomicU64>,
    reader_sleeps: Word<AtomicU32>,
    writer_sleeps: Word<AtomicU32>,
}

#[repr(C, align(128))]
struct Word<T>(T);

/// Bytes of shared memory for a pair with rings of `ring_bytes` each.
pub(crate) fn segment_bytes(ring_bytes: usize) -> usize {
    2 * (size_of::<Control>() + ring_bytes)
}

/// One rank's end of the shared memory of a pair.
pub(crate) struct ShmLink {
    // Keeps the memory alive that the four pointers below point into.
    _mapping: Mapping,
    wake_socket: UnixStream,
    process: Option<Process>,
    peer_gone: bool,
    ring_bytes: u64,
    out: *const Control,
    out_ring: *mut u8,
    /// The outgoing `head`, and the last `tail` that was read.
    out_head: u64,
    out_tail: u64,
    inc: *const Control,
    inc_ring: *const u8,
    /// The incoming `tail`, and the last `head` that was read.
    inc_tail: u64,
    inc_head: u64,
    /// The last `tail` that was published to the writer.
    inc_published: u64,
    shown: usize,
}

// SAFETY: the pointers point into the mapping that the link owns. Its words are atomic, and each
// ring byte is accessed by one side at a time, handed over by `head` and `tail`.
unsafe impl Send for ShmLink {}

impl ShmLink {
    /// `mapping` has `segment_bytes(ring_bytes)` bytes, initially zero. The lower rank of the pair
    /// writes to the first ring. `ring_bytes` is a power of two.
    pub fn new(
        mapping: Mapping,
        ring_bytes: usize,
        lower: bool,
        wake_socket: UnixStream,
    ) -> std::io::Result<Self> {
        debug_assert!(ring_bytes.is_power_of_two());
        wake_socket.set_nonblocking(true)?;
        let direction = |index: usize| {
            // SAFETY: both directions lie within `segment_bytes(ring_bytes)`.
            unsafe { mapping.start().add(index * (size_of::<Control>() + ring_bytes)) }
        };
        let (out, inc) = if lower { (direction(0), direction(1)) } else { (direction(1), direction(0)) };
        Ok(Self {
            process: platform::peer_process(&wake_socket),
            wake_socket,
            peer_gone: false,
            ring_bytes: ring_bytes as u64,
            out: out.cast(),
            // SAFETY: the ring follows its control words.
            out_ring: unsafe { out.add(size_of::<Control>()) },
            out_head: 0,
            out_tail: 0,
            inc: inc.cast(),
            // SAFETY: as above.
            inc_ring: unsafe { inc.add(size_of::<Control>()) },
            inc_tail: 0,
            inc_head: 0,
            inc_published: 0,
            shown: 0,
            _mapping: mapping,
        })
    }

    fn out(&self) -> &Control {
        // SAFETY: within the mapping, which lives as long as `self`; only atomics.
        unsafe { &*self.out }
    }

    fn inc(&self) -> &Control {
        // SAFETY: as above.
        unsafe { &*self.inc }
    }

    fn wake_peer(&self) {
        // A full socket already holds wake-ups. The watch notices a broken one.
        let _ = (&self.wake_socket).write(&[1]);
    }

    fn publish_head(&self) {
        if wakeup::publish(&self.out().head.0, self.out_head, &self.out().reader_sleeps.0) {
            self.wake_peer();
        }
    }

    fn publish_tail(&mut self) {
        self.inc_published = self.inc_tail;
        if wakeup::publish(&self.inc().tail.0, self.inc_tail, &self.inc().writer_sleeps.0) {
            self.wake_peer();
        }
    }

    /// Copies as many of `bytes` as fit, and publishes them if `publish`. Returns their number.
    fn write(&mut self, bytes: &[u8], publish: bool) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let mut free = self.ring_bytes.saturating_sub(self.out_head - self.out_tail);
            if free < (bytes.len() - done) as u64 {
                self.out_tail = self.out().tail.0.load(Ordering::Acquire);
                free = self.ring_bytes.saturating_sub(self.out_head - self.out_tail);
                if free == 0 {
                    break;
                }
            }
            let at = self.out_head & (self.ring_bytes - 1);
            let count = ((bytes.len() - done).min(PUBLISH_BYTES) as u64).min(free).min(self.ring_bytes - at);
            // SAFETY: `at + count` is within the ring, and the reader has freed these bytes
            // (`tail`).
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr().add(done),
                    self.out_ring.add(at as usize),
                    count as usize,
                );
            }
            self.out_head += count;
            done += count as usize;
            if publish {
                self.publish_head();
            }
        }
        done
    }
}

impl Link for ShmLink {
    fn transport(&self) -> Transport {
        Transport::Shm
    }

    fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, Closed> {
        // A header and the bytes that follow it are published in one step.
        let mut sent = self.write(first, false);
        if sent == first.len() {
            sent += self.write(second, true);
        }
        if sent > 0 && (second.is_empty() || sent <= first.len()) {
            self.publish_head();
        }
        if sent == 0 && self.peer_gone && !(first.is_empty() && second.is_empty()) {
            return Err(Closed);
        }
        Ok(sent)
    }

    fn end_send(&mut self) {
        self.out_head = self.out_head.next_multiple_of(ALIGN);
    }

    fn fill_view(&mut self, want: usize) -> Result<usize, Closed> {
        let mut ready = self.inc_head.saturating_sub(self.inc_tail);
        if ready < want as u64 {
            self.inc_head = self.inc().head.0.load(Ordering::Acquire);
            // The padding of a message is skipped before the next message's `head` includes it, so
            // `tail` may be ahead of `head`.
            ready = self.inc_head.saturating_sub(self.inc_tail);
            if ready == 0 && self.peer_gone {
                return Err(Closed);
            }
        }
        let until_wrap = self.ring_bytes - (self.inc_tail & (self.ring_bytes - 1));
        self.shown = (want as u64).min(ready).min(until_wrap) as usize;
        Ok(self.shown)
    }

    fn view(&self) -> &[u8] {
        let at = (self.inc_tail & (self.ring_bytes - 1)) as usize;
        // SAFETY: `shown` bytes from `at` are within the ring, published by the writer and not yet
        // freed.
        unsafe { std::slice::from_raw_parts(self.inc_ring.add(at), self.shown) }
    }

    fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.shown);
        self.shown -= count;
        self.inc_tail += count as u64;
        // Not after every message: the writer still has most of the ring, and the cache line would
        // move back and forth.
        if self.inc_tail - self.inc_published >= self.ring_bytes / 4 {
            self.publish_tail();
        }
    }

    fn end_receive(&mut self) {
        self.inc_tail = self.inc_tail.next_multiple_of(ALIGN);
    }

    fn arm(&mut self, interest: Interest) -> bool {
        let (mut nothing_to_read, mut no_room) = (true, true);
        if interest.receive {
            let head =
                wakeup::announce(&self.inc().reader_sleeps.0, || self.inc().head.0.load(Ordering::Acquire));
            nothing_to_read = head <= self.inc_tail.max(self.inc_head);
        }
        if interest.send {
            let tail =
                wakeup::announce(&self.out().writer_sleeps.0, || self.out().tail.0.load(Ordering::Acquire));
            no_room = self.out_head - tail >= self.ring_bytes;
        }
        !self.peer_gone && nothing_to_read && no_room
    }

    fn disarm(&mut self) {
        self.inc().reader_sleeps.0.store(0, Ordering::Relaxed);
        self.out().writer_sleeps.0.store(0, Ordering::Relaxed);
        let mut bytes = [0u8; 16];
        loop {
            match (&self.wake_socket).read(&mut bytes) {
                Ok(0) => self.peer_gone = true,
                Ok(count) if count == bytes.len() => continue,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.peer_gone = true,
            }
            break;
        }
    }

    fn descriptors(&self, _interest: Interest, set: &mut Vec<libc::pollfd>) {
        set.push(libc::pollfd { fd: self.wake_socket.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    }

    fn reports_end(&self) -> bool {
        false
    }

    fn is_empty(&self) -> bool {
        self.inc().head.0.load(Ordering::Acquire) <= self.inc_tail
    }

    fn wake(&self) {
        self.wake_peer();
    }

    fn process(&self) -> Option<Process> {
        self.process
    }
}
