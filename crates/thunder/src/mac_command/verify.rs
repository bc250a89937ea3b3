//! `thunder mac verify`: measures each cable with `thunder bench comm`.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use thunder_cables::Desk;
use thunder_cables::graph::End;
use thunder_cables::plan::{Link, Plan};
use thunder_node::agent::CableBench;

use super::desk::{DeskArgs, LookArgs, all_of};
use super::nodes::Nodes;
use crate::table;

/// Sizes of the timed messages: one shows the delay, the other the bandwidth.
const SIZES: [usize; 2] = [4 << 10, 16 << 20];
/// A cable with less than this share of its speed is reported: TCP reaches half on a good cable.
const LOW_SHARE: f64 = 0.1;

/// Measure delay and bandwidth of each cable that is set up
///
/// Starts two ranks of `thunder bench comm` for each cable. They meet at the cable's addresses, so
/// no data can take another way. Cables with RDMA are also measured over RDMA. With --nodes it uses
/// the agents of a cluster, without ssh. The exit status is 1 if no data passes over a cable, or at
/// less than a tenth of its speed.
#[derive(Args)]
pub struct VerifyCommand {
    #[command(flatten)]
    desk: LookArgs,
    #[command(flatten)]
    program: ProgramArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// How the measuring program is started.
#[derive(Args, Clone)]
pub struct ProgramArgs {
    /// Path of thunder on the machines, for the measurements [default: the path of this program]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// Milliseconds for each size
    #[arg(long, value_name = "MS", default_value_t = 200)]
    time: u64,
    /// Seconds within which the two ranks of a cable must meet
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    wait: u32,
}

/// What one cable gave.
#[derive(Debug, Serialize)]
pub struct Measured {
    cable: String,
    over: &'static str,
    gbits: Option<u32>,
    median_us: Option<f64>,
    measured_gbits: Option<f64>,
    error: Option<String>,
}

impl Measured {
    /// Whether the cable is at least as fast as TCP over a bad cable.
    pub fn is_good(&self) -> bool {
        self.error.is_none() && self.shortfall().is_none()
    }

    /// The measured speed and the cable's speed in Gbit/s, if the cable is far too slow.
    fn shortfall(&self) -> Option<(f64, u32)> {
        let both = self.measured_gbits.zip(self.gbits);
        both.filter(|(found, gbits)| *found < f64::from(*gbits) * LOW_SHARE)
    }
}

impl VerifyCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode> {
        let mut looked = self.desk.look(None)?;
        let nodes = looked.nodes.take();
        let desk = all_of(looked)?;
        let plan = Plan::new(&desk)?;
        let links: Vec<Link> = plan.links.into_iter().filter(|link| link.kept).collect();
        if links.is_empty() {
            bail!("no cable has addresses yet: run `thunder mac setup`");
        }
        let way = match &nodes {
            Some(_) if self.program.program.is_some() => {
                bail!("--program is for ssh: an agent measures with its own program")
            }
            Some(nodes) => Through::Agents(nodes),
            None => Through::Ssh(&self.desk.desk),
        };
        let measured = measure_all(&desk, &links, &way, &self.program)?;
        if self.json {
            println!("{}", json!({ "cables": measured }));
        } else {
            print(&measured);
        }
        Ok(if measured.iter().all(Measured::is_good) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The way to start ranks at the ends of a cable.
pub enum Through<'a> {
    /// By `thunder launch`.
    Ssh(&'a DeskArgs),
    /// By the agents of a cluster.
    Agents(&'a Nodes),
}

/// Measures each cable in turn.
pub fn measure_all(
    desk: &Desk,
    links: &[Link],
    way: &Through<'_>,
    program: &ProgramArgs,
) -> Result<Vec<Measured>> {
    let here = std::env::current_exe().context("this program's path is not known")?;
    let mut measured = Vec::new();
    for link in links {
        let name = link.ends.map(|end| desk.name(end)).join(" → ");
        for over in ["tcp", "rdma"].into_iter().filter(|over| *over == "tcp" || link.rdma) {
            eprintln!("measuring {name} over {over} …");
            let printed = match way {
                Through::Ssh(args) => launch(&here, desk, link, over, args, program),
                Through::Agents(nodes) => nodes.measure(bench(desk, link, over, program)),
            };
            let outcome = printed.and_then(|text| times(&text));
            let (times, error) = match outcome {
                Ok(times) => (times, None),
                Err(error) => ((None, None), Some(format!("{error:#}"))),
            };
            measured.push(Measured {
                cable: name.clone(),
                over,
                gbits: link.gbits,
                median_us: times.0,
                measured_gbits: times.1,
                error,
            });
        }
    }
    Ok(measured)
}

/// Time of the short message and Gbit/s of the long one.
type Times = (Option<f64>, Option<f64>);

/// The measurement of a cable for the agents at its ends.
fn bench(desk: &Desk, link: &Link, over: &str, program: &ProgramArgs) -> CableBench {
    CableBench {
        nodes: link.ends.map(|end| desk.machine(end).name.clone()),
        addresses: link.addresses.map(|network| network.address),
        network: link.network(),
        devices: link.ends.map(|end| device(desk, end).filter(|_| over == "rdma")),
        sizes: SIZES.map(|bytes| bytes as u64).into(),
        time_ms: u32::try_from(program.time).unwrap_or(u32::MAX),
        wait_s: program.wait,
    }
}

/// The RDMA device at an end of a cable.
fn device(desk: &Desk, end: End) -> Option<String> {
    let interface = desk.interface(end)?;
    desk.machine(end).device_of(&interface.name).map(|device| device.name.clone())
}

/// Runs the two ranks over ssh. Returns the output of rank 0.
fn launch(
    here: &std::path::Path,
    desk: &Desk,
    link: &Link,
    over: &'static str,
    args: &DeskArgs,
    program: &ProgramArgs,
) -> Result<String> {
    let host = |side: usize| {
        let rdma = match (over, side) {
            ("rdma", 0) => json!([Value::Null, device(desk, link.ends[0])]),
            ("rdma", _) => json!([device(desk, link.ends[1]), Value::Null]),
            _ => json!([]),
        };
        json!({ "ssh": desk.machine(link.ends[side]).name, "ips": [link.addresses[side].address.to_string()], "rdma": rdma })
    };
    let hosts =
        json!({ "envs": [format!("THUNDER_CABLES={}", link.network())], "hosts": [host(0), host(1)] });
    let mut file = tempfile::Builder::new().prefix("thunder-cable").suffix(".json").tempfile()?;
    std::io::Write::write_all(&mut file, hosts.to_string().as_bytes())?;
    let backend = if over == "rdma" { "jaccl" } else { "tcp" };
    let mut command = Command::new(here);
    command.arg("launch").arg("--hostfile").arg(file.path()).args([
        "--backend",
        backend,
        "--no-prefix",
        "--ssh",
        &args.ssh.ssh,
    ]);
    args.ssh.ssh_arg.iter().for_each(|argument| {
        command.arg(format!("--ssh-arg={argument}"));
    });
    command.arg("--").arg(program.program.as_deref().unwrap_or(here));
    command.args(["bench", "comm", "--json", "--transport", over, "--op", "all_reduce"]);
    command.args([
        "--sizes",
        &SIZES.map(|size| size.to_string()).join(","),
        "--time",
        &program.time.to_string(),
    ]);
    command.args(["--wait", &program.wait.to_string()]).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("{}", here.display()))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!(
            "{}",
            errors.lines().rev().find(|line| line.contains("error")).unwrap_or("the ranks failed").trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads the output of `bench comm`.
fn times(text: &str) -> Result<Times> {
    let report = text.lines().find_map(|line| serde_json::from_str::<Value>(line).ok());
    let rows =
        report.as_ref().and_then(|report| report["rows"].as_array()).context("bench comm printed no rows")?;
    let row = |size: usize| rows.iter().find(|row| row["bytes"].as_u64() == Some(size as u64));
    let median = row(SIZES[0]).and_then(|row| row["median_us"].as_f64());
    let gbytes = row(SIZES[1]).and_then(|row| row["bus_gb_per_s"].as_f64());
    Ok((median, gbytes.map(|gbytes| gbytes * 8.0)))
}

/// Prints the table, and reports cables that are far too slow.
pub fn print(measured: &[Measured]) {
    let mut rows =
        table::new(&["cable", "over", "link Gbit/s", "all-reduce of 4 KiB, µs", "measured Gbit/s"]);
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"));
    for one in measured {
        let link = one.gbits.map_or_else(|| "?".to_owned(), |gbits| gbits.to_string());
        rows.add_row([
            one.cable.clone(),
            one.over.to_owned(),
            link,
            number(one.median_us),
            number(one.measured_gbits),
        ]);
    }
    println!("\n{rows}");
    for one in measured {
        if let Some(error) = &one.error {
            println!(
                "✗ {} over {}: {error}\n    → plug the cable in again; `thunder mac check` shows what each end sees",
                one.cable, one.over
            );
        }
        if let Some((found, gbits)) = one.shortfall() {
            println!(
                "! {}: {found:.1} of {gbits} Gbit/s over {}: plug the cable in again, or try another one",
                one.cable, one.over
            );
        }
    }
}
