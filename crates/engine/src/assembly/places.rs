//! Where the ranks of a group run. They tell each other after the group has formed, because other
//! launchers do not say which ranks share a machine.

use sha2::{Digest, Sha256};
use thunder_collectives::{CommError, Group};
use thunder_compute::cpu::pool::allowed_cores;

/// Maximum cores of a machine in these messages.
const MAX_CORES: usize = 1024;
const WORD_BITS: usize = u64::BITS as usize;
/// Words of a place in a message: machine, host, usable cores, and a bit for each core.
const WORDS: usize = 3 + MAX_CORES / WORD_BITS;

/// Where a rank runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlace {
    /// Equal for ranks on one machine, even in different containers.
    pub machine: u64,
    /// Equal for ranks of one host or container, which share its CPU quota and its memory.
    pub host: u64,
    /// Cores that the rank may use, by its affinity and its CPU quota.
    pub usable: usize,
    /// The numbers of the cores on which the rank may run, in ascending order.
    pub cores: Vec<usize>,
}

impl RankPlace {
    /// This process's place. If the system does not report cores (macOS), they are numbered from 0.
    pub fn detect(group: &Group) -> Self {
        let usable = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let cores = Some(allowed_cores()).filter(|cores| !cores.is_empty());
        let mut cores = cores.unwrap_or_else(|| (0..usable).collect());
        cores.retain(|core| *core < MAX_CORES);
        // If the system reports no identity, the rank counts as alone.
        let alone = format!("rank {}", group.rank());
        let machine = group.machine_identity().unwrap_or_else(|_| alone.clone());
        let host = group.host_identity().unwrap_or(alone);
        Self { machine: hash(&machine), host: hash(&host), usable, cores }
    }

    /// The places of all ranks, in rank order. All ranks call this together.
    ///
    /// # Errors
    /// When a rank was lost.
    pub fn gather(group: &mut Group) -> Result<Vec<Self>, CommError> {
        let own = Self::detect(group).to_words();
        let mut all = vec![0u64; WORDS * group.size()];
        let counts = vec![WORDS; group.size()];
        group.all_gather(&own, &mut all, &counts)?;
        Ok(all.chunks_exact(WORDS).map(Self::from_words).collect())
    }

    /// Whether two ranks may run on the same core.
    pub fn shares_cores(&self, other: &Self) -> bool {
        self.machine == other.machine && self.cores.iter().any(|core| other.cores.contains(core))
    }

    fn to_words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[..3].copy_from_slice(&[self.machine, self.host, self.usable as u64]);
        for core in &self.cores {
            words[3 + core / WORD_BITS] |= 1 << (core % WORD_BITS);
        }
        words
    }

    fn from_words(words: &[u64]) -> Self {
        let has = |core: &usize| words[3 + core / WORD_BITS] >> (core % WORD_BITS) & 1 == 1;
        Self {
            machine: words[0],
            host: words[1],
            usable: words[2] as usize,
            cores: (0..MAX_CORES).filter(has).collect(),
        }
    }
}

fn hash(text: &str) -> u64 {
    let digest = Sha256::digest(text);
    u64::from_le_bytes(std::array::from_fn(|index| digest[index]))
}

#[cfg(test)]
mod tests {
    use thunder_collectives::local;

    use super::*;

    #[test]
    fn every_rank_learns_every_ranks_place() {
        let hosts = ["a", "b", "a"];
        let groups = local::groups_with(3, |config| config.host = Some(hosts[config.rank].to_owned()));
        let all = local::run_on(groups.expect("a group"), |mut group| {
            let own = RankPlace::detect(&group);
            let all = RankPlace::gather(&mut group).expect("no rank is lost");
            assert_eq!(all[group.rank()], own);
            all
        });
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
        let places = &all[0];
        assert!(places[0].shares_cores(&places[2]) && !places[0].shares_cores(&places[1]));
    }
}
