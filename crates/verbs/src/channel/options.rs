//! A channel's mode and the number and size of its slots.

use super::credit::MIN_SLOTS;
use super::lane::CREDIT_BYTES;
use crate::error::{Error, Result};
use crate::profile::FRAME_BYTES;
use crate::queue::{Connection, QueueOptions};
use serde::{Deserialize, Serialize};

/// How a channel's frames travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Sends into posted receives over an unreliable connection. The only mode of Apple's devices.
    Uc,
    /// Sends into posted receives over a reliable connection.
    Rc,
    /// Reliable RDMA WRITEs into the peer's memory, each followed by a flag. Lowest latency: there
    /// is no receive to post and no completion to wait for.
    RcWrite,
}

impl Mode {
    fn connection(self) -> Connection {
        match self {
            Self::Uc => Connection::Uc,
            Self::Rc | Self::RcWrite => Connection::Rc,
        }
    }
}

/// Options of a channel. Both sides must use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelOptions {
    /// How frames travel.
    pub mode: Mode,
    /// Slots of 4 KiB for short writes. More slots allow more short messages in flight; each takes
    /// 8 KiB of memory. With [`Mode::RcWrite`], this and `long_slots` must be powers of two.
    pub short_slots: u32,
    /// Bytes of a slot for long writes, a multiple of 4 KiB. Longer slots cost less time per byte
    /// and, on Apple's devices, more padding at the end of a write. 0 for no lanes with long slots:
    /// then only the first cable is used, with one queue pair.
    pub long_slot_bytes: usize,
    /// Slots for long writes, per cable.
    pub long_slots: u32,
}

impl ChannelOptions {
    /// Defaults that suit all known devices. The first cable has two queue pairs, the others one
    /// each; a queue pair has two memory regions, or three with [`Mode::RcWrite`].
    pub fn new(mode: Mode) -> Self {
        Self { mode, short_slots: 32, long_slot_bytes: 64 * 1024, long_slots: 16 }
    }

    pub(super) fn check(&self) -> Result<()> {
        for (what, value) in [("short_slots", self.short_slots), ("long_slots", self.long_slots)] {
            if value < MIN_SLOTS {
                let rule = format!("credits need at least {MIN_SLOTS}");
                return Err(Error::BadSize { what, value: value as usize, rule });
            }
            // A frame's slot is its number modulo the slots, and numbers wrap around at 2^32.
            if self.mode == Mode::RcWrite && !value.is_power_of_two() {
                let rule = "it must be a power of two for one-sided lanes".to_string();
                return Err(Error::BadSize { what, value: value as usize, rule });
            }
        }
        if !self.long_slot_bytes.is_multiple_of(FRAME_BYTES) {
            let rule = format!("it must be a multiple of {FRAME_BYTES}");
            return Err(Error::BadSize { what: "long_slot_bytes", value: self.long_slot_bytes, rule });
        }
        Ok(())
    }

    pub(super) fn queue(&self, slot_bytes: usize, slots: u32) -> QueueOptions {
        let one_sided = self.mode == Mode::RcWrite;
        QueueOptions {
            connection: self.mode.connection(),
            slot_bytes,
            // On a one-sided lane, a credit return takes a send slot in addition to those of the
            // frames.
            sends: if one_sided { slots + 1 } else { slots },
            receives: if one_sided { 1 } else { slots },
            window_bytes: if one_sided { slots as usize * slot_bytes + CREDIT_BYTES } else { 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_are_refused() {
        let good = ChannelOptions::new(Mode::Uc);
        assert!(good.check().is_ok());
        assert!(ChannelOptions { short_slots: MIN_SLOTS - 1, ..good }.check().is_err());
        assert!(ChannelOptions { long_slot_bytes: 5000, ..good }.check().is_err());
        // 2^32 frames are sent within hours. Then frame 0 must use the slot after that of frame
        // 2^32 - 1.
        let odd = ChannelOptions { long_slots: 12, ..good };
        assert!(odd.check().is_ok());
        assert!(ChannelOptions { mode: Mode::RcWrite, ..odd }.check().is_err());
        assert!(ChannelOptions::new(Mode::RcWrite).check().is_ok());
    }
}
