//! A question about capacity, and its answer.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use thunder_cost::Parallel;
use thunder_engine::Limits;
use thunder_model::ModelFolder;
use thunder_model::synth::Shape;

use crate::PlanError;
use crate::layouts::{self, Candidate, Layout, Serving};
use crate::machines::{LINKS, MACHINES, Machine};
use crate::measured::Measured;
use crate::money::{Costs, DAYS, Energy, Month, WORKING_DAYS};
use crate::question::MOST_USERS;
pub use crate::question::{Goal, Machines, Question};
use crate::simulate::{self, StepCost, Summary, WARM_UP, Workload};
pub use crate::trace::Trace;

/// Requests of a simulation at the busiest time.
const REQUESTS: usize = 600;
/// Requests for each client, in a simulation with clients that wait.
const REQUESTS_A_CLIENT: usize = 6;
/// Minimum number of requests, so that one slow request is not the slowest twentieth.
const LEAST_REQUESTS: usize = 100;
/// Maximum rate to try for a trace, in tenths of its own rate.
const MOST_TENTHS: u32 = 10_000;
/// The same question always gets the same answer.
const SEED: u64 = 1;

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// All layouts that were considered.
    pub layouts: Vec<Layout>,
    /// The layout for the rest of the answer.
    pub chosen: Option<String>,
    /// Why there is no layout, or what is unusual about it.
    pub why: Option<String>,
    /// The busiest time.
    pub load: Option<Load>,
    /// Maximum number of such users for which the goal is met.
    pub most_users: Option<u32>,
    /// Maximum number of parallel requests for which the goal is met.
    pub most_at_once: Option<usize>,
    /// For a trace: the number of its requests. Refused requests do not count.
    pub requests: Option<usize>,
    /// For a trace: the factor by which its rate may grow.
    pub most_times: Option<f64>,
    /// Power and energy, if there is a layout.
    pub energy: Option<Energy>,
    /// Costs, if machines have a price.
    pub money: Option<Costs>,
    /// Assumptions of the answer.
    pub assumptions: Vec<String>,
}

/// The busiest time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Load {
    /// Requests a second.
    pub requests_s: f64,
    /// What the users get.
    pub simulated: Simulated,
}

/// A simulation's figures and what they mean.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Simulated {
    /// The figures.
    #[serde(flatten)]
    pub summary: Summary,
    /// Whether the goal is met.
    pub meets_goal: bool,
}

impl std::ops::Deref for Simulated {
    type Target = Summary;

    fn deref(&self) -> &Summary {
        &self.summary
    }
}

/// The names that questions may use, for a form.
pub fn known() -> Value {
    json!({ "machines": MACHINES, "links": LINKS, "models": Shape::names().collect::<Vec<_>>() })
}

/// Answers a question about machines of the table, or about measured machines.
///
/// # Errors
/// When a name is unknown, a number makes no sense, or the model's files are damaged.
pub fn plan(question: &Question) -> Result<Answer, PlanError> {
    question.check()?;
    if let Some(measured) = &question.measured {
        return plan_measured(question, measured);
    }
    let (machines, link) = (question.machines()?, question.link()?);
    let path = Path::new(&question.model);
    let (folder, _outline): (ModelFolder, _) = if path.components().count() > 1 || path.exists() {
        (layouts::on_disk(path)?, None)
    } else {
        let (folder, outline) = layouts::published(&question.model, question.bits)?;
        (folder, Some(outline))
    };
    let serving = Serving {
        max_batch: question.max_batch,
        context: question.context,
        step_time: Duration::from_secs_f64(question.step_time_s),
    };
    let candidates = layouts::candidates(&folder, &machines, link, serving)?;
    check_layout(question, &candidates)?;
    let mut answer = Answer::begin(
        candidates.iter().map(|candidate| candidate.shown.clone()).collect(),
        assumptions(question),
    );
    let Some((candidate, summary)) = best(question, &candidates) else {
        let why = "the model fits on none of the layouts: take more machines, more memory, or fewer bits";
        answer.why = Some(why.to_owned());
        return Ok(answer);
    };
    answer.chosen = Some(candidate.shown.layout.clone());
    // Machines outside the layout are idle.
    let used = candidate.machines as f64 / machines.len() as f64;
    if let Some(engine) = candidate.engine() {
        answer.fill(question, engine, summary, &month(question, used, &machines, &summary));
    }
    Ok(answer)
}

/// The answer for a model and machines measured by `thunder bench report`. Prices and watts are
/// those of the question's machines.
fn plan_measured(question: &Question, measured: &Measured) -> Result<Answer, PlanError> {
    let last = |name: &str| name.trim_end_matches('/').rsplit('/').next().map(str::to_ascii_lowercase);
    if last(&question.model) != last(&measured.model) {
        return Err(PlanError::Field {
            field: "model",
            value: question.model.clone(),
            must_be: format!(
                "the measured step times are of {0}: plan for {0}, or measure this one",
                measured.model
            ),
        });
    }
    let machines = question.machines()?;
    let engine = SimulatedEngine { cost: measured, limits: measured.limits(), context: measured.context };
    let summary = engine.serve(question, question.users);
    let mut answer = Answer::begin(Vec::new(), assumptions_of_measured(question, measured));
    answer.fill(question, engine, summary, &month(question, 1.0, &machines, &summary));
    Ok(answer)
}

impl Answer {
    /// An answer without figures yet.
    fn begin(layouts: Vec<Layout>, assumptions: Vec<String>) -> Self {
        Self {
            layouts,
            chosen: None,
            why: None,
            load: None,
            most_users: None,
            most_at_once: None,
            requests: None,
            most_times: None,
            energy: None,
            money: None,
            assumptions,
        }
    }

    /// The service that users of an engine get, their maximum number, and their cost.
    fn fill<C: StepCost>(
        &mut self,
        question: &Question,
        engine: SimulatedEngine<'_, C>,
        summary: Summary,
        month: &Month,
    ) {
        self.energy = Some(month.energy());
        self.money = question.money.costs(month);
        let meets_goal = question.goal.is_met(&summary);
        self.load =
            Some(Load { requests_s: question.requests_s(), simulated: Simulated { summary, meets_goal } });
        if let Some(trace) = &question.trace {
            self.requests = Some(trace.requests());
            let times = |tenths: u32| f64::from(tenths) / 10.0;
            let holds =
                |tenths| question.goal.is_met(&engine.run(Workload::Open(trace.faster(times(tenths)))));
            self.most_times = most(MOST_TENTHS, holds).map(times);
            return;
        }
        let most_at_once = 4 * engine.limits.sequences as u32;
        self.most_users = most(MOST_USERS, |users| question.goal.is_met(&engine.serve(question, users)));
        self.most_at_once =
            most(most_at_once, |clients| question.goal.is_met(&engine.serve_at_once(question, clients)))
                .map(|count| count as usize);
    }
}

/// An engine to simulate.
#[derive(Clone, Copy)]
struct SimulatedEngine<'a, C> {
    cost: &'a C,
    limits: Limits,
    context: usize,
}

impl<C: StepCost> SimulatedEngine<'_, C> {
    fn run(&self, workload: Workload) -> Summary {
        simulate::run(self.cost, self.limits, self.context, workload).summary(WARM_UP)
    }

    /// The service that a number of users gets at the busiest time, or the users of a trace.
    fn serve(&self, question: &Question, users: u32) -> Summary {
        if let Some(trace) = &question.trace {
            return self.run(Workload::Open(trace.faster(1.0)));
        }
        let rate_s = question.rate_of_one_s() * f64::from(users);
        self.run(Workload::Open(question.habit(users).open(rate_s, REQUESTS, SEED)))
    }

    /// The service for clients that send their next request after the answer to the previous one.
    fn serve_at_once(&self, question: &Question, clients: u32) -> Summary {
        let count = (REQUESTS_A_CLIENT * clients as usize).max(LEAST_REQUESTS);
        let requests = question.habit(clients).open(1.0, count, SEED);
        self.run(Workload::Closed { clients: clients as usize, requests })
    }
}

impl Candidate {
    /// The engine; `None` if the model does not fit.
    fn engine(&self) -> Option<SimulatedEngine<'_, Parallel>> {
        Some(SimulatedEngine { cost: &self.cost, limits: self.limits?, context: self.context })
    }
}

/// Whether a layout is the wanted one. The machine in brackets may be left out.
fn is_named(layout: &str, wanted: &str) -> bool {
    layout == wanted || layout.split_once(" (").is_some_and(|(name, _)| name == wanted)
}

fn check_layout(question: &Question, candidates: &[Candidate]) -> Result<(), PlanError> {
    let names: Vec<&str> = candidates.iter().map(|candidate| candidate.shown.layout.as_str()).collect();
    match &question.layout {
        Some(wanted) if !names.iter().any(|name| is_named(name, wanted)) => {
            let must_be = format!("use one of {}", names.join(", "));
            Err(PlanError::Field { field: "layout", value: wanted.clone(), must_be })
        }
        _ => Ok(()),
    }
}

/// The layout that meets the goal best, and its service. If no layout meets the goal, the nearest
/// one; `None` if the model fits on none.
fn best<'a>(question: &Question, candidates: &'a [Candidate]) -> Option<(&'a Candidate, Summary)> {
    let allowed = |candidate: &&Candidate| {
        question.layout.as_ref().is_none_or(|wanted| is_named(&candidate.shown.layout, wanted))
    };
    let tried = candidates
        .iter()
        .filter(allowed)
        .filter_map(|candidate| Some((candidate, candidate.engine()?.serve(question, question.users))));
    let goal = &question.goal;
    // The distance of the first token and the speed from the goal.
    let distance = |summary: &Summary| {
        summary.first_token_p95_s / goal.first_token_s + goal.tokens_s / summary.tokens_s_p5.max(1e-9)
    };
    tried.min_by(|(_, a), (_, b)| {
        let misses = (!goal.is_met(a)).cmp(&!goal.is_met(b));
        misses.then(distance(a).total_cmp(&distance(b)))
    })
}

/// The largest number up to `limit` for which `holds` is true. It must be true for all smaller
/// ones. `None` if it is false for 1.
fn most(limit: u32, holds: impl Fn(u32) -> bool) -> Option<u32> {
    if !holds(1) {
        return None;
    }
    let (mut good, mut bad) = (1, 2);
    while bad <= limit && holds(bad) {
        (good, bad) = (bad, bad.saturating_mul(2));
    }
    bad = bad.min(limit.saturating_add(1));
    // A twentieth is more exact than the knowledge about the users.
    while bad - good > (good / 20).max(1) {
        let middle = good + (bad - good) / 2;
        if holds(middle) { good = middle } else { bad = middle }
    }
    Some(good)
}

fn month(question: &Question, used: f64, machines: &[Machine], peak: &Summary) -> Month {
    let watts = |of: fn(&Machine) -> f64| machines.iter().map(of).sum::<f64>();
    let days = WORKING_DAYS * f64::from(question.users) * question.requests_per_user_day;
    let [prompt_tokens, answer_tokens] = match &question.trace {
        Some(trace) => trace.tokens().map(|tokens| tokens * DAYS * 86_400.0 / trace.span_s()),
        None => [question.prompt_tokens, question.answer_tokens].map(|tokens| days * tokens as f64),
    };
    let (idle, busy) = (watts(|machine| machine.idle_watts), watts(|machine| machine.busy_watts));
    Month {
        machines: machines.len() as f64,
        idle_watts: idle,
        busy_watts: idle + (busy - idle) * used,
        // A trace counts as the mean of all hours.
        busy: match question.trace {
            Some(_) => peak.busy,
            None => peak.busy / question.peak * (question.active_hours / 24.0) * 5.0 / 7.0,
        },
        users: f64::from(question.users),
        prompt_tokens,
        answer_tokens,
    }
}

fn assumptions(question: &Question) -> Vec<String> {
    let of_table = "Machines are those of the table, not measured: an engine reaches 75 % of their memory bandwidth and half of \
                    their arithmetic. Thunderhead's own kernels for GPUs are not measured on them.";
    let batch = format!("At most {} requests decode together; others wait.", question.max_batch);
    [vec![of_table.to_owned(), batch], assumptions_of_all(question)].concat()
}

fn assumptions_of_measured(question: &Question, measured: &Measured) -> Vec<String> {
    let steps = format!(
        "Steps take the time that they were measured to take: {} on {} rank(s). Prices and watts are of --machines.",
        measured.model, measured.ranks
    );
    let batch = format!("At most {} requests decode together, as when it was measured.", measured.sequences);
    [vec![steps, batch], assumptions_of_all(question)].concat()
}

fn assumptions_of_all(question: &Question) -> Vec<String> {
    let load = match &question.trace {
        Some(trace) => format!(
            "The {} requests of the trace come as they were recorded. What a key's prompts have in common is what the cache had \
             of each. Costs take the trace for the mean of all hours.",
            trace.requests()
        ),
        None => format!(
            "The busiest time has {} times the mean rate of {} hours on working days; {REQUESTS} requests come at random \
             times (Poisson), with lengths from half to one and a half of the mean.",
            question.peak, question.active_hours
        ),
    };
    let goal = "95 of 100 requests must keep the goal. Guessing of repeated text, which only makes answers faster, is left out.";
    let energy = "Energy: idle watts all the time, and those of full load for the share of the time in which something is computed.";
    vec![load, goal.to_owned(), energy.to_owned()]
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
