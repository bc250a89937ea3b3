//! The engine's scheduler in simulated time.
//!
//! The scheduler is the real one ([`thunder_engine::Scheduler`]), with admission, pieces of prompts
//! next to decoding sequences, the prefix cache and preemption. Only the computation is replaced: a
//! [`StepCost`] gives the time of a step.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;
use thunder_cost::{Parallel, StepRows};
use thunder_engine::{Generation, Limits, RequestId, Scheduler, StepLoad, TokenEvent};

pub use crate::arrivals::{Arrival, Habit, Random};

/// The only token of simulated answers.
const ANSWER_TOKEN: u32 = 0;
/// Maximum number of events of a simulation, which limits the time of an absurd question.
const MOST_STEPS: usize = 4_000_000;

/// How long steps take.
pub trait StepCost {
    /// Stages of the pipeline.
    fn stages(&self) -> usize;
    /// Seconds of a step in a stage, including sending to the next stage.
    fn seconds(&self, stage: usize, rows: &StepRows) -> f64;
    /// Seconds from a request to an idle engine until its first step begins.
    fn wake_s(&self) -> f64 {
        0.0
    }
}

impl StepCost for Parallel {
    fn stages(&self) -> usize {
        self.stages.len()
    }

    fn seconds(&self, stage: usize, rows: &StepRows) -> f64 {
        self.stage_seconds(stage, rows)
    }
}

/// The requests of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub enum Workload {
    /// Requests that arrive whether or not earlier ones are answered.
    Open(Vec<Arrival>),
    /// Clients that each send the next request after their answer; arrival times are ignored.
    Closed {
        /// Clients.
        clients: usize,
        /// All their requests, in order.
        requests: Vec<Arrival>,
    },
}

/// The times of a request, in seconds from the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Served {
    /// When it came.
    pub at_s: f64,
    /// Time of its first token.
    pub first_s: f64,
    /// Time of its last token.
    pub end_s: f64,
    /// Tokens of the answer.
    pub tokens: usize,
}

/// The outcome of a simulation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Answered requests, in the order of their ends.
    pub served: Vec<Served>,
    /// Requests that the scheduler refused: they are longer than the context.
    pub refused: usize,
    /// Seconds in which at least one stage computed.
    pub busy_s: f64,
    /// Seconds in all.
    pub span_s: f64,
    /// Mean of the requests that ran together, over the busy time.
    pub running_mean: f64,
    /// The most requests that waited for a slot.
    pub waiting_most: usize,
    /// How often a request lost its slot.
    pub preemptions: u64,
}

/// A request between its arrival and its last token.
struct Active {
    at_s: f64,
    first_s: Option<f64>,
    tokens: usize,
}

/// A step in flight.
struct Computing {
    began_s: f64,
    ended_s: f64,
    /// Rows that want tokens.
    wanted: usize,
}

/// An engine in simulated time. Like a real engine, it keeps its scheduler's knowledge and cache
/// from one workload to the next.
pub struct Simulator<'a, C> {
    cost: &'a C,
    scheduler: Scheduler,
    coming: VecDeque<Arrival>,
    /// The times at which free clients had their last answer, the earliest first; `None` if
    /// requests have arrival times.
    free: Option<VecDeque<f64>>,
    active: BTreeMap<RequestId, Active>,
    /// When each stage is free.
    stage_free: Vec<f64>,
    in_flight: VecDeque<Computing>,
    now: f64,
    submitted: u32,
    /// Running requests times seconds.
    running_s: f64,
    events: Vec<TokenEvent>,
    outcome: Outcome,
}

/// Runs a workload on an engine that has just started, with these limits and a context of `context`
/// tokens.
pub fn run(cost: &impl StepCost, limits: Limits, context: usize, workload: Workload) -> Outcome {
    Simulator::new(cost, limits, context).run(workload)
}

impl<'a, C: StepCost> Simulator<'a, C> {
    /// An engine that has just started.
    pub fn new(cost: &'a C, limits: Limits, context: usize) -> Self {
        Self {
            cost,
            scheduler: Scheduler::new(limits, cost.stages(), context, Vec::new()),
            coming: VecDeque::new(),
            free: None,
            active: BTreeMap::new(),
            stage_free: vec![0.0; cost.stages()],
            in_flight: VecDeque::new(),
            now: 0.0,
            submitted: 0,
            running_s: 0.0,
            events: Vec::new(),
            outcome: Outcome::default(),
        }
    }

    /// Runs a workload; times of the outcome count from its start.
    pub fn run(&mut self, workload: Workload) -> Outcome {
        let (began_s, preemptions) = (self.now, self.scheduler.preemptions());
        let (coming, free) = match workload {
            Workload::Open(arrivals) => (arrivals, None),
            Workload::Closed { clients, requests } => (requests, Some(vec![began_s; clients].into())),
        };
        let later = |arrival: Arrival| Arrival { at_s: began_s + arrival.at_s, ..arrival };
        (self.coming, self.free) = (coming.into_iter().map(later).collect(), free);
        (self.running_s, self.outcome) = (0.0, Outcome::default());
        for _ in 0..MOST_STEPS {
            self.submit();
            self.issue();
            if self.in_flight.is_empty() && self.submit_to_idle() {
                self.issue();
            }
            if !self.apply() {
                break;
            }
        }
        let mut outcome = std::mem::take(&mut self.outcome);
        for served in &mut outcome.served {
            for time in [&mut served.at_s, &mut served.first_s, &mut served.end_s] {
                *time -= began_s;
            }
        }
        outcome.span_s = self.now - began_s;
        outcome.running_mean = self.running_s / outcome.busy_s.max(f64::MIN_POSITIVE);
        outcome.preemptions = self.scheduler.preemptions() - preemptions;
        outcome
    }

    /// Submits the requests that have arrived. A client whose answer ends now is not included,
    /// because the next step begins before its next request.
    fn submit(&mut self) {
        while let Some(&Arrival { at_s, .. }) = self.coming.front() {
            let at_s = match &mut self.free {
                None if at_s <= self.now => at_s,
                Some(free) if free.front().is_some_and(|since| *since < self.now) => {
                    free.pop_front().unwrap_or(self.now)
                }
                _ => break,
            };
            self.submit_next(at_s);
        }
    }

    /// Submits the request of the first free client. Nothing is being computed, so its step begins
    /// before the other clients send theirs.
    fn submit_to_idle(&mut self) -> bool {
        let Some(since) =
            self.free.as_mut().filter(|_| !self.coming.is_empty()).and_then(VecDeque::pop_front)
        else {
            return false;
        };
        self.now += self.cost.wake_s();
        self.submit_next(since);
        true
    }

    fn submit_next(&mut self, at_s: f64) {
        let Some(arrival) = self.coming.pop_front() else { return };
        let max_tokens = Some(arrival.answer.max(1));
        let generation = Generation { max_tokens, ignore_eos: true, ..Generation::default() };
        self.submitted += 1;
        match self.scheduler.submit(&prompt(&arrival, self.submitted), generation) {
            Ok(id) => drop(self.active.insert(id, Active { at_s, first_s: None, tokens: 0 })),
            Err(_) => {
                self.outcome.refused += 1;
                self.free.iter_mut().for_each(|free| free.push_back(self.now));
            }
        }
    }

    /// Issues steps until the pipeline is full or there is nothing to compute.
    fn issue(&mut self) {
        while let Some(step) = self.scheduler.next_step() {
            let (rows, wanted) = (rows_of(&step.load()), step.wanted_rows());
            let mut at = self.now;
            for (stage, free) in self.stage_free.iter_mut().enumerate() {
                at = at.max(*free) + self.cost.seconds(stage, &rows);
                *free = at;
            }
            self.in_flight.push_back(Computing { began_s: self.now, ended_s: at, wanted });
        }
        self.outcome.waiting_most = self.outcome.waiting_most.max(self.scheduler.waiting());
    }

    /// Advances to the end of the oldest step, or to the next request; false if there is neither.
    fn apply(&mut self) -> bool {
        let Some(Computing { began_s, ended_s, wanted }) = self.in_flight.pop_front() else {
            let Some(arrival) = self.coming.front() else { return false };
            if self.free.is_none() {
                self.now = self.now.max(arrival.at_s) + self.cost.wake_s();
            }
            return true;
        };
        let took = (ended_s - self.now).max(0.0);
        self.outcome.busy_s += took;
        self.running_s += took * self.scheduler.running() as f64;
        self.now = self.now.max(ended_s);
        self.scheduler.note_time(began_s, ended_s);
        self.scheduler.apply(&vec![ANSWER_TOKEN; wanted], &mut self.events);
        for event in self.events.drain(..) {
            let Some(request) = self.active.get_mut(&event.request) else { continue };
            let first_s = *request.first_s.get_or_insert(self.now);
            request.tokens += 1;
            let (at_s, tokens) = (request.at_s, request.tokens);
            if event.finish.is_some() {
                self.active.remove(&event.request);
                self.free.iter_mut().for_each(|free| free.push_back(self.now));
                self.outcome.served.push(Served { at_s, first_s, end_s: self.now, tokens });
            }
        }
        true
    }
}

/// The tokens of a prompt: first those of its user, then tokens that no prompt of another `number`
/// has.
pub fn prompt(arrival: &Arrival, number: u32) -> Vec<u32> {
    let mix =
        |a: u32, b: usize| a.wrapping_mul(0x9E37_79B9).wrapping_add(b as u32).wrapping_mul(0x85EB_CA6B) | 1;
    let shared = (0..arrival.shared).map(|place| mix(arrival.user, place));
    let own = (arrival.shared..arrival.prompt.max(1)).map(|place| mix(number ^ 0x5555_0000, place));
    shared.chain(own).collect()
}

/// The properties of a step's rows that determine its cost.
pub(crate) fn rows_of(load: &StepLoad) -> StepRows {
    StepRows {
        decode: load.decode,
        context: load.decode_pairs,
        prompt: load.prompt,
        prompt_pairs: load.prompt_pairs,
        prompt_context: load.prompt_context,
        prompt_ends: load.prompt_ends,
    }
}

/// Figures of a simulation, without the requests at the start, while the machines fill up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Answered requests that count.
    pub requests: usize,
    /// Median time to the first token.
    pub first_token_p50_s: f64,
    /// The time to the first token that 95 of 100 requests do not exceed.
    pub first_token_p95_s: f64,
    /// Tokens a second of an answer that 95 of 100 answers exceed.
    pub tokens_s_p5: f64,
    /// Median tokens a second of an answer.
    pub tokens_s_p50: f64,
    /// Tokens a second of all answers together.
    pub throughput_tokens_s: f64,
    /// Share of the time during which at least one stage computed.
    pub busy: f64,
    /// Mean of the requests that ran together.
    pub running_mean: f64,
    /// The most requests that waited.
    pub waiting_most: usize,
    /// How often a request lost its slot.
    pub preemptions: u64,
}

/// Share of the first requests that the summary of an open workload leaves out.
pub const WARM_UP: f64 = 0.1;

impl Outcome {
    /// The figures, without the first `warm_up` of the requests.
    pub fn summary(&self, warm_up: f64) -> Summary {
        let mut counted: Vec<Served> = self.served.clone();
        counted.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        counted.drain(..(counted.len() as f64 * warm_up) as usize);
        let first = |request: &Served| request.first_s - request.at_s;
        let speed = |request: &Served| {
            (request.tokens > 1)
                .then(|| (request.tokens - 1) as f64 / (request.end_s - request.first_s).max(1e-9))
        };
        let firsts = sorted(counted.iter().map(first));
        let speeds = sorted(counted.iter().filter_map(speed));
        let tokens: usize = self.served.iter().map(|request| request.tokens).sum();
        Summary {
            requests: counted.len(),
            first_token_p50_s: quantile(&firsts, 0.5),
            first_token_p95_s: quantile(&firsts, 0.95),
            tokens_s_p5: quantile(&speeds, 0.05),
            tokens_s_p50: quantile(&speeds, 0.5),
            throughput_tokens_s: tokens as f64 / self.span_s.max(1e-9),
            busy: self.busy_s / self.span_s.max(1e-9),
            running_mean: self.running_mean,
            waiting_most: self.waiting_most,
            preemptions: self.preemptions,
        }
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The value that a share of sorted values does not exceed; 0 if there are none.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = ((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len().max(1));
    sorted.get(place - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
#[path = "simulate_tests.rs"]
mod tests;
