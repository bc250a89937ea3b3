//! The launcher's signals, as a descriptor that `poll` can wait for.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::c_int;
use signal_hook::SigId;

use super::LaunchError;

/// Signals that end a launch.
const ENDING: [c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Signal handlers. Dropping it removes them.
pub(super) struct Signals {
    wake: UnixStream,
    flags: Vec<(c_int, Arc<AtomicBool>)>,
    registered: Vec<SigId>,
}

impl Signals {
    pub fn install() -> Result<Self, LaunchError> {
        let failed = || LaunchError::system("install signal handlers");
        let (wake, writer) = UnixStream::pair().map_err(failed())?;
        wake.set_nonblocking(true).map_err(failed())?;
        let mut signals = Self { wake, flags: Vec::new(), registered: Vec::new() };
        let mut wake_on = |signal| -> Result<(), LaunchError> {
            let writer = writer.try_clone().map_err(failed())?;
            let id = signal_hook::low_level::pipe::register(signal, writer).map_err(failed())?;
            signals.registered.push(id);
            Ok(())
        };
        wake_on(libc::SIGCHLD)?;
        // `nohup` and shells that start background jobs ignore some signals on purpose: those stay
        // ignored.
        for signal in ENDING.into_iter().filter(|signal| !is_ignored(*signal)) {
            wake_on(signal)?;
            let flag = Arc::new(AtomicBool::new(false));
            signals.flags.push((signal, flag));
        }
        for (signal, flag) in &signals.flags {
            signals.registered.push(signal_hook::flag::register(*signal, flag.clone()).map_err(failed())?);
        }
        Ok(signals)
    }

    /// A signal to end that came since the last call. Call after every wake.
    pub fn take(&mut self) -> Option<i32> {
        use std::io::Read;
        let mut bytes = [0; 64];
        while matches!(self.wake.read(&mut bytes), Ok(count) if count > 0) {}
        self.flags.iter().find(|(_, flag)| flag.swap(false, Ordering::AcqRel)).map(|(signal, _)| *signal)
    }

    /// Becomes readable when a signal comes.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

fn is_ignored(signal: c_int) -> bool {
    // SAFETY: a null second argument makes sigaction a query, and an all-zero sigaction is valid
    // memory for the answer.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}

/// Makes this thread's reads from the terminal fail while the process is in the background, instead
/// of stopping the process.
pub(super) fn block_terminal_input_signal() {
    // SAFETY: the set is initialised by sigemptyset before it is used, and only this thread's mask
    // changes.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTTIN);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}
