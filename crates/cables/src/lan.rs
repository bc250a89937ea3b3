//! The networks of this machine that are not cables: the fastest measured one first, then Ethernet
//! before Wi-Fi.

use std::path::Path;
use std::time::Duration;

use crate::machine::Kind;
use crate::network::Network;
use crate::read::ifconfig;
use crate::shell::{ProcessShell, Shell};

/// Time for `networksetup`, which takes some 50 ms.
const LIMIT: Duration = Duration::from_secs(5);

/// The kinds of this machine's interfaces.
#[derive(Debug, Clone, Default)]
pub struct Kinds {
    /// macOS's hardware ports and their devices.
    hardware: Vec<(String, String)>,
}

impl Kinds {
    /// Asks macOS by a command; on Linux reads `/sys/class/net`. Blocks for the time of a command.
    pub fn read() -> Self {
        if !cfg!(target_os = "macos") {
            return Self::default();
        }
        let listed = ProcessShell::local("this machine").run("networksetup -listallhardwareports", "", LIMIT);
        // Without an answer, the kind of every interface is unknown.
        Self { hardware: listed.map(|output| ifconfig::hardware_ports(&output.out)).unwrap_or_default() }
    }

    /// What the interface is.
    pub fn of(&self, interface: &str) -> Kind {
        if cfg!(target_os = "macos") {
            let port = self.hardware.iter().find(|(_, device)| device == interface);
            return ifconfig::kind(port.map(|(port, _)| port.as_str()), interface);
        }
        of_linux(&Path::new("/sys/class/net").join(interface))
    }
}

fn of_linux(folder: &Path) -> Kind {
    let driver = std::fs::read_link(folder.join("device/driver")).unwrap_or_default();
    let driver = driver.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if folder.join("wireless").exists() || folder.join("phy80211").exists() {
        Kind::WiFi
    } else if driver.contains("thunderbolt") {
        Kind::Thunderbolt
    } else if folder.join("bridge").exists() {
        Kind::Bridge
    } else if folder.join("device").exists() {
        Kind::Ethernet
    } else {
        Kind::Other
    }
}

/// `THUNDER_CABLES` for the ranks of a machine: the entries of its setup, then the measured
/// networks, then the networks on Ethernet, then those on Wi-Fi. `own` has the rank of each
/// measured network, 0 for the fastest. `None` if there is nothing to choose from.
pub fn preferred(
    cables: Option<&str>,
    own: impl IntoIterator<Item = (Option<usize>, Kind, Network)>,
) -> Option<String> {
    let mut lans: Vec<(usize, Kind, Network)> = own
        .into_iter()
        .filter(|(place, kind, network)| {
            let may_lead_there = place.is_some() || matches!(kind, Kind::Ethernet | Kind::WiFi);
            may_lead_there && !network.is_link_local() && network.prefix > 0
        })
        .map(|(place, kind, network)| (place.unwrap_or(usize::MAX), kind, network.base()))
        .collect();
    lans.sort();
    let mut entries: Vec<String> = cables.into_iter().map(str::to_owned).collect();
    let has_cables = !entries.is_empty();
    for (.., network) in lans {
        let network = network.to_string();
        // A machine that is in a network by both uses Ethernet.
        if !entries.contains(&network) {
            entries.push(network);
        }
    }
    (has_cables || entries.len() > 1).then(|| entries.join(","))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn cables_come_before_ethernet_and_ethernet_before_wifi() {
        let of = |cables: Option<&str>, own: &[(Kind, &str)]| {
            preferred(cables, own.iter().map(|(kind, network)| (None, *kind, network.parse().unwrap())))
        };
        let lans =
            [(Kind::WiFi, "192.168.1.7/24"), (Kind::Ethernet, "10.0.5.7/16"), (Kind::Other, "10.9.0.1/8")];
        let cables = "10.84.72.0/30=rdma_en2,10.84.72.4/30";
        assert_eq!(of(Some(cables), &lans).unwrap(), format!("{cables},10.0.0.0/16,192.168.1.0/24"));
        assert_eq!(of(None, &lans).unwrap(), "10.0.0.0/16,192.168.1.0/24");
        assert_eq!(of(None, &lans[..1]), None, "nothing to choose from");
        let both = [(Kind::WiFi, "192.168.1.7/24"), (Kind::Ethernet, "192.168.1.8/24")];
        assert_eq!(of(None, &both), None);
        assert_eq!(of(None, &[(Kind::Ethernet, "169.254.3.4/16"), (Kind::WiFi, "10.0.0.1/8")]), None);
    }

    #[test]
    fn a_network_that_was_measured_comes_before_those_that_were_not() {
        let own = [
            (None, Kind::Ethernet, "10.0.5.7/16"),
            (Some(1), Kind::WiFi, "192.168.1.7/24"),
            (Some(0), Kind::Other, "10.77.0.1/24"),
            (None, Kind::Other, "172.17.0.1/16"),
        ];
        let own = own.map(|(place, kind, network)| (place, kind, network.parse().unwrap()));
        assert_eq!(preferred(None, own).unwrap(), "10.77.0.0/24,192.168.1.0/24,10.0.0.0/16");
    }

    #[test]
    fn linux_tells_what_an_interface_is_by_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str| std::fs::create_dir_all(folder.path().join(name)).unwrap();
        ["wlan0/wireless", "wlan0/device", "eth0/device", "br0/bridge", "lo"].into_iter().for_each(make);
        make("thunderbolt0/device");
        std::os::unix::fs::symlink("/x/thunderbolt-net", folder.path().join("thunderbolt0/device/driver"))
            .unwrap();
        let kinds = ["wlan0", "eth0", "br0", "lo", "thunderbolt0", "gone"]
            .map(|name| of_linux(&folder.path().join(name)));
        let wanted = [Kind::WiFi, Kind::Ethernet, Kind::Bridge, Kind::Other, Kind::Thunderbolt, Kind::Other];
        assert_eq!(kinds, wanted);
    }
}
