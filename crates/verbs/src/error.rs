//! What can go wrong, each with the value that was wrong and what to do.

use crate::device::PortState;
use crate::status::WcStatus;
use std::time::Duration;

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Any failure of this crate. Cloneable, so that a broken channel can repeat the error that broke it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// No verbs library on this machine.
    #[error(
        "no RDMA verbs library: tried {tried} ({reason}); on Linux install libibverbs1 and ibverbs-providers, \
             macOS has it from 26.2 on"
    )]
    LibraryMissing {
        /// The names that were tried.
        tried: String,
        /// The loader's words.
        reason: String,
    },
    /// A library was found but lacks a function.
    #[error("{path} lacks {symbol} ({reason}); install a current version of it")]
    LibraryUnusable {
        /// The library.
        path: String,
        /// The function.
        symbol: String,
        /// The loader's words.
        reason: String,
    },
    /// The library works but knows no such device.
    #[error("no RDMA device {wanted:?}: this machine has {present}; `thunder doctor` says why")]
    NoDevice {
        /// The name asked for.
        wanted: String,
        /// The names there are, or "none".
        present: String,
    },
    /// No port of the device is in the active state.
    #[error("no port of {device} is active: {ports}; check the cable and that its network interface is up")]
    NoActivePort {
        /// The device.
        device: String,
        /// Each port's state.
        ports: String,
    },
    /// A port that a channel uses has left the active state.
    #[error("port {port} of {device} is {state:?}: the cable is out, or the machine at its other end is off")]
    PortDown {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state now.
        state: PortState,
    },
    /// The port has no address that could be used.
    #[error(
        "port {port} of {device} has no GID for {wanted}: it has {present}; give its network interface an address"
    )]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// What was looked for.
        wanted: String,
        /// The GIDs there are.
        present: String,
    },
    /// The device cannot do what was asked for.
    #[error("{device} does not offer {wanted}; use {instead}")]
    Unsupported {
        /// The device.
        device: String,
        /// What was asked for.
        wanted: &'static str,
        /// What to ask for.
        instead: &'static str,
    },
    /// A call of the library failed.
    #[error("{call} on {target}: {reason}{}", hint(*.errno))]
    Call {
        /// The function.
        call: &'static str,
        /// The device or queue pair.
        target: String,
        /// The system's error number.
        errno: i32,
        /// The system's words for it.
        reason: String,
    },
    /// A work request came back with an error.
    #[error("{operation} on {queue} failed with {status} (vendor code {vendor:#x}): {}", status.meaning())]
    Completion {
        /// The queue pair, by device and number.
        queue: String,
        /// What it was doing.
        operation: &'static str,
        /// The status of the completion.
        status: WcStatus,
        /// The vendor's own code.
        vendor: u32,
    },
    /// The device completed something that was never posted.
    #[error("{queue} completed work request {id:#x}, which is not posted; the driver is at fault")]
    StrayCompletion {
        /// The queue pair.
        queue: String,
        /// The identifier.
        id: u64,
    },
    /// A frame did not arrive: an unreliable connection says so only by what comes after.
    #[error(
        "{queue} lost {missing} frame(s): frame {got} came after {expected_before}; \
             the link drops packets, use a reliable connection or repair it"
    )]
    Lost {
        /// The queue pair.
        queue: String,
        /// How many.
        missing: u32,
        /// The number of the frame that came last in order.
        expected_before: u32,
        /// The number of the frame that came now.
        got: u32,
    },
    /// A frame that this protocol cannot have sent.
    #[error(
        "{queue} received a frame that is not ours: {what}; are both ends of the same cable, in the same order?"
    )]
    BadFrame {
        /// The queue pair.
        queue: String,
        /// What is wrong with it.
        what: String,
    },
    /// The two ends do not agree on how to talk.
    #[error(
        "the peer's channel does not fit: {what}; both sides must run the same version with the same settings"
    )]
    Mismatch {
        /// What differs, with both values.
        what: String,
    },
    /// The exchange of addresses over the side channel failed.
    #[error("exchanging addresses with the peer: {reason}")]
    Handshake {
        /// Why.
        reason: String,
    },
    /// The layer above ended the wait: it knows that the peer is gone.
    #[error("ended from above: {reason}")]
    Aborted {
        /// The words given to [`Abort::raise`](crate::Abort::raise).
        reason: String,
    },
    /// A bounded wait ran out.
    #[error("{what} did not finish within {after:?}: {state}")]
    Timeout {
        /// The operation.
        what: &'static str,
        /// The limit.
        after: Duration,
        /// Where the channel stood.
        state: String,
    },
    /// A size that the device or the protocol does not allow.
    #[error("{what} is {value}: {rule}")]
    BadSize {
        /// What has the size.
        what: &'static str,
        /// The size.
        value: usize,
        /// What it must be.
        rule: String,
    },
}

/// What an error number of the library most often means.
fn hint(errno: i32) -> &'static str {
    match errno {
        libc::EACCES | libc::EPERM => {
            " (may this user open /dev/infiniband? is the locked-memory limit, `ulimit -l`, high enough?)"
        }
        libc::ENOMEM => {
            " (the device or the locked-memory limit, `ulimit -l`, has no room left; use fewer or smaller channels)"
        }
        libc::EBUSY => " (the device has no queue pair left; close other programs that use it)",
        _ => "",
    }
}

impl Error {
    /// Whether the link leads nowhere any more, though nothing that came over it was wrong.
    pub fn is_cut(&self) -> bool {
        matches!(self, Self::PortDown { .. } | Self::Completion { status: WcStatus::RetryExc, .. })
    }

    /// A failed call that says why in `errno`.
    pub(crate) fn last_os(call: &'static str, target: &str) -> Self {
        Self::errno(call, target, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// A failed call that returns its error number.
    pub(crate) fn errno(call: &'static str, target: &str, errno: i32) -> Self {
        let reason = std::io::Error::from_raw_os_error(errno.abs()).to_string();
        Self::Call { call, target: target.to_string(), errno: errno.abs(), reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_completion_is_told_by_name_and_meaning() {
        let error = Error::Completion {
            queue: "rdma_en3 queue pair 17".into(),
            operation: "send",
            status: WcStatus::from_raw(12),
            vendor: 0x81,
        };
        let text = error.to_string();
        for part in ["rdma_en3 queue pair 17", "IBV_WC_RETRY_EXC_ERR", "does not answer", "0x81"] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }

    #[test]
    fn a_failed_call_carries_the_systems_words_and_a_remedy() {
        let text = Error::errno("ibv_reg_mr", "rdma_en2", libc::ENOMEM).to_string();
        assert!(text.contains("ibv_reg_mr on rdma_en2") && text.contains("ulimit -l"), "{text}");
    }
}
