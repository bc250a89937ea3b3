//! `thunder capacity`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde_json::{Value, json};
use thunder_capacity::machines::{LINKS, MACHINES};
use thunder_capacity::measured::Measured;
use thunder_capacity::money::{Costs, Energy};
use thunder_capacity::plan::{Answer, Question, Trace, plan};
use thunder_capacity::simulate::Summary;
use thunder_model::error::human_bytes;
use thunder_model::synth::Shape;

use crate::engine_args::{DEFAULT_STEP_TIME, step_time};
use crate::table;

/// Plan capacity: what fits, how fast, how many users, what it costs
///
/// The machines need not exist. The command starts nothing: it runs the engine's scheduler in
/// simulated time, with a model of each machine's bandwidth, arithmetic and links, or with
/// --measured with the step times from `thunder bench report`.
#[derive(Args)]
// A number below 0 is refused as such, and not taken for an option.
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:
  thunder capacity qwen3-30b-a3b --machines m4-pro-64 --users 20
  thunder capacity deepseek-v3.1 --machines 4xm3-ultra-512 --users 100 --prompt 2000 --answer 500
  thunder capacity llama-70b --machines 2xdgx-spark --link roce-200 --price 4000 --currency EUR
  thunder bench report builtin > here.json; thunder capacity builtin --measured here.json --users 10
  thunder capacity --list")]
pub struct CapacityCommand {
    /// A published shape (--list), a folder or a GGUF file
    #[arg(value_name = "MODEL", required_unless_present = "list")]
    model: Option<String>,
    /// Machines, e.g. 4xm3-ultra-512, with commas between kinds
    #[arg(long, value_name = "N×MACHINE", value_delimiter = ',', default_value = "m4-pro-64")]
    machines: Vec<String>,
    /// Network between the machines, by its name in --list
    #[arg(long, value_name = "LINK", default_value = LINKS[0].name)]
    link: String,
    /// Bits of a weight, for a published shape: 2, 3, 4, 5, 6, 8, or 16 for bf16
    #[arg(long, value_name = "BITS", default_value_t = 4)]
    bits: u32,
    /// Layout to use, by its name in the table [default: the one that serves these users best]
    #[arg(long, value_name = "LAYOUT")]
    layout: Option<String>,
    /// Number of users
    #[arg(long, value_name = "N", default_value_t = 10)]
    users: u32,
    /// Requests by each user on a working day
    #[arg(long, value_name = "N", default_value_t = 40.0)]
    requests: f64,
    /// Hours of the day during which requests arrive
    #[arg(long, value_name = "HOURS", default_value_t = 8.0)]
    hours: f64,
    /// The busiest time's rate, as a multiple of the mean rate of these hours
    #[arg(long, value_name = "FACTOR", default_value_t = 3.0)]
    peak: f64,
    /// Mean tokens of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 1500)]
    prompt: usize,
    /// Share of a prompt, 0 to 1, with which the user's earlier prompts began
    ///
    /// A conversation sends its earlier turns again, and the prefix cache has them.
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    cached: f64,
    /// Mean tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 400)]
    answer: usize,
    /// File with recorded requests from `thunder usage --requests --format jsonl`, used instead of
    /// the options for users, rates and lengths
    ///
    /// Each line needs prompt_tokens, completion_tokens, and time or at_s (seconds). The costs are
    /// divided by --users.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["requests", "hours", "peak", "prompt", "cached", "answer"])]
    trace: Option<PathBuf>,
    /// Goal for 95 of 100 requests: seconds to the first token
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    first_token: f64,
    /// Goal for 95 of 100 requests: tokens a second
    #[arg(long, value_name = "RATE", default_value_t = 10.0)]
    speed: f64,
    /// Requests that decode together, as for `thunder serve`
    #[arg(long, value_name = "N", default_value_t = 16)]
    max_batch: usize,
    /// Maximum tokens of prompt and answer together
    #[arg(long, value_name = "TOKENS", default_value_t = 32_768)]
    context: usize,
    /// Time that a step may take for each new prompt while answers are running, as for `thunder
    /// serve`
    #[arg(long, value_name = "TIME", default_value = DEFAULT_STEP_TIME, value_parser = step_time)]
    step_time: Duration,
    /// Currency of all prices: three capital letters or a symbol, e.g. EUR or €
    #[arg(long, value_name = "CODE", default_value = "EUR")]
    currency: String,
    /// Price of each machine; needed for costs, not for power and energy
    #[arg(long, value_name = "AMOUNT")]
    price: Option<f64>,
    /// Years that a machine is used
    #[arg(long, value_name = "YEARS", default_value_t = 3.0)]
    years: f64,
    /// Price of a kilowatt hour
    #[arg(long, value_name = "AMOUNT", default_value_t = 0.30)]
    kwh: f64,
    /// Other costs a month
    #[arg(long, value_name = "AMOUNT", default_value_t = 0.0)]
    other: f64,
    /// An API's price of a million prompt tokens, to compare with
    #[arg(long, value_name = "AMOUNT", requires = "api_output")]
    api_input: Option<f64>,
    /// An API's price of a million answer tokens
    #[arg(long, value_name = "AMOUNT", requires = "api_input")]
    api_output: Option<f64>,
    /// Simulate with the step times from `thunder bench report` in this file; --machines then sets
    /// only prices and watts
    #[arg(long, value_name = "FILE")]
    measured: Option<PathBuf>,
    /// List the known machines, links and shapes, with their sources
    #[arg(long)]
    list: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl CapacityCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if self.list {
            return list(self.json);
        }
        let mut question = self.question()?;
        if let Some(path) = &self.trace {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            question.trace = Some(Trace::read(&text).with_context(|| path.display().to_string())?);
        }
        if let Some(path) = &self.measured {
            let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            question.measured = Some(Measured::read(&bytes).with_context(|| path.display().to_string())?);
        }
        let answer = plan(&question)?;
        if self.json {
            println!("{}", serde_json::to_string(&answer)?);
        } else {
            print(&question, &answer);
        }
        Ok(())
    }

    /// The question, as the planner's page sends it.
    fn question(&self) -> anyhow::Result<Question> {
        let machines =
            self.machines.iter().map(|text| some_machines(text)).collect::<anyhow::Result<Vec<_>>>()?;
        let question = json!({
            "model": self.model, "bits": self.bits, "machines": machines, "link": self.link, "layout": self.layout,
            "max_batch": self.max_batch, "context": self.context,
            "step_time_s": self.step_time.as_secs_f64(), "users": self.users,
            "requests_per_user_day": self.requests, "active_hours": self.hours, "peak": self.peak,
            "prompt_tokens": self.prompt, "cached_share": self.cached, "answer_tokens": self.answer,
            "goal": { "first_token_s": self.first_token, "tokens_s": self.speed },
            "money": {
                "currency": self.currency, "machine_price": self.price, "years": self.years, "kwh_price": self.kwh,
                "other_month": self.other, "api_input": self.api_input, "api_output": self.api_output,
            },
        });
        Ok(Question::read(question.to_string().as_bytes())?)
    }
}

/// `4xm3-ultra-512`, or a name for one machine.
fn some_machines(text: &str) -> anyhow::Result<Value> {
    let counted = text.split_once(['x', '×']).filter(|(count, _)| count.parse::<usize>().is_ok());
    let (count, machine) = match counted {
        Some((count, machine)) => (count.parse::<usize>()?, machine),
        None => (1, text),
    };
    if count == 0 {
        bail!("--machines {text}: at least one machine is needed");
    }
    Ok(json!({ "machine": machine, "count": count }))
}

fn print(question: &Question, answer: &Answer) {
    let mut layouts =
        table::new(&["layout", "fits", "weights", "KV cache", "tokens/s of one", "prompt tokens/s"]);
    for layout in &answer.layouts {
        let is_chosen = answer.chosen.as_ref() == Some(&layout.layout);
        layouts.add_row([
            format!("{}{}", layout.layout, if is_chosen { " (chosen)" } else { "" }),
            if layout.fits { "yes".to_owned() } else { "no".to_owned() },
            human_bytes(layout.weight_bytes),
            format!("{} tokens", layout.kv_tokens),
            format!("{:.1}", layout.decode_tokens_s),
            format!("{:.0}", layout.prompt_tokens_s),
        ]);
    }
    if !answer.layouts.is_empty() {
        println!("{layouts}");
    }
    for layout in &answer.layouts {
        if let Some(why) = &layout.why {
            println!("{}: {why}", layout.layout);
        }
    }
    if let Some(why) = &answer.why {
        println!("{why}");
    }
    if let Some(load) = &answer.load {
        let who = match &question.trace {
            Some(trace) => format!("{} requests of the trace", trace.requests()),
            None => format!("{} users at the busiest time", question.users),
        };
        println!("{who} ({:.2} requests/s):", load.requests_s);
        print_summary(&load.simulated.summary);
        let verdict = if load.simulated.meets_goal { "At least" } else { "Fewer than" };
        let (first, speed) = (question.goal.first_token_s, question.goal.tokens_s);
        println!("{verdict} 95 of 100 requests get a first token within {first} s and {speed} tokens/s.");
        match (answer.most_users, answer.most_at_once) {
            _ if question.trace.is_some() => match answer.most_times {
                Some(times) => println!("The same requests may come {times:.1} times as often."),
                None => println!("Not even a tenth of this rate gets it."),
            },
            (None, _) => println!(
                "Not even one user gets that: allow more time (--first-token), less speed (--speed), or shorten prompts."
            ),
            (Some(users), at_once) => println!(
                "At most about {users} users like these get it, or {} requests at a time.",
                at_once.unwrap_or(1)
            ),
        }
    }
    if let Some(energy) = &answer.energy {
        print_energy(energy);
    }
    if let Some(costs) = &answer.money {
        print_costs(costs);
    } else if answer.energy.is_some() {
        println!("--price AMOUNT adds the costs of a month.");
    }
    println!("What this rests on:");
    answer.assumptions.iter().for_each(|text| println!("- {text}"));
}

fn print_summary(summary: &Summary) {
    println!(
        "  first token: median {:.2} s, 95 % within {:.2} s; an answer: median {:.1} tokens/s, 95 % above {:.1}",
        summary.first_token_p50_s, summary.first_token_p95_s, summary.tokens_s_p50, summary.tokens_s_p5
    );
    println!(
        "  {:.1} tokens/s in all, busy for {:.0} % of the time, {:.1} requests at a time",
        summary.throughput_tokens_s,
        summary.busy * 100.0,
        summary.running_mean
    );
}

fn print_energy(energy: &Energy) {
    let Energy { idle_watts, busy_watts, mean_watts, kwh_month, kwh_user_month, joules_token } = energy;
    println!(
        "Power: {idle_watts:.0} W idle, {busy_watts:.0} W busy, {mean_watts:.0} W on average; {kwh_month:.0} kWh a month, \
         {kwh_user_month:.2} kWh a user"
    );
    if let Some(joules) = joules_token {
        println!("Energy above idle: {joules:.2} J for each token of an answer");
    }
}

fn print_costs(costs: &Costs) {
    let Costs { currency, amortisation_month, energy_month, energy_kwh_month, other_month, .. } = costs;
    println!(
        "A month: machines {currency} {amortisation_month:.2}, energy {currency} {energy_month:.2} ({energy_kwh_month:.0} kWh), \
         other {currency} {other_month:.2}; {currency} {:.2} in all, {currency} {:.2} a user",
        costs.total_month, costs.user_month
    );
    if let Some(api) = costs.api_user_month {
        println!("By the API's prices: {currency} {api:.2} a user");
    }
}

fn list(json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", thunder_capacity::plan::known());
        return Ok(());
    }
    let mut machines = table::new(&["machine", "what", "for models", "GB/s", "TFLOP/s", "watts"]);
    for machine in &MACHINES {
        machines.add_row([
            machine.name.to_owned(),
            machine.title.to_owned(),
            human_bytes(machine.memory_bytes),
            format!("{:.0}", machine.memory_bytes_s / 1e9),
            format!("{:.0}", machine.peak_flops / 1e12),
            format!("{:.0} to {:.0}", machine.idle_watts, machine.busy_watts),
        ]);
    }
    let mut links = table::new(&["link", "what", "µs", "GB/s"]);
    for link in &LINKS {
        let gigabytes = format!("{:.2}", link.bytes_s / 1e9);
        links.add_row([
            link.name.to_owned(),
            link.title.to_owned(),
            format!("{:.0}", link.latency_us),
            gigabytes,
        ]);
    }
    println!("{machines}\n{links}\nShapes: {}", Shape::names().collect::<Vec<_>>().join(", "));
    println!("Sources:");
    let sources = MACHINES.iter().map(|machine| (machine.name, machine.source));
    for (name, source) in sources.chain(LINKS.iter().map(|link| (link.name, link.source))) {
        println!("- {name}: {source}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_counted() {
        let read = |text| some_machines(text).expect("machines");
        assert_eq!(read("4xm3-ultra-512"), json!({ "machine": "m3-ultra-512", "count": 4 }));
        assert_eq!(read("rtx-4090"), json!({ "machine": "rtx-4090", "count": 1 }));
        assert_eq!(read("2×dgx-spark"), json!({ "machine": "dgx-spark", "count": 2 }));
        assert!(some_machines("0xrtx-4090").is_err());
    }
}
