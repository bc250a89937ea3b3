//! How many threads a rank computes with, and on which cores.

use super::places::RankPlace;
use super::spec::SpecError;

/// Maximum threads of one rank.
pub const MAX_THREADS: usize = 1024;

/// The threads of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPlacement {
    /// Threads that compute.
    pub threads: usize,
    /// Threads that pack weights while the model loads.
    pub packing_threads: usize,
    /// The first of the rank's consecutive cores; `None`: the threads are not pinned.
    pub first_core: Option<usize>,
}

impl ThreadPlacement {
    /// Places the threads of rank `rank`: `asked` threads, or one for each core of its share. Ranks
    /// that may run on the same cores divide those evenly, however they were started.
    ///
    /// # Errors
    /// If `asked` is not 1 to [`MAX_THREADS`].
    pub fn new(
        places: &[RankPlace],
        rank: usize,
        asked: Option<usize>,
        pin: bool,
    ) -> Result<Self, SpecError> {
        let own = &places[rank];
        let share = share(places, own);
        let threads = asked.unwrap_or(share);
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(SpecError::Threads { threads });
        }
        let sharers: Vec<usize> = (0..places.len()).filter(|rank| own.shares_cores(&places[*rank])).collect();
        let are_alike = sharers.iter().all(|sharer| places[*sharer].cores == own.cores);
        let has_own_cores = pin && are_alike && threads * sharers.len() <= own.cores.len();
        let index = sharers.iter().position(|sharer| *sharer == rank).unwrap_or(0);
        let first_core = has_own_cores.then_some(index * threads);
        Ok(Self { threads, packing_threads: share, first_core })
    }
}

/// The cores of a rank: its part of each core that it may run on, up to its part of its container's
/// CPU quota.
fn share(places: &[RankPlace], own: &RankPlace) -> usize {
    let mut users: Vec<usize> = own
        .cores
        .iter()
        .map(|core| places.iter().filter(|p| p.machine == own.machine && p.cores.contains(core)).count())
        .collect();
    users.sort_unstable();
    // Counts whole cores among n equal users, because rounding could lose one in a sum of
    // fractions.
    let of_cores: usize = users.chunk_by(|a, b| a == b).map(|alike| alike.len() / alike[0].max(1)).sum();
    let of_quota = if own.usable < own.cores.len() {
        own.usable / places.iter().filter(|place| place.host == own.host).count().max(1)
    } else {
        own.usable
    };
    of_cores.min(of_quota).max(1)
}

/// Compute threads of a group, as rank 0 counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadCounts {
    /// On rank 0's machine.
    pub on_host: usize,
    /// On all machines.
    pub in_group: usize,
}

impl ThreadCounts {
    /// Counts from the threads of each rank.
    pub fn new(of_each_rank: &[usize], places: &[RankPlace]) -> Self {
        let on_host = of_each_rank.iter().zip(places).filter(|(_, place)| place.machine == places[0].machine);
        Self { on_host: on_host.map(|(threads, _)| threads).sum(), in_group: of_each_rank.iter().sum() }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn place(machine: u64, cores: Range<usize>) -> RankPlace {
        RankPlace { machine, host: machine, usable: cores.len(), cores: cores.collect() }
    }

    fn threads(places: &[RankPlace]) -> Vec<usize> {
        let placed = |rank| ThreadPlacement::new(places, rank, None, false).expect("in range");
        (0..places.len()).map(|rank| placed(rank).threads).collect()
    }

    #[test]
    fn two_machines_with_two_ranks_each_use_all_cores_of_both() {
        let places = [0, 0, 1, 1].map(|machine| place(machine, 0..16));
        let placed: Vec<_> =
            (0..4).map(|rank| ThreadPlacement::new(&places, rank, None, true).expect("8 threads")).collect();
        assert!(placed.iter().all(|rank| rank.threads == 8));
        let first: Vec<_> = placed.iter().map(|rank| rank.first_core).collect();
        assert_eq!(first, [Some(0), Some(8), Some(0), Some(8)]);
        let counts = ThreadCounts::new(&threads(&places), &places);
        assert_eq!(counts, ThreadCounts { on_host: 16, in_group: 32 });
    }

    #[test]
    fn one_machines_ranks_divide_its_cores() {
        for (count, share) in [(1, 16), (2, 8), (3, 5), (16, 1), (40, 1)] {
            let places = vec![place(0, 0..16); count];
            assert_eq!(threads(&places), vec![share; count], "{count} ranks");
        }
    }

    #[test]
    fn ranks_in_containers_with_cores_of_their_own_share_nothing() {
        assert_eq!(threads(&[place(0, 0..8), place(0, 8..16)]), [8, 8]);
        // The second rank's cores are half of the first rank's.
        assert_eq!(threads(&[place(0, 0..16), place(0, 8..16)]), [12, 4]);
    }

    #[test]
    fn a_cpu_quota_is_divided_within_its_container() {
        let limited = |host| RankPlace { host, usable: 4, ..place(0, 0..16) };
        assert_eq!(threads(&[limited(7), limited(7), place(0, 0..16)]), [2, 2, 5]);
        assert_eq!(threads(&[limited(7), limited(8)]), [4, 4], "each container has its own quota");
    }

    #[test]
    fn asking_for_threads_does_not_change_those_that_pack() {
        let places = vec![place(0, 0..16); 2];
        let placed = ThreadPlacement::new(&places, 1, Some(3), true).expect("3 threads");
        assert_eq!(placed, ThreadPlacement { threads: 3, packing_threads: 8, first_core: Some(3) });
    }

    #[test]
    fn threads_float_unless_each_can_have_a_core() {
        let first = |places: &[RankPlace], asked, pin| {
            ThreadPlacement::new(places, 1, asked, pin).expect("in range").first_core
        };
        let alike = vec![place(0, 0..16); 2];
        assert_eq!(first(&alike, Some(8), true), Some(8));
        assert_eq!(first(&alike, Some(8), false), None);
        assert_eq!(first(&alike, Some(9), true), None);
        assert_eq!(first(&[place(0, 0..16), place(0, 8..16)], None, true), None);
        assert_eq!(first(&[place(0, 0..8), place(0, 8..16)], None, true), Some(0));
    }

    #[test]
    fn numbers_of_threads_have_bounds() {
        for threads in [0, MAX_THREADS + 1] {
            let placed = ThreadPlacement::new(&[place(0, 0..16)], 0, Some(threads), false);
            assert_eq!(placed, Err(SpecError::Threads { threads }));
        }
    }
}
