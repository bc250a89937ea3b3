//! How much of prompts a step reads while streams wait for it: as much as fits into a time.
//!
//! The times are measured while the engine runs. The caller reports when a step began and ended
//! ([`super::Scheduler::note_time`]) on its own clock. The scheduler has no clock, so a simulation
//! can provide one.

mod cost;

use std::time::Duration;

use super::step::StepLoad;
use crate::speculation::{MAX_DRAFT, MAX_ROWS, StepCosts};
use cost::PromptCost;
pub use cost::RoutedExperts;

/// Rows of prompts next to streams while nothing was measured.
pub(super) const UNMEASURED_ROWS: usize = 64;
/// Minimum rows of the oldest prompt next to streams. With two, a prompt with three tokens left
/// could read none, because no piece is a single row.
pub(super) const LEAST_ROWS: usize = 3;
/// Prompts get at least as much time as the streams, and at most this many times as much.
const MOST_SHARE: f32 = 3.0;
/// A step may take the goal for each waiting prompt, up to this many. With one prompt, streams
/// hardly notice it; with many, most clients wait for their first token.
const MOST_GOALS: usize = 5;
/// For rows that are worth reading their experts, a step may take this many goals, or as long as
/// the streams and [`MOST_SHARE`] allow.
const MOST_GOALS_OF_EXPERTS: f32 = 24.0;
/// A step has at most this many times the measured rows of prompts, because the time of more rows
/// is a guess.
const MOST_GROWTH: f32 = 2.0;
/// Factor by which the largest measured number of rows decays with each step.
const REMEMBERED: f32 = 0.98;
/// Up to this many rows, times are kept for each number of rows; larger numbers share one.
const MOST_DECODED: usize = MAX_ROWS + MAX_DRAFT;

/// Requests that share the time of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    /// Requests that get their next token from the step.
    pub decoding: usize,
    /// Streams: requests that have received tokens, in this step or in one in flight.
    pub streams: usize,
    /// Requests whose prompt is being read.
    pub prompts: usize,
}

/// Measured times, and the goal.
#[derive(Debug)]
pub(super) struct Pace {
    goal_s: f32,
    stages: usize,
    /// Costs of steps that only decode, by number of rows.
    decode: StepCosts,
    /// By number of rows: prompts have been left out of a step, so that decoding is measured.
    waited: [bool; MOST_DECODED + 1],
    prompt: PromptCost,
    /// Approximate recent maximum of rows of prompts in a step.
    reach: f32,
    /// When the last step ended.
    last_s: f64,
}

impl Pace {
    pub fn new(goal: Duration, stages: usize, routed: Option<RoutedExperts>) -> Self {
        Self {
            goal_s: goal.as_secs_f32(),
            stages,
            decode: StepCosts::default(),
            waited: [false; MOST_DECODED + 1],
            prompt: PromptCost::new(routed),
            reach: 0.0,
            last_s: 0.0,
        }
    }

    /// Records when a step began and when its tokens arrived.
    pub fn note(&mut self, load: &StepLoad, began_s: f64, ended_s: f64) {
        // In a full pipeline, a step ends one stage's time after the previous one. A single step
        // passes through all stages.
        let stages = if began_s < self.last_s { 1 } else { self.stages };
        let seconds = ((ended_s - began_s.max(self.last_s)) / stages as f64) as f32;
        self.last_s = ended_s;
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        if load.prompt == 0 {
            return self.decode.note(load.decode.min(MOST_DECODED), seconds);
        }
        self.reach = (self.reach * REMEMBERED).max(load.prompt as f32);
        self.prompt.note(load, f64::from(seconds), f64::from(self.decode_s(load.decode)));
    }

    /// Seconds for rows of prompts in the next step, if streams wait for it. `None` if nothing was
    /// measured.
    pub fn prompt_s(&self, waiting: Waiting) -> Option<f32> {
        if !self.is_measured() {
            return None;
        }
        // Streams get a token once in as many steps as there are stages.
        let goals = waiting.prompts.clamp(1, MOST_GOALS) as f32;
        let goal_s = self.goal_s / self.stages as f32;
        let streams_s = self.decode_s(waiting.streams.div_ceil(self.stages));
        let share = waiting.prompts as f32 / waiting.streams.max(1) as f32;
        let fair_s = streams_s * share.clamp(1.0, MOST_SHARE);
        let taken_s = self.decode_s(waiting.decoding) + self.prompt.fixed_s();
        let free_s = goals * goal_s - taken_s;
        let most_s = (MOST_GOALS_OF_EXPERTS * goal_s).max((1.0 + MOST_SHARE) * streams_s) - taken_s;
        Some(fair_s.max(free_s).max(self.worthwhile_s().min(most_s)))
    }

    /// Seconds of the smallest number of rows that take at least as long to compute as to read
    /// their experts. The first rows of a piece read most of the experts, so in smaller pieces
    /// prompts take many times as long, and the streams with them.
    fn worthwhile_s(&self) -> f32 {
        let row_s = self.prompt.row_s(0);
        let is_worth = |rows: &usize| self.prompt.experts_s(*rows, 0) <= row_s * *rows as f32;
        let sizes = (0..usize::BITS - 1).map(|power| 1usize << power);
        sizes.into_iter().find(is_worth).filter(|rows| *rows > 1).map_or(0.0, |rows| self.seconds(rows, 0, 0))
    }

    /// True if the next step should leave prompts out, once for each number of decoding rows. If
    /// prompts never end, decoding is never measured alone: its time would be attributed to the
    /// prompts, however few rows they have, and they would get the minimum.
    pub fn measures_decoding(&mut self, waiting: Waiting) -> bool {
        let rows = waiting.decoding.min(MOST_DECODED);
        let is_unknown = self.is_measured() && !self.decode.is_measured(rows);
        rows > 0 && waiting.prompts > 0 && is_unknown && !std::mem::replace(&mut self.waited[rows], true)
    }

    /// True if the time of prompts was measured.
    pub fn is_measured(&self) -> bool {
        self.prompt.is_measured()
    }

    /// Number of rows from position `start` that can be read in `seconds`, next to `before` other
    /// rows of prompts.
    pub fn rows_in(&self, seconds: f32, start: usize, before: usize) -> usize {
        let (mut fits, mut above) = (0, (MOST_GROWTH * self.reach) as usize + 1);
        while above - fits > 1 {
            let middle = fits + (above - fits) / 2;
            if self.seconds(middle, start, before) <= seconds { fits = middle } else { above = middle }
        }
        // Kernels process rows in tiles, so an eighth fewer rows may take more than an eighth less
        // time.
        let tile = 1 << (fits / 8).max(1).ilog2();
        fits - fits % tile
    }

    /// Seconds of `rows` rows from position `start`, next to `before` other rows of prompts.
    pub fn seconds(&self, rows: usize, start: usize, before: usize) -> f32 {
        self.prompt.row_s(start) * rows as f32 + self.prompt.experts_s(rows, before)
    }

    /// Seconds of decoding; 0 if not measured.
    fn decode_s(&self, rows: usize) -> f32 {
        if rows == 0 { 0.0 } else { self.decode.expected(rows.min(MOST_DECODED)).unwrap_or(0.0) }
    }
}
