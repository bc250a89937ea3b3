//! The crate's errors. Each message has the value that was wrong and says what to do.

use crate::device::PortState;
use crate::status::WcStatus;
use std::time::Duration;

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Any failure of this crate. It implements `Clone`, so that a broken channel can return its error
/// again.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// No verbs library on this machine.
    #[error(
        "no RDMA verbs library: tried {tried} ({reason}); on Linux, install libibverbs1 and ibverbs-providers; \
             macOS has it since 26.2"
    )]
    LibraryMissing {
        /// The names that were tried.
        tried: String,
        /// The loader's message.
        reason: String,
    },
    /// The library lacks a function.
    #[error("{path} lacks {symbol} ({reason}); install a current version of the library")]
    LibraryUnusable {
        /// The library.
        path: String,
        /// The function.
        symbol: String,
        /// The loader's message.
        reason: String,
    },
    /// The machine has no device of this name.
    #[error("no RDMA device {wanted:?}: this machine has {present}; `thunder doctor` says why")]
    NoDevice {
        /// The requested name.
        wanted: String,
        /// The names of the machine's devices, or "none".
        present: String,
    },
    /// No port of the device is in the active state.
    #[error("no port of {device} is active: {ports}; check the cable, and that its network interface is up")]
    NoActivePort {
        /// The device.
        device: String,
        /// The state of each port.
        ports: String,
    },
    /// A port that a channel uses has left the active state.
    #[error(
        "port {port} of {device} is {state:?}: the cable is unplugged, or the machine at the other end is off"
    )]
    PortDown {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The port's state.
        state: PortState,
    },
    /// The port has no usable address.
    #[error(
        "port {port} of {device} has no GID for {wanted}: it has {present}; give its network interface an address"
    )]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The requested address.
        wanted: String,
        /// The port's GIDs.
        present: String,
    },
    /// The device does not support the request.
    #[error("{device} does not support {wanted}; use {instead}")]
    Unsupported {
        /// The device.
        device: String,
        /// The requested feature.
        wanted: &'static str,
        /// The feature to use.
        instead: &'static str,
    },
    /// A library call failed.
    #[error("{call} on {target}: {reason}{}", hint(*.errno))]
    Call {
        /// The function.
        call: &'static str,
        /// The device or queue pair.
        target: String,
        /// The system's error number.
        errno: i32,
        /// The system's message for that number.
        reason: String,
    },
    /// A work request completed with an error.
    #[error("{operation} on {queue} failed with {status} (vendor code {vendor:#x}): {}", status.meaning())]
    Completion {
        /// The queue pair, by device and number.
        queue: String,
        /// "send" or "receive".
        operation: &'static str,
        /// The status of the completion.
        status: WcStatus,
        /// The vendor's own code.
        vendor: u32,
    },
    /// The device completed a work request that is not posted.
    #[error("{queue} completed work request {id:#x}, which is not posted; this is a fault of the driver")]
    StrayCompletion {
        /// The queue pair.
        queue: String,
        /// The identifier of the work request.
        id: u64,
    },
    /// A frame was lost. On an unreliable connection, only the number of a later frame reveals it.
    #[error(
        "{queue} lost {missing} frame(s): frame {got} arrived after {expected_before}; \
             the cable drops packets: use a reliable connection, or repair the cable"
    )]
    Lost {
        /// The queue pair.
        queue: String,
        /// The number of lost frames.
        missing: u32,
        /// The number of the last frame before the gap.
        expected_before: u32,
        /// The number of the first frame after the gap.
        got: u32,
    },
    /// A frame that violates the protocol.
    #[error(
        "{queue} received an invalid frame: {what}; check that both ranks list their cables in the same order"
    )]
    BadFrame {
        /// The queue pair.
        queue: String,
        /// What is wrong with the frame.
        what: String,
    },
    /// The two sides have different versions or settings.
    #[error(
        "the peer's channel differs: {what}; both sides must run the same version with the same settings"
    )]
    Mismatch {
        /// What differs, with both values.
        what: String,
    },
    /// The exchange of addresses over the side channel failed.
    #[error("exchanging addresses with the peer: {reason}")]
    Handshake {
        /// Why it failed.
        reason: String,
    },
    /// The caller ended the wait because the peer is gone.
    #[error("aborted: {reason}")]
    Aborted {
        /// The reason given to [`Abort::raise`](crate::Abort::raise).
        reason: String,
    },
    /// A wait passed its time limit.
    #[error("{what} did not finish within {after:?}: {state}")]
    Timeout {
        /// The operation.
        what: &'static str,
        /// The limit.
        after: Duration,
        /// The progress at that time.
        state: String,
    },
    /// The device or the protocol does not allow this size.
    #[error("{what} is {value}: {rule}")]
    BadSize {
        /// The quantity.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The rule that it breaks.
        rule: String,
    },
}

/// The usual cause of an error number of the library.
fn hint(errno: i32) -> &'static str {
    match errno {
        libc::EACCES | libc::EPERM => {
            " (check that this user may open /dev/infiniband, and that the locked-memory limit, `ulimit -l`, is high enough)"
        }
        libc::ENOMEM => {
            " (the device's memory or the locked-memory limit, `ulimit -l`, is used up; use fewer or smaller channels)"
        }
        libc::EBUSY => " (the device has no free queue pair; close other programs that use the device)",
        _ => "",
    }
}

impl Error {
    /// True if the cable or the peer is gone. False for errors in the received data.
    pub fn is_cut(&self) -> bool {
        matches!(self, Self::PortDown { .. } | Self::Completion { status: WcStatus::RetryExc, .. })
    }

    /// The error of a call that sets `errno`.
    pub(crate) fn last_os(call: &'static str, target: &str) -> Self {
        Self::errno(call, target, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// The error of a call that returns its error number.
    pub(crate) fn errno(call: &'static str, target: &str, errno: i32) -> Self {
        let reason = std::io::Error::from_raw_os_error(errno.abs()).to_string();
        Self::Call { call, target: target.to_string(), errno: errno.abs(), reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_completion_has_the_status_name_and_meaning() {
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
    fn a_failed_call_has_the_systems_message_and_a_remedy() {
        let text = Error::errno("ibv_reg_mr", "rdma_en2", libc::ENOMEM).to_string();
        assert!(text.contains("ibv_reg_mr on rdma_en2") && text.contains("ulimit -l"), "{text}");
    }
}
