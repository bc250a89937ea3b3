//! How much of prompts a step reads while streams wait for it: as much as fits into a time.
//!
//! The times are measured as the engine runs. The caller says when a step began and ended
//! ([`super::Scheduler::note_time`]), on a clock of its own: the scheduler has none, and a
//! simulation's clock serves as well.

mod cost;

use std::time::Duration;

use super::step::StepLoad;
use crate::speculation::{MAX_DRAFT, MAX_ROWS, StepCosts};
use cost::PromptCost;
pub use cost::RoutedExperts;

/// Rows of prompts next to streams as long as nothing was measured.
pub(super) const UNMEASURED_ROWS: usize = 64;
/// Rows of the oldest prompt next to streams, at least: of two, a prompt with three tokens left
/// could read none, since no piece is a single row.
pub(super) const LEAST_ROWS: usize = 3;
/// Prompts get at least as much time as the streams, and at most this many times as much.
const MOST_SHARE: f32 = 3.0;
/// A step may take the goal for each prompt that waits, for this many at most. With one, streams
/// hardly notice; with many, the time to first tokens is what most clients wait for.
const MOST_GOALS: usize = 5;
/// For rows that are worth their experts, a step may take this many goals, or as long as streams
/// and [`MOST_SHARE`] take.
const MOST_GOALS_OF_EXPERTS: f32 = 24.0;
/// A step has at most this many times the rows of prompts that were measured: what more rows take
/// is a guess.
const MOST_GROWTH: f32 = 2.0;
/// What is left of the most measured rows after another step.
const REMEMBERED: f32 = 0.98;
/// Rows whose time is kept by their number; more are kept together.
const MOST_DECODED: usize = MAX_ROWS + MAX_DRAFT;

/// Requests that share a step's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    /// Requests whose next token the step gives.
    pub decoding: usize,
    /// Streams: requests that have received tokens, of this step or of one in flight.
    pub streams: usize,
    /// Requests whose prompt is being read.
    pub prompts: usize,
}

/// Measured times, and the goal.
#[derive(Debug)]
pub(super) struct Pace {
    goal_s: f32,
    stages: usize,
    /// Steps that only decode, by their rows.
    decode: StepCosts,
    /// By rows: prompts have waited for a step, so that decoding is measured.
    waited: [bool; MOST_DECODED + 1],
    prompt: PromptCost,
    /// About the most rows of prompts in a step, lately.
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

    /// Notes when a step began and when its tokens were there.
    pub fn note(&mut self, load: &StepLoad, began_s: f64, ended_s: f64) {
        // In a full pipeline, a step ends one stage's time after the one before. Alone it passes
        // all stages.
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

    /// Seconds for rows of prompts in the next step, if streams wait for it. `None` if nothing is
    /// known.
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

    /// Seconds of the fewest rows that take no longer to read their experts than to compute. The
    /// first rows of a piece read most of the experts, so prompts in smaller pieces take many times
    /// as long, and the streams with them.
    fn worthwhile_s(&self) -> f32 {
        let row_s = self.prompt.row_s(0);
        let is_worth = |rows: &usize| self.prompt.experts_s(*rows, 0) <= row_s * *rows as f32;
        let sizes = (0..usize::BITS - 1).map(|power| 1usize << power);
        sizes.into_iter().find(is_worth).filter(|rows| *rows > 1).map_or(0.0, |rows| self.seconds(rows, 0, 0))
    }

    /// True if the next step should leave prompts out, once for each number of rows that decode. If
    /// prompts never end, decoding is never measured alone: its time would count as the prompts',
    /// however few of their rows a step has, and they would get the fewest.
    pub fn measures_decoding(&mut self, waiting: Waiting) -> bool {
        let rows = waiting.decoding.min(MOST_DECODED);
        let is_unknown = self.is_measured() && !self.decode.is_measured(rows);
        rows > 0 && waiting.prompts > 0 && is_unknown && !std::mem::replace(&mut self.waited[rows], true)
    }

    /// True if it is known how long prompts take.
    pub fn is_measured(&self) -> bool {
        self.prompt.is_measured()
    }

    /// Rows from position `start` that are read in `seconds`, next to `before` other rows of
    /// prompts.
    pub fn rows_in(&self, seconds: f32, start: usize, before: usize) -> usize {
        let (mut fits, mut above) = (0, (MOST_GROWTH * self.reach) as usize + 1);
        while above - fits > 1 {
            let middle = fits + (above - fits) / 2;
            if self.seconds(middle, start, before) <= seconds { fits = middle } else { above = middle }
        }
        // Kernels take rows in tiles: an eighth less may take less time by more than that.
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
