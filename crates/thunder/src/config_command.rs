//! The configuration files of `thunder serve` and `thunder up`, and `thunder config`.
//!
//! A setting is the name of an option, without its leading dashes. So the file needs no description
//! of its own: names, values and defaults are those of the command's `--help`, and the parser of
//! the options checks the settings.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, CommandFactory, FromArgMatches, Subcommand};
use serde::Serialize;
use serde_json::json;
use thunder_access::private;
use toml::Value;

use crate::admin_client::{AdminArgs, RemoteArgs};
use crate::reload::Reloaded;
use crate::report;
use crate::serve::ServeCommand;
use crate::store_args::StoreArgs;
use crate::up::{DataArgs, UpCommand};

/// The file of `thunder serve` in the store's folder.
const FILE: &str = "config.toml";
/// The file of `thunder up` in the store's folder.
const NODE_FILE: &str = "node.toml";
/// Options that select the file, so they cannot be in it.
const NOT_IN_FILE: [&str; 5] = ["config", "store", "data", "help", "version"];

/// Write, check, show or reload the configuration file of `thunder serve`, or with --node of
/// `thunder up`
///
/// A setting is the name of an option of `thunder serve`, without the leading dashes: `max-batch =
/// 32`. The file is config.toml in the --store folder, with --node node.toml; `thunder serve
/// --config FILE` uses another file. The command line and environment variables override the file.
/// A server reads it at its start and at `thunder config reload`.
#[derive(Args)]
pub struct ConfigCommand {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Use the file of `thunder up`, node.toml
    #[arg(long, global = true)]
    node: bool,
}

/// A command that has a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Of {
    command: &'static str,
    file: &'static str,
}

const SERVE: Of = Of { command: "serve", file: FILE };
const UP: Of = Of { command: "up", file: NODE_FILE };

#[derive(Subcommand)]
enum Action {
    /// Write a file with every setting, its meaning and its default, all as comments
    Init {
        /// File to write [default: config.toml in the --store folder]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Check a file, and report what is wrong in it
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// File to check [default: config.toml in the --store folder]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Show the settings that `thunder serve` would use now, and the source of each
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// File to read [default: config.toml in the --store folder]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Let the running server or node read its settings again; no request is lost
    ///
    /// Keys, names, limits, timeouts, origins, certificates, sign-in and tracing change at once.
    /// Changed settings of the address, the model and the engine are printed, and need a restart.
    /// If a setting is wrong, nothing changes. For a service, SIGHUP does the same.
    Reload {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        remote: RemoteArgs,
    },
}

impl ConfigCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let of = if self.node { UP } else { SERVE };
        let folder =
            || if self.node { self.store.folder_of_node(self.data.given()) } else { self.store.folder() };
        let file =
            |file: &Option<PathBuf>| file.clone().map_or_else(|| Ok(folder()?.join(of.file)), anyhow::Ok);
        match &self.action {
            Action::Init { file: given } => init(of, &file(given)?),
            Action::Check { json, file: given } => {
                let file = file(given)?;
                examine(of, &file)?;
                match json {
                    true => println!("{}", json!({ "file": file, "right": true })),
                    false => println!("{} is right", file.display()),
                }
                Ok(())
            }
            Action::Show { json, file: given } => {
                let file = Some(file(given)?).filter(|file| file.exists());
                let settings = settings_of_file(of, file.as_deref(), |_| false)?;
                match json {
                    true => println!("{}", json!({ "file": file, "settings": settings })),
                    false => print!("{}", lines_of(&settings)),
                }
                Ok(())
            }
            Action::Reload { json, remote } => self.reload(*json, remote),
        }
    }

    fn reload(&self, json: bool, remote: &RemoteArgs) -> anyhow::Result<()> {
        let admin = AdminArgs::new(self.store.clone(), self.data.clone(), remote.clone());
        if !admin.is_served()? {
            let folder = admin.folder()?;
            bail!(
                "no server runs with the store {}: it reads its settings when it starts, and one without a store at SIGHUP",
                folder.display()
            );
        }
        let answer = admin.ask("POST", "/admin/config/reload", None)?;
        if json {
            println!("{answer}");
        } else {
            println!("{}", serde_json::from_value::<Reloaded>(answer)?);
        }
        Ok(())
    }
}

/// The options of `serve` or `up` that a file may set.
pub fn settings_of(command: &str) -> Vec<Arg> {
    let mut cli = crate::Cli::command();
    cli.build();
    let serve = cli.find_subcommand(command).cloned().unwrap_or_default();
    let in_file = |arg: &&Arg| arg.get_long().is_some_and(|long| !NOT_IN_FILE.contains(&long));
    serve.get_arguments().filter(in_file).cloned().collect()
}

fn settings(of: Of) -> Vec<Arg> {
    settings_of(of.command)
}

fn init(of: Of, file: &Path) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        // It becomes the store's, which holds keys.
        private::make_folder(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    // It may hold API keys.
    let made = private::create_new(file, false);
    let mut made = made.with_context(|| format!("cannot make {}", file.display()))?;
    made.write_all(template(of).as_bytes()).with_context(|| format!("cannot write {}", file.display()))?;
    println!("{}", file.display());
    Ok(())
}

/// A file with all settings commented out.
fn template(of: Of) -> String {
    let check = if of == UP { "thunder config check --node" } else { "thunder config check" };
    let mut text = format!(
        "# Settings of `thunder {}`. Remove the # before a setting to change it, then\n\
         # `{check}`. Options on the command line override this file.\n",
        of.command
    );
    for arg in settings(of) {
        let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
        text.push('\n');
        for line in help.lines().flat_map(|line| wrapped(line, 96)) {
            let _ = writeln!(text, "{}", format!("# {line}").trim_end());
        }
        let values: Vec<String> =
            arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
        if !values.is_empty() && takes_value(&arg) {
            let _ = writeln!(text, "# One of: {}", values.join(", "));
        }
        let _ = writeln!(text, "# {} = {}", arg.get_long().unwrap_or_default(), example(&arg));
    }
    text
}

/// A line, divided into parts of at most `width` characters.
fn wrapped(line: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in line.split_whitespace() {
        let last = lines.last_mut().filter(|last| last.is_empty() || last.len() + word.len() < width);
        match last {
            Some(last) if last.is_empty() => last.push_str(word),
            Some(last) => *last = format!("{last} {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

fn takes_value(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

/// The default of a setting, or a place for a value.
fn example(arg: &Arg) -> String {
    if !takes_value(arg) {
        return "false".to_owned();
    }
    let default = arg.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
    let name = arg.get_value_names().and_then(|names| names.first()).map_or("VALUE", |name| name.as_str());
    let value = default.unwrap_or_else(|| name.to_owned());
    let quoted = if value.parse::<f64>().is_ok() { value } else { format!("{value:?}") };
    if matches!(arg.get_action(), ArgAction::Append) { format!("[{quoted}]") } else { quoted }
}

/// Refuses a file with which the command would not start, also if an address is malformed, a named
/// file is missing, or a certificate and its key do not belong together.
fn examine(of: Of, file: &Path) -> anyhow::Result<()> {
    let arguments = from_file(of, file, None)?;
    let words = ["thunder", of.command].map(OsString::from).into_iter().chain(arguments);
    let matches = parsed(words).map_err(|error| anyhow::anyhow!("{}: {error}", file.display()))?;
    let Some((_, given)) = matches.subcommand() else { return Ok(()) };
    let checked = match of.file {
        FILE => ServeCommand::from_arg_matches(given)?.check().map(drop),
        _ => UpCommand::from_arg_matches(given)?.check(),
    };
    checked.map_err(|error| anyhow::anyhow!("{}: {}", file.display(), report::line(&error)))
}

/// The settings from the files in a store's folder and the environment, one in each line, for
/// `thunder serve` or `thunder up`. Secrets and the values of `hidden` options are left out.
///
/// # Errors
/// When a file cannot be read, or has a setting that is none.
pub fn files_shown(folder: &Path, hidden: fn(&str) -> bool) -> anyhow::Result<serde_json::Value> {
    let mut shown = serde_json::Map::new();
    for of in [SERVE, UP] {
        let file = folder.join(of.file);
        if file.exists() {
            let text = shown_of(of, Some(&file), hidden)?;
            shown.insert(of.file.to_owned(), text.lines().collect());
        }
    }
    Ok(shown.into())
}

/// The options of a command line.
///
/// # Errors
/// With clap's words, without its advice on usage.
pub fn parsed(words: impl IntoIterator<Item = OsString>) -> anyhow::Result<ArgMatches> {
    crate::Cli::command().try_get_matches_from(words).map_err(|error| {
        let text = crate::with_remedy(error).to_string();
        let text = text.split("\n\nUsage").next().unwrap_or_default();
        anyhow::anyhow!("{}", text.trim_start_matches("error: ").trim())
    })
}

/// The faults of the files in a store's folder.
pub fn faults(folder: &Path) -> Vec<String> {
    let files = [SERVE, UP].map(|of| (of, folder.join(of.file)));
    let faults =
        files.iter().filter(|(_, file)| file.exists()).filter_map(|(of, file)| examine(*of, file).err());
    faults.map(|error| report::line(&error)).collect()
}

/// The settings of a command in force, one in each line. Secrets and the values of `hidden` options
/// are left out.
fn shown_of(of: Of, file: Option<&Path>, hidden: fn(&str) -> bool) -> anyhow::Result<String> {
    Ok(lines_of(&settings_of_file(of, file, hidden)?))
}

/// A setting in force.
#[derive(Serialize)]
struct Setting {
    name: String,
    /// As people read it; empty without one.
    value: String,
    /// `file`, `environment` or `default`.
    source: &'static str,
}

fn lines_of(settings: &[Setting]) -> String {
    let line = |Setting { name, value, source }: &Setting| format!("{name:<18} {value:<28} {source}\n");
    settings.iter().map(line).collect()
}

fn settings_of_file(of: Of, file: Option<&Path>, hidden: fn(&str) -> bool) -> anyhow::Result<Vec<Setting>> {
    let arguments = file.map_or_else(|| Ok(Vec::new()), |file| from_file(of, file, None))?;
    let words = ["thunder", of.command].map(OsString::from).into_iter().chain(arguments);
    let matches = parsed(words)?;
    let (_, matches) = matches.subcommand().context("the file does not set options of the command")?;
    let mut found = Vec::new();
    for arg in settings(of) {
        let id = arg.get_id().as_str();
        let source = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => "file",
            Some(ValueSource::EnvVariable) => "environment",
            Some(_) => "default",
            None => continue,
        };
        let is_hidden = source != "default" && arg.get_long().is_some_and(hidden);
        let value = shown_value(&arg, matches, is_hidden).unwrap_or_default();
        found.push(Setting { name: arg.get_long().unwrap_or_default().to_owned(), value, source });
    }
    Ok(found)
}

/// An option's value for people; `None` if it has none. Secrets and the values of an option that
/// `is_hidden` are counted, not shown.
pub fn shown_value(arg: &Arg, matches: &ArgMatches, is_hidden: bool) -> Option<String> {
    let raw = matches.try_get_raw(arg.get_id().as_str()).ok().flatten()?;
    let values: Vec<String> = raw.map(|value| without_password(&value.to_string_lossy())).collect();
    match values.len() {
        0 => None,
        set if is_hidden || arg.is_hide_env_values_set() => Some(format!("{set} set, not shown")),
        _ => Some(values.join(", ")),
    }
}

/// A value without the user and password of an address in it.
fn without_password(text: &str) -> String {
    let masked = text.split_once("://").and_then(|(scheme, rest)| {
        let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        Some(format!("{scheme}://…@{}{path}", host.rsplit_once('@')?.1))
    });
    masked.unwrap_or_else(|| text.to_owned())
}

/// Adds the settings of the configuration file to the arguments of a command that has one.
///
/// # Errors
/// When the file cannot be read, or has a setting that is none.
pub fn expand(arguments: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let named = |of: &&Of| arguments.get(1).is_some_and(|word| word == of.command);
    let Some(of) = [SERVE, UP].iter().find(named).copied() else { return Ok(arguments) };
    // Errors in the arguments themselves are reported by the final parse.
    let Ok(matches) = crate::Cli::command().try_get_matches_from(&arguments) else { return Ok(arguments) };
    let Some((_, given)) = matches.subcommand() else { return Ok(arguments) };
    let file = match given.get_one::<PathBuf>("config") {
        Some(file) => file.clone(),
        None => {
            let store = StoreArgs { store: given.get_one::<PathBuf>("store").cloned() };
            let data = if of == UP { given.get_one::<PathBuf>("data").map(PathBuf::as_path) } else { None };
            let folder = store.folder_of_node(data).ok().filter(|_| !given.get_flag("no_store"));
            match folder.map(|folder| folder.join(of.file)).filter(|file| file.exists()) {
                Some(file) => file,
                None => return Ok(arguments),
            }
        }
    };
    let settings = from_file(of, &file, Some(given))?;
    let mut expanded = arguments;
    expanded.splice(2..2, settings);
    Ok(expanded)
}

/// The settings of a file as arguments, without those that the command line or the environment has.
fn from_file(of: Of, file: &Path, given: Option<&ArgMatches>) -> anyhow::Result<Vec<OsString>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        // The error's own text is not used: it shows the line, which may contain a key.
        let line = 1 + text[..error.span().map_or(0, |span| span.start)].matches('\n').count();
        anyhow::anyhow!("{} is not TOML: line {line}: {}", file.display(), error.message())
    })?;
    let known = settings(of);
    let mut arguments = Vec::new();
    for (name, value) in &table {
        let Some(arg) = known.iter().find(|arg| arg.get_long() == Some(name)) else {
            let near = known.iter().filter_map(Arg::get_long).find(|long| long.replace('-', "_") == *name);
            let hint = near.map(|near| format!(": write {near}")).unwrap_or_default();
            bail!("{}: no setting \"{name}\"{hint}; `thunder config init` writes all", file.display());
        };
        let option = format!("--{name}");
        let source = |id: &str| given.and_then(|given| given.value_source(id));
        let is_set =
            |id: &str| matches!(source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
        // The model is an argument without dashes.
        if is_set(arg.get_id().as_str()) || name == "model" && is_set("model") {
            continue;
        }
        let wrong = || format!("{}: {name}", file.display());
        match value {
            Value::Boolean(on) if !takes_value(arg) => arguments.extend(on.then(|| option.clone().into())),
            _ if !takes_value(arg) => bail!("{}: must be true or false", wrong()),
            Value::Array(values) if matches!(arg.get_action(), ArgAction::Append) => {
                for value in values {
                    let text = scalar(value).with_context(wrong)?;
                    arguments.push(format!("{option}={text}").into());
                }
            }
            value => arguments.push(format!("{option}={}", scalar(value).with_context(wrong)?).into()),
        }
    }
    Ok(arguments)
}

fn scalar(value: &Value) -> anyhow::Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        _ => bail!("must be a text in quotes or a number"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(arguments: &[OsString]) -> Vec<String> {
        arguments.iter().map(|word| word.to_str().unwrap().to_owned()).collect()
    }

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn the_template_is_a_file_that_changes_nothing_and_names_every_setting() {
        for of in [SERVE, UP] {
            let text = template(of);
            assert!(text.lines().all(|line| line.is_empty() || line.starts_with('#')), "{text}");
            let (_folder, path) = file(&text);
            assert!(from_file(of, &path, None).unwrap().is_empty());
            for arg in settings(of) {
                let line = format!("\n# {} = ", arg.get_long().unwrap());
                assert!(text.contains(&line), "{line}");
            }
            // Settings with a default can be uncommented without a change.
            for arg in settings(of).iter().filter(|arg| !arg.get_default_values().is_empty()) {
                let (_folder, path) = file(&format!("{} = {}", arg.get_long().unwrap(), example(arg)));
                examine(of, &path).unwrap();
            }
        }
    }

    #[test]
    fn the_folder_of_a_new_file_is_private_for_it_becomes_the_stores() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("thunderhead/server");
        init(SERVE, &store.join(FILE)).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&store), mode(&store.join(FILE))), (0o700, 0o600));
    }

    #[test]
    fn no_error_and_no_value_shows_a_secret() {
        let (_folder, path) = file("port = 1\napi-key = [\"hush");
        let error = format!("{:#}", examine(SERVE, &path).unwrap_err());
        assert!(error.contains("line 2") && !error.contains("hush"), "{error}");
        assert_eq!(without_password("http://me:hush@host:1/a@b"), "http://…@host:1/a@b");
        for plain in ["http://host/a@b", "me@host", "https://host"] {
            assert_eq!(without_password(plain), plain);
        }
    }

    #[test]
    fn a_file_gives_options_that_the_command_line_overrides() {
        let text = "host = \"0.0.0.0\"\nport = 9000\ntls = true\nmodel = \"other\"\nallow-origin = [\"https://a.example\"]";
        let (_folder, path) = file(text);
        let all = |more: &[&str]| {
            let words = ["thunder", "serve", "--config", path.to_str().unwrap()];
            let words = words.iter().chain(more).map(OsString::from).collect();
            let mut expanded: Vec<String> = words_of(&expand(words).unwrap());
            expanded.drain(..2);
            expanded
        };
        let settings = ["--host=0.0.0.0", "--port=9000", "--tls", "--allow-origin=https://a.example"];
        for setting in settings {
            assert!(all(&[]).iter().any(|word| word == setting), "{setting}");
        }
        let overridden = all(&["--port", "1", "--allow-origin=https://c.example", "some/model"]);
        assert!(overridden.contains(&"--tls".to_owned()));
        for setting in ["--port=9000", "--allow-origin=https://a.example", "--model=other"] {
            assert!(!overridden.iter().any(|word| word == setting), "{setting}");
        }
        assert!(all(&[]).contains(&"--model=other".to_owned()));
        let plan = vec!["thunder".into(), "plan".into()];
        assert_eq!(words_of(&expand(plan).unwrap()), ["thunder", "plan"]);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, expected) in [
            ("prots = 1", "no setting \"prots\""),
            ("max_batch = 1", "write max-batch"),
            ("tls = 1", "true or false"),
            ("port = [1]", "must be a text"),
            ("port = \"x", "is not TOML"),
            ("store = \"/x\"", "no setting \"store\""),
        ] {
            let (_folder, path) = file(text);
            let error = format!("{:#}", from_file(SERVE, &path, None).unwrap_err());
            assert!(error.contains(expected), "{text}: {error}");
        }
        let (_folder, path) = file("port = 99999");
        let error = examine(SERVE, &path).unwrap_err().to_string();
        assert!(error.contains("99999") && error.contains("--port"), "{error}");
    }

    #[test]
    fn files_that_a_file_names_must_be_there() {
        let (folder, path) = file("");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        for of in [SERVE, UP] {
            write("tls-cert = \"/none.pem\"\ntls-key = \"/none.key\"");
            let error = format!("{:#}", examine(of, &path).unwrap_err());
            assert!(error.contains("tls-cert") && error.contains("/none.pem"), "{error}");
            write("oidc-issuer = \"https://a.example\"\noidc-client = \"x\"\noidc-ca = \"/none.pem\"");
            assert!(format!("{:#}", examine(of, &path).unwrap_err()).contains("oidc-ca: /none.pem"));
            write("prompts-key = \"/none/prompts.key\"");
            assert!(
                format!("{:#}", examine(of, &path).unwrap_err()).contains("--prompts-key: the folder /none")
            );
        }
        write("lora = [\"sql=/none\"]");
        assert!(format!("{:#}", examine(SERVE, &path).unwrap_err()).contains("--lora sql=/none"));
        thunder_server::Certificate::self_signed(folder.path(), &["localhost".to_owned()]).unwrap();
        let in_folder = |name: &str| folder.path().join(name).display().to_string();
        let (certificate, key) = (in_folder("tls-cert.pem"), in_folder("tls-key.pem"));
        write(&format!("tls-cert = {certificate:?}\ntls-key = {key:?}"));
        examine(SERVE, &path).unwrap();
    }

    /// Each with its name, its value and what to write instead.
    #[test]
    fn addresses_that_cannot_be_used_are_refused() {
        let sign_in = |issuer: &str| format!("oidc-issuer = {issuer:?}\noidc-client = \"x\"");
        let wrong = [
            ("otlp = \"localhost:4318\"".to_owned(), ["otlp", "\"localhost:4318\"", "http://127.0.0.1:4318"]),
            ("otlp = \"http://host:99999\"".to_owned(), ["otlp", "\"http://host:99999\"", "port"]),
            ("otlp = \"ftp://host\"".to_owned(), ["otlp", "\"ftp://host\"", "http://"]),
            (
                "otlp = \"http://host\"\notlp-header = [\"nonsense\"]".to_owned(),
                ["otlp-header", "number 1", "NAME=VALUE"],
            ),
            (sign_in("login.example.org"), ["oidc-issuer", "\"login.example.org\"", "https://"]),
            (
                sign_in("http://login.example.org"),
                ["oidc-issuer", "\"http://login.example.org\"", "https://"],
            ),
            (sign_in("https://login.example.org:99999"), ["oidc-issuer", ":99999", "https://"]),
            (
                "allow-origin = [\"chat.example\"]".to_owned(),
                ["allow-origin", "chat.example", "SCHEME://HOST"],
            ),
        ];
        let (_folder, path) = file("");
        for of in [SERVE, UP] {
            for (text, parts) in &wrong {
                std::fs::write(&path, text).unwrap();
                let error = examine(of, &path).unwrap_err().to_string();
                assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
            }
            for right in ["otlp = \"\"", "otlp = \"https://otel.example/base\"", "allow-origin = [\"*\"]"] {
                std::fs::write(&path, right).unwrap();
                examine(of, &path).unwrap_or_else(|error| panic!("{right}: {error}"));
            }
        }
        std::fs::write(&path, "host = \"no such host\"").unwrap();
        let error = examine(SERVE, &path).unwrap_err().to_string();
        assert!(error.contains("host") && error.contains("no such host"), "{error}");
    }

    #[test]
    fn secrets_are_not_shown() {
        let (_folder, path) = file("api-key = [\"very-secret\"]\nport = 7");
        let text = shown_of(SERVE, Some(&path), |_| false).unwrap();
        assert!(!text.contains("very-secret") && text.contains("1 set, not shown"), "{text}");
        assert!(
            text.lines().any(|line| line.starts_with("port") && line.contains('7') && line.ends_with("file"))
        );
    }
}
