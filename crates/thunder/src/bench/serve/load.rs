//! The requests of one measurement, and when they are sent.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::stream::{Answer, Target};

/// Maximum number of running requests at a fixed rate. Further requests count as failed, because
/// the server is far behind.
const MAX_IN_FLIGHT: usize = 1024;
/// Maximum number of error kinds that are counted separately.
const MAX_ERRORS: usize = 16;

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// By this many clients, one after the other.
    Clients(usize),
    /// At random times.
    PerSecond(f64),
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clients(1) => write!(f, "1 client"),
            Self::Clients(count) => write!(f, "{count} clients"),
            Self::PerSecond(rate) => write!(f, "{rate}/s"),
        }
    }
}

impl Pace {
    pub fn usual_requests(self) -> usize {
        match self {
            Self::Clients(clients) => (4 * clients).max(16),
            Self::PerSecond(rate) => (20.0 * rate).clamp(16.0, 10_000.0) as usize,
        }
    }

    /// The load as a number, for a plot.
    pub fn amount(self) -> f64 {
        match self {
            Self::Clients(clients) => clients as f64,
            Self::PerSecond(rate) => rate,
        }
    }
}

/// One measurement.
pub struct Load {
    pub pace: Pace,
    pub requests: usize,
    pub words: usize,
    pub shared_words: usize,
    pub seed: u64,
}

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    pub pace: Pace,
    pub answers: Vec<Answer>,
    /// How often each error happened.
    pub errors: BTreeMap<String, usize>,
    pub wall: Duration,
}

impl Measured {
    pub fn completed(&self) -> usize {
        self.answers.len()
    }

    pub fn failed(&self) -> usize {
        self.errors.values().sum()
    }
}

#[derive(Default)]
struct Outcomes {
    answers: Vec<Answer>,
    errors: BTreeMap<String, usize>,
}

impl Outcomes {
    fn add(&mut self, outcome: Result<Answer, String>) {
        match outcome {
            Ok(answer) => self.answers.push(answer),
            Err(error) if self.errors.len() < MAX_ERRORS || self.errors.contains_key(&error) => {
                *self.errors.entry(error).or_default() += 1;
            }
            Err(_) => *self.errors.entry("other errors".to_owned()).or_default() += 1,
        }
    }
}

impl Load {
    /// Sends all requests and waits for their ends.
    pub fn run(&self, target: &Target) -> Measured {
        let outcomes = Mutex::new(Outcomes::default());
        let add = |outcome| outcomes.lock().unwrap_or_else(PoisonError::into_inner).add(outcome);
        let began = Instant::now();
        match self.pace {
            Pace::Clients(clients) => {
                let next = AtomicUsize::new(0);
                std::thread::scope(|scope| {
                    for _ in 0..clients {
                        scope.spawn(|| {
                            loop {
                                let index = next.fetch_add(1, Ordering::Relaxed);
                                if index >= self.requests {
                                    return;
                                }
                                add(target.ask(&self.prompt(index)));
                            }
                        });
                    }
                });
            }
            Pace::PerSecond(rate) => self.run_at_rate(rate, target, &add),
        }
        let Outcomes { answers, errors } = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
        Measured { pace: self.pace, answers, errors, wall: began.elapsed() }
    }

    fn run_at_rate(&self, rate: f64, target: &Target, add: &(impl Fn(Result<Answer, String>) + Sync)) {
        let in_flight = AtomicUsize::new(0);
        let in_flight = &in_flight;
        let mut random = Random(self.seed);
        let mut due = Instant::now();
        std::thread::scope(|scope| {
            for index in 0..self.requests {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                // Times between arrivals are exponential.
                due += Duration::from_secs_f64((-(1.0 - random.unit()).ln() / rate).min(3600.0));
                if in_flight.fetch_add(1, Ordering::Relaxed) >= MAX_IN_FLIGHT {
                    in_flight.fetch_sub(1, Ordering::Relaxed);
                    add(Err(format!("{MAX_IN_FLIGHT} requests were in flight already")));
                    continue;
                }
                scope.spawn(move || {
                    add(target.ask(&self.prompt(index)));
                    in_flight.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
    }

    /// The prompt of a request: the shared words, then its own.
    fn prompt(&self, index: usize) -> String {
        let mut text = String::new();
        let mut shared = Random(self.seed);
        let mut own = Random(self.seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (0..self.shared_words).for_each(|_| shared.add_word(&mut text));
        (0..self.words).for_each(|_| own.add_word(&mut text));
        text
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn add_word(&mut self, text: &mut String) {
        const WORDS: [&str; 32] = [
            "time", "water", "people", "house", "small", "night", "story", "group", "light", "power",
            "early", "south", "paper", "river", "green", "music", "table", "voice", "stone", "model",
            "heart", "world", "point", "money", "front", "sound", "field", "money", "plant", "horse",
            "cloud", "north",
        ];
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(WORDS[(self.next() >> 59) as usize]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_their_beginning_and_nothing_else() {
        let pace = Pace::Clients(1);
        let load = Load { pace, requests: 2, words: 20, shared_words: 50, seed: 3 };
        let prompts: Vec<String> = (0..2).map(|index| load.prompt(index)).collect();
        let words: Vec<Vec<&str>> = prompts.iter().map(|prompt| prompt.split(' ').collect()).collect();
        assert_eq!(words[0][..50], words[1][..50]);
        assert_ne!(words[0][50..], words[1][50..]);
        assert_eq!([words[0].len(), words[1].len()], [70, 70]);
        assert_eq!(load.prompt(1), prompts[1], "prompts can be repeated");
    }

    #[test]
    fn errors_are_counted_in_bounded_memory() {
        let mut outcomes = Outcomes::default();
        for index in 0..100 {
            outcomes.add(Err(format!("error {index}")));
        }
        assert_eq!(outcomes.errors.len(), MAX_ERRORS + 1);
        assert_eq!(outcomes.errors.values().sum::<usize>(), 100);
    }
}
