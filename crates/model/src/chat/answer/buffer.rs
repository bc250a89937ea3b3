//! The part of an answer that is not parsed yet, and the search for markers in it.

use std::collections::VecDeque;
use std::ops::Range;

use crate::tokenizer::Tokenizer;

/// A text that begins or ends a part of an answer, such as `<tool_call>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    pub(crate) text: String,
    /// Parts that came from a special token. The same letters as ordinary text are no marker.
    special: Vec<Range<usize>>,
}

impl Marker {
    /// The marker with this text, for answers of a model with this tokenizer.
    pub(crate) fn new(text: &str, tokenizer: &Tokenizer) -> Self {
        let (mut special, mut done) = (Vec::new(), 0);
        for id in tokenizer.encode(text, false).unwrap_or_default() {
            if !tokenizer.is_special(id) {
                continue;
            }
            let name = tokenizer.decode(&[id], false);
            if let Some(at) = text[done..].find(&name).filter(|_| !name.is_empty()) {
                special.push(done + at..done + at + name.len());
                done += at + name.len();
            }
        }
        Self { text: text.to_owned(), special }
    }

    /// The special tokens that the marker has.
    pub(crate) fn special_names(&self) -> impl Iterator<Item = &str> {
        self.special.iter().map(|range| &self.text[range.clone()])
    }
}

/// Whether a marker is at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Match {
    Yes,
    /// It is, if the text continues so.
    Maybe,
    No,
}

/// Where the first of some markers is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Marker `which` is at this byte.
    At { at: usize, which: usize },
    /// None is before this byte, where one may begin.
    NotBefore(usize),
}

/// Text that waits.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    text: String,
    /// Parts that were written by special tokens.
    special: VecDeque<Range<usize>>,
    /// Number of bytes taken so far.
    taken: usize,
}

impl Buffer {
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub fn push_special(&mut self, name: &str) {
        let start = self.text.len();
        self.text.push_str(name);
        self.special.push_back(start..self.text.len());
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// The place of the buffer's first byte in the whole answer.
    pub fn place(&self) -> usize {
        self.taken
    }

    /// Removes and returns the first `bytes`.
    pub fn take(&mut self, bytes: usize) -> String {
        let rest = self.text.split_off(bytes);
        self.taken += bytes;
        self.special.retain_mut(|range| {
            let keep = range.start >= bytes;
            if keep {
                *range = range.start - bytes..range.end - bytes;
            }
            keep
        });
        std::mem::replace(&mut self.text, rest)
    }

    /// Whether `marker` is at byte `at`.
    pub fn matches(&self, at: usize, marker: &Marker) -> Match {
        let rest = &self.text[at..];
        let reached = marker.special.iter().filter(|part| part.start < rest.len());
        let is_special = |part: &Range<usize>| self.special.contains(&(at + part.start..at + part.end));
        if rest.starts_with(&marker.text) {
            let written = marker.special.iter().all(is_special);
            return if written { Match::Yes } else { Match::No };
        }
        // A special token arrives whole, so a partial one was not written.
        if marker.text.starts_with(rest) && reached.clone().all(is_special) {
            return Match::Maybe;
        }
        Match::No
    }

    /// The first of `markers` at byte `from` or later. At the same position, the longest wins.
    /// `last`: no more text follows.
    pub fn find(&self, from: usize, markers: &[&Marker], last: bool) -> Found {
        for (offset, _) in self.text[from..].char_indices() {
            let at = from + offset;
            let mut best: Option<usize> = None;
            for (which, marker) in markers.iter().enumerate() {
                match self.matches(at, marker) {
                    Match::Maybe if !last => return Found::NotBefore(at),
                    Match::Yes if best.is_none_or(|best| markers[best].text.len() < marker.text.len()) => {
                        best = Some(which);
                    }
                    _ => {}
                }
            }
            if let Some(which) = best {
                return Found::At { at, which };
            }
        }
        Found::NotBefore(self.text.len())
    }
}
