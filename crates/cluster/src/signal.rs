//! Signals in words.

/// Name of a signal, as `SIGKILL`.
pub(crate) fn name(signal: i32) -> String {
    let known = [
        (libc::SIGHUP, "SIGHUP"),
        (libc::SIGINT, "SIGINT"),
        (libc::SIGQUIT, "SIGQUIT"),
        (libc::SIGILL, "SIGILL"),
        (libc::SIGABRT, "SIGABRT"),
        (libc::SIGBUS, "SIGBUS"),
        (libc::SIGFPE, "SIGFPE"),
        (libc::SIGKILL, "SIGKILL"),
        (libc::SIGSEGV, "SIGSEGV"),
        (libc::SIGPIPE, "SIGPIPE"),
        (libc::SIGTERM, "SIGTERM"),
    ];
    let found = known.iter().find(|(number, _)| *number == signal);
    found.map_or_else(|| format!("signal {signal}"), |(number, name)| format!("signal {number} ({name})"))
}

/// The usual reason for the end of a process by this signal, and what to do; empty if the signal
/// says nothing.
pub(crate) fn advice(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => {
            "out of memory? The system's log (dmesg) of that machine says so; give it less to hold"
        }
        libc::SIGBUS => "was a file that it reads truncated, or does a disk fail?",
        libc::SIGILL | libc::SIGSEGV | libc::SIGABRT | libc::SIGFPE => {
            "a bug of the program: please report it"
        }
        _ => "",
    }
}
