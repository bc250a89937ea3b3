//! `ifconfig -a`, `networksetup -listallhardwareports` and `netstat -rn` of macOS.

use std::net::Ipv4Addr;

use crate::machine::{Interface, Kind};
use crate::network::Network;

/// Pairs of hardware port and device, e.g. `Thunderbolt 1` and `en2`.
pub(crate) fn hardware_ports(text: &str) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let mut port = None;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("Hardware Port: ") {
            port = Some(name.to_owned());
        } else if let (Some(device), Some(name)) = (line.strip_prefix("Device: "), port.take()) {
            pairs.push((name, device.to_owned()));
        }
    }
    pairs
}

/// The kind of an interface, from its hardware port's name.
pub(crate) fn kind(hardware_port: Option<&str>, interface: &str) -> Kind {
    match hardware_port {
        Some(name) if thunderbolt_number(name).is_some() => Kind::Thunderbolt,
        Some("Wi-Fi" | "AirPort" | "WLAN") => Kind::WiFi,
        _ if interface.starts_with("bridge") => Kind::Bridge,
        // USB and Thunderbolt adapters have names of their makers.
        Some(_) if interface.starts_with("en") => Kind::Ethernet,
        _ => Kind::Other,
    }
}

/// The receptacle's number of a hardware port `Thunderbolt 3`. `Thunderbolt Bridge` has none.
pub(super) fn thunderbolt_number(hardware_port: &str) -> Option<&str> {
    let number = hardware_port.strip_prefix("Thunderbolt ")?;
    (!number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())).then_some(number)
}

/// The interfaces that `ifconfig -a` prints, with their bridges.
pub(super) fn interfaces(text: &str, hardware_ports: &[(String, String)]) -> Vec<Interface> {
    let mut found: Vec<Interface> = Vec::new();
    let mut members: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        if !line.starts_with([' ', '\t']) {
            found.extend(header(line, hardware_ports));
            continue;
        }
        let Some(interface) = found.last_mut() else { continue };
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("ether"), Some(mac)) => interface.mac = Some(mac.to_lowercase()),
            (Some("status:"), Some(status)) => interface.active = status == "active",
            (Some("inet"), Some(address)) => interface.addresses.extend(inet(address, words)),
            (Some("member:"), Some(member)) => members.push((member.to_owned(), interface.name.clone())),
            _ => {}
        }
    }
    for (member, bridge) in members {
        if let Some(interface) = found.iter_mut().find(|interface| interface.name == member) {
            interface.bridge = Some(bridge);
        }
    }
    found
}

/// `en2: flags=8963<UP,BROADCAST,…> mtu 1500`.
fn header(line: &str, hardware_ports: &[(String, String)]) -> Option<Interface> {
    let (name, rest) = line.split_once(": flags=")?;
    let flags = rest.split_once('<')?.1.split_once('>')?.0;
    let mtu = rest.split_once(" mtu ")?.1.split_whitespace().next()?.parse().ok()?;
    let port = hardware_ports.iter().find(|(_, device)| device == name).map(|(port, _)| port.as_str());
    Some(Interface {
        name: name.to_owned(),
        kind: kind(port, name),
        up: flags.split(',').any(|flag| flag == "UP"),
        active: false,
        mtu,
        most_mtu: None,
        mac: None,
        addresses: Vec::new(),
        bridge: None,
        neighbours: Vec::new(),
        managed: false,
    })
}

/// `inet 10.0.0.1 netmask 0xfffffffc broadcast …`, or with `--> PEER` for a tunnel.
fn inet<'a>(address: &str, mut words: impl Iterator<Item = &'a str>) -> Option<Network> {
    let address: Ipv4Addr = address.parse().ok()?;
    words.find(|word| *word == "netmask")?;
    let mask = u32::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    let prefix = mask.leading_ones();
    // A mask with a hole is no prefix.
    (prefix + mask.trailing_zeros() >= 32 || mask == u32::MAX)
        .then(|| Network::new(address, prefix as u8))
        .flatten()
}

/// The destinations of `netstat -rn -f inet`, without the default route, groups of hosts
/// (multicast) and single hosts.
pub(super) fn routes(text: &str) -> Vec<Network> {
    let destination = |line: &str| destination(line.split_whitespace().next()?);
    let is_network = |network: &Network| (1..32).contains(&network.prefix) && !is_multicast(network);
    text.lines().filter_map(destination).filter(is_network).collect()
}

pub(super) fn is_multicast(network: &Network) -> bool {
    network.address.octets()[0] >= 224
}

/// `192.168.1`, `10.84.72/30` and `127` leave out octets; the prefix then covers those given.
fn destination(word: &str) -> Option<Network> {
    let (address, prefix) = match word.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix.parse().ok()?)),
        None => (word, None),
    };
    let mut octets = [0u8; 4];
    let mut count = 0;
    for part in address.split('.') {
        *octets.get_mut(count)? = part.parse().ok()?;
        count += 1;
    }
    Network::new(octets.into(), prefix.unwrap_or(8 * count as u8)).map(|network| network.base())
}

/// `Valid MTU Range: 1280-9000`.
pub(super) fn most_mtu(text: &str) -> Option<u32> {
    text.split_once("Range: ")?.1.trim().split_once('-')?.1.trim().parse().ok()
}
