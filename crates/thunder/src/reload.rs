//! New settings for a running server or node: `thunder config reload`, or SIGHUP.
//!
//! The command line and the configuration file are read again, by the same parser as at the start.
//! Settings that can change without a restart are put in force; the others are named. If a setting
//! is wrong, nothing changes.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use clap::{Arg, ArgMatches};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use signal_hook::consts::SIGHUP;
use thunder_access::{Access, Actor, Now};
use thunder_dashboard::Act;
use thunder_server::Certificate;
use tokio::signal::unix::{SignalKind, signal};

use crate::admin::settings;
use crate::store_args::introduction;
use crate::{config_command, log, report};

/// Settings that are put in force without a restart. The others belong to the model, the engine,
/// the store or the address.
const LIVE: [&str; 27] = [
    "alias",
    "allow-origin",
    "api-key",
    "body-limit",
    "grace",
    "keep-requests",
    "keep-usage",
    "max-connections",
    "max-waiting",
    "oidc-admin",
    "oidc-allow",
    "oidc-ca",
    "oidc-client",
    "oidc-groups",
    "oidc-hours",
    "oidc-issuer",
    "oidc-scopes",
    "oidc-secret",
    "otlp",
    "otlp-header",
    "read-timeout",
    "request-timeout",
    "stored-responses",
    "tls",
    "tls-cert",
    "tls-key",
    "write-timeout",
];

/// Whether a setting is put in force without a restart.
pub fn is_live(name: &str) -> bool {
    LIVE.contains(&name)
}

/// A process whose settings can be read again.
pub trait Reload: Send + Sync {
    /// Reads the settings again, and puts them in force.
    ///
    /// # Errors
    /// When they are wrong. Then nothing has changed.
    fn reload(&self) -> anyhow::Result<Reloaded>;

    /// The options in force, for the dashboard.
    fn settings(&self) -> Value;
}

/// The result of a reload, by the names of settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// New values that are in force now.
    pub applied: Vec<String>,
    /// New values that need a restart.
    pub restart: Vec<String>,
    /// The certificate that was switched on, for people who must trust it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
}

impl Reloaded {
    /// Whether a setting whose name has this prefix has a new value.
    pub fn touches(&self, beginning: &str) -> bool {
        self.applied.iter().any(|name| name.starts_with(beginning))
    }

    /// What the audit log says.
    pub fn act(&self) -> Act {
        Act { action: "config.reload", subject: None, details: json!(self) }
    }
}

impl fmt::Display for Reloaded {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.applied.as_slice(), self.restart.as_slice()) {
            ([], []) => write!(formatter, "no setting has changed"),
            (applied, []) => write!(formatter, "in force now: {}", applied.join(", ")),
            ([], restart) => write!(formatter, "in force after a restart: {}", restart.join(", ")),
            (applied, restart) => {
                let (applied, restart) = (applied.join(", "), restart.join(", "));
                write!(formatter, "in force now: {applied}; after a restart: {restart}")
            }
        }?;
        self.certificate.iter().try_for_each(|certificate| write!(formatter, "\n{certificate}"))
    }
}

/// The settings at the start of a process, and the latest ones.
#[derive(Debug)]
pub struct Settings {
    /// The command line, without settings of the file.
    arguments: Vec<OsString>,
    start: ArgMatches,
    latest: Mutex<ArgMatches>,
}

impl Settings {
    /// Those of this process.
    ///
    /// # Errors
    /// When the configuration file has become wrong meanwhile.
    pub fn at_start() -> anyhow::Result<Self> {
        Self::of(std::env::args_os().collect())
    }

    fn of(arguments: Vec<OsString>) -> anyhow::Result<Self> {
        let start = read(arguments.clone())?;
        Ok(Self { latest: Mutex::new(start.clone()), start, arguments })
    }

    /// The options in force, for the dashboard.
    pub fn shown(&self) -> Value {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        settings::of(crate::command_line(), &self.start, &latest)
    }

    /// Reads the settings again. `renew` gets the options of the subcommand and puts those in
    /// `applied` in force. It returns the certificate that it has switched on, if any.
    ///
    /// # Errors
    /// When the file or a value is wrong, or `renew` fails.
    pub fn reload(
        &self,
        renew: impl FnOnce(&ArgMatches, &Reloaded) -> anyhow::Result<Option<Certificate>>,
    ) -> anyhow::Result<Reloaded> {
        // One reload at a time.
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let matches = read(self.arguments.clone())?;
        let (command, new) = options(&matches)?;
        let mut reloaded = Reloaded::default();
        for arg in config_command::settings_of(command) {
            let Some(long) = arg.get_long().map(str::to_owned) else { continue };
            let (_, before) = options(if is_live(&long) { &latest } else { &self.start })?;
            if values(before, &arg) != values(new, &arg) {
                let list = if is_live(&long) { &mut reloaded.applied } else { &mut reloaded.restart };
                list.push(long);
            }
        }
        if !reloaded.applied.is_empty() {
            reloaded.certificate = renew(new, &reloaded)?.as_ref().map(introduction);
        }
        *latest = matches;
        Ok(reloaded)
    }
}

/// The options of a command line with its configuration file.
fn read(arguments: Vec<OsString>) -> anyhow::Result<ArgMatches> {
    config_command::parsed(config_command::expand(arguments)?)
}

fn options(matches: &ArgMatches) -> anyhow::Result<(&str, &ArgMatches)> {
    matches.subcommand().ok_or_else(|| anyhow::anyhow!("no command has been given"))
}

fn values(matches: &ArgMatches, arg: &Arg) -> Vec<OsString> {
    let raw = matches.get_raw(arg.get_id().as_str());
    raw.into_iter().flatten().map(OsString::from).collect()
}

/// SIGHUP, with which service managers request a reload.
pub struct Hangups(Arc<AtomicBool>);

impl Hangups {
    /// Handles the signal from now on; `None` in a terminal, where SIGHUP ends the process.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn catch() -> std::io::Result<Option<Self>> {
        if File::open("/dev/tty").is_ok() {
            return Ok(None);
        }
        let came = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGHUP, came.clone())?;
        Ok(Some(Self(came)))
    }

    /// Reloads at each signal, including one that has already arrived, until `process` has ended.
    ///
    /// # Errors
    /// When the system refuses.
    pub async fn heed(self, process: Weak<dyn Reload>, access: Option<Access>) -> std::io::Result<()> {
        let mut hangups = signal(SignalKind::hangup())?;
        loop {
            while !self.0.swap(false, Ordering::Relaxed) {
                hangups.recv().await;
            }
            let Some(process) = process.upgrade() else { return Ok(()) };
            let access = access.clone();
            let reload = move || match process.reload() {
                Ok(reloaded) => {
                    log::say(format_args!("settings are read again; {reloaded}"));
                    note(access.as_ref(), &reloaded);
                }
                Err(error) => {
                    log::say(format_args!("the settings stay as they are: {}", report::line(&error)))
                }
            };
            tokio::task::spawn_blocking(reload).await?;
        }
    }
}

/// Writes a reload to the audit log.
fn note(access: Option<&Access>, reloaded: &Reloaded) {
    let Some(access) = access else { return };
    let Act { action, subject, details } = reloaded.act();
    if let Err(error) =
        access.note_act(&Actor::local(), action, subject.as_deref(), details, Now::read().time)
    {
        tracing::error!("the audit log lacks {action}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings_with(text: &str) -> (tempfile::TempDir, std::path::PathBuf, Settings) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        let words = ["thunder", "serve", "builtin", "--config", file.to_str().unwrap(), "--max-waiting", "7"];
        let settings = Settings::of(words.map(OsString::from).into()).unwrap();
        (folder, file, settings)
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn every_live_setting_is_an_option_of_serve() {
        let known: Vec<_> = config_command::settings_of("serve");
        for name in LIVE {
            assert!(known.iter().any(|arg| arg.get_long() == Some(name)), "{name}");
        }
    }

    #[test]
    fn what_can_change_is_applied_and_the_rest_waits_for_a_restart() {
        let (_folder, file, settings) = settings_with("alias = [\"a\"]\nport = 8000");
        assert_eq!(settings.reload(|_, _| panic!("nothing has changed")).unwrap(), Reloaded::default());
        // The command line still overrides the file; an explicitly written default is not a change.
        let text = "alias = [\"b\"]\nport = 9000\nmax-waiting = 8\ngrace = 30\ntls = true\nmax-batch = 3";
        std::fs::write(&file, text).unwrap();
        let check = |options: &ArgMatches, _: &Reloaded| {
            let aliases: Vec<&String> = options.get_many("aliases").unwrap().collect();
            assert_eq!(aliases, ["b"]);
            Ok(None)
        };
        let reloaded = settings.reload(check).unwrap();
        assert_eq!(
            (reloaded.applied.clone(), reloaded.restart.clone()),
            (names(&["tls", "alias"]), names(&["port", "max-batch"]))
        );
        assert_eq!(reloaded.to_string(), "in force now: tls, alias; after a restart: port, max-batch");
        let shown = settings.shown();
        let value = |name: &str| {
            let options = shown["options"].as_array().unwrap();
            options.iter().find(|option| option["name"] == name).unwrap()["value"].clone()
        };
        assert_eq!((value("--alias"), value("--port")), (json!("b"), json!("8000; 9000 after a restart")));
        // Settings that wait for a restart are named again, settings in force are not.
        let again = settings.reload(|_, _| panic!("nothing has changed")).unwrap();
        assert_eq!((again.applied, again.restart), (names(&[]), names(&["port", "max-batch"])));
    }

    #[test]
    fn a_wrong_file_changes_nothing() {
        let (_folder, file, settings) = settings_with("alias = [\"a\"]");
        for (text, said) in [("alias = 7\nprot = 1", "prot"), ("grace = \"soon\"", "soon"), ("= 1", "TOML")] {
            std::fs::write(&file, text).unwrap();
            let error = settings.reload(|_, _| panic!("it is wrong")).unwrap_err();
            assert!(format!("{error:#}").contains(said), "{error:#}");
        }
        std::fs::write(&file, "alias = [\"b\"]").unwrap();
        settings.reload(|_, _| anyhow::bail!("it cannot be put in force")).unwrap_err();
        assert_eq!(settings.reload(|_, _| Ok(None)).unwrap().applied, names(&["alias"]), "it was not taken");
    }
}
