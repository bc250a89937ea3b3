//! Which blocks of the KV cache are free.

use thunder_compute::step::KV_BLOCK_TOKENS;

/// The blocks of one engine's cache.
#[derive(Debug)]
pub struct Blocks {
    free: Vec<u32>,
}

impl Blocks {
    /// `count` free blocks.
    pub fn new(count: usize) -> Self {
        // The lowest first, so that a quiet engine touches little memory.
        Self { free: (0..count as u32).rev().collect() }
    }

    /// Extends a table until it holds `tokens` tokens. False, and nothing taken, if there are too few blocks.
    pub fn extend(&mut self, table: &mut Vec<u32>, tokens: usize) -> bool {
        let missing = tokens.div_ceil(KV_BLOCK_TOKENS).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        table.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Takes a table's blocks back.
    pub fn release(&mut self, table: &mut Vec<u32>) {
        self.free.extend(table.drain(..).rev());
    }

    /// Tokens that free blocks hold.
    pub fn free_tokens(&self) -> usize {
        self.free.len() * KV_BLOCK_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_taken_and_returned() {
        let mut blocks = Blocks::new(4);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(blocks.extend(&mut a, KV_BLOCK_TOKENS + 1));
        assert_eq!(a, [0, 1]);
        assert!(!blocks.extend(&mut b, 3 * KV_BLOCK_TOKENS), "only two are left");
        assert!(b.is_empty());
        assert!(blocks.extend(&mut b, 2 * KV_BLOCK_TOKENS));
        assert!(blocks.extend(&mut a, 2 * KV_BLOCK_TOKENS), "its blocks have room");
        blocks.release(&mut a);
        assert_eq!(blocks.free_tokens(), 2 * KV_BLOCK_TOKENS);
    }
}
