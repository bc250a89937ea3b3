//! The blocks of the paged KV cache: free, in the tables of sequences, or kept for prompts with the
//! same beginning.
//!
//! Kept blocks form a tree for each adapter. A block's key consists of the previous block and its
//! own tokens, so equal prefixes find the same blocks, and different ones never do. A table begins
//! with kept blocks, which it may share, and continues with its own blocks; a sequence writes only
//! to its own.

use std::collections::{BTreeSet, HashMap};

use thunder_compute::step::KV_BLOCK_TOKENS;

use super::snapshots::Snapshots;
use super::stored::DiskTier;

/// Number of blocks that a table lacks to hold `tokens` tokens.
pub(super) fn missing(table: &[u32], tokens: usize) -> usize {
    tokens.div_ceil(KV_BLOCK_TOKENS).saturating_sub(table.len())
}

/// Identifies the tokens of a kept block and all tokens before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    before: Before,
    tokens: [u32; KV_BLOCK_TOKENS],
}

/// What is before a kept block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Before {
    /// Nothing: it is a prompt's first block, computed with this adapter.
    Adapter(u32),
    Block(u32),
}

impl Before {
    fn of(block: Option<u32>, adapter: u32) -> Self {
        block.map_or(Self::Adapter(adapter), Self::Block)
    }

    fn block(self) -> Option<u32> {
        match self {
            Self::Adapter(_) => None,
            Self::Block(block) => Some(block),
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Block {
    /// Number of tables that contain the block.
    tables: u32,
    /// Number of kept blocks that follow this one.
    children: u32,
    /// Set while the block is kept.
    key: Option<Key>,
    /// When the block last left a table, counted in releases.
    used: u64,
    /// The draft model has read the block's tokens into its own cache.
    draft_read: bool,
}

/// Blocks of [`KV_BLOCK_TOKENS`] tokens, numbered from 0.
///
/// A table contains all blocks before each of its kept ones. So if a kept block is in no table,
/// neither is any block after it, and every block in no table can be reused, starting at the end of
/// a branch.
#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<Block>,
    /// Blocks that are neither kept nor in a table. The last one is used next.
    free: Vec<u32>,
    kept: HashMap<Key, u32>,
    /// Kept blocks that are in no table and are followed by no kept block, the least recently used
    /// first.
    leaves: BTreeSet<(u64, u32)>,
    /// Number of blocks in no table.
    unused: usize,
    releases: u64,
    /// The reader for drafts has read all kept blocks.
    pub all_draft_read: bool,
    /// The draft model has states, so it cannot continue after a block that another sequence has
    /// read.
    pub none_draft_read: bool,
    /// For models with states; other models can continue after any kept block.
    pub snapshots: Option<Snapshots>,
    /// Blocks on disk.
    pub disk: Option<DiskTier>,
}

impl BlockPool {
    /// `count` free blocks.
    pub fn new(count: usize, snapshots: Option<Snapshots>) -> Self {
        Self {
            blocks: vec![Block::default(); count],
            // The lowest block is used first, so that an engine with few sequences touches little
            // memory.
            free: (0..count as u32).rev().collect(),
            kept: HashMap::with_capacity(count),
            leaves: BTreeSet::new(),
            unused: count,
            releases: 0,
            all_draft_read: false,
            none_draft_read: false,
            snapshots,
            disk: None,
        }
    }

    /// Extends a table until it holds `tokens` tokens, first with free blocks, then with the least
    /// recently used kept ones. If there are too few, changes nothing and returns false.
    pub fn extend(&mut self, table: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = missing(table, tokens);
        if missing > self.unused {
            return false;
        }
        for _ in 0..missing {
            let Some(block) = self.free.pop().or_else(|| self.forget_oldest()) else { return false };
            (self.block(block).tables, self.block(block).draft_read) = (1, false);
            self.unused -= 1;
            table.push(block);
        }
        true
    }

    /// Removes all blocks from a table. Kept ones stay until their place is needed.
    pub fn release(&mut self, table: &mut Vec<u32>) {
        self.releases += 1;
        let releases = self.releases;
        for number in table.drain(..).rev() {
            let block = self.block(number);
            block.used = releases;
            block.tables -= 1;
            if block.tables > 0 {
                continue;
            }
            self.unused += 1;
            match self.blocks[number as usize].key {
                None => self.free.push(number),
                Some(_) => self.note_leaf(number),
            }
        }
    }

    /// Finds the kept blocks that follow those of `table` (all of which are kept) and hold the
    /// first tokens of `tokens`, computed with this adapter. Returns their number; `found` gets
    /// those after which a sequence can continue.
    pub fn find(&self, table: &[u32], (tokens, adapter): (&[u32], u32), found: &mut Vec<u32>) -> usize {
        found.clear();
        for tokens in tokens.as_chunks().0 {
            let before = Before::of(found.last().or(table.last()).copied(), adapter);
            let key = Key { before, tokens: *tokens };
            let Some(block) = self.kept.get(&key) else { break };
            found.push(*block);
        }
        let known = found.len();
        if let Some(snapshots) = &self.snapshots {
            let last = found.iter().rposition(|block| snapshots.is_at(*block));
            found.truncate(last.map_or(0, |last| last + 1));
        }
        known
    }

    /// Appends kept blocks to a table that has the blocks before them.
    pub fn share(&mut self, table: &mut Vec<u32>, found: &[u32]) {
        for &number in found {
            self.enter_table(number);
            table.push(number);
        }
    }

    /// Keeps the block at `index` of a table. It holds `tokens`, computed with this adapter, and
    /// the blocks before it are kept. If a block with the same tokens is already kept, puts that
    /// one into the table and returns true.
    pub fn keep(
        &mut self,
        table: &mut [u32],
        index: usize,
        (tokens, adapter): ([u32; KV_BLOCK_TOKENS], u32),
    ) -> bool {
        let before = Before::of(index.checked_sub(1).map(|index| table[index]), adapter);
        let (key, own) = (Key { before, tokens }, table[index]);
        if let Some(&kept) = self.kept.get(&key) {
            table[index] = kept;
            self.enter_table(kept);
            *self.block(own) = Block::default();
            self.free.push(own);
            self.unused += 1;
            return true;
        }
        self.kept.insert(key, own);
        self.block(own).key = Some(key);
        if let Some(before) = before.block() {
            self.block(before).children += 1;
        }
        false
    }

    /// Replaces a sequence's pinned snapshot by the one at the end of `block`.
    pub fn change_pin(&mut self, pinned: &mut Option<u32>, block: Option<u32>) {
        let Some(snapshots) = &mut self.snapshots else { return };
        let next = block.and_then(|block| snapshots.pin(block));
        if let Some(before) = std::mem::replace(pinned, next) {
            snapshots.unpin(before);
        }
    }

    /// Records that the draft model has read all tokens of these blocks.
    pub fn note_draft_read(&mut self, blocks: &[u32]) {
        blocks.iter().for_each(|block| self.block(*block).draft_read = true);
    }

    /// True if the draft model has read the block's tokens.
    pub fn is_draft_read(&self, block: u32) -> bool {
        self.all_draft_read || (!self.none_draft_read && self.blocks[block as usize].draft_read)
    }

    /// Blocks of `found` that are in no table.
    pub fn unused_among(&self, found: &[u32]) -> usize {
        found.iter().filter(|block| self.blocks[**block as usize].tables == 0).count()
    }

    /// Blocks in no table: free ones and kept ones.
    pub fn unused(&self) -> usize {
        self.unused
    }

    /// Counts one more table for a kept block.
    fn enter_table(&mut self, number: u32) {
        let block = self.block(number);
        block.tables += 1;
        if block.tables == 1 {
            let entry = (block.used, number);
            self.unused -= 1;
            self.leaves.remove(&entry);
        }
    }

    fn block(&mut self, number: u32) -> &mut Block {
        &mut self.blocks[number as usize]
    }

    fn note_leaf(&mut self, number: u32) {
        let block = &self.blocks[number as usize];
        if block.tables == 0 && block.children == 0 {
            self.leaves.insert((block.used, number));
        }
    }

    /// Stops keeping the least recently used leaf.
    fn forget_oldest(&mut self) -> Option<u32> {
        let (_, number) = self.leaves.pop_first()?;
        let key = self.block(number).key.take()?;
        self.kept.remove(&key);
        if let Some(before) = key.before.block() {
            self.block(before).children -= 1;
            self.note_leaf(before);
        }
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.forget(number);
        }
        Some(number)
    }

    /// True if a block is kept.
    #[cfg(test)]
    pub fn is_kept(&self, block: u32) -> bool {
        self.blocks[block as usize].key.is_some()
    }

    /// Checks the invariants between two calls, and that `tables` are all existing tables.
    #[cfg(test)]
    pub fn check(&self, tables: &[&[u32]]) {
        let mut uses = vec![0; self.blocks.len()];
        for table in tables {
            table.iter().for_each(|block| uses[*block as usize] += 1);
            let kept = table.iter().take_while(|block| self.blocks[**block as usize].key.is_some()).count();
            let own = &table[kept..];
            assert!(
                own.iter().all(|block| self.blocks[*block as usize].key.is_none()),
                "kept ones come first"
            );
            assert!(
                own.iter().all(|block| self.blocks[*block as usize].tables == 1),
                "a sequence's own blocks"
            );
        }
        let mut free = vec![false; self.blocks.len()];
        for block in &self.free {
            assert!(!std::mem::replace(&mut free[*block as usize], true), "a block is free once");
        }
        let mut children = vec![0; self.blocks.len()];
        for (key, number) in &self.kept {
            assert_eq!(self.blocks[*number as usize].key.as_ref(), Some(key));
            if let Some(before) = key.before.block() {
                children[before as usize] += 1;
                let before = &self.blocks[before as usize];
                assert!(before.key.is_some(), "what comes before a kept block is kept");
                assert!(before.tables >= self.blocks[*number as usize].tables);
            }
        }
        let kept = self.blocks.iter().filter(|block| block.key.is_some()).count();
        assert_eq!(kept, self.kept.len());
        for (number, block) in self.blocks.iter().enumerate() {
            assert_eq!((block.tables, block.children), (uses[number], children[number]));
            assert_eq!(free[number], block.tables == 0 && block.key.is_none(), "a block is in one place");
            let is_leaf = block.tables == 0 && block.key.is_some() && block.children == 0;
            assert_eq!(self.leaves.contains(&(block.used, number as u32)), is_leaf);
        }
        assert_eq!(self.unused, uses.iter().filter(|uses| **uses == 0).count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = KV_BLOCK_TOKENS;

    /// A table with a kept block for each of `fills`, the token that fills the block.
    fn kept(pool: &mut BlockPool, fills: &[u32]) -> Vec<u32> {
        let tokens: Vec<u32> = fills.iter().flat_map(|fill| [*fill; SIZE]).collect();
        let (mut table, mut found) = (Vec::new(), Vec::new());
        pool.find(&[], (&tokens, 0), &mut found);
        pool.share(&mut table, &found);
        assert!(pool.extend(&mut table, tokens.len()));
        for (index, fill) in fills.iter().enumerate().skip(found.len()) {
            assert!(!pool.keep(&mut table, index, ([*fill; SIZE], 0)));
        }
        pool.check(&[&table]);
        table
    }

    #[test]
    fn blocks_are_taken_and_returned() {
        let mut pool = BlockPool::new(4, None);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.extend(&mut a, SIZE + 1));
        assert_eq!(a, [0, 1]);
        assert!(!pool.extend(&mut b, 3 * SIZE), "only two are free");
        assert!(b.is_empty());
        assert!(pool.extend(&mut b, 2 * SIZE));
        assert!(pool.extend(&mut a, 2 * SIZE), "the table holds two blocks already");
        pool.release(&mut a);
        assert_eq!(pool.unused(), 2);
        pool.check(&[&b]);
    }

    #[test]
    fn tables_share_the_blocks_of_a_common_prefix() {
        let mut pool = BlockPool::new(8, None);
        let mut a = kept(&mut pool, &[1, 2, 3]);
        pool.release(&mut a);
        let mut b = kept(&mut pool, &[1, 2, 4]);
        let mut c = Vec::new();
        let mut found = Vec::new();
        // The tokens of the last block are known, but not in this place.
        pool.find(&[], (&[[1; SIZE], [4; SIZE]].concat(), 0), &mut found);
        assert_eq!(found, b[..1]);
        pool.find(&[], (&[[1; SIZE], [2; SIZE], [3; SIZE]].concat(), 0), &mut found);
        assert_eq!((found.len(), pool.unused_among(&found)), (3, 1));
        pool.share(&mut c, &found);
        assert_eq!(b[..2], c[..2]);
        pool.check(&[&b, &c]);
        pool.release(&mut b);
        pool.release(&mut c);
        pool.check(&[]);
        assert_eq!(pool.unused(), 8);
    }

    #[test]
    fn the_end_of_the_branch_that_was_longest_unused_is_forgotten_first() {
        let mut pool = BlockPool::new(5, None);
        let mut old = kept(&mut pool, &[1, 2, 3]);
        pool.release(&mut old);
        let mut new = kept(&mut pool, &[1, 5]);
        pool.release(&mut new);
        let (mut table, mut found) = (Vec::new(), Vec::new());
        assert!(pool.extend(&mut table, 2 * SIZE), "one is free, one was kept");
        let mut length = |pool: &BlockPool, fills: [u32; 3]| {
            pool.find(&[], (&fills.map(|fill| [fill; SIZE]).concat(), 0), &mut found);
            found.len()
        };
        assert_eq!((length(&pool, [1, 2, 3]), length(&pool, [1, 5, 0])), (2, 2));
        pool.check(&[&table]);
        assert!(pool.extend(&mut table, 5 * SIZE), "all kept blocks can be taken");
        assert_eq!(length(&pool, [1, 2, 3]), 0);
        pool.check(&[&table]);
    }

    #[test]
    fn a_table_gets_the_kept_block_in_place_of_its_own_with_the_same_tokens() {
        let mut pool = BlockPool::new(4, None);
        let mut first = kept(&mut pool, &[1]);
        let mut second = Vec::new();
        assert!(pool.extend(&mut second, SIZE));
        assert!(pool.keep(&mut second, 0, ([1; SIZE], 0)));
        assert_eq!((first == second, pool.unused()), (true, 3));
        pool.check(&[&first, &second]);
        pool.release(&mut first);
        pool.check(&[&second]);
    }
}
