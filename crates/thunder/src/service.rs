//! `thunder service`: the agent as a service of the system, which starts it with the machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};

use crate::up::DataArgs;

/// The service's name in systemd.
const UNIT: &str = "thunder.service";
/// The service's name in launchd.
const LABEL: &str = "dev.thunderhead.node";
/// Open files: connections of clients and of nodes.
const OPEN_FILES: u32 = 65_536;

/// Start `thunder up` with the machine
///
/// For root, a service of the system; for others, one of the user. Linux with systemd, and macOS.
#[derive(Args)]
pub struct ServiceCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Write the service's file, and start it now and with the machine
    Install {
        /// Print the file, and do nothing
        #[arg(long)]
        print: bool,
        #[command(flatten)]
        data: DataArgs,
        /// Options for `thunder up`, after --, e.g. -- --join 10.0.0.1:7470
        #[arg(last = true, value_name = "OPTIONS")]
        options: Vec<String>,
    },
    /// End the service, and remove its file; the node's data stays
    Uninstall,
}

/// A system that starts services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Systemd,
    Launchd,
}

/// Where this machine's service lies, and who starts it.
struct Place {
    system: System,
    is_root: bool,
    file: PathBuf,
}

impl Place {
    fn here() -> anyhow::Result<Self> {
        let is_root = rustix::process::geteuid().is_root();
        let home = || std::env::var_os("HOME").map(PathBuf::from).context("HOME is not set");
        let (system, folder, name) = if cfg!(target_os = "macos") {
            let folder =
                if is_root { "/Library/LaunchDaemons".into() } else { home()?.join("Library/LaunchAgents") };
            (System::Launchd, folder, format!("{LABEL}.plist"))
        } else {
            let folder =
                if is_root { "/etc/systemd/system".into() } else { home()?.join(".config/systemd/user") };
            (System::Systemd, folder, UNIT.to_owned())
        };
        Ok(Self { system, is_root, file: folder.join(name) })
    }

    /// The commands that start the service, or end it.
    fn commands(&self, starts: bool) -> Vec<Vec<String>> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        match self.system {
            System::Systemd => {
                let user: &[&str] = if self.is_root { &[] } else { &["--user"] };
                let call = |rest: &[&str]| words(&[&["systemctl"], user, rest].concat());
                let act = if starts { "enable" } else { "disable" };
                match starts {
                    true => vec![call(&["daemon-reload"]), call(&[act, "--now", UNIT])],
                    false => vec![call(&[act, "--now", UNIT])],
                }
            }
            System::Launchd => {
                let domain = if self.is_root {
                    "system".to_owned()
                } else {
                    format!("gui/{}", rustix::process::geteuid().as_raw())
                };
                match starts {
                    true => vec![words(&["launchctl", "bootstrap", &domain, &self.file.to_string_lossy()])],
                    false => vec![words(&["launchctl", "bootout", &format!("{domain}/{LABEL}")])],
                }
            }
        }
    }
}

impl ServiceCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// When the system has no such services, or refuses.
    pub fn run(self) -> anyhow::Result<()> {
        let place = Place::here()?;
        match self.action {
            Action::Install { print, data, options } => install(&place, &data.folder()?, &options, print),
            Action::Uninstall => uninstall(&place),
        }
    }
}

fn install(place: &Place, data: &Path, options: &[String], prints: bool) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let data = std::path::absolute(data)?;
    let mut words = vec![program.to_string_lossy().into_owned(), "up".into(), "--data".into()];
    words.push(data.to_string_lossy().into_owned());
    words.extend(options.iter().cloned());
    let is_safe = |word: &String| !word.contains(['\n', '\r', '\0']);
    ensure!(
        words.iter().all(is_safe),
        "a path or an option has a line break: a service's file cannot have it"
    );
    let text = match place.system {
        System::Systemd => systemd_unit(&words, place.is_root),
        System::Launchd => launchd_plist(&words, &data.join("agent.log")),
    };
    if prints {
        print!("{text}");
        return Ok(());
    }
    let file = &place.file;
    if place.system == System::Systemd && !Path::new("/run/systemd/system").exists() {
        bail!(
            "this system does not run systemd: start `thunder up` by what starts services here (--print shows a unit)"
        );
    }
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    place.commands(true).iter().try_for_each(|words| call(words))?;
    eprintln!("installed {}; `thunder cluster status` shows the node", file.display());
    if place.system == System::Systemd && !place.is_root {
        eprintln!("it ends when you log out, unless you run: loginctl enable-linger");
    }
    Ok(())
}

fn uninstall(place: &Place) -> anyhow::Result<()> {
    ensure!(place.file.exists(), "no service is installed: there is no {}", place.file.display());
    place.commands(false).iter().try_for_each(|words| call(words))?;
    let failed = || format!("cannot remove {}", place.file.display());
    std::fs::remove_file(&place.file).with_context(failed)?;
    eprintln!("removed {}", place.file.display());
    Ok(())
}

fn call(words: &[String]) -> anyhow::Result<()> {
    let status = Command::new(&words[0]).args(&words[1..]).status();
    let status = status.with_context(|| format!("cannot run {}", words[0]))?;
    ensure!(status.success(), "{} ended with {status}", words.join(" "));
    Ok(())
}

fn systemd_unit(words: &[String], is_root: bool) -> String {
    let target = if is_root { "multi-user.target" } else { "default.target" };
    let command: Vec<String> = words.iter().map(|word| systemd_word(word)).collect();
    format!(
        "[Unit]\n\
         Description=Thunderhead: a node of a cluster\n\
         Wants=network-online.target\n\
         After=network-online.target\n\
         \n\
         [Service]\n\
         ExecStart={}\n\
         Restart=on-failure\n\
         RestartSec=2\n\
         KillMode=mixed\n\
         TimeoutStopSec=40\n\
         LimitNOFILE={OPEN_FILES}\n\
         LimitMEMLOCK=infinity\n\
         \n\
         [Install]\n\
         WantedBy={target}\n",
        command.join(" ")
    )
}

/// A word of a command line, as systemd reads it.
fn systemd_word(word: &str) -> String {
    let mut quoted = String::from("\"");
    for character in word.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            // Specifiers and variables.
            '%' | '$' => quoted.extend([character, character]),
            _ => quoted.push(character),
        }
    }
    quoted + "\""
}

fn launchd_plist(words: &[String], log: &Path) -> String {
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let arguments: String =
        words.iter().map(|word| format!("    <string>{}</string>\n", escape(word))).collect();
    let log = escape(&log.to_string_lossy());
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <plist version=\"1.0\">\n<dict>\n  <key>Label</key>\n  <string>{LABEL}</string>\n  <key>ProgramArguments</key>\n  \
         <array>\n{arguments}  </array>\n  <key>RunAtLoad</key>\n  <true/>\n  <key>KeepAlive</key>\n  <dict>\n    \
         <key>SuccessfulExit</key>\n    <false/>\n  </dict>\n  <key>ExitTimeOut</key>\n  <integer>40</integer>\n  \
         <key>SoftResourceLimits</key>\n  <dict>\n    <key>NumberOfFiles</key>\n    <integer>{OPEN_FILES}</integer>\n  \
         </dict>\n  <key>StandardErrorPath</key>\n  <string>{log}</string>\n</dict>\n</plist>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_paths_reach_systemd_and_launchd_as_they_are() {
        let words = ["/opt/a b/thunder", "up", "--name", "50% \"$x\" <&> \\"].map(str::to_owned);
        let unit = systemd_unit(&words, true);
        let line = "ExecStart=\"/opt/a b/thunder\" \"up\" \"--name\" \"50%% \\\"$$x\\\" <&> \\\\\"\n";
        assert!(unit.contains(line), "{unit}");
        assert!(unit.contains("WantedBy=multi-user.target"));
        let plist = launchd_plist(&words, Path::new("/x/agent.log"));
        assert!(plist.contains("<string>50% \"$x\" &lt;&amp;&gt; \\</string>"), "{plist}");
        assert_eq!(plist.matches("<dict>").count(), plist.matches("</dict>").count());
    }
}
