//! One change of one machine: its commands, how it is undone, and whether it is in effect.

use serde::{Deserialize, Serialize};

use crate::job::{LABEL, Paths, UNIT};
use crate::machine::{Machine, System};
use crate::network::Network;

/// One change of one machine, with the data for undoing it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Action {
    /// Removes an interface from its bridge.
    LeaveBridge {
        /// The interface.
        interface: String,
        /// The bridge.
        bridge: String,
    },
    /// Stops NetworkManager from giving an interface addresses of its own.
    Unmanage {
        /// The interface.
        interface: String,
    },
    /// Brings an interface up.
    BringUp {
        /// The interface.
        interface: String,
    },
    /// Adds an address, next to those that are there.
    AddAddress {
        /// The interface.
        interface: String,
        /// The address.
        address: Network,
    },
    /// Sets the size of packets.
    SetMtu {
        /// The interface.
        interface: String,
        /// Bytes.
        mtu: u32,
        /// Bytes before.
        before: u32,
    },
    /// Makes a folder.
    MakeFolder {
        /// Its path.
        path: String,
    },
    /// Writes a file.
    WriteFile {
        /// Its path.
        path: String,
        /// What it then holds.
        content: String,
        /// Its previous content; `None` if it did not exist.
        before: Option<String>,
        /// Whether it is a program.
        executable: bool,
    },
    /// Gives the job to launchd or systemd.
    StartJob,
    /// Sets the memory that the GPU may hold (`iogpu.wired_limit_mb`).
    SetGpuLimit {
        /// MiB; 0 is the system's default.
        mib: u64,
        /// MiB before.
        before: u64,
    },
    /// Sets Low Power Mode.
    SetLowPower {
        /// `AC Power` or `Battery Power`, as `pmset` names it.
        source: String,
        /// Whether it is on.
        on: bool,
    },
}

/// Whether a change is in effect on a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// It is, so that it can be undone.
    Yes,
    /// It is not: it was never made, or has been undone.
    No,
    /// The interface is missing, so this is unknown.
    Gone(String),
    /// Somebody has set a third value since.
    Changed(String),
}

/// A command for `sh`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShellCommand {
    /// The words after `sudo`, quoted for `sh`. `$root` is a prefix of files' paths, which is empty
    /// outside of tests.
    pub script: String,
    /// What it reads.
    pub input: Option<String>,
}

impl ShellCommand {
    /// For people: without the prefix that only tests have.
    pub fn shown(&self) -> String {
        format!("sudo {}", self.script.replace("\"$root\"", ""))
    }
}

impl Action {
    /// The commands that make the change.
    pub fn commands(&self, system: &System) -> Vec<ShellCommand> {
        self.both_ways(system, true)
    }

    /// The commands that undo it.
    pub fn undo_commands(&self, system: &System) -> Vec<ShellCommand> {
        let mut commands = self.both_ways(system, false);
        commands.reverse();
        commands
    }

    fn both_ways(&self, system: &System, forth: bool) -> Vec<ShellCommand> {
        let linux = matches!(system, System::Linux { .. });
        let pick = |yes: &'static str, no: &'static str| if forth { yes } else { no };
        let one = |script: String| vec![ShellCommand { script, input: None }];
        match self {
            Self::LeaveBridge { interface, bridge } if linux => {
                let master = if forth { "nomaster".to_owned() } else { format!("master {bridge}") };
                one(format!("ip link set dev {interface} {master}"))
            }
            Self::LeaveBridge { interface, bridge } => {
                one(format!("ifconfig {bridge} {} {interface}", pick("deletem", "addm")))
            }
            Self::Unmanage { interface } => {
                one(format!("nmcli device set {interface} managed {}", pick("no", "yes")))
            }
            Self::BringUp { interface } if linux => {
                one(format!("ip link set dev {interface} {}", pick("up", "down")))
            }
            Self::BringUp { interface } => one(format!("ifconfig {interface} {}", pick("up", "down"))),
            Self::AddAddress { interface, address } if linux => {
                one(format!("ip address {} {address} dev {interface}", pick("add", "del")))
            }
            Self::AddAddress { interface, address } => one(if forth {
                let netmask = address.netmask();
                format!("ifconfig {interface} inet {} netmask {netmask} alias", address.address)
            } else {
                format!("ifconfig {interface} inet {} -alias", address.address)
            }),
            Self::SetMtu { interface, mtu, before } => {
                let mtu = if forth { mtu } else { before };
                one(if linux {
                    format!("ip link set dev {interface} mtu {mtu}")
                } else {
                    format!("ifconfig {interface} mtu {mtu}")
                })
            }
            Self::MakeFolder { path } => one(format!("{} {}", pick("mkdir -p", "rmdir"), rooted(path))),
            Self::WriteFile { path, content, before, executable } => {
                let content = if forth { Some(content) } else { before.as_ref() };
                content.map_or_else(
                    || one(format!("rm -f {}", rooted(path))),
                    |content| write(path, content, *executable),
                )
            }
            Self::StartJob if linux => one(format!("systemctl {} --now {UNIT}", pick("enable", "disable"))),
            Self::StartJob => {
                let unit = Paths::of(system).map(|paths| rooted(paths.unit)).unwrap_or_default();
                one(if forth {
                    format!("launchctl bootstrap system {unit}")
                } else {
                    format!("launchctl bootout system/{LABEL}")
                })
            }
            Self::SetGpuLimit { mib, before } => {
                one(format!("sysctl iogpu.wired_limit_mb={}", if forth { mib } else { before }))
            }
            Self::SetLowPower { source, on } => {
                let flag = if source.starts_with("Battery") { "-b" } else { "-c" };
                one(format!("pmset {flag} lowpowermode {}", u8::from(*on == forth)))
            }
        }
    }

    /// Whether the change is in effect.
    pub fn effect(&self, machine: &Machine) -> Effect {
        let interface = |name: &str| machine.interface(name).ok_or_else(|| Effect::Gone(name.to_owned()));
        let found = match self {
            Self::LeaveBridge { interface: name, bridge } => {
                interface(name).map(|found| yes(found.bridge.as_ref() != Some(bridge)))
            }
            Self::Unmanage { interface: name } => interface(name).map(|found| yes(!found.managed)),
            Self::BringUp { interface: name } => interface(name).map(|found| yes(found.up)),
            Self::AddAddress { interface: name, address } => {
                interface(name).map(|found| yes(found.addresses.contains(address)))
            }
            Self::SetMtu { interface: name, mtu, before } => interface(name).map(|found| match found.mtu {
                now if now == *mtu => Effect::Yes,
                now if now == *before => Effect::No,
                now => Effect::Changed(format!("the MTU of {name} is {now} now")),
            }),
            Self::MakeFolder { .. } => Ok(yes(machine.job.folder)),
            // A file that is incomplete after an interrupted write counts as written.
            Self::WriteFile { path, before, .. } => Ok(yes(machine.job.files.get(path) != before.as_ref())),
            Self::StartJob => Ok(yes(machine.job.loaded)),
            Self::SetGpuLimit { mib, before } => Ok(match machine.gpu_limit_mib {
                Some(now) if now == *mib => Effect::Yes,
                Some(now) if now != *before => Effect::Changed(format!("iogpu.wired_limit_mb is {now} now")),
                _ => Effect::No,
            }),
            Self::SetLowPower { source, on } => Ok(yes(machine.power.low_power.get(source) == Some(on))),
        };
        found.unwrap_or_else(|gone| gone)
    }

    /// Updates `machine`: the change has been undone.
    pub fn revert(&self, machine: &mut Machine) {
        let job = &mut machine.job;
        match self {
            Self::MakeFolder { .. } => job.folder = false,
            Self::WriteFile { path, before: Some(before), .. } => {
                job.files.insert(path.clone(), before.clone());
            }
            Self::WriteFile { path, before: None, .. } => {
                job.files.remove(path);
            }
            Self::StartJob => job.loaded = false,
            Self::SetGpuLimit { before, .. } => machine.gpu_limit_mib = Some(*before),
            Self::SetLowPower { source, on } => {
                machine.power.low_power.insert(source.clone(), !on);
            }
            Self::LeaveBridge { interface: name, .. }
            | Self::Unmanage { interface: name }
            | Self::BringUp { interface: name }
            | Self::AddAddress { interface: name, .. }
            | Self::SetMtu { interface: name, .. } => {
                let Some(found) = machine.interfaces.iter_mut().find(|found| found.name == *name) else {
                    return;
                };
                match self {
                    Self::LeaveBridge { bridge, .. } => found.bridge = Some(bridge.clone()),
                    Self::Unmanage { .. } => found.managed = true,
                    Self::BringUp { .. } => found.up = false,
                    Self::AddAddress { address, .. } => found.addresses.retain(|own| own != address),
                    Self::SetMtu { before, .. } => found.mtu = *before,
                    _ => {}
                }
            }
        }
    }

    /// Why the change is made, in a few words.
    pub fn purpose(&self) -> String {
        match self {
            Self::LeaveBridge { interface, bridge } => format!("take {interface} out of {bridge}"),
            Self::Unmanage { interface } => format!("keep NetworkManager off {interface}"),
            Self::BringUp { interface } => format!("bring {interface} up"),
            Self::AddAddress { interface, address } => format!("give {interface} the address {address}"),
            Self::SetMtu { interface, mtu, before } => {
                format!("packets of {mtu} bytes on {interface}, not {before}")
            }
            Self::MakeFolder { path } => format!("make {path}"),
            Self::WriteFile { path, before: None, .. } => format!("write {path}"),
            Self::WriteFile { path, .. } => format!("rewrite {path}"),
            Self::StartJob => "keep this over a restart".to_owned(),
            Self::SetGpuLimit { mib, .. } => format!("let the GPU hold {mib} MiB until the next restart"),
            Self::SetLowPower { source, on } => {
                format!("turn Low Power Mode {} on {source}", if *on { "on" } else { "off" })
            }
        }
    }
}

fn yes(is: bool) -> Effect {
    if is { Effect::Yes } else { Effect::No }
}

fn write(path: &str, content: &str, executable: bool) -> Vec<ShellCommand> {
    let path = rooted(path);
    let mode = if executable { 755 } else { 644 };
    vec![
        ShellCommand { script: format!("tee {path} >/dev/null"), input: Some(content.to_owned()) },
        ShellCommand { script: format!("chmod {mode} {path}"), input: None },
    ]
}

/// A path for `sh`, behind the prefix of tests.
fn rooted(path: &str) -> String {
    format!("\"$root\"{}", quoted(path))
}

/// A word for `sh`.
pub fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-:=@%+,".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
