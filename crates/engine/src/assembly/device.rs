//! Which device computes a rank's shard.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thunder_compute::CpuConfig;

use super::assemble::STEP_ROWS;

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

/// Memory in bytes of the device that a first rank on this host would use; a message if there is
/// none.
///
/// # Errors
/// If a GPU is requested and there is none.
pub fn available_bytes(choice: DeviceChoice) -> Result<Option<u64>, String> {
    Ok(of_first_rank(choice)?.available_bytes())
}

/// The device that a first rank on this host would use, for people.
///
/// # Errors
/// If a GPU is requested and there is none.
pub fn device_name(choice: DeviceChoice) -> Result<String, String> {
    Ok(of_first_rank(choice)?.name())
}

/// Prompt tokens that a first rank on this host reads together.
///
/// # Errors
/// If a GPU is requested and there is none.
pub fn first_step_rows(choice: DeviceChoice) -> Result<usize, String> {
    Ok(of_first_rank(choice)?.step_rows())
}

/// Measured memory bandwidth in bytes per second of the GPU that a first rank on this host would
/// use; `None` if that rank uses the CPU.
///
/// # Errors
/// If a GPU is requested and there is none, or if it cannot be measured.
pub fn gpu_bytes_per_s(choice: DeviceChoice) -> Result<Option<f64>, String> {
    match of_first_rank(choice)? {
        Device::Cpu(_) => Ok(None),
        #[cfg(feature = "gpu")]
        Device::Gpu(found) => thunder_gpu::bandwidth(&found).map(Some).map_err(|error| error.to_string()),
    }
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
    let cpu = CpuConfig::new(1, thunder_compute::Isa::Portable, thunder_compute::Activations::Auto);
    Device::choose(choice, turn, cpu)
}

/// A chosen device.
#[derive(Debug)]
pub(super) enum Device {
    Cpu(CpuConfig),
    #[cfg(feature = "gpu")]
    Gpu(Box<thunder_gpu::Found>),
}

impl Device {
    /// The device for the `turn`-th rank of this host; `cpu` configures the CPU.
    pub fn choose(choice: DeviceChoice, turn: usize, cpu: CpuConfig) -> Result<Self, String> {
        match choice {
            DeviceChoice::Cpu => Ok(Self::Cpu(cpu)),
            DeviceChoice::Auto if !may_have_gpu() => Ok(Self::Cpu(cpu)),
            DeviceChoice::Auto => Ok(real(turn).unwrap_or(Self::Cpu(cpu))),
            DeviceChoice::Gpu => real(turn).map_err(|error| format!("--device {choice}: {error}")),
            DeviceChoice::Numbered(number) => {
                self::numbered(number).map_err(|error| format!("--device {choice}: {error}"))
            }
        }
    }

    /// Bytes of memory for weights, cache and buffers: the host's if the device has no memory of
    /// its own.
    pub fn available_bytes(&self) -> Option<u64> {
        let host = thunder_compute::memory::available_bytes();
        match self {
            Self::Cpu(_) => host,
            #[cfg(feature = "gpu")]
            Self::Gpu(found) if found.info.has_own_memory() => found.info.memory_bytes.or(host),
            #[cfg(feature = "gpu")]
            Self::Gpu(found) => match (found.info.memory_bytes, host) {
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

    /// True if layers with states can verify drafts on it.
    pub const fn takes_drafts_of_states(&self) -> bool {
        match self {
            Self::Cpu(_) => true,
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => false,
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
    fn choices_have_the_command_lines_names() {
        for text in ["auto", "cpu", "gpu", "gpu:3"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|choice| choice.to_string()), Ok(text.to_owned()));
        }
        assert!("gpu:x".parse::<DeviceChoice>().is_err_and(|error| error.contains("gpu:x")));
    }
}
