//! The rules of a platform's devices that the devices do not report.

use crate::sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

/// The unit in which Apple's devices count messages and queues, in bytes. Also a channel's smallest
/// slot.
pub const FRAME_BYTES: usize = 4096;

/// The rules of a platform. Use [`Profile::native`]; tests on Linux also use [`Profile::APPLE`],
/// because code that obeys Apple's rules runs on every platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// True if the devices support reliable connections, and so RDMA WRITE.
    pub reliable: bool,
    /// Most outstanding sends per queue pair, even if the device reports more.
    pub max_sends: u32,
    /// Most posted receives per queue pair, even if the device reports more.
    pub max_receives: u32,
    /// True if a send must span as many frames as the receive at the peer.
    pub equal_frames: bool,
    /// True if memory regions need remote access rights even when only the local device uses them.
    pub remote_rights_always: bool,
}

impl Profile {
    /// Thunderbolt 5 on macOS: unreliable connections only, and the reported capacities are too
    /// large.
    pub const APPLE: Self = Self {
        reliable: false,
        max_sends: 32,
        max_receives: 32,
        equal_frames: true,
        remote_rights_always: true,
    };

    /// libibverbs: the reported capacities are correct.
    pub const LINUX: Self = Self {
        reliable: true,
        max_sends: u32::MAX,
        max_receives: u32::MAX,
        equal_frames: false,
        remote_rights_always: false,
    };

    /// The rules of the target system.
    pub const fn native() -> Self {
        if cfg!(target_os = "macos") { Self::APPLE } else { Self::LINUX }
    }

    /// The access flags of a memory region and of its queue pair.
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
    fn a_region_has_remote_rights_only_where_needed() {
        assert_eq!(Profile::LINUX.access(false), IBV_ACCESS_LOCAL_WRITE);
        assert_eq!(Profile::LINUX.access(true), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        assert_eq!(Profile::APPLE.access(false), 0b111);
    }
}
