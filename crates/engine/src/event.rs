//! What a request's stream yields, and how it gets there.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::work::RequestWork;

/// An event of a request. The last one is [`Event::Done`] or [`Event::Failed`]; nothing follows it.
#[derive(Debug, Clone)]
pub enum Event {
    /// More text: whole characters, at least one.
    Delta {
        /// The text to append.
        text: String,
        /// The tokens accepted since the last delta, if the request asks for log-probabilities.
        logprobs: Vec<TokenLogprob>,
    },
    /// A special token that the request wants reported.
    Mark {
        /// The token.
        id: u32,
    },
    /// What [`Output::Hidden`](crate::Output::Hidden) asks for; `Done` follows.
    Hidden {
        /// The numbers of a hidden state.
        values: Vec<f32>,
    },
    /// What [`Output::Likelihoods`](crate::Output::Likelihoods) asks for; `Done` follows.
    Likelihoods {
        /// Natural logarithms of probabilities, in the order of the request's tokens.
        logprobs: Vec<f32>,
    },
    /// The tokens of the events since the last event of this kind, if the request asks for them
    /// ([`Request::reports_tokens`](crate::Request::reports_tokens)). Tokens whose text is held
    /// back come later.
    Accepted {
        /// In their order.
        tokens: Vec<AnsweredToken>,
    },
    /// The ranks' work for the answer, which is complete, if the request asks for it
    /// ([`Request::reports_work`](crate::Request::reports_work)). Text that was held back and
    /// `Done` follow.
    Work(RequestWork),
    /// The answer is complete.
    Done {
        /// Why the answer ended.
        reason: FinishReason,
        /// The request's tokens and times.
        usage: Usage,
    },
    /// The answer cannot continue. The text so far is incomplete.
    Failed {
        /// For people: what happened and what to do.
        message: String,
        /// The cause.
        fault: Fault,
    },
}

/// What caused the failure of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A rank was lost, or the engine stopped.
    Engine,
    /// The request: its grammar allows nothing more, or takes too long.
    Request,
}

/// One token of an answer, reported when [`Request::logprobs`](crate::Request::logprobs) asks for
/// it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// The token's bytes, not necessarily whole characters.
    pub bytes: Vec<u8>,
    /// Natural logarithm of the token's probability under the model's unmodified distribution.
    pub logprob: f32,
    /// The most probable tokens at this position, best first: id, bytes, logprob.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// A token of an answer, with the data that another engine needs to continue after it.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredToken {
    /// Token id.
    pub id: u32,
    /// Its report, if the request asks for log-probabilities.
    pub report: Option<TokenLogprob>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token, or the end of what a constraint allows.
    Stop,
    /// The stop text with this number in [`Request::stop`](crate::Request::stop).
    StopText(usize),
    /// `max_tokens` or the context length was reached.
    Length,
}

/// How much of a request's prediction was right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Predicted {
    /// Tokens of the answer that were guessed from the prediction.
    pub right: usize,
    /// Tokens of the prediction that the answer does not have.
    pub wrong: usize,
}

/// Tokens and time that a request took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Usage {
    /// Tokens in the prompt.
    pub prompt_tokens: usize,
    /// The part of them that an earlier prompt left in the cache.
    pub cached_tokens: usize,
    /// Tokens generated, including the one that ended the answer.
    pub completion_tokens: usize,
    /// How much of the prediction was right; `None` without one, or if the answer is not guessed.
    pub predicted: Option<Predicted>,
    /// From submission until the first token was chosen.
    pub time_to_first_token: Duration,
    /// From the first token to the last.
    pub decode_time: Duration,
}

impl Event {
    /// Bytes of memory that the event takes while it waits.
    fn bytes(&self) -> usize {
        let of_top = |top: &(u32, Vec<u8>, f32)| size_of_val(top) + top.1.len();
        let of_logprob = |token: &TokenLogprob| {
            size_of::<TokenLogprob>() + token.bytes.len() + token.top.iter().map(of_top).sum::<usize>()
        };
        size_of::<Self>()
            + match self {
                Self::Delta { text, logprobs } => text.len() + logprobs.iter().map(of_logprob).sum::<usize>(),
                Self::Accepted { tokens } => {
                    let of_token = |token: &AnsweredToken| {
                        size_of_val(token) + token.report.as_ref().map_or(0, of_logprob)
                    };
                    tokens.iter().map(of_token).sum()
                }
                Self::Work(work) => size_of_val(&work.ranks[..]),
                Self::Failed { message, .. } => message.len(),
                Self::Hidden { values: numbers } | Self::Likelihoods { logprobs: numbers } => {
                    size_of_val(numbers.as_slice())
                }
                Self::Done { .. } | Self::Mark { .. } => 0,
            }
    }
}

/// The engine's end of a request's stream. It counts the bytes that the client has not read.
#[derive(Debug, Clone)]
pub struct EventSender {
    events: mpsc::UnboundedSender<Event>,
    waiting_bytes: Arc<AtomicUsize>,
}

/// The client's end.
#[derive(Debug)]
pub(crate) struct EventReceiver {
    events: mpsc::UnboundedReceiver<Event>,
    waiting_bytes: Arc<AtomicUsize>,
}

/// Both ends of a stream. The sender decides when too much is waiting.
pub(crate) fn event_channel() -> (EventSender, EventReceiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let waiting_bytes = Arc::new(AtomicUsize::new(0));
    (
        EventSender { events: sender, waiting_bytes: waiting_bytes.clone() },
        EventReceiver { events: receiver, waiting_bytes },
    )
}

impl EventSender {
    /// Sends an event. Returns false if the client has left.
    pub fn send(&self, event: Event) -> bool {
        self.waiting_bytes.fetch_add(event.bytes(), Ordering::Relaxed);
        self.events.send(event).is_ok()
    }

    /// True if the client has left.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    /// Bytes of the events that the client has not read.
    pub fn waiting_bytes(&self) -> usize {
        self.waiting_bytes.load(Ordering::Relaxed)
    }
}

impl EventReceiver {
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let polled = self.events.poll_recv(context);
        if let Poll::Ready(Some(event)) = &polled {
            self.waiting_bytes.fetch_sub(event.bytes(), Ordering::Relaxed);
        }
        polled
    }
}
