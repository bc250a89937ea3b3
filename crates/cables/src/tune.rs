//! Settings that a model needs: memory that the GPU may hold, and power.

use serde::Serialize;

use crate::machine::Machine;
use crate::plan::{Action, MachinePlan};

const GIB: u64 = 1 << 30;
/// Memory beyond weights and KV cache: buffers, and the program itself.
const BUFFERS_BYTES: u64 = 2 * GIB;

/// The source of the GPU's memory limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuSource {
    /// Metal, on the machine.
    Metal,
    /// `iogpu.wired_limit_mb`.
    Setting,
    /// An estimate: the smallest value that Macs with this much memory have reported.
    Estimate,
}

/// Memory that the GPU may use now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GpuMemory {
    /// Bytes.
    pub bytes: u64,
    /// Who says so.
    pub source: GpuSource,
    /// Whether `iogpu.wired_limit_mb` is set; it is the system's default if not.
    pub is_set: bool,
}

/// Memory that the machine's GPU may use: from Metal, otherwise from the setting, otherwise an
/// estimate. `None` for a machine without the setting.
pub fn gpu_memory(machine: &Machine) -> Option<GpuMemory> {
    let setting = machine.gpu_limit_mib?;
    let (bytes, source) = match (machine.gpu_working_set_bytes, setting) {
        (Some(bytes), _) => (bytes, GpuSource::Metal),
        (None, 0) => (default_bytes(machine.memory_bytes?), GpuSource::Estimate),
        (None, mib) => (mib.saturating_mul(1 << 20), GpuSource::Setting),
    };
    Some(GpuMemory { bytes, source, is_set: setting > 0 })
}

/// The least default that users have reported: two thirds of the memory of Macs with up to 32 GB
/// (10.7 of 16, 21.3 of 32 GiB), three quarters of larger ones (48 of 64, 72 of 96, 96 of 128 GiB).
/// Newer systems give more (11.8 of 16, 107.5 of 128, 464 of 512 GiB).
fn default_bytes(memory: u64) -> u64 {
    if memory > 32 * GIB { memory / 4 * 3 } else { memory / 3 * 2 }
}

/// The arithmetic behind `iogpu.wired_limit_mb` on one machine, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuLimit {
    /// The machine.
    pub machine: String,
    /// Its memory.
    pub memory: u64,
    /// Memory for its share of the model, with the KV cache.
    pub model: u64,
    /// Buffers.
    pub buffers: u64,
    /// Memory for macOS and other programs.
    pub reserve: u64,
    /// The setting now, in MiB; 0 is the system's default.
    pub now_mib: u64,
    /// Memory that the GPU may use now.
    pub now: GpuMemory,
    /// The limit to set, in MiB; `None` if it need not change.
    pub set_mib: Option<u64>,
}

/// Why there is no suitable limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TuneError {
    /// The model does not fit.
    #[error(
        "{machine}: the model needs {needed_gib} GiB of {memory_gib}, and {reserve_gib} must stay for macOS: use more \
         machines, fewer bits or a shorter --context"
    )]
    TooLarge {
        /// The machine.
        machine: String,
        /// GiB of the model with buffers.
        needed_gib: u64,
        /// GiB of memory.
        memory_gib: u64,
        /// GiB that must stay.
        reserve_gib: u64,
    },
    /// The machine did not report the needed values.
    #[error("{machine} has no iogpu.wired_limit_mb: only Macs with Apple's chips have the setting")]
    NoSetting {
        /// The machine.
        machine: String,
    },
}

/// Memory for macOS: 8 GiB, less on small machines (a quarter), more on large ones (a sixteenth).
/// If the GPU may use everything, macOS ends programs, and finally crashes.
pub fn reserve_bytes(memory: u64) -> u64 {
    (8 * GIB).min(memory / 4).max(memory / 16)
}

/// The limit for a model that needs `model` bytes on the machine.
///
/// # Errors
/// When it does not fit, or the machine has no such setting.
pub fn gpu_limit(machine: &Machine, model: u64) -> Result<GpuLimit, TuneError> {
    let no_setting = || TuneError::NoSetting { machine: machine.name.clone() };
    let memory = machine.memory_bytes.ok_or_else(no_setting)?;
    let now_mib = machine.gpu_limit_mib.ok_or_else(no_setting)?;
    let now = gpu_memory(machine).ok_or_else(no_setting)?;
    let reserve = reserve_bytes(memory);
    let needed = model.saturating_add(BUFFERS_BYTES);
    if needed > memory.saturating_sub(reserve) {
        let gib = |bytes: u64| bytes.div_ceil(GIB);
        return Err(TuneError::TooLarge {
            machine: machine.name.clone(),
            needed_gib: gib(needed),
            memory_gib: gib(memory),
            reserve_gib: gib(reserve),
        });
    }
    let set_mib = (needed > now.bytes).then(|| (needed.div_ceil(GIB) * 1024).min((memory - reserve) >> 20));
    let machine = machine.name.clone();
    Ok(GpuLimit { machine, memory, model, buffers: BUFFERS_BYTES, reserve, now_mib, now, set_mib })
}

/// The changes of a machine: the limit if one is needed, and Low Power Mode off on mains.
pub fn plan(machine: &Machine, limit: Option<&GpuLimit>) -> MachinePlan {
    let mut actions = Vec::new();
    if let Some((limit, mib)) = limit.and_then(|limit| Some((limit, limit.set_mib?))) {
        actions.push(Action::SetGpuLimit { mib, before: limit.now_mib });
    }
    let is_on = |source: &&String| machine.power.low_power.get(*source) == Some(&true);
    for source in machine.power.low_power.keys().filter(|source| source.starts_with("AC")).filter(is_on) {
        actions.push(Action::SetLowPower { source: source.clone(), on: false });
    }
    MachinePlan { machine: machine.name.clone(), actions }
}
