//! From tokens to the text that a client sees: whole characters, and never a part of a stop text.

use thunder_model::tokenizer::TokenStream;
use tokio::sync::mpsc;

use crate::request::{Event, FinishReason, TokenLogprob, Usage};

/// Holds back text that may yet turn out to begin a stop text.
#[derive(Debug, Default)]
struct StopFilter {
    stop: Vec<String>,
    held: String,
    /// A stop text was met.
    stopped: bool,
}

impl StopFilter {
    /// Takes text, returns what is certain, and whether a stop text was met (what follows it is dropped).
    fn push(&mut self, text: String) -> (String, bool) {
        if self.held.is_empty() {
            self.held = text;
        } else {
            self.held.push_str(&text);
        }
        let found = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            self.held.truncate(at);
            self.stopped = true;
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, kept), false)
    }
}

/// The text of one answer as it grows.
#[derive(Debug)]
pub struct AnswerStream {
    events: mpsc::UnboundedSender<Event>,
    tokens: TokenStream,
    filter: StopFilter,
    /// Length of the text that was emitted.
    emitted: usize,
    /// Reports that wait for their text, with the place where it begins.
    logprobs: Vec<(usize, TokenLogprob)>,
}

/// Whether an answer goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It does.
    GoesOn,
    /// A stop text was met.
    Stopped,
    /// Nobody reads it any more.
    Abandoned,
}

impl AnswerStream {
    /// An empty answer whose events go to `events`.
    pub fn new(events: mpsc::UnboundedSender<Event>, tokens: TokenStream, stop: Vec<String>) -> Self {
        let filter = StopFilter { stop, ..StopFilter::default() };
        Self { events, tokens, filter, emitted: 0, logprobs: Vec::new() }
    }

    /// Whether the client is gone.
    pub fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// Takes a token, emits what became certain.
    pub fn push(&mut self, id: u32, logprob: Option<TokenLogprob>) -> Outcome {
        if let Some(logprob) = logprob {
            self.logprobs.push((self.emitted + self.filter.held.len(), logprob));
        }
        let text = self.tokens.push(id);
        let (text, stopped) = self.filter.push(text);
        match (self.emit(text), stopped) {
            (true, false) => Outcome::GoesOn,
            (true, true) => Outcome::Stopped,
            (false, _) => Outcome::Abandoned,
        }
    }

    /// Emits text and the reports of its tokens; false if nobody reads it.
    fn emit(&mut self, text: String) -> bool {
        if text.is_empty() {
            return !self.events.is_closed();
        }
        self.emitted += text.len();
        let ready = self.logprobs.iter().take_while(|(start, _)| *start < self.emitted).count();
        let logprobs = self.logprobs.drain(..ready).map(|(_, logprob)| logprob).collect();
        self.events.send(Event::Delta { text, logprobs }).is_ok()
    }

    /// Ends the answer, with the text that was held back (nothing, after a stop text).
    pub fn finish(mut self, reason: FinishReason, usage: Usage) {
        if !self.filter.stopped {
            let rest = self.tokens.finish();
            let (mut text, stopped) = self.filter.push(rest);
            if !stopped {
                text.push_str(&std::mem::take(&mut self.filter.held));
            }
            self.emit(text);
        }
        // A client that is gone misses nothing.
        let _ = self.events.send(Event::Done { reason, usage });
    }

    /// Ends the answer with an error.
    pub fn fail(self, message: &str) {
        let _ = self.events.send(Event::Failed { message: message.to_owned() });
    }
}

/// The length of the longest end of `text` that `stop` begins with, shorter than `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(at, _)| at).rev().find(|&at| text.ends_with(&stop[..at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn overlaps_are_the_longest() {
        assert_eq!(overlap("say ab", "abc"), 2);
        assert_eq!(overlap("say aba", "abab"), 3);
        assert_eq!(overlap("nothing", "xyz"), 0);
        assert_eq!(overlap("stop", "stop"), 0, "a whole stop text is found, not held");
        assert_eq!(overlap("é", "éa"), 2);
    }

    /// What a client reads of texts that arrive in these pieces.
    fn read(pieces: &[&str], stop: &[&str]) -> (String, bool) {
        let stop = stop.iter().map(|s| (*s).to_owned()).collect();
        let mut filter = StopFilter { stop, ..StopFilter::default() };
        let mut read = String::new();
        for piece in pieces {
            let (text, stopped) = filter.push((*piece).to_owned());
            read.push_str(&text);
            if stopped {
                return (read, true);
            }
        }
        (read + &filter.held, false)
    }

    #[test]
    fn a_stop_text_across_tokens_never_leaks() {
        assert_eq!(read(&["one ", "EN", "D two"], &["END"]), ("one ".into(), true));
        assert_eq!(read(&["one ", "EN", "tire"], &["END"]), ("one ENtire".into(), false));
        assert_eq!(read(&["one ", "EN"], &["END"]), ("one EN".into(), false));
        assert_eq!(read(&["ab", "ab", "c"], &["abc"]), ("ab".into(), true));
        assert_eq!(read(&["xyz"], &["z", "y"]), ("x".into(), true), "the earliest counts");
    }

    proptest! {
        #[test]
        fn any_cut_of_a_text_reads_the_same(text in "[ab]{0,12}", stop in "[ab]{1,3}", cuts in prop::collection::vec(0usize..12, 0..6)) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c <= text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let expected = match text.find(&stop) {
                Some(at) => (text[..at].to_owned(), true),
                None => (text.clone(), false),
            };
            prop_assert_eq!(read(&pieces, &[&stop]), expected);
        }
    }
}
