//! `thunder launch`: runs any program as the ranks of a group, on this machine or over ssh on
//! others.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use thunder_cluster::hostfile::{Hostfile, split_variable};
use thunder_cluster::launch::{Backend, Input, Launch, LaunchReport, parse_hosts};
use thunder_collectives::parse_ports;

/// Shown after the options.
const HELP: &str = "\
Examples:
  thunder launch -n 4 -- ./program
  thunder launch --hosts mac1,mac2 -- thunder serve MODEL
  thunder launch --hostfile hosts.json --backend jaccl -- script.py --option";

/// Run a program as the ranks of a group, on this machine or on others over ssh
///
/// Every rank gets the variables that tell Thunderhead's programs their group (THUNDER_RANK,
/// THUNDER_WORLD_SIZE, THUNDER_COORDINATOR, THUNDER_SECRET), and those of MLX's programs (MLX_RANK,
/// MLX_HOSTFILE, …).
///
/// If a rank fails, the other ranks are stopped. The exit status is that of the first rank that
/// failed, or 128 plus the signal's number if a signal ended it. Ctrl-C stops the ranks; a second
/// Ctrl-C kills them at once.
#[derive(Args)]
#[command(after_help = HELP)]
pub struct LaunchCommand {
    /// Hosts on which to start ranks, separated by commas; HOST:N starts N ranks there
    ///
    /// localhost and this machine's own name need no ssh.
    #[arg(long, value_name = "HOST,…", default_value = "localhost", conflicts_with = "hostfile")]
    hosts: String,
    /// Ranks to start on each host without :N
    #[arg(short = 'n', long = "repeat-hosts", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    repeat: usize,
    /// File with the hosts in MLX's JSON format, instead of --hosts
    ///
    /// The file has a list of objects with ssh, ips and rdma, or an object with backend, envs and
    /// hosts.
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Transport between ranks [default: the host file's, else auto]
    #[arg(long, value_enum, value_name = "BACKEND")]
    backend: Option<BackendArg>,
    /// Environment variable for every rank; may be repeated
    ///
    /// NAME without a value passes on this process's value, which keeps the value out of command
    /// lines.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Working directory of every rank [default: this directory, or the home directory on hosts
    /// without it]
    #[arg(long, value_name = "DIR")]
    cwd: Option<PathBuf>,
    /// Python that runs COMMAND [default: for a .py file, that of the active environment]
    #[arg(long, value_name = "PROGRAM")]
    python: Option<String>,
    /// Which ranks read this terminal's or pipe's standard input
    #[arg(long, value_enum, default_value = "0")]
    stdin: InputOption,
    /// Do not print the rank before each line of output
    #[arg(long)]
    no_prefix: bool,
    /// Seconds that ranks have to end after TERM before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = seconds)]
    grace: f64,
    /// Port at which the ranks meet; MLX's ring also uses the ports after it [default: 32323, or
    /// free ports if all ranks are local]
    #[arg(short = 'p', long = "port", value_name = "PORT", alias = "starting-port", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Ports on which thunder's ranks accept each other's connections, e.g. 42000-42063 [default:
    /// any free port]
    ///
    /// For firewalls: open these ports on every machine, and --port on the machine of rank 0.
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_ports)]
    ports: Option<RangeInclusive<u16>>,
    /// TCP connections for each address in MLX's ring; several can be faster on a fast network
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    connections_per_ip: usize,
    /// Program that runs commands on other machines
    #[arg(long, value_name = "PROGRAM", default_value = "ssh")]
    ssh: String,
    /// Argument for the program of --ssh, such as -p2222 or -i/path; may be repeated
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    ssh_arg: Vec<String>,
    /// Print the commands, with secrets hidden, and start nothing
    #[arg(long)]
    dry_run: bool,
    /// Print on standard output, as JSON, how the ranks ended (with --dry-run: the plan)
    ///
    /// The ranks' own output then goes to standard error.
    #[arg(long)]
    json: bool,
    /// Program to run, and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// `--backend`.
#[derive(Clone, Copy, ValueEnum)]
enum BackendArg {
    /// jaccl if the host file lists all RDMA devices, otherwise ring
    Auto,
    /// MLX's ring over TCP; Thunderhead's programs choose their transport themselves
    Ring,
    /// RDMA, with a cable between every two ranks; needs a host file with devices
    Jaccl,
    /// RDMA, with cables from each rank to its two neighbours; needs a host file with devices
    JacclRing,
    /// NCCL, for MLX's programs on NVIDIA GPUs
    Nccl,
    /// Shared memory, for Thunderhead's programs with all ranks on one host
    Shm,
    /// TCP, also within a host
    Tcp,
}

impl From<BackendArg> for Backend {
    fn from(backend: BackendArg) -> Self {
        match backend {
            BackendArg::Auto => Self::Auto,
            BackendArg::Ring => Self::Ring,
            BackendArg::Jaccl => Self::Jaccl,
            BackendArg::JacclRing => Self::JacclRing,
            BackendArg::Nccl => Self::Nccl,
            BackendArg::Shm => Self::Shm,
            BackendArg::Tcp => Self::Tcp,
        }
    }
}

/// `--stdin`.
#[derive(Clone, Copy, ValueEnum)]
enum InputOption {
    /// Rank 0
    #[value(name = "0")]
    First,
    /// Every rank
    All,
    /// No rank
    None,
}

impl LaunchCommand {
    /// Runs the ranks; the exit status is the first failing rank's.
    ///
    /// # Errors
    /// When the ranks cannot be started.
    pub fn run(self) -> Result<ExitCode> {
        let (json, dry_run) = (self.json, self.dry_run);
        let plan = self.launch()?.plan()?;
        for note in &plan.notes {
            eprintln!("thunder launch: {note}");
        }
        if dry_run {
            if json {
                println!("{}", serde_json::to_string_pretty(&plan)?);
            } else {
                print!("{plan}");
            }
            return Ok(ExitCode::SUCCESS);
        }
        let outcome = plan.run()?;
        report(&outcome, json)?;
        Ok(ExitCode::from(outcome.status))
    }

    fn launch(self) -> Result<Launch> {
        let mut launch = Launch::new(self.command, Vec::new());
        let backend = self.backend.map(Backend::from);
        launch.backend = backend.unwrap_or_default();
        launch.environment = self.env.iter().map(|entry| variable(entry)).collect::<Result<_>>()?;
        launch.directory = self.cwd;
        launch.python = self.python;
        launch.ssh = [self.ssh].into_iter().chain(self.ssh_arg).collect();
        launch.port = self.port;
        launch.data_ports = self.ports;
        launch.connections_per_ip = self.connections_per_ip;
        launch.input = match self.stdin {
            InputOption::First => Input::First,
            InputOption::All => Input::All,
            InputOption::None => Input::None,
        };
        launch.prefix = !self.no_prefix;
        launch.output_to_stderr = self.json;
        launch.grace = Duration::from_secs_f64(self.grace);
        match &self.hostfile {
            Some(path) => {
                let hostfile =
                    Hostfile::read(path).with_context(|| format!("host file {}", path.display()))?;
                launch.apply(&hostfile, self.repeat)?;
                if let Some(backend) = backend {
                    launch.backend = backend;
                }
            }
            None => launch.places = parse_hosts(&self.hosts, self.repeat)?,
        }
        Ok(launch)
    }
}

fn variable(entry: &str) -> Result<(String, String)> {
    let pair = if entry.contains('=') {
        split_variable(entry)
    } else {
        let value = std::env::var(entry)
            .with_context(|| format!("--env {entry}: this process has no such variable"))?;
        split_variable(&format!("{entry}={value}"))
    };
    match pair {
        Some(pair) => Ok(pair),
        None => bail!("--env {entry}: write NAME=VALUE, with letters, digits and _ in the name"),
    }
}

fn report(outcome: &LaunchReport, json: bool) -> Result<()> {
    let summary = outcome.summary();
    if !summary.is_empty() {
        eprintln!("thunder launch: {summary}");
    }
    if json {
        println!("{}", serde_json::to_string(outcome)?);
    }
    Ok(())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("write a number from 1".to_owned()),
        Ok(number) => Ok(number),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    // More than a day is treated as a typing error.
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|seconds| (0.0..=86_400.0).contains(seconds))
        .ok_or("write seconds from 0 to 86400".to_owned())
}
