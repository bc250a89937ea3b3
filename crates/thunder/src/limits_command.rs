//! `thunder limits`: limits of teams and models, and prices of tokens.

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use crate::admin_client::AdminArgs;
use crate::keys_command::LimitArgs;

/// Set limits of teams and models, teams' shares under load, and prices
///
/// Changes take effect at once, without a restart. `thunder keys change` sets the limits of a
/// single key.
#[derive(Args)]
pub struct LimitsCommand {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    admin: AdminArgs,
    /// The output is JSON with or without it, so that scripts may give it to every command.
    #[arg(long = "json", global = true, hide = true)]
    _json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Print all limits and prices as JSON
    Show,
    /// Replace all limits and prices with those of a JSON file, in the form of `show`
    ///
    /// If the file has the `version` of `show`, limits are replaced only if nobody has changed them
    /// since.
    Set {
        /// The file; - is standard input
        #[arg(value_name = "FILE")]
        file: String,
    },
    /// Set the limits of each key without its own
    Default {
        #[command(flatten)]
        limits: LimitArgs,
        /// Remove the limits that are not given
        #[arg(long)]
        only: bool,
    },
    /// Set the limits of all keys of a team together
    Team {
        /// The team
        #[arg(value_name = "TEAM")]
        team: String,
        /// Share of the engine under load, relative to other teams' weights [default: 1]
        #[arg(long, allow_negative_numbers = true, value_name = "W")]
        weight: Option<f64>,
        #[command(flatten)]
        limits: LimitArgs,
        /// Remove the limits that are not given
        #[arg(long)]
        only: bool,
    },
    /// Set the limits of a model for all keys together, and its prices
    Model {
        /// The model, by its full name or its last part
        #[arg(value_name = "MODEL")]
        model: String,
        /// Price of a million prompt tokens
        #[arg(long, allow_negative_numbers = true, value_name = "AMOUNT", requires = "price_output")]
        price_input: Option<f64>,
        /// Price of a million prompt tokens that were in the cache [default: the value of
        /// --price-input]
        #[arg(long, allow_negative_numbers = true, value_name = "AMOUNT", requires = "price_input")]
        price_cached: Option<f64>,
        /// Price of a million answer tokens
        #[arg(long, allow_negative_numbers = true, value_name = "AMOUNT", requires = "price_input")]
        price_output: Option<f64>,
        #[command(flatten)]
        limits: LimitArgs,
        /// Remove the limits that are not given
        #[arg(long)]
        only: bool,
    },
    /// Set the currency of prices and budgets, e.g. EUR
    Currency {
        /// Three capital letters
        #[arg(value_name = "CODE")]
        code: String,
    },
}

impl LimitsCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let mut policy = match &self.action {
            Action::Set { file } => read(file)?,
            _ => self.admin.ask("GET", "/admin/limits", None)?,
        };
        match &self.action {
            Action::Show => {
                println!("{}", serde_json::to_string_pretty(&policy)?);
                return Ok(());
            }
            Action::Set { .. } => {}
            Action::Default { limits, only } => change(&mut policy["default"], limits, *only),
            Action::Team { team, weight, limits, only } => {
                let entry = entry(&mut policy["teams"], team);
                if let Some(weight) = weight {
                    entry["weight"] = json!(weight);
                }
                change(&mut entry["limits"], limits, *only);
            }
            Action::Model { model, price_input, price_cached, price_output, limits, only } => {
                let entry = entry(&mut policy["models"], model);
                if let (Some(input), Some(output)) = (price_input, price_output) {
                    entry["price"] = json!({"input": input, "cached": price_cached, "output": output});
                }
                change(&mut entry["limits"], limits, *only);
            }
            Action::Currency { code } => policy["currency"] = code.clone().into(),
        }
        let set = self.admin.ask("PUT", "/admin/limits", Some(&policy))?;
        println!("{}", serde_json::to_string_pretty(&set)?);
        Ok(())
    }
}

fn read(file: &str) -> anyhow::Result<Value> {
    use anyhow::Context;
    let read = || format!("cannot read limits from {file}");
    let text = match file {
        "-" => std::io::read_to_string(std::io::stdin()).with_context(read)?,
        file => std::fs::read_to_string(file).with_context(read)?,
    };
    serde_json::from_str(&text).with_context(read)
}

/// The settings of a team or model.
fn entry<'a>(all: &'a mut Value, name: &str) -> &'a mut Value {
    if !all.is_object() {
        *all = Map::new().into();
    }
    let entry = &mut all[name];
    if !entry.is_object() {
        *entry = Map::new().into();
    }
    entry
}

fn change(limits: &mut Value, given: &LimitArgs, only: bool) {
    let mut changed = limits.as_object().filter(|_| !only).cloned().unwrap_or_default();
    changed.extend(given.given());
    *limits = changed.into();
}
