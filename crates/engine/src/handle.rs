//! The engine as its callers see it: a handle that takes requests from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use thunder_model::chat::ChatTemplate;
use thunder_model::tokenizer::Tokenizer;
use tokio::sync::mpsc;

use crate::request::{Event, Request, Sampling, SubmitError};

/// What callers need to know of the model that is being served.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    /// The name to serve it under.
    pub name: String,
    /// Tokens that prompt and answer may have together.
    pub context_length: usize,
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to a prompt; `None` for a model without a chat template.
    pub chat_template: Option<Arc<ChatTemplate>>,
    /// Sampling of the model's generation_config.json, used where a request names none.
    pub default_sampling: Sampling,
    /// World size.
    pub ranks: usize,
}

/// A submission on its way to the scheduler.
#[derive(Debug)]
pub struct Submission {
    /// What is asked.
    pub request: Request,
    /// Where its events go. Closed when the caller is gone, which frees the request's slot.
    pub events: mpsc::UnboundedSender<Event>,
}

/// Counters that the scheduler keeps for `/health` and metrics.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests that have a slot.
    pub running: AtomicUsize,
    /// Requests that wait for one.
    pub waiting: AtomicUsize,
    /// Times that a sequence lost its place to an older one for want of cache blocks, to start over later.
    pub preempted: AtomicU64,
    /// Steps computed.
    pub steps: AtomicU64,
    /// Nanoseconds that rank 0 spent in them, communication included.
    pub step_ns: AtomicU64,
    /// Nanoseconds of these inside of tensor-parallel reductions, waits for the other ranks included.
    pub reduce_ns: AtomicU64,
    /// Bytes that were reduced.
    pub reduce_bytes: AtomicU64,
}

/// What the steps took up to some moment.
#[derive(Debug, Clone, Copy)]
pub struct StepTimes {
    step_ns: u64,
    reduce_ns: u64,
}

impl Counters {
    /// The times up to now.
    pub fn times(&self) -> StepTimes {
        StepTimes {
            step_ns: self.step_ns.load(Ordering::Relaxed),
            reduce_ns: self.reduce_ns.load(Ordering::Relaxed),
        }
    }

    /// The reductions' share of rank 0's time since an earlier moment, 0 to 1.
    pub fn reduce_share_since(&self, before: StepTimes) -> f64 {
        let now = self.times();
        (now.reduce_ns - before.reduce_ns) as f64 / (now.step_ns - before.step_ns).max(1) as f64
    }
}

/// A cheap, cloneable handle to a running engine.
#[derive(Debug, Clone)]
pub struct Engine {
    info: Arc<ModelInfo>,
    submissions: mpsc::UnboundedSender<Submission>,
    counters: Arc<Counters>,
    max_waiting: usize,
    stopped: Arc<std::sync::OnceLock<String>>,
}

impl Engine {
    /// A handle and the receiving end that a scheduler (or a test's script) works off.
    pub fn channel(info: ModelInfo, max_waiting: usize) -> (Self, Inbox) {
        let (submissions, receiver) = mpsc::unbounded_channel();
        let counters = Arc::new(Counters::default());
        let stopped = Arc::new(std::sync::OnceLock::new());
        let engine = Self {
            info: Arc::new(info),
            submissions,
            counters: counters.clone(),
            max_waiting,
            stopped: stopped.clone(),
        };
        (engine, Inbox { submissions: receiver, counters, stopped })
    }

    /// The model that answers.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Requests with a slot, and requests waiting for one.
    pub fn load(&self) -> (usize, usize) {
        (self.counters.running.load(Ordering::Relaxed), self.counters.waiting.load(Ordering::Relaxed))
    }

    /// The scheduler's counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Why the engine has stopped, if it has.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.get().map(String::as_str)
    }

    /// Queues a request. Its answer comes as events of the stream; dropping the stream cancels it.
    ///
    /// # Errors
    /// When the request cannot be served as it is, or the engine takes no more.
    pub fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        request.check(&self.info)?;
        if let Some(why) = self.stopped() {
            return Err(SubmitError::Stopped(why.to_owned()));
        }
        let waiting = self.counters.waiting.fetch_add(1, Ordering::Relaxed);
        if waiting >= self.max_waiting {
            self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(SubmitError::Busy { waiting });
        }
        let (events, receiver) = mpsc::unbounded_channel();
        self.submissions.send(Submission { request, events }).map_err(|_| {
            self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
            SubmitError::Stopped(self.stopped().unwrap_or("the scheduler has ended").to_owned())
        })?;
        Ok(EventStream { events: receiver })
    }
}

/// The receiving end of an [`Engine`].
#[derive(Debug)]
pub struct Inbox {
    /// Requests, in the order of their submission. Closed when the last handle is gone.
    pub submissions: mpsc::UnboundedReceiver<Submission>,
    /// Shared with the handles. A submission counts as waiting until the scheduler gives it a slot.
    pub counters: Arc<Counters>,
    /// Set once, with the reason, when the engine can serve no more.
    pub stopped: Arc<std::sync::OnceLock<String>>,
}

/// The events of one request. Dropping it cancels the request.
#[derive(Debug)]
pub struct EventStream {
    events: mpsc::UnboundedReceiver<Event>,
}

impl EventStream {
    /// The next event; `None` after the last one, or if the engine went away without a word.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// As [`EventStream::next`], for threads outside of an async runtime; `None` when nothing came within `limit`.
    pub fn next_within(&mut self, limit: Duration) -> Option<Option<Event>> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let deadline = Instant::now() + limit;
        loop {
            if let Poll::Ready(event) = self.events.poll_recv(&mut context) {
                return Some(event);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            std::thread::park_timeout(left);
        }
    }

    /// For use in `poll` functions.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.poll_recv(context)
    }
}

/// Wakes a parked thread.
pub(crate) struct Unpark(pub std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
