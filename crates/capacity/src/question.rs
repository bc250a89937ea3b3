//! Questions: a model, machines, people, a goal, prices.

use serde::{Deserialize, Serialize};
use thunder_cost::LinkSpeed;

use crate::PlanError;
use crate::machines::{LINKS, Link, MACHINES, Machine};
use crate::measured::Measured;
use crate::money::{Prices, is_currency};
use crate::simulate::{Habit, Summary};
use crate::trace::Trace;

/// Maximum number of users to try.
pub(crate) const MOST_USERS: u32 = 100_000;
/// Maximum number of machines in a question.
const MOST_MACHINES: usize = 64;

/// A question.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// A published shape (`thunder capacity --list`), a folder or a GGUF file.
    pub model: String,
    /// Bits of a weight for a published shape: 2, 3, 4, 5, 6, 8, or 16 for bf16.
    #[serde(default = "four")]
    pub bits: u32,
    /// The machines.
    pub machines: Vec<Machines>,
    /// What joins them.
    #[serde(default = "fastest_link")]
    pub link: String,
    /// A layout's name; without it, the best is chosen.
    #[serde(default)]
    pub layout: Option<String>,
    /// Requests that decode together (`thunder serve --max-batch`).
    #[serde(default = "batch")]
    pub max_batch: usize,
    /// Most tokens of prompt and answer together.
    #[serde(default = "context")]
    pub context: usize,
    /// Time that a step may take for each new prompt while answers are running (`thunder serve
    /// --step-time`), in seconds.
    #[serde(default = "step_time_s")]
    pub step_time_s: f64,
    /// Users.
    pub users: u32,
    /// Requests of each user on a working day.
    pub requests_per_user_day: f64,
    /// Hours of the day during which requests arrive.
    #[serde(default = "eight")]
    pub active_hours: f64,
    /// The rate at the busiest time, as a multiple of the mean of these hours.
    #[serde(default = "three")]
    pub peak: f64,
    /// Mean tokens of a prompt.
    pub prompt_tokens: usize,
    /// Share of a prompt with which the user's earlier prompts began.
    #[serde(default)]
    pub cached_share: f64,
    /// Mean tokens of an answer.
    pub answer_tokens: usize,
    /// The service that users were promised.
    #[serde(default)]
    pub goal: Goal,
    /// Prices.
    #[serde(default)]
    pub money: Prices,
    /// Recorded requests, instead of those described by users, lengths and shares. In JSON, a text
    /// with the lines for [`Trace::read`].
    #[serde(skip)]
    pub trace: Option<Trace>,
    #[serde(default, rename = "trace")]
    trace_lines: Option<String>,
    /// Measured step times, instead of those of the table. The machines then only have prices and
    /// watts.
    #[serde(default)]
    pub measured: Option<Measured>,
}

/// A number of machines of one kind.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machines {
    /// A name of [`MACHINES`].
    pub machine: String,
    /// How many.
    pub count: usize,
}

/// The goal for 95 of 100 requests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Goal {
    /// Seconds to the first token.
    pub first_token_s: f64,
    /// Tokens a second of an answer.
    pub tokens_s: f64,
}

impl Default for Goal {
    fn default() -> Self {
        Self { first_token_s: 3.0, tokens_s: 10.0 }
    }
}

const fn four() -> u32 {
    4
}
const fn batch() -> usize {
    16
}
fn step_time_s() -> f64 {
    thunder_engine::STEP_TIME.as_secs_f64()
}
const fn context() -> usize {
    32_768
}
const fn eight() -> f64 {
    8.0
}
const fn three() -> f64 {
    3.0
}
fn fastest_link() -> String {
    LINKS[0].name.to_owned()
}

impl Question {
    /// Reads a question from JSON, and checks its numbers.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn read(json: &[u8]) -> Result<Self, PlanError> {
        let mut question: Self = serde_json::from_slice(json)?;
        question.trace = question.trace_lines.take().map(|lines| Trace::read(&lines)).transpose()?;
        question.measured.as_ref().map_or(Ok(()), Measured::check)?;
        question.check()?;
        Ok(question)
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn check(&self) -> Result<(), PlanError> {
        if !is_currency(&self.money.currency) {
            return Err(PlanError::Field {
                field: "money.currency",
                value: format!("{:?}", self.money.currency.chars().take(40).collect::<String>()),
                must_be: "use three capital letters, like EUR, or a symbol, like €".to_owned(),
            });
        }
        let numbers: [(&'static str, f64, f64, f64); 18] = [
            ("users", f64::from(self.users), 1.0, f64::from(MOST_USERS)),
            ("requests_per_user_day", self.requests_per_user_day, 0.01, 100_000.0),
            ("active_hours", self.active_hours, 0.1, 24.0),
            ("peak", self.peak, 1.0, 100.0),
            ("prompt_tokens", self.prompt_tokens as f64, 1.0, 1e6),
            ("answer_tokens", self.answer_tokens as f64, 1.0, 1e5),
            ("cached_share", self.cached_share, 0.0, 1.0),
            ("max_batch", self.max_batch as f64, 1.0, 256.0),
            ("context", self.context as f64, 64.0, 1e7),
            ("step_time_s", self.step_time_s, 1e-3, 60.0),
            ("goal.first_token_s", self.goal.first_token_s, 1e-3, 1e4),
            ("goal.tokens_s", self.goal.tokens_s, 1e-3, 1e5),
            ("money.years", self.money.years, 0.1, 50.0),
            ("money.kwh_price", self.money.kwh_price, 0.0, 1e6),
            ("money.other_month", self.money.other_month, 0.0, 1e12),
            ("money.machine_price", self.money.machine_price.unwrap_or(0.0), 0.0, 1e12),
            ("money.api_input", self.money.api_input.unwrap_or(0.0), 0.0, 1e6),
            ("money.api_output", self.money.api_output.unwrap_or(0.0), 0.0, 1e6),
        ];
        for (field, value, least, most) in numbers {
            // NaN is in no range.
            if !(least..=most).contains(&value) {
                let must_be = format!("must be between {least} and {most}");
                return Err(PlanError::Field { field, value: value.to_string(), must_be });
            }
        }
        Ok(())
    }

    pub(crate) fn machines(&self) -> Result<Vec<Machine>, PlanError> {
        let mut machines = Vec::new();
        for some in &self.machines {
            let known = Machine::named(&some.machine).ok_or_else(|| PlanError::Field {
                field: "machine",
                value: some.machine.clone(),
                must_be: format!("use one of {}", MACHINES.map(|machine| machine.name).join(", ")),
            })?;
            machines.extend(std::iter::repeat_n(*known, some.count.min(MOST_MACHINES + 1)));
        }
        if machines.is_empty() || machines.len() > MOST_MACHINES {
            let must_be = format!("must be between 1 and {MOST_MACHINES}");
            return Err(PlanError::Field { field: "machines", value: machines.len().to_string(), must_be });
        }
        Ok(machines)
    }

    pub(crate) fn link(&self) -> Result<LinkSpeed, PlanError> {
        let known = Link::named(&self.link).ok_or_else(|| PlanError::Field {
            field: "link",
            value: self.link.clone(),
            must_be: format!("use one of {}", LINKS.map(|link| link.name).join(", ")),
        })?;
        Ok(known.speed())
    }

    pub(crate) fn habit(&self, users: u32) -> Habit {
        Habit {
            users: users.max(1),
            prompt: self.prompt_tokens,
            answer: self.answer_tokens,
            shared: self.cached_share,
        }
    }

    /// Requests a second: at the busiest time, or of the trace.
    pub(crate) fn requests_s(&self) -> f64 {
        match &self.trace {
            Some(trace) => trace.requests() as f64 / trace.span_s(),
            None => self.rate_of_one_s() * f64::from(self.users),
        }
    }

    /// Requests a second of one user at the busiest time.
    pub(crate) fn rate_of_one_s(&self) -> f64 {
        self.requests_per_user_day / (self.active_hours * 3600.0) * self.peak
    }
}

impl Goal {
    pub(crate) fn is_met(&self, summary: &Summary) -> bool {
        summary.requests > 0
            && summary.first_token_p95_s <= self.first_token_s
            && (summary.tokens_s_p5 >= self.tokens_s || summary.tokens_s_p50 == 0.0)
    }
}
