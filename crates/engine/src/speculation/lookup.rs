//! Guesses from the text itself.

use std::collections::HashMap;

use super::{HitRate, MAX_DRAFT};

/// Tokens that must have occurred before to guess what follows them.
const GRAM: usize = 3;

/// Guesses that a text repeats itself: what followed the last tokens earlier follows them again.
#[derive(Debug)]
pub struct PromptLookup {
    /// Prompt and answer.
    tokens: Vec<u32>,
    /// Where the token after each run of [`GRAM`] tokens is, the latest.
    after: HashMap<[u32; GRAM], u32>,
    /// Where the next token is guessed to have been.
    guess: Option<usize>,
    /// Guesses that were not verified count too.
    rate: HitRate,
}

impl PromptLookup {
    /// Guesses for the answer to a prompt. Takes the memory for `longest` tokens of both at once.
    pub fn new(prompt: &[u32], longest: usize) -> Self {
        let mut lookup = Self {
            tokens: Vec::with_capacity(longest),
            after: HashMap::with_capacity(longest),
            guess: None,
            rate: HitRate::quick(),
        };
        prompt.iter().for_each(|token| lookup.extend(*token));
        lookup
    }

    /// Notes a generated token, and whether it was guessed. If there was a guess, returns the share
    /// of right guesses before it, and whether it was right.
    pub fn push(&mut self, token: u32) -> Option<(f32, bool)> {
        let noted = self.guess.map(|guess| (self.rate.share(), self.tokens[guess] == token));
        if let Some((_, hit)) = noted {
            self.rate.note(hit);
        }
        self.extend(token);
        noted
    }

    /// Appends a token. A guess that was right goes on; else the latest occurrence is taken.
    fn extend(&mut self, token: u32) {
        let followed = self.guess.filter(|guess| self.tokens[*guess] == token).map(|guess| guess + 1);
        self.tokens.push(token);
        let end = self.tokens.len();
        let gram = self.tokens.last_chunk().copied();
        let seen = gram.and_then(|gram| self.after.insert(gram, end as u32));
        self.guess = followed.or(seen.map(|place| place as usize)).filter(|guess| *guess < end);
    }

    /// The guessed tokens, [`MAX_DRAFT`] at most.
    pub fn draft(&self) -> &[u32] {
        let Some(guess) = self.guess else { return &[] };
        &self.tokens[guess..self.tokens.len().min(guess + MAX_DRAFT)]
    }

    /// How often guesses were right.
    pub fn rate(&self) -> HitRate {
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_last_tokens_is_guessed() {
        let mut lookup = PromptLookup::new(&[1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3], 0);
        assert_eq!(lookup.draft(), [4, 5, 6, 9, 9, 1, 2, 3]);
        assert_eq!(lookup.push(4), Some((0.5, true)));
        assert_eq!(lookup.draft()[..2], [5, 6]);
        assert!(lookup.rate().share() > 0.5);
        lookup.push(7);
        assert!(lookup.draft().is_empty());
        assert!(lookup.rate().share() < 0.5);
        let again: Vec<u32> = (0..100).chain(0..3).collect();
        assert_eq!(PromptLookup::new(&again, 0).draft(), (3..3 + MAX_DRAFT as u32).collect::<Vec<_>>());
        assert!(PromptLookup::new(&[1, 2], 0).draft().is_empty());
        // A run of one token guesses that it goes on.
        assert_eq!(PromptLookup::new(&[5; 6], 0).draft(), [5]);
    }
}
