//! Settings that a model needs: memory that the GPU may hold, and power.

use serde::Serialize;

use crate::machine::Machine;
use crate::plan::{Action, MachinePlan};

const GIB: u64 = 1 << 30;
/// Memory beyond weights and KV cache: buffers, and the program itself.
const BUFFERS_BYTES: u64 = 2 * GIB;

/// The arithmetic behind `iogpu.wired_limit_mb` on one machine, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuLimit {
    /// The machine.
    pub machine: String,
    /// Its memory.
    pub memory: u64,
    /// What its share of the model needs, with the KV cache.
    pub model: u64,
    /// Buffers.
    pub buffers: u64,
    /// What stays for macOS and other programs.
    pub reserve: u64,
    /// The limit now, in MiB; 0 is the system's default.
    pub now_mib: u64,
    /// The limit to set, in MiB; `None` if it need not change.
    pub set_mib: Option<u64>,
}

/// Why there is no limit that suits.
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
    /// The machine did not say what is needed.
    #[error("{machine} has no iogpu.wired_limit_mb: only Macs with Apple's chips have the setting")]
    NoSetting {
        /// The machine.
        machine: String,
    },
}

/// What stays for macOS: 8 GiB, less on small machines (a quarter), more on large ones (a
/// sixteenth). A GPU that may hold everything makes macOS end programs, and then itself.
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
    // macOS does not print its default. It was never measured below two thirds of the memory.
    let now = if now_mib == 0 { memory / 3 * 2 } else { now_mib << 20 };
    let set_mib = (needed > now).then(|| (needed.div_ceil(GIB) * 1024).min((memory - reserve) >> 20));
    let machine = machine.name.clone();
    Ok(GpuLimit { machine, memory, model, buffers: BUFFERS_BYTES, reserve, now_mib, set_mib })
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
