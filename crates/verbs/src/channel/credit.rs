//! Credit accounting: how many frames may be sent, and when to report freed slots to the peer. All
//! counts are totals since the start, modulo 2^32.

/// Credits kept for frames that return credits. With one, both sides could spend their last credit
/// on a return before either receives the other's. With two, the credit of the first return has
/// always come back before the third return is due.
const RESERVE: u32 = 2;

/// Fewest slots per lane. With fewer, the reserve would leave too few for data.
pub(super) const MIN_SLOTS: u32 = 4 * RESERVE;

/// The credits of one lane, in both directions.
#[derive(Debug)]
pub(super) struct Credits {
    /// The peer's slots, the frames sent into them, and those that the peer reported as freed.
    peer_slots: u32,
    sent: u32,
    peer_freed: u32,
    /// Local slots, the frames freed in them, and those that were reported to the peer.
    slots: u32,
    freed: u32,
    reported: u32,
    /// True if credits return in frames, which take credits themselves.
    in_band: bool,
}

impl Credits {
    pub(super) fn new(slots: u32, peer_slots: u32, in_band: bool) -> Self {
        Self { peer_slots, sent: 0, peer_freed: 0, slots, freed: 0, reported: 0, in_band }
    }

    /// The peer's free slots, as far as this side knows.
    pub(super) fn available(&self) -> u32 {
        self.peer_slots - self.sent.wrapping_sub(self.peer_freed)
    }

    /// True if a data frame may be sent.
    pub(super) fn allow_data(&self) -> bool {
        self.available() > if self.in_band { RESERVE } else { 0 }
    }

    /// True if a frame without data may be sent.
    pub(super) fn allow_control(&self) -> bool {
        self.available() > 0
    }

    /// The lane number of the next frame.
    pub(super) fn next_seq(&self) -> u32 {
        self.sent
    }

    /// Counts a sent frame.
    pub(super) fn on_sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Returns the total of freed slots to send to the peer, and counts them as reported.
    pub(super) fn report_freed(&mut self) -> u32 {
        self.reported = self.freed;
        self.freed
    }

    /// Counts a freed local slot.
    pub(super) fn on_freed(&mut self) {
        self.freed = self.freed.wrapping_add(1);
    }

    /// True if at least half the slots are freed and not reported to the peer.
    pub(super) fn report_is_due(&self) -> bool {
        self.freed.wrapping_sub(self.reported) >= self.slots.div_ceil(2)
    }

    /// Takes in the peer's total of freed slots. False if it is impossible: above the number of
    /// frames sent. A total older than the last is ignored.
    pub(super) fn on_peer_freed(&mut self, peer_freed: u32) -> bool {
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
    fn totals_wrap_around_and_impossible_totals_are_refused() {
        let mut credits = Credits::new(8, 8, true);
        credits.sent = u32::MAX - 1;
        credits.peer_freed = u32::MAX - 1;
        for _ in 0..6 {
            assert!(credits.allow_data());
            credits.on_sent();
        }
        assert!(!credits.allow_data() && credits.allow_control());
        assert!(credits.on_peer_freed(2), "4 freed, across the wrap");
        assert!(credits.allow_data());
        assert!(credits.on_peer_freed(u32::MAX), "an old total is ignored");
        assert_eq!(credits.available(), 6);
        assert!(!credits.on_peer_freed(5), "5 is one more than was sent");
    }

    /// Two sides with frames in flight, in the order of a seeded random walk: no side ever sends
    /// into a slot that is not free, and both writers make progress whenever both readers read.
    #[test]
    fn no_overrun_and_no_deadlock_in_any_order() {
        struct Side {
            credits: Credits,
            /// Frames in flight to this side: the total of freed slots in each, and whether it has
            /// data.
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
                // Long phases in which one side does not read, then both read.
                let reads = (step / 1000) % 3 != me as u64;
                let [a, b] = &mut sides;
                let (here, there) = if me == 0 { (a, b) } else { (b, a) };
                match random.below(3) {
                    0 if here.credits.allow_data() => {
                        here.credits.on_sent();
                        there.wire.push_back((here.credits.report_freed(), true));
                    }
                    1 => {
                        if let Some((freed, data)) = here.wire.pop_front() {
                            assert!(here.credits.on_peer_freed(freed));
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
                if here.credits.report_is_due() && here.credits.allow_control() {
                    here.credits.on_sent();
                    there.wire.push_back((here.credits.report_freed(), false));
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
