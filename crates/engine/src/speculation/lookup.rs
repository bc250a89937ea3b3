//! Guesses from the text itself.

use std::collections::HashMap;
use std::ops::Range;

use super::{HitRate, MAX_DRAFT};
use crate::event::Predicted;

/// Number of tokens that must have occurred before, to guess what follows them.
const GRAM: usize = 3;

/// Guesses that a text repeats itself: the token that followed the last tokens earlier will follow
/// again.
#[derive(Debug)]
pub struct PromptLookup {
    /// Prompt, prediction and answer.
    tokens: Vec<u32>,
    /// Position of the prediction.
    prediction: Range<usize>,
    /// Tokens of the answer that were guessed from the prediction.
    came_true: usize,
    /// For each sequence of [`GRAM`] tokens, the position after its latest occurrence.
    after: HashMap<[u32; GRAM], u32>,
    /// The guessed earlier position of the next token.
    guess: Option<usize>,
    /// Includes guesses that were not verified.
    rate: HitRate,
}

impl PromptLookup {
    /// Guesses for the answer to a prompt. Allocates memory for `longest` tokens of both at once.
    pub fn new(prompt: &[u32], longest: usize) -> Self {
        let mut lookup = Self {
            tokens: Vec::with_capacity(longest),
            prediction: 0..0,
            came_true: 0,
            after: HashMap::with_capacity(longest),
            guess: None,
            rate: HitRate::quick(),
        };
        prompt.iter().for_each(|token| lookup.extend(*token));
        lookup
    }

    /// Adds the expected text of the answer, which the answer is expected to start with.
    pub fn predicting(mut self, text: &[u32]) -> Self {
        let begin = self.tokens.len();
        self.tokens.reserve(text.len());
        text.iter().for_each(|token| self.extend(*token));
        self.prediction = begin..self.tokens.len();
        if !text.is_empty() {
            self.guess = Some(begin);
        }
        self
    }

    /// How much of the prediction was right; `None` without one.
    pub fn predicted(&self) -> Option<Predicted> {
        let wrong = self.prediction.len().saturating_sub(self.came_true);
        (!self.prediction.is_empty()).then_some(Predicted { right: self.came_true, wrong })
    }

    /// Adds a generated token. If there was a guess, returns the share of right guesses before it,
    /// and whether it was right.
    pub fn push(&mut self, token: u32) -> Option<(f32, bool)> {
        let noted = self.guess.map(|guess| (self.rate.share(), self.tokens[guess] == token));
        if let Some((_, hit)) = noted {
            self.rate.note(hit);
            let is_predicted = self.guess.is_some_and(|guess| self.prediction.contains(&guess));
            self.came_true += usize::from(hit && is_predicted);
        }
        self.extend(token);
        noted
    }

    /// Appends a token. A right guess continues; otherwise the latest occurrence is used.
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

    /// The share of right guesses.
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
        // For a single repeated token, the guess is that it continues.
        assert_eq!(PromptLookup::new(&[5; 6], 0).draft(), [5]);
    }

    #[test]
    fn a_prediction_is_guessed_from_its_first_token_on() {
        let mut lookup = PromptLookup::new(&[1, 2, 3], 0).predicting(&[10, 11, 12, 13, 14, 15]);
        assert_eq!(lookup.draft()[..3], [10, 11, 12]);
        for token in [10, 11, 12, 99] {
            lookup.push(token);
        }
        assert!(lookup.draft().is_empty());
        // After a different part, the position is found again by the last three tokens.
        for token in [12, 13, 14] {
            lookup.push(token);
        }
        assert_eq!(lookup.draft()[0], 15);
        lookup.push(15);
        assert_eq!(lookup.predicted(), Some(Predicted { right: 4, wrong: 2 }));
        assert_eq!(PromptLookup::new(&[1, 2, 3], 0).predicted(), None);
    }
}
