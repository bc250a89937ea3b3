//! Blocks on disk for random workloads. Some get lost, and some cannot be read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use thunder_testing::Random;

use super::fake_model::{ADAPTERS, FakeModel};
use crate::disk::Names;
use crate::scheduler::{Scheduler, Stored};
use crate::transfer::{BlockName, NOWHERE, Part, Transfer};

type Files = Arc<Mutex<BTreeMap<(BlockName, Part), Vec<u64>>>>;

/// The files of all ranks.
pub struct FakeDisk {
    files: Files,
    transfers: Vec<Transfer>,
    /// Number of tokens read.
    pub read: usize,
}

struct FakeStored(Files, Names);

impl Stored for FakeStored {
    fn names(&self, tokens: &[u32], adapter: u32) -> Vec<BlockName> {
        self.1.of(tokens, adapter)
    }

    fn holds(&self, name: &BlockName, part: Part) -> bool {
        self.0.lock().unwrap().contains_key(&(*name, part))
    }
}

impl FakeDisk {
    pub fn new() -> Self {
        Self { files: Files::default(), transfers: Vec::new(), read: 0 }
    }

    /// The scheduler's view.
    pub fn stored(&self) -> Box<dyn Stored> {
        let adapters: Vec<[u8; 32]> = (1..=ADAPTERS as u8).map(|adapter| [adapter; 32]).collect();
        Box::new(FakeStored(self.files.clone(), Names::new(&[], &adapters)))
    }

    /// Writes what was recorded. A file always has the same bytes.
    pub fn store(&mut self, scheduler: &mut Scheduler, model: &mut FakeModel, random: &mut Random) {
        scheduler.take_noted(&mut self.transfers);
        let mut files = self.files.lock().unwrap();
        for transfer in self.transfers.iter().filter(|transfer| transfer.place != NOWHERE) {
            let numbers = model.cached_at(transfer).to_vec();
            // Some get lost, as with a full queue or disk.
            if random.below(8) == 0 {
                files.remove(&(transfer.name, transfer.part));
                continue;
            }
            let before = files.insert((transfer.name, transfer.part), numbers.clone());
            assert!(before.is_none_or(|before| before == numbers), "a block with two contents");
        }
    }

    /// Reads the blocks that the oldest prompt waits for, or a part of them.
    pub fn load(&mut self, scheduler: &mut Scheduler, model: &mut FakeModel, random: &mut Random) {
        if !scheduler.begin_reading(1 + random.below(3) as usize, &mut self.transfers) {
            return;
        }
        let files = self.files.lock().unwrap();
        let mut count = 0;
        for transfer in &self.transfers {
            let Some(numbers) = files.get(&(transfer.name, transfer.part)) else { break };
            if random.below(12) == 0 {
                break;
            }
            model.cached_at(transfer).copy_from_slice(numbers);
            count += 1;
        }
        drop(files);
        self.read += scheduler.finish_reading(count);
    }
}
