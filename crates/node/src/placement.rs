//! Where a model runs. One node decides this from what it sees, and writes it to the document.
//!
//! Any node may decide. To avoid that all do, the reachable candidate with the smallest key
//! decides. In a partition each side decides for itself.

use std::collections::{BTreeMap, BTreeSet};

use crate::document::{ModelWish, OnLoss, Placement, Register, Stamp};
use crate::id::NodeId;
use crate::report::{NodeReport, RankReport, RankState};
use crate::version;

/// A reachable node, as the deciding node sees it.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Whether it gets no new work.
    pub drained: bool,
    /// Its last report.
    pub report: Option<&'a NodeReport>,
}

/// What to do about a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The placement stays.
    Keep,
    /// Another node decides, or no node can run the model now.
    Wait,
    /// A new group is needed.
    Place {
        /// The new placement.
        placement: Placement,
        /// True if the last group failed although its nodes are up: trying again at once may fail
        /// again.
        after_failure: bool,
    },
    /// The former nodes of the model are all back.
    Return {
        /// The group on these nodes.
        placement: Placement,
        /// Whether the model is answering requests, which would wait for the new group.
        is_busy: bool,
    },
}

/// Decides about a model, as the node `me`. `reachable` has all nodes that `me` reaches, including
/// itself; `members` has all members that are not removed; `taken` has the nodes of the model's
/// other replicas.
pub fn decide(
    me: NodeId,
    name: &str,
    wish: &Register<ModelWish>,
    current: Option<(Stamp, &Placement)>,
    reachable: &BTreeMap<NodeId, Candidate<'_>>,
    members: &BTreeSet<NodeId>,
    taken: &BTreeSet<NodeId>,
) -> Decision {
    let Some(wanted) = &wish.value else { return Decision::Wait };
    let may = |(id, node): &(&NodeId, &Candidate<'_>)| {
        !node.drained && (wanted.nodes.is_empty() || wanted.nodes.contains(id))
    };
    let mut candidates: Vec<(&NodeId, &Candidate<'_>)> = reachable.iter().filter(may).collect();
    let (mut after_failure, mut left): (bool, &[NodeId]) = (false, &[]);
    // The nodes that a model keeps by its policy, lost or not.
    let mut kept: Option<&[NodeId]> = None;
    if let Some((stamp, placement)) = current.filter(|(stamp, _)| *stamp > wish.stamp) {
        if placement.asleep {
            return Decision::Keep;
        }
        let mut nodes = placement.nodes.iter();
        let is_there = !placement.nodes.is_empty() && nodes.all(|node| reachable.contains_key(node));
        let mut ranks = ranks_of(name, stamp, placement, reachable);
        after_failure = is_there && ranks.any(|rank| matches!(rank.state, RankState::Ended(_)));
        let is_drained = |node| reachable.get(node).is_some_and(|candidate| candidate.drained);
        // A drained node keeps its work if no other node may take it.
        let moves = placement.nodes.iter().any(is_drained) && !candidates.is_empty();
        if is_there && !after_failure && !moves {
            let is_back = |node| candidates.iter().any(|(id, _)| *id == node) && !taken.contains(node);
            let decides = candidates.first().is_some_and(|(first, _)| **first == me);
            let versions = placement.before.iter().filter_map(|node| series_of(reachable.get(node)?));
            let is_one_version = versions.collect::<BTreeSet<_>>().len() <= 1;
            let may_return = !placement.before.is_empty() && placement.before.iter().all(is_back);
            if !may_return || !is_one_version || !decides {
                return Decision::Keep;
            }
            let before = Placement::on(placement.before.clone(), placement.generation + 1);
            let is_busy = ranks_of(name, stamp, placement, reachable).any(|rank| rank.active > 0);
            return Decision::Return { placement: before, is_busy };
        }
        let is_member = |node: &NodeId| members.contains(node);
        if wanted.on_loss == OnLoss::Wait && !moves && placement.nodes.iter().all(is_member) {
            kept = (!placement.nodes.is_empty()).then_some(&placement.nodes[..]);
        }
        left = match (&placement.before[..], after_failure) {
            ([], true) => &[],
            ([], false) => &placement.nodes,
            (before, _) => before,
        };
    }
    if candidates.first().is_none_or(|(first, _)| **first != me) {
        return Decision::Wait;
    }
    // Done after choosing the decider, so that one node decides about all replicas.
    candidates.retain(|(id, _)| !taken.contains(id));
    if candidates.is_empty() {
        return Decision::Wait;
    }
    // Ranks of one group run the same version. During an update, the version with more nodes is
    // used.
    let series = series_of_most(&candidates);
    candidates.retain(|(_, node)| series_of(node).is_none_or(|own| Some(own) == series));
    let generation = current.map_or(0, |(_, placement)| placement.generation) + 1;
    if let Some(nodes) = kept {
        // The model also waits until all of them run one version.
        let is_there = |node: &NodeId| candidates.iter().any(|(id, _)| *id == node);
        if !nodes.iter().all(is_there) {
            return Decision::Wait;
        }
        return Decision::Place { placement: Placement::on(nodes.to_vec(), generation), after_failure };
    }
    let failed = current.filter(|_| after_failure).map(|(_, placement)| &placement.nodes[..]);
    let may_run = |node: &NodeId| candidates.iter().any(|(id, _)| *id == node);
    let place = |nodes: Vec<NodeId>| {
        let rank = |nodes: &[NodeId]| wanted.layouts.iter().position(|layout| layout.nodes == nodes);
        let was_better = match (rank(left), rank(&nodes)) {
            (Some(left), Some(now)) => left < now,
            (Some(_), None) => true,
            (None, _) => left.len() > nodes.len(),
        };
        let before = if was_better { left.to_vec() } else { Vec::new() };
        let placement = Placement { before, ..Placement::on(nodes, generation) };
        Decision::Place { placement, after_failure }
    };
    if let Some(nodes) = planned(wanted, failed, may_run) {
        return place(nodes);
    }
    // The node with most memory is first, because the head has the most to hold.
    let free = |node: &Candidate<'_>| node.report.map_or(0, NodeReport::rank_memory);
    candidates.sort_by_key(|(id, node)| (std::cmp::Reverse(free(node)), **id));
    candidates.truncate(wanted.count.map_or(usize::MAX, |count| count.max(1) as usize));
    // Requested stages have the same number of ranks each; named nodes keep their order.
    let stages = value_of(&wanted.arguments, "--stages").and_then(|stages| stages.parse::<usize>().ok());
    let stages = stages.filter(|stages| *stages > 0).unwrap_or(1);
    if stages > 1 {
        candidates.sort_by_key(|(id, _)| wanted.nodes.iter().position(|named| named == *id));
    }
    candidates.truncate(candidates.len() / stages * stages);
    if candidates.is_empty() {
        return Decision::Wait;
    }
    place(candidates.iter().map(|(id, _)| **id).collect())
}

/// The value of an option, the last one if there are several.
pub fn value_of<'a>(arguments: &'a [String], name: &str) -> Option<&'a str> {
    let place = arguments.iter().rposition(|argument| argument.split('=').next() == Some(name))?;
    match arguments[place].split_once('=') {
        Some((_, value)) => Some(value),
        None => arguments.get(place + 1).map(String::as_str),
    }
}

/// Major and minor version of a node; `None` before it has reported.
fn series_of(node: &Candidate<'_>) -> Option<(u64, u64)> {
    version::series(&node.report?.version)
}

/// The version that most of the nodes run; if there are several, the newest.
fn series_of_most(candidates: &[(&NodeId, &Candidate<'_>)]) -> Option<(u64, u64)> {
    let mut counts = BTreeMap::<(u64, u64), usize>::new();
    for series in candidates.iter().filter_map(|(_, node)| series_of(node)) {
        *counts.entry(series).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(series, count)| (*count, *series)).map(|(series, _)| series)
}

/// The nodes of the best planned layout that can be formed. After a failure the next one is tried,
/// and after the last one the first again.
fn planned(
    wanted: &ModelWish,
    failed: Option<&[NodeId]>,
    may_run: impl Fn(&NodeId) -> bool,
) -> Option<Vec<NodeId>> {
    let layouts = &wanted.layouts;
    let last = failed.and_then(|failed| layouts.iter().position(|layout| layout.nodes == failed));
    let from = last.map_or(0, |last| last + 1);
    let order = (from..layouts.len()).chain(0..from.min(layouts.len()));
    let fits =
        |place: &usize| !layouts[*place].nodes.is_empty() && layouts[*place].nodes.iter().all(&may_run);
    let place = order.into_iter().find(fits)?;
    Some(layouts[place].nodes.clone())
}

/// The reports of a group's ranks.
fn ranks_of<'a>(
    name: &'a str,
    stamp: Stamp,
    placement: &'a Placement,
    reachable: &BTreeMap<NodeId, Candidate<'a>>,
) -> impl Iterator<Item = &'a RankReport> {
    let reports = placement.nodes.iter().filter_map(|node| reachable.get(node)?.report);
    let ranks = reports.flat_map(|report| &report.ranks);
    ranks.filter(move |rank| rank.model == name && rank.placement == stamp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::PlannedLayout;
    use crate::report::{GpuReport, SpeedReport};

    /// Without other replicas.
    fn decide(
        me: NodeId,
        name: &str,
        wish: &Register<ModelWish>,
        current: Option<(Stamp, &Placement)>,
        reachable: &BTreeMap<NodeId, Candidate<'_>>,
    ) -> Decision {
        super::decide(me, name, wish, current, reachable, &BTreeSet::from([A, B, C]), &BTreeSet::new())
    }

    const A: NodeId = NodeId([1; 32]);
    const B: NodeId = NodeId([2; 32]);
    const C: NodeId = NodeId([3; 32]);

    fn wish(nodes: &[NodeId], count: Option<u32>) -> Register<ModelWish> {
        let wish = ModelWish {
            model: "m".into(),
            nodes: nodes.to_vec(),
            count,
            arguments: Vec::new(),
            ..ModelWish::default()
        };
        Register { stamp: stamp(5), value: Some(wish) }
    }

    fn stamp(counter: u64) -> Stamp {
        Stamp { counter, author: A }
    }

    fn report(free: u64) -> NodeReport {
        NodeReport { memory_free: free, ..NodeReport::default() }
    }

    fn nodes<'a>(list: &[(NodeId, &'a NodeReport)]) -> BTreeMap<NodeId, Candidate<'a>> {
        let candidate = |report| Candidate { drained: false, report: Some(report) };
        list.iter().map(|(id, report)| (*id, candidate(*report))).collect()
    }

    fn placed(decision: Decision) -> (Vec<NodeId>, u64, bool) {
        match decision {
            Decision::Place { placement, after_failure } => {
                (placement.nodes, placement.generation, after_failure)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn stages_that_were_asked_for_have_as_many_ranks_each() {
        let report = report(5);
        let wish = |arguments: &[&str]| {
            let mut wish = wish(&[], None);
            let of_wish = wish.value.as_mut().expect("a wish");
            of_wish.arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
            wish
        };
        let three = nodes(&[(A, &report), (B, &report), (C, &report)]);
        let decide = |words: &[&str], nodes| decide(A, "m", &wish(words), None, nodes);
        assert_eq!(placed(decide(&["--stages", "2"], &three)).0, [A, B]);
        assert_eq!(placed(decide(&["--stages=3"], &three)).0, [A, B, C]);
        let mut named = wish(&["--stages", "3"]);
        named.value.as_mut().expect("a wish").nodes = vec![C, A, B];
        assert_eq!(placed(super::tests::decide(A, "m", &named, None, &three)).0, [C, A, B]);
        assert_eq!(decide(&["--stages", "2"], &nodes(&[(A, &report)])), Decision::Wait);
    }

    #[test]
    fn a_gpus_own_memory_counts_in_place_of_the_machines() {
        let gpu = |has_own_memory| {
            let speed = SpeedReport {
                gpu: Some(GpuReport { has_own_memory, memory_bytes: 7, ..GpuReport::default() }),
                ..SpeedReport::default()
            };
            NodeReport { speed: Some(speed), ..report(9) }
        };
        assert_eq!((gpu(true).rank_memory(), gpu(false).rank_memory()), (7, 7));
        assert_eq!(NodeReport { gpu_limit: Some(8), ..gpu(false) }.rank_memory(), 8);
        assert_eq!(
            NodeReport { gpu_limit: Some(8), ..report(9) }.rank_memory(),
            9,
            "it computes on its processor"
        );
        let (own, none) = (gpu(true), report(8));
        let both = nodes(&[(A, &own), (B, &none)]);
        assert_eq!(placed(decide(A, "m", &wish(&[], Some(1)), None, &both)).0, [B]);
    }

    #[test]
    fn one_node_decides_and_the_roomiest_are_chosen() {
        let (small, large) = (report(1), report(9));
        let all = nodes(&[(A, &small), (B, &large), (C, &small)]);
        assert_eq!(decide(B, "m", &wish(&[], None), None, &all), Decision::Wait);
        let decide = |wish: &Register<ModelWish>| decide(A, "m", wish, None, &all);
        assert_eq!(placed(decide(&wish(&[], None))), (vec![B, A, C], 1, false));
        assert_eq!(placed(decide(&wish(&[], Some(2)))), (vec![B, A], 1, false));
        assert_eq!(placed(decide(&wish(&[A, C], None))), (vec![A, C], 1, false));
        // Only named nodes may run the model; the first of them decides.
        assert_eq!(self::decide(B, "m", &wish(&[B], None), None, &all), placed_on(&[B]));
    }

    fn placed_on(nodes: &[NodeId]) -> Decision {
        let placement = Placement::on(nodes.to_vec(), 1);
        Decision::Place { placement, after_failure: false }
    }

    #[test]
    fn a_group_stays_until_a_node_or_a_rank_is_lost_or_the_wish_changes() {
        let quiet = report(1);
        let (wish, group) = (wish(&[], None), Placement::on(vec![B, A], 4));
        let now = Some((stamp(6), &group));
        assert_eq!(
            decide(A, "m", &wish, now, &nodes(&[(A, &quiet), (B, &quiet), (C, &quiet)])),
            Decision::Keep
        );
        let without = nodes(&[(A, &quiet), (C, &quiet)]);
        assert_eq!(placed(decide(A, "m", &wish, now, &without)), (vec![A, C], 5, false));
        let mut failed = report(1);
        let rank = |placement| RankReport {
            model: "m".into(),
            placement,
            rank: 0,
            state: RankState::Ended("out of memory".into()),
            active: 0,
            part: None,
        };
        failed.ranks = vec![rank(stamp(3))];
        let old = nodes(&[(A, &quiet), (B, &failed)]);
        assert_eq!(decide(A, "m", &wish, now, &old), Decision::Keep, "a rank of an earlier group");
        failed.ranks = vec![rank(stamp(6))];
        let broken = nodes(&[(A, &quiet), (B, &failed)]);
        assert_eq!(placed(decide(A, "m", &wish, now, &broken)), (vec![A, B], 5, true));
        let before_the_wish = Some((stamp(4), &group));
        let all = nodes(&[(A, &quiet), (B, &quiet)]);
        assert_eq!(placed(decide(A, "m", &wish, before_the_wish, &all)), (vec![A, B], 5, false));
    }

    #[test]
    fn the_best_planned_layout_that_can_be_formed_is_taken_and_after_a_failure_the_next() {
        let quiet = report(1);
        let mut planned = wish(&[], None);
        let layout = |nodes: &[NodeId]| PlannedLayout { nodes: nodes.to_vec(), ..PlannedLayout::default() };
        let layouts = vec![layout(&[C]), layout(&[B, A]), layout(&[A])];
        planned.value.as_mut().expect("a wish").layouts = layouts;
        let all = nodes(&[(A, &quiet), (B, &quiet), (C, &quiet)]);
        assert_eq!(placed(decide(A, "m", &planned, None, &all)).0, vec![C]);
        let without = nodes(&[(A, &quiet), (B, &quiet)]);
        assert_eq!(placed(decide(A, "m", &planned, None, &without)).0, vec![B, A]);
        // No layout is left, so the model runs as without a plan.
        assert_eq!(placed(decide(B, "m", &planned, None, &nodes(&[(B, &quiet)]))).0, vec![B]);
        let mut failing = report(1);
        let mut nodes_of = Vec::new();
        let mut now = Placement::on(vec![C], 1);
        for counter in 6..10 {
            failing.ranks = vec![RankReport {
                model: "m".into(),
                placement: stamp(counter),
                rank: 0,
                state: RankState::Ended("out of memory".into()),
                active: 0,
                part: None,
            }];
            let all = nodes(&[(A, &failing), (B, &failing), (C, &failing)]);
            let (next, generation, after_failure) =
                placed(decide(A, "m", &planned, Some((stamp(counter), &now)), &all));
            assert!(after_failure);
            nodes_of.push(next.clone());
            now = Placement::on(next, generation);
        }
        assert_eq!(nodes_of, [vec![B, A], vec![A], vec![C], vec![B, A]]);
    }

    #[test]
    fn a_group_runs_one_version() {
        let of = |version: &str| NodeReport { version: version.to_owned(), ..report(1) };
        let (old, new) = (of("0.3.1"), of("0.4.0"));
        let chosen =
            |list: &[(NodeId, &NodeReport)]| placed(decide(A, "m", &wish(&[], None), None, &nodes(list))).0;
        assert_eq!(chosen(&[(A, &old), (B, &old), (C, &new)]), vec![A, B]);
        assert_eq!(chosen(&[(A, &old), (B, &new), (C, &new)]), vec![B, C]);
        assert_eq!(chosen(&[(A, &old), (B, &new)]), vec![B], "of as many, the newest");
    }

    #[test]
    fn a_model_goes_back_to_its_nodes_when_all_are_there_again() {
        let quiet = report(1);
        let (wish, group) = (wish(&[], None), Placement::on(vec![B, C, A], 4));
        let now = Some((stamp(6), &group));
        let Decision::Place { placement: smaller, .. } =
            decide(A, "m", &wish, now, &nodes(&[(A, &quiet), (B, &quiet)]))
        else {
            panic!("a node is lost")
        };
        assert_eq!((&smaller.nodes, &smaller.before), (&vec![A, B], &vec![B, C, A]));
        // After a second loss, the first group is remembered.
        let now = Some((stamp(7), &smaller));
        let Decision::Place { placement: least, .. } = decide(A, "m", &wish, now, &nodes(&[(A, &quiet)]))
        else {
            panic!("another is lost")
        };
        assert_eq!((&least.nodes, &least.before), (&vec![A], &vec![B, C, A]));
        let now = Some((stamp(8), &least));
        assert_eq!(decide(A, "m", &wish, now, &nodes(&[(A, &quiet), (B, &quiet)])), Decision::Keep);
        let mut all = nodes(&[(A, &quiet), (B, &quiet), (C, &quiet)]);
        let back = Decision::Return { placement: Placement::on(vec![B, C, A], 7), is_busy: false };
        assert_eq!(decide(A, "m", &wish, now, &all), back);
        assert_eq!(decide(B, "m", &wish, now, &all), Decision::Keep, "one node decides");
        let updated = NodeReport { version: "0.4.0".to_owned(), ..report(1) };
        let older = NodeReport { version: "0.3.0".to_owned(), ..report(1) };
        let mixed = nodes(&[(A, &older), (B, &updated), (C, &older)]);
        assert_eq!(decide(A, "m", &wish, now, &mixed), Decision::Keep, "two versions form no group");
        // While the model answers, the deciding node may wait.
        let mut busy = report(1);
        let (model, state) = ("m".to_owned(), RankState::Ready);
        busy.ranks = vec![RankReport { model, placement: stamp(8), rank: 0, state, active: 1, part: None }];
        all.entry(A).and_modify(|node| node.report = Some(&busy));
        assert!(matches!(decide(A, "m", &wish, now, &all), Decision::Return { is_busy: true, .. }));
        all.entry(C).and_modify(|node| node.drained = true);
        assert_eq!(decide(A, "m", &wish, now, &all), Decision::Keep);
        // Without a plan, other nodes are as good if their number is as requested.
        let (two, group) = (self::wish(&[], Some(2)), Placement::on(vec![B, C], 4));
        let now = Some((stamp(6), &group));
        let Decision::Place { placement, .. } =
            decide(A, "m", &two, now, &nodes(&[(A, &quiet), (B, &quiet)]))
        else {
            panic!("a node is lost")
        };
        assert_eq!((placement.nodes, placement.before), (vec![A, B], vec![]));
    }

    #[test]
    fn a_model_that_waits_keeps_its_nodes_until_one_is_removed_for_good() {
        let quiet = report(1);
        let mut wish = wish(&[], Some(2));
        wish.value.as_mut().expect("a wish").on_loss = OnLoss::Wait;
        let group = Placement::on(vec![C, B], 4);
        let now = Some((stamp(6), &group));
        let without = nodes(&[(A, &quiet), (B, &quiet)]);
        assert_eq!(decide(A, "m", &wish, now, &without), Decision::Wait);
        let all = nodes(&[(A, &quiet), (B, &quiet), (C, &quiet)]);
        assert_eq!(decide(A, "m", &wish, now, &all), Decision::Keep, "the ranks may still run");
        // The node is back without its rank; a rank that ended shows this.
        let mut ended = report(1);
        ended.ranks = vec![RankReport {
            model: "m".into(),
            placement: stamp(6),
            rank: 1,
            state: RankState::Ended("rank 0 is lost".into()),
            active: 0,
            part: None,
        }];
        let back = nodes(&[(A, &quiet), (B, &ended), (C, &quiet)]);
        assert_eq!(placed(decide(A, "m", &wish, now, &back)), (vec![C, B], 5, true), "not the roomiest");
        let of = |version: &str| NodeReport { version: version.to_owned(), ..ended.clone() };
        let (old, new) = (of("0.3.1"), of("0.4.0"));
        let updated = nodes(&[(A, &quiet), (B, &old), (C, &new)]);
        assert_eq!(decide(A, "m", &wish, now, &updated), Decision::Wait, "two versions form no group");
        let removed = super::decide(A, "m", &wish, now, &without, &BTreeSet::from([A, B]), &BTreeSet::new());
        assert_eq!(placed(removed).0, [A, B]);
        // An operator who drains a node wants to move its work.
        let mut drained = all;
        drained.entry(C).and_modify(|node| node.drained = true);
        assert_eq!(placed(decide(A, "m", &wish, now, &drained)).0, [A, B]);
    }

    #[test]
    fn replicas_are_on_different_nodes_and_one_without_a_node_waits() {
        let quiet = report(1);
        let all = nodes(&[(A, &quiet), (B, &quiet)]);
        let one = wish(&[], Some(1));
        let members = BTreeSet::from([A, B]);
        let with = |taken: &[NodeId]| {
            super::decide(A, "m#2", &one, None, &all, &members, &taken.iter().copied().collect())
        };
        assert_eq!(placed(with(&[A])).0, vec![B]);
        assert_eq!(with(&[A, B]), Decision::Wait);
        // The same node decides about all replicas, wherever they run.
        assert_eq!(super::decide(B, "m#2", &one, None, &all, &members, &BTreeSet::from([A])), Decision::Wait);
    }

    #[test]
    fn an_idle_model_sleeps_until_it_is_woken() {
        let quiet = report(1);
        let all = nodes(&[(A, &quiet), (B, &quiet)]);
        let mut group = Placement::without_nodes(4, true);
        assert_eq!(decide(A, "m", &wish(&[], None), Some((stamp(6), &group)), &all), Decision::Keep);
        // A new wish loads it at once.
        assert_eq!(placed(decide(A, "m", &wish(&[], None), Some((stamp(4), &group)), &all)).1, 5);
        group.asleep = false;
        assert_eq!(
            placed(decide(A, "m", &wish(&[], None), Some((stamp(6), &group)), &all)),
            (vec![A, B], 5, false)
        );
    }

    #[test]
    fn work_leaves_a_drained_node_if_another_may_have_it() {
        let quiet = report(1);
        let mut all = nodes(&[(A, &quiet), (B, &quiet)]);
        all.entry(A).and_modify(|node| node.drained = true);
        assert_eq!(decide(A, "m", &wish(&[], None), None, &all), Decision::Wait);
        assert_eq!(placed(decide(B, "m", &wish(&[], None), None, &all)), (vec![B], 1, false));
        // Work moves from a drained node to others, if any of them may run it.
        let group = Placement::on(vec![A, B], 4);
        let now = Some((stamp(6), &group));
        assert_eq!(placed(decide(B, "m", &wish(&[], None), now, &all)), (vec![B], 5, false));
        assert_eq!(decide(B, "m", &wish(&[A], None), now, &all), Decision::Keep);
        all.entry(B).and_modify(|node| node.drained = true);
        assert_eq!(decide(B, "m", &wish(&[], None), now, &all), Decision::Keep);
        assert_eq!(decide(B, "m", &wish(&[], None), None, &all), Decision::Wait);
    }
}
