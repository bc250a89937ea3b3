//! The memory of exchanges, from the host's side.

use thunder_compute::ComputeError;

use crate::buffer::Memory;
use crate::device::Device;
use crate::device::shared::{Place, Shared};

/// Maximum words of an exchange. Larger sums (prompts' rows) are rare and take long in any case.
pub(crate) const MAX_WORDS: usize = 64 << 10;

/// Words before the first slot: a cache line of the host.
const HEADER_WORDS: usize = 16;

/// Marks words that the other side has not written: a NaN that arithmetic does not produce. The
/// device's writes to host memory arrive in any order, even after a flag that was written later.
const ABSENT: u32 = 0x7fc0_dead;

/// Written in place of an exchange's number if the host has given up.
pub(crate) const ENDED: u32 = u32::MAX;

/// Why the device gave up an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Poison {
    /// The sums did not come in time.
    Late,
    /// The host gave up first.
    Told,
    /// Sums were announced before they had arrived.
    Torn,
}

impl Poison {
    /// The reason for a word that a kernel has written; `None` for 0.
    pub fn of(word: u32) -> Option<Self> {
        match word {
            0 => None,
            1 => Some(Self::Late),
            2 => Some(Self::Told),
            _ => Some(Self::Torn),
        }
    }
}

/// Outbox and inbox each have two slots, which exchanges use alternately. While the device uses
/// one, the other is emptied.
#[derive(Debug)]
pub(super) struct Boxes {
    outbox: Shared,
    inbox: Shared,
    answered: Shared,
}

impl Boxes {
    /// `None` if the driver has no memory that both sides access.
    pub fn new(device: &mut Device) -> Result<Option<Self>, ComputeError> {
        let bytes = 4 * Self::first(2);
        let Some(outbox) = device.shared(bytes, Place::Host)? else { return Ok(None) };
        let Some(inbox) = device.shared(bytes, Place::Device)? else { return Ok(None) };
        let Some(answered) = device.shared(256, Place::Device)? else { return Ok(None) };
        let boxes = Self { outbox, inbox, answered };
        boxes.reset();
        Ok(Some(boxes))
    }

    /// The first word of a slot.
    const fn first(slot: usize) -> usize {
        HEADER_WORDS + slot * MAX_WORDS
    }

    /// The first vector of four words of an exchange's slot.
    pub const fn first_vector(number: u32) -> usize {
        Self::first(slot_of(number)) / 4
    }

    /// Outbox, inbox and its flag.
    pub fn memories(&self) -> [&Memory; 3] {
        [&self.outbox.memory, &self.inbox.memory, &self.answered.memory]
    }

    /// Empties all slots. The device must be idle.
    pub fn reset(&self) {
        self.outbox.fill(0, HEADER_WORDS, 0);
        self.outbox.fill(Self::first(0), 2 * MAX_WORDS, ABSENT);
        self.inbox.fill(Self::first(0), 2 * MAX_WORDS, ABSENT);
        self.answered.publish(0, 0);
    }

    /// Why the device gave up, and at which exchange.
    pub fn verdict(&self) -> Option<(u32, Poison)> {
        Poison::of(self.outbox.load(1)).map(|poison| (self.outbox.load(0), poison))
    }

    /// Reads partial sums into `words`, where `words[..from]` were read before. Returns how many
    /// words have arrived.
    pub fn take(&self, slot: usize, from: usize, words: &mut [u32]) -> usize {
        from + self.outbox.read_present(Self::first(slot) + from, ABSENT, &mut words[from..])
    }

    /// Answers an exchange.
    pub fn answer(&self, slot: usize, words: &[u32], number: u32) {
        self.inbox.write(Self::first(slot), words);
        self.answered.publish(0, number);
    }

    /// Empties the outbox's slot, and the other slot of the inbox. The device has read the latter
    /// if its next partial sums have arrived.
    pub fn empty(&self, slot: usize, [sent, answered]: [usize; 2]) {
        self.outbox.fill(Self::first(slot), sent, ABSENT);
        self.inbox.fill(Self::first(1 - slot), answered, ABSENT);
    }

    /// Makes the device give up this and all later exchanges.
    pub fn end(&self) {
        self.answered.publish(0, ENDED);
    }
}

/// The slot of an exchange.
pub(super) const fn slot_of(number: u32) -> usize {
    number as usize % 2
}

/// The number of the exchange after `number`; neither 0 nor [`ENDED`].
pub(crate) fn next(number: u32) -> u32 {
    if number >= ENDED - 1 { 1 } else { number + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_alternate_between_slots_and_are_never_the_end() {
        assert_eq!([0, 1, ENDED - 2].map(next), [1, 2, ENDED - 1]);
        assert_eq!(next(ENDED - 1), 1);
        assert_ne!((ENDED - 1) % 2, next(ENDED - 1) % 2);
    }
}
