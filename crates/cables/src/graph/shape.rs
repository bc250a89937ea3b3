//! The shape of the cables, and its best use.

use std::collections::BTreeSet;

use serde::Serialize;

use super::Desk;

/// Maximum number of machines for the search of a path through all of them, which tries all orders.
const MOST_FOR_A_PATH: usize = 9;

/// What the cables form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// The kind.
    pub kind: ShapeKind,
    /// Indices of the machines, in an order in which neighbours have a cable where there is one.
    pub order: Vec<usize>,
    /// Pairs of machines without a cable that a mesh would need.
    pub missing: Vec<[usize; 2]>,
    /// Groups of machines that cables join, if there are several.
    pub islands: Vec<Vec<usize>>,
    /// Pairs with more than one cable.
    pub doubled: Vec<[usize; 2]>,
}

/// Kinds of shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShapeKind {
    /// One machine.
    Alone,
    /// Two machines with a cable.
    Pair,
    /// Each machine has a cable to each other.
    Mesh,
    /// Each machine has cables to two others, in a circle.
    Ring,
    /// Each machine has cables to the ones before and after it.
    Line,
    /// All machines are joined in another shape.
    Mixed,
    /// Some machines are not joined.
    Islands,
}

impl ShapeKind {
    /// The kind in a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Alone => "one machine",
            Self::Pair => "a pair",
            Self::Mesh => "a mesh",
            Self::Ring => "a ring",
            Self::Line => "a line",
            Self::Mixed => "neither a mesh, a ring nor a line",
            Self::Islands => "not one group",
        }
    }
}

impl Desk {
    /// What the cables form.
    pub fn shape(&self) -> Shape {
        let count = self.machines.len();
        let joined: BTreeSet<[usize; 2]> = self.cables.iter().map(super::Cable::machines).collect();
        let degree = |machine: usize| joined.iter().filter(|pair| pair.contains(&machine)).count();
        let pairs = (0..count).flat_map(|one| (one + 1..count).map(move |other| [one, other]));
        let missing: Vec<_> = pairs.filter(|pair| !joined.contains(pair)).collect();
        let doubled =
            joined.iter().copied().filter(|pair| self.between(pair[0], pair[1]).count() > 1).collect();
        let islands = islands(count, &joined);
        let kind = match count {
            0 | 1 => ShapeKind::Alone,
            _ if islands.len() > 1 => ShapeKind::Islands,
            2 => ShapeKind::Pair,
            _ if missing.is_empty() => ShapeKind::Mesh,
            _ if (0..count).all(|machine| degree(machine) == 2) => ShapeKind::Ring,
            _ if joined.len() == count - 1 && (0..count).all(|machine| degree(machine) <= 2) => {
                ShapeKind::Line
            }
            _ => ShapeKind::Mixed,
        };
        let order = path(count, &joined, kind == ShapeKind::Ring || kind == ShapeKind::Mixed);
        Shape { kind, order, missing, islands, doubled }
    }

    /// The best use of the cables, and the effect of one more cable, in one sentence each.
    pub fn advice(&self) -> Vec<String> {
        let shape = self.shape();
        let names = |list: &[usize]| {
            list.iter().map(|index| self.machines[*index].name.as_str()).collect::<Vec<_>>().join(", ")
        };
        let order = names(&shape.order);
        let mut advice = Vec::new();
        match shape.kind {
            ShapeKind::Alone => advice.push("one machine needs no cable; name more with --hosts".to_owned()),
            ShapeKind::Islands => {
                let groups: Vec<_> = shape.islands.iter().map(|island| names(island)).collect();
                advice.push(format!(
                    "no cable joins these groups: {}. They talk over Ethernet or Wi-Fi, which limits tensor parallelism",
                    groups.join("  |  ")
                ));
            }
            ShapeKind::Pair | ShapeKind::Mesh => advice.push(format!(
                "every pair has a cable: tensor parallel over {order} is the fastest use (the default)"
            )),
            ShapeKind::Ring => advice.push(format!(
                "a ring: tensor parallel works, and sums between machines that are not neighbours go over \
                 the network; --parallel pipeline in the order {order} uses cables only"
            )),
            ShapeKind::Line => advice.push(format!(
                "a line works as a chain: --parallel pipeline in the order {order} uses cables only"
            )),
            ShapeKind::Mixed => advice.push(format!(
                "--parallel pipeline in the order {order}; tensor parallel uses cables where there are some"
            )),
        }
        for [one, other] in &shape.doubled {
            advice.push(format!(
                "{} cables between {} and {}: RDMA carries long messages over all of them, TCP uses the first",
                self.between(*one, *other).count(),
                self.machines[*one].name,
                self.machines[*other].name
            ));
        }
        advice.extend(self.one_more_cable(&shape));
        advice
    }

    /// Where one more cable would help most.
    fn one_more_cable(&self, shape: &Shape) -> Option<String> {
        let joins_islands = |pair: &&[usize; 2]| {
            !shape.islands.iter().any(|island| pair.iter().all(|machine| island.contains(machine)))
        };
        let ends = [*shape.order.first()?, *shape.order.last()?];
        let closes = |pair: &&[usize; 2]| pair.iter().all(|machine| ends.contains(machine));
        let first = match shape.kind {
            ShapeKind::Islands => shape.missing.iter().find(joins_islands),
            ShapeKind::Line => shape.missing.iter().find(closes),
            _ => shape.missing.first(),
        }?;
        let port = |machine: usize| {
            let free = self.free_ports(machine).next();
            let name = &self.machines[machine].name;
            free.map_or_else(|| format!("{name} (no free port)"), |port| format!("{name} port {}", port.name))
        };
        let gives = match (shape.kind, shape.missing.len()) {
            (_, 1) => "makes a mesh: tensor parallel with a cable between every pair".to_owned(),
            (ShapeKind::Islands, _) => "joins two groups".to_owned(),
            (ShapeKind::Line, left) => format!("makes a ring; {} more make a mesh", left - 1),
            (_, left) => format!("leaves {} more for a mesh", left - 1),
        };
        Some(format!("one more cable, {} → {}, {gives}", port(first[0]), port(first[1])))
    }
}

/// The groups of machines that cables join.
fn islands(count: usize, joined: &BTreeSet<[usize; 2]>) -> Vec<Vec<usize>> {
    let mut group: Vec<usize> = (0..count).collect();
    for _ in 0..count {
        for [one, other] in joined {
            let lowest = group[*one].min(group[*other]);
            (group[*one], group[*other]) = (lowest, lowest);
        }
    }
    let leaders: BTreeSet<usize> = group.iter().copied().collect();
    let members = |leader: usize| (0..count).filter(|machine| group[*machine] == leader).collect();
    leaders.into_iter().map(members).collect()
}

/// All machines in an order in which as many neighbours as possible have a cable; with `closed`,
/// preferably the last and the first too.
fn path(count: usize, joined: &BTreeSet<[usize; 2]>, closed: bool) -> Vec<usize> {
    let mut best = ((0, false), (0..count).collect::<Vec<_>>());
    if count <= MOST_FOR_A_PATH {
        // The given order wins ties, so that a mesh keeps the user's.
        best.0 = score(&best.1, joined, closed);
        search(&mut Vec::new(), count, joined, closed, &mut best);
    }
    best.1
}

fn has(joined: &BTreeSet<[usize; 2]>, one: usize, other: usize) -> bool {
    joined.contains(&[one.min(other), one.max(other)])
}

fn score(order: &[usize], joined: &BTreeSet<[usize; 2]>, closed: bool) -> (usize, bool) {
    let steps = order.windows(2).filter(|pair| has(joined, pair[0], pair[1])).count();
    let closes = closed && order.len() > 2 && has(joined, order[0], order[order.len() - 1]);
    (steps, closes)
}

fn search(
    order: &mut Vec<usize>,
    count: usize,
    joined: &BTreeSet<[usize; 2]>,
    closed: bool,
    best: &mut ((usize, bool), Vec<usize>),
) {
    if best.0 == (count.saturating_sub(1), closed) {
        return;
    }
    if order.len() == count {
        let found = score(order, joined, closed);
        if found > best.0 {
            *best = (found, order.clone());
        }
        return;
    }
    for next in 0..count {
        if !order.contains(&next) {
            order.push(next);
            search(order, count, joined, closed, best);
            order.pop();
        }
    }
}
