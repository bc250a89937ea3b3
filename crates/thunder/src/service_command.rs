//! `thunder service`: the server as a service of systemd or launchd.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use clap::{Args, Parser as _, Subcommand};
use etcetera::BaseStrategy;

/// Install thunder as a service that starts with the machine (systemd, launchd)
///
/// Without --system, the service is the user's: on Linux, `loginctl enable-linger` starts it before
/// the user logs in.
#[derive(Args)]
pub struct ServiceCommand {
    #[command(subcommand)]
    action: Action,
    /// Name of the service
    #[arg(long, value_name = "NAME", default_value = "thunder", global = true, value_parser = parse_name)]
    name: String,
    /// A service of the machine, not of the user; needs root
    #[arg(long, global = true)]
    system: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Write the service's file, and start it now and with the machine
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
    /// End the service and remove its file; its store stays
    Uninstall,
    /// Show whether it runs
    Status,
}

/// Names go into file names and commands.
fn parse_name(name: &str) -> Result<String, String> {
    let is_name = (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !name.starts_with(['-', '.']);
    if is_name { Ok(name.to_owned()) } else { Err("use letters, digits, -, _ and .".to_owned()) }
}

/// Variables of paths that the service gets as they are when it is installed.
const PATHS: [&str; 6] =
    ["THUNDER_STORE", "THUNDER_DATA", "THUNDER_CONFIG", "THUNDER_PROMPTS_KEY", "HF_HOME", "HF_HUB_CACHE"];

/// Variables of the service, in order.
type Environment = Vec<(String, String)>;

/// What starts services on this machine.
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
            // What does not start must not start with the machine; what ran before runs again.
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
                // One that runs already gets its new command.
                self.systemctl(&["restart", &self.unit_name()])?;
                let user = if self.system { "" } else { "--user " };
                println!("it runs; its log: journalctl {user}-u {} -f", self.name);
            }
            Manager::Launchd => {
                // One that is loaded has to go first; of the first there is none.
                drop(tool("launchctl", &["bootout", &self.domain(), &file.display().to_string()]));
                tool("launchctl", &["bootstrap", &self.domain(), &file.display().to_string()])?;
                println!("it runs; its log: {}", log_file(&self.name, self.system)?.display());
            }
        }
        Ok(())
    }

    /// The service's variables: paths as they are given here, and a machine's service keeps its
    /// data in its own folder.
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
        // Where the default for a home of `state` was, before a service had variables.
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

/// Refuses what would end at once, again and again.
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

/// Variables of thunder that the service does not get: some are secrets, which do not belong into
/// its file.
fn left_out(names: impl Iterator<Item = std::ffi::OsString>) -> Vec<String> {
    let ours = ["THUNDER_", "HF_TOKEN", "OTEL_"];
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let mut names: Vec<String> = names
        .filter(|name| ours.iter().any(|begin| name.starts_with(begin)) && !PATHS.contains(&name.as_str()))
        .collect();
    names.sort();
    names
}

/// What a service starts.
#[derive(Debug, Clone, Copy)]
struct Start<'a> {
    program: &'a Path,
    command: &'a [String],
    environment: &'a [(String, String)],
}

impl Start<'_> {
    fn words(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.program.display().to_string()).chain(self.command.iter().cloned())
    }
}

/// Folder of a system service's data.
fn state_folder(name: &str) -> String {
    format!("/var/lib/{name}")
}

/// A word of systemd's ExecStart.
fn quoted(word: &str) -> anyhow::Result<String> {
    let escaped = escaped("an argument of the service", word)?.replace('$', "$$");
    let is_plain = escaped.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&byte));
    Ok(if is_plain && !escaped.is_empty() { escaped } else { format!("\"{escaped}\"") })
}

/// A variable of systemd's Environment, where no dollar means anything.
fn assigned(name: &str, value: &str) -> anyhow::Result<String> {
    Ok(format!("Environment=\"{name}={}\"\n", escaped(name, value)?))
}

/// A text as it stands between quotes in a unit; `what` names it.
fn escaped(what: &str, text: &str) -> anyhow::Result<String> {
    if text.contains(['\n', '\r', '\0']) {
        bail!("{what} has a line break: {text:?}");
    }
    Ok(text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%"))
}

/// The unit of systemd.
fn unit(name: &str, start: &Start<'_>, system: bool) -> anyhow::Result<String> {
    let words = start.words().map(|word| quoted(&word)).collect::<Result<Vec<_>, _>>()?;
    let mut text =
        String::from("[Unit]\nDescription=Thunderhead, an LLM server\nAfter=network-online.target\n");
    // A service of a user cannot wait for the machine's units.
    text.push_str(if system { "Wants=network-online.target\n" } else { "" });
    let _ = write!(
        text,
        "\n[Service]\n# Starting it fails if the program cannot be run.\nType=exec\nExecStart={}\nRestart=on-failure\nRestartSec=5\n\
         # Answers in flight have 30 s to complete (--grace).\nTimeoutStopSec=45\n\
         LimitNOFILE=65536\nLimitMEMLOCK=infinity\nUMask=0077\nNoNewPrivileges=yes\n",
        words.join(" ")
    );
    for (name, value) in start.environment {
        text.push_str(&assigned(name, value)?);
    }
    if system {
        let _ = write!(
            text,
            "DynamicUser=yes\nStateDirectory={name}\nStateDirectoryMode=0700\nProtectSystem=strict\n\
             ProtectHome=read-only\nPrivateTmp=yes\n"
        );
    }
    let target = if system { "multi-user.target" } else { "default.target" };
    let _ = write!(text, "\n[Install]\nWantedBy={target}\n");
    Ok(text)
}

/// The property list of launchd.
fn plist(name: &str, start: &Start<'_>, log: &Path) -> anyhow::Result<String> {
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let words: String =
        start.words().map(|word| format!("    <string>{}</string>\n", escaped(&word))).collect();
    let variable = |(name, value): &(String, String)| {
        format!("    <key>{}</key>\n    <string>{}</string>\n", escaped(name), escaped(value))
    };
    let variables: String = start.environment.iter().map(variable).collect();
    let log = escaped(&log.display().to_string());
    if words.contains('\0') {
        bail!("an argument of the service has a zero byte");
    }
    Ok(format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <plist version=\"1.0\">\n<dict>\n  <key>Label</key>\n  <string>{label}</string>\n  <key>ProgramArguments</key>\n  \
         <array>\n{words}  </array>\n  <key>EnvironmentVariables</key>\n  <dict>\n{variables}  </dict>\n  <key>RunAtLoad</key>\n  <true/>\n  <key>KeepAlive</key>\n  <dict>\n    \
         <key>SuccessfulExit</key>\n    <false/>\n  </dict>\n  <key>ExitTimeOut</key>\n  <integer>45</integer>\n  \
         <key>SoftResourceLimits</key>\n  <dict>\n    <key>NumberOfFiles</key>\n    <integer>65536</integer>\n  </dict>\n  \
         <key>StandardErrorPath</key>\n  <string>{log}</string>\n  <key>StandardOutPath</key>\n  <string>{log}</string>\n\
         </dict>\n</plist>\n",
        label = label(name),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_unit_starts_the_command_as_it_was_given() {
        let command = words(&["serve", "--api-key", "a b\"c", "100%", "$HOME"]);
        let environment = vec![("THUNDER_STORE".to_owned(), "/a b/$5 100%".to_owned())];
        let program = Path::new("/opt/thunder");
        let start = Start { program, command: &command, environment: &environment };
        let text = unit("thunder", &start, true).unwrap();
        let expected = r#"ExecStart=/opt/thunder serve --api-key "a b\"c" 100%% "$$HOME""#;
        assert!(text.lines().any(|line| line == expected), "{text}");
        let variable = "Environment=\"THUNDER_STORE=/a b/$5 100%%\"";
        assert!(text.contains("WantedBy=multi-user.target") && text.lines().any(|line| line == variable));
        let user = unit("thunder", &start, false).unwrap();
        assert!(user.contains("WantedBy=default.target") && !user.contains("DynamicUser"));
        let bad = words(&["a\nUser=root"]);
        assert!(unit("t", &Start { command: &bad, ..start }, true).is_err());
        let bad = [("HF_HOME".to_owned(), "a\nUser=root".to_owned())];
        assert!(unit("t", &Start { environment: &bad, ..start }, true).is_err());
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

    /// systemd's own check, where it is installed.
    #[test]
    fn systemd_accepts_the_unit() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("thunder-test.service");
        let program = std::env::current_exe().unwrap();
        let environment = [("THUNDER_STORE".to_owned(), "/var/lib/a b".to_owned())];
        let command = words(&["serve", "a b"]);
        let start = Start { program: &program, command: &command, environment: &environment };
        std::fs::write(&file, unit("thunder-test", &start, true).unwrap()).unwrap();
        match Command::new("systemd-analyze").arg("verify").arg(&file).output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                let own = text.lines().filter(|line| line.contains("thunder-test"));
                assert_eq!(own.collect::<Vec<_>>(), Vec::<&str>::new());
            }
            Err(_) => thunder_testing::skip("systemd_accepts_the_unit", "systemd-analyze is not installed"),
        }
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
    fn a_property_list_is_xml() {
        let (command, environment) =
            (words(&["serve", "<x>"]), [("THUNDER_STORE".to_owned(), "/a&b".to_owned())]);
        let start = Start { program: Path::new("/opt/a&b"), command: &command, environment: &environment };
        let text = plist("thunder", &start, Path::new("/l")).unwrap();
        assert!(text.contains("<key>THUNDER_STORE</key>\n    <string>/a&amp;b</string>"), "{text}");
        assert!(
            text.contains("<string>/opt/a&amp;b</string>") && text.contains("<string>&lt;x&gt;</string>")
        );
        assert_eq!(text.matches("<dict>").count(), text.matches("</dict>").count());
        assert!(text.starts_with("<?xml") && text.contains("<string>org.thunderhead.thunder</string>"));
    }

    #[test]
    fn names_are_file_names() {
        assert!(parse_name("thunder-2").is_ok());
        for bad in ["", "../x", "a/b", "-x", ".x", "a b"] {
            assert!(parse_name(bad).is_err(), "{bad}");
        }
    }
}
