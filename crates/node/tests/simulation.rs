//! Whole clusters in one thread, with a virtual clock and a network that loses, delays and repeats
//! messages, cuts links, and stops and restarts nodes. Each run depends only on its seed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thunder_node::document::{Document, Member, ModelWish};
use thunder_node::id::NodeId;
use thunder_node::membership::{ChangeId, Event, Membership, Message, Output, Timing};
use thunder_node::report::NodeReport;
use thunder_testing::{Random, runs};

const TICK: Duration = Duration::from_millis(100);
const FAULTS_END: Duration = Duration::from_secs(15);
const END: Duration = Duration::from_secs(25);
/// Silence until a node counts as down, one tick, and the longest delay of a message.
const NOTICED_WITHIN: Duration = Duration::from_millis(2000);

/// Frequencies of faults, in thousandths.
#[derive(Debug, Clone, Copy)]
struct Weather {
    lost: u64,
    repeated: u64,
    late: u64,
}

struct Node {
    core: Option<Membership>,
    disk: Arc<Document>,
    boot: u64,
    /// Lost for good, including its disk.
    destroyed: bool,
    pending: BTreeMap<ChangeId, String>,
    down_at: BTreeMap<NodeId, Duration>,
}

struct World {
    random: Random,
    now: Duration,
    nodes: Vec<Node>,
    /// Messages in transit: time, a number that keeps the order, sender, receiver.
    way: BinaryHeap<Reverse<(Duration, u64, usize, usize)>>,
    bodies: BTreeMap<u64, Message>,
    sent: u64,
    /// Pairs that cannot reach each other.
    cut: BTreeSet<(usize, usize)>,
    weather: Weather,
    /// Settings whose safety was confirmed to somebody.
    promised: BTreeSet<String>,
    /// For each setting, the nodes that have had it on their disks.
    held: BTreeMap<String, BTreeSet<usize>>,
    removed: BTreeSet<NodeId>,
    changes: u64,
    events: u64,
}

fn id(index: usize) -> NodeId {
    NodeId([index as u8 + 1; 32])
}

fn index(id: NodeId) -> usize {
    usize::from(id.0[0]) - 1
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let count = 2 + random.below(5) as usize;
        let mut document = Document::default();
        for index in 0..count {
            let member = Member { name: index.to_string(), ..Member::default() };
            document.set_member(id(0), id(index), member).unwrap();
        }
        let disk = Arc::new(document);
        let node = |_| Node {
            core: None,
            disk: disk.clone(),
            boot: 0,
            destroyed: false,
            pending: BTreeMap::new(),
            down_at: BTreeMap::new(),
        };
        let weather =
            Weather { lost: random.below(200), repeated: random.below(200), late: random.below(100) };
        let mut world = Self {
            random,
            now: Duration::ZERO,
            nodes: (0..count).map(node).collect(),
            way: BinaryHeap::new(),
            bodies: BTreeMap::new(),
            sent: 0,
            cut: BTreeSet::new(),
            weather,
            promised: BTreeSet::new(),
            held: BTreeMap::new(),
            removed: BTreeSet::new(),
            changes: 0,
            events: 0,
        };
        (0..count).for_each(|index| world.start(index));
        world
    }

    fn chance(&mut self, thousandths: u64) -> bool {
        self.random.below(1000) < thousandths
    }

    fn any_node(&mut self) -> usize {
        self.random.below(self.nodes.len() as u64) as usize
    }

    fn running(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|index| self.nodes[*index].core.is_some()).collect()
    }

    fn start(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if node.destroyed || node.core.is_some() {
            return;
        }
        node.boot += 1;
        node.down_at.clear();
        let document = (*node.disk).clone();
        let mut core = Membership::new(id(index), node.boot, document, Timing::default());
        core.set_report(NodeReport { cores: node.boot as u32, ..NodeReport::default() });
        node.core = Some(core);
        for other in self.running().into_iter().filter(|other| *other != index) {
            self.connect(index, other);
        }
        self.carry_out(index);
    }

    fn connect(&mut self, a: usize, b: usize) {
        if self.cut.contains(&pair(a, b)) {
            return;
        }
        for (near, far) in [(a, b), (b, a)] {
            if let Some(core) = &mut self.nodes[near].core {
                core.connected(id(far));
            }
            self.carry_out(near);
        }
    }

    fn disconnect(&mut self, a: usize, b: usize) {
        for (near, far) in [(a, b), (b, a)] {
            let now = self.now;
            if let Some(core) = &mut self.nodes[near].core {
                core.disconnected(id(far), now);
            }
        }
    }

    fn stop(&mut self, index: usize) {
        self.nodes[index].core = None;
        // A change whose safety nobody was told may be lost with its node.
        self.nodes[index].pending.clear();
        for other in self.running() {
            self.disconnect(index, other);
        }
    }

    /// Carries out the outputs of a node's core.
    fn carry_out(&mut self, from: usize) {
        while let Some(output) = self.nodes[from].core.as_mut().and_then(Membership::poll) {
            match output {
                Output::Persist(document) => {
                    for number in 1..=self.changes {
                        let setting = number.to_string();
                        if document.setting(&setting).is_some() {
                            self.held.entry(setting).or_default().insert(from);
                        }
                    }
                    self.nodes[from].disk = document;
                }
                Output::Send(to, message) => self.post(from, index(to), message),
                Output::Event(Event::Spread(change)) => {
                    if let Some(setting) = self.nodes[from].pending.remove(&change) {
                        let held = self.held.get(&setting).map_or(0, BTreeSet::len);
                        assert!(held >= 2, "{setting} is promised and on {held} disks");
                        self.promised.insert(setting);
                    }
                }
                Output::Event(Event::Down(peer)) => {
                    let now = self.now;
                    self.nodes[from].down_at.insert(peer, now);
                }
                Output::Event(Event::Up(peer)) => {
                    self.nodes[from].down_at.remove(&peer);
                }
                Output::Event(_) => self.events += 1,
            }
        }
    }

    fn post(&mut self, from: usize, to: usize, message: Message) {
        let calm = self.now >= FAULTS_END;
        let copies = if !calm && self.chance(self.weather.repeated) { 2 } else { 1 };
        for _ in 0..copies {
            if !calm && self.chance(self.weather.lost) {
                continue;
            }
            let late = !calm && self.chance(self.weather.late);
            let ms = 1 + self.random.below(if late { 3000 } else { 40 });
            self.sent += 1;
            self.way.push(Reverse((self.now + Duration::from_millis(ms), self.sent, from, to)));
            self.bodies.insert(self.sent, message.clone());
        }
    }

    fn deliver(&mut self, until: Duration) {
        while let Some(Reverse((at, number, from, to))) = self.way.peek().copied() {
            if at > until {
                break;
            }
            self.way.pop();
            self.now = at;
            let message = self.bodies.remove(&number).unwrap();
            if self.cut.contains(&pair(from, to)) {
                continue;
            }
            if let Some(core) = &mut self.nodes[to].core {
                core.receive(id(from), message, at);
                self.carry_out(to);
            }
        }
        self.now = until;
    }

    /// A random action of users, machines or networks.
    fn disturb(&mut self) {
        let running = self.running();
        let count = self.nodes.len();
        let (a, b) = (self.any_node(), self.any_node());
        match self.random.below(100) {
            0..15 => {
                if self.cut.insert(pair(a, b)) {
                    self.disconnect(a, b);
                }
            }
            15..20 => {
                // A partition: some nodes on each side.
                let side = self.random.below(1 << count);
                let pairs = (0..count).flat_map(|a| (0..a).map(move |b| pair(a, b)));
                let between: Vec<_> = pairs.filter(|(a, b)| (side >> a & 1) != (side >> b & 1)).collect();
                for (a, b) in between {
                    if self.cut.insert((a, b)) {
                        self.disconnect(a, b);
                    }
                }
            }
            20..35 => {
                if self.cut.remove(&pair(a, b)) {
                    self.connect(a, b);
                }
            }
            35..42 if running.len() > 1 => self.stop(a),
            42..58 => self.start(a),
            58..60 if self.safe_to_destroy(a) => {
                self.stop(a);
                self.nodes[a].destroyed = true;
            }
            60..63 if a != b => self.change(a, None, |document| document.remove_member(&id(b))),
            _ => {
                self.changes += 1;
                let (name, author) = (format!("{}", self.changes), id(a));
                self.change(a, Some(self.changes.to_string()), |document| {
                    let wish = ModelWish {
                        model: "m".into(),
                        nodes: vec![author],
                        count: None,
                        ..ModelWish::default()
                    };
                    document.set_model(author, "shared", Some(wish))?;
                    document.set_setting(author, &name, Some("kept".into()))
                });
            }
        }
    }

    /// At most one node is lost for good, as promised; and none that holds a change of a node that
    /// was lost otherwise.
    fn safe_to_destroy(&self, index: usize) -> bool {
        self.nodes.len() > 2 && index < self.nodes.len() && self.nodes.iter().all(|node| !node.destroyed)
    }

    fn change(
        &mut self,
        index: usize,
        setting: Option<String>,
        change: impl FnOnce(&mut Document) -> Result<(), thunder_node::document::DocumentError>,
    ) {
        let Some(core) = &mut self.nodes[index].core else { return };
        if core.document().is_removed(&id(index)) {
            return;
        }
        if let (Ok(change), Some(setting)) = (core.change(change), setting) {
            self.nodes[index].pending.insert(change, setting);
        }
        self.carry_out(index);
    }

    fn tick(&mut self) {
        let now = self.now + TICK;
        self.deliver(now);
        for index in self.running() {
            if let Some(core) = &mut self.nodes[index].core {
                core.tick(now);
            }
            self.carry_out(index);
        }
        self.remember_removals();
    }

    fn remember_removals(&mut self) {
        for node in &self.nodes {
            let documents = node.core.iter().map(Membership::document).chain([&node.disk]);
            for document in documents {
                for removed in &self.removed {
                    // A document that has not heard of the removal may still list the member. One
                    // that has must not list it again; the digests' convergence shows this below.
                    assert!(!document.is_removed(removed) || document.member(removed).is_none());
                }
            }
        }
        let removed = self.nodes.iter().flat_map(|node| {
            (0..self.nodes.len()).map(id).filter(|id| node.disk.is_removed(id)).collect::<Vec<_>>()
        });
        self.removed.extend(removed.collect::<Vec<_>>());
    }

    /// Ends all faults, and lets the cluster settle.
    fn heal(&mut self) {
        let cut = std::mem::take(&mut self.cut);
        cut.into_iter().filter(|(a, b)| a != b).for_each(|(a, b)| self.connect(a, b));
        (0..self.nodes.len()).for_each(|index| self.start(index));
    }

    /// Checks the final state. Returns the number of confirmed settings that only removed or lost
    /// nodes have held.
    fn check(&self, seed: u64) -> usize {
        // A removed node receives nothing any more, so its document may be older.
        let members: Vec<&Membership> = self.nodes.iter().filter_map(|node| node.core.as_ref()).collect();
        let is_removed = |me: NodeId| members.iter().any(|core| core.document().is_removed(&me));
        let settled: Vec<&&Membership> = members.iter().filter(|core| !is_removed(core.me())).collect();
        let Some(first) = settled.first() else { return 0 };
        for core in &settled {
            assert_eq!(core.document(), first.document(), "seed {seed}: {:?}", core.me());
            for other in &settled {
                assert!(core.reaches(&other.me()), "seed {seed}: {:?} {:?}", core.me(), other.me());
                let report = core.peers().find(|(id, _)| *id == other.me()).map(|(_, peer)| &peer.report);
                if let Some(report) = report {
                    let boot = self.nodes[index(other.me())].boot as u32;
                    assert_eq!(report.as_ref().unwrap().cores, boot, "seed {seed}: an old report");
                }
            }
        }
        // A confirmed change survives the loss of one node, and as long as any node that has held
        // it is a member. A removed node receives and sends nothing any more, so its disk counts as
        // lost.
        let is_left = |node: &usize| settled.iter().any(|core| index(core.me()) == *node);
        let (mut at_stake, mut excused) = (0, 0);
        for setting in &self.promised {
            if self.removed.is_empty() || self.held[setting].iter().any(is_left) {
                let is_there = first.document().setting(setting).is_some();
                assert!(is_there, "seed {seed}: {setting} is lost, {:?} removed", self.removed);
                at_stake += 1;
            } else {
                excused += 1;
            }
        }
        assert_eq!(at_stake + excused, self.promised.len());
        excused
    }
}

#[test]
fn all_nodes_end_with_one_document_and_nothing_promised_is_lost() {
    let (began, count) = (Instant::now(), runs(400, 10_000));
    let (mut promised, mut messages, mut removed, mut excused) = (0, 0, 0, 0);
    // Confirmed changes that had to be kept, in runs with removals.
    let mut kept_with_removals = 0;
    for seed in 0..count as u64 {
        let mut world = World::new(seed);
        while world.now < FAULTS_END {
            world.tick();
            if world.chance(250) {
                world.disturb();
            }
        }
        world.heal();
        while world.now < END {
            world.tick();
        }
        let lost_with_removed = world.check(seed);
        excused += lost_with_removed;
        if !world.removed.is_empty() {
            kept_with_removals += world.promised.len() - lost_with_removed;
        }
        promised += world.promised.len();
        messages += world.sent;
        removed += world.removed.len();
    }
    // The runs are useless if nothing happened in them.
    assert!(promised > count * 3 && removed > count / 10, "{promised} {removed}");
    assert!(kept_with_removals > count && excused * 20 < promised, "{kept_with_removals} {excused}");
    println!(
        "{count} runs, {messages} messages, {promised} changes promised, {removed} removals, {kept_with_removals} \
         of the changes in runs with removals, {excused} held by removed or lost nodes alone, {:.1} s",
        began.elapsed().as_secs_f64()
    );
}

#[test]
fn a_dead_node_is_noticed_by_all_within_2_s_and_a_live_one_is_never_given_up() {
    let mut slowest = Duration::ZERO;
    for seed in 0..runs(200, 2_000) as u64 {
        let mut world = World::new(seed);
        world.weather = Weather { lost: 0, repeated: 0, late: 0 };
        while world.now < Duration::from_secs(4) {
            world.tick();
        }
        for node in &world.nodes {
            assert!(node.down_at.is_empty(), "seed {seed}: {:?}", node.down_at);
        }
        // Its machine is cut off, so no connection ends by itself.
        let (victim, died) = (world.any_node(), world.now);
        world.nodes[victim].core = None;
        while world.now < died + Duration::from_secs(4) {
            world.tick();
        }
        for index in world.running() {
            let down = &world.nodes[index].down_at;
            assert_eq!(down.keys().copied().collect::<Vec<_>>(), [id(victim)], "seed {seed}");
            slowest = slowest.max(down[&id(victim)] - died);
        }
    }
    println!("the slowest node noticed after {slowest:?}");
    assert!(slowest <= NOTICED_WITHIN, "{slowest:?}");
}

#[test]
fn both_sides_of_a_partition_take_changes_and_agree_afterwards() {
    let mut world = (0..).map(World::new).find(|world| world.nodes.len() == 4).unwrap();
    world.weather = Weather { lost: 0, repeated: 0, late: 0 };
    let run = |world: &mut World, seconds: u64| {
        let end = world.now + Duration::from_secs(seconds);
        while world.now < end {
            world.tick();
        }
    };
    run(&mut world, 2);
    for far in 1..world.nodes.len() {
        world.cut.insert((0, far));
        world.disconnect(0, far);
    }
    run(&mut world, 3);
    for (index, value) in [(0, "alone"), (1, "together")] {
        world.change(index, None, |document| document.set_setting(id(index), "both", Some(value.into())));
        world.change(index, None, |document| document.set_setting(id(index), value, Some(value.into())));
    }
    let core = |world: &World, index: usize| world.nodes[index].core.as_ref().unwrap().document().clone();
    run(&mut world, 2);
    assert_eq!(core(&world, 0).setting("together"), None);
    assert_eq!(core(&world, 2).setting("both"), Some("together"));
    world.heal();
    run(&mut world, 3);
    for index in 0..world.nodes.len() {
        let document = core(&world, index);
        assert_eq!(
            (document.setting("alone"), document.setting("together")),
            (Some("alone"), Some("together"))
        );
        // Equal counters: the larger key's write wins on every node.
        assert_eq!(document.setting("both"), Some("together"));
    }
}
