//! A rank's part of the prefix cache's tier on disk.

use std::time::UNIX_EPOCH;

use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_model::ShardFootprint;

use super::places::RankPlace;
use super::spec::EngineSpec;
use crate::DiskSpec;

/// Approximate number of tokens for which one state of a prompt is kept.
const TOKENS_PER_STATE: u64 = 1024;

/// A rank's part of the disk cache, if the engine has one. `computes` names the device and its
/// instructions.
pub(super) fn disk_spec(
    engine: &EngineSpec,
    rank: usize,
    (footprints, places): (&[ShardFootprint], &[RankPlace]),
    computes: &str,
) -> Option<DiskSpec> {
    let disk = engine.disk_cache.as_ref()?;
    let neighbours = || (0..places.len()).filter(|other| places[*other].host == places[rank].host);
    let block_bytes = |footprint: &ShardFootprint| footprint.kv_bytes_per_token * KV_BLOCK_TOKENS as u64;
    let build = [env!("CARGO_PKG_VERSION").to_owned(), program(), computes.to_owned()];
    // Sums of bytes in place of floats also change the numbers.
    let wire = std::env::var("THUNDER_WIRE").unwrap_or_default();
    Some(DiskSpec {
        folder: disk.folder.clone(),
        limit_bytes: share(disk.bytes, footprints, rank, neighbours()),
        identity: format!("{build:?} {:?} {wire}", engine.activations),
        block_bytes: footprints.iter().map(block_bytes).max().unwrap_or(0) as usize,
        cleans: neighbours().next() == Some(rank),
    })
}

/// A rank's part of the bytes that its host's ranks may use, in proportion to what it keeps of a
/// prompt, so that all ranks drop the same blocks.
fn share(
    bytes: u64,
    footprints: &[ShardFootprint],
    rank: usize,
    neighbours: impl Iterator<Item = usize>,
) -> u64 {
    let kept = |rank: usize| {
        let ShardFootprint { kv_bytes_per_token, state_bytes_per_sequence, .. } = footprints[rank];
        u128::from(kv_bytes_per_token * TOKENS_PER_STATE + state_bytes_per_sequence)
    };
    let all: u128 = neighbours.map(kept).sum();
    let share = (u128::from(bytes) * kept(rank) / all.max(1)) as u64;
    // A rank that keeps nothing of a prompt still has files, which say so.
    share.max(bytes / 1024)
}

/// Identifies this program's file, because another build may compute other bits.
fn program() -> String {
    let metadata = std::env::current_exe().and_then(std::fs::metadata);
    let changed = metadata.as_ref().ok().and_then(|metadata| metadata.modified().ok());
    let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{} bytes of {:?}", metadata.map_or(0, |metadata| metadata.len()), changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_keeps_as_much_as_its_part_of_the_model_needs() {
        let footprint = |kv_bytes_per_token, state_bytes_per_sequence| ShardFootprint {
            kv_bytes_per_token,
            state_bytes_per_sequence,
            ..Default::default()
        };
        let footprints = [footprint(3, 0), footprint(1, 0), footprint(0, 4096)];
        let of = |rank, neighbours: &[usize]| share(8000, &footprints, rank, neighbours.iter().copied());
        assert_eq!([of(0, &[0, 1]), of(1, &[0, 1]), of(2, &[2])], [6000, 2000, 8000]);
        assert_eq!([0, 1, 2].map(|rank| of(rank, &[0, 1, 2])), [3000, 1000, 4000]);
        assert_eq!(share(8192, &[footprint(0, 0)], 0, std::iter::once(0)), 8, "nothing but heads of files");
    }
}
