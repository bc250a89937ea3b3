//! The problems of a desk, each with its remedy, in the order of repair.

use serde::Serialize;

use crate::graph::{Desk, LooseKind};
use crate::job::{self, KeptEnd};
use crate::machine::{Attached, Generation, Interface, Kind, Machine, RdmaState, System};

/// The first macOS with RDMA over Thunderbolt.
const FIRST_MACOS: (u32, u32) = (26, 2);

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Machines cannot work together, or not over their cables.
    Problem,
    /// Machines can work together, but something costs speed or reliability.
    Warning,
    /// Worth knowing.
    Note,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The machine, as the user calls it.
    pub machine: String,
    /// How much it matters.
    pub severity: Severity,
    /// A short name that does not change between versions.
    pub code: &'static str,
    /// What was found.
    pub text: String,
    /// What to do.
    pub remedy: String,
}

/// All findings of a desk, the most urgent first; remedies that need a restart come before those
/// that a restart would undo.
pub fn findings(desk: &Desk) -> Vec<Finding> {
    let mut list = Vec::new();
    for (index, machine) in desk.machines.iter().enumerate() {
        let mut add = |severity, code, text: String, remedy: &str| {
            list.push(Finding {
                machine: machine.name.clone(),
                severity,
                code,
                text,
                remedy: remedy.to_owned(),
            });
        };
        for why in &machine.unread {
            let is_without_bus = !machine.is_mac() && why.contains("/sys/bus/thunderbolt");
            let (code, remedy) = if is_without_bus {
                (
                    "no-controller",
                    "sudo modprobe thunderbolt; without a controller, this machine takes part over Ethernet",
                )
            } else {
                ("unread", "run the command on the machine and look at what it says")
            };
            add(Severity::Warning, code, why.clone(), remedy);
        }
        system(machine, &mut add);
        rdma(machine, &mut add);
        access(machine, &mut add);
        ports(desk, index, &mut add);
        network(desk, index, &mut add);
        power(machine, &mut add);
    }
    cables(desk, &mut list);
    // Stable: within a severity and a step, findings stay in the order of the machines.
    list.sort_by_key(|finding| (finding.severity, step(finding.code)));
    list
}

/// The order of repair: an update of macOS, then remedies with a restart, then all others.
fn step(code: &str) -> u8 {
    match code {
        "macos-too-old" | "rdma-missing" => 0,
        "rdma-off" | "rdma-no-device" => 1,
        _ => 2,
    }
}

type Add<'a> = &'a mut dyn FnMut(Severity, &'static str, String, &str);

/// `26.3.1` as 26 and 3.
fn version_of(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next().and_then(|part| part.parse().ok()).unwrap_or(0)))
}

/// Whether macOS is new enough for RDMA. `None` for other systems.
pub fn is_new_enough(machine: &Machine) -> Option<bool> {
    match &machine.system {
        System::Macos { version } => version_of(version).map(|version| version >= FIRST_MACOS),
        _ => None,
    }
}

/// The steps that a Mac needs in Recovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovery {
    /// `rdma_ctl enable` in Recovery.
    Needed,
    /// Nothing: RDMA is on, or no port can carry it.
    NotNeeded,
    /// An update of macOS first: this version has no RDMA.
    UpdateFirst(String),
    /// Not known, with the reason.
    Unknown(String),
}

/// The steps that a Mac needs in Recovery.
pub fn recovery(machine: &Machine) -> Recovery {
    if machine.rdma == RdmaState::Enabled {
        return Recovery::NotNeeded;
    }
    if let Some(why) = machine.ports_unread() {
        return Recovery::Unknown(why.to_owned());
    }
    match machine.generation() {
        Some(Generation::Five) => {}
        Some(_) => return Recovery::NotNeeded,
        None => return Recovery::Unknown("no port has told its speed".to_owned()),
    }
    match (is_new_enough(machine), &machine.rdma, &machine.system) {
        (Some(false), _, System::Macos { version }) => Recovery::UpdateFirst(version.clone()),
        (Some(true), RdmaState::Disabled, _) => Recovery::Needed,
        (None, ..) => Recovery::Unknown("sw_vers has not told macOS's version".to_owned()),
        (_, RdmaState::Unknown(answer), _) => Recovery::Unknown(format!("rdma_ctl status says {answer:?}")),
        _ => Recovery::Unknown("there is no rdma_ctl: update macOS".to_owned()),
    }
}

fn system(machine: &Machine, add: Add<'_>) {
    if is_new_enough(machine) == Some(false) {
        let System::Macos { version } = &machine.system else { return };
        // Slower ports carry no RDMA with any macOS.
        let is_five = machine.generation() == Some(Generation::Five);
        add(
            if is_five { Severity::Problem } else { Severity::Warning },
            "macos-too-old",
            format!("macOS {version} has no RDMA over Thunderbolt"),
            "update to macOS 26.2 or later (System Settings, General, Software Update)",
        );
    }
    if machine.ip_over_thunderbolt == Some(false) && !machine.ports.is_empty() {
        add(
            Severity::Problem,
            "no-thunderbolt-net",
            "the module for IP over Thunderbolt is not loaded".to_owned(),
            "sudo modprobe thunderbolt-net; to load it at every start: echo thunderbolt-net | sudo tee /etc/modules-load.d/thunderbolt-net.conf",
        );
    }
}

fn rdma(machine: &Machine, add: Add<'_>) {
    let generation = machine.generation();
    match (&machine.rdma, generation) {
        (RdmaState::Disabled, Some(Generation::Five)) => add(
            Severity::Problem,
            "rdma-off",
            "RDMA is off".to_owned(),
            "start this Mac in Recovery, open Terminal, type `rdma_ctl enable`, restart: `thunder mac recovery` prints the steps",
        ),
        (RdmaState::Enabled, Some(generation)) if generation < Generation::Five && machine.is_mac() => add(
            Severity::Note,
            "no-thunderbolt-5",
            format!("RDMA is on, but the ports are {}: no device will appear", generation.name()),
            "nothing: this Mac takes part over TCP",
        ),
        (RdmaState::Enabled, _) if machine.devices.is_empty() && machine.is_mac() => add(
            Severity::Problem,
            "rdma-no-device",
            "RDMA is on, but ibv_devices lists no device".to_owned(),
            "restart this Mac; if the list stays empty, update macOS",
        ),
        (RdmaState::Unknown(answer), _) => add(
            Severity::Warning,
            "rdma-unknown",
            format!("rdma_ctl status says {answer:?}"),
            "run `rdma_ctl status` on this Mac; \"enabled\" is needed",
        ),
        (RdmaState::Missing, Some(Generation::Five)) if is_new_enough(machine) == Some(true) => {
            add(Severity::Warning, "rdma-missing", "there is no rdma_ctl".to_owned(), "update macOS")
        }
        _ => {}
    }
}

fn access(machine: &Machine, add: Add<'_>) {
    if machine.remote_login == Some(false) {
        let (name, remedy) = if machine.is_mac() {
            ("Remote Login", "System Settings, General, Sharing, Remote Login; or start `thunder up` here")
        } else {
            ("the ssh server", "sudo systemctl enable --now ssh; or start `thunder up` here")
        };
        let text = format!("{name} is off: no other machine can start ranks here over ssh");
        add(Severity::Warning, "remote-login-off", text, remedy);
    }
    if machine.firewall == Some(true) {
        add(
            Severity::Warning,
            "firewall-on",
            "the firewall is on: macOS asks on the screen before it lets thunder take connections".to_owned(),
            "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add /usr/local/bin/thunder --unblockapp /usr/local/bin/thunder",
        );
    }
}

fn ports(desk: &Desk, index: usize, add: Add<'_>) {
    let machine = &desk.machines[index];
    for port in &machine.ports {
        let is_machine = matches!(port.attached, Attached::Machine { .. });
        if is_machine && port.interface.is_none() {
            let remedy = if machine.is_mac() {
                "open System Settings, Network once, so that macOS makes the interface"
            } else {
                "sudo modprobe thunderbolt-net"
            };
            add(
                Severity::Problem,
                "no-interface",
                format!("port {} has no interface for IP", port.name),
                remedy,
            );
        }
        let away = port.interface.as_ref().filter(|name| machine.interface(name).is_none());
        if let Some(name) = away.filter(|_| is_machine && !machine.interfaces.is_empty()) {
            add(
                Severity::Problem,
                "interface-gone",
                format!("port {} has a cable, and its interface {name} is not there", port.name),
                "plug the cable in again, or restart this machine; then `thunder mac setup`",
            );
        }
        if port.attached == Attached::Unknown {
            add(
                Severity::Warning,
                "silent-port",
                format!("port {} has a link, and nothing has said its name", port.name),
                "wake the machine at the other end, or plug the cable in again",
            );
        }
    }
    for loose in desk.loose.iter().filter(|loose| loose.end.machine == index) {
        let words = desk.loose_words(&loose.to);
        let port = &desk.port(loose.end).name;
        let (severity, code, remedy) = match &loose.to {
            LooseKind::Stranger { .. } => {
                (Severity::Note, "stranger", "name that machine in --hosts, if it is to take part")
            }
            LooseKind::OneSided { .. } => {
                (Severity::Warning, "one-sided", "wake the other machine, or plug the cable in again")
            }
            LooseKind::Behind { .. } => {
                (Severity::Warning, "behind-dock", "use a port of the machine itself")
            }
            LooseKind::Itself => {
                (Severity::Warning, "loop", "pull the cable: it is of no use and can flood the bridge")
            }
        };
        add(severity, code, format!("port {port} leads to {words}"), remedy);
    }
}

fn network(desk: &Desk, index: usize, add: Add<'_>) {
    let machine = &desk.machines[index];
    let ends = desk.cables.iter().filter_map(|cable| cable.end_at(index));
    let interfaces: Vec<_> = ends.filter_map(|end| desk.interface(end)).collect();
    for interface in interfaces.iter().filter(|interface| interface.bridge.is_some()) {
        let bridge = interface.bridge.as_deref().unwrap_or_default();
        add(
            Severity::Problem,
            "in-bridge",
            format!(
                "{} is in {bridge}: RDMA needs it out, and a mesh of bridges sends packets in circles",
                interface.name
            ),
            "thunder mac setup",
        );
    }
    for interface in interfaces.iter().filter(|interface| interface.bridge.is_none()) {
        if !interface.addresses.iter().any(|address| !address.is_link_local()) {
            add(
                Severity::Problem,
                "no-address",
                format!("{} has no address of its own", interface.name),
                "thunder mac setup",
            );
        }
    }
    let kept = job::kept(machine);
    let is_set = |interface: &Interface| {
        interface.bridge.is_none() && interface.addresses.iter().any(|address| !address.is_link_local())
    };
    let is_kept = |interface: &Interface| {
        let holds =
            |end: &KeptEnd| end.interface == interface.name && interface.addresses.contains(&end.address);
        kept.iter().any(holds)
    };
    let lost: Vec<&str> = interfaces
        .iter()
        .filter(|interface| is_set(interface) && !is_kept(interface))
        .map(|interface| interface.name.as_str())
        .collect();
    if !lost.is_empty() && machine.job.possible {
        add(
            Severity::Note,
            "not-kept",
            format!(
                "no job of `thunder mac setup` keeps the address of {}: set by a command, it is gone after a restart",
                lost.join(" and ")
            ),
            "thunder mac setup",
        );
    }
    let has_lan = machine.interfaces.iter().any(|interface| {
        matches!(interface.kind, Kind::Ethernet | Kind::WiFi)
            && interface.active
            && !interface.addresses.is_empty()
    });
    if !has_lan {
        add(
            Severity::Note,
            "no-lan",
            "neither Ethernet nor Wi-Fi has an address".to_owned(),
            "machines without a cable between them need a common network: connect Ethernet or Wi-Fi",
        );
    }
    if !machine.job.loaded
        && machine.job.files.keys().any(|path| path.ends_with(".plist") || path.ends_with(".service"))
    {
        add(
            Severity::Warning,
            "job-not-loaded",
            "the job of an earlier setup is not loaded".to_owned(),
            "thunder mac setup",
        );
    }
}

fn power(machine: &Machine, add: Add<'_>) {
    for (source, minutes) in machine.power.sleep_minutes.iter().filter(|(_, minutes)| **minutes > 0) {
        add(
            Severity::Note,
            "sleeps",
            format!("sleeps after {minutes} min on {source}; not while `thunder serve` or `thunder up` runs"),
            "to keep it awake always: sudo pmset -a sleep 0",
        );
    }
    for (source, _) in machine.power.low_power.iter().filter(|(_, on)| **on) {
        add(
            Severity::Warning,
            "low-power",
            format!("Low Power Mode is on ({source}): the GPU runs slower"),
            "thunder mac tune",
        );
    }
}

fn cables(desk: &Desk, list: &mut Vec<Finding>) {
    for cable in &desk.cables {
        let machine = desk.machine(cable.ends[0]).name.clone();
        if let Some(text) = desk.slow_cable(cable) {
            let remedy =
                "use a cable with the Thunderbolt 5 mark, of 1 m or less unless it is active".to_owned();
            list.push(Finding {
                machine: machine.clone(),
                severity: Severity::Warning,
                code: "slow-cable",
                text,
                remedy,
            });
        }
        for end in cable.ends {
            let (owner, port) = (desk.machine(end), desk.port(end));
            let device = port.interface.as_deref().and_then(|name| owner.device_of(name));
            let both_on = cable.ends.iter().all(|end| desk.machine(*end).rdma == RdmaState::Enabled);
            if let Some(device) = device.filter(|device| device.active == Some(false) && both_on) {
                list.push(Finding {
                    machine: owner.name.clone(),
                    severity: Severity::Warning,
                    code: "rdma-port-down",
                    text: format!("{} is down, though port {} has a cable and RDMA is on at both ends", device.name, port.name),
                    remedy: "run `thunder mac setup`; if it stays down, use another port: users report that the port next \
                             to Ethernet of a Mac Studio carries no RDMA (exo, pull request 1551)"
                        .to_owned(),
                });
            }
        }
    }
    if desk.machines.len() > 1 && desk.cables.is_empty() {
        list.push(Finding {
            machine: desk.machines[0].name.clone(),
            severity: Severity::Problem,
            code: "no-cable",
            text: "no cable joins two of these machines".to_owned(),
            remedy: "connect them with Thunderbolt cables; without any, they work over Ethernet or Wi-Fi"
                .to_owned(),
        });
    }
}
