//! `thunder mac check`, `graph` and `recovery`: they change nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde_json::json;
use thunder_cables::check::{self, Finding, Recovery, Severity, findings};
use thunder_cables::machine::{Attached, Machine, RdmaState};
use thunder_cables::tune::{self, GpuMemory, GpuSource};

use super::desk::{LookArgs, Looked, RecordedArgs};

/// Report problems of these machines' cables, with a remedy for each
///
/// Checks the model, the system's version, memory, RDMA, each Thunderbolt port and the device at
/// its other end, bridges, addresses, firewall, Remote Login and power. The exit status is 1 if
/// there is a problem.
#[derive(Args)]
pub struct CheckCommand {
    #[command(flatten)]
    desk: LookArgs,
    #[command(flatten)]
    recorded: RecordedArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl CheckCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Looked { desk, unreachable, nodes } = self.desk.look(Some(&self.recorded))?;
        let found = findings(&desk);
        let is_bad =
            !unreachable.is_empty() || found.iter().any(|finding| finding.severity == Severity::Problem);
        if self.json {
            let gpus: BTreeMap<&str, Option<GpuMemory>> = desk
                .machines
                .iter()
                .map(|machine| (machine.name.as_str(), tune::gpu_memory(machine)))
                .collect();
            println!(
                "{}",
                json!({ "desk": desk, "findings": found, "unreachable": unreachable, "gpu_memory": gpus })
            );
        } else {
            for machine in &desk.machines {
                print_machine(machine);
            }
            let remedy = match nodes {
                _ if self.recorded.is_read() => "keep it again: `thunder mac check --hosts … --save FOLDER`",
                Some(_) => "`thunder cluster status` lists the nodes and which of them answer",
                None => "test it with `ssh HOST true`; keys: ssh-copy-id HOST",
            };
            unreachable.iter().for_each(|why| println!("✗ {why}\n    → {remedy}\n"));
            print_findings(&found, &self.desk.hosts_option(), unreachable.len());
        }
        Ok(if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

fn print_machine(machine: &Machine) {
    println!("{}  {}", machine.name, machine.description());
    let rdma = match &machine.rdma {
        RdmaState::Enabled => format!("on, {} device(s)", machine.devices.len()),
        RdmaState::Disabled => "off".to_owned(),
        RdmaState::Missing | RdmaState::NotRead => "not there".to_owned(),
        RdmaState::Unknown(answer) => format!("unknown ({answer})"),
    };
    println!("  RDMA            {rdma}");
    if machine.is_mac() {
        let gpu = tune::gpu_memory(machine).map_or_else(|| "no such setting".to_owned(), gpu_words);
        println!("  GPU may hold    {gpu}");
    }
    let on = |state: Option<bool>| state.map_or("unknown", |on| if on { "on" } else { "off" });
    let login = if machine.is_mac() { "Remote Login" } else { "ssh server" };
    println!("  network         firewall {}, {login} {}", on(machine.firewall), on(machine.remote_login));
    if let Some(power) = power(machine) {
        println!("  power           {power}");
    }
    if let Some(generation) = machine.generation() {
        println!("  ports           {}", generation.name());
    }
    for port in &machine.ports {
        let interface = port.interface.as_deref().unwrap_or("no interface");
        let speed = match (port.link_gbits, port.most_gbits) {
            (Some(gbits), _) => format!("{gbits} Gbit/s"),
            (None, Some(gbits)) => format!("free, up to {gbits} Gbit/s"),
            (None, None) => "no speed".to_owned(),
        };
        let found = port.interface.as_deref().and_then(|name| machine.interface(name));
        let bridge = found.and_then(|found| found.bridge.clone()).map(|bridge| format!(", in {bridge}"));
        let addresses = found
            .map(|found| found.addresses.iter().map(|address| format!(", {address}")).collect::<String>());
        let device = port.interface.as_deref().and_then(|name| machine.device_of(name));
        let device = device.map(|device| {
            let state = device.active.map_or("", |active| if active { " active" } else { " down" });
            format!(", {}{state}", device.name)
        });
        println!(
            "  port {:<10} {interface}, {speed}{}{}{}{}",
            port.name,
            attached(&port.attached),
            bridge.unwrap_or_default(),
            addresses.unwrap_or_default(),
            device.unwrap_or_default()
        );
    }
    println!();
}

/// Memory that the GPU may use, and the source of this number.
pub fn gpu_words(memory: GpuMemory) -> String {
    let gib = memory.bytes as f64 / f64::from(1 << 30);
    let why = match (memory.source, memory.is_set) {
        (GpuSource::Estimate, _) => "estimated: Metal could not be asked for macOS's default",
        (_, true) => "set by iogpu.wired_limit_mb",
        (_, false) => "macOS's default",
    };
    format!("{gib:.1} GiB ({why})")
}

/// The device at a port's other end, as reported by the port itself.
fn attached(attached: &Attached) -> String {
    match attached {
        Attached::Nothing => String::new(),
        Attached::Device { name } => format!(" to {name}"),
        Attached::Machine { name, model, via, .. } => {
            let model = model.as_ref().filter(|model| *model != name);
            let model = model.map(|model| format!(" ({model})")).unwrap_or_default();
            let via = via.as_ref().map(|via| format!(" behind {via}")).unwrap_or_default();
            format!(" to {name}{model}{via}")
        }
        Attached::Unknown => " to something that does not say its name".to_owned(),
    }
}

/// The machine's sleep time, and whether it saves power.
fn power(machine: &Machine) -> Option<String> {
    let sleeps = machine.power.sleep_minutes.iter().map(|(source, minutes)| match minutes {
        0 => format!("never sleeps on {source}"),
        _ => format!("sleeps after {minutes} min on {source}"),
    });
    let low = machine.power.low_power.iter().filter(|(_, on)| **on);
    let low = low.map(|(source, _)| format!("Low Power Mode on {source}"));
    let words: Vec<String> = sleeps.chain(low).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// `hosts` completes the remedies that are commands of ours.
fn print_findings(found: &[Finding], hosts: &str, unreachable: usize) {
    for (severity, sign) in [(Severity::Problem, '✗'), (Severity::Warning, '!'), (Severity::Note, 'i')] {
        for finding in found.iter().filter(|finding| finding.severity == severity) {
            let hosts = if ["thunder mac setup", "thunder mac tune"].contains(&finding.remedy.as_str()) {
                hosts
            } else {
                ""
            };
            println!("{sign} {}: {}\n    → {}{hosts}", finding.machine, finding.text, finding.remedy);
        }
    }
    let problems = found.iter().filter(|finding| finding.severity == Severity::Problem).count();
    match (problems, unreachable) {
        (0, 0) => println!("No problem was found."),
        (0, away) => println!("{away} machine(s) did not answer. The others have no problem."),
        (1, 0) => println!("1 problem."),
        (many, 0) => println!("{many} problems."),
        (many, away) => println!("{many} problem(s), and {away} machine(s) did not answer."),
    }
}

/// Draw which ports the cables connect, their speeds, and their best use
///
/// Reports whether the cables form a mesh, a ring or a line, which cables are slow, what one more
/// cable would improve, and the best order of the machines.
#[derive(Args)]
pub struct GraphCommand {
    #[command(flatten)]
    desk: LookArgs,
    #[command(flatten)]
    recorded: RecordedArgs,
    /// Print the graph for Graphviz
    #[arg(long, conflicts_with_all = ["json", "svg"])]
    dot: bool,
    /// Write the graph to this file, as an SVG picture
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl GraphCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Looked { desk, unreachable, .. } = self.desk.look(Some(&self.recorded))?;
        unreachable.iter().for_each(|why| eprintln!("thunder mac: {why}"));
        let unread =
            desk.machines.iter().filter_map(|machine| Some((&machine.name, machine.ports_unread()?)));
        let unread: Vec<String> = unread.map(|(name, why)| format!("{name}: {why}")).collect();
        unread.iter().for_each(|why| eprintln!("thunder mac: {why}"));
        if let Some(path) = &self.svg {
            std::fs::write(path, desk.svg()).with_context(|| format!("--svg {}", path.display()))?;
        }
        if self.dot {
            print!("{}", desk.dot());
        } else if self.json {
            let slow: Vec<_> = desk.cables.iter().filter_map(|cable| desk.slow_cable(cable)).collect();
            println!(
                "{}",
                json!({ "desk": desk, "shape": desk.shape(), "advice": desk.advice(), "slow": slow })
            );
        } else {
            print!("{}", desk.text());
        }
        let is_whole = unreachable.is_empty() && unread.is_empty();
        Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Print the steps that turn RDMA on, which only a person can do, and the Macs that still need them
#[derive(Args)]
pub struct RecoveryCommand {
    #[command(flatten)]
    desk: LookArgs,
    #[command(flatten)]
    recorded: RecordedArgs,
}

impl RecoveryCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Looked { desk, unreachable, .. } = self.desk.look(Some(&self.recorded))?;
        print!("{}", include_str!("../../../../docs/recovery.txt"));
        println!();
        let mut is_known = true;
        for machine in desk.machines.iter().filter(|machine| machine.is_mac()) {
            let needs = match check::recovery(machine) {
                Recovery::Needed => "[ ] needs these steps".to_owned(),
                Recovery::NotNeeded => "[x] needs nothing".to_owned(),
                Recovery::UpdateFirst(version) => {
                    format!("[ ] has macOS {version}: needs 26.2 or later, then these steps")
                }
                Recovery::Unknown(why) => {
                    is_known = false;
                    format!("[?] is not known ({why})")
                }
            };
            println!("{needs}: {}", machine.name);
        }
        unreachable.iter().for_each(|why| println!("[?] is not known: {why}"));
        let is_known = is_known && unreachable.is_empty();
        Ok(if is_known { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
