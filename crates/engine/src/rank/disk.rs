//! A rank's part of the prefix cache's tier on disk.

use sha2::{Digest, Sha256};
use thunder_collectives::Group;
use thunder_compute::{Backend, CachePart};

use super::{RankShard, RankWorker};
use crate::disk::{DISK_COUNTS, DiskCache, DiskList, DiskSpec, HeadDisk, Names};
use crate::error::EngineError;
use crate::protocol::Command;
use crate::transfer::{NOWHERE, Part, Transfer};

/// Approximate bytes that a rank reads between two steps, for which decodes wait.
const READ_BYTES: usize = 32 << 20;
/// Bytes of a rank's identity.
const IDENTITY_BYTES: usize = 32;

/// A rank's blocks on disk, and rank 0's requests for them.
pub(super) struct RankDisk {
    cache: DiskCache,
    names: Names,
    /// Maximum blocks that are read between two steps.
    most_blocks: usize,
    /// The transfers of the last message.
    pub transfers: Vec<Transfer>,
}

impl RankDisk {
    /// Opens the rank's folder. All ranks of `world` call this together and exchange what their
    /// blocks' bytes depend on, because sums over ranks make each rank's bytes depend on all ranks.
    pub fn open(spec: &DiskSpec, shard: &RankShard<'_>, world: &mut Group) -> Result<Self, EngineError> {
        let cache = DiskCache::open(spec, world.rank(), world.size())?;
        let mut identities = vec![0; IDENTITY_BYTES * world.size()];
        let counts = vec![IDENTITY_BYTES; world.size()];
        world.all_gather(&identity(spec, shard, world.rank()), &mut identities, &counts)?;
        let adapters: Vec<[u8; 32]> =
            shard.folder.adapters.iter().map(|adapter| adapter.fingerprint()).collect();
        Ok(Self {
            cache,
            names: Names::new(&identities, &adapters),
            most_blocks: READ_BYTES / spec.block_bytes.max(1),
            transfers: Vec::new(),
        })
    }
}

fn identity(spec: &DiskSpec, shard: &RankShard<'_>, rank: usize) -> [u8; IDENTITY_BYTES] {
    let mut hash = Sha256::new();
    let format = shard.capacity.kv_format;
    hash.update(format!(
        "{}\n{:?}\n{:?}\n{format:?}\n{rank}\n",
        spec.identity, shard.folder.spec, shard.plan
    ));
    hash.update(shard.folder.weights.fingerprint());
    hash.finalize().into()
}

impl<B: Backend> RankWorker<B> {
    /// The disk interface of rank 0's scheduler, if there is a disk tier.
    pub(crate) fn head_disk(&self) -> Option<HeadDisk> {
        self.disk.as_ref().map(|disk| HeadDisk::new(disk.cache.list(), disk.names.clone()))
    }

    /// Rank 0's blocks on disk.
    pub(crate) fn disk_list(&self) -> Option<DiskList> {
        self.disk.as_ref().map(|disk| disk.cache.list())
    }

    /// Maximum blocks that are read between two steps.
    pub(crate) fn most_blocks_read(&self) -> usize {
        self.disk.as_ref().map_or(1, |disk| disk.most_blocks.max(1))
    }

    /// On rank 0: makes all ranks record and write blocks.
    ///
    /// # Errors
    /// If a peer was lost, or the backend fails.
    pub(crate) fn store_on_all(&mut self, transfers: &[Transfer]) -> Result<(), EngineError> {
        self.send_transfers(Command::Store, transfers)?;
        self.store_blocks()
    }

    /// On rank 0: makes all ranks read blocks. Returns how many of the first blocks all ranks have
    /// read.
    ///
    /// # Errors
    /// If a peer was lost, or the backend fails.
    pub(crate) fn load_on_all(&mut self, transfers: &[Transfer]) -> Result<usize, EngineError> {
        self.send_transfers(Command::Load, transfers)?;
        let mut least = self.load_blocks()?;
        for rank in 1..self.world.size() {
            let mut count = [0u32];
            // Disks may be slow, so only the rank's liveness limits this wait.
            self.world.recv_idle(rank, &mut count)?;
            least = least.min(count[0]);
        }
        Ok(least as usize)
    }

    /// This rank's disk counters.
    pub(super) fn disk_counts(&self) -> [u64; DISK_COUNTS] {
        self.disk.as_ref().map_or([0; DISK_COUNTS], |disk| disk.cache.list().counters().all())
    }

    /// On rank 0, with no step in flight: queries the disk counters of all other ranks. Returns the
    /// sums.
    ///
    /// # Errors
    /// If a peer was lost.
    pub(crate) fn count_on_others(&mut self) -> Result<[u64; DISK_COUNTS], EngineError> {
        self.send_transfers(Command::CountDisk, &[])?;
        let mut sums = [0; DISK_COUNTS];
        for rank in 1..self.world.size() {
            let mut counts = [0; DISK_COUNTS];
            self.world.recv_idle(rank, &mut counts)?;
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        Ok(sums)
    }

    fn send_transfers(&mut self, command: Command, transfers: &[Transfer]) -> Result<(), EngineError> {
        self.message.begin(command);
        transfers.iter().for_each(|transfer| self.message.push_transfer(transfer));
        self.exchange_step()?;
        Ok(())
    }

    fn cache_part(&self, transfer: &Transfer) -> CachePart {
        match transfer.part {
            Part::Block => CachePart::Block(transfer.place as usize),
            Part::State => CachePart::Slot(self.bounds.slots + transfer.place as usize),
        }
    }

    /// Records the message's blocks as used, and orders those to be written that are not on disk.
    pub(super) fn store_blocks(&mut self) -> Result<(), EngineError> {
        let Some(mut disk) = self.disk.take() else { return Ok(()) };
        // A rank whose disk is too slow leaves blocks out.
        self.backend.take_back_ahead()?;
        for transfer in &disk.transfers {
            let part = self.cache_part(transfer);
            disk.cache.store(transfer, |bytes| self.model.read_cache(&mut self.backend, part, bytes))?;
        }
        self.disk = Some(disk);
        Ok(())
    }

    /// Reads the message's blocks into the caches. Returns how many could be read before the first
    /// failure.
    pub(super) fn load_blocks(&mut self) -> Result<u32, EngineError> {
        let Some(mut disk) = self.disk.take() else { return Ok(0) };
        // A rank may lack blocks.
        self.backend.take_back_ahead()?;
        let (mut count, mut is_whole) = (0, true);
        for transfer in disk.transfers.iter().filter(|transfer| transfer.place != NOWHERE) {
            let part = self.cache_part(transfer);
            // After a block that cannot be read, the others are still checked, so that all damaged
            // ones are written again.
            let Some(bytes) = disk.cache.load(transfer) else {
                is_whole = false;
                continue;
            };
            if is_whole && !self.model.write_cache(&mut self.backend, part, bytes)? {
                disk.cache.refuse_size(transfer);
                is_whole = false;
            }
            count += u32::from(is_whole);
        }
        self.disk = Some(disk);
        Ok(count)
    }
}
