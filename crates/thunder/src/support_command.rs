//! `thunder support`: information for helpers, without secrets.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};
use thunder_access::Now;
use thunder_compute::Isa;

use crate::admin_client::AdminArgs;
use crate::config_command;

/// Collect information that helpers need about a problem
#[derive(Args)]
pub struct SupportCommand {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Subcommand)]
enum Action {
    /// Write a JSON file about this machine and its server, without secrets and prompts
    ///
    /// The file has the version, the system, the output of `thunder doctor`, settings, health,
    /// metrics, usage sums and the latest requests of the running server or node, and on a node its
    /// view of the cluster. It names machines and models, but no keys, owners or teams, and no
    /// person who may sign in.
    Bundle {
        /// New file for the bundle
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

impl SupportCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let Action::Bundle { file } = &self.action;
        let text = serde_json::to_string_pretty(&self.bundle())?;
        let text = homeless(&text, std::env::var("HOME").ok().as_deref());
        let made = File::options().write(true).create_new(true).mode(0o600).open(file);
        let mut made = made.with_context(|| format!("cannot make {}", file.display()))?;
        made.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", file.display()))?;
        println!("{}: read it before you pass it on", file.display());
        Ok(())
    }

    /// A missing part contains the reason.
    fn bundle(&self) -> Value {
        let or_why = |part: anyhow::Result<Value>| {
            part.unwrap_or_else(|error| json!({"missing": crate::report::line(&error)}))
        };
        let ask = |path: &str| or_why(self.admin.ask("GET", path, None));
        let text = |path: &str| {
            let bytes = self.admin.ask_bytes("GET", path, None);
            or_why(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned().into()))
        };
        let part = |path: &str, hide: fn(Value) -> Value| or_why(self.admin.ask("GET", path, None).map(hide));
        let files = self.admin.folder().map(|folder| config_command::files_shown(&folder, names_people));
        json!({
            "made": Now::read().time,
            "version": env!("CARGO_PKG_VERSION"),
            "machine": machine(),
            "environment": environment(std::env::vars_os().map(|(name, value)| {
                (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
            })),
            "settings": part("/admin/settings", without_people),
            "files": or_why(files.and_then(|files| files)),
            "health": ask("/health"),
            "cluster": part("/admin/cluster", without_code),
            "metrics": text("/metrics"),
            "limits": part("/admin/limits", numbered_teams),
            "keys": part("/admin/keys", states),
            "usage": ask("/admin/usage?by=day,outcome"),
            "requests": part("/admin/usage/records?limit=200", nameless),
            "audit": ask("/admin/audit/verify"),
        })
    }
}

/// Options whose values name people or their company.
fn names_people(option: &str) -> bool {
    option.starts_with("oidc-") && option != "oidc-hours" || option == "allow-origin"
}

/// Settings of a running server without names of people.
fn without_people(mut settings: Value) -> Value {
    for option in settings["options"].as_array_mut().into_iter().flatten() {
        let name = option["name"].as_str().unwrap_or_default().trim_start_matches('-').to_owned();
        if names_people(&name) && option["value"] != "by default" {
            option["value"] = "not shown".into();
        }
    }
    settings
}

/// A cluster's state without the code that admits this node to a cluster.
fn without_code(mut status: Value) -> Value {
    if let Some(fields) = status.as_object_mut() {
        fields.remove("code");
    }
    status
}

/// Limits with numbers instead of team names.
fn numbered_teams(mut limits: Value) -> Value {
    if let Some(teams) = limits.get_mut("teams").and_then(Value::as_object_mut) {
        let numbered = std::mem::take(teams).into_iter().zip(1..);
        teams.extend(numbered.map(|((_, team), number)| (format!("team {number}"), team)));
    }
    limits
}

/// A text without the user's home folder, which often contains the user's name.
fn homeless(text: &str, home: Option<&str>) -> String {
    let home = home.map(|home| home.trim_end_matches('/')).filter(|home| !home.is_empty());
    home.map_or_else(|| text.to_owned(), |home| text.replace(home, "~"))
}

fn machine() -> Value {
    let system = rustix::system::uname();
    let kernels: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
    json!({
        "system": system.sysname().to_string_lossy(),
        "release": system.release().to_string_lossy(),
        "architecture": system.machine().to_string_lossy(),
        "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "memory_available_bytes": thunder_compute::memory::available_bytes(),
        "kernels": kernels,
        "rdma": thunder_verbs::doctor::examine(),
    })
}

/// Variables that change what thunder does. Values that may be secret are hidden.
fn environment(variables: impl Iterator<Item = (String, String)>) -> Value {
    let ours = ["THUNDER_", "MLX_", "JACCL_", "RUST_LOG", "HF_", "OTEL_"];
    let is_secret = |name: &str| {
        ["KEY", "TOKEN", "SECRET", "PASSWORD", "HEADERS", "OIDC"].iter().any(|word| name.contains(word))
    };
    let ours = variables.filter(|(name, _)| ours.iter().any(|begin| name.starts_with(begin)));
    let shown = ours.map(|(name, value)| {
        let value = if is_secret(&name) { "hidden".to_owned() } else { value };
        (name, Value::from(value))
    });
    Value::Object(shown.collect::<Map<_, _>>())
}

/// How many keys there are in each state.
fn states(answer: Value) -> Value {
    let mut counts = Map::new();
    for key in answer["keys"].as_array().into_iter().flatten() {
        let state = key["state"].as_str().unwrap_or("unknown");
        let count = counts.get(state).and_then(Value::as_u64).unwrap_or(0);
        counts.insert(state.to_owned(), (count + 1).into());
    }
    counts.into()
}

/// Requests without their senders.
fn nameless(mut answer: Value) -> Value {
    for record in answer["records"].as_array_mut().into_iter().flatten() {
        if let Some(fields) = record.as_object_mut() {
            ["key", "key_id", "owner", "team", "id"].iter().for_each(|name| drop(fields.remove(*name)));
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_names_are_left_out() {
        let variables = [
            ("THUNDER_API_KEY", "s3cret"),
            ("HF_TOKEN", "s3cret"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "x=s3cret"),
            ("AWS_SECRET", "s3cret"),
            ("THUNDER_OIDC_ISSUER", "https://s3cret.example"),
            ("THUNDER_TRANSPORT", "tcp"),
        ];
        let shown =
            environment(variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter());
        assert_eq!(shown["THUNDER_TRANSPORT"], "tcp");
        assert!(!shown.to_string().contains("s3cret") && shown["AWS_SECRET"].is_null());
        let record = json!({"records": [{"key": "ann's", "owner": "ann", "team": "x", "prompt_tokens": 3}]});
        assert_eq!(nameless(record), json!({"records": [{"prompt_tokens": 3}]}));
        let keys = json!({"keys": [{"state": "active"}, {"state": "active"}, {"state": "revoked"}]});
        assert_eq!(states(keys), json!({"active": 2, "revoked": 1}));
        let limits = json!({"default": {}, "teams": {"lab": {"weight": 2}, "law": {"weight": 1}}});
        let numbered = json!({"default": {}, "teams": {"team 1": {"weight": 2}, "team 2": {"weight": 1}}});
        assert_eq!(numbered_teams(limits), numbered);
        let option = |name: &str, value: &str| json!({"name": name, "value": value});
        let settings = json!({"options": [
            option("--oidc-allow", "@firm.example"), option("--oidc-admin", "by default"),
            option("--port", "8000"),
        ]});
        let shown = json!({"options": [
            option("--oidc-allow", "not shown"), option("--oidc-admin", "by default"), option("--port", "8000"),
        ]});
        assert_eq!(without_people(settings), shown);
        assert_eq!(without_code(json!({"code": "K7-4F9Q", "me": "x"})), json!({"me": "x"}));
        assert_eq!(homeless("/home/ann/models", Some("/home/ann/")), "~/models");
        assert_eq!(homeless("/models", Some("/")), "/models");
    }
}
