//! The report, as data and as text.

use super::macos::{RdmaControl, ThunderboltPort};
use crate::device::{DeviceLimits, PortInfo};
use serde::Serialize;
use std::fmt;

/// What was found. Serialises to JSON; displays as text for people.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// A device has an active port with an address: RDMA can be used.
    pub usable: bool,
    /// The verbs library.
    pub library: LibraryReport,
    /// What the kernel lists, whether or not the library can use it (Linux: `/sys/class/infiniband`).
    pub kernel_devices: Vec<String>,
    /// The devices that the library lists.
    pub devices: Vec<DeviceReport>,
    /// The most memory that may be locked, in bytes; none if without limit.
    pub locked_memory_limit_bytes: Option<u64>,
    /// What only macOS has.
    pub macos: Option<MacosReport>,
    /// What to do, most important first. Empty when nothing is wrong.
    pub advice: Vec<String>,
}

/// The verbs library.
#[derive(Debug, Clone, Serialize)]
pub struct LibraryReport {
    /// The names looked for.
    pub tried: Vec<String>,
    /// The one that was loaded.
    pub found: Option<String>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

/// A device.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// Its capacities, as it reports them.
    pub limits: Option<DeviceLimits>,
    /// Its ports.
    pub ports: Vec<PortInfo>,
    /// Why it cannot be used.
    pub problem: Option<String>,
}

impl DeviceReport {
    /// It has an active port with an address, and nothing failed.
    pub fn is_usable(&self) -> bool {
        let ready = |port: &PortInfo| port.state.is_active() && !port.gids.is_empty();
        self.problem.is_none() && self.ports.iter().any(ready)
    }
}

/// What macOS's own tools say.
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
            None => writeln!(f, "library: none (looked for {})", self.library.tried.join(", "))?,
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
