//! `thunder stats`: the resources of the cluster's nodes, and the speeds of their links.

use clap::Args;
use serde_json::json;
use thunder_model::error::human_bytes;
use thunder_node::agent::control::{self, ControlError, Request};
use thunder_node::agent::{LinkStatus, MemberStatus, Status};
use thunder_node::report::{LinkKind, NodeReport, PathReport};

use crate::cluster_command::fetch;
use crate::up::DataArgs;
use crate::{current_thread, table};

/// Show the resources that the cluster's nodes use, or measure the network between them
#[derive(Args)]
pub struct StatsCommand {
    /// Measure the links between all nodes, in both directions, one after the other; each pair
    /// takes about 2 s
    #[arg(long)]
    network: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataArgs,
}

/// The status, and the links that could not be measured.
fn ask(data: &DataArgs, measures: bool) -> anyhow::Result<(Status, Option<ControlError>)> {
    let data = data.folder()?;
    current_thread::runtime()?.block_on(async {
        let measured = match measures {
            true => control::ask(&data, &Request::MeasureLinks).await.map(drop),
            false => Ok(()),
        };
        match measured {
            // The other links are measured, and shown.
            Err(error @ ControlError::Failed(_)) => Ok((fetch(&data).await?, Some(error))),
            measured => {
                measured?;
                Ok((fetch(&data).await?, None))
            }
        }
    })
}

/// The cluster's state from this machine's agent.
///
/// # Errors
/// If no agent answers here.
pub fn cluster(data: &DataArgs) -> anyhow::Result<Status> {
    ask(data, false).map(|(status, _)| status)
}

/// The machines of a cluster, with their resources.
pub fn machines(status: &Status) -> comfy_table::Table {
    let mut rows = table::new(&[
        "machine",
        "id",
        "state",
        "system",
        "cores",
        "memory",
        "free",
        "ranks on",
        "reads",
        "computes",
        "temperature",
        "addresses",
    ]);
    for member in &status.members {
        rows.add_row(row(member));
    }
    rows
}

fn row(member: &MemberStatus) -> Vec<String> {
    let state = if member.up { "up" } else { "down" };
    let mut row = vec![member.name.clone(), member.short.clone(), state.to_owned()];
    match &member.report {
        Some(report) => {
            let [reads, computes] = speeds(report);
            row.extend([
                report.system.clone(),
                report.cores.to_string(),
                human_bytes(report.memory_total),
                human_bytes(report.memory_free),
                device(report),
                reads,
                computes,
                report.temperature_c.map_or_else(|| "-".to_owned(), |degrees| format!("{degrees} °C")),
            ]);
        }
        None => row.extend(std::iter::repeat_n("-".to_owned(), 8)),
    }
    row.push(member.addresses.join(", "));
    row
}

/// Measured memory bandwidth and arithmetic of the device that ranks use.
fn speeds(report: &NodeReport) -> [String; 2] {
    let Some(measured) = &report.speed else { return ["not measured", "not measured"].map(str::to_owned) };
    let (bytes_s, flops) = match &measured.gpu {
        Some(gpu) => (gpu.memory_bytes_s, gpu.prompt_flops),
        None => (measured.memory_bytes_s, measured.prompt_flops),
    };
    [(bytes_s, "GB/s"), (flops, "Gop/s")].map(|(number, unit)| format!("{:.1} {unit}", number as f64 / 1e9))
}

/// The device of a rank on a node, as measured.
pub fn device(report: &NodeReport) -> String {
    match report.speed.as_ref().map(|speed| speed.gpu.as_ref()) {
        Some(Some(gpu)) => gpu.to_string(),
        Some(None) => "cpu".to_owned(),
        None => "not measured".to_owned(),
    }
}

impl StatsCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// When no agent answers, or a link cannot be measured.
    pub fn run(self) -> anyhow::Result<()> {
        let (status, failure) = ask(&self.data, self.network)?;
        self.show(&status);
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    fn show(&self, status: &Status) {
        if self.json {
            println!(
                "{}",
                json!({ "nodes": status.members, "links": status.links, "models": status.models })
            );
            return;
        }
        if !self.network {
            println!("{}", machines(status));
            return;
        }
        let mut rows = table::new(&LINK_COLUMNS);
        for link in &status.links {
            rows.add_row(link_row(status, link));
            for path in link.paths.iter().skip(1) {
                rows.add_row(spare_row(status, link, path));
            }
        }
        println!("{rows}");
        if status.links.is_empty() {
            println!("no links: this cluster has one node that answers");
        }
        status
            .links
            .iter()
            .filter(|link| link.far_below)
            .for_each(|link| println!("{}", warning(status, link)));
    }
}

/// A node's name, by its short id.
fn name_of<'a>(status: &'a Status, short: &'a str) -> &'a str {
    let member = status.members.iter().find(|member| member.short == short);
    member.map_or(short, |member| member.name.as_str())
}

fn gigabits(bits_s: u64) -> String {
    let gigabits = bits_s as f64 / 1e9;
    if gigabits < 10.0 { format!("{gigabits:.2} Gbit/s") } else { format!("{gigabits:.0} Gbit/s") }
}

/// Columns of a link's row. The last one is the speed between two ranks of a model.
pub const LINK_COLUMNS: [&str; 9] = [
    "from",
    "to",
    "interface",
    "kind",
    "round trip",
    "1 connection",
    "4 connections",
    "claimed",
    "two ranks",
];

/// A link as a row of these columns.
pub fn link_row(status: &Status, link: &LinkStatus) -> [String; LINK_COLUMNS.len()] {
    let kind = words_of(link.kind);
    let is_rdma = link.ranks.as_ref().is_some_and(|ranks| ranks.over == "rdma");
    let ranks = link.ranks.as_ref().map(|ranks| {
        let micros = ranks.latency_ns as f64 / 1e3;
        format!("{}: {micros:.1} us, {}", ranks.over, gigabits(ranks.bytes_s * 8))
    });
    [
        name_of(status, &link.from).to_owned(),
        name_of(status, &link.to).to_owned(),
        link.paths.first().map_or_else(|| link.interface.clone(), ends),
        if is_rdma { format!("RDMA ({kind})") } else { kind.to_owned() },
        format!("{} us", link.latency_us),
        gigabits(link.bytes_s * 8),
        link.several_bytes_s.map_or_else(|| "-".to_owned(), |bytes_s| gigabits(bytes_s * 8)),
        link.claimed_bits_s.map_or_else(|| "-".to_owned(), gigabits),
        ranks.unwrap_or_else(|| "-".to_owned()),
    ]
}

/// A link between two nodes that is not used, because another is better.
fn spare_row(status: &Status, link: &LinkStatus, path: &PathReport) -> [String; LINK_COLUMNS.len()] {
    [
        name_of(status, &link.from).to_owned(),
        name_of(status, &link.to).to_owned(),
        ends(path),
        format!("{}, not taken", words_of(path.kind)),
        format!("{} us", path.latency_us),
        gigabits(path.bytes_s * 8),
        "-".to_owned(),
        path.claimed_bits_s.map_or_else(|| "-".to_owned(), gigabits),
        "-".to_owned(),
    ]
}

/// The interfaces of a way.
fn ends(path: &PathReport) -> String {
    if path.interface == path.far_interface {
        return path.interface.clone();
    }
    format!("{} to {}", path.interface, path.far_interface)
}

fn words_of(kind: LinkKind) -> &'static str {
    match kind {
        LinkKind::Loopback => "this machine",
        LinkKind::Ethernet => "Ethernet",
        LinkKind::WiFi => "Wi-Fi",
        LinkKind::Thunderbolt => "Thunderbolt",
        LinkKind::InfiniBand => "InfiniBand",
        LinkKind::Virtual => "virtual",
        LinkKind::Unknown => "unknown",
    }
}

/// Why a link may be far below its claim.
fn warning(status: &Status, link: &LinkStatus) -> String {
    let (from, to) = (name_of(status, &link.from), name_of(status, &link.to));
    let claimed = link.claimed_bits_s.map_or_else(String::new, gigabits);
    let why = match link.kind {
        LinkKind::WiFi => "radio shares its time: use a cable",
        LinkKind::Ethernet => {
            "above about 50 Gbit/s TLS is limited by the cores; else look at the cable, the switch and the MTU"
        }
        _ => "look at the cable and at what else uses it",
    };
    let measured = gigabits(link.most_bytes_s * 8);
    format!("{from} to {to}: {claimed} port, {measured} measured: {why}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn the_speeds_are_those_of_the_device_that_ranks_use() {
        use thunder_node::report::{GpuReport, SpeedReport};
        let mut report = NodeReport::default();
        assert_eq!(speeds(&report), ["not measured", "not measured"]);
        let cpu = SpeedReport {
            memory_bytes_s: 41_230_000_000,
            prompt_flops: 310_000_000_000,
            ..Default::default()
        };
        report.speed = Some(cpu.clone());
        assert_eq!(speeds(&report), ["41.2 GB/s", "310.0 Gop/s"]);
        let gpu = GpuReport { memory_bytes_s: 3_060_000_000_000, prompt_flops: 5, ..Default::default() };
        report.speed = Some(SpeedReport { gpu: Some(gpu), ..cpu });
        assert_eq!(speeds(&report)[0], "3060.0 GB/s");
    }

    #[test]
    fn a_slow_link_is_called_so_with_both_figures() {
        let status = Status {
            me: "0".repeat(64).parse().unwrap(),
            code: None,
            removed: false,
            document: String::new(),
            disk_error: None,
            members: Vec::new(),
            newcomers: Vec::new(),
            models: Vec::new(),
            links: Vec::new(),
            tasks: Vec::new(),
            sent_bytes: 0,
        };
        let link = LinkStatus {
            from: "a".into(),
            to: "b".into(),
            latency_us: 30,
            bytes_s: 625_000_000,
            several_bytes_s: Some(1_625_000_000),
            most_bytes_s: 1_625_000_000,
            ranks: None,
            interface: "eth0".into(),
            kind: LinkKind::Ethernet,
            claimed_bits_s: Some(200_000_000_000),
            far_below: true,
            paths: Vec::new(),
        };
        let text = warning(&status, &link);
        assert!(text.starts_with("a to b: 200 Gbit/s port, 13 Gbit/s measured: "), "{text}");
    }
}
