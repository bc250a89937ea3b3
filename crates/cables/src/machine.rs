//! The data of one machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::network::Network;

/// A machine, as its own commands describe it. What could not be read is `None`, and
/// [`Machine::unread`] says why.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Machine {
    /// The name by which the user calls it, for ssh.
    pub name: String,
    /// The machine's own name.
    pub host_name: String,
    /// Its system.
    pub system: System,
    /// The maker's model, e.g. `Mac15,14`.
    pub model: Option<String>,
    /// The processor, e.g. `Apple M3 Ultra`.
    pub chip: Option<String>,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// `iogpu.wired_limit_mb`: most memory that the GPU may hold; 0 is the system's default.
    pub gpu_limit_mib: Option<u64>,
    /// Bytes that the GPU may use now, according to Metal.
    pub gpu_working_set_bytes: Option<u64>,
    /// The interface over which ssh has reached the machine.
    pub reached_over: Option<String>,
    /// Whether RDMA over Thunderbolt is on.
    pub rdma: RdmaState,
    /// Thunderbolt ports, by their numbers.
    pub ports: Vec<Port>,
    /// Network interfaces.
    pub interfaces: Vec<Interface>,
    /// Networks that the routing table sends somewhere, without the default route.
    pub routes: Vec<Network>,
    /// RDMA devices.
    pub devices: Vec<RdmaDevice>,
    /// Sleep and power.
    pub power: Power,
    /// Whether the firewall for programs is on.
    pub firewall: Option<bool>,
    /// Whether the machine accepts ssh.
    pub remote_login: Option<bool>,
    /// The job of an earlier setup for the next start of the machine.
    pub job: JobState,
    /// Whether the module for IP over Thunderbolt is loaded (Linux).
    pub ip_over_thunderbolt: Option<bool>,
    /// The parts that could not be read, with the reasons.
    pub unread: Vec<String>,
}

/// The operating system.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum System {
    /// macOS.
    Macos {
        /// Its version, e.g. `26.3`.
        version: String,
    },
    /// Linux.
    Linux {
        /// The kernel's release.
        kernel: String,
    },
    /// Neither.
    #[default]
    Unknown,
}

/// Whether RDMA over Thunderbolt can be used.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RdmaState {
    /// `rdma_ctl status` says enabled; on Linux, there are devices.
    Enabled,
    /// It is off.
    Disabled,
    /// There is no `rdma_ctl`: the system is too old. On Linux: no driver.
    Missing,
    /// The answer is none of these.
    Unknown(String),
    /// Not asked.
    #[default]
    NotRead,
}

/// The generation of Thunderbolt, derived from speeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Generation {
    /// Up to 20 Gbit/s: Thunderbolt 2, or USB4 at 20.
    Older,
    /// Up to 40 Gbit/s: Thunderbolt 3, 4 or USB4.
    Four,
    /// More: Thunderbolt 5, USB4 version 2.
    Five,
}

impl Generation {
    /// The generation that a link of `gbits` needs.
    pub fn of(gbits: u32) -> Self {
        match gbits {
            0..=20 => Self::Older,
            21..=40 => Self::Four,
            _ => Self::Five,
        }
    }

    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Older => "Thunderbolt 2 or slower",
            Self::Four => "Thunderbolt 4",
            Self::Five => "Thunderbolt 5",
        }
    }
}

/// One Thunderbolt port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Port {
    /// The number next to the socket; on Linux the route, e.g. `0-1`.
    pub name: String,
    /// UUID of the port's domain, in capitals. On Linux all ports of a controller share it.
    pub uuid: Option<String>,
    /// The interface for IP.
    pub interface: Option<String>,
    /// Gbit/s of the link, while something is attached.
    pub link_gbits: Option<u32>,
    /// Gbit/s that the port could do, while nothing is attached.
    pub most_gbits: Option<u32>,
    /// What is at the other end.
    pub attached: Attached,
}

/// What is at the other end of a cable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Attached {
    /// Nothing.
    Nothing,
    /// A dock, a disk or a display.
    Device {
        /// Its name.
        name: String,
    },
    /// Another machine.
    Machine {
        /// UUID of its port's domain, in capitals.
        uuid: String,
        /// Its name.
        name: String,
        /// Its model.
        model: Option<String>,
        /// The device between, if the machine is not attached directly.
        via: Option<String>,
        /// Whether it offers IP over the cable.
        offers_ip: bool,
    },
    /// The port reports a link, but not the device at its end.
    Unknown,
}

/// What an interface is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// IP over a Thunderbolt cable.
    Thunderbolt,
    /// Ethernet.
    Ethernet,
    /// Wi-Fi.
    WiFi,
    /// A bridge of other interfaces.
    Bridge,
    /// Loopback, tunnels and all others.
    Other,
}

/// One network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Interface {
    /// Its name, e.g. `en2`.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Whether it is up.
    pub up: bool,
    /// Whether it has a carrier.
    pub active: bool,
    /// Bytes of a packet.
    pub mtu: u32,
    /// Maximum bytes of a packet, if the system was asked.
    pub most_mtu: Option<u32>,
    /// Hardware address.
    pub mac: Option<String>,
    /// Its IPv4 addresses, with prefixes.
    pub addresses: Vec<Network>,
    /// The bridge that it is in.
    pub bridge: Option<String>,
    /// Hardware addresses that answered through it.
    pub neighbours: Vec<String>,
    /// Whether NetworkManager gives it addresses of its own (Linux).
    pub managed: bool,
}

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// Its name, e.g. `rdma_en2`.
    pub name: String,
    /// Its interface.
    pub interface: Option<String>,
    /// Whether its port is active; `None` if unknown.
    pub active: Option<bool>,
}

/// Sleep and power settings.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Power {
    /// Minutes until the machine sleeps, by source of power; 0 is never.
    pub sleep_minutes: BTreeMap<String, u32>,
    /// Low Power Mode, by source of power.
    pub low_power: BTreeMap<String, bool>,
}

/// The job of an earlier setup for the next start of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct JobState {
    /// Whether there is a launchd or a systemd that can run it.
    pub possible: bool,
    /// Whether launchd or systemd knows the job.
    pub loaded: bool,
    /// Whether the folder of its files is there.
    pub folder: bool,
    /// Its files that are there, by path.
    pub files: BTreeMap<String, String>,
}

impl Machine {
    /// The interface `name`.
    pub fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.name == name)
    }

    /// The RDMA device of interface `name`.
    pub fn device_of(&self, name: &str) -> Option<&RdmaDevice> {
        self.devices.iter().find(|device| device.interface.as_deref() == Some(name))
    }

    /// The fastest generation that the machine's ports have shown.
    pub fn generation(&self) -> Option<Generation> {
        let shown = |port: &Port| port.most_gbits.into_iter().chain(port.link_gbits).max();
        self.ports.iter().filter_map(shown).max().map(Generation::of)
    }

    /// Why a Mac's ports are unknown.
    pub fn ports_unread(&self) -> Option<&str> {
        let is_of_ports = |why: &&String| why.contains("system_profiler");
        self.unread.iter().find(is_of_ports).map(String::as_str)
    }

    /// Whether it runs macOS.
    pub fn is_mac(&self) -> bool {
        matches!(self.system, System::Macos { .. })
    }

    /// Networks that must not be used for cables: those of interfaces and routes.
    pub fn used_networks(&self) -> impl Iterator<Item = Network> + '_ {
        let addresses = self.interfaces.iter().flat_map(|interface| interface.addresses.iter().copied());
        addresses.chain(self.routes.iter().copied())
    }

    /// The model and chip in a few words.
    pub fn description(&self) -> String {
        let gib = self.memory_bytes.map(|bytes| format!("{} GB", bytes >> 30));
        let parts = [self.model.clone(), self.chip.clone(), gib];
        let system = match &self.system {
            System::Macos { version } => Some(format!("macOS {version}")),
            System::Linux { kernel } => Some(format!("Linux {kernel}")),
            System::Unknown => None,
        };
        parts.into_iter().flatten().chain(system).collect::<Vec<_>>().join(", ")
    }
}
