//! `thunder audit`: the acts of administrators, and kept prompts.

mod kept;

use clap::Args;
use serde_json::Value;

use crate::admin_client::{AdminArgs, query};
use crate::keys_command::{fields, text};
use crate::usage_command::{FormatArg, print, show, warn_of_missing};
use kept::KeptCommand;

/// Show the acts of administrators, check that their log was not changed, or keep prompts
///
/// Every entry has the hash of the one before, so --verify finds a changed or removed entry.
/// Prompts and answers are kept only after `thunder audit keep`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct AuditCommand {
    #[command(subcommand)]
    kept: Option<KeptCommand>,
    /// Check the whole log, and print its length and the hash of its last entry
    ///
    /// Keep the hash in another place: a person who can write to the store could rewrite the whole
    /// log.
    #[arg(long)]
    verify: bool,
    /// From this date, time or age on, e.g. 2026-11-01, 7d or 24h
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Before this date, time or age
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Only acts of this kind, e.g. key.create
    #[arg(long, value_name = "ACTION")]
    action: Option<String>,
    /// Maximum entries in a table or JSON; jsonl and csv list all
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u16,
    /// Format of the log
    #[arg(long, value_enum, default_value = "table")]
    format: FormatArg,
    /// Print JSON, like --format json; with --verify too
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

impl AuditCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if let Some(kept) = &self.kept {
            return kept.run(&self.admin);
        }
        let format = if self.json { FormatArg::Json } else { self.format };
        if self.verify {
            return verified(&self.admin.ask("GET", "/admin/audit/verify", None)?, format == FormatArg::Json);
        }
        let is_page = matches!(format, FormatArg::Table | FormatArg::Json);
        let parameters = query(&[
            ("since", self.since.clone()),
            ("until", self.until.clone()),
            ("action", self.action.clone()),
            ("limit", is_page.then(|| self.limit.to_string())),
            ("format", format.parameter()),
            ("partial", self.partial.then(|| "true".to_owned())),
        ]);
        let bytes = self.admin.ask_bytes("GET", &format!("/admin/audit{parameters}"), None)?;
        if format != FormatArg::Table {
            return print(&bytes);
        }
        let mut answer: Value = serde_json::from_slice(&bytes)?;
        warn_of_missing(&answer);
        for entry in answer["entries"].as_array_mut().into_iter().flatten() {
            entry["details"] = brief(&entry["details"]).into();
        }
        let entries = answer["entries"].as_array().into_iter().flatten();
        // Without a cluster, no entry has a node.
        let is_of_nodes = entries.map(|entry| &entry["node"]).any(Value::is_string);
        let columns = ["number", "node", "time", "actor", "remote", "action", "subject", "details"];
        let columns: Vec<&str> = columns.into_iter().filter(|name| is_of_nodes || *name != "node").collect();
        show(&answer["entries"], &columns, None);
        Ok(())
    }
}

/// Prints what a check of the log has found.
///
/// # Errors
/// When this log or another node's was changed.
fn verified(answer: &Value, json: bool) -> anyhow::Result<()> {
    let wrong: Vec<String> = answer["others_wrong"].as_array().into_iter().flatten().map(text).collect();
    let is_intact = answer["intact"] == true;
    if json {
        println!("{answer}");
    } else {
        for other in answer["others"].as_array().into_iter().flatten() {
            let (node, entries) = (text(&other["node"]), text(&other["entries"]));
            println!("{node}: {entries} entries are intact; the last one has the hash");
            println!("{}", text(&other["head"]));
        }
        if is_intact {
            println!("{} entries are intact; the last one has the hash", text(&answer["entries"]));
            println!("{}", text(&answer["head"]));
        }
    }
    let (entry, why) = (text(&answer["first_bad"]), text(&answer["why"]));
    anyhow::ensure!(is_intact, "the audit log was changed: entry {entry}: {why}");
    anyhow::ensure!(wrong.is_empty(), "other nodes' logs: {}", wrong.join("; "));
    Ok(())
}

/// Characters of the details that fit into a table's line.
const BRIEF: usize = 100;

/// An act's details in a line, cut short. The other forms have all of them.
fn brief(details: &Value) -> String {
    let line = match details {
        Value::Object(object) => fields(object),
        Value::Null => "-".to_owned(),
        other => text(other),
    };
    match line.char_indices().nth(BRIEF) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn details_are_a_line_of_what_is_set() {
        let key = json!({"name": "ci", "team": null, "models": ["a", "b"], "limits": {"tokens_per_day": 9, "cost": null}});
        assert_eq!(brief(&key), r#"name=ci models=["a","b"] limits=(tokens_per_day=9)"#);
        assert_eq!(brief(&Value::Null), "-");
        let long = brief(&json!({"note": "é".repeat(2000)}));
        assert_eq!((long.chars().count(), long.ends_with('…')), (BRIEF + 1, true));
    }
}
