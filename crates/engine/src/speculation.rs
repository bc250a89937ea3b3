//! Drafts: guesses of a request's next tokens, which one step verifies together. A row's token does
//! not depend on the rows it is computed with, so the answer is the same as without drafts.

use std::collections::HashMap;

/// Most tokens of a draft.
pub const MAX_DRAFT: usize = 15;
/// With more rows than this, a step waits for arithmetic and not for memory, so drafts cost too
/// much.
pub const MAX_ROWS: usize = 32;

/// Tokens that must have occurred before to guess what follows them.
const GRAM: usize = 3;
/// Weight of the newest observation in a running mean.
const NEWEST: f32 = 0.15;
/// Expected gain from which on a draft is worth it: its rows' logits are work too.
const LEAST_GAIN: f32 = 1.05;
/// What one more row costs until it has been measured, as a share of a step.
const UNMEASURED_ROW: f32 = 0.02;

/// Guesses that a text repeats itself: what followed the last tokens earlier follows them again.
#[derive(Debug)]
pub struct PromptLookup {
    /// Prompt and answer.
    tokens: Vec<u32>,
    /// Where the token after each run of [`GRAM`] tokens is, the latest.
    after: HashMap<[u32; GRAM], u32>,
    /// Where the next token is guessed to have been.
    guess: Option<usize>,
    /// Share of guesses that were right, lately.
    right: f32,
}

impl PromptLookup {
    /// Guesses for the answer to a prompt. Takes the memory for `longest` tokens of both at once.
    pub fn new(prompt: &[u32], longest: usize) -> Self {
        let mut lookup = Self {
            tokens: Vec::with_capacity(longest),
            after: HashMap::with_capacity(longest),
            guess: None,
            right: 0.5,
        };
        prompt.iter().for_each(|token| lookup.extend(*token));
        lookup
    }

    /// Notes a generated token, and whether it was guessed.
    pub fn push(&mut self, token: u32) {
        if let Some(guess) = self.guess {
            let hit = self.tokens[guess] == token;
            self.right += NEWEST * (f32::from(u8::from(hit)) - self.right);
        }
        self.extend(token);
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
}

/// How long steps take that only decode, by their rows, and so how long drafts should be.
#[derive(Debug)]
pub struct StepCosts {
    /// By rows: seconds, or 0 if not measured.
    seconds: [f32; MAX_ROWS + MAX_DRAFT + 1],
}

impl Default for StepCosts {
    fn default() -> Self {
        Self { seconds: [0.0; MAX_ROWS + MAX_DRAFT + 1] }
    }
}

impl StepCosts {
    /// Notes a step's time.
    pub fn note(&mut self, rows: usize, seconds: f32) {
        if let Some(mean) = self.seconds.get_mut(rows) {
            *mean = if *mean == 0.0 { seconds } else { *mean + NEWEST * (seconds - *mean) };
        }
    }

    /// Tokens of a draft that are worth their rows, in a step of `rows` rows that gives `tokens`
    /// tokens without it: the number with the most tokens per second. And the tokens that the step
    /// then gives.
    pub fn draft(&self, lookup: &PromptLookup, rows: usize, tokens: f32) -> (usize, f32) {
        let Some(plain) = self.expected(rows) else { return (0, tokens) };
        let (mut best, mut best_rate) = ((0, tokens), LEAST_GAIN * tokens / plain);
        let (mut expected, mut chance) = (tokens, 1.0);
        for count in 1..=lookup.draft().len() {
            chance *= lookup.right;
            expected += chance;
            let Some(seconds) = self.expected(rows + count) else { break };
            if expected / seconds > best_rate {
                (best, best_rate) = ((count, expected), expected / seconds);
            }
        }
        best
    }

    /// Seconds of a step with `rows` rows, as measured or from the nearest measured ones. `None`
    /// for too many rows, or if nothing is known.
    fn expected(&self, rows: usize) -> Option<f32> {
        let known = |rows: &usize| self.seconds[*rows] > 0.0;
        let below = (1..=rows.min(self.seconds.len() - 1)).rev().find(known)?;
        if below == rows {
            return Some(self.seconds[rows]);
        }
        let more = |rows: usize, base: f32| base * (1.0 + UNMEASURED_ROW * (rows - below) as f32);
        let from_below = more(rows, self.seconds[below]);
        let above = (rows..self.seconds.len()).find(known);
        // Never more than more rows take.
        (rows < self.seconds.len())
            .then(|| above.map_or(from_below, |above| from_below.min(self.seconds[above])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(slope: f32) -> StepCosts {
        let mut costs = StepCosts::default();
        (1..=MAX_DRAFT + 1).for_each(|rows| costs.note(rows, 1.0 + slope * (rows - 1) as f32));
        costs
    }

    #[test]
    fn what_followed_the_last_tokens_is_guessed() {
        let mut lookup = PromptLookup::new(&[1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3], 0);
        assert_eq!(lookup.draft(), [4, 5, 6, 9, 9, 1, 2, 3]);
        lookup.push(4);
        assert_eq!(lookup.draft()[..2], [5, 6]);
        lookup.push(7);
        assert!(lookup.draft().is_empty());
        let again: Vec<u32> = (0..100).chain(0..3).collect();
        assert_eq!(PromptLookup::new(&again, 0).draft(), (3..3 + MAX_DRAFT as u32).collect::<Vec<_>>());
        assert!(PromptLookup::new(&[1, 2], 0).draft().is_empty());
        // A run of one token guesses that it goes on.
        assert_eq!(PromptLookup::new(&[5; 6], 0).draft(), [5]);
    }

    #[test]
    fn drafts_are_as_long_as_they_pay() {
        let text: Vec<u32> = (0..50).chain(0..3).collect();
        let mut lookup = PromptLookup::new(&text, 0);
        assert_eq!(StepCosts::default().draft(&lookup, 1, 1.0).0, 0, "nothing was measured");
        (3..30).for_each(|token| lookup.push(token));
        assert_eq!(costs(0.0).draft(&lookup, 1, 1.0).0, MAX_DRAFT, "rows are free");
        assert_eq!(costs(1.0).draft(&lookup, 1, 1.0).0, 0, "a row costs as much as a step");
        let some = costs(0.2).draft(&lookup, 1, 1.0).0;
        assert!((5..=MAX_DRAFT).contains(&some), "{some}");
        for wrong in 1000..1020 {
            // The text goes on differently each time.
            lookup.push(wrong);
            (0..3).for_each(|token| lookup.push(token));
        }
        assert_eq!(costs(0.2).draft(&lookup, 1, 1.0).0, 0);
    }

    #[test]
    fn rows_that_were_not_measured_are_tried() {
        let mut costs = StepCosts::default();
        costs.note(1, 1.0);
        let lookup = PromptLookup::new(&(0..50).chain(0..3).collect::<Vec<_>>(), 0);
        let tried = costs.draft(&lookup, 1, 1.0).0;
        assert!(tried > 0);
        costs.note(1 + tried, 9.0);
        assert!(costs.draft(&lookup, 1, 1.0).0 < tried, "it was not worth it");
    }
}
