//! What a platform's devices may be asked for, beyond what they say of themselves.

use crate::sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

/// The unit in which Apple's devices count messages and queues, and the smallest slot of a channel.
pub const FRAME_BYTES: usize = 4096;

/// The rules of a platform. [`Profile::native`] is the one to use; tests on Linux use [`Profile::APPLE`] too, as what
/// obeys Apple's rules runs everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Reliable connections, and with them RDMA WRITE, can be had.
    pub reliable: bool,
    /// The most send requests that may be outstanding on a queue pair, whatever it reports.
    pub max_sends: u32,
    /// The most receives that may be posted on a queue pair, whatever it reports.
    pub max_receives: u32,
    /// A send must span as many frames as the receive that it meets.
    pub equal_frames: bool,
    /// Regions need the remote rights even when nothing but the local device touches them.
    pub remote_rights_always: bool,
}

impl Profile {
    /// Thunderbolt 5 on macOS: unreliable connections alone, and capacities that are reported too large.
    pub const APPLE: Self = Self {
        reliable: false,
        max_sends: 32,
        max_receives: 32,
        equal_frames: true,
        remote_rights_always: true,
    };

    /// libibverbs: the device's own word is good.
    pub const LINUX: Self = Self {
        reliable: true,
        max_sends: u32::MAX,
        max_receives: u32::MAX,
        equal_frames: false,
        remote_rights_always: false,
    };

    /// The rules of the system this was built for.
    pub const fn native() -> Self {
        if cfg!(target_os = "macos") { Self::APPLE } else { Self::LINUX }
    }

    /// The access flags of a region, and of the queue pair that uses it.
    pub(crate) fn access(self, peer_writes: bool) -> i32 {
        let remote = match (self.remote_rights_always, peer_writes) {
            (true, _) => IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
            (false, true) => IBV_ACCESS_REMOTE_WRITE,
            (false, false) => 0,
        };
        IBV_ACCESS_LOCAL_WRITE | remote
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_open_to_the_peer_only_where_it_must_be() {
        assert_eq!(Profile::LINUX.access(false), IBV_ACCESS_LOCAL_WRITE);
        assert_eq!(Profile::LINUX.access(true), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        assert_eq!(Profile::APPLE.access(false), 0b111);
    }
}
