//! A Mac's transcript.

use std::collections::BTreeMap;

use super::sections::Sections;
use super::{ifconfig, thunderbolt};
use crate::machine::{Machine, Power, RdmaDevice, RdmaState, System};

pub(super) fn fill(machine: &mut Machine, sections: &Sections) {
    let version = sections.line("version").unwrap_or_default().to_owned();
    machine.system = System::Macos { version };
    let sysctl = named_values(sections.partial("sysctl"));
    let number = |name: &str| sysctl.get(name).and_then(|value| value.parse().ok());
    machine.model = sysctl.get("hw.model").map(|model| (*model).to_owned());
    machine.chip = sysctl.get("machdep.cpu.brand_string").map(|chip| (*chip).to_owned());
    machine.memory_bytes = number("hw.memsize");
    machine.gpu_limit_mib = number("iogpu.wired_limit_mb");
    machine.gpu_working_set_bytes = sections.line("gpu").and_then(|text| text.parse().ok());
    machine.rdma = match (sections.status("rdma"), sections.partial("rdma").trim()) {
        (Some(127), _) => RdmaState::Missing,
        (_, answer) => match answer.to_lowercase().as_str() {
            "enabled" => RdmaState::Enabled,
            "disabled" => RdmaState::Disabled,
            _ => RdmaState::Unknown(answer.chars().take(80).collect()),
        },
    };
    let hardware = ifconfig::hardware_ports(sections.partial("ports"));
    match sections.output("thunderbolt").map(thunderbolt::ports) {
        Some(Ok(ports)) => machine.ports = ports,
        Some(Err(why)) => machine.unread.push(why),
        None => machine.unread.push(sections.why_missing("thunderbolt", "system_profiler")),
    }
    for port in &mut machine.ports {
        let named = hardware.iter().find(|(name, _)| ifconfig::thunderbolt_number(name) == Some(&port.name));
        port.interface = named.map(|(_, device)| device.clone());
    }
    machine.interfaces = ifconfig::interfaces(sections.partial("interfaces"), &hardware);
    if machine.interfaces.is_empty() {
        machine.unread.push(sections.why_missing("interfaces", "ifconfig -a"));
    }
    for (device, text) in sections.with_prefix("mtu:") {
        if let Some(interface) = machine.interfaces.iter_mut().find(|interface| interface.name == device) {
            interface.most_mtu = ifconfig::most_mtu(text);
        }
    }
    match sections.output("routes") {
        Some(text) => machine.routes = ifconfig::routes(text),
        None => machine.unread.push(sections.why_missing("routes", "netstat -rn")),
    }
    machine.devices = devices(sections.partial("devices"), sections.partial("device-states"));
    machine.power = power(sections.partial("power"));
    machine.firewall = firewall(sections.partial("firewall"));
    machine.remote_login = remote_login(sections.partial("services"));
    machine.job.possible = true;
    machine.job.loaded = sections.status("job") == Some(0);
}

/// Lines of `NAME: VALUE`.
fn named_values(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.trim(), value.trim()))
        .collect()
}

/// `ibv_devices` lists the devices; `ibv_devinfo` says which ports are active.
pub(super) fn devices(list: &str, states: &str) -> Vec<RdmaDevice> {
    let mut active: BTreeMap<&str, bool> = BTreeMap::new();
    let mut device = None;
    for line in states.lines() {
        match line.split_once(':').map(|(name, value)| (name.trim(), value.trim())) {
            Some(("hca_id", name)) => device = Some(name),
            Some(("state", state)) => {
                if let Some(name) = device {
                    active.insert(name, state.starts_with("PORT_ACTIVE"));
                }
            }
            _ => {}
        }
    }
    let is_guid =
        |word: &str| word.len() >= 8 && word.bytes().all(|digit| digit.is_ascii_hexdigit() || digit == b':');
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        is_guid(words.next()?).then(|| name.to_owned())
    };
    let named = |name: String| RdmaDevice {
        interface: name.strip_prefix("rdma_").map(str::to_owned),
        active: active.get(name.as_str()).copied(),
        name,
    };
    list.lines().filter_map(row).map(named).collect()
}

/// `pmset -g custom`: a heading for each source of power, then its settings.
fn power(text: &str) -> Power {
    let mut power = Power::default();
    let mut source = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_suffix(':').filter(|_| !line.starts_with(' ')) {
            source = name.to_owned();
            continue;
        }
        let mut words = line.split_whitespace();
        let (name, value) = (words.next(), words.next().and_then(|value| value.parse::<u32>().ok()));
        match (name, value) {
            (Some("sleep"), Some(minutes)) => {
                power.sleep_minutes.insert(source.clone(), minutes);
            }
            // High Power Mode is 2.
            (Some("lowpowermode" | "powermode"), Some(mode)) => {
                power.low_power.insert(source.clone(), mode == 1);
            }
            _ => {}
        }
    }
    power
}

/// `Firewall is enabled. (State = 1)`; state 2 blocks all connections.
fn firewall(text: &str) -> Option<bool> {
    let state = text.split_once("State = ")?.1.trim_start();
    Some(!state.starts_with('0'))
}

/// `launchctl print-disabled system`: `"com.openssh.sshd" => enabled`; older systems print whether
/// it is disabled.
fn remote_login(text: &str) -> Option<bool> {
    let line = text.lines().find(|line| line.contains("\"com.openssh.sshd\""))?;
    match line.split_once("=>")?.1.trim() {
        "enabled" | "false" => Some(true),
        "disabled" | "true" => Some(false),
        _ => None,
    }
}
