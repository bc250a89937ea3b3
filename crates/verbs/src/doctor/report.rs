//! The report as text.

use super::{DeviceReport, Report};
use std::fmt;

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
