//! The arithmetic of credits: how many frames may be sent, and when the peer must be told of freed ones. All counts
//! are totals since the start, modulo 2^32.

/// Frames kept back for credit returns. With one, both sides could spend their last credit on telling the other of
/// freed frames before either hears of it; with two, the first return has always come back before the third is due.
const RESERVE: u32 = 2;

/// The fewest slots for which the reserve leaves room to work.
pub(super) const MIN_SLOTS: u32 = 4 * RESERVE;

/// One lane's accounts, both directions.
#[derive(Debug)]
pub(super) struct Credits {
    /// The peer's slots, and what was sent into them and freed there.
    peer_slots: u32,
    sent: u32,
    peer_freed: u32,
    /// Our slots, what was freed of them, and how much of that the peer was told.
    slots: u32,
    freed: u32,
    told: u32,
    /// Returns travel in frames, which take credits themselves.
    in_band: bool,
}

impl Credits {
    pub(super) fn new(slots: u32, peer_slots: u32, in_band: bool) -> Self {
        Self { peer_slots, sent: 0, peer_freed: 0, slots, freed: 0, told: 0, in_band }
    }

    /// The peer's slots that are free, as far as is known here.
    pub(super) fn available(&self) -> u32 {
        self.peer_slots - self.sent.wrapping_sub(self.peer_freed)
    }

    /// Data may be sent.
    pub(super) fn allow_data(&self) -> bool {
        self.available() > if self.in_band { RESERVE } else { 0 }
    }

    /// A frame without data may be sent.
    pub(super) fn allow_control(&self) -> bool {
        self.available() > 0
    }

    /// The number of the next frame.
    pub(super) fn next_seq(&self) -> u32 {
        self.sent
    }

    /// A frame was sent.
    pub(super) fn on_sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// The peer was told of all that is freed; the total to tell.
    pub(super) fn tell(&mut self) -> u32 {
        self.told = self.freed;
        self.freed
    }

    /// A slot here is free again.
    pub(super) fn on_freed(&mut self) {
        self.freed = self.freed.wrapping_add(1);
    }

    /// Half the slots are freed without the peer's knowing.
    pub(super) fn owes(&self) -> bool {
        self.freed.wrapping_sub(self.told) >= self.slots.div_ceil(2)
    }

    /// The peer's total. `false` if it cannot be: more than was sent. An old total is of no interest.
    pub(super) fn on_told(&mut self, peer_freed: u32) -> bool {
        let step = peer_freed.wrapping_sub(self.peer_freed);
        let unfreed = self.sent.wrapping_sub(self.peer_freed);
        if step <= unfreed {
            self.peer_freed = peer_freed;
            return true;
        }
        step > u32::MAX / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use thunder_testing::Random;

    #[test]
    fn totals_wrap_and_impossible_ones_are_refused() {
        let mut credits = Credits::new(8, 8, true);
        credits.sent = u32::MAX - 1;
        credits.peer_freed = u32::MAX - 1;
        for _ in 0..6 {
            assert!(credits.allow_data());
            credits.on_sent();
        }
        assert!(!credits.allow_data() && credits.allow_control());
        assert!(credits.on_told(2), "4 freed, across the wrap");
        assert!(credits.allow_data());
        assert!(credits.on_told(u32::MAX), "an old total is ignored");
        assert_eq!(credits.available(), 6);
        assert!(!credits.on_told(5), "5 is one more than was sent");
    }

    /// Two sides, frames in flight, in every order that a seeded random walk takes: neither ever sends into a slot that
    /// is not free, and whenever both readers read on, both writers get on.
    #[test]
    fn no_overrun_and_no_deadlock_whatever_the_order() {
        struct Side {
            credits: Credits,
            /// Frames on their way to this side: the total of freed frames that each carries, and whether it is data.
            wire: VecDeque<(u32, bool)>,
            unread: u32,
            read: u64,
        }
        let mut random = Random::new(1);
        for slots in [MIN_SLOTS, 9, 32] {
            let side = || Side {
                credits: Credits::new(slots, slots, true),
                wire: VecDeque::new(),
                unread: 0,
                read: 0,
            };
            let mut sides = [side(), side()];
            for step in 0..200_000 {
                let me = random.below(2) as usize;
                // Long phases in which one side does not read, then both do.
                let reads = (step / 1000) % 3 != me as u64;
                let [a, b] = &mut sides;
                let (here, there) = if me == 0 { (a, b) } else { (b, a) };
                match random.below(3) {
                    0 if here.credits.allow_data() => {
                        here.credits.on_sent();
                        there.wire.push_back((here.credits.tell(), true));
                    }
                    1 => {
                        if let Some((freed, data)) = here.wire.pop_front() {
                            assert!(here.credits.on_told(freed));
                            if data { here.unread += 1 } else { here.credits.on_freed() }
                        }
                    }
                    2 if reads && here.unread > 0 => {
                        here.unread -= 1;
                        here.read += 1;
                        here.credits.on_freed();
                    }
                    _ => {}
                }
                if here.credits.owes() && here.credits.allow_control() {
                    here.credits.on_sent();
                    there.wire.push_back((here.credits.tell(), false));
                }
                for side in &sides {
                    assert!(side.unread + side.wire.len() as u32 <= slots, "{slots} slots overrun");
                }
            }
            for side in &sides {
                assert!(side.read > 10_000, "{slots} slots: only {} frames got through", side.read);
            }
        }
    }
}
