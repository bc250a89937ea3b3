//! The report, as data and as text.

use super::macos::{RdmaControl, ThunderboltPort};
use crate::device::{DeviceLimits, PortInfo};
use serde::Serialize;
use std::fmt;

/// The state of RDMA on this machine. Serializes to JSON and displays as text.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// True if a device has an active port with an address.
    pub usable: bool,
    /// The verbs library.
    pub library: LibraryReport,
    /// The devices that the kernel lists in `/sys/class/infiniband` (Linux), usable or not.
    pub kernel_devices: Vec<String>,
    /// The devices that the library lists.
    pub devices: Vec<DeviceReport>,
    /// Limit on locked memory in bytes; `None` if unlimited.
    pub locked_memory_limit_bytes: Option<u64>,
    /// Facts that exist on macOS only.
    pub macos: Option<MacosReport>,
    /// What to do, most important first. Empty if nothing is wrong.
    pub advice: Vec<String>,
}

/// The verbs library.
#[derive(Debug, Clone, Serialize)]
pub struct LibraryReport {
    /// The names that were tried.
    pub tried: Vec<String>,
    /// The name that was loaded.
    pub found: Option<String>,
    /// Why it cannot be used, if so.
    pub problem: Option<String>,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// The device's name.
    pub name: String,
    /// The capacities that it reports.
    pub limits: Option<DeviceLimits>,
    /// Its ports.
    pub ports: Vec<PortInfo>,
    /// Why it cannot be used, if so.
    pub problem: Option<String>,
}

impl DeviceReport {
    /// True if it has an active port with an address and nothing failed.
    pub fn is_usable(&self) -> bool {
        let ready = |port: &PortInfo| port.state.is_active() && !port.gids.is_empty();
        self.problem.is_none() && self.ports.iter().any(ready)
    }
}

/// The results of macOS's own tools.
#[derive(Debug, Clone, Serialize)]
pub struct MacosReport {
    /// `rdma_ctl status`.
    pub control: RdmaControl,
    /// `system_profiler SPThunderboltDataType -json`.
    pub ports: Vec<ThunderboltPort>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.library.found {
            Some(path) => writeln!(f, "library: {path}")?,
            None => writeln!(f, "library: none (tried {})", self.library.tried.join(", "))?,
        }
        if let Some(macos) = &self.macos {
            writeln!(f, "rdma_ctl: {:?}", macos.control)?;
            for port in &macos.ports {
                let name = port.receptacle.as_deref().unwrap_or("?");
                let speed = port.gbits.map_or("speed unknown".to_string(), |gbits| format!("{gbits} Gbit/s"));
                let peer = port.peer.as_deref().unwrap_or("nothing");
                writeln!(f, "thunderbolt {name}: {speed}, connected to {peer}")?;
            }
        }
        if self.devices.is_empty() {
            writeln!(f, "devices: none")?;
        }
        self.devices.iter().try_for_each(|device| device.fmt(f))?;
        writeln!(f, "RDMA can{} be used", if self.usable { "" } else { "not" })?;
        self.advice.iter().try_for_each(|line| writeln!(f, "- {line}"))
    }
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "device {}", self.name)?;
        for port in &self.ports {
            let rate = port.rate_gbits.map_or(String::new(), |rate| format!(", {rate} Gbit/s"));
            let (state, layer, mtu) = (port.state, port.link_layer, port.active_mtu_bytes);
            writeln!(f, "  port {}: {state:?}, {layer:?}, MTU {mtu}{rate}", port.number)?;
            for entry in &port.gids {
                let kind = entry.kind.as_deref().map_or(String::new(), |kind| format!(" ({kind})"));
                let interface =
                    entry.interface.as_deref().map_or(String::new(), |name| format!(" on {name}"));
                writeln!(f, "    gid {}: {}{kind}{interface}", entry.index, entry.gid)?;
            }
        }
        self.problem.iter().try_for_each(|problem| writeln!(f, "  problem: {problem}"))
    }
}
