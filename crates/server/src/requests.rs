//! Running requests and the last ended ones, for the dashboard. They are in memory only, without
//! prompts and answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use thunder_engine::{Event, FinishReason};

/// Number of ended requests to keep.
pub(crate) const KEPT: usize = 200;
/// Maximum length of a kept error text, in characters.
const LONGEST_ERROR: usize = 300;

/// The state of a request, or how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Nothing of the answer was generated yet.
    Waiting,
    /// The answer has begun.
    Decode,
    Stop,
    Length,
    Failed,
    /// The client left.
    Cancelled,
}

/// A request, as the dashboard shows it. Times are in seconds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    id: String,
    path: String,
    /// Seconds since the epoch.
    began: f64,
    state: State,
    prompt_tokens: usize,
    /// Known once a choice has ended.
    cached_tokens: Option<usize>,
    tokens: Option<usize>,
    /// Parsing, the chat template and the tokenizer.
    prepare_s: f64,
    /// From submission to the first token, waiting for a slot included.
    prefill_s: Option<f64>,
    decode_s: Option<f64>,
    total_s: f64,
    error: Option<String>,
}

/// A running request.
#[derive(Debug)]
struct Live {
    row: Row,
    began: Instant,
    submitted: Instant,
    first: Option<Instant>,
    /// Choices that have not ended.
    choices: usize,
}

/// All requests of a server.
#[derive(Debug, Default)]
pub(crate) struct RequestLog {
    requests: Mutex<Requests>,
}

#[derive(Debug, Default)]
struct Requests {
    next: u64,
    live: BTreeMap<u64, Live>,
    ended: VecDeque<Row>,
}

/// The data of a request before the engine has it.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    /// The path of the request.
    pub path: String,
    /// When its body had arrived.
    pub began: Instant,
}

/// Reports the events of a request to the log. If it is dropped before all choices have ended, the
/// client has disconnected.
#[derive(Debug)]
pub(crate) struct Ticket {
    log: Arc<RequestLog>,
    number: u64,
}

impl RequestLog {
    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request that the engine has taken.
    pub fn begin(
        self: &Arc<Self>,
        id: &str,
        origin: &Origin,
        prompt_tokens: usize,
        choices: usize,
    ) -> Ticket {
        let (now, since_1970) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH));
        let prepare = now.duration_since(origin.began);
        let row = Row {
            id: id.to_owned(),
            path: origin.path.clone(),
            began: since_1970.unwrap_or_default().saturating_sub(prepare).as_secs_f64(),
            state: State::Waiting,
            prompt_tokens,
            cached_tokens: None,
            tokens: None,
            prepare_s: prepare.as_secs_f64(),
            prefill_s: None,
            decode_s: None,
            total_s: 0.0,
            error: None,
        };
        let live = Live { row, began: origin.began, submitted: now, first: None, choices };
        let mut requests = self.lock();
        let number = requests.next;
        requests.next += 1;
        requests.live.insert(number, live);
        Ticket { log: self.clone(), number }
    }

    /// The running requests and the ended ones, each with the latest first.
    pub fn rows(&self) -> Vec<Row> {
        let requests = self.lock();
        let live = requests.live.values().rev().map(Live::row_now);
        live.chain(requests.ended.iter().rev().cloned()).collect()
    }
}

impl Live {
    fn row_now(&self) -> Row {
        let seconds = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64();
        let now = Instant::now();
        Row {
            prefill_s: self.first.map(|first| seconds(self.submitted, first)),
            decode_s: self.first.map(|first| seconds(first, now)),
            total_s: seconds(self.began, now),
            ..self.row.clone()
        }
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Done { reason, usage } => {
                self.first.get_or_insert_with(Instant::now);
                self.choices = self.choices.saturating_sub(1);
                let row = &mut self.row;
                row.tokens = Some(row.tokens.unwrap_or(0) + usage.completion_tokens);
                row.cached_tokens = Some(row.cached_tokens.unwrap_or(0) + usage.cached_tokens);
                if self.choices == 0 {
                    row.state = match reason {
                        FinishReason::Stop | FinishReason::StopText(_) => State::Stop,
                        FinishReason::Length => State::Length,
                    };
                }
            }
            Event::Failed { message, .. } => {
                self.choices = 0;
                self.row.state = State::Failed;
                self.row.error = Some(message.chars().take(LONGEST_ERROR).collect());
            }
            _ => {
                self.first.get_or_insert_with(Instant::now);
                self.row.state = State::Decode;
            }
        }
    }
}

impl Requests {
    fn end(&mut self, number: u64) {
        let Some(mut live) = self.live.remove(&number) else { return };
        if live.choices > 0 {
            live.row.state = State::Cancelled;
        }
        if self.ended.len() == KEPT {
            self.ended.pop_front();
        }
        self.ended.push_back(live.row_now());
    }
}

impl Ticket {
    /// Notes an event of one of the request's choices.
    pub fn note(&self, event: &Event) {
        let mut requests = self.log.lock();
        let Some(live) = requests.live.get_mut(&self.number) else { return };
        live.note(event);
        if live.choices == 0 {
            requests.end(self.number);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.log.lock().end(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thunder_engine::{Fault, Usage};

    fn origin() -> Origin {
        Origin { path: "/v1/completions".into(), began: Instant::now() }
    }

    fn done() -> Event {
        let usage = Usage { completion_tokens: 3, cached_tokens: 2, ..Usage::default() };
        Event::Done { reason: FinishReason::Stop, usage }
    }

    #[test]
    fn a_request_is_live_until_its_last_choice_ends() {
        let log = Arc::new(RequestLog::default());
        let ticket = log.begin("a", &origin(), 7, 2);
        assert_eq!(log.rows()[0].state, State::Waiting);
        ticket.note(&Event::Delta { text: "x".into(), logprobs: Vec::new() });
        ticket.note(&done());
        assert_eq!((log.rows()[0].state, log.rows().len()), (State::Decode, 1));
        ticket.note(&done());
        drop(ticket);
        let row = &log.rows()[0];
        assert_eq!((row.state, row.tokens, row.cached_tokens), (State::Stop, Some(6), Some(4)));
        assert!(row.prefill_s.is_some() && row.total_s >= row.prepare_s);
    }

    #[test]
    fn clients_that_leave_and_failures_are_told_apart() {
        let log = Arc::new(RequestLog::default());
        drop(log.begin("left", &origin(), 1, 1));
        let ticket = log.begin("failed", &origin(), 1, 3);
        ticket.note(&Event::Failed { message: "é".repeat(1000), fault: Fault::Engine });
        let rows = log.rows();
        assert_eq!((rows[0].state, rows[1].state), (State::Failed, State::Cancelled));
        assert_eq!(rows[0].error.as_ref().map(|error| error.chars().count()), Some(LONGEST_ERROR));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let log = Arc::new(RequestLog::default());
        (0..KEPT + 5).for_each(|number| drop(log.begin(&number.to_string(), &origin(), 1, 1)));
        let rows = log.rows();
        assert_eq!((rows.len(), rows[0].id.as_str(), rows[KEPT - 1].id.as_str()), (KEPT, "204", "5"));
    }
}
