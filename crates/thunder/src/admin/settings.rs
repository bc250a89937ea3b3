//! The options in force, for the dashboard: those of the command line and their defaults.

use std::ffi::OsString;

use clap::{Arg, ArgMatches, Command};
use serde_json::{Value, json};

/// Options whose values nobody else may read, besides those whose variables are hidden.
const SECRET: [&str; 3] = ["api-key", "oidc-secret", "token"];

/// The options of the subcommand that `arguments` chose, with their values and what they do.
pub fn of(mut command: Command, arguments: impl Iterator<Item = OsString>) -> Value {
    command.build();
    let version = env!("CARGO_PKG_VERSION");
    let Ok(matches) = command.clone().try_get_matches_from(arguments) else {
        return json!({ "version": version, "command": "thunder", "options": [] });
    };
    let (mut name, mut matches, mut command) = (vec!["thunder"], &matches, &command);
    while let Some((next, inner)) = matches.subcommand() {
        let Some(found) = command.find_subcommand(next) else { break };
        name.push(next);
        (matches, command) = (inner, found);
    }
    let options: Vec<Value> = command.get_arguments().filter_map(|arg| option(arg, matches)).collect();
    json!({ "version": version, "command": name.join(" "), "options": options })
}

fn option(arg: &Arg, matches: &ArgMatches) -> Option<Value> {
    let id = arg.get_id().as_str();
    let name = match arg.get_long() {
        Some(long) if long == "help" || long == "version" => return None,
        Some(long) => format!("--{long}"),
        None => arg.get_value_names()?.first()?.to_string(),
    };
    let raw = matches.try_get_raw(id).ok().flatten();
    let values: Vec<String> =
        raw.into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect();
    let value = match arg.get_long() {
        Some(long) if SECRET.contains(&long) || arg.is_hide_env_values_set() => {
            if values.is_empty() {
                "none".to_owned()
            } else {
                format!("{} set, not shown", values.len())
            }
        }
        _ if values.is_empty() => "by default".to_owned(),
        _ => values.join(", "),
    };
    let meaning = arg.get_help().map(ToString::to_string).unwrap_or_default();
    Some(json!({ "name": name, "value": value, "meaning": meaning }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_shown_and_secrets_are_not() {
        let inner = Command::new("serve")
            .arg(Arg::new("model").value_name("MODEL").help("What to serve"))
            .arg(Arg::new("keys").long("api-key").help("A key"))
            .arg(Arg::new("port").long("port").default_value("8000").help("A port"))
            .arg(Arg::new("host").long("host").help("A host"));
        let command = Command::new("thunder").subcommand(inner);
        let arguments = ["thunder", "serve", "builtin", "--api-key", "hush"].map(OsString::from);
        let settings = of(command, arguments.into_iter());
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
