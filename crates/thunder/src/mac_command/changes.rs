//! `thunder mac setup` and `undo`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;
use thunder_cables::apply::{self, Hosts};
use thunder_cables::plan::{MachinePlan, Plan};
use thunder_cables::record::{Entry, LocalFile, RecordFile, State};
use thunder_cables::route::routes;
use thunder_cables::{Desk, Record, hostfile};

use super::desk::{DeskArgs, SshArgs, confirm, folder, show, with_sudo};
use super::verify;

/// Number of times that setup continues with changes that its own changes made possible: RDMA ports
/// may come up only after their interfaces have left the bridge.
const MOST_ROUNDS: usize = 3;

/// Options for the record and for confirmation.
#[derive(Args, Clone)]
pub struct ChangeArgs {
    /// File that records the changes, for `thunder mac undo` [default: thunderhead/desk/record.json
    /// in the user's data folder]
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Run the commands without asking
    #[arg(short, long)]
    pub yes: bool,
}

impl ChangeArgs {
    /// Takes the record's file.
    pub fn open(&self) -> Result<RecordFile> {
        Ok(RecordFile::open(&self.path()?)?)
    }

    fn path(&self) -> Result<PathBuf> {
        match &self.record {
            Some(path) => Ok(path.clone()),
            None => Ok(folder()?.join("record.json")),
        }
    }
}

/// Give each cable its own network, also after restarts, and measure it
///
/// First shows the commands for each machine, and asks. Then removes the cables' interfaces from
/// the Thunderbolt bridge, gives each cable addresses that no other network on any machine has,
/// sets jumbo frames for cables with TCP, and installs a job that does the same after a restart. At
/// the end measures every cable, and writes host files for `thunder launch` and `mlx.launch`.
///
/// A second run changes only what is missing. `thunder mac undo` reverts everything.
#[derive(Args)]
pub struct SetupCommand {
    #[command(flatten)]
    desk: DeskArgs,
    #[command(flatten)]
    changes: ChangeArgs,
    #[command(flatten)]
    verify: verify::ProgramArgs,
    /// Print the commands for each machine, and run no command
    #[arg(long)]
    dry_run: bool,
    /// Do not measure the cables
    #[arg(long)]
    no_verify: bool,
    /// Host file for `thunder launch` [default: thunderhead/desk/hosts.json in the user's data
    /// folder]
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Host file for `mlx.launch` [default: the name of --hostfile with -mlx before its extension]
    #[arg(long, value_name = "FILE")]
    mlx_hostfile: Option<PathBuf>,
    /// Print the plan as one JSON object (with --dry-run)
    #[arg(long, requires = "dry_run")]
    json: bool,
}

impl SetupCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode> {
        let desk = self.desk.read()?;
        let plan = Plan::new(&desk);
        let plan = match self.desk.hosts {
            Some(_) => plan?,
            None => plan.context("name the machines, which are set up over ssh: --hosts a,b")?,
        };
        if self.json {
            println!("{}", as_json(&desk, &plan));
            return Ok(ExitCode::SUCCESS);
        }
        print_plan(&desk, &plan);
        if self.dry_run {
            plan.cuts.iter().for_each(|cut| println!("✗ {cut}"));
            return Ok(ExitCode::SUCCESS);
        }
        if !plan.cuts.is_empty() {
            bail!("nothing was changed. {}", plan.cuts.join("; "));
        }
        let file = self.changes.open()?;
        let mut record = file.load()?;
        let (mut desk, mut plan) = (desk, plan);
        for round in 1..=MOST_ROUNDS {
            if plan.is_done() {
                break;
            }
            if round > 1 {
                println!("\nThe machines show more now than before, such as RDMA ports that have come up.");
                print_plan(&desk, &plan);
            }
            desk = self.carry_out(&desk, &plan, &file, &mut record)?;
            plan = Plan::new(&desk)?;
        }
        if let Some(left) = plan.machines.first() {
            let what = left.actions.first().map(|action| action.purpose()).unwrap_or_default();
            bail!("{} has not kept what was set ({what}): run `thunder mac check` there", left.machine);
        }
        self.write_hostfiles(&desk, &plan, &file, &mut record)?;
        let is_whole = plan.left_out.is_empty();
        if self.no_verify {
            return Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        let measured =
            verify::measure_all(&desk, &plan.links, &verify::Through::Ssh(&self.desk), &self.verify)?;
        verify::print(&measured);
        Ok(if is_whole && measured.iter().all(verify::Measured::is_good) {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    /// Runs the commands, and reads the machines again.
    fn carry_out(&self, desk: &Desk, plan: &Plan, file: &RecordFile, record: &mut Record) -> Result<Desk> {
        if !confirm("Run these commands?", self.changes.yes)? {
            bail!("nothing was changed");
        }
        let names: Vec<String> = plan.machines.iter().map(|plan| plan.machine.clone()).collect();
        let shells = self.desk.ssh.shells(&names);
        carry_out(&plan.machines, desk, &with_sudo(&shells, &names)?, file, record)?;
        self.desk.read()
    }

    fn write_hostfiles(
        &self,
        desk: &Desk,
        plan: &Plan,
        file: &RecordFile,
        record: &mut Record,
    ) -> Result<()> {
        let ours = match &self.hostfile {
            Some(path) => path.clone(),
            None => folder()?.join("hosts.json"),
        };
        let mlx = self.mlx_hostfile.clone().unwrap_or_else(|| mlx_name(&ours));
        for (path, text) in
            [(&ours, hostfile::thunder(desk, &plan.links)), (&mlx, hostfile::mlx(desk, &plan.links))]
        {
            let before = std::fs::read_to_string(path).ok();
            if before.as_ref() == Some(&text) {
                continue;
            }
            if !record.files.iter().any(|known| known.path == *path) {
                record.files.push(LocalFile { path: path.clone(), before });
                file.save(record)?;
            }
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            std::fs::write(path, text).with_context(|| format!("host file {}", path.display()))?;
        }
        println!(
            "\nHost files: {} (thunder launch --hostfile), {} (mlx.launch --hostfile)",
            ours.display(),
            mlx.display()
        );
        for route in routes(desk, &plan.links) {
            let [one, other] = route.machines.map(|machine| desk.machines[machine].name.as_str());
            let why =
                if route.why.is_empty() { String::new() } else { format!("  ({})", route.why.join("; ")) };
            println!("  {one} – {other}: {}{why}", route.way.name());
        }
        Ok(())
    }
}

/// Runs the actions of all machines, and prints what to do if one fails.
pub fn carry_out(
    plans: &[MachinePlan],
    desk: &Desk,
    hosts: &Hosts<'_>,
    file: &RecordFile,
    record: &mut Record,
) -> Result<()> {
    let mut save = |record: &Record| file.save(record);
    apply::apply(plans, &desk.machines, hosts, record, &mut save, &mut show).context(
        "not everything was done. Run the command again to go on, or `thunder mac undo` to restore what was there",
    )
}

fn mlx_name(path: &Path) -> PathBuf {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let extension =
        path.extension().map(|extension| format!(".{}", extension.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}-mlx{extension}"))
}

fn as_json(desk: &Desk, plan: &Plan) -> serde_json::Value {
    let commands: Vec<_> = plan
        .machines
        .iter()
        .map(|machine| json!({ "machine": machine.machine, "steps": steps(desk, machine) }))
        .collect();
    json!({
        "links": plan.links, "notes": plan.notes, "left_out": plan.left_out, "cuts": plan.cuts, "commands": commands, "routes": routes(desk, &plan.links),
        "hostfile": hostfile::thunder(desk, &plan.links), "mlx_hostfile": hostfile::mlx(desk, &plan.links),
    })
}

fn steps(desk: &Desk, plan: &MachinePlan) -> Vec<serde_json::Value> {
    let Some(machine) = desk.machines.iter().find(|machine| machine.name == plan.machine) else {
        return Vec::new();
    };
    let steps = apply::shown_commands(plan, &machine.system).into_iter();
    steps
        .map(|(purpose, commands)| {
            let commands: Vec<_> = commands
                .iter()
                .map(|command| json!({ "command": command.shown(), "input": command.input }))
                .collect();
            json!({ "purpose": purpose, "commands": commands })
        })
        .collect()
}

/// Prints the cables' networks, and every command with its input.
fn print_plan(desk: &Desk, plan: &Plan) {
    println!("Cables:");
    for (words, network) in hostfile::described(desk, &plan.links) {
        println!("  {words}  network {network}");
    }
    plan.notes.iter().for_each(|note| println!("note: {note}"));
    plan.left_out.iter().for_each(|why| println!("✗ {why}"));
    if plan.is_done() {
        match plan.left_out.len() {
            0 => println!("Everything is set up: nothing to do."),
            count => println!("{count} cable(s) are left out; the others are set up: nothing to do."),
        }
        return;
    }
    print_commands(desk, &plan.machines);
}

/// Prints the commands of each machine. Input that several commands share is printed once.
pub fn print_commands(desk: &Desk, plans: &[MachinePlan]) {
    let mut printed: BTreeMap<String, &str> = BTreeMap::new();
    for plan in plans {
        let Some(machine) = desk.machines.iter().find(|machine| machine.name == plan.machine) else {
            continue;
        };
        println!("\nOn {}:", plan.machine);
        for (purpose, commands) in apply::shown_commands(plan, &machine.system) {
            println!("  # {purpose}");
            for command in commands {
                match &command.input {
                    None => println!("  {}", command.shown()),
                    Some(input) if printed.contains_key(input) => {
                        println!("  {}  # the same text as on {}", command.shown(), printed[input]);
                    }
                    Some(input) => {
                        printed.insert(input.clone(), &plan.machine);
                        println!("  {} <<'END'", command.shown());
                        input.lines().for_each(|line| println!("  {line}"));
                        println!("  END");
                    }
                }
            }
        }
    }
    println!();
}

/// Restore the state before `thunder mac setup` and `thunder mac tune`
///
/// Looks at each machine first, then undoes the changes that are in effect, newest first. This also
/// works after a setup that ended in the middle. Changes that cannot be undone now, because a
/// machine or an interface is missing, stay in the record for the next time.
#[derive(Args)]
pub struct UndoCommand {
    /// Machines of the record, separated by commas; changes on other machines stay in the record
    /// [default: all machines of the record]
    #[arg(long, value_name = "HOST,…")]
    hosts: Option<String>,
    #[command(flatten)]
    ssh: SshArgs,
    #[command(flatten)]
    changes: ChangeArgs,
}

impl UndoCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode> {
        let path = self.changes.path()?;
        // Opening it would create its folder.
        if !path.try_exists().with_context(|| format!("--record {}", path.display()))? {
            println!("There is nothing to undo: {} is not there.", path.display());
            return Ok(ExitCode::SUCCESS);
        }
        let file = self.changes.open()?;
        let mut record = file.load()?;
        let names = self.names(&record)?;
        let is_whole = record.machines().iter().all(|machine| names.contains(machine));
        println!("These changes are taken back, newest first:");
        let is_done = |entry: &&Entry| {
            names.contains(&entry.machine) && matches!(entry.state, State::Begun | State::Done)
        };
        for entry in record.entries.iter().rev().filter(is_done) {
            println!("  {}: {}", entry.machine, entry.action.purpose());
        }
        if is_whole {
            record.files.iter().for_each(|file| println!("  this machine: write {}", file.path.display()));
        }
        if !confirm("Undo this?", self.changes.yes)? {
            bail!("nothing was changed");
        }
        let shells = self.ssh.shells(&names);
        let hosts = with_sudo(&shells, &names)?;
        let mut save = |record: &Record| file.save(record);
        let left = apply::undo(&hosts, &mut record, &mut save, &mut show)?;
        left.iter().for_each(|why| eprintln!("thunder mac: {why}"));
        let waiting = record.machines();
        if waiting.is_empty() {
            restore_files(&mut record)?;
            file.save(&record)?;
            println!("Everything is as it was.");
            return Ok(ExitCode::SUCCESS);
        }
        match record.entries.iter().filter(is_done).count() {
            0 => {
                println!(
                    "{}: as before. Still set up: {}; `thunder mac undo` takes that back too.",
                    names.join(", "),
                    waiting.join(", ")
                );
                Ok(ExitCode::SUCCESS)
            }
            count => {
                println!(
                    "{count} change(s) are left: run `thunder mac undo` again when the reasons above are gone."
                );
                Ok(ExitCode::FAILURE)
            }
        }
    }
}

impl UndoCommand {
    /// The machines to undo.
    fn names(&self, record: &Record) -> Result<Vec<String>> {
        let known = record.machines();
        let Some(hosts) = &self.hosts else { return Ok(known) };
        let names: Vec<String> = hosts.split(',').map(|name| name.trim().to_owned()).collect();
        match names.iter().find(|name| !known.contains(name)) {
            None => Ok(names),
            Some(name) => {
                bail!(
                    "--hosts {hosts}: the record has nothing to undo on {name:?}; it has {}",
                    known.join(", ")
                )
            }
        }
    }
}

fn restore_files(record: &mut Record) -> Result<()> {
    for LocalFile { path, before } in record.files.drain(..) {
        match before {
            Some(text) => std::fs::write(&path, text).with_context(|| format!("{}", path.display()))?,
            None => match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("{}", path.display()));
                }
                _ => {}
            },
        }
    }
    Ok(())
}
