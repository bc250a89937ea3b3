//! macOS: a named object that is unlinked before another process can open it, sockets in the
//! temporary folder, boot session id.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

/// `TCP_RXT_CONNDROPTIME` of netinet/tcp.h: seconds of retransmission after which a connection is
/// dropped.
const RETRANSMISSION_LIMIT: libc::c_int = 0x80;

/// An anonymous object of `bytes` zero bytes. Any process that gets the descriptor can map it.
pub(crate) fn shared_object(bytes: usize) -> io::Result<File> {
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let name = std::ffi::CString::new(format!("/thunder-{:016x}", u64::from_le_bytes(random)))?;
    // SAFETY: `name` is a C string; the call returns a descriptor or -1.
    let descriptor =
        unsafe { libc::shm_open(name.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_EXCL, 0o600) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the same name; the object lives on through its descriptor.
    unsafe { libc::shm_unlink(name.as_ptr()) };
    // SAFETY: `descriptor` is open and has no other owner.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(bytes as u64)?;
    Ok(file)
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(name)
}

pub(crate) fn bind_local(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind(path(name))
}

/// Removes what a listener's name has left.
pub(crate) fn forget_local(listener: &UnixListener) {
    let address = listener.local_addr();
    if let Some(path) = address.as_ref().ok().and_then(|address| address.as_pathname()) {
        let _ = std::fs::remove_file(path);
    }
}

/// Connects to a local socket.
pub(crate) fn connect_local(name: &str) -> io::Result<UnixStream> {
    UnixStream::connect(path(name))
}

/// An identity that two processes share exactly when they can share memory and local sockets.
pub(crate) fn host_identity() -> io::Result<String> {
    let mut value = [0u8; 64];
    let mut length = value.len();
    // SAFETY: the name is a C string, `length` is the size of `value`.
    let result = unsafe {
        libc::sysctlbyname(
            c"kern.bootsessionuuid".as_ptr(),
            value.as_mut_ptr().cast(),
            &mut length,
            std::ptr::null_mut(),
            0,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(String::from_utf8_lossy(&value[..length.min(value.len())]).trim_end_matches('\0').to_owned())
}

/// An identity that two processes share exactly when they run on the same kernel.
pub(crate) fn machine_identity() -> io::Result<String> {
    host_identity()
}

/// Makes the socket fail once sent bytes stay unacknowledged for `limit` (whole seconds here).
pub(crate) fn limit_unacknowledged(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    let seconds = libc::c_int::try_from(limit.as_secs().max(1)).unwrap_or(libc::c_int::MAX);
    // SAFETY: the pointer and length describe `seconds`.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            RETRANSMISSION_LIMIT,
            (&raw const seconds).cast(),
            size_of_val(&seconds) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Another process, whose memory cannot be read here.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Process {}

/// Returns `None`: programs have no right to read another process's memory.
pub(crate) fn peer_process(_socket: &UnixStream) -> Option<Process> {
    None
}

impl Process {
    /// # Safety
    /// Always safe: there is no such process.
    pub unsafe fn read(self, _from: u64, _to: *mut u8, _length: usize) -> io::Result<()> {
        match self {}
    }
}
