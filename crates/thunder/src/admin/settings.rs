//! The options in force, for the dashboard: those of the command line, of the file, and defaults.

use clap::{Arg, ArgMatches, Command};
use serde_json::{Value, json};

use crate::config_command::shown_value;
use crate::reload::is_live;

/// The options of the chosen subcommand, with their values and help: those of `start`, and of
/// `latest` if they need no restart.
pub fn of(mut command: Command, start: &ArgMatches, latest: &ArgMatches) -> Value {
    command.build();
    let (mut name, mut start, mut latest, mut command) = (vec!["thunder"], start, latest, &command);
    while let (Some((next, inner)), Some((_, inner_latest))) = (start.subcommand(), latest.subcommand()) {
        let Some(found) = command.find_subcommand(next) else { break };
        name.push(next);
        (start, latest, command) = (inner, inner_latest, found);
    }
    let options: Vec<Value> = command.get_arguments().filter_map(|arg| option(arg, start, latest)).collect();
    json!({ "version": env!("CARGO_PKG_VERSION"), "command": name.join(" "), "options": options })
}

fn option(arg: &Arg, start: &ArgMatches, latest: &ArgMatches) -> Option<Value> {
    let name = match arg.get_long() {
        Some("help" | "version") => return None,
        Some(long) => format!("--{long}"),
        None => arg.get_value_names()?.first()?.to_string(),
    };
    let (begun, new) = (value(arg, start), value(arg, latest));
    let value = match arg.get_long() {
        Some(long) if is_live(long) => new,
        _ if begun != new => format!("{begun}; {new} after a restart"),
        _ => begun,
    };
    let meaning = arg.get_help().map(ToString::to_string).unwrap_or_default();
    Some(json!({ "name": name, "value": value, "meaning": meaning }))
}

/// An option's value for people.
fn value(arg: &Arg, matches: &ArgMatches) -> String {
    let none = if arg.is_hide_env_values_set() { "none" } else { "by default" };
    shown_value(arg, matches, false).unwrap_or_else(|| none.to_owned())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn options_are_shown_and_secrets_are_not() {
        let inner = Command::new("serve")
            .arg(Arg::new("model").value_name("MODEL").help("What to serve"))
            .arg(Arg::new("keys").long("api-key").hide_env_values(true).help("A key"))
            .arg(Arg::new("port").long("port").default_value("8000").help("A port"))
            .arg(Arg::new("host").long("host").help("A host"));
        let command = Command::new("thunder").subcommand(inner);
        let arguments = ["thunder", "serve", "builtin", "--api-key", "hush"].map(OsString::from);
        let matches = command.clone().try_get_matches_from(arguments).expect("they are right");
        let settings = of(command, &matches, &matches);
        assert_eq!(settings["command"], "thunder serve");
        assert!(!settings.to_string().contains("hush"), "{settings}");
        let value = |name: &str| {
            let options = settings["options"].as_array().expect("a list");
            options.iter().find(|option| option["name"] == name).expect("an option")["value"].clone()
        };
        assert_eq!((value("MODEL"), value("--port")), (json!("builtin"), json!("8000")));
        assert_eq!((value("--host"), value("--api-key")), (json!("by default"), json!("1 set, not shown")));
    }
}
