//! The engine as its callers see it: a handle that accepts requests from any thread.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::constraint::{Compiler, Constraint, Grammar, GrammarError};
use crate::counters::Counters;
use crate::event::{Event, EventReceiver, EventSender, event_channel};
use crate::model_info::ModelInfo;
use crate::request::{Request, SubmitError};

/// A cheap, cloneable handle to a running engine. The engine ends when its last handle is dropped.
#[derive(Debug, Clone)]
pub struct Engine {
    info: Arc<ModelInfo>,
    submissions: mpsc::UnboundedSender<Submission>,
    counters: Arc<Counters>,
    max_waiting: Arc<AtomicUsize>,
    stopped: Arc<OnceLock<String>>,
    /// Created with the first constraint, because it holds another copy of the vocabulary.
    compiler: Arc<OnceLock<Result<Compiler, GrammarError>>>,
}

impl Engine {
    /// A handle, and the inbox that an engine loop (or a test) serves. At most `max_waiting`
    /// requests may wait for a slot.
    pub fn channel(info: ModelInfo, max_waiting: usize) -> (Self, Inbox) {
        let (submissions, receiver) = mpsc::unbounded_channel();
        let counters = Arc::new(Counters::default());
        let stopped = Arc::new(OnceLock::new());
        let engine = Self {
            info: Arc::new(info),
            submissions,
            counters: counters.clone(),
            max_waiting: Arc::new(AtomicUsize::new(max_waiting)),
            stopped: stopped.clone(),
            compiler: Arc::default(),
        };
        (engine, Inbox { submissions: receiver, counters, stopped })
    }

    /// The served model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Requests with a slot, and requests that wait for one.
    pub fn load(&self) -> (usize, usize) {
        (self.counters.running.load(Ordering::Relaxed), self.counters.waiting.load(Ordering::Relaxed))
    }

    /// Changes the maximum number of requests that wait for a slot.
    pub fn limit_waiting(&self, most: usize) {
        self.max_waiting.store(most, Ordering::Relaxed);
    }

    /// The engine loop's counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Why the engine has stopped, if it has.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.get().map(String::as_str)
    }

    /// Compiles a grammar for an answer. Takes up to a second for the first grammar of an engine,
    /// and for a large one: call it where blocking is allowed.
    ///
    /// # Errors
    /// If the grammar is malformed, too large, or uses something unsupported.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let compiler = self.compiler.get_or_init(|| Compiler::new(&self.info));
        compiler.as_ref().map_err(Clone::clone)?.compile(grammar)
    }

    /// Queues a request. The stream yields the answer; dropping the stream cancels the request.
    ///
    /// # Errors
    /// When a parameter is out of range, too many requests wait, or the engine has stopped.
    pub fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        request.check(&self.info)?;
        if let Some(why) = self.stopped() {
            return Err(SubmitError::Stopped(why.to_owned()));
        }
        let waiting = self.counters.waiting.fetch_add(1, Ordering::Relaxed);
        if waiting >= self.max_waiting.load(Ordering::Relaxed) {
            self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(SubmitError::Busy { waiting });
        }
        let (events, receiver) = event_channel();
        let submission = Submission { request, events, at: Instant::now() };
        self.submissions.send(submission).map_err(|_| {
            self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
            SubmitError::Stopped(self.stopped().unwrap_or("the engine loop has ended").to_owned())
        })?;
        Ok(EventStream { events: receiver })
    }
}

/// A request on its way to the engine loop.
#[derive(Debug)]
pub struct Submission {
    /// The request.
    pub request: Request,
    /// Sends the request's events. Closed when the client has left, which frees the request's slot.
    pub events: EventSender,
    /// When it was submitted. While a step is computed, it waits for the loop.
    pub at: Instant,
}

/// The receiving end of an [`Engine`].
#[derive(Debug)]
pub struct Inbox {
    /// Requests, in the order of submission. Closed when the last handle is dropped.
    pub submissions: mpsc::UnboundedReceiver<Submission>,
    /// Shared with the handles. A submission counts as waiting until it gets a slot.
    pub counters: Arc<Counters>,
    /// Set once, with the reason, when the engine stops.
    pub stopped: Arc<OnceLock<String>>,
}

/// The events of one request. Dropping it cancels the request.
#[derive(Debug)]
pub struct EventStream {
    events: EventReceiver,
}

impl EventStream {
    /// The next event; `None` after the last one, or if the engine loop panicked.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// Like [`EventStream::next`], for threads outside an async runtime; `None` if no event comes
    /// within `limit`.
    pub fn next_within(&mut self, limit: Duration) -> Option<Option<Event>> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let deadline = Instant::now() + limit;
        loop {
            if let Poll::Ready(event) = self.poll_next(&mut context) {
                return Some(event);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            std::thread::park_timeout(left);
        }
    }

    /// Like [`EventStream::next`], for use in `poll` functions.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.poll_next(context)
    }
}

/// Wakes a parked thread.
pub(crate) struct Unpark(pub std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
