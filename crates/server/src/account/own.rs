//! The gateway's own time for a request, without the engine, the engine's queue, and the network.

use std::thread::ThreadId;
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;

/// A part of a request's way through the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// From the request's head to its account: routing, the key, a first look at its limits.
    Authorize,
    /// The wait while other bodies are prepared. It is load, not cost, so it is not part of the
    /// sum.
    Wait,
    /// Moving to the thread that prepares, and back.
    Switch,
    /// From the body to the prompt: parsing, the chat template, tokens, a grammar.
    Prepare,
    /// Checking limits, until the request is handed over. The time after that belongs to the
    /// engine, which may run on this core as soon as it is woken.
    Admit,
    /// From the last token to the usage record that survives the process.
    Record,
}

impl Part {
    pub const ALL: [Self; 6] =
        [Self::Authorize, Self::Wait, Self::Switch, Self::Prepare, Self::Admit, Self::Record];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Authorize => "authorize",
            Self::Wait => "wait",
            Self::Switch => "switch",
            Self::Prepare => "prepare",
            Self::Admit => "admit",
            Self::Record => "record",
        }
    }
}

/// A moment in the work of a thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    at: Instant,
    thread: ThreadId,
    /// The thread's computing time until then.
    computed: Duration,
}

/// The time since a moment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Span {
    pub time: Duration,
    /// The thread's computing time in it, without waits for a core. The whole time if the work has
    /// moved to another thread.
    pub computed: Duration,
}

impl Moment {
    pub fn now() -> Self {
        Self { at: Instant::now(), thread: std::thread::current().id(), computed: computed() }
    }

    pub fn elapsed(&self) -> Span {
        let (time, now) = (self.at.elapsed(), computed());
        let is_same = self.thread == std::thread::current().id();
        Span { time, computed: if is_same { now.saturating_sub(self.computed) } else { time } }
    }
}

/// This thread's computing time so far; zero if the system does not report it.
fn computed() -> Duration {
    ThreadTime::try_now().map_or(Duration::ZERO, |time| time.as_duration())
}

/// The time of each part so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OwnTime([Span; Part::ALL.len()]);

impl OwnTime {
    /// Adds to a part.
    pub fn add(&mut self, part: Part, span: Span) {
        let of = &mut self.0[part as usize];
        of.time += span.time;
        of.computed += span.computed;
    }

    /// Adds the computing time of a part; the part's whole time is added when its wait is over.
    pub fn add_computed(&mut self, part: Part, computed: Duration) {
        self.add(part, Span { time: Duration::ZERO, computed });
    }

    /// Adds time in which nothing was computed.
    pub fn add_wait(&mut self, part: Part, time: Duration) {
        self.add(part, Span { time, computed: Duration::ZERO });
    }

    pub fn of(&self, part: Part) -> Duration {
        self.0[part as usize].time
    }

    /// All parts but the wait.
    pub fn total(&self) -> Duration {
        let all: Duration = self.0.iter().map(|span| span.time).sum();
        all.saturating_sub(self.of(Part::Wait))
    }

    /// The computing time of all parts.
    pub fn computed(&self) -> Duration {
        self.0.iter().map(|span| span.computed).sum()
    }
}

/// The time when a request's head was read. An extension of requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived(pub Moment);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_time_but_nothing_computed() {
        let mut own = OwnTime::default();
        let began = Moment::now();
        std::thread::sleep(Duration::from_millis(20));
        own.add(Part::Admit, began.elapsed());
        assert!(own.total() >= Duration::from_millis(20) && own.computed() < Duration::from_millis(10));
        let began = Moment::now();
        let mut sum = 0u64;
        while began.elapsed().computed < Duration::from_millis(5) {
            sum = std::hint::black_box(sum + 1);
        }
        own.add(Part::Prepare, began.elapsed());
        assert!(own.computed() >= Duration::from_millis(5), "{own:?}");
        own.add_wait(Part::Wait, Duration::from_secs(1));
        assert!(own.total() < Duration::from_secs(1), "the wait is no part of the sum");
    }

    #[test]
    fn on_another_thread_all_time_counts() {
        let began = Moment::now();
        let span = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            began.elapsed()
        });
        let span = span.join().expect("a span");
        assert_eq!(span.time, span.computed);
    }
}
