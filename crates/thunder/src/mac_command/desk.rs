//! The machines of a command.

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use etcetera::BaseStrategy;
use thunder_cables::apply::{self, Event, Host, Hosts, Sudo};
use thunder_cables::shell::{ProcessShell, Shell};
use thunder_cables::{Desk, Machine};
use thunder_cluster::launch::{is_this_machine, parse_hosts};

use super::nodes::{Nodes, NodesArgs};

/// The machines, and the way to reach them.
#[derive(Args, Clone)]
pub struct DeskArgs {
    /// Machines, separated by commas, by their names for ssh; this machine needs no ssh [default:
    /// localhost]
    #[arg(long, value_name = "HOST,…")]
    pub hosts: Option<String>,
    #[command(flatten)]
    pub ssh: SshArgs,
}

/// How other machines are reached.
#[derive(Args, Clone)]
pub struct SshArgs {
    /// Program that runs commands on other machines
    #[arg(long, value_name = "PROGRAM", default_value = "ssh")]
    pub ssh: String,
    /// Argument for the program of --ssh, such as -p2222 or -i/path; may be repeated
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub ssh_arg: Vec<String>,
}

/// Folders in which answers are stored, or from which they are read.
#[derive(Args, Clone)]
pub struct RecordedArgs {
    /// Read the answers that --save stored in this folder, and ask no machine
    #[arg(long, value_name = "FOLDER", conflicts_with = "save")]
    from: Option<PathBuf>,
    /// Store the machines' answers in this folder, one file for each machine, for a problem report
    ///
    /// The files contain names, addresses and UUIDs of your machines.
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,
}

/// The machines that answered, and why the others did not.
pub struct Looked {
    pub desk: Desk,
    pub unreachable: Vec<String>,
    /// The nodes that were asked through their agents, if any.
    pub nodes: Option<Nodes>,
}

/// Machines to examine: over ssh, or through the agents of a cluster.
#[derive(Args, Clone)]
pub struct LookArgs {
    #[command(flatten)]
    pub desk: DeskArgs,
    #[command(flatten)]
    nodes: NodesArgs,
}

impl RecordedArgs {
    /// Whether answers are read from files.
    pub fn is_read(&self) -> bool {
        self.from.is_some()
    }
}

impl DeskArgs {
    /// The machines' names, each once.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        for place in parse_hosts(self.hosts.as_deref().unwrap_or("localhost"), 1)? {
            if names.contains(&place.ssh) {
                bail!("--hosts names {} twice", place.ssh);
            }
            names.push(place.ssh);
        }
        Ok(names)
    }

    /// Asks all machines in parallel, and fails if one does not answer.
    pub fn read(&self) -> Result<Desk> {
        let names = self.names()?;
        let answers = ask(&self.ssh.shells(&names));
        all_of(understand(&names, answers, None))
    }
}

impl SshArgs {
    /// The shells of the machines.
    pub fn shells(&self, names: &[String]) -> Vec<(String, ProcessShell)> {
        let ssh: Vec<String> = [self.ssh.clone()].into_iter().chain(self.ssh_arg.iter().cloned()).collect();
        let shell = |name: &String| {
            if is_this_machine(name) { ProcessShell::local(name) } else { ProcessShell::over(&ssh, name) }
        };
        names.iter().map(|name| (name.clone(), shell(name))).collect()
    }
}

impl LookArgs {
    /// The options of `thunder mac setup` and `tune` for the examined machines.
    pub fn hosts_option(&self) -> String {
        self.desk.hosts.as_ref().map(|hosts| format!(" --hosts {hosts}")).unwrap_or_default()
    }

    /// Asks all machines in parallel: those of --hosts over ssh, otherwise the nodes of a cluster
    /// through their agents, otherwise this machine.
    pub fn look(&self, recorded: Option<&RecordedArgs>) -> Result<Looked> {
        if let Some(folder) = recorded.and_then(|recorded| recorded.from.as_ref()) {
            let names = match self.desk.hosts {
                Some(_) => self.desk.names()?,
                None => recorded_names(folder)?,
            };
            let answers = names.iter().map(|name| recorded_answer(folder, name)).collect();
            return Ok(understand(&names, answers, None));
        }
        if self.desk.hosts.is_some() && self.nodes.is_given() {
            bail!("--hosts asks over ssh and --nodes through the agents: give one of them");
        }
        let nodes = if self.desk.hosts.is_none() { self.nodes.find()? } else { None };
        let names = match &nodes {
            Some(nodes) => nodes.names.clone(),
            None => self.desk.names()?,
        };
        let answers = match &nodes {
            Some(nodes) => nodes.ask()?,
            None => ask(&self.desk.ssh.shells(&names)),
        };
        if let Some(folder) = recorded.and_then(|recorded| recorded.save.as_ref()) {
            std::fs::create_dir_all(folder)?;
            for (name, answer) in names.iter().zip(&answers) {
                if let Ok(answer) = answer {
                    std::fs::write(file_of(folder, name), answer)?;
                }
            }
        }
        Ok(understand(&names, answers, nodes))
    }
}

/// The desk of nodes that are asked through their agents.
pub fn desk_of(nodes: Nodes) -> Result<Desk> {
    let answers = nodes.ask()?;
    all_of(understand(&nodes.names.clone(), answers, Some(nodes)))
}

/// The machines of the answers.
fn understand(names: &[String], answers: Vec<Result<String>>, nodes: Option<Nodes>) -> Looked {
    let (mut machines, mut unreachable) = (Vec::new(), Vec::new());
    for (name, answer) in names.iter().zip(answers) {
        match answer.and_then(|answer| Ok(Machine::read(name, &answer)?)) {
            Ok(machine) => machines.push(machine),
            Err(error) => unreachable.push(format!("{error:#}")),
        }
    }
    Looked { desk: Desk::new(machines), unreachable, nodes }
}

/// The desk, if every machine has answered.
pub fn all_of(looked: Looked) -> Result<Desk> {
    match looked.unreachable.first() {
        None => Ok(looked.desk),
        Some(why) => bail!("{why}"),
    }
}

fn file_of(folder: &Path, name: &str) -> PathBuf {
    // Not `with_extension`, which would take the end of `mac.local` for one.
    folder.join(format!("{name}.txt"))
}

fn recorded_answer(folder: &Path, name: &str) -> Result<String> {
    let path = file_of(folder, name);
    let text = std::fs::read_to_string(&path);
    text.with_context(|| format!("the answer of {name}, {}", path.display()))
}

/// The machines whose answers are in the folder, by name.
fn recorded_names(folder: &Path) -> Result<Vec<String>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("answers of --save in {}", folder.display()))?;
    let name = |entry: std::fs::DirEntry| {
        entry.file_name().to_str().and_then(|name| name.strip_suffix(".txt")).map(str::to_owned)
    };
    let mut names: Vec<String> = entries.flatten().filter_map(name).collect();
    names.sort();
    if names.is_empty() {
        bail!("{} has no answers: `thunder mac check --save FOLDER` writes NAME.txt", folder.display());
    }
    Ok(names)
}

fn ask(shells: &[(String, ProcessShell)]) -> Vec<Result<String>> {
    // A Mac takes seconds, so a message on the terminal explains the wait.
    if std::io::stderr().is_terminal() {
        let names: Vec<&str> = shells.iter().map(|(name, _)| name.as_str()).collect();
        eprintln!("asking {} …", names.join(", "));
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = shells
            .iter()
            .map(|(_, shell)| scope.spawn(move || apply::probe(shell).map_err(anyhow::Error::from)))
            .collect();
        let ended = |thread: std::thread::ScopedJoinHandle<'_, Result<String>>| {
            thread.join().unwrap_or_else(|_| bail!("a thread that asked a machine has panicked"))
        };
        threads.into_iter().map(ended).collect()
    })
}

/// Finds out on each machine how commands run as root. If a `sudo` needs a password, asks the
/// person once.
pub fn with_sudo<'a>(shells: &'a [(String, ProcessShell)], wanted: &[String]) -> Result<Hosts<'a>> {
    let mut password: Option<String> = None;
    let mut hosts = Hosts::new();
    for (name, shell) in shells.iter().filter(|(name, _)| wanted.contains(name)) {
        let sudo = match apply::ask_sudo(shell) {
            Ok(Some(sudo)) => sudo,
            Ok(None) => {
                let known = match &password {
                    Some(known) => known.clone(),
                    None => read_password(name)?,
                };
                Sudo::Password(password.insert(known).clone())
            }
            // Its first command reports the same, and is then in the record.
            Err(error) => {
                eprintln!("thunder mac: {error}");
                continue;
            }
        };
        hosts.insert(name.clone(), Host { shell: shell as &dyn Shell, sudo });
    }
    Ok(hosts)
}

/// Reads a password from the terminal, without showing it.
fn read_password(machine: &str) -> Result<String> {
    use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
    let terminal = std::fs::File::options().read(true).write(true).open("/dev/tty").with_context(|| {
        format!(
            "sudo on {machine} wants a password, and there is no terminal to ask on: allow sudo without one"
        )
    })?;
    let before = tcgetattr(&terminal)?;
    let mut quiet = before.clone();
    quiet.local_modes.remove(LocalModes::ECHO);
    eprint!("Password for sudo on {machine} (used for the commands shown, kept nowhere): ");
    tcsetattr(&terminal, OptionalActions::Flush, &quiet)?;
    let mut line = String::new();
    let read = std::io::BufReader::new(&terminal).read_line(&mut line);
    tcsetattr(&terminal, OptionalActions::Flush, &before)?;
    eprintln!();
    read?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

/// Asks for confirmation. Without a terminal nobody can answer, so `--yes` is needed.
pub fn confirm(question: &str, yes: bool) -> Result<bool> {
    if yes {
        return Ok(true);
    }
    if !std::io::stdin().is_terminal() {
        bail!("add --yes to run these commands without being asked");
    }
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}

/// Prints progress on standard error.
pub fn show(event: Event<'_>) {
    match event {
        Event::Runs { machine, command } => eprintln!("{machine}: {command}"),
        Event::Left { machine, why } => eprintln!("{machine}: {why}"),
    }
}

/// The user's folder for records and host files.
pub fn folder() -> Result<PathBuf> {
    let base = etcetera::choose_base_strategy().context("no home folder: name a file by --record")?;
    Ok(base.data_dir().join("thunderhead").join("desk"))
}
