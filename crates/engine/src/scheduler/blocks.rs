//! The free blocks of the paged KV cache.

use thunder_compute::step::KV_BLOCK_TOKENS;

/// Blocks of [`KV_BLOCK_TOKENS`] tokens, numbered from 0. A block is free or in one sequence's
/// table.
#[derive(Debug)]
pub(super) struct BlockPool {
    /// Free blocks. The next one to take is last.
    pub(super) free: Vec<u32>,
}

impl BlockPool {
    /// `count` free blocks.
    pub fn new(count: usize) -> Self {
        // The lowest is taken first, so that an engine with few sequences touches little memory.
        Self { free: (0..count as u32).rev().collect() }
    }

    /// Extends a table until it holds `tokens` tokens. If too few blocks are free, takes none and
    /// returns false.
    pub fn extend(&mut self, table: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = tokens.div_ceil(KV_BLOCK_TOKENS).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        table.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Frees a table's blocks and empties the table.
    pub fn release(&mut self, table: &mut Vec<u32>) {
        self.free.extend(table.drain(..).rev());
    }

    /// Tokens that the free blocks hold.
    pub fn free_tokens(&self) -> usize {
        self.free.len() * KV_BLOCK_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_taken_and_returned() {
        let mut blocks = BlockPool::new(4);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(blocks.extend(&mut a, KV_BLOCK_TOKENS + 1));
        assert_eq!(a, [0, 1]);
        assert!(!blocks.extend(&mut b, 3 * KV_BLOCK_TOKENS), "only two are free");
        assert!(b.is_empty());
        assert!(blocks.extend(&mut b, 2 * KV_BLOCK_TOKENS));
        assert!(blocks.extend(&mut a, 2 * KV_BLOCK_TOKENS), "the table holds two blocks already");
        blocks.release(&mut a);
        assert_eq!(blocks.free_tokens(), 2 * KV_BLOCK_TOKENS);
    }
}
