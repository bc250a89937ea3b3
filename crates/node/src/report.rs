//! A node's report to the others about its machine and its ranks.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::agent::Work;
use crate::document::Stamp;
use crate::id::NodeId;
use crate::temperature;

/// A node's machine and ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeReport {
    /// Version of the program.
    pub version: String,
    /// Operating system and processor, such as `linux x86_64`.
    pub system: String,
    /// Cores that the agent may use.
    pub cores: u32,
    /// Bytes of memory.
    pub memory_total: u64,
    /// Bytes of memory available to programs, in steps of 64 MiB, because small changes are not
    /// worth a message.
    pub memory_free: u64,
    /// `HOST:PORT` of the OpenAI API on this node; `None` if it has none.
    pub api: Option<String>,
    /// The ranks that run here.
    pub ranks: Vec<RankReport>,
    /// The links to other nodes, as this node last measured them.
    #[serde(default)]
    pub links: Vec<LinkReport>,
    /// Speed of the machine; `None` until it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<SpeedReport>,
    /// Identifies the running system: nodes that report the same one share its memory and cores.
    /// `None` if the system does not report one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// Speed of the machine for this node while its other nodes compute; `None` until it was
    /// measured, and for the only node of a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<TogetherReport>,
    /// Jobs with the models on its disk.
    #[serde(default)]
    pub jobs: Vec<JobReport>,
    /// Temperature of its hottest processor in °C, in steps of 5; `None` if the system does not
    /// report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u16>,
    /// Bytes of memory that a GPU sharing it may use, if an administrator has set a limit (macOS:
    /// `iogpu.wired_limit_mb`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_limit: Option<u64>,
    /// Why the last rank of each model ended here, until the model answers again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failures: BTreeMap<String, String>,
}

/// Speed of a machine, as measured by `thunder bench machine`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SpeedReport {
    /// Memory bandwidth in bytes per second.
    pub memory_bytes_s: u64,
    /// Bytes per second of 4-bit weights in a product with one row.
    pub weight_bytes_s: u64,
    /// Operations per second in products with 16 rows, as in a decoding batch.
    pub decode_flops: u64,
    /// Operations per second in products with 256 rows, as in a prompt.
    pub prompt_flops: u64,
    /// Operations per second of attention with one row; 0 for versions that did not measure it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attention_flops: u64,
    /// Nanoseconds to hand a job to all threads.
    pub job_ns: u64,
    /// The GPU that a rank of the node uses; `None` if it uses the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuReport>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A node's GPU, and its speed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GpuReport {
    /// Its number, as in `gpu:N`.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Number of GPUs that ranks of the machine use in turn, including this one.
    pub count: u32,
    /// Whether it has memory of its own; otherwise it uses the machine's.
    pub has_own_memory: bool,
    /// Bytes that it may use; 0 if the driver does not report it.
    pub memory_bytes: u64,
    /// Maximum prompt tokens of a step on this GPU.
    pub step_rows: u32,
    /// Memory bandwidth in bytes per second.
    pub memory_bytes_s: u64,
    /// Bytes per second of 4-bit weights: how much faster a larger product with one row reads.
    pub weight_bytes_s: u64,
    /// Operations per second in products with 16 rows, as in a decoding batch.
    pub decode_flops: u64,
    /// Operations per second in products with many rows, as in a prompt.
    pub prompt_flops: u64,
    /// Nanoseconds of a kernel that reads almost nothing and waits for the previous one.
    pub kernel_ns: u64,
    /// Nanoseconds from the end of a step to the beginning of the next one, if the host decides on
    /// it.
    pub submit_ns: u64,
    /// Path of a sum to the host and back while a kernel waits for it; `None` if the device cannot
    /// do this.
    pub queue_way: Option<HostWayReport>,
    /// Path of a sum through a host that waits for the device, reads and writes.
    pub host_way: HostWayReport,
    /// A sum of two GPUs of the machine that their hosts relay; `None` if they cannot, or there is
    /// one GPU.
    #[serde(default)]
    pub relay_way: Option<HostWayReport>,
    /// A prompt's sum of these GPUs, in pieces that they read in the host's memory.
    #[serde(default)]
    pub pieces_way: Option<HostWayReport>,
    /// Bytes of its largest buffer; 0 if an older version did not report it.
    #[serde(default)]
    pub largest_buffer: u64,
    /// States of sequences that it keeps in addition to those of the engine; 0 likewise.
    #[serde(default)]
    pub other_states: u32,
    /// Bytes of what experts compute of a prompt's rows, if a model has experts; 0 likewise.
    #[serde(default)]
    pub expert_bytes: u64,
}

/// The path of a sum between a GPU and its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HostWayReport {
    /// Nanoseconds of a short sum.
    pub latency_ns: u64,
    /// Bytes per second of a long sum.
    pub bytes_s: u64,
}

impl fmt::Display for GpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu:{} ({})", self.number, self.name)
    }
}

/// What a node measured while other nodes of the machine measured it too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TogetherReport {
    /// All of these nodes, including itself, in order.
    pub nodes: Vec<NodeId>,
    /// The figures of this node.
    pub speed: SpeedReport,
}

/// A job with a model on a node's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobReport {
    /// Its number on the node.
    pub id: u64,
    /// org/name, or org/name:QUANTIZATION.
    pub model: String,
    /// Kind of job.
    pub work: Work,
    /// The senders of bytes: nodes, or the hub's address.
    pub from: Vec<String>,
    /// Bytes done.
    pub done: u64,
    /// Total bytes; 0 until the number is known.
    pub total: u64,
    /// Milliseconds from its beginning until now, or until it ended.
    #[serde(default)]
    pub took_ms: u64,
    /// The commit that a pull has fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Its state.
    pub state: JobState,
}

/// The state of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It runs.
    Running,
    /// It has succeeded; a message.
    Done(String),
    /// It has failed; a message.
    Failed(String),
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("it runs"),
            Self::Done(words) | Self::Failed(words) => f.write_str(words),
        }
    }
}

/// A link from one node to another, measured with a TLS connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The other node.
    pub to: NodeId,
    /// Median round trip of 8 bytes.
    pub latency_us: u64,
    /// Bytes per second.
    pub bytes_s: u64,
    /// The same over several connections at once, each with a core of its own; `None` until a
    /// person has asked.
    #[serde(default)]
    pub several_bytes_s: Option<u64>,
    /// The figures of two ranks at its ends; `None` until they were measured.
    #[serde(default)]
    pub ranks: Option<RanksLink>,
    /// Name of this node's interface.
    pub interface: String,
    /// Kind of the interface.
    pub kind: LinkKind,
    /// Bits per second that the interface claims; `None` if it does not report this.
    pub claimed_bits_s: Option<u64>,
    /// All measured paths between the nodes. The first is the best: calls, weights and ranks use
    /// it, and the figures above are its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathReport>,
}

/// A path from one node to another: one interface of each. Measured like a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// `HOST:PORT` of the other node on this path.
    pub address: String,
    /// Name of this node's interface.
    pub interface: String,
    /// Name of the other node's interface; its address if that node's version does not report the
    /// name.
    pub far_interface: String,
    /// Kind of this node's interface.
    pub kind: LinkKind,
    /// Bits per second that this node's interface claims; `None` if it does not report this.
    pub claimed_bits_s: Option<u64>,
    /// Median round trip of 8 bytes.
    pub latency_us: u64,
    /// Bytes per second over one connection.
    pub bytes_s: u64,
}

/// Kind of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// The machine itself.
    Loopback,
    /// A cable, or an interface that looks like one.
    Ethernet,
    /// Radio.
    WiFi,
    /// A Thunderbolt or USB4 cable.
    Thunderbolt,
    /// InfiniBand with IP.
    InfiniBand,
    /// An interface made by software, for example between namespaces.
    Virtual,
    /// The system does not report the kind.
    Unknown,
}

/// What a link gives to two ranks, over the path that ranks of a model use: shared memory, TCP with
/// encryption, or RDMA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RanksLink {
    /// The transport: `shm`, `tcp` or `rdma`.
    pub over: String,
    /// Nanoseconds of a short all-reduce.
    pub latency_ns: u64,
    /// Bytes per second of a long all-reduce, in each direction.
    pub bytes_s: u64,
}

impl LinkReport {
    /// The highest measured figure. One connection with TLS is limited by a core, several by the
    /// cores, and RDMA by the link.
    pub fn most_bytes_s(&self) -> u64 {
        let ranks = self.ranks.as_ref().map_or(0, |ranks| ranks.bytes_s);
        self.bytes_s.max(self.several_bytes_s.unwrap_or(0)).max(ranks)
    }

    /// The share of the claimed speed, if it is less than a third.
    pub fn far_below(&self) -> Option<f64> {
        let bytes_s = self.most_bytes_s();
        let share = bytes_s as f64 * 8.0 / self.claimed_bits_s.filter(|claimed| *claimed > 0)? as f64;
        (share < 1.0 / 3.0).then_some(share)
    }
}

/// A rank of a model's group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankReport {
    /// The model's name.
    pub model: String,
    /// The placement for which the rank was started.
    pub placement: Stamp,
    /// Its number in the group.
    pub rank: u32,
    /// Its state.
    pub state: RankState,
    /// Number of requests that it is answering. Only the head knows this.
    #[serde(default)]
    pub active: u32,
    /// Present bytes and total bytes of the model's files on its node, if some are missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<(u64, u64)>,
}

/// `1.1 of 4.6 GiB`.
pub fn of_bytes(done: u64, total: u64) -> String {
    let (unit, name) = match total {
        0..0x10_0000 => (1u64 << 10, "KiB"),
        0x10_0000..0x4000_0000 => (1 << 20, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    let units = |bytes: u64| bytes as f64 / unit as f64;
    format!("{:.1} of {:.1} {name}", units(done), units(total))
}

/// The state of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankState {
    /// Its process runs; the model is not ready.
    Starting,
    /// The model answers. Only the head knows this.
    Ready,
    /// It has ended, with this message.
    Ended(String),
}

/// Memory is reported in these steps.
const MEMORY_STEP_BYTES: u64 = 64 << 20;

impl NodeReport {
    /// Memory available to a rank: that of the GPU which it uses, if the GPU was measured.
    pub fn rank_memory(&self) -> u64 {
        let gpu = self.speed.as_ref().and_then(|speed| speed.gpu.as_ref());
        gpu.map_or(self.memory_free, |gpu| self.gpu_memory(gpu))
    }

    /// Memory available to a rank on this GPU: all of its own memory, or the free memory of the
    /// machine, up to the system's limit for GPUs.
    pub fn gpu_memory(&self, gpu: &GpuReport) -> u64 {
        let known = Some(gpu.memory_bytes).filter(|bytes| *bytes > 0);
        match (gpu.has_own_memory, known) {
            (true, Some(bytes)) => bytes,
            // The limit may have been changed since the GPU was measured.
            _ => self.gpu_limit.or(known).map_or(self.memory_free, |limit| limit.min(self.memory_free)),
        }
    }

    /// This machine now, without ranks.
    pub fn of_this_machine() -> Self {
        let (total, free) = memory();
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
            memory_total: total,
            memory_free: free / MEMORY_STEP_BYTES * MEMORY_STEP_BYTES,
            api: None,
            ranks: Vec::new(),
            links: Vec::new(),
            speed: None,
            boot: boot(),
            together: None,
            jobs: Vec::new(),
            temperature_c: temperature::read(),
            gpu_limit: gpu_limit(),
            failures: BTreeMap::new(),
        }
    }
}

/// A number that the kernel creates when it starts. Containers and network namespaces share it,
/// virtual machines do not.
#[cfg(target_os = "linux")]
fn boot() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned()).filter(|id| !id.is_empty())
}

/// A number that the kernel creates when it starts.
#[cfg(target_os = "macos")]
fn boot() -> Option<String> {
    sysctl_text("kern.bootsessionuuid").filter(|id| !id.is_empty())
}

/// The administrator's limit for the GPU's use of this machine's memory.
#[cfg(target_os = "linux")]
fn gpu_limit() -> Option<u64> {
    None
}

/// The administrator's limit for the GPU's use of this machine's memory. 0 is the system's default.
#[cfg(target_os = "macos")]
fn gpu_limit() -> Option<u64> {
    sysctl("iogpu.wired_limit_mb").filter(|mib| *mib > 0).map(|mib| mib << 20)
}

/// Total bytes of memory, and bytes available to programs. 0 if the system does not report them.
#[cfg(target_os = "linux")]
fn memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0).saturating_mul(1024)
    };
    (field("MemTotal:"), field("MemAvailable:"))
}

/// Total bytes of memory, and bytes available to programs. 0 if the system does not report them.
#[cfg(target_os = "macos")]
fn memory() -> (u64, u64) {
    let page = sysctl("vm.pagesize").unwrap_or(0);
    let free = sysctl("vm.page_free_count").unwrap_or(0) + sysctl("vm.page_purgeable_count").unwrap_or(0);
    (sysctl("hw.memsize").unwrap_or(0), free * page)
}

/// A number that the system reports.
#[cfg(target_os = "macos")]
fn sysctl(name: &str) -> Option<u64> {
    sysctl_text(name)?.parse().ok()
}

/// The text that the system reports under a name.
#[cfg(target_os = "macos")]
fn sysctl_text(name: &str) -> Option<String> {
    let output = std::process::Command::new("/usr/sbin/sysctl").args(["-n", name]).output().ok()?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_far_below_its_claim_is_called_so() {
        let link = |gigabits: f64, claimed| LinkReport {
            to: NodeId([1; 32]),
            latency_us: 40,
            bytes_s: (gigabits * 1e9 / 8.0) as u64,
            several_bytes_s: None,
            ranks: None,
            interface: "eth0".into(),
            kind: LinkKind::Ethernet,
            claimed_bits_s: claimed,
            paths: Vec::new(),
        };
        let share = link(13.0, Some(200_000_000_000)).far_below();
        assert!(share.is_some_and(|share| (share - 0.065).abs() < 1e-3), "{share:?}");
        assert_eq!(link(8.0, Some(10_000_000_000)).far_below(), None);
        assert_eq!((link(1.0, None).far_below(), link(1.0, Some(0)).far_below()), (None, None));
    }

    #[test]
    fn reports_without_a_gpu_are_read() {
        // As version 0.3.0 wrote it on 25 November 2026.
        let old = r#"{"memory_bytes_s":9,"weight_bytes_s":8,"decode_flops":7,"prompt_flops":6,"job_ns":5}"#;
        let read: SpeedReport = serde_json::from_str(old).expect("an old report");
        assert_eq!((read.memory_bytes_s, &read.gpu), (9, &None));
        assert_eq!(serde_json::to_string(&read).expect("numbers"), old, "old nodes get what they know");
    }

    #[test]
    fn this_machine_has_memory_and_cores() {
        let report = NodeReport::of_this_machine();
        assert!(report.cores > 0 && report.memory_free > 0, "{report:?}");
        assert!(report.memory_free < report.memory_total, "{report:?}");
        assert!(report.boot.is_some() && report.boot == NodeReport::of_this_machine().boot, "{report:?}");
    }
}
