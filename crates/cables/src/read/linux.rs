//! A Linux machine's transcript: `/sys/bus/thunderbolt`, and `ip` in JSON.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde_json::Value;

use super::ifconfig::is_multicast;
use super::sections::Sections;
use super::thunderbolt::parse_speed;
use crate::machine::{Attached, Interface, Kind, Machine, Port, RdmaDevice, RdmaState, System};
use crate::network::Network;

/// Attributes of each device of the bus, by the device's name.
type Tree<'a> = BTreeMap<&'a str, BTreeMap<&'a str, &'a str>>;

pub(super) fn fill(machine: &mut Machine, sections: &Sections) {
    let kernel = sections.line("version").unwrap_or_default().to_owned();
    machine.system = System::Linux { kernel };
    machine.model = sections.line("model").map(str::to_owned);
    machine.chip =
        sections.line("chip").and_then(|line| line.split_once(':')).map(|(_, chip)| chip.trim().to_owned());
    let kibibytes =
        sections.line("memory").and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    machine.memory_bytes = kibibytes.and_then(|kibibytes| kibibytes.checked_mul(1024));
    machine.ip_over_thunderbolt = Some(sections.status("module") == Some(0));
    let nets = nets(sections.partial("nets"));
    machine.ports = ports(&tree(sections.partial("tree")), &nets);
    if sections.status("bus") != Some(0) {
        machine
            .unread
            .push("there is no /sys/bus/thunderbolt: no controller, or its driver is not loaded".to_owned());
    }
    let json = |name: &str, command: &str| match serde_json::from_str(sections.partial(name)) {
        Ok(Value::Array(rows)) => Ok(rows),
        _ => Err(sections.why_missing(name, command)),
    };
    match json("interfaces", "ip -json address") {
        Ok(rows) => machine.interfaces = rows.iter().filter_map(|row| interface(row, &nets)).collect(),
        Err(why) => machine.unread.push(why),
    }
    match json("routes", "ip -json route") {
        Ok(rows) => machine.routes = rows.iter().filter_map(route).collect(),
        Err(why) => machine.unread.push(why),
    }
    for row in json("neighbours", "ip -json neigh").unwrap_or_default() {
        let (Some(device), Some(mac)) = (row["dev"].as_str(), row["lladdr"].as_str()) else { continue };
        if let Some(interface) = machine.interfaces.iter_mut().find(|interface| interface.name == device) {
            let mac = mac.to_lowercase();
            if !interface.neighbours.contains(&mac) {
                interface.neighbours.push(mac);
            }
        }
    }
    for line in sections.partial("managed").lines() {
        let Some((device, state)) = line.trim().rsplit_once(':') else { continue };
        if let Some(interface) = machine.interfaces.iter_mut().find(|interface| interface.name == device) {
            interface.managed = state != "unmanaged";
        }
    }
    machine.devices = devices(sections.partial("rdma-devices"));
    machine.rdma = if machine.devices.is_empty() { RdmaState::Missing } else { RdmaState::Enabled };
    // Without systemd, nothing is said of ssh.
    let has_systemctl = sections.status("ssh").is_some_and(|status| status != 127);
    machine.remote_login =
        has_systemctl.then(|| sections.partial("ssh").lines().any(|line| line == "active"));
    machine.job.possible = sections.status("systemd") == Some(0);
    machine.job.loaded = sections.line("job") == Some("enabled");
}

/// Lines of `/sys/bus/thunderbolt/devices/DEVICE/ATTRIBUTE=VALUE`.
fn tree(text: &str) -> Tree<'_> {
    let mut tree = Tree::new();
    for line in text.lines() {
        let entry = line.split_once('=').and_then(|(path, value)| {
            let (path, attribute) = path.rsplit_once('/')?;
            Some((path.rsplit_once('/')?.1, attribute, value.trim()))
        });
        if let Some((device, attribute, value)) = entry {
            tree.entry(device).or_default().insert(attribute, value);
        }
    }
    tree
}

/// Interfaces by the service that they belong to: `…/devices/0-1.0/net/thunderbolt0`.
fn nets(text: &str) -> Vec<(String, String)> {
    let pair = |line: &str| {
        let (service, interface) = line.trim().split_once("/net/")?;
        Some((service.rsplit_once('/')?.1.to_owned(), interface.to_owned()))
    };
    text.lines().filter_map(pair).collect()
}

/// A device `D-R` that is directly at the host router `D-0` is a port's other end. A domain with
/// nothing attached is one idle port: how many sockets it has is not in the tree.
fn ports(tree: &Tree<'_>, nets: &[(String, String)]) -> Vec<Port> {
    let mut ports = Vec::new();
    for (host, attributes) in tree.iter().filter(|(name, _)| name.ends_with("-0")) {
        let domain = host.trim_end_matches('0');
        let uuid = attributes.get("unique_id").map(|uuid| uuid.to_uppercase());
        let generation = attributes.get("generation").and_then(|text| text.parse::<u32>().ok());
        let most_gbits = generation.map(|generation| match generation {
            // The kernel counts USB4 as 4; its two versions differ only in speed.
            0..=2 => 20,
            _ => 40,
        });
        let others: Vec<_> = tree
            .iter()
            .filter(|(name, _)| is_first_hop(name, domain))
            .map(|(name, peer)| port(name, peer, uuid.clone(), nets))
            .collect();
        if others.is_empty() {
            let idle = Port {
                name: (*host).to_owned(),
                uuid,
                interface: None,
                link_gbits: None,
                most_gbits,
                attached: Attached::Nothing,
            };
            ports.push(idle);
        } else {
            ports.extend(others);
        }
    }
    ports
}

/// `0-1` and `0-3` are at the host; `0-301` is behind `0-1`, and `0-1.0` is a service.
fn is_first_hop(name: &str, domain: &str) -> bool {
    let route = name.strip_prefix(domain).and_then(|route| u64::from_str_radix(route, 16).ok());
    route.is_some_and(|route| (1..0x100).contains(&route))
}

fn port(name: &str, peer: &BTreeMap<&str, &str>, uuid: Option<String>, nets: &[(String, String)]) -> Port {
    let lanes = |text: Option<&&str>| text.and_then(|text| text.parse::<u32>().ok()).unwrap_or(1);
    let gbits = |speed, count| {
        let (gbits, _) = parse_speed(peer.get(speed).copied().unwrap_or_default());
        gbits.map(|gbits| gbits.saturating_mul(lanes(peer.get(count))))
    };
    let link_gbits = gbits("rx_speed", "rx_lanes").into_iter().chain(gbits("tx_speed", "tx_lanes")).min();
    let service = format!("{name}.");
    let interface =
        nets.iter().find(|(of, _)| of.starts_with(&service)).map(|(_, interface)| interface.clone());
    let device_name = peer.get("device_name").map_or("a machine", |name| name).to_owned();
    // Only devices have a generation: a machine's router is not visible.
    let attached = match (peer.get("unique_id"), peer.contains_key("generation")) {
        (_, true) => Attached::Device { name: device_name },
        (Some(uuid), false) => Attached::Machine {
            uuid: uuid.to_uppercase(),
            name: device_name,
            model: peer.get("vendor_name").map(|vendor| (*vendor).to_owned()),
            via: None,
            offers_ip: interface.is_some(),
        },
        (None, false) => Attached::Unknown,
    };
    Port { name: name.to_owned(), uuid, interface, link_gbits, most_gbits: None, attached }
}

fn interface(row: &Value, nets: &[(String, String)]) -> Option<Interface> {
    let name = row["ifname"].as_str()?.to_owned();
    let flags: Vec<&str> = row["flags"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let kind = match (row["linkinfo"]["info_kind"].as_str(), row["link_type"].as_str()) {
        _ if nets.iter().any(|(_, interface)| *interface == name) => Kind::Thunderbolt,
        (Some("bridge"), _) => Kind::Bridge,
        _ if name.starts_with("wl") => Kind::WiFi,
        (None | Some("veth"), Some("ether")) => Kind::Ethernet,
        _ => Kind::Other,
    };
    let address = |entry: &Value| {
        let address: Ipv4Addr = entry["local"].as_str()?.parse().ok()?;
        Network::new(address, u8::try_from(entry["prefixlen"].as_u64()?).ok()?)
    };
    let number = |key: &str| row[key].as_u64().and_then(|number| u32::try_from(number).ok());
    let addresses = row["addr_info"].as_array().into_iter().flatten();
    Some(Interface {
        kind,
        up: flags.contains(&"UP"),
        active: flags.contains(&"LOWER_UP"),
        mtu: number("mtu")?,
        most_mtu: number("max_mtu").filter(|most| *most > 0),
        mac: row["address"].as_str().map(str::to_lowercase),
        addresses: addresses.filter_map(address).collect(),
        bridge: row["master"].as_str().map(str::to_owned),
        neighbours: Vec::new(),
        managed: false,
        name,
    })
}

fn route(row: &Value) -> Option<Network> {
    let network: Network = row["dst"].as_str()?.parse().ok()?;
    ((1..32).contains(&network.prefix) && !is_multicast(&network)).then(|| network.base())
}

/// Lines of `/sys/class/infiniband/NAME/ports/1/state=4: ACTIVE` and `…/gid_attrs/ndevs/0=IFACE`.
fn devices(text: &str) -> Vec<RdmaDevice> {
    let mut found: Vec<RdmaDevice> = Vec::new();
    for line in text.lines() {
        let Some((path, value)) = line.split_once('=') else { continue };
        let Some((_, rest)) = path.split_once("/infiniband/") else { continue };
        let Some((name, attribute)) = rest.split_once('/') else { continue };
        let index = found.iter().position(|device| device.name == name).unwrap_or_else(|| {
            found.push(RdmaDevice { name: name.to_owned(), interface: None, active: None });
            found.len() - 1
        });
        if attribute.ends_with("state") {
            found[index].active = Some(value.contains("ACTIVE"));
        } else {
            found[index].interface = Some(value.trim().to_owned());
        }
    }
    found
}
