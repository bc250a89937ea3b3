//! Why RDMA works here, or why it does not and what to do: the facts for `thunder doctor`.

mod advice;
mod macos;
mod report;

pub use self::macos::{RdmaControl, ThunderboltPort, parse_rdma_ctl, parse_thunderbolt};

use crate::device::{Context, DeviceLimits, DeviceList, PortInfo};
use crate::error::Error;
use crate::library::CANDIDATES;
use crate::memory::ProtectionDomain;
use crate::profile::Profile;
use serde::Serialize;
use std::process::Command;

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

/// Looks at this machine. Takes milliseconds on Linux, up to some seconds on macOS (`system_profiler`).
pub fn examine() -> Report {
    let (library, devices) = match DeviceList::get() {
        Ok(list) => (found_library(), list.names().iter().map(|name| device(&list, name)).collect()),
        Err(error) => (broken_library(&error), Vec::new()),
    };
    let mut report = Report {
        usable: devices.iter().any(DeviceReport::is_usable),
        library,
        kernel_devices: kernel_devices(),
        devices,
        locked_memory_limit_bytes: locked_memory_limit(),
        macos: cfg!(target_os = "macos").then(ask_macos),
        advice: Vec::new(),
    };
    report.advice = advice::advise(&report);
    report
}

fn tried() -> Vec<String> {
    CANDIDATES.iter().map(|name| name.to_string()).collect()
}

fn found_library() -> LibraryReport {
    let found = crate::library::Library::get().ok().map(|library| library.path.to_string());
    LibraryReport { tried: tried(), found, problem: None }
}

fn broken_library(error: &Error) -> LibraryReport {
    let found = match error {
        Error::LibraryMissing { .. } => None,
        _ => crate::library::Library::get().ok().map(|library| library.path.to_string()),
    };
    LibraryReport { tried: tried(), found, problem: Some(error.to_string()) }
}

fn device(list: &DeviceList, name: &str) -> DeviceReport {
    let mut report = DeviceReport { name: name.to_string(), limits: None, ports: Vec::new(), problem: None };
    if let Err(error) = list.open(name, Profile::native()).and_then(|context| describe(&context, &mut report))
    {
        report.problem = Some(error.to_string());
    }
    report
}

fn describe(context: &std::sync::Arc<Context>, report: &mut DeviceReport) -> Result<(), Error> {
    let limits = context.limits()?;
    let ports = limits.ports;
    report.limits = Some(limits);
    for number in 1..=ports {
        report.ports.push(context.port(number)?);
    }
    // Some Macs list a device that fails here until the cable is plugged in again.
    ProtectionDomain::new(context).map(drop)
}

fn kernel_devices() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/sys/class/infiniband") else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn locked_memory_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is written on success; on failure it stays 0, which reads as no memory at all.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

fn ask_macos() -> MacosReport {
    let output = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
    };
    MacosReport {
        control: output("rdma_ctl", &["status"]).map_or(RdmaControl::Missing, |text| parse_rdma_ctl(&text)),
        ports: output("/usr/sbin/system_profiler", &["SPThunderboltDataType", "-json"])
            .map(|text| parse_thunderbolt(&text))
            .unwrap_or_default(),
    }
}
