//! How many threads a rank computes with, and on which cores.

use thunder_compute::cpu::pool::allowed_cores;

use super::spec::{LocalRank, SpecError};

/// Threads of one rank at most.
pub const MAX_THREADS: usize = 1024;

/// The cores that this process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCores {
    /// Cores that the process may load, by its affinity and its CPU quota.
    pub usable: usize,
    /// Cores that threads can be pinned to; 0 where the system does not tell.
    pub pinnable: usize,
}

impl HostCores {
    /// Asks the system.
    pub fn detect() -> Self {
        let usable = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { usable, pinnable: allowed_cores().len() }
    }
}

/// The threads of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPlacement {
    /// Threads that compute.
    pub threads: usize,
    /// Threads that pack weights while the model loads.
    pub packing_threads: usize,
    /// First core of the rank's own run of cores; `None`: the threads are not pinned.
    pub first_core: Option<usize>,
}

impl ThreadPlacement {
    /// Places the threads of one rank: `asked` of them, or an equal share of the host's cores. Only
    /// the ranks on this host share its cores, however many ranks the group has elsewhere.
    ///
    /// # Errors
    /// When `asked` is not 1 to [`MAX_THREADS`].
    pub fn new(
        cores: HostCores,
        local: LocalRank,
        asked: Option<usize>,
        pin: bool,
    ) -> Result<Self, SpecError> {
        let share = (cores.usable / local.count.max(1)).max(1);
        let threads = asked.unwrap_or(share);
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(SpecError::Threads { threads });
        }
        let has_own_cores = pin && threads * local.count <= cores.pinnable;
        let first_core = has_own_cores.then_some(local.index * threads);
        Ok(Self { threads, packing_threads: share, first_core })
    }
}

/// Compute threads of a group, as rank 0 counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadCounts {
    /// On rank 0's host.
    pub on_host: usize,
    /// On all hosts.
    pub in_group: usize,
}

impl ThreadCounts {
    /// Counts from the threads of each rank. Ranks on one host have equal numbers, so rank 0's
    /// stands for its neighbours.
    pub fn new(of_each_rank: &[usize], local: LocalRank) -> Self {
        let own = of_each_rank.first().copied().unwrap_or(0);
        Self { on_host: own * local.count, in_group: of_each_rank.iter().sum() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: HostCores = HostCores { usable: 16, pinnable: 16 };

    fn local(index: usize, count: usize) -> LocalRank {
        LocalRank { index, count }
    }

    #[test]
    fn two_hosts_with_two_ranks_each_use_all_cores_of_both() {
        let ranks = [local(0, 2), local(1, 2), local(0, 2), local(1, 2)];
        let placed = ranks.map(|rank| ThreadPlacement::new(HOST, rank, None, true).expect("8 threads"));
        assert_eq!(placed.map(|rank| rank.threads), [8; 4]);
        assert_eq!(placed.map(|rank| rank.first_core), [Some(0), Some(8), Some(0), Some(8)]);
        let counts = ThreadCounts::new(&placed.map(|rank| rank.threads), ranks[0]);
        assert_eq!(counts, ThreadCounts { on_host: 16, in_group: 32 });
    }

    #[test]
    fn one_hosts_ranks_divide_its_cores() {
        for (count, threads) in [(1, 16), (2, 8), (3, 5), (16, 1), (40, 1)] {
            let placed = ThreadPlacement::new(HOST, local(0, count), None, false).expect("at least 1");
            assert_eq!((placed.threads, placed.packing_threads), (threads, threads), "{count} ranks");
        }
    }

    #[test]
    fn asking_for_threads_does_not_change_those_that_pack() {
        let placed = ThreadPlacement::new(HOST, local(1, 2), Some(3), true).expect("3 threads");
        assert_eq!(placed, ThreadPlacement { threads: 3, packing_threads: 8, first_core: Some(3) });
    }

    #[test]
    fn threads_float_unless_each_can_have_a_core() {
        let first = |cores, asked, pin| {
            ThreadPlacement::new(cores, local(1, 2), asked, pin).expect("in range").first_core
        };
        assert_eq!(first(HOST, Some(8), true), Some(8));
        assert_eq!(first(HOST, Some(8), false), None);
        assert_eq!(first(HOST, Some(9), true), None);
        assert_eq!(first(HostCores { usable: 16, pinnable: 0 }, None, true), None);
    }

    #[test]
    fn numbers_of_threads_have_bounds() {
        for threads in [0, MAX_THREADS + 1] {
            let placed = ThreadPlacement::new(HOST, LocalRank::ONLY, Some(threads), false);
            assert_eq!(placed, Err(SpecError::Threads { threads }));
        }
    }
}
