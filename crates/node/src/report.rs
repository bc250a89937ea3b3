//! What a node tells the others about its machine and its ranks.

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
    /// Operating system and processor, as `linux x86_64`.
    pub system: String,
    /// Cores that the agent may use.
    pub cores: u32,
    /// Bytes of memory.
    pub memory_total: u64,
    /// Bytes of memory that programs can still take, in steps of 64 MiB: small changes are not
    /// worth a message.
    pub memory_free: u64,
    /// `HOST:PORT` of the OpenAI API on this node; `None` if it has none.
    pub api: Option<String>,
    /// The ranks that run here.
    pub ranks: Vec<RankReport>,
    /// The links to other nodes, as this node measured them last.
    #[serde(default)]
    pub links: Vec<LinkReport>,
    /// How fast the machine computes; `None` until it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<SpeedReport>,
    /// The running system: nodes that report the same one share its memory and cores. `None` where
    /// the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// How fast the machine computes for this node while its other nodes compute; `None` until it
    /// was measured, and for the only node of a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together: Option<TogetherReport>,
    /// What is done with the models on its disk.
    #[serde(default)]
    pub jobs: Vec<JobReport>,
    /// Degrees Celsius of its hottest processor, in steps of 5; `None`: the system does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u16>,
    /// Bytes of memory that a GPU which shares it may take, where an administrator has set a limit
    /// (macOS: `iogpu.wired_limit_mb`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_limit: Option<u64>,
}

/// How fast a machine computes, as `thunder bench machine` measures it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SpeedReport {
    /// Bytes of memory that are read in a second.
    pub memory_bytes_s: u64,
    /// Bytes of 4-bit weights that a product with one row takes in a second.
    pub weight_bytes_s: u64,
    /// Operations a second in products with 16 rows: a batch that decodes.
    pub decode_flops: u64,
    /// Operations a second in products with 256 rows: a prompt.
    pub prompt_flops: u64,
    /// Operations a second of attention with one row; 0: a version that did not measure it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attention_flops: u64,
    /// Nanoseconds to hand a job to all threads.
    pub job_ns: u64,
    /// The GPU that a rank of the node takes; `None` if it takes the processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuReport>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A node's GPU, and how fast it computes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GpuReport {
    /// Its number: what follows `gpu:`.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// GPUs that ranks of the machine take in turn, this one among them.
    pub count: u32,
    /// Whether its memory is its own. If not, it is the machine's.
    pub has_own_memory: bool,
    /// Bytes that it may use; 0 where the driver does not say.
    pub memory_bytes: u64,
    /// Prompt tokens of a step that ranks give it at most.
    pub step_rows: u32,
    /// Bytes of its memory that it reads in a second.
    pub memory_bytes_s: u64,
    /// Bytes of 4-bit weights in a second: what a product with one row reads more, if it is larger.
    pub weight_bytes_s: u64,
    /// Operations a second in products with 16 rows: a batch that decodes.
    pub decode_flops: u64,
    /// Operations a second in products with many rows: a prompt.
    pub prompt_flops: u64,
    /// Nanoseconds of a kernel that reads hardly anything and waits for the one before.
    pub kernel_ns: u64,
    /// Nanoseconds from the end of a step to the begin of the next one that the host decides.
    pub submit_ns: u64,
    /// A sum's way to the host and back while a kernel waits for it; `None` if the device cannot.
    pub queue_way: Option<HostWayReport>,
    /// A sum's way by a host that waits for the device, reads, and writes.
    pub host_way: HostWayReport,
    /// A sum of two GPUs of the machine whose hosts relay it; `None` where they cannot, or there is
    /// one GPU.
    #[serde(default)]
    pub relay_way: Option<HostWayReport>,
}

/// A sum's way between a GPU and its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HostWayReport {
    /// Nanoseconds of a short one.
    pub latency_ns: u64,
    /// Bytes in a second of a long one.
    pub bytes_s: u64,
}

impl fmt::Display for GpuReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu:{} ({})", self.number, self.name)
    }
}

/// What a node got from its machine while other nodes of the machine measured it too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TogetherReport {
    /// All of these nodes, itself included, in order.
    pub nodes: Vec<NodeId>,
    /// What this node got.
    pub speed: SpeedReport,
}

/// A job with a model on a node's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobReport {
    /// Its number on the node.
    pub id: u64,
    /// org/name, or org/name:QUANTIZATION.
    pub model: String,
    /// What is done.
    pub work: Work,
    /// Who has sent bytes: nodes, or the hub's address.
    pub from: Vec<String>,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all; 0 until that is known.
    pub total: u64,
    /// Milliseconds that it took until now, or until it ended.
    #[serde(default)]
    pub took_ms: u64,
    /// The commit that a pull has brought.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// How it is.
    pub state: JobState,
}

/// How a job is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It runs.
    Running,
    /// It has ended well, in words.
    Done(String),
    /// It has failed, in words.
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

/// A link from one node to another, as a TLS connection over it was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The other node.
    pub to: NodeId,
    /// Median round trip of 8 bytes.
    pub latency_us: u64,
    /// Bytes in a second.
    pub bytes_s: u64,
    /// The same over several connections at once, each with a core of its own; `None` until a
    /// person has asked.
    #[serde(default)]
    pub several_bytes_s: Option<u64>,
    /// What two ranks at its ends get; `None` until it was measured.
    #[serde(default)]
    pub ranks: Option<RanksLink>,
    /// Name of this node's interface.
    pub interface: String,
    /// What the interface is.
    pub kind: LinkKind,
    /// Bits in a second that the interface claims; `None` if it does not say.
    pub claimed_bits_s: Option<u64>,
    /// All ways between the nodes that were measured. The first is the best: calls, weights and
    /// ranks take it, and the figures above are its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathReport>,
}

/// A way from one node to another: an interface of each. Measured as a link is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// `HOST:PORT` of the other node there.
    pub address: String,
    /// Name of this node's interface.
    pub interface: String,
    /// Name of the other node's interface; its address if that node's version does not say.
    pub far_interface: String,
    /// What this node's interface is.
    pub kind: LinkKind,
    /// Bits in a second that this node's interface claims; `None` if it does not say.
    pub claimed_bits_s: Option<u64>,
    /// Median round trip of 8 bytes.
    pub latency_us: u64,
    /// Bytes in a second over one connection.
    pub bytes_s: u64,
}

/// What an interface is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// The machine itself.
    Loopback,
    /// A cable, or what looks like one.
    Ethernet,
    /// Radio.
    WiFi,
    /// A Thunderbolt or USB4 cable.
    Thunderbolt,
    /// InfiniBand, by IP.
    InfiniBand,
    /// Made by software, as between namespaces.
    Virtual,
    /// The system does not say.
    Unknown,
}

/// What a link gives to two ranks, over the way that ranks of a model take: shared memory, TCP with
/// its encryption, or RDMA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RanksLink {
    /// What they use: `shm`, `tcp` or `rdma`.
    pub over: String,
    /// Nanoseconds of a short all-reduce.
    pub latency_ns: u64,
    /// Bytes in a second of a long one, each way.
    pub bytes_s: u64,
}

impl LinkReport {
    /// The most that was measured. One connection with TLS is limited by a core, several by the
    /// cores, and RDMA by the link.
    pub fn most_bytes_s(&self) -> u64 {
        let ranks = self.ranks.as_ref().map_or(0, |ranks| ranks.bytes_s);
        self.bytes_s.max(self.several_bytes_s.unwrap_or(0)).max(ranks)
    }

    /// The share of what the interface claims, if that is less than a third.
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
    /// How it is.
    pub state: RankState,
    /// Requests that it answers now. Only the head knows this.
    #[serde(default)]
    pub active: u32,
    /// Bytes that its node holds of the model's files, and all, if not all are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<(u64, u64)>,
}

/// `1.2 of 4.9 GB`.
pub fn of_bytes(done: u64, total: u64) -> String {
    let (unit, name) = match total {
        0..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    };
    format!("{:.1} of {:.1} {name}", done as f64 / unit, total as f64 / unit)
}

/// How a rank is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankState {
    /// Its process runs; the model is not ready.
    Starting,
    /// The model answers. Only the head knows this.
    Ready,
    /// It ended, with these words.
    Ended(String),
}

/// Memory is reported in these steps.
const MEMORY_STEP_BYTES: u64 = 64 << 20;

impl NodeReport {
    /// Bytes that a rank can take: of the GPU that it computes on, if it was measured.
    pub fn rank_memory(&self) -> u64 {
        let gpu = self.speed.as_ref().and_then(|speed| speed.gpu.as_ref());
        gpu.map_or(self.memory_free, |gpu| self.gpu_memory(gpu))
    }

    /// Bytes that a rank on this GPU can take: all of its own memory, or what is free of the
    /// machine's, up to the limit that the system sets for its GPU.
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
        }
    }
}

/// A number that the kernel draws when it starts. Containers and network namespaces share it,
/// virtual machines do not.
#[cfg(target_os = "linux")]
fn boot() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned()).filter(|id| !id.is_empty())
}

/// A number that the kernel draws when it starts.
#[cfg(target_os = "macos")]
fn boot() -> Option<String> {
    sysctl_text("kern.bootsessionuuid").filter(|id| !id.is_empty())
}

/// What an administrator lets the GPU take of this machine's memory.
#[cfg(target_os = "linux")]
fn gpu_limit() -> Option<u64> {
    None
}

/// What an administrator lets the GPU take of this machine's memory. 0 is the system's default.
#[cfg(target_os = "macos")]
fn gpu_limit() -> Option<u64> {
    sysctl("iogpu.wired_limit_mb").filter(|mib| *mib > 0).map(|mib| mib << 20)
}

/// Bytes of memory, and bytes that programs can still take. 0 where the system does not say.
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

/// Bytes of memory, and bytes that programs can still take. 0 where the system does not say.
#[cfg(target_os = "macos")]
fn memory() -> (u64, u64) {
    let page = sysctl("vm.pagesize").unwrap_or(0);
    let free = sysctl("vm.page_free_count").unwrap_or(0) + sysctl("vm.page_purgeable_count").unwrap_or(0);
    (sysctl("hw.memsize").unwrap_or(0), free * page)
}

/// A number of the system's.
#[cfg(target_os = "macos")]
fn sysctl(name: &str) -> Option<u64> {
    sysctl_text(name)?.parse().ok()
}

/// What the system says of itself under a name.
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
        // As version 0.3.0 of 25 November 2026 wrote it.
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
