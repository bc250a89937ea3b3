//! Linux: memfd, abstract socket names (which leave nothing in the file system), boot id.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

/// An anonymous object of `bytes` zero bytes. Any process that gets the descriptor can map it.
pub(crate) fn shared_object(bytes: usize) -> io::Result<File> {
    // SAFETY: the name is a C string; the call returns a descriptor or -1.
    let descriptor = unsafe { libc::memfd_create(c"thunder-link".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `descriptor` is open and has no other owner.
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

/// Removes what a listener's name has left.
pub(crate) fn forget_local(_: &UnixListener) {}

/// An identity that two processes share exactly when they can share memory and local sockets: the
/// same boot and the same network namespace.
pub(crate) fn host_identity() -> io::Result<String> {
    let namespace = std::fs::read_link("/proc/self/ns/net")?;
    Ok(format!("{} {}", machine_identity()?, namespace.display()))
}

/// An identity that two processes share exactly when they run on the same kernel, whatever
/// containers they are in.
pub(crate) fn machine_identity() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Makes the socket fail once sent bytes stay unacknowledged for `limit`. This notices a cut cable,
/// but not a stopped peer, whose kernel still acknowledges.
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

/// The process that called `connect` or `listen` at the other end.
pub(super) fn credentials(socket: &UnixStream) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: pointer and length describe `credentials`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut length,
        )
    };
    if result == 0 { Ok(credentials) } else { Err(io::Error::last_os_error()) }
}

/// Another process, by its id in this process's namespace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process(libc::pid_t);

/// The process at the other end, if it is visible from here.
pub(crate) fn peer_process(socket: &UnixStream) -> Option<Process> {
    credentials(socket).ok().map(|credentials| credentials.pid).filter(|pid| *pid > 0).map(Process)
}

impl Process {
    /// Reads from the process's memory. Needs the right to debug that process, which the system may
    /// refuse.
    ///
    /// # Safety
    /// `to` must be valid for `length` bytes.
    pub unsafe fn read(self, from: u64, to: *mut u8, length: usize) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let left = length - done;
            let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: left };
            let remote = libc::iovec { iov_base: (from as usize + done) as *mut _, iov_len: left };
            // SAFETY: `local` lies within what the caller vouches for; the kernel checks `remote`.
            match unsafe { libc::process_vm_readv(self.0, &local, 1, &remote, 1, 0) } {
                count @ 1.. => done += count as usize,
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}
