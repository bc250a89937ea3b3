//! Repeats a setup after a restart: a launchd job on macOS, a systemd unit on Linux.
//!
//! On macOS a network service (`networksetup -createnetworkservice`) would be a weaker alternative:
//! a service's address is not used while its interface is in the bridge, no command removes an
//! interface from the bridge permanently, and changes of `preferences.plist` cannot be undone
//! exactly, because the file also has later changes. A job does not touch the user's network
//! settings, works in every network location, and is undone by removing its files. It runs at the
//! start, when network settings change, and every 30 s, because macOS puts the interfaces back into
//! the bridge when it configures networks again.

use std::fmt::Write as _;
use std::io::Read;

use crate::machine::{Machine, System};
use crate::network::Network;

/// The job's name for launchd.
pub const LABEL: &str = "org.thunderhead.cables";
/// The unit's name for systemd.
pub const UNIT: &str = "thunderhead-cables.service";
/// Seconds between two runs of the job.
const EVERY_S: u32 = 30;

/// Where the job's files are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paths {
    /// The folder that setup makes.
    pub folder: &'static str,
    /// The script.
    pub script: &'static str,
    /// launchd's or systemd's description of the job.
    pub unit: &'static str,
    /// The value of `THUNDER_CABLES` for this machine's ranks.
    pub cables: &'static str,
}

const MACOS: Paths = Paths {
    folder: "/Library/Application Support/Thunderhead",
    script: "/Library/Application Support/Thunderhead/cables.sh",
    unit: "/Library/LaunchDaemons/org.thunderhead.cables.plist",
    cables: "/Library/Application Support/Thunderhead/cables",
};
const LINUX: Paths = Paths {
    folder: "/etc/thunderhead",
    script: "/etc/thunderhead/cables.sh",
    unit: "/etc/systemd/system/thunderhead-cables.service",
    cables: "/etc/thunderhead/cables",
};

impl Paths {
    /// The paths on a system.
    pub fn of(system: &System) -> Option<Self> {
        match system {
            System::Macos { .. } => Some(MACOS),
            System::Linux { .. } => Some(LINUX),
            System::Unknown => None,
        }
    }
}

/// `THUNDER_CABLES` for ranks of this machine, from its setup; `None` without a setup.
pub fn installed_cables() -> Option<String> {
    const LONGEST_BYTES: u64 = 4096;
    let path = if cfg!(target_os = "macos") { MACOS.cables } else { LINUX.cables };
    // The root folder that the probe and setup use in tests.
    let root = std::env::var("THUNDER_ROOT").unwrap_or_default();
    let mut text = String::new();
    std::fs::File::open(root + path).ok()?.take(LONGEST_BYTES).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// One end of a cable, as the job keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptEnd {
    /// The interface.
    pub interface: String,
    /// Its address on the cable.
    pub address: Network,
    /// Bytes of a packet; `None` leaves the system's.
    pub mtu: Option<u32>,
}

/// The job's script: sets what is missing, and changes nothing else.
pub fn script(system: &System, ends: &[KeptEnd]) -> String {
    let body = if matches!(system, System::Linux { .. }) { LINUX_BODY } else { MACOS_BODY };
    let mut text = format!(
        "#!/bin/sh\n# Written by `thunder mac setup`, removed by `thunder mac undo`: gives the Thunderbolt\n\
         # cables their addresses after a restart.\n\n{body}\n"
    );
    for end in ends {
        let Network { address, prefix } = end.address;
        let mask = if matches!(system, System::Linux { .. }) {
            prefix.to_string()
        } else {
            end.address.netmask().to_string()
        };
        let mtu = end.mtu.map_or_else(|| "-".to_owned(), |mtu| mtu.to_string());
        let _ = writeln!(text, "cable {} {address} {mask} {mtu}", end.interface);
    }
    text
}

/// What the job of a machine holds. Lines that are not ours are left out.
pub fn kept(machine: &Machine) -> Vec<KeptEnd> {
    let script = Paths::of(&machine.system).and_then(|paths| machine.job.files.get(paths.script));
    script.map(|text| text.lines().filter_map(kept_end).collect()).unwrap_or_default()
}

/// Reads a line `cable INTERFACE ADDRESS MASK MTU` of [`script`].
fn kept_end(line: &str) -> Option<KeptEnd> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["cable", interface, address, mask, mtu] = words[..] else { return None };
    // The line is written again into a script that runs as root.
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if !interface.bytes().all(is_name) {
        return None;
    }
    let prefix = match mask.parse::<std::net::Ipv4Addr>() {
        Ok(mask) => u8::try_from(mask.to_bits().leading_ones()).ok()?,
        Err(_) => mask.parse().ok()?,
    };
    let mtu = if mtu == "-" { None } else { Some(mtu.parse().ok()?) };
    let address = Network::new(address.parse().ok()?, prefix)?;
    Some(KeptEnd { interface: interface.to_owned(), address, mtu })
}

const MACOS_BODY: &str = r#"cable() { # interface, address, mask, MTU or -
  ifconfig "$1" >/dev/null 2>&1 || return 0
  for bridge in $(ifconfig -l); do
    case $bridge in
      bridge*) if ifconfig "$bridge" | grep -q "member: $1 "; then ifconfig "$bridge" deletem "$1"; fi ;;
    esac
  done
  if [ "$4" != - ]; then ifconfig "$1" | grep -q "mtu $4\$" || ifconfig "$1" mtu "$4"; fi
  ifconfig "$1" | grep -q "inet $2 " || ifconfig "$1" inet "$2" netmask "$3" alias
  ifconfig "$1" up
}
"#;

const LINUX_BODY: &str = r#"cable() { # interface, address, prefix, MTU or -
  ip link show dev "$1" >/dev/null 2>&1 || return 0
  if command -v nmcli >/dev/null; then nmcli device set "$1" managed no; fi
  ip link set dev "$1" nomaster
  if [ "$4" != - ]; then ip link set dev "$1" mtu "$4"; fi
  ip link set dev "$1" up
  ip -4 address show dev "$1" | grep -q "inet $2/" || ip address add "$2/$3" dev "$1"
}
"#;

/// launchd's or systemd's description of the job.
pub fn unit(system: &System) -> String {
    match system {
        System::Linux { .. } => format!(
            "# Written by `thunder mac setup`, removed by `thunder mac undo`.\n[Unit]\n\
             Description=Addresses of Thunderbolt cables for Thunderhead\nAfter=network-pre.target\n\n\
             [Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/sh {}\n\n[Install]\n\
             WantedBy=multi-user.target\n",
            LINUX.script
        ),
        _ => format!(
            r#"<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<!-- Written by `thunder mac setup`, removed by `thunder mac undo`. -->
<plist version="1.0">
<dict>
  <key>Label</key><string>{LABEL}</string>
  <key>ProgramArguments</key>
  <array><string>/bin/sh</string><string>{}</string></array>
  <key>EnvironmentVariables</key>
  <dict><key>PATH</key><string>/usr/bin:/bin:/usr/sbin:/sbin</string></dict>
  <key>RunAtLoad</key><true/>
  <key>StartInterval</key><integer>{EVERY_S}</integer>
  <key>WatchPaths</key>
  <array><string>/Library/Preferences/SystemConfiguration</string></array>
</dict>
</plist>
"#,
            MACOS.script
        ),
    }
}
