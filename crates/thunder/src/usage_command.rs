//! `thunder usage`: the usage of keys, teams and models.

use std::io::Write;

use clap::{Args, ValueEnum};
use serde_json::Value;

use crate::admin_client::{AdminArgs, query};
use crate::keys_command::text;
use crate::table;

/// Form of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// A table for people
    Table,
    /// One JSON object
    Json,
    /// One JSON object in each line
    Jsonl,
    /// Comma-separated values, for spreadsheets
    Csv,
}

impl FormatArg {
    /// The server's parameter; a table is made from JSON here.
    pub fn parameter(self) -> Option<String> {
        match self {
            Self::Table | Self::Json => None,
            Self::Jsonl => Some("jsonl".into()),
            Self::Csv => Some("csv".into()),
        }
    }
}

/// Report the usage of keys, teams and models
///
/// Sums are for whole hours. Usage contains no prompts and no answers.
#[derive(Args)]
pub struct UsageCommand {
    /// Columns by which to divide the sums: up to three of key, team, model, owner, outcome, node,
    /// day, hour
    #[arg(long, value_name = "NAME,…", default_value = "key", conflicts_with = "requests")]
    by: String,
    /// List single requests instead of sums, the newest first
    #[arg(long)]
    requests: bool,
    /// From this date, time or age on, e.g. 2026-11-01, 7d or 24h [default: this month's first day]
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Before this date, time or age
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Only this key, by name or id
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Only this team
    #[arg(long, value_name = "TEAM")]
    team: Option<String>,
    /// Only this model
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Only requests with this outcome: stop, length, calls, cancelled, failed or refused
    #[arg(long, value_name = "OUTCOME")]
    outcome: Option<String>,
    /// Maximum rows of --requests in a table or JSON; jsonl and csv list all
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u16,
    /// Format of the report
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
    /// Print JSON, like --format json
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// In csv and jsonl, leave out the records of nodes that do not answer
    ///
    /// Without this option such a list is refused. A table names the nodes that do not answer.
    #[arg(long)]
    partial: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

impl UsageCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let format = if self.json { FormatArg::Json } else { self.format };
        let is_page = self.requests && matches!(format, FormatArg::Table | FormatArg::Json);
        let path = if self.requests { "/admin/usage/records" } else { "/admin/usage" };
        let parameters = query(&[
            ("by", (!self.requests).then(|| self.by.clone())),
            ("since", self.since.clone()),
            ("until", self.until.clone()),
            ("key", self.key.clone()),
            ("team", self.team.clone()),
            ("model", self.model.clone()),
            ("outcome", self.outcome.clone()),
            ("limit", is_page.then(|| self.limit.to_string())),
            ("format", format.parameter()),
            ("partial", self.partial.then(|| "true".to_owned())),
        ]);
        let bytes = self.admin.ask_bytes("GET", &format!("{path}{parameters}"), None)?;
        if format != FormatArg::Table {
            return print(&bytes);
        }
        let answer: Value = serde_json::from_slice(&bytes)?;
        warn_of_missing(&answer);
        if self.requests {
            show(&answer["records"], REQUEST_COLUMNS, None);
            return Ok(());
        }
        let by: Vec<&str> = answer["by"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let columns: Vec<&str> = by.into_iter().chain(SUM_COLUMNS.iter().copied()).collect();
        show(&answer["rows"], &columns, Some(&answer["total"]));
        println!(
            "{} to {}, cost in {}",
            text(&answer["since"]),
            text(&answer["until"]),
            answer["currency"].as_str().unwrap_or("no currency (`thunder limits model` sets prices)")
        );
        Ok(())
    }
}

const SUM_COLUMNS: &[&str] = &[
    "requests",
    "failed",
    "cancelled",
    "refused",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost",
    "time_to_first_token_s",
    "duration_s",
];
const REQUEST_COLUMNS: &[&str] = &[
    "time",
    "key",
    "team",
    "model",
    "outcome",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost",
    "queue_s",
    "time_to_first_token_s",
    "duration_s",
];

/// Prints rows as a table.
pub fn show(rows: &Value, columns: &[&str], total: Option<&Value>) {
    let headings: Vec<String> = columns
        .iter()
        .map(|name| match *name {
            "time_to_first_token_s" => "first token s".to_owned(),
            "completion_tokens" => "answer".to_owned(),
            "prompt_tokens" => "prompt".to_owned(),
            "cached_tokens" => "cached".to_owned(),
            name => name.strip_suffix("_s").map_or_else(|| name.to_owned(), |name| format!("{name} s")),
        })
        .collect();
    let mut shown = table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let row = |row: &Value| -> Vec<String> {
        let cell = |name: &&str| match &row[*name] {
            Value::Number(number) if number.is_f64() => {
                let digits = if *name == "cost" { 4 } else { 2 };
                format!("{:.digits$}", number.as_f64().unwrap_or_default())
            }
            Value::Null => "-".to_owned(),
            value => text(value),
        };
        columns.iter().map(cell).collect()
    };
    for one in rows.as_array().into_iter().flatten() {
        shown.add_row(row(one));
    }
    if let Some(total) = total {
        let mut last = row(total);
        if let Some(first) = last.first_mut() {
            *first = "total".to_owned();
        }
        shown.add_row(last);
    }
    println!("{shown}");
}

/// Prints the nodes that are missing from a report.
pub fn warn_of_missing(answer: &Value) {
    for why in answer["missing"].as_array().into_iter().flatten() {
        eprintln!("without what one node keeps: {}", text(why));
    }
}

/// Prints an answer unchanged, with an end of its last line. A list without lines prints nothing.
pub fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(&ended(bytes))?;
    Ok(())
}

fn ended(bytes: &[u8]) -> Vec<u8> {
    let is_open = !bytes.is_empty() && !bytes.ends_with(b"\n");
    [bytes, if is_open { b"\n" } else { b"" }].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_prints_nothing() {
        assert_eq!(ended(b""), b"");
        assert_eq!((ended(b"{}"), ended(b"{}\n")), (b"{}\n".to_vec(), b"{}\n".to_vec()));
    }
}
