//! Computing times of the gateway's threads, and their waits for a core.

use std::fs;

use crate::serve::GATEWAY_THREADS;

/// Sums over the gateway's threads, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ThreadTimes {
    /// On a core.
    pub ran: u64,
    /// Time ready to run, while other threads had the cores.
    pub waited: u64,
}

impl ThreadTimes {
    /// The sums of this process so far; `None` if the system does not report them (only Linux
    /// does).
    pub fn read() -> Option<Self> {
        let mut sum = None;
        for thread in fs::read_dir("/proc/self/task").ok()?.flatten() {
            let read = |file: &str| fs::read_to_string(thread.path().join(file)).ok();
            // A thread may end in the meantime.
            if read("comm").is_some_and(|name| name.trim_end() == GATEWAY_THREADS)
                && let Some(times) = read("schedstat").as_deref().and_then(Self::parse)
            {
                let before: Self = sum.unwrap_or_default();
                sum = Some(Self { ran: before.ran + times.ran, waited: before.waited + times.waited });
            }
        }
        sum
    }

    /// Two of the three numbers of `schedstat`.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(|number| number.parse().ok());
        Some(Self { ran: numbers.next()??, waited: numbers.next()?? })
    }

    /// Adds the differences between two moments.
    pub fn add_between(&mut self, before: Self, after: Self) {
        self.ran += after.ran.saturating_sub(before.ran);
        self.waited += after.waited.saturating_sub(before.waited);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_a_schedstat_are_its_first_two_numbers() {
        let times = ThreadTimes::parse("12345 678 9\n");
        assert_eq!(times, Some(ThreadTimes { ran: 12345, waited: 678 }));
        assert_eq!((ThreadTimes::parse("12345"), ThreadTimes::parse("a b c")), (None, None));
        let mut sum = ThreadTimes { ran: 1, waited: 1 };
        sum.add_between(ThreadTimes { ran: 5, waited: 9 }, ThreadTimes { ran: 7, waited: 8 });
        assert_eq!(sum, ThreadTimes { ran: 3, waited: 1 });
    }
}
