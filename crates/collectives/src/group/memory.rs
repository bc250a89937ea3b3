//! Memory that all ranks of a group map, for what computes on it without the host: GPUs.

use std::fs::File;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use super::Group;
use crate::platform::{self, Mapping};
use crate::rendezvous::{HandshakeStream, handshake};
use crate::world::hex;
use crate::{CommError, Op, Transport};

/// How long a rank waits for the others to fetch the memory. All ranks come at the same time.
const FETCH_LIMIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(1);

/// Bytes of the name of the socket over which ranks get the memory: a random number in hex, which
/// also proves that a process belongs to the group. All zero if there is none.
const NAME_BYTES: usize = 32;

/// Memory that all ranks of a group share. It lives as long as one of them maps it.
#[derive(Debug)]
pub struct SharedMemory {
    mapping: Mapping,
    words: usize,
}

// SAFETY: what a reference gives are atomics, and an address.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Its words, which other ranks may change at any time.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: the mapping has this many words, is aligned to pages, and lives as long as
        // `self`; atomics may be shared.
        unsafe { std::slice::from_raw_parts(self.mapping.start().cast::<AtomicU32>(), self.words) }
    }

    /// The same words in pairs.
    pub fn pairs(&self) -> &[AtomicU64] {
        // SAFETY: as above, for half as many pairs.
        unsafe { std::slice::from_raw_parts(self.mapping.start().cast::<AtomicU64>(), self.words / 2) }
    }

    /// Where it begins in this process: at the start of a page.
    pub fn address(&self) -> *mut u8 {
        self.mapping.start()
    }
}

impl Group {
    /// Memory of `bytes` zero bytes that all ranks share. The inner error says why no rank has it:
    /// the ranks are not connected by shared memory, or it could not be made or mapped.
    ///
    /// # Errors
    /// [`CommError`], like every operation.
    pub fn share_memory(&mut self, bytes: usize) -> Result<Result<SharedMemory, String>, CommError> {
        // The same on all ranks.
        let is_near = |rank| matches!(self.transport(rank), Transport::Itself | Transport::Shm);
        if self.core.hosts.len() > 1 || !(0..self.size()).all(is_near) {
            return Ok(Err("not all ranks share memory".to_owned()));
        }
        let shared = if self.rank() == 0 { self.offer(bytes)? } else { self.fetch(bytes)? };
        let mut all = [u64::from(shared.is_ok())];
        self.all_reduce(&mut all, Op::Min)?;
        Ok(match shared {
            Ok(_) if all != [1] => Err("another rank could not map shared memory".to_owned()),
            shared => shared.map_err(|error| format!("shared memory cannot be made: {error}")),
        })
    }

    /// Makes the memory and passes it to the other ranks.
    fn offer(&mut self, bytes: usize) -> Result<io::Result<SharedMemory>, CommError> {
        let prepare = || {
            let name = hex(&handshake::random::<{ NAME_BYTES / 2 }>()?);
            let listener = platform::bind_local(&name)?;
            listener.set_nonblocking(true)?;
            let object = platform::shared_object(bytes)?;
            let mapping = Mapping::new(&object, bytes)?;
            Ok((name, listener, object, SharedMemory { mapping, words: bytes / 4 }))
        };
        let prepared: io::Result<_> = prepare();
        let mut name = [0u8; NAME_BYTES];
        if let Ok((text, ..)) = &prepared {
            name.copy_from_slice(text.as_bytes());
        }
        self.broadcast(0, &mut name)?;
        Ok(prepared.and_then(|(_, listener, object, memory)| {
            let passed = pass(&listener, &object, self.size() - 1);
            platform::forget_local(&listener);
            passed.map(|()| memory)
        }))
    }

    fn fetch(&mut self, bytes: usize) -> Result<io::Result<SharedMemory>, CommError> {
        let mut name = [0u8; NAME_BYTES];
        self.broadcast(0, &mut name)?;
        if name == [0; NAME_BYTES] {
            return Ok(Err(io::Error::other("rank 0 could not make it")));
        }
        let fetch = || {
            let name = std::str::from_utf8(&name).map_err(io::Error::other)?;
            let stream: UnixStream = platform::connect_local(name)?;
            stream.set_timeouts(Some(FETCH_LIMIT))?;
            let object = platform::receive_descriptor(&stream)?;
            Ok(SharedMemory { mapping: Mapping::new(&object, bytes)?, words: bytes / 4 })
        };
        Ok(fetch())
    }
}

/// Passes an object to this many processes of the same user that ask for it.
fn pass(listener: &UnixListener, object: &File, count: usize) -> io::Result<()> {
    let (limit, mut passed) = (Instant::now() + FETCH_LIMIT, 0);
    while passed < count {
        match listener.accept() {
            Ok((stream, _)) if platform::peer_is_same_user(&stream)? => {
                stream.set_nonblocking(false)?;
                platform::send_descriptor(&stream, object)?;
                passed += 1;
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ if Instant::now() > limit => return Err(io::ErrorKind::TimedOut.into()),
            _ => std::thread::sleep(LOOK),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use crate::{Op, TransportChoice, local};

    #[test]
    fn ranks_of_a_host_see_what_others_write() {
        let seen = local::run(3, TransportChoice::Shm, |mut group| {
            let memory = group.share_memory(8192).unwrap().unwrap();
            assert!(memory.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
            group.barrier().unwrap();
            memory.words()[2047 - group.rank()].store(7 + group.rank() as u32, Ordering::Release);
            group.barrier().unwrap();
            [0, 1, 2].map(|rank| memory.words()[2047 - rank].load(Ordering::Acquire))
        });
        assert_eq!(seen.unwrap(), [[7, 8, 9]; 3]);
    }

    #[test]
    fn ranks_that_talk_over_a_network_share_no_memory() {
        let ended = local::run(2, TransportChoice::Tcp, |mut group| {
            assert!(group.share_memory(4096).unwrap().is_err());
            let mut sum = [1u32];
            group.all_reduce(&mut sum, Op::Sum).unwrap();
            sum
        });
        assert_eq!(ended.unwrap(), [[2]; 2]);
    }
}
