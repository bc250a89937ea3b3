//! What Linux and macOS have in common: mappings, descriptors passed over a socket, `poll`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The smallest page size of all supported systems.
const PAGE_BYTES: usize = 4096;

/// Memory shared with another process.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is plain memory; its users decide who accesses which part of it, and how.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of a shared object, and touches every page so that the first
    /// use is fast.
    pub fn new(object: &File, bytes: usize) -> io::Result<Self> {
        let present = object.metadata()?.len();
        if present < bytes as u64 {
            return Err(io::Error::other(format!("shared object of {present} bytes, {bytes} expected")));
        }
        // SAFETY: a new mapping at an address that the kernel chooses, of an object that is long
        // enough.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                object.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = Self { start: start.cast(), bytes };
        for at in (0..bytes).step_by(PAGE_BYTES) {
            // SAFETY: within the mapping; the value is not used.
            unsafe { mapping.start.add(at).read_volatile() };
        }
        Ok(mapping)
    }

    pub fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; users keep no pointer longer than the mapping.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Space for one control message with one descriptor, aligned as its header must be.
#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// Passes an open file to the process at the other end.
pub(crate) fn send_descriptor(socket: &UnixStream, file: &File) -> io::Result<()> {
    let mut byte = [0u8; 1];
    let mut parts = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut buffer = ControlBuffer([0; 64]);
    // SAFETY: an all-zero msghdr is a valid empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut parts;
    message.msg_iovlen = 1;
    message.msg_control = buffer.0.as_mut_ptr().cast();
    // SAFETY: CMSG_SPACE is arithmetic; the buffer of 64 bytes holds one descriptor on every 64-bit
    // Unix.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as _;
    // SAFETY: `msg_control` points to space for one header and one descriptor.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file.as_raw_fd());
    }
    // SAFETY: `message` and all that it points to live until the call returns.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, 0) };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives the file that the other end passes.
pub(crate) fn receive_descriptor(socket: &UnixStream) -> io::Result<File> {
    let mut byte = [0u8; 1];
    let mut parts = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut buffer = ControlBuffer([0; 64]);
    // SAFETY: an all-zero msghdr is a valid empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut parts;
    message.msg_iovlen = 1;
    message.msg_control = buffer.0.as_mut_ptr().cast();
    message.msg_controllen = buffer.0.len() as _;
    // SAFETY: `message` and all that it points to live until the call returns.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, 0) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled `message`; the header, if any, lies within `buffer`.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        if received != 1
            || header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
        {
            return Err(io::Error::other("the peer passed no shared memory"));
        }
        Ok(File::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
    }
}

/// True when the process at the other end belongs to the same user or to root.
pub(crate) fn peer_is_same_user(socket: &UnixStream) -> io::Result<bool> {
    let (mut user, mut own) = (0, 0);
    // SAFETY: no arguments.
    own += unsafe { libc::geteuid() };
    #[cfg(target_os = "linux")]
    {
        user += super::linux::credentials(socket)?.uid;
    }
    #[cfg(not(target_os = "linux"))]
    {
        let mut group = 0;
        // SAFETY: both pointers point to integers of the right type.
        if unsafe { libc::getpeereid(socket.as_raw_fd(), &mut user, &mut group) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(user == own || user == 0)
}

/// Waits until one of the descriptors is ready or the time is over. An interruption counts as
/// ready.
pub(crate) fn poll(set: &mut [libc::pollfd], limit: Option<Duration>) -> io::Result<usize> {
    let milliseconds = match limit {
        None => -1,
        // Rounded up: a wait of 0 ms would spin.
        Some(limit) => libc::c_int::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX),
    };
    // SAFETY: pointer and length describe `set`.
    let ready = unsafe { libc::poll(set.as_mut_ptr(), set.len() as libc::nfds_t, milliseconds) };
    if ready >= 0 {
        return Ok(ready as usize);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted { Ok(1) } else { Err(error) }
}
