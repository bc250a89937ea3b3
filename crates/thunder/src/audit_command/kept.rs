//! `thunder audit prompts` and `thunder audit keep`.

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use crate::admin_client::{AdminArgs, query};
use crate::keys_command::text;
use crate::usage_command::{print, warn_of_missing};

/// Commands for kept prompts.
#[derive(Subcommand)]
pub enum KeptCommand {
    Prompts(PromptsCommand),
    Keep(KeepCommand),
}

impl KeptCommand {
    /// Runs the command.
    pub fn run(&self, admin: &AdminArgs) -> anyhow::Result<()> {
        match self {
            Self::Prompts(command) => command.run(admin),
            Self::Keep(command) => command.run(admin),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Texts for people
    Text,
    /// One JSON object
    Json,
    /// One JSON object in each line
    Jsonl,
}

/// Show kept prompts and their answers, the newest first
///
/// Prompts are kept only after `thunder audit keep`. The audit log records each reading, with the
/// filter and the ids that were found. On a cluster, all nodes are asked. Nodes that do not answer
/// are named, and each node that gives texts also records it in its own log.
#[derive(Args)]
pub struct PromptsCommand {
    /// Only this key, by name or id
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Only this team
    #[arg(long, value_name = "TEAM")]
    team: Option<String>,
    /// Only this model
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// From this date, time or age on, e.g. 2026-11-01, 7d or 24h
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Before this date, time or age
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Only prompts older than this place, which the end of an earlier list names
    #[arg(long, value_name = "PLACE")]
    before: Option<String>,
    /// Maximum number of prompts, up to 1000; fewer if their texts are long
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    /// Format of the list
    #[arg(long, value_enum, default_value = "text")]
    format: Form,
    /// In jsonl, leave out the records of nodes that do not answer
    ///
    /// Without this option such a list is refused. Texts and JSON name the nodes that do not
    /// answer.
    #[arg(long)]
    partial: bool,
}

impl PromptsCommand {
    fn run(&self, admin: &AdminArgs) -> anyhow::Result<()> {
        let parameters = query(&[
            ("key", self.key.clone()),
            ("team", self.team.clone()),
            ("model", self.model.clone()),
            ("since", self.since.clone()),
            ("until", self.until.clone()),
            ("before", self.before.clone()),
            ("limit", Some(self.limit.to_string())),
            ("partial", self.partial.then(|| "true".to_owned())),
            ("format", (self.format == Form::Jsonl).then(|| "jsonl".to_owned())),
        ]);
        let bytes = admin.ask_bytes("GET", &format!("/admin/prompts{parameters}"), None)?;
        if self.format != Form::Text {
            return print(&bytes);
        }
        let answer: Value = serde_json::from_slice(&bytes)?;
        warn_of_missing(&answer);
        for one in answer["prompts"].as_array().into_iter().flatten() {
            let key = one["key"].as_str().unwrap_or("no key");
            let node = one["node"].as_str().map(|node| format!(" on {node}")).unwrap_or_default();
            println!(
                "{} {} {} {} {}{node}",
                text(&one["time"]),
                key,
                text(&one["model"]),
                text(&one["outcome"]),
                text(&one["id"])
            );
            let texts = |name: &str| one[name].as_array().cloned().unwrap_or_default();
            for said in texts("prompt").iter().chain(&texts("answer")) {
                println!("  {}: {}", text(&said["role"]), text(&said["text"]).replace('\n', "\n    "));
            }
        }
        if let Some(next) = answer["next"].as_str() {
            eprintln!("there may be older ones: --before {next}");
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// E-mail addresses
    Email,
    /// Numbers of payment cards, by their check digit
    Card,
    /// Bearer tokens, keys of well-known services, JSON web tokens
    Token,
    /// Bank account numbers (IBAN), by their check digits
    Iban,
    /// Nothing
    None,
}

/// Set or show whose prompts and answers are kept
///
/// By default none are kept. Kept texts are redacted, then encrypted (AES-256-GCM) and written to
/// the folder `prompts` of the store. The key is prompts.key there, or the file of the server's
/// --prompts-key.
///
/// Each command replaces the whole policy: keys, teams and models of the earlier policy must be
/// named again. The audit log has each change. On a cluster the policy applies to all nodes, and
/// each node keeps the texts of its own clients.
#[derive(Args)]
pub struct KeepCommand {
    /// Keep prompts and answers of everybody
    #[arg(long)]
    all: bool,
    /// Keep prompts and answers of this key, by name or id; may be repeated
    #[arg(long = "key", value_name = "KEY")]
    keys: Vec<String>,
    /// Keep prompts and answers of this team; may be repeated
    #[arg(long = "team", value_name = "TEAM")]
    teams: Vec<String>,
    /// Keep prompts and answers of this model; may be repeated
    #[arg(long = "model", value_name = "MODEL")]
    models: Vec<String>,
    /// Kinds of text to replace by their name before writing [default: all kinds]
    #[arg(long, value_name = "KIND,…", value_enum, value_delimiter = ',')]
    redact: Vec<Kind>,
    /// Regular expression whose matches are also replaced; may be repeated
    #[arg(long = "pattern", value_name = "REGEX")]
    patterns: Vec<String>,
    /// Days to keep prompts [default: 30]
    #[arg(long, value_name = "DAYS")]
    days: Option<u32>,
    /// Stop keeping texts; texts that were kept stay until their days are over
    #[arg(long, conflicts_with_all = ["all", "keys", "teams", "models"])]
    off: bool,
}

impl KeepCommand {
    fn run(&self, admin: &AdminArgs) -> anyhow::Result<()> {
        const PATH: &str = "/admin/prompts/policy";
        let names_some =
            self.all || !(self.keys.is_empty() && self.teams.is_empty() && self.models.is_empty());
        let answer = if names_some || self.off {
            admin.ask("PUT", PATH, Some(&self.policy()))?
        } else {
            let is_show = self.redact.is_empty() && self.patterns.is_empty() && self.days.is_none();
            anyhow::ensure!(is_show, "say whose prompts are kept: --all, --key, --team or --model; or --off");
            admin.ask("GET", PATH, None)?
        };
        println!("{}", serde_json::to_string_pretty(&answer)?);
        Ok(())
    }

    fn policy(&self) -> Value {
        let mut policy = json!({
            "all": self.all, "keys": self.keys, "teams": self.teams, "models": self.models,
            "patterns": self.patterns,
        });
        if !self.redact.is_empty() {
            let names = self.redact.iter().filter(|kind| **kind != Kind::None);
            let names = names.filter_map(|kind| Some(kind.to_possible_value()?.get_name().to_owned()));
            policy["redact"] = json!(names.collect::<Vec<_>>());
        }
        if let Some(days) = self.days {
            policy["days"] = json!(days);
        }
        policy
    }
}
