//! The time that the gateway itself takes for a request: what is left without the engine, the queue
//! before it, and the network.

use std::time::{Duration, Instant};

/// A part of a request's way through the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// From the request's head to its account: routing, the key, a first look at its limits.
    Authorize,
    /// The wait while other bodies are prepared. It is load, not cost: no part of the sum.
    Wait,
    /// To the thread that prepares, and back.
    Switch,
    /// From the body to the prompt: parsing, the chat template, tokens, a grammar.
    Prepare,
    /// The limits, until the request is handed over. What follows is the engine's: being woken, it
    /// may take this very core.
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

/// The time of each part so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OwnTime([Duration; Part::ALL.len()]);

impl OwnTime {
    /// Adds to a part.
    pub fn add(&mut self, part: Part, time: Duration) {
        self.0[part as usize] += time;
    }

    /// Adds the time since a moment.
    pub fn add_since(&mut self, part: Part, since: Instant) {
        self.add(part, since.elapsed());
    }

    pub fn of(&self, part: Part) -> Duration {
        self.0[part as usize]
    }

    /// All parts but the wait.
    pub fn total(&self) -> Duration {
        self.0.iter().sum::<Duration>().saturating_sub(self.of(Part::Wait))
    }
}

/// When a request's head was read. An extension of requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived(pub Instant);
