//! Which device computes a rank's shard.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thunder_collectives::{CommError, Group};
use thunder_compute::{CpuConfig, Extra};

use super::assemble::STEP_ROWS;
use super::memory::DeviceMemory;
use super::places::RankPlace;

/// The device that computes a rank's shard. May differ between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum DeviceChoice {
    /// A real GPU if there is one, otherwise the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A real GPU. If there are several, ranks of one host use them in turn.
    Gpu,
    /// The GPU with this number in `thunder devices list`, which may be emulated in software.
    Numbered(usize),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Gpu => f.write_str("gpu"),
            Self::Numbered(number) => write!(f, "gpu:{number}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbered = || text.strip_prefix("gpu:")?.parse().ok().map(Self::Numbered);
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu),
            _ => numbered().ok_or_else(|| format!("'{text}' is no device: give auto, cpu, gpu or gpu:N")),
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// The device that a first rank on this host would use.
#[derive(Debug, Clone)]
pub struct FirstDevice {
    /// Its name, for people.
    pub name: String,
    /// Its memory.
    pub memory: DeviceMemory,
    /// Number of such devices with memory of their own that ranks of this host use in turn; 1 if
    /// they all share the host's memory.
    pub memories: usize,
}

/// The device that a first rank on this host would use for a model with these needs.
///
/// # Errors
/// If a GPU is requested and there is none, or it lacks an operation.
pub fn first_device(choice: DeviceChoice, needs: &[Extra]) -> Result<FirstDevice, String> {
    let device = Device::choose(choice, 0, unused_cpu(), needs)?;
    let memories = match (device.memory_number(), choice) {
        (0, _) | (_, DeviceChoice::Numbered(_)) => 1,
        #[cfg(feature = "gpu")]
        _ => thunder_gpu::real_count().max(1),
        #[cfg(not(feature = "gpu"))]
        _ => 1,
    };
    Ok(FirstDevice { name: device.name(), memory: device.memory(), memories })
}

/// Prompt tokens that a first rank on this host reads together.
///
/// # Errors
/// If a GPU is requested and there is none.
pub fn first_step_rows(choice: DeviceChoice) -> Result<usize, String> {
    Ok(of_first_rank(choice)?.step_rows())
}

/// Measured limits of a GPU. Operations are multiplications and additions.
#[derive(Debug, Clone, Copy)]
pub struct GpuLimits {
    /// Bytes per second that it reads from its memory.
    pub bytes_per_s: f64,
    /// Operations per second with f32.
    pub float_operations: f64,
    /// Operations per second in dot products of four bytes.
    pub byte_operations: f64,
    /// Operations per second with f16 matrices, if it has them.
    pub matrix_operations: Option<f64>,
}

/// The limits of the GPU that a first rank on this host would use; `None` if that rank uses the
/// CPU.
///
/// # Errors
/// If a GPU is requested and there is none, or if it cannot be measured.
pub fn gpu_limits(choice: DeviceChoice) -> Result<Option<GpuLimits>, String> {
    match of_first_rank(choice)? {
        Device::Cpu(_) => Ok(None),
        #[cfg(feature = "gpu")]
        Device::Gpu(found) => limits_of(&found).map(Some).map_err(|error| error.to_string()),
    }
}

#[cfg(feature = "gpu")]
fn limits_of(found: &thunder_gpu::Found) -> Result<GpuLimits, thunder_compute::ComputeError> {
    use thunder_gpu::GpuArithmetic::{Bytes, Floats, Matrices};
    let bytes_per_s = thunder_gpu::bandwidth(found)?;
    let peaks = thunder_gpu::peak_arithmetic(found)?;
    let peak = |of| peaks.iter().find(|(arithmetic, _)| *arithmetic == of).map(|(_, peak)| *peak);
    let [float_operations, byte_operations] = [Floats, Bytes].map(|of| peak(of).unwrap_or(f64::NAN));
    Ok(GpuLimits { bytes_per_s, float_operations, byte_operations, matrix_operations: peak(Matrices) })
}

/// The GPU that a first rank on this host would use; `None` if that rank uses the CPU.
///
/// # Errors
/// If a GPU is requested and there is none.
#[cfg(feature = "gpu")]
pub fn first_gpu(choice: DeviceChoice) -> Result<Option<thunder_gpu::Found>, String> {
    gpu_of_turn(choice, 0)
}

/// The GPU that the `turn`-th rank on this host would use; `None` if that rank uses the CPU.
///
/// # Errors
/// If a GPU is requested and there is none.
#[cfg(feature = "gpu")]
pub fn gpu_of_turn(choice: DeviceChoice, turn: usize) -> Result<Option<thunder_gpu::Found>, String> {
    match of_rank(choice, turn)? {
        Device::Cpu(_) => Ok(None),
        Device::Gpu(found) => Ok(Some(*found)),
    }
}

fn of_first_rank(choice: DeviceChoice) -> Result<Device, String> {
    of_rank(choice, 0)
}

fn of_rank(choice: DeviceChoice, turn: usize) -> Result<Device, String> {
    Device::choose(choice, turn, unused_cpu(), &[])
}

/// A configuration for a device that computes nothing.
fn unused_cpu() -> CpuConfig {
    CpuConfig::new(1, thunder_compute::Isa::Portable, thunder_compute::Activations::Auto)
}

/// A chosen device.
#[derive(Debug)]
pub(super) enum Device {
    Cpu(CpuConfig),
    #[cfg(feature = "gpu")]
    Gpu(Box<thunder_gpu::Found>),
}

impl Device {
    /// The device for the `turn`-th rank of this host, which needs these operations; `cpu`
    /// configures the CPU. If GPUs lack an operation, `auto` takes the CPU and says so.
    pub fn choose(
        choice: DeviceChoice,
        turn: usize,
        cpu: CpuConfig,
        needs: &[Extra],
    ) -> Result<Self, String> {
        let device = match choice {
            DeviceChoice::Cpu => return Ok(Self::Cpu(cpu)),
            DeviceChoice::Auto if !may_have_gpu() => return Ok(Self::Cpu(cpu)),
            DeviceChoice::Auto => match real(turn) {
                Ok(device) => device,
                Err(_) => return Ok(Self::Cpu(cpu)),
            },
            DeviceChoice::Gpu => real(turn).map_err(|error| format!("--device {choice}: {error}"))?,
            DeviceChoice::Numbered(number) => {
                self::numbered(number).map_err(|error| format!("--device {choice}: {error}"))?
            }
        };
        match (lacking(needs), choice) {
            (None, _) => Ok(device),
            (Some(operation), DeviceChoice::Auto) => {
                let device = device.name();
                tracing::warn!("the CPU computes, because {device} has no operation for {operation}");
                Ok(Self::Cpu(cpu))
            }
            (Some(operation), _) => Err(format!(
                "--device {choice}: GPUs have no operation for {operation}, which this model needs: use \
                 --device cpu"
            )),
        }
    }

    /// Number of the memory that the device uses: 0 is the host's, others are GPUs' own.
    pub fn memory_number(&self) -> u64 {
        match self {
            Self::Cpu(_) => 0,
            #[cfg(feature = "gpu")]
            Self::Gpu(found) => {
                if found.info.has_own_memory() {
                    found.info.number as u64 + 1
                } else {
                    0
                }
            }
        }
    }

    /// Number of the GPU that computes, from 1 on; 0 is the CPU.
    pub fn gpu_number(&self) -> u64 {
        match self {
            Self::Cpu(_) => 0,
            #[cfg(feature = "gpu")]
            Self::Gpu(found) => found.info.number as u64 + 1,
        }
    }

    /// Memory for weights, cache and buffers.
    pub fn memory(&self) -> DeviceMemory {
        let bytes = self.available_bytes();
        match self {
            Self::Cpu(_) => DeviceMemory { bytes, ..DeviceMemory::default() },
            #[cfg(feature = "gpu")]
            Self::Gpu(found) => DeviceMemory {
                bytes,
                largest_buffer: Some(found.info.max_binding_bytes),
                other_states: thunder_gpu::OTHER_STATES,
                expert_bytes: thunder_gpu::EXPERT_BYTES,
            },
        }
    }

    /// Bytes of memory: the host's if the device has no memory of its own.
    fn available_bytes(&self) -> Option<u64> {
        let host = thunder_compute::memory::available_bytes();
        match self {
            Self::Cpu(_) => host,
            #[cfg(feature = "gpu")]
            Self::Gpu(found) if found.info.has_own_memory() => found.available_bytes().or(host),
            #[cfg(feature = "gpu")]
            Self::Gpu(found) => match (found.available_bytes(), host) {
                (Some(device), Some(host)) => Some(device.min(host)),
                (device, host) => device.or(host),
            },
        }
    }

    /// Prompt tokens that are read together, because weights are then unpacked once for all of
    /// them. A few are enough for a CPU's arithmetic, and its caches hold no more.
    pub fn step_rows(&self) -> usize {
        match self {
            Self::Cpu(_) => STEP_ROWS,
            // docs/lab/2026-11-25-gpu-prefill.md.
            #[cfg(feature = "gpu")]
            Self::Gpu(found) if found.info.kind == "discrete" => 8 * STEP_ROWS,
            #[cfg(feature = "gpu")]
            Self::Gpu(found) if found.info.kind != "software" => 2 * STEP_ROWS,
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => STEP_ROWS,
        }
    }

    /// Identifies what the bits depend on: the device, its driver, the kernels' instructions.
    pub fn computes(&self) -> String {
        match self {
            Self::Cpu(cpu) => format!("cpu {:?}", cpu.isa),
            #[cfg(feature = "gpu")]
            Self::Gpu(found) => {
                let info = &found.info;
                let numbers = (info.subgroup_lanes, &info.features);
                format!("gpu {} {} {} {numbers:?}", info.name, info.api, info.driver)
            }
        }
    }

    /// Its name, for people.
    pub fn name(&self) -> String {
        match self {
            Self::Cpu(_) => "cpu".to_owned(),
            #[cfg(feature = "gpu")]
            Self::Gpu(found) => format!("gpu:{} ({})", found.info.number, found.info.name),
        }
    }
}

/// The device that a rank uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceUse {
    pub host: u64,
    pub memory: u64,
    gpu: u64,
}

impl DeviceUse {
    /// Those of all ranks, in rank order. All ranks call this together.
    pub fn gather(group: &mut Group, places: &[RankPlace], device: &Device) -> Result<Vec<Self>, CommError> {
        let own = [device.memory_number(), device.gpu_number()];
        let mut all = vec![0; 2 * group.size()];
        let counts = vec![2; group.size()];
        group.all_gather(&own, &mut all, &counts)?;
        let of = |(place, words): (&RankPlace, &[u64; 2])| Self {
            host: place.host,
            memory: words[0],
            gpu: words[1],
        };
        Ok(places.iter().zip(all.as_chunks::<2>().0).map(of).collect())
    }

    /// Whether it is a GPU that no other rank uses.
    pub fn is_only_gpu_user(&self, all: &[Self]) -> bool {
        let is_same = |other: &&Self| (other.host, other.gpu) == (self.host, self.gpu);
        self.gpu > 0 && all.iter().filter(is_same).count() == 1
    }
}

/// False if the system shows that there is no GPU, so that no driver need be loaded.
fn may_have_gpu() -> bool {
    if cfg!(not(target_os = "linux")) {
        return true;
    }
    let has = |folder: &str, prefix: &str| {
        let mut entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.any(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
    };
    has("/dev/dri", "renderD") || has("/dev", "nvidia") || has("/dev", "dxg")
}

/// The first of these operations that GPUs lack.
fn lacking(needs: &[Extra]) -> Option<Extra> {
    #[cfg(feature = "gpu")]
    let offers = thunder_gpu::offers;
    #[cfg(not(feature = "gpu"))]
    let offers = |_| false;
    needs.iter().copied().find(|operation| !offers(*operation))
}

#[cfg(feature = "gpu")]
fn real(turn: usize) -> Result<Device, String> {
    thunder_gpu::real(turn).map(|found| Device::Gpu(Box::new(found))).map_err(|error| error.to_string())
}

#[cfg(feature = "gpu")]
fn numbered(number: usize) -> Result<Device, String> {
    thunder_gpu::numbered(number).map(|found| Device::Gpu(Box::new(found))).map_err(|error| error.to_string())
}

#[cfg(not(feature = "gpu"))]
fn real(_turn: usize) -> Result<Device, String> {
    Err(WITHOUT_GPU.to_owned())
}

#[cfg(not(feature = "gpu"))]
fn numbered(_number: usize) -> Result<Device, String> {
    Err(WITHOUT_GPU.to_owned())
}

#[cfg(not(feature = "gpu"))]
const WITHOUT_GPU: &str =
    "this thunder was built without the feature gpu: build it with, or use --device cpu";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_no_other_rank_uses_is_a_ranks_own() {
        let all = [(1, 1), (1, 2), (1, 2), (2, 1), (2, 0), (2, 0)];
        let all = all.map(|(host, gpu)| DeviceUse { host, memory: gpu, gpu });
        let own = all.map(|one| one.is_only_gpu_user(&all));
        assert_eq!(own, [true, false, false, true, false, false]);
    }

    #[test]
    fn choices_have_the_command_lines_names() {
        for text in ["auto", "cpu", "gpu", "gpu:3"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|choice| choice.to_string()), Ok(text.to_owned()));
        }
        assert!("gpu:x".parse::<DeviceChoice>().is_err_and(|error| error.contains("gpu:x")));
    }
}
