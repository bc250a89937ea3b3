//! The machines of a cluster: the speeds of each, alone and next to other nodes on its machine, and
//! the sets to try.

use thunder_cost::{Exchange, LinkSpeed, MachineSpeed, SharedSpeed, memory_rates, speed_among};
use thunder_engine::assembly::memory::DeviceMemory;

use super::Group;
use crate::layouts::Links;

/// Up to this many machines, all subsets are tried; with more, the fastest and the ones with the
/// most memory.
const MOST_FOR_SUBSETS: usize = 6;
/// Bytes of a message for comparing links: the activations of a token.
const SHORT_BYTES: f64 = 16384.0;

/// A machine of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its measured speeds while no other node of its machine computed.
    pub speed: MachineSpeed,
    /// Its speeds next to other nodes; `None` if it has its machine alone.
    pub shared: Option<Shared>,
    /// Bytes that a rank can use. Nodes of one machine report the same bytes.
    pub memory_bytes: u64,
    /// What else its device needs, and the limit of its buffers; `bytes` is not looked at.
    pub device_memory: DeviceMemory,
    /// The device of a rank on it, in words.
    pub device: String,
    /// Maximum prompt tokens of a step on the device.
    pub step_rows: usize,
}

/// A machine that a node shares with others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shared {
    /// The same number for all nodes of the machine that compute with the same kind of device.
    pub machine: usize,
    /// Number of memories that these nodes use in turn: the machine's GPUs, or 1.
    pub memories: usize,
    /// The node's speeds while all nodes of the machine compute.
    pub together: MachineSpeed,
}

/// The machines, and the links between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Machines {
    /// The machines.
    pub nodes: Vec<Node>,
    /// The link of each pair, by index.
    pub links: Vec<Vec<LinkSpeed>>,
}

impl Machines {
    /// Whether two nodes are on one machine, or are the same node.
    fn are_together(&self, one: usize, other: usize) -> bool {
        let machine_of = |node: usize| self.nodes[node].shared.map(|shared| shared.machine);
        one == other || (machine_of(one).is_some() && machine_of(one) == machine_of(other))
    }

    /// The nodes of `among` on the machine of `node`, including `node`.
    fn neighbours<'a>(&'a self, node: usize, among: &'a [usize]) -> impl Iterator<Item = &'a usize> {
        among.iter().filter(move |other| self.are_together(node, **other))
    }

    /// The speeds of the nodes of `among` on the machine of `node`.
    fn shared_speeds(&self, node: usize, among: &[usize]) -> Vec<SharedSpeed> {
        let of = |node: &usize| {
            let Node { speed, shared, .. } = self.nodes[*node];
            SharedSpeed { alone: speed, together: shared.map_or(speed, |shared| shared.together) }
        };
        self.neighbours(node, among).map(of).collect()
    }

    /// A node's speeds while the nodes of `busy`, including itself, compute.
    pub(super) fn speed_among(&self, node: usize, busy: &[usize]) -> MachineSpeed {
        let all: Vec<usize> = (0..self.nodes.len()).collect();
        let own = self.shared_speeds(node, &[node])[0];
        speed_among(&own, &self.shared_speeds(node, busy), &self.shared_speeds(node, &all))
    }

    /// The speeds and the weight of each node of a stage.
    pub(super) fn speeds_in_stage(&self, stage: &[usize], weights: &[f64]) -> Vec<MachineSpeed> {
        let all: Vec<usize> = (0..self.nodes.len()).collect();
        let speed = |node: &usize| {
            let (mut here, mut shares, mut own) = (Vec::new(), Vec::new(), 0);
            for (other, weight) in stage.iter().zip(weights) {
                if other == node {
                    own = here.len();
                }
                if self.are_together(*node, *other) {
                    here.push(*other);
                    shares.push(*weight);
                }
            }
            let all = self.shared_speeds(*node, &all);
            let rates = memory_rates(&self.shared_speeds(*node, &here), &shares, &all);
            let speed = MachineSpeed { memory_bytes_s: rates[own], ..self.speed_among(*node, stage) };
            // Hosts relay sums between GPUs of one machine, if each rank has one to itself.
            let memories = self.nodes[*node].shared.map_or(1, |shared| shared.memories);
            let relays = here.len() == stage.len() && stage.len() <= memories;
            let exchange = speed.exchange.map(|exchange| Exchange {
                relayed: exchange.relayed.filter(|_| relays),
                pieces: exchange.pieces.filter(|_| relays),
                ..exchange
            });
            MachineSpeed { exchange, ..speed }
        };
        stage.iter().map(speed).collect()
    }

    /// Bytes that a rank on a node can use next to ranks on the nodes of `others`.
    pub(super) fn memory_among(&self, node: usize, others: &[usize]) -> u64 {
        let memories = self.nodes[node].shared.map_or(1, |shared| shared.memories.max(1));
        let sharing = self.neighbours(node, others).count().max(1).div_ceil(memories);
        self.nodes[node].memory_bytes / sharing as u64
    }
}

/// The sets of machines to try: all sets of a few machines; otherwise for each size the fastest set
/// and the one with the most memory.
pub(super) fn subsets(machines: &Machines, of: &[usize]) -> Vec<Vec<usize>> {
    let sorted = |key: &dyn Fn(&Node) -> f64| {
        let mut sorted = of.to_vec();
        sorted.sort_by(|a, b| key(&machines.nodes[*b]).total_cmp(&key(&machines.nodes[*a])));
        sorted
    };
    let fastest = sorted(&|node| node.speed.memory_bytes_s);
    if of.len() <= MOST_FOR_SUBSETS {
        let set = |mask: usize| {
            let chosen = fastest.iter().enumerate().filter(|(place, _)| mask >> place & 1 == 1);
            chosen.map(|(_, node)| *node).collect()
        };
        return (1..1usize << fastest.len()).map(set).collect();
    }
    let roomiest = sorted(&|node| node.memory_bytes as f64);
    let sizes = |of: &[usize]| (1..=of.len()).map(|size| of[..size].to_vec()).collect::<Vec<_>>();
    let mut all = sizes(&fastest);
    all.extend(sizes(&roomiest).into_iter().map(|mut set| {
        set.sort_by_key(|node| fastest.iter().position(|known| known == node));
        set
    }));
    all.sort();
    all.dedup();
    all
}

/// Divides the machines into groups of about equal speed: the fastest go to different groups.
pub(super) fn divided(machines: &Machines, of: &[usize], groups: usize) -> Vec<Vec<usize>> {
    let mut sorted = of.to_vec();
    let speed = |node: &usize| machines.nodes[*node].speed.memory_bytes_s;
    sorted.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    let mut divided = vec![Vec::new(); groups];
    for (place, node) in sorted.into_iter().enumerate() {
        let (round, at) = (place / groups, place % groups);
        divided[if round % 2 == 0 { at } else { groups - 1 - at }].push(node);
    }
    divided
}

/// Orders the machines so that those of a stage have the fastest links with each other. The first
/// remaining machine begins a stage.
pub(super) fn near_together(machines: &Machines, nodes: &[usize], stages: usize) -> Vec<usize> {
    let size = nodes.len() / stages;
    let (mut left, mut ordered) = (nodes.to_vec(), Vec::new());
    while ordered.len() < nodes.len() && size > 1 && stages > 1 {
        let first = left.remove(0);
        let far = |node: &usize| machines.links[first][*node].seconds(SHORT_BYTES);
        // A stable sort: with equal links the order stays.
        left.sort_by(|a, b| far(a).total_cmp(&far(b)));
        ordered.push(first);
        ordered.extend(left.drain(..size - 1));
        left.sort_by_key(|node| nodes.iter().position(|known| known == node));
    }
    ordered.extend(left);
    ordered
}

/// The slowest links that a group uses: between all ranks of a stage, and from each rank to the
/// rank at the same place in the next stage.
pub(super) fn slowest_links(machines: &Machines, group: &Group) -> Links {
    let size = group.nodes.len() / group.stages;
    let mut links = Links { within: LinkSpeed::NONE, between: LinkSpeed::NONE };
    for (place, from) in group.nodes.iter().enumerate() {
        for (other, to) in group.nodes.iter().enumerate().skip(place + 1) {
            let slowest = match other - place {
                _ if other / size == place / size => &mut links.within,
                distance if distance == size => &mut links.between,
                _ => continue,
            };
            let link = &machines.links[*from][*to];
            slowest.latency_s = slowest.latency_s.max(link.latency_s);
            slowest.bytes_s = slowest.bytes_s.min(link.bytes_s);
        }
    }
    links
}
