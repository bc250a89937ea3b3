//! The memory of exchanges, as the host sees it.

use thunder_compute::ComputeError;

use crate::buffer::Memory;
use crate::device::Device;
use crate::device::shared::{Place, Shared};

/// Words of one exchange at most. Larger sums take long in any case, and are rare: prompts' rows.
pub(crate) const MAX_WORDS: usize = 64 << 10;

/// Words before the first slot: a line of the host's cache.
const HEADER_WORDS: usize = 16;

/// A NaN that arithmetic does not make: what the other side has not written yet. The device's
/// writes to the host's memory come in any order, also after a flag that was written later.
const ABSENT: u32 = 0x7fc0_dead;

/// In place of an exchange's number: the host has given up.
pub(crate) const ENDED: u32 = u32::MAX;

/// Why the device gave an exchange up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Poison {
    /// The sums did not come in time.
    Late,
    /// The host gave up first.
    Told,
    /// Sums were announced before they were there.
    Torn,
}

impl Poison {
    /// What a kernel writes; 0 for none.
    pub fn of(word: u32) -> Option<Self> {
        match word {
            0 => None,
            1 => Some(Self::Late),
            2 => Some(Self::Told),
            _ => Some(Self::Torn),
        }
    }
}

/// Outbox and inbox have two slots, which exchanges use in turn: while the device computes with
/// one, the other is emptied.
#[derive(Debug)]
pub(super) struct Boxes {
    outbox: Shared,
    inbox: Shared,
    answered: Shared,
}

impl Boxes {
    /// `None` if the driver has no memory that both sides see.
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
    pub const fn first(slot: usize) -> usize {
        HEADER_WORDS + slot * MAX_WORDS
    }

    /// Outbox, inbox and its flag.
    pub fn memories(&self) -> [&Memory; 3] {
        [&self.outbox.memory, &self.inbox.memory, &self.answered.memory]
    }

    /// Empties all. The device must be idle.
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

    /// Takes partial sums, `words[..from]` of which were taken before; returns how many are there.
    pub fn take(&self, slot: usize, from: usize, words: &mut [u32]) -> usize {
        from + self.outbox.read_present(Self::first(slot) + from, ABSENT, &mut words[from..])
    }

    /// Answers an exchange.
    pub fn answer(&self, slot: usize, words: &[u32], number: u32) {
        self.inbox.write(Self::first(slot), words);
        self.answered.publish(0, number);
    }

    /// Empties the outbox's slot, and the inbox's other one, which the device has read when its
    /// next partial sums are there.
    pub fn empty(&self, slot: usize, [sent, answered]: [usize; 2]) {
        self.outbox.fill(Self::first(slot), sent, ABSENT);
        self.inbox.fill(Self::first(1 - slot), answered, ABSENT);
    }

    /// Tells the device to give up, now and in all exchanges to come.
    pub fn end(&self) {
        self.answered.publish(0, ENDED);
    }
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
