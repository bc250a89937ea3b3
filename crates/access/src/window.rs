//! Counts within any 60 s, in slices of a quarter of a second.

/// Time of a slice.
const SLICE_MS: u64 = 250;
/// Number of slices that count: one more than a minute has. A count stays for 60 to 60.25 s, so no
/// 60 s contain more than the limit.
const SLICES: u64 = 60_000 / SLICE_MS + 1;

/// What was counted within the last minute.
#[derive(Debug, Clone, Default)]
pub(crate) struct Window {
    /// Empty until the first count.
    slices: Vec<u64>,
    newest: u64,
    total: u64,
}

/// The slice of a count.
pub(crate) type Slice = u64;

impl Window {
    /// What counts now.
    pub fn total(&mut self, now_ms: u64) -> u64 {
        let slice = now_ms / SLICE_MS;
        if slice > self.newest {
            let over = (slice - self.newest).min(SLICES);
            for step in 1..=over {
                let at = self.place(self.newest + step);
                if let Some(count) = self.slices.get_mut(at) {
                    self.total -= std::mem::take(count);
                }
            }
            self.newest = slice;
        }
        self.total
    }

    /// Counts; returns the slice, to correct it later.
    pub fn add(&mut self, now_ms: u64, count: u64) -> Slice {
        self.total(now_ms);
        if self.slices.is_empty() {
            self.slices = vec![0; SLICES as usize];
        }
        let at = self.place(self.newest);
        self.slices[at] = self.slices[at].saturating_add(count);
        self.total = self.total.saturating_add(count);
        self.newest
    }

    /// The present counts in parts, each with its age in milliseconds.
    pub fn parts(&mut self, now_ms: u64) -> Vec<(u64, u64)> {
        self.total(now_ms);
        let counted = |age: &u64| self.slices.get(self.place(self.newest - age)).copied().unwrap_or(0);
        let ages = (0..SLICES).filter(|age| *age <= self.newest);
        ages.map(|age| (age * SLICE_MS, counted(&age))).filter(|(_, count)| *count > 0).collect()
    }

    /// Adds a count that another window made `age_ms` ago.
    pub fn add_earlier(&mut self, now_ms: u64, age_ms: u64, count: u64) {
        let age = age_ms / SLICE_MS;
        if count == 0 || age >= SLICES {
            return;
        }
        // If the clock began after the count was made, the count goes to the first slice.
        let slice = self.add(now_ms, 0).saturating_sub(age);
        let at = self.place(slice);
        self.slices[at] = self.slices[at].saturating_add(count);
        self.total = self.total.saturating_add(count);
    }

    /// Removes a count from `slice`, if the slice still counts.
    pub fn take_back(&mut self, now_ms: u64, slice: Slice, count: u64) {
        self.total(now_ms);
        if slice + SLICES <= self.newest || slice > self.newest {
            return;
        }
        let at = self.place(slice);
        if let Some(counted) = self.slices.get_mut(at) {
            let count = count.min(*counted);
            *counted -= count;
            self.total -= count;
        }
    }

    /// Milliseconds until at most `left` counts.
    pub fn wait_until(&mut self, now_ms: u64, left: u64) -> u64 {
        let mut total = self.total(now_ms);
        if total <= left {
            return 0;
        }
        let oldest = self.newest.saturating_sub(SLICES - 1);
        for slice in oldest..=self.newest {
            if total <= left {
                return ((slice + SLICES - 1) * SLICE_MS).saturating_sub(now_ms);
            }
            total -= self.slices.get(self.place(slice)).copied().unwrap_or(0);
        }
        if total <= left { ((self.newest + SLICES) * SLICE_MS).saturating_sub(now_ms) } else { 0 }
    }

    fn place(&self, slice: u64) -> usize {
        (slice % SLICES) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_was_counted_ends_after_a_minute() {
        let mut window = Window::default();
        window.add(1000, 3);
        window.add(31_000, 4);
        assert_eq!((window.total(60_999), window.total(61_250)), (7, 4));
        assert_eq!(window.wait_until(61_250, 4), 0);
        assert_eq!(window.wait_until(61_250, 3), 91_250 - 61_250);
        assert_eq!(window.total(10_000_000), 0);
    }

    #[test]
    fn a_correction_reaches_the_slice_it_is_for() {
        let mut window = Window::default();
        let slice = window.add(0, 10);
        window.take_back(30_000, slice, 4);
        assert_eq!(window.total(30_000), 6);
        window.take_back(70_000, slice, 6);
        assert_eq!(window.total(70_000), 0);
    }

    proptest! {
        /// A window that imports the parts of another counts the same, for at most one slice
        /// longer.
        #[test]
        fn parts_carry_a_window_to_another_clock(
            events in prop::collection::vec((0u64..70_000, 1u64..50), 0..40), shift in 100_000u64..200_000
        ) {
            let (mut from, mut to) = (Window::default(), Window::default());
            let mut sorted = events;
            sorted.sort_unstable();
            for (at, count) in sorted {
                from.add(at, count);
            }
            let now = 70_000;
            for (age, count) in from.parts(now) {
                to.add_earlier(now + shift, age, count);
            }
            prop_assert_eq!(to.total(now + shift), from.total(now));
            let later = now + 30_000;
            let within = from.clone().total(later - SLICE_MS).max(from.total(later));
            prop_assert!(to.total(later + shift) <= within);
        }
    }

    proptest! {
        /// Compared with a list of all events: never less than the last 60 s, and never more than
        /// the last 60.25 s.
        #[test]
        fn it_counts_what_a_list_of_events_counts(steps in prop::collection::vec((0u64..20_000, 0u64..50), 1..80)) {
            let (mut window, mut events, mut now) = (Window::default(), VecDeque::new(), 0);
            for (pause, count) in steps {
                now += pause;
                window.add(now, count);
                events.push_back((now, count));
                let within = |ms: u64| -> u64 {
                    events.iter().filter(|(at, _)| at + ms > now).map(|(_, count)| count).sum()
                };
                let total = window.total(now);
                prop_assert!(total >= within(60_000) && total <= within(60_000 + SLICE_MS));
                let wait = window.wait_until(now, total / 2);
                let mut later = window.clone();
                prop_assert!(later.total(now + wait) <= total / 2);
                prop_assert!(wait == 0 || window.clone().total(now + wait - 1) > total / 2);
            }
        }
    }
}
