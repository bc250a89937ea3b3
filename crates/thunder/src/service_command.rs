//! `thunder service`: the server as a service of systemd or launchd.

mod files;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use clap::{Args, Parser as _, Subcommand};
use etcetera::BaseStrategy;
use files::{Start, plist, unit};

/// Install thunder as a service that starts with the machine (systemd, launchd)
///
/// Without --system, the service belongs to the user; on Linux, `loginctl enable-linger` starts it
/// before the user logs in.
#[derive(Args)]
pub struct ServiceCommand {
    #[command(subcommand)]
    action: Action,
    /// Name of the service
    #[arg(long, value_name = "NAME", default_value = "thunder", global = true, value_parser = parse_name)]
    name: String,
    /// Install a service of the machine instead of the user; needs root
    #[arg(long, global = true)]
    system: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Write the service's file, and start the service now and with the machine
    Install {
        /// Only print the file
        #[arg(long)]
        print: bool,
        /// Write the file, but do not start the service
        #[arg(long)]
        no_start: bool,
        /// Command of thunder to run, after `--`, e.g. -- serve --host 0.0.0.0 --tls MODEL
        #[arg(value_name = "COMMAND", last = true, default_values = ["serve"])]
        command: Vec<String>,
    },
    /// Stop the service and remove its file; its store stays
    Uninstall,
    /// Show whether the service runs
    Status,
}

/// Names go into file names and commands.
fn parse_name(name: &str) -> Result<String, String> {
    let is_name = (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !name.starts_with(['-', '.']);
    if is_name { Ok(name.to_owned()) } else { Err("use letters, digits, -, _ and .".to_owned()) }
}

/// Path variables that the service gets with their values at installation.
const PATHS: [&str; 6] =
    ["THUNDER_STORE", "THUNDER_DATA", "THUNDER_CONFIG", "THUNDER_PROMPTS_KEY", "HF_HOME", "HF_HUB_CACHE"];

/// Variables of the service, in order.
type Environment = Vec<(String, String)>;

/// The service manager of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manager {
    Systemd,
    Launchd,
}

const MANAGER: Manager = if cfg!(target_os = "macos") { Manager::Launchd } else { Manager::Systemd };

impl ServiceCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let file = self.file(MANAGER)?;
        match &self.action {
            Action::Install { print, no_start, command } => {
                let program = std::env::current_exe().context("cannot find this program")?;
                check_command(command)?;
                let given = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
                let environment = self.environment(MANAGER, command, given)?;
                let start = Start { program: &program, command, environment: &environment };
                let text = match MANAGER {
                    Manager::Systemd => unit(&self.name, &start, self.system)?,
                    Manager::Launchd => plist(&self.name, &start, &log_file(&self.name, self.system)?)?,
                };
                let left_out = left_out(std::env::vars_os().map(|(name, _)| name));
                if !left_out.is_empty() {
                    eprintln!(
                        "not passed on to the service: {}; put settings into its configuration file (`thunder config \
                         init`)",
                        left_out.join(", ")
                    );
                }
                if *print {
                    print!("{text}");
                    return Ok(());
                }
                if self.system && MANAGER == Manager::Systemd {
                    check_program(&program)?;
                }
                self.install(&file, &text, *no_start)?;
                if self.system && MANAGER == Manager::Systemd {
                    let (option, commands) =
                        if is_node(command) { ("--data", "`thunder cluster`, ") } else { ("--store", "") };
                    println!(
                        "as root, give {commands}`thunder keys` and others {option} {}",
                        state_folder(&self.name)
                    );
                }
                Ok(())
            }
            Action::Uninstall => {
                if !file.exists() {
                    bail!("no service: {} is not there", file.display());
                }
                match MANAGER {
                    Manager::Systemd => self.systemctl(&["disable", "--now", &self.unit_name()])?,
                    Manager::Launchd => {
                        tool("launchctl", &["bootout", &self.domain(), &file.display().to_string()])?
                    }
                }
                std::fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
                if MANAGER == Manager::Systemd {
                    self.systemctl(&["daemon-reload"])?;
                }
                println!("{} is removed", file.display());
                Ok(())
            }
            Action::Status => match MANAGER {
                Manager::Systemd => self.systemctl(&["--no-pager", "status", &self.unit_name()]),
                Manager::Launchd => {
                    tool("launchctl", &["print", &format!("{}/{}", self.domain(), label(&self.name))])
                }
            },
        }
    }

    fn install(&self, file: &Path, text: &str, no_start: bool) -> anyhow::Result<()> {
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let former = std::fs::read(file).ok();
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
        println!("{}", file.display());
        if no_start {
            return Ok(());
        }
        self.start(file).inspect_err(|_| {
            // A service that does not start is not enabled, and the previous service runs again.
            let restored = match former {
                Some(former) => {
                    std::fs::write(file, former).map_err(Into::into).and_then(|()| self.start(file))
                }
                None => {
                    if MANAGER == Manager::Systemd {
                        drop(self.systemctl(&["disable", "--now", &self.unit_name()]));
                    }
                    std::fs::remove_file(file).map_err(Into::into)
                }
            };
            if let Err(error) = restored {
                eprintln!("{} cannot be put back: {error:#}", file.display());
            }
        })
    }

    fn start(&self, file: &Path) -> anyhow::Result<()> {
        match MANAGER {
            Manager::Systemd => {
                self.systemctl(&["daemon-reload"])?;
                self.systemctl(&["enable", &self.unit_name()])?;
                // A running service gets its new command.
                self.systemctl(&["restart", &self.unit_name()])?;
                let user = if self.system { "" } else { "--user " };
                println!("it runs; its log: journalctl {user}-u {} -f", self.name);
            }
            Manager::Launchd => {
                // A loaded service must be removed first; at the first installation there is none.
                drop(tool("launchctl", &["bootout", &self.domain(), &file.display().to_string()]));
                tool("launchctl", &["bootstrap", &self.domain(), &file.display().to_string()])?;
                println!("it runs; its log: {}", log_file(&self.name, self.system)?.display());
            }
        }
        Ok(())
    }

    /// The service's variables: the paths that are set here. A machine's service keeps its data in
    /// its own folder.
    fn environment(
        &self,
        manager: Manager,
        command: &[String],
        given: impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Environment> {
        let mut environment = Environment::new();
        for name in PATHS {
            let Some(value) = given(name) else { continue };
            let path = std::path::absolute(&value).with_context(|| format!("{name} is no path"))?;
            environment.push((name.to_owned(), path.display().to_string()));
        }
        if !self.system || manager != Manager::Systemd {
            return Ok(environment);
        }
        let state = state_folder(&self.name);
        for (name, value) in &environment {
            let writes = matches!(name.as_str(), "THUNDER_STORE" | "THUNDER_DATA");
            if writes && !Path::new(value).starts_with(&state) {
                bail!(
                    "{name} is {value}, but a service of the machine can write only below {state}: unset it, or leave out \
                     --system"
                );
            }
        }
        // The default folder for a home of `state`, from before services had variables.
        let before = Path::new(&state).join(".local/share/thunderhead/node");
        if is_node(command) && before.exists() {
            bail!(
                "{} has this node from an earlier build: stop the service, move what is in it to {state}, and what was in \
                 {state} itself (access.redb, config.toml) to {state}/server",
                before.display()
            );
        }
        let own = if is_node(command) { "THUNDER_DATA" } else { "THUNDER_STORE" };
        for (name, value) in [(own, &state), ("HOME", &state)] {
            if environment.iter().all(|(known, _)| known != name) {
                environment.push((name.to_owned(), value.clone()));
            }
        }
        Ok(environment)
    }

    fn file(&self, manager: Manager) -> anyhow::Result<PathBuf> {
        let base = || etcetera::choose_base_strategy().context("no home folder: use --system");
        Ok(match (manager, self.system) {
            (Manager::Systemd, true) => Path::new("/etc/systemd/system").join(self.unit_name()),
            (Manager::Systemd, false) => base()?.config_dir().join("systemd/user").join(self.unit_name()),
            (Manager::Launchd, true) => {
                Path::new("/Library/LaunchDaemons").join(format!("{}.plist", label(&self.name)))
            }
            (Manager::Launchd, false) => {
                base()?.home_dir().join("Library/LaunchAgents").join(format!("{}.plist", label(&self.name)))
            }
        })
    }

    fn unit_name(&self) -> String {
        format!("{}.service", self.name)
    }

    fn systemctl(&self, arguments: &[&str]) -> anyhow::Result<()> {
        if self.system {
            return tool("systemctl", arguments);
        }
        tool("systemctl", &[&["--user"], arguments].concat())
    }

    fn domain(&self) -> String {
        if self.system { "system".to_owned() } else { format!("gui/{}", rustix::process::getuid().as_raw()) }
    }
}

fn label(name: &str) -> String {
    format!("org.thunderhead.{name}")
}

fn log_file(name: &str, system: bool) -> anyhow::Result<PathBuf> {
    if system {
        return Ok(Path::new("/var/log").join(format!("{name}.log")));
    }
    let base = etcetera::choose_base_strategy().context("no home folder: use --system")?;
    Ok(base.home_dir().join("Library/Logs").join(format!("{name}.log")))
}

fn tool(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let shown = || format!("{program} {}", arguments.join(" "));
    let status = Command::new(program).args(arguments).status();
    let status = status
        .with_context(|| format!("cannot run `{}`: is {program} this machine's service manager?", shown()))?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown());
    }
    Ok(())
}

/// Refuses a service that would always end at once.
fn check_command(command: &[String]) -> anyhow::Result<()> {
    use clap::error::ErrorKind::{DisplayHelp, DisplayVersion};
    let words = std::iter::once("thunder").chain(command.iter().map(String::as_str));
    match crate::Cli::try_parse_from(words) {
        Err(error) if !matches!(error.kind(), DisplayHelp | DisplayVersion) => {
            bail!("the service's command is wrong: {error}")
        }
        _ => Ok(()),
    }
}

/// Refuses a program that the service's user cannot reach: systemd would only say 203/EXEC.
fn check_program(program: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    for part in program.ancestors() {
        let metadata =
            std::fs::metadata(part).with_context(|| format!("cannot look at {}", part.display()))?;
        let needed = if metadata.is_dir() { 0o001 } else { 0o005 };
        if metadata.permissions().mode() & needed != needed {
            bail!(
                "the service has a user of its own, who may not run {}, because of {}: install thunder in /usr/local/bin",
                program.display(),
                part.display()
            );
        }
    }
    Ok(())
}

/// Whether the service is a node of a cluster.
fn is_node(command: &[String]) -> bool {
    command.first().is_some_and(|word| word == "up")
}

/// Variables of thunder that the service does not get. Some are secrets, which must not be in its
/// file.
fn left_out(names: impl Iterator<Item = std::ffi::OsString>) -> Vec<String> {
    let ours = ["THUNDER_", "HF_TOKEN", "OTEL_"];
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let mut names: Vec<String> = names
        .filter(|name| ours.iter().any(|begin| name.starts_with(begin)) && !PATHS.contains(&name.as_str()))
        .collect();
    names.sort();
    names
}

/// Folder of a system service's data.
fn state_folder(name: &str) -> String {
    format!("/var/lib/{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_service_uses_the_folders_of_whoever_installs_it() {
        let service = |system| ServiceCommand { action: Action::Status, name: "thunder".to_owned(), system };
        let given = |name: &str| match name {
            "THUNDER_STORE" => Some("/srv/store".to_owned()),
            "THUNDER_DATA" => Some("/srv/data".to_owned()),
            _ => None,
        };
        let of = |system, command: &str, given: &dyn Fn(&str) -> Option<String>| {
            let environment = service(system).environment(Manager::Systemd, &words(&[command]), given);
            environment
                .map(|all| all.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>())
        };
        assert_eq!(
            of(false, "serve", &given).unwrap(),
            ["THUNDER_STORE=/srv/store", "THUNDER_DATA=/srv/data"]
        );
        assert!(of(true, "up", &given).unwrap_err().to_string().contains("below /var/lib/thunder"));
        let none = |_: &str| None;
        assert_eq!(
            of(true, "up", &none).unwrap(),
            ["THUNDER_DATA=/var/lib/thunder", "HOME=/var/lib/thunder"]
        );
        assert_eq!(
            of(true, "serve", &none).unwrap(),
            ["THUNDER_STORE=/var/lib/thunder", "HOME=/var/lib/thunder"]
        );
        let names = ["THUNDER_API_KEY", "THUNDER_DATA", "PATH"].map(std::ffi::OsString::from);
        assert_eq!(left_out(names.into_iter()), ["THUNDER_API_KEY"]);
    }

    #[test]
    fn a_wrong_command_is_refused() {
        assert!(check_command(&words(&["up", "--port", "0"])).is_ok());
        for bad in [&["upp"][..], &["up", "--prot", "0"], &["serve", "--port", "x"], &[]] {
            let error = check_command(&words(bad)).unwrap_err().to_string();
            assert!(error.starts_with("the service's command is wrong"), "{bad:?}: {error}");
        }
    }

    #[test]
    fn a_program_that_others_may_not_run_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder =
            tempfile::Builder::new().permissions(std::fs::Permissions::from_mode(0o755)).tempdir().unwrap();
        let program = folder.path().join("thunder");
        std::fs::write(&program, "").unwrap();
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(&program, 0o755);
        check_program(&program).unwrap();
        set(folder.path(), 0o700);
        let error = check_program(&program).unwrap_err().to_string();
        assert!(error.contains(&format!("because of {}", folder.path().display())), "{error}");
        set(folder.path(), 0o755);
        set(&program, 0o700);
        assert!(check_program(&program).unwrap_err().to_string().contains("/usr/local/bin"));
    }

    #[test]
    fn names_are_file_names() {
        assert!(parse_name("thunder-2").is_ok());
        for bad in ["", "../x", "a/b", "-x", ".x", "a b"] {
            assert!(parse_name(bad).is_err(), "{bad}");
        }
    }
}
