//! Copies of sequences' fixed-size states at the ends of kept blocks. A prompt can continue after
//! kept blocks only if there is such a copy.

/// Copies of states, numbered from 0. Ranks hold them in slots after those of sequences.
#[derive(Debug)]
pub(super) struct Snapshots {
    all: Vec<Snapshot>,
    /// For each block, the snapshot at its end.
    of_block: Vec<Option<u32>>,
    uses: u64,
}

#[derive(Debug, Clone, Default)]
struct Snapshot {
    block: Option<u32>,
    /// When it was last saved or restored, counted in uses of all snapshots.
    used: u64,
    /// Number of sequences whose next step restores it.
    pins: u32,
}

impl Snapshots {
    /// Space for `count` snapshots at the ends of `blocks` blocks.
    pub fn new(count: usize, blocks: usize) -> Self {
        Self { all: vec![Snapshot::default(); count], of_block: vec![None; blocks], uses: 0 }
    }

    /// True if there is a snapshot at the end of a block.
    pub fn is_at(&self, block: u32) -> bool {
        self.of_block[block as usize].is_some()
    }

    /// The snapshot at the end of a block, which stays until [`Snapshots::unpin`].
    pub fn pin(&mut self, block: u32) -> Option<u32> {
        let number = self.of_block[block as usize]?;
        self.all[number as usize].pins += 1;
        self.touch(number);
        Some(number)
    }

    /// Pins a pinned snapshot once more.
    pub fn pin_again(&mut self, number: u32) {
        self.all[number as usize].pins += 1;
    }

    pub fn unpin(&mut self, number: u32) {
        self.all[number as usize].pins -= 1;
    }

    /// Space for a new snapshot, pinned until [`Snapshots::place`]: a free one, or the least
    /// recently used one. `None` if all are pinned.
    pub fn take(&mut self) -> Option<u32> {
        let numbered = self.all.iter().enumerate().filter(|(_, snapshot)| snapshot.pins == 0);
        let (number, _) = numbered.min_by_key(|(_, snapshot)| (snapshot.block.is_some(), snapshot.used))?;
        if let Some(before) = self.all[number].block.take() {
            self.of_block[before as usize] = None;
        }
        self.all[number].pins = 1;
        Some(number as u32)
    }

    /// Records that a snapshot from [`Snapshots::take`] is the state at the end of a block. If
    /// there already is one, frees the new one.
    pub fn place(&mut self, number: u32, block: u32) {
        self.unpin(number);
        let place = &mut self.of_block[block as usize];
        if place.is_none() {
            *place = Some(number);
            self.all[number as usize].block = Some(block);
            self.touch(number);
        }
    }

    /// Frees the snapshot at the end of a block that is no longer kept.
    pub fn forget(&mut self, block: u32) {
        if let Some(number) = self.of_block[block as usize].take() {
            self.all[number as usize].block = None;
        }
    }

    fn touch(&mut self, number: u32) {
        self.uses += 1;
        self.all[number as usize].used = self.uses;
    }

    /// Checks that `pinned` contains all pins, and that each snapshot is at the end of one block.
    #[cfg(test)]
    pub fn check(&self, pinned: impl Iterator<Item = u32>, is_kept: impl Fn(u32) -> bool) {
        let mut pins = vec![0; self.all.len()];
        pinned.for_each(|number| pins[number as usize] += 1);
        for (number, snapshot) in self.all.iter().enumerate() {
            assert_eq!(snapshot.pins, pins[number]);
            if let Some(block) = snapshot.block {
                assert_eq!(self.of_block[block as usize], Some(number as u32));
                assert!(is_kept(block), "a snapshot at the end of a block that is not kept");
            }
        }
        let placed = self.all.iter().filter(|snapshot| snapshot.block.is_some()).count();
        assert_eq!(self.of_block.iter().flatten().count(), placed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(snapshots: &mut Snapshots, block: u32) -> Option<u32> {
        let number = snapshots.take()?;
        snapshots.place(number, block);
        Some(number)
    }

    #[test]
    fn the_longest_unused_snapshot_that_nobody_waits_for_is_replaced() {
        let mut snapshots = Snapshots::new(2, 8);
        assert_eq!([5, 6].map(|block| save(&mut snapshots, block)), [Some(0), Some(1)]);
        assert_eq!(snapshots.pin(5), Some(0));
        assert_eq!(save(&mut snapshots, 7), Some(1), "block 5's is pinned");
        assert!(snapshots.is_at(5) && !snapshots.is_at(6) && snapshots.is_at(7));
        snapshots.pin(7);
        assert_eq!(snapshots.take(), None);
        snapshots.unpin(0);
        snapshots.unpin(1);
        assert_eq!(save(&mut snapshots, 4), Some(0));
        snapshots.forget(7);
        assert_eq!(save(&mut snapshots, 4), Some(1), "a free one first");
        assert_eq!(save(&mut snapshots, 3), Some(1), "block 4 has one already");
    }
}
