//! The cables of a desk: ports matched by their UUIDs, the shape that they form, and its best use.

mod draw;
mod picture;
mod shape;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::machine::{Attached, Generation, Interface, Machine, Port, RdmaState};

pub use shape::{Shape, ShapeKind};

/// The machines of a desk with their cables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Desk {
    /// The machines, in the user's order.
    pub machines: Vec<Machine>,
    /// Cables between two of them.
    pub cables: Vec<Cable>,
    /// Cables that lead to no machine of the desk, or that only one end sees.
    pub loose: Vec<LooseEnd>,
}

/// A port of a machine, by their indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct End {
    /// Index in [`Desk::machines`].
    pub machine: usize,
    /// Index in [`Machine::ports`].
    pub port: usize,
}

/// A cable between two machines of the desk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cable {
    /// Its ends, in the order of the machines.
    pub ends: [End; 2],
    /// Gbit/s of the link; the slower end's, if they differ.
    pub gbits: Option<u32>,
    /// Whether its two ports are known. Two cables between the same two controllers of Linux
    /// machines cannot be distinguished before a packet has passed.
    pub certain: bool,
}

/// An end of a cable that leads to no port of the desk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LooseEnd {
    /// The port.
    pub end: End,
    /// Where it leads.
    pub to: LooseKind,
}

/// Where a loose end leads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum LooseKind {
    /// To a machine that is not of the desk.
    Stranger {
        /// Its name and model.
        name: String,
    },
    /// To a machine of the desk that does not see it.
    OneSided {
        /// The machine's index.
        machine: usize,
    },
    /// To a machine behind a dock.
    Behind {
        /// The dock.
        device: String,
    },
    /// To another port of the same machine.
    Itself,
}

impl Desk {
    /// Matches the ports of the machines.
    pub fn new(machines: Vec<Machine>) -> Self {
        let mut desk = Self { machines, cables: Vec::new(), loose: Vec::new() };
        desk.match_ports();
        desk
    }

    /// The machine of an end.
    pub fn machine(&self, end: End) -> &Machine {
        &self.machines[end.machine]
    }

    /// The port of an end.
    pub fn port(&self, end: End) -> &Port {
        &self.machines[end.machine].ports[end.port]
    }

    /// The interface of an end.
    pub fn interface(&self, end: End) -> Option<&Interface> {
        self.machine(end).interface(self.port(end).interface.as_deref()?)
    }

    /// `studio port 2`.
    pub fn name(&self, end: End) -> String {
        format!("{} port {}", self.machine(end).name, self.port(end).name)
    }

    fn ends(&self) -> impl Iterator<Item = End> + '_ {
        let ports = |(machine, found): (usize, &Machine)| {
            (0..found.ports.len()).map(move |port| End { machine, port })
        };
        self.machines.iter().enumerate().flat_map(ports).collect::<Vec<_>>().into_iter()
    }

    fn match_ports(&mut self) {
        let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
        for end in self.ends() {
            if let Some(uuid) = &self.port(end).uuid {
                owners.entry(uuid).or_insert(end.machine);
            }
        }
        // Ends by what they see: own domain, and the domain at the other end.
        let mut seen: BTreeMap<(&str, &str), Vec<End>> = BTreeMap::new();
        let mut loose = Vec::new();
        for end in self.ends() {
            let port = self.port(end);
            let Attached::Machine { uuid, name, model, via, .. } = &port.attached else { continue };
            if let Some(device) = via {
                loose.push(LooseEnd { end, to: LooseKind::Behind { device: device.clone() } });
            } else if owners.get(uuid.as_str()) == Some(&end.machine) {
                loose.push(LooseEnd { end, to: LooseKind::Itself });
            } else if owners.contains_key(uuid.as_str()) && port.uuid.is_some() {
                seen.entry((port.uuid.as_deref().unwrap_or_default(), uuid)).or_default().push(end);
            } else {
                let model = model.as_ref().map(|model| format!(" ({model})")).unwrap_or_default();
                loose.push(LooseEnd { end, to: LooseKind::Stranger { name: format!("{name}{model}") } });
            }
        }
        let mut cables = Vec::new();
        for ((own, other), ends) in &seen {
            let opposite = seen.get(&(*other, *own)).map(Vec::as_slice).unwrap_or_default();
            let machine = owners.get(other).copied().unwrap_or_default();
            let (pairs, alone) = self.pair(ends, opposite);
            loose.extend(alone.into_iter().map(|end| LooseEnd { end, to: LooseKind::OneSided { machine } }));
            // Each pair comes from both sides.
            cables.extend(pairs.into_iter().filter(|(ends, _)| ends[0] < ends[1]));
        }
        cables.sort();
        loose.sort_by_key(|loose| loose.end);
        self.cables = cables
            .into_iter()
            .map(|(ends, certain)| Cable { ends, gbits: self.link_gbits(ends), certain })
            .collect();
        self.loose = loose;
    }

    /// Pairs the ends of the cables between two domains: those whose packets have been seen first,
    /// the others in their order. Returns the ends that remain, too.
    fn pair(&self, ends: &[End], opposite: &[End]) -> (Vec<([End; 2], bool)>, Vec<End>) {
        if let ([one], [other]) = (ends, opposite) {
            return (vec![([*one, *other], true)], Vec::new());
        }
        let heard = |one: End, other: End| {
            let mac = self.interface(other).and_then(|interface| interface.mac.as_ref());
            self.interface(one).zip(mac).is_some_and(|(interface, mac)| interface.neighbours.contains(mac))
        };
        let mut free: Vec<End> = opposite.to_vec();
        let (mut pairs, mut rest) = (Vec::new(), Vec::new());
        for &end in ends {
            match free.iter().position(|other| heard(end, *other) || heard(*other, end)) {
                Some(index) => pairs.push(([end, free.remove(index)], true)),
                None => rest.push(end),
            }
        }
        let alone = rest.split_off(rest.len().min(free.len()));
        // The last remaining pair is known because all others are known.
        let certain = rest.len() == 1 && free.len() == 1 && ends.len() == opposite.len();
        pairs.extend(rest.into_iter().zip(free).map(|(one, other)| ([one, other], certain)));
        (pairs, alone)
    }

    fn link_gbits(&self, ends: [End; 2]) -> Option<u32> {
        ends.into_iter().filter_map(|end| self.port(end).link_gbits).min()
    }

    /// Cables between two machines, in the order in which both ends list them.
    pub fn between(&self, one: usize, other: usize) -> impl Iterator<Item = &Cable> {
        let pair = [one.min(other), one.max(other)];
        self.cables.iter().filter(move |cable| cable.machines() == pair)
    }

    /// Why the cable carries no RDMA; empty if it does.
    pub fn rdma_obstacles(&self, cable: &Cable) -> Vec<String> {
        let mut found = Vec::new();
        if let Some(gbits) =
            cable.gbits.filter(|gbits| self.both_macs(cable) && Generation::of(*gbits) < Generation::Five)
        {
            found
                .push(format!("the link runs at {gbits} Gbit/s, and macOS has RDMA over Thunderbolt 5 only"));
        }
        for end in cable.ends {
            let (machine, port) = (self.machine(end), self.port(end));
            let device = port.interface.as_deref().and_then(|interface| machine.device_of(interface));
            match (&machine.rdma, device) {
                (RdmaState::Disabled, _) => found.push(format!("RDMA is off on {}", machine.name)),
                (RdmaState::Missing | RdmaState::Unknown(_) | RdmaState::NotRead, _) => {
                    found.push(format!("{} has no RDMA over Thunderbolt", machine.name));
                }
                (RdmaState::Enabled, None) => found.push(format!("{} lists no RDMA device", self.name(end))),
                (RdmaState::Enabled, Some(device)) if device.active == Some(false) => {
                    found.push(format!("{} of {} is down", device.name, machine.name));
                }
                (RdmaState::Enabled, Some(_)) => {}
            }
        }
        let mut unique = BTreeSet::new();
        found.retain(|reason| unique.insert(reason.clone()));
        found
    }

    fn both_macs(&self, cable: &Cable) -> bool {
        cable.ends.iter().all(|end| self.machine(*end).is_mac())
    }

    /// A link slower than both machines' ports can be, as a sentence.
    pub fn slow_cable(&self, cable: &Cable) -> Option<String> {
        let gbits = cable.gbits?;
        let most = cable.ends.map(|end| self.machine(end).generation());
        let slower = most[0].zip(most[1]).map(|(one, other)| one.min(other))?;
        let [one, other] = cable.ends.map(|end| self.name(end));
        (Generation::of(gbits) < slower).then(|| {
            let cable = Generation::of(gbits).name();
            format!(
                "{one} → {other}: {gbits} Gbit/s where both ends have {}: a {cable} cable?",
                slower.name()
            )
        })
    }

    /// Ports with nothing attached.
    pub fn free_ports(&self, machine: usize) -> impl Iterator<Item = &Port> {
        let ports = self.machines.get(machine).map(|machine| machine.ports.as_slice()).unwrap_or_default();
        ports.iter().filter(|port| port.attached == Attached::Nothing)
    }
}

impl Cable {
    /// The machines' indices, the lower first.
    pub fn machines(&self) -> [usize; 2] {
        let [one, other] = self.ends.map(|end| end.machine);
        [one.min(other), one.max(other)]
    }

    /// The end at `machine`.
    pub fn end_at(&self, machine: usize) -> Option<End> {
        self.ends.into_iter().find(|end| end.machine == machine)
    }
}
