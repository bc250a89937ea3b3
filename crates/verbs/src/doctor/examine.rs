//! Examines this machine.

use super::advice::advise;
use super::macos::{RdmaControl, parse_rdma_ctl, parse_thunderbolt};
use super::report::{DeviceReport, LibraryReport, MacosReport, Report};
use crate::device::{Context, DeviceList};
use crate::error::Error;
use crate::library::{CANDIDATES, Library};
use crate::memory::ProtectionDomain;
use crate::profile::Profile;
use std::process::Command;
use std::sync::Arc;

/// Examines this machine. Takes milliseconds on Linux and up to a few seconds on macOS
/// (`system_profiler`).
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
    report.advice = advise(&report);
    report
}

fn tried() -> Vec<String> {
    CANDIDATES.iter().map(|name| name.to_string()).collect()
}

fn found_library() -> LibraryReport {
    let found = Library::get().ok().map(|library| library.path.to_string());
    LibraryReport { tried: tried(), found, problem: None }
}

fn broken_library(error: &Error) -> LibraryReport {
    let found = match error {
        Error::LibraryMissing { .. } => None,
        _ => Library::get().ok().map(|library| library.path.to_string()),
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

fn describe(context: &Arc<Context>, report: &mut DeviceReport) -> Result<(), Error> {
    let limits = context.limits()?;
    let ports = limits.ports;
    report.limits = Some(limits);
    for number in 1..=ports {
        report.ports.push(context.port(number)?);
    }
    // Some Macs list a device on which this fails until the cable is plugged in again.
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
    // SAFETY: `limit` is a valid rlimit to write. On failure it stays 0, which means no lockable
    // memory.
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
