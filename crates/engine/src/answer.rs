//! Turns tokens into the text that a client sees: whole characters, and never a part of a stop
//! text.

use thunder_model::tokenizer::TokenStream;

use crate::event::{AnsweredToken, Event, EventSender, Fault, FinishReason, TokenLogprob, Usage};

/// An answer ends with an error when this many bytes of it wait for its client, in addition to the
/// buffers of the system and the server: thousands of tokens of text, or hundreds with 20
/// log-probabilities each.
const WAITING_LIMIT_BYTES: usize = 1 << 20;

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
    /// Adds text. Returns the text that is certain, and the number of the first stop text found;
    /// text after that is dropped.
    fn push(&mut self, text: String) -> (String, Option<usize>) {
        if self.held.is_empty() {
            self.held = text;
        } else {
            self.held.push_str(&text);
        }
        let found = self
            .stop
            .iter()
            .zip(0..)
            .filter_map(|(stop, number)| Some((self.held.find(stop.as_str())?, number)));
        if let Some((at, number)) = found.min() {
            self.held.truncate(at);
            self.stopped = true;
            return (std::mem::take(&mut self.held), Some(number));
        }
        let keep = self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, kept), None)
    }
}

/// The text of one answer, sent to the client as it grows.
#[derive(Debug)]
pub struct AnswerStream {
    events: EventSender,
    tokens: TokenStream,
    filter: StopFilter,
    /// Special tokens that are reported, in ascending order.
    marks: Vec<u32>,
    /// Bytes of the emitted text.
    emitted: usize,
    /// Reports whose text was not emitted yet, with the byte offset of their text.
    logprobs: Vec<(usize, TokenLogprob)>,
    /// Tokens since the last report; `None` if tokens are not reported.
    accepted: Option<Vec<AnsweredToken>>,
    /// Something was sent since tokens were last reported.
    has_sent: bool,
    /// The client read too little and was sent an error.
    is_stalled: bool,
}

/// Whether an answer continues after a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushOutcome {
    /// The answer continues.
    Continues,
    /// The answer has met the stop text with this number, and ends.
    StopText(usize),
}

impl AnswerStream {
    /// An empty answer whose events go to `events`.
    /// `marks` are special tokens to report, in ascending order.
    pub fn new(events: EventSender, tokens: TokenStream, stop: Vec<String>, marks: Vec<u32>) -> Self {
        let filter = StopFilter { stop, ..StopFilter::default() };
        Self {
            events,
            tokens,
            filter,
            marks,
            emitted: 0,
            logprobs: Vec::new(),
            accepted: None,
            has_sent: false,
            is_stalled: false,
        }
    }

    /// Like [`AnswerStream::new`], but also reports the tokens that make up the text.
    pub fn reporting_tokens(self) -> Self {
        Self { accepted: Some(Vec::new()), ..self }
    }

    /// True if the client has left, or read too little and was sent an error.
    pub fn is_abandoned(&self) -> bool {
        self.is_stalled || self.events.is_closed()
    }

    /// Sends an event other than text.
    pub fn report(&self, event: Event) {
        // The engine loop notices that a client has left before it plans the next step.
        self.events.send(event);
    }

    /// Adds a token, and emits the text that is certain now.
    pub fn push(&mut self, id: u32, logprob: Option<TokenLogprob>) -> PushOutcome {
        if let Some(accepted) = &mut self.accepted {
            accepted.push(AnsweredToken { id, report: logprob.clone() });
        }
        let outcome = self.push_token(id, logprob);
        let has_sent = std::mem::take(&mut self.has_sent) && !self.is_stalled;
        if let Some(accepted) = self.accepted.as_mut().filter(|_| has_sent) {
            self.events.send(Event::Accepted { tokens: std::mem::take(accepted) });
        }
        outcome
    }

    fn push_token(&mut self, id: u32, logprob: Option<TokenLogprob>) -> PushOutcome {
        if self.marks.binary_search(&id).is_ok() {
            return self.push_mark(id);
        }
        if let Some(logprob) = logprob {
            self.logprobs.push((self.emitted + self.filter.held.len(), logprob));
        }
        let text = self.tokens.push(id);
        let (text, stopped) = self.filter.push(text);
        self.emit(text);
        stopped.map_or(PushOutcome::Continues, PushOutcome::StopText)
    }

    /// Reports a special token, after the text before it; a stop text never spans a special token.
    fn push_mark(&mut self, id: u32) -> PushOutcome {
        let rest = self.tokens.flush();
        let (mut text, stopped) = self.filter.push(rest);
        if stopped.is_none() {
            text.push_str(&std::mem::take(&mut self.filter.held));
        }
        self.emit(text);
        if let Some(number) = stopped {
            return PushOutcome::StopText(number);
        }
        if !self.is_stalled {
            self.has_sent = true;
            self.events.send(Event::Mark { id });
        }
        PushOutcome::Continues
    }

    /// Emits text with the reports of its tokens.
    fn emit(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        self.emitted += text.len();
        let ready = self.logprobs.iter().take_while(|(start, _)| *start < self.emitted).count();
        let logprobs = self.logprobs.drain(..ready).map(|(_, logprob)| logprob).collect();
        self.has_sent = true;
        // The engine loop notices that a client has left before it plans the next step.
        self.events.send(Event::Delta { text, logprobs });
        if self.events.waiting_bytes() > WAITING_LIMIT_BYTES {
            self.is_stalled = true;
            let message = format!(
                "the answer was cut off: {} bytes of it waited to be read, {WAITING_LIMIT_BYTES} are the most",
                self.events.waiting_bytes()
            );
            // The client's fault: it does not read.
            self.events.send(Event::Failed { message, fault: Fault::Request });
        }
    }

    /// Ends the answer. Emits the text that was held back, unless a stop text was found.
    pub fn finish(mut self, mut reason: FinishReason, usage: Usage) {
        if self.is_stalled {
            return;
        }
        if !self.filter.stopped {
            let rest = self.tokens.finish();
            let (mut text, stopped) = self.filter.push(rest);
            match stopped {
                Some(number) => reason = FinishReason::StopText(number),
                None => text.push_str(&std::mem::take(&mut self.filter.held)),
            }
            self.emit(text);
        }
        if !self.is_stalled {
            self.events.send(Event::Done { reason, usage });
        }
    }

    /// Ends the answer with an error.
    pub fn fail(self, message: String, fault: Fault) {
        if !self.is_stalled {
            self.events.send(Event::Failed { message, fault });
        }
    }
}

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    (1..=longest).rev().find(|&at| stop.is_char_boundary(at) && text.ends_with(&stop[..at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;
    use thunder_model::tokenizer::Tokenizer;

    use super::*;
    use crate::event::event_channel;

    #[test]
    fn the_longest_overlap_is_held_back() {
        assert_eq!(overlap("say ab", "abc"), 2);
        assert_eq!(overlap("say aba", "abab"), 3);
        assert_eq!(overlap("nothing", "xyz"), 0);
        assert_eq!(overlap("stop", "stop"), 0, "a whole stop text is found, not held");
        assert_eq!(overlap("é", "éa"), 2);
    }

    #[test]
    fn a_client_that_takes_nothing_ends_the_answer_with_an_error() {
        let tokenizer = Tokenizer::load(&thunder_testing::builtin_model()).unwrap();
        let tokenizer = Arc::new(tokenizer);
        let id = tokenizer.encode("word", false).unwrap()[0];
        let (sender, mut receiver) = event_channel();
        let mut answer = AnswerStream::new(sender.clone(), tokenizer.stream(), Vec::new(), Vec::new());
        let mut pushed = 0;
        while !answer.is_abandoned() {
            answer.push(id, None);
            pushed += 1;
            assert!(pushed < 100_000, "{} bytes wait", sender.waiting_bytes());
        }
        assert!(pushed > 2000, "a client may pause for thousands of tokens, not for {pushed}");
        answer.finish(FinishReason::Stop, Usage::default());
        drop(sender);
        let mut context = Context::from_waker(Waker::noop());
        let mut events = Vec::new();
        while let Poll::Ready(Some(event)) = receiver.poll_next(&mut context) {
            events.push(event);
        }
        assert_eq!(events.len(), pushed + 1, "nothing follows the error");
        assert!(matches!(events.last(), Some(Event::Failed { message, .. }) if message.contains("1048576")));
    }

    #[test]
    fn a_client_that_reads_is_never_cut_off() {
        let tokenizer = Arc::new(Tokenizer::load(&thunder_testing::builtin_model()).unwrap());
        let id = tokenizer.encode("word", false).unwrap()[0];
        let (sender, mut receiver) = event_channel();
        let mut answer = AnswerStream::new(sender.clone(), tokenizer.stream(), Vec::new(), Vec::new());
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..50_000 {
            answer.push(id, None);
            assert!(receiver.poll_next(&mut context).is_ready());
            assert_eq!(sender.waiting_bytes(), 0);
        }
        assert!(!answer.is_abandoned());
    }

    #[test]
    fn marks_are_reported_between_the_texts_around_them() {
        let tokenizer = Arc::new(Tokenizer::load(&thunder_testing::builtin_model()).unwrap());
        let [word, mark, other] =
            ["word", "<|im_start|>", "<|im_end|>"].map(|text| tokenizer.encode(text, false).unwrap()[0]);
        let (sender, mut receiver) = event_channel();
        // "w" may begin the stop text, and is held back until the mark decides.
        let stop = vec!["worst".to_owned()];
        let mut answer = AnswerStream::new(sender, tokenizer.stream(), stop, vec![mark]);
        for id in [word, other, mark, word] {
            answer.push(id, None);
        }
        answer.finish(FinishReason::Stop, Usage::default());
        let mut context = Context::from_waker(Waker::noop());
        let mut seen = Vec::new();
        while let Poll::Ready(Some(event)) = receiver.poll_next(&mut context) {
            seen.push(match event {
                Event::Delta { text, .. } => text,
                Event::Mark { id } => format!("mark {id}"),
                other => format!("{other:?}").chars().take(4).collect(),
            });
        }
        let text = tokenizer.decode(&[word], true);
        let expected = [text.clone(), format!("mark {mark}"), text, "Done".to_owned()];
        assert_eq!(seen, expected);
    }

    /// The text that a client reads if it comes in these pieces, and the stop text that was found.
    fn read(pieces: &[&str], stop: &[&str]) -> (String, Option<usize>) {
        let stop = stop.iter().map(|s| (*s).to_owned()).collect();
        let mut filter = StopFilter { stop, ..StopFilter::default() };
        let mut read = String::new();
        for piece in pieces {
            let (text, stopped) = filter.push((*piece).to_owned());
            read.push_str(&text);
            if stopped.is_some() {
                return (read, stopped);
            }
        }
        (read + &filter.held, None)
    }

    #[test]
    fn a_stop_text_across_tokens_never_leaks() {
        assert_eq!(read(&["one ", "EN", "D two"], &["END"]), ("one ".into(), Some(0)));
        assert_eq!(read(&["one ", "EN", "tire"], &["END"]), ("one ENtire".into(), None));
        assert_eq!(read(&["one ", "EN"], &["END"]), ("one EN".into(), None));
        assert_eq!(read(&["ab", "ab", "c"], &["abc"]), ("ab".into(), Some(0)));
        assert_eq!(
            read(&["xyz"], &["z", "y"]),
            ("x".into(), Some(1)),
            "the earliest stop text ends the answer"
        );
    }

    proptest! {
        #[test]
        fn any_cut_of_a_text_reads_the_same(text in "[ab]{0,12}", stop in "[ab]{1,3}", cuts in prop::collection::vec(0usize..12, 0..6)) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c <= text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let expected = match text.find(&stop) {
                Some(at) => (text[..at].to_owned(), Some(0)),
                None => (text.clone(), None),
            };
            prop_assert_eq!(read(&pieces, &[&stop]), expected);
        }
    }
}
