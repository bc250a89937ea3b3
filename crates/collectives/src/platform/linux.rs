//! Linux: memfd, abstract socket names (nothing in the file system to leave behind), boot id.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// An anonymous object of `bytes` zero bytes that can be mapped by whoever gets the descriptor.
pub(crate) fn shared_object(bytes: usize) -> io::Result<File> {
    // SAFETY: the name is a C string; a descriptor or -1 comes back.
    let descriptor = unsafe { libc::memfd_create(c"thunder-link".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `descriptor` is open and owned by nobody else.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(bytes as u64)?;
    Ok(file)
}

pub(crate) fn bind_local(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

pub(crate) fn connect_local(name: &str) -> io::Result<UnixStream> {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)
}

/// The same for two processes exactly when they can share memory and local sockets: one boot, one network namespace.
pub(crate) fn host_identity() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::read_link("/proc/self/ns/net")?;
    Ok(format!("{} {}", boot.trim(), namespace.display()))
}

/// Makes the socket fail once sent bytes stay unacknowledged for `limit`: a cut cable is noticed, a stopped peer, whose
/// kernel still acknowledges, is not.
pub(crate) fn limit_unacknowledged(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    let value = libc::c_uint::try_from(limit.as_millis()).unwrap_or(libc::c_uint::MAX);
    // SAFETY: the pointer and length describe `value`.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_USER_TIMEOUT,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
