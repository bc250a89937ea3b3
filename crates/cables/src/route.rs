//! The transport of each pair of machines: RDMA if both have it, then TCP over the cable, then
//! Ethernet, then Wi-Fi.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::Serialize;

use crate::graph::Desk;
use crate::machine::Kind;
use crate::network::Network;
use crate::plan::{Link, Plan};

/// The transport of a pair of machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// RDMA over the cable.
    Rdma,
    /// TCP over the cable.
    Cable,
    /// TCP over Ethernet.
    Ethernet,
    /// TCP over Wi-Fi.
    WiFi,
    /// No network has both.
    Nothing,
}

impl Way {
    /// The way in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rdma => "RDMA",
            Self::Cable => "TCP over the cable",
            Self::Ethernet => "Ethernet",
            Self::WiFi => "Wi-Fi",
            Self::Nothing => "no common network",
        }
    }
}

/// How one pair talks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Route {
    /// The machines' indices, the lower first.
    pub machines: [usize; 2],
    /// What they talk over.
    pub way: Way,
    /// Gbit/s of the cable.
    pub gbits: Option<u32>,
    /// The addresses that they use.
    pub addresses: Option<[Ipv4Addr; 2]>,
    /// Their RDMA devices, one for each cable.
    pub devices: [Vec<String>; 2],
    /// Why a cable does not use RDMA.
    pub why: Vec<String>,
}

impl Route {
    /// The transport, with the cable's speed.
    pub fn words(&self) -> String {
        let gbits = self.gbits.map(|gbits| format!(", {gbits} Gbit/s")).unwrap_or_default();
        format!("{}{gbits}", self.way.name())
    }
}

/// The route of every pair over the cables that have addresses now.
pub fn now(desk: &Desk) -> Vec<Route> {
    // Without a cable there is no plan, and none of its links.
    let mut links = Plan::new(desk).map(|plan| plan.links).unwrap_or_default();
    links.retain(|link| link.kept);
    routes(desk, &links)
}

/// The route of every pair.
pub fn routes(desk: &Desk, links: &[Link]) -> Vec<Route> {
    let count = desk.machines.len();
    let pairs = (0..count).flat_map(|one| (one + 1..count).map(move |other| [one, other]));
    pairs.map(|pair| route(desk, links, pair)).collect()
}

fn route(desk: &Desk, links: &[Link], machines: [usize; 2]) -> Route {
    let own: Vec<&Link> = links.iter().filter(|link| link.ends.map(|end| end.machine) == machines).collect();
    let rdma: Vec<&Link> = own.iter().copied().filter(|link| link.rdma).collect();
    let device = |link: &Link, side: usize| {
        let machine = desk.machine(link.ends[side]);
        let interface = desk.interface(link.ends[side])?;
        machine.device_of(&interface.name).map(|device| device.name.clone())
    };
    let devices = [0, 1].map(|side| rdma.iter().filter_map(|link| device(link, side)).collect::<Vec<_>>());
    let best = rdma.first().or(own.iter().max_by_key(|link| link.gbits));
    let why = if rdma.is_empty() {
        let cables = desk.between(machines[0], machines[1]);
        cables.flat_map(|cable| desk.rdma_obstacles(cable)).collect()
    } else {
        Vec::new()
    };
    if let Some(link) = best {
        let way = if rdma.is_empty() { Way::Cable } else { Way::Rdma };
        let addresses = Some(link.addresses.map(|network| network.address));
        return Route { machines, way, gbits: link.gbits, addresses, devices, why };
    }
    let found = [(Kind::Ethernet, Way::Ethernet), (Kind::WiFi, Way::WiFi)]
        .into_iter()
        .find_map(|(kind, way)| common(desk, machines, kind).map(|addresses| (way, addresses)));
    let (way, addresses) = found.map_or((Way::Nothing, None), |(way, addresses)| (way, Some(addresses)));
    Route { machines, way, gbits: None, addresses, devices: [Vec::new(), Vec::new()], why }
}

/// Addresses of two machines in one network; `kind` is that of the slower interface.
fn common(desk: &Desk, machines: [usize; 2], kind: Kind) -> Option<[Ipv4Addr; 2]> {
    let of = |machine: usize| lan_addresses(desk, machine);
    of(machines[0]).into_iter().find_map(|(own_kind, own)| {
        let other = of(machines[1]).into_iter().find(|(other_kind, other)| {
            own_kind.max(*other_kind) == kind && own.base() == other.base() && own.address != other.address
        });
        other.map(|(_, other)| [own.address, other.address])
    })
}

/// A machine's addresses on Ethernet and Wi-Fi.
fn lan_addresses(desk: &Desk, machine: usize) -> Vec<(Kind, Network)> {
    let interfaces = desk.machines[machine].interfaces.iter();
    let lan = interfaces
        .filter(|interface| matches!(interface.kind, Kind::Ethernet | Kind::WiFi) && interface.active);
    let mut found: Vec<_> = lan
        .flat_map(|interface| interface.addresses.iter().map(|address| (interface.kind, *address)))
        .filter(|(_, address)| !address.is_link_local())
        .collect();
    found.sort_by_key(|(kind, _)| *kind);
    found
}

/// The networks from which ranks choose a link to each other: cables, the fastest first, then
/// Ethernet, then networks with a machine on Wi-Fi.
pub fn preferred_networks(desk: &Desk, links: &[Link]) -> Vec<Network> {
    let mut cables: Vec<&Link> = links.iter().collect();
    cables.sort_by_key(|link| Reverse(link.gbits));
    let mut found: Vec<Network> = cables.into_iter().map(Link::network).collect();
    let lans = common_networks(desk);
    for is_wired in [true, false] {
        found.extend(
            lans.iter()
                .filter(|(_, lan)| lan.machines > 1 && lan.is_wired == is_wired)
                .map(|(network, _)| *network),
        );
    }
    found
}

/// A network that machines are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Lan {
    machines: usize,
    /// Whether all of them are in it by Ethernet.
    is_wired: bool,
}

fn common_networks(desk: &Desk) -> BTreeMap<Network, Lan> {
    let mut lans: BTreeMap<Network, Lan> = BTreeMap::new();
    for machine in 0..desk.machines.len() {
        let mut own: BTreeMap<Network, bool> = BTreeMap::new();
        for (kind, address) in lan_addresses(desk, machine) {
            // A machine that is in a network by both uses Ethernet.
            *own.entry(address.base()).or_default() |= kind == Kind::Ethernet;
        }
        for (network, is_wired) in own {
            let lan = lans.entry(network).or_insert(Lan { machines: 0, is_wired: true });
            lan.machines += 1;
            lan.is_wired &= is_wired;
        }
    }
    lans
}

/// For each machine, the address at which all others reach it: in the network that most machines
/// are in, Ethernet before Wi-Fi. `None` for a machine that is in none.
pub fn common_addresses(desk: &Desk) -> Vec<Option<Ipv4Addr>> {
    let own: Vec<_> = (0..desk.machines.len()).map(|machine| lan_addresses(desk, machine)).collect();
    let best = common_networks(desk).into_iter().max_by_key(|(_, lan)| *lan).map(|(network, _)| network);
    let in_best = |addresses: &Vec<(Kind, Network)>| {
        addresses.iter().find(|(_, address)| Some(address.base()) == best).map(|(_, address)| address.address)
    };
    own.iter().map(in_best).collect()
}
