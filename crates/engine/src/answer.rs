//! Turns tokens into the text that a client sees: whole characters, and never a part of a stop
//! text.

use thunder_model::tokenizer::TokenStream;
use tokio::sync::mpsc;

use crate::event::{Event, FinishReason, TokenLogprob, Usage};

/// Holds back text that may be the beginning of a stop text.
#[derive(Debug, Default)]
struct StopFilter {
    stop: Vec<String>,
    /// Text that is held back.
    held: String,
    /// A stop text was found.
    stopped: bool,
}

impl StopFilter {
    /// Takes text. Returns the text that is certain, and whether a stop text was found; text after
    /// a stop text is dropped.
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

/// The text of one answer, sent to the client as it grows.
#[derive(Debug)]
pub struct AnswerStream {
    events: mpsc::UnboundedSender<Event>,
    tokens: TokenStream,
    filter: StopFilter,
    /// Bytes of the text that was emitted.
    emitted: usize,
    /// Reports whose text was not emitted yet, with the byte where their text begins.
    logprobs: Vec<(usize, TokenLogprob)>,
}

/// Whether an answer continues after a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushOutcome {
    /// The answer continues.
    Continues,
    /// The answer has met a stop text, and ends.
    StopText,
}

impl AnswerStream {
    /// An empty answer whose events go to `events`.
    pub fn new(events: mpsc::UnboundedSender<Event>, tokens: TokenStream, stop: Vec<String>) -> Self {
        let filter = StopFilter { stop, ..StopFilter::default() };
        Self { events, tokens, filter, emitted: 0, logprobs: Vec::new() }
    }

    /// True if the client is gone.
    pub fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// Takes a token and emits the text that became certain with it.
    pub fn push(&mut self, id: u32, logprob: Option<TokenLogprob>) -> PushOutcome {
        if let Some(logprob) = logprob {
            self.logprobs.push((self.emitted + self.filter.held.len(), logprob));
        }
        let text = self.tokens.push(id);
        let (text, stopped) = self.filter.push(text);
        self.emit(text);
        if stopped { PushOutcome::StopText } else { PushOutcome::Continues }
    }

    /// Emits text with the reports of its tokens.
    fn emit(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        self.emitted += text.len();
        let ready = self.logprobs.iter().take_while(|(start, _)| *start < self.emitted).count();
        let logprobs = self.logprobs.drain(..ready).map(|(_, logprob)| logprob).collect();
        // The engine loop notices a client that is gone before it plans the next step.
        let _ = self.events.send(Event::Delta { text, logprobs });
    }

    /// Ends the answer. Emits the text that was held back, unless a stop text was found.
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

/// Bytes of the longest end of `text` that is also a beginning of `stop`, but not all of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(at, _)| at).rev().find(|&at| text.ends_with(&stop[..at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_longest_overlap_is_held_back() {
        assert_eq!(overlap("say ab", "abc"), 2);
        assert_eq!(overlap("say aba", "abab"), 3);
        assert_eq!(overlap("nothing", "xyz"), 0);
        assert_eq!(overlap("stop", "stop"), 0, "a whole stop text is found, not held");
        assert_eq!(overlap("é", "éa"), 2);
    }

    /// What a client reads if the text comes in these pieces, and whether a stop text was found.
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
        assert_eq!(read(&["xyz"], &["z", "y"]), ("x".into(), true), "the earliest stop text ends the answer");
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
