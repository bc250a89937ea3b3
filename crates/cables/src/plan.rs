//! The plan of a setup: addresses for each cable, and the commands for each machine.

pub mod action;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::graph::{Cable, Desk, End};
use crate::job::{self, KeptEnd, Paths};
use crate::machine::{Interface, Kind, Machine, RdmaState};
use crate::network::{self, CABLE_PREFIX, Network};
pub use action::{Action, Effect};

/// Bytes of a packet where a Mac is at one end: more than macOS takes on no interface.
const JUMBO_MTU: u32 = 9000;
/// Bytes of a packet between Linux machines: the driver's most, 65,522, rounded down to words.
const LINUX_JUMBO_MTU: u32 = 65_520;

/// What a setup does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The cables with their networks.
    pub links: Vec<Link>,
    /// Actions by machine, in the desk's order. Machines without actions are left out.
    pub machines: Vec<MachinePlan>,
    /// What the user should know.
    pub notes: Vec<String>,
    /// Cables that get no network, each with the reason.
    pub left_out: Vec<String>,
    /// Machines whose own connection the setup would cut, each with an alternative. If there is
    /// one, no command may run.
    pub cuts: Vec<String>,
}

/// The actions of one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachinePlan {
    /// The machine's name.
    pub machine: String,
    /// Its actions, in order.
    pub actions: Vec<Action>,
}

/// A cable with its network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Link {
    /// The cable's ends.
    pub ends: [End; 2],
    /// Their addresses.
    pub addresses: [Network; 2],
    /// Whether the addresses were there before.
    pub kept: bool,
    /// Whether the cable carries RDMA.
    pub rdma: bool,
    /// Bytes of a packet that both ends get; `None` if theirs stay.
    pub mtu: Option<u32>,
    /// Gbit/s.
    pub gbits: Option<u32>,
}

impl Link {
    /// The cable's network.
    pub fn network(&self) -> Network {
        self.addresses[0].base()
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Without all networks, a collision could not be excluded.
    #[error("{machine}: {why}. Setup needs to know every network that is in use")]
    Unread {
        /// The machine.
        machine: String,
        /// What could not be read.
        why: String,
    },
    /// No cable joins two machines of the desk.
    #[error("no cable joins two of these machines: `thunder mac graph` shows what each port sees")]
    NoCable,
    /// Without its ports, the machine would seem to have no cables.
    #[error(
        "{machine}: {why}. Setup needs to know what each port sees: run `system_profiler SPThunderboltDataType -json` there"
    )]
    Ports {
        /// The machine.
        machine: String,
        /// What could not be read.
        why: String,
    },
    /// All private networks are in use.
    #[error("{0}")]
    NoNetwork(String),
}

impl Plan {
    /// The plan for a desk. A desk that is set up has a plan without actions.
    ///
    /// # Errors
    /// When networks in use are not known, or none is left, or there is no cable.
    pub fn new(desk: &Desk) -> Result<Self, PlanError> {
        for machine in &desk.machines {
            let lacks_networks = machine.interfaces.is_empty()
                || machine.unread.iter().any(|why| why.contains("route") || why.contains("netstat"));
            if let Some(why) = machine.unread.first().filter(|_| lacks_networks) {
                return Err(PlanError::Unread { machine: machine.name.clone(), why: why.clone() });
            }
        }
        for machine in &desk.machines {
            if let Some(why) = machine.ports_unread() {
                return Err(PlanError::Ports { machine: machine.name.clone(), why: why.to_owned() });
            }
        }
        if desk.cables.is_empty() {
            return Err(PlanError::NoCable);
        }
        let mut notes = Vec::new();
        let mut left_out = Vec::new();
        let links = links(desk, &mut notes, &mut left_out)?;
        let mut machines = Vec::new();
        let mut cuts = Vec::new();
        for (index, machine) in desk.machines.iter().enumerate() {
            let actions = actions(machine, index, &links, desk, &mut notes);
            cuts.extend(cut(machine, &actions));
            if !actions.is_empty() {
                machines.push(MachinePlan { machine: machine.name.clone(), actions });
            }
        }
        Ok(Self { links, machines, notes, left_out, cuts })
    }

    /// Whether nothing is left to do.
    pub fn is_done(&self) -> bool {
        self.machines.is_empty()
    }
}

/// The cables that can be used, with their networks.
fn links(desk: &Desk, notes: &mut Vec<String>, left_out: &mut Vec<String>) -> Result<Vec<Link>, PlanError> {
    let mut usable: Vec<&Cable> = Vec::new();
    for cable in &desk.cables {
        match cable.ends.into_iter().find(|end| desk.interface(*end).is_none()) {
            None => usable.push(cable),
            Some(end) => {
                let lacks = match (desk.machine(end).is_mac(), &desk.port(end).interface) {
                    (_, Some(interface)) => format!("its interface {interface} is not there"),
                    (true, None) => "networksetup lists no hardware port of its number".to_owned(),
                    (false, None) => {
                        "it has no interface: `sudo modprobe thunderbolt-net` makes one".to_owned()
                    }
                };
                left_out.push(format!("{} is left out: {lacks}", desk.name(end)));
            }
        }
    }
    let kept: Vec<Option<([Network; 2], bool)>> =
        usable.iter().map(|cable| kept_addresses(desk, cable)).collect();
    let mut used: Vec<Network> = desk.machines.iter().flat_map(Machine::used_networks).collect();
    // A job may have networks of missing interfaces, or of Macs that are not named.
    for (index, machine) in desk.machines.iter().enumerate() {
        let ends = usable.iter().filter_map(|cable| cable.end_at(index));
        let own: Vec<&str> =
            ends.filter_map(|end| desk.interface(end)).map(|interface| interface.name.as_str()).collect();
        let kept = job::kept(machine).into_iter().filter(|end| !own.contains(&end.interface.as_str()));
        used.extend(kept.map(|end| end.address));
    }
    let wanted = kept.iter().filter(|kept| kept.is_none()).count();
    let mut fresh = network::choose(wanted, &used).map_err(PlanError::NoNetwork)?.into_iter();
    let mut links = Vec::new();
    for (cable, kept) in usable.into_iter().zip(kept) {
        let fresh = || fresh.next().map(|network| (network.ends(), false));
        let Some((addresses, kept)) = kept.or_else(fresh) else { continue };
        if !cable.certain {
            notes.push(format!(
                "{} and {} have several cables, and which ports each joins is not known before packets pass: \
                 if the check over the cable fails, run setup again",
                desk.machine(cable.ends[0]).name,
                desk.machine(cable.ends[1]).name
            ));
        }
        let rdma = desk.rdma_obstacles(cable).is_empty();
        let mtu = if rdma { None } else { jumbo(desk, cable) };
        links.push(Link { ends: cable.ends, addresses, kept, rdma, mtu, gbits: cable.gbits });
    }
    Ok(links)
}

/// Addresses that the ends have already, in a network that is nowhere else on the desk; and whether
/// both have theirs.
fn kept_addresses(desk: &Desk, cable: &Cable) -> Option<([Network; 2], bool)> {
    let [one, other] = cable.ends.map(|end| desk.interface(end));
    let (one, other) = one.zip(other)?;
    let is_elsewhere = |network: &Network| {
        let all =
            desk.machines.iter().enumerate().flat_map(|(index, machine)| {
                machine.interfaces.iter().map(move |interface| (index, interface))
            });
        let own = |index: usize, interface: &Interface| {
            cable.ends.iter().any(|end| {
                end.machine == index && desk.port(*end).interface.as_deref() == Some(interface.name.as_str())
            })
        };
        let mut others = all.filter(|(index, interface)| !own(*index, interface));
        others.any(|(_, interface)| interface.addresses.iter().any(|address| address.overlaps(network)))
    };
    let is_own = |network: &Network| !network.is_link_local() && !is_elsewhere(network);
    // A longer route, for example of a VPN, would send packets for the other end elsewhere.
    let is_hidden = |side: usize, there: &Network| {
        let routes = desk.machine(cable.ends[side]).routes.iter();
        routes.into_iter().any(|route| route.prefix > there.prefix && route.contains(there.address))
    };
    let suits = |(own, theirs): &(Network, Network)| {
        let are_ends = own.base() == theirs.base() && own.address != theirs.address;
        let is_open = !is_hidden(0, theirs) && !is_hidden(1, own);
        are_ends && (16..=CABLE_PREFIX).contains(&own.prefix) && is_own(own) && is_open
    };
    let mut pairs =
        one.addresses.iter().flat_map(|own| other.addresses.iter().map(move |theirs| (*own, *theirs)));
    let whole = pairs.find(suits).map(|(own, theirs)| ([own, theirs], true));
    // A setup that ended in the middle has given one end its address: the other gets the second.
    let half = |side: usize, interface: &Interface| {
        let others: Vec<Network> = desk.machine(cable.ends[1 - side]).used_networks().collect();
        let begun = |own: &&Network| {
            let is_end = own.prefix == CABLE_PREFIX && own.ends()[side] == **own;
            is_end
                && !is_hidden(side, &own.ends()[1 - side])
                && is_own(own)
                && !others.iter().any(|used| used.overlaps(own))
        };
        interface.addresses.iter().find(begun).map(|own| (own.ends(), false))
    };
    whole.or_else(|| half(0, one)).or_else(|| half(1, other))
}

/// The MTU for a cable that carries data over TCP. Larger packets cost fewer interrupts for the
/// same bytes. RDMA does not use it.
fn jumbo(desk: &Desk, cable: &Cable) -> Option<u32> {
    let wanted =
        if cable.ends.iter().any(|end| desk.machine(*end).is_mac()) { JUMBO_MTU } else { LINUX_JUMBO_MTU };
    let interfaces = cable.ends.map(|end| desk.interface(end));
    let most = interfaces.iter().map(|interface| interface.and_then(|interface| interface.most_mtu));
    let most = most.collect::<Option<Vec<_>>>()?.into_iter().min()?;
    let mtu = wanted.min(most);
    (mtu > 1500).then_some(mtu)
}

/// What one machine lacks.
fn actions(
    machine: &Machine,
    index: usize,
    links: &[Link],
    desk: &Desk,
    notes: &mut Vec<String>,
) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut ends = Vec::new();
    for link in links {
        for (end, address) in link.ends.iter().zip(link.addresses).filter(|(end, _)| end.machine == index) {
            let Some(interface) = desk.interface(*end) else { continue };
            actions.extend(interface_actions(interface, address, link.mtu));
            ends.push(KeptEnd { interface: interface.name.clone(), address, mtu: link.mtu });
        }
    }
    let Some(paths) = Paths::of(&machine.system).filter(|_| !ends.is_empty()) else { return actions };
    // Cables that this setup does not see stay in the job: their Macs are not named or asleep, or
    // an interface is missing.
    let is_other = |end: &KeptEnd| {
        let is_own = ends.iter().any(|own| own.interface == end.interface);
        !is_own && !links.iter().any(|link| link.network().overlaps(&end.address))
    };
    let others: Vec<KeptEnd> = job::kept(machine).into_iter().filter(is_other).collect();
    let others_cables = kept_cables(machine, paths.cables, &others);
    ends.extend(others);
    let own_cables = machine_cables(machine, index, links, desk);
    let cables = [own_cables].into_iter().chain(others_cables).collect::<Vec<_>>().join(",");
    let mut files = vec![(paths.cables, format!("{cables}\n"), false)];
    if machine.job.possible {
        files.push((paths.script, job::script(&machine.system, &ends), true));
        files.push((paths.unit, job::unit(&machine.system), false));
    } else {
        notes.push(format!(
            "{}: nothing keeps the addresses over a restart, because there is no systemd",
            machine.name
        ));
    }
    if !machine.job.folder {
        actions.push(Action::MakeFolder { path: paths.folder.to_owned() });
    }
    for (path, content, executable) in files {
        let before = machine.job.files.get(path).cloned();
        if before.as_ref() != Some(&content) {
            actions.push(Action::WriteFile { path: path.to_owned(), content, before, executable });
        }
    }
    if machine.job.possible && !machine.job.loaded {
        actions.push(Action::StartJob);
    }
    actions
}

fn interface_actions(interface: &Interface, address: Network, mtu: Option<u32>) -> Vec<Action> {
    let name = || interface.name.clone();
    let mut actions = Vec::new();
    if interface.managed {
        actions.push(Action::Unmanage { interface: name() });
    }
    if let Some(bridge) = &interface.bridge {
        actions.push(Action::LeaveBridge { interface: name(), bridge: bridge.clone() });
    }
    if let Some(mtu) = mtu.filter(|mtu| *mtu != interface.mtu) {
        actions.push(Action::SetMtu { interface: name(), mtu, before: interface.mtu });
    }
    if !interface.up {
        actions.push(Action::BringUp { interface: name() });
    }
    if !interface.addresses.contains(&address) {
        actions.push(Action::AddAddress { interface: name(), address });
    }
    actions
}

/// Whether the actions cut their own connection: ssh over the Thunderbolt bridge whose members they
/// remove. A bridge that keeps Ethernet or Wi-Fi continues to work.
fn cut(machine: &Machine, actions: &[Action]) -> Option<String> {
    let bridge = machine.reached_over.as_deref()?;
    let leaves: Vec<&str> = actions
        .iter()
        .filter_map(|action| match action {
            Action::LeaveBridge { interface, bridge: left } if left == bridge => Some(interface.as_str()),
            _ => None,
        })
        .collect();
    let is_lan =
        |interface: &&Interface| matches!(interface.kind, Kind::Ethernet | Kind::WiFi) && interface.active;
    let mut lans = machine.interfaces.iter().filter(is_lan);
    if leaves.is_empty() || lans.clone().any(|interface| interface.bridge.as_deref() == Some(bridge)) {
        return None;
    }
    let other = lans.find_map(|interface| interface.addresses.iter().find(|own| !own.is_link_local()));
    let remedy = other.map_or_else(
        || "connect it to Ethernet or Wi-Fi, and name that address in --hosts".to_owned(),
        |own| format!("name it in --hosts by {}", own.address),
    );
    Some(format!(
        "{}: ssh reaches it over {bridge}, and setup takes {} out of {bridge}, which would cut the connection: {remedy}",
        machine.name,
        leaves.join(" and ")
    ))
}

/// The entries of `THUNDER_CABLES` for the ends that a job keeps, as an earlier setup has written
/// them.
fn kept_cables(machine: &Machine, path: &str, ends: &[KeptEnd]) -> Vec<String> {
    let text = machine.job.files.get(path).map(String::as_str).unwrap_or_default();
    let is_kept = |entry: &&str| {
        let network = entry.split('=').next().unwrap_or_default();
        ends.iter().any(|end| end.address.base().to_string() == network)
    };
    text.trim().split(',').filter(is_kept).map(str::to_owned).collect()
}

/// `THUNDER_CABLES` of one machine: its cables, with their devices where both ends have RDMA.
fn machine_cables(machine: &Machine, index: usize, links: &[Link], desk: &Desk) -> String {
    let own = links.iter().filter(|link| link.ends.iter().any(|end| end.machine == index));
    let entry = |link: &Link| {
        let interface =
            link.ends.iter().find(|end| end.machine == index).and_then(|end| desk.interface(*end));
        let device = interface.and_then(|interface| machine.device_of(&interface.name));
        match device.filter(|_| link.rdma && machine.rdma == RdmaState::Enabled) {
            Some(device) => format!("{}={}", link.network(), device.name),
            None => link.network().to_string(),
        }
    };
    let mut by_speed: Vec<&Link> = own.collect();
    by_speed.sort_by_key(|link| std::cmp::Reverse((link.rdma, link.gbits)));
    by_speed.into_iter().map(entry).collect::<Vec<_>>().join(",")
}

/// The actions of all machines by their names.
pub fn by_machine(plans: &[MachinePlan]) -> BTreeMap<&str, &[Action]> {
    plans.iter().map(|plan| (plan.machine.as_str(), plan.actions.as_slice())).collect()
}
