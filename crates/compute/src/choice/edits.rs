//! Changes of logits before a token is chosen: penalties, biases, and the tokens that a grammar
//! allows.

/// Logits of tokens that may not be chosen. Finite, so that non-finite logits are still detected.
pub const EXCLUDED: f32 = -1e30;

/// A change of one token's logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenEdit {
    /// The token.
    pub token: u32,
    /// A positive logit is divided by it, another is multiplied with it.
    pub repetition: f32,
    /// Added afterwards.
    pub added: f32,
}

impl TokenEdit {
    /// The logit after the change.
    pub fn of(&self, logit: f32) -> f32 {
        let repeated = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        repeated + self.added
    }
}

/// The changes of one row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowEdits {
    /// Changes of tokens, at most one of each.
    pub tokens: Vec<TokenEdit>,
    /// A bit for each token that may be chosen, from the lowest bit of the first word on; none for
    /// all further tokens. Without words, all tokens may be chosen.
    pub allowed: Vec<u32>,
}

impl RowEdits {
    /// True if nothing changes.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.allowed.is_empty()
    }

    /// Removes all changes.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.allowed.clear();
    }

    /// Changes a row's logits: first those of tokens, then those of tokens that may not be chosen.
    pub fn apply(&self, logits: &mut [f32]) {
        for edit in &self.tokens {
            if let Some(logit) = logits.get_mut(edit.token as usize) {
                *logit = edit.of(*logit);
            }
        }
        if self.allowed.is_empty() {
            return;
        }
        let words = self.allowed.iter().copied().chain(std::iter::repeat(0));
        for (word, logits) in words.zip(logits.chunks_mut(u32::BITS as usize)) {
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word & (1 << bit) == 0 {
                    *logit = EXCLUDED;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_changed_and_then_excluded() {
        let mut logits: Vec<f32> = (0..70).map(|token| token as f32 - 35.0).collect();
        let edit = |token, repetition, added| TokenEdit { token, repetition, added };
        let tokens = vec![edit(0, 2.0, 1.0), edit(37, 2.0, 0.5), edit(1, 2.0, 0.0), edit(900, 2.0, 0.0)];
        let edits = RowEdits { tokens, allowed: vec![0b1101, u32::MAX] };
        edits.apply(&mut logits);
        assert_eq!(logits[..4], [-69.0, EXCLUDED, -33.0, -32.0]);
        assert_eq!((logits[37], logits[38]), (1.5, 3.0));
        assert!(logits[4..32].iter().chain(&logits[64..]).all(|logit| *logit == EXCLUDED));
        assert!(logits[32..64].iter().all(|logit| *logit > EXCLUDED));
    }
}
