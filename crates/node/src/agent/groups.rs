//! The groups of this machine's ranks: formed when a placement says so, watched, and ended when the
//! placement no longer says so.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use super::Agent;
use super::calls::Call;
use super::ranks::{OwnRank, StartRank, free_port, random_text};
use crate::document::{Document, ModelWish, Placement, Stamp};
use crate::id::NodeId;
use crate::placement::{Candidate, Decision, decide, value_of};

/// Interval at which ranks are checked, if nothing changes before.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Time after its start in which a node makes no decisions about models, unless it reaches all
/// members.
const HEAR_FIRST: Duration = Duration::from_secs(3);
/// Maximum pause before a failed group is formed again. The first attempt is made at once, the next
/// after 1 s.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The same maximum for a group that has served, because its clients wait.
const LONGEST_PAUSE_OF_SERVING: Duration = Duration::from_secs(2);
/// Time for which nodes must be back before a model returns to them, and the maximum time for which
/// requests delay the return.
const RETURN_AFTER: Duration = Duration::from_secs(15);
const RETURN_WITHIN: Duration = Duration::from_secs(300);
/// A group that ran for this long did not fail at its start.
const RAN_WELL: Duration = Duration::from_secs(60);

/// When a failed group may be formed again.
#[derive(Debug, Clone, Copy)]
struct Pause {
    failed_at: Duration,
    pause: Duration,
}

/// The ranks of this machine, by model.
#[derive(Default)]
pub struct Groups {
    pub(super) own: BTreeMap<String, OwnRank>,
    pauses: BTreeMap<String, Pause>,
    /// Since when the former nodes of a model have been back.
    returning: BTreeMap<String, Duration>,
    /// The last group of each model that was seen serving, on this node or another.
    served: BTreeMap<String, Stamp>,
    /// Why the last rank of each model ended here, until the model answers again.
    pub(super) failures: BTreeMap<String, String>,
    /// Groups that this node starts as their head.
    starting: BTreeSet<(String, Stamp)>,
    /// Processes that are being ended, by model.
    pub(super) ending: BTreeMap<String, usize>,
    /// The agent is ending: nothing is started any more.
    pub(super) closing: bool,
}

impl Agent {
    /// Keeps this machine's ranks in the state that the document describes.
    pub(super) async fn keep_groups(self) {
        let mut changes = self.changes();
        loop {
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            changes.mark_unchanged();
            let document = self.lock().membership.document().clone();
            self.look_at_ranks(&document);
            self.check_new_groups();
            self.put_to_sleep(&document);
            self.note_serving(&document);
            self.place(&document);
            self.start_own_groups(&document);
            let mut state = self.lock();
            self.report_ranks(&mut state, None);
            self.settle(&mut state);
        }
    }

    /// Notices ranks that have ended, and ends those that no placement wants.
    fn look_at_ranks(&self, document: &Document) {
        let mut unwanted = Vec::new();
        {
            let mut groups = self.groups();
            let Groups { own, failures, .. } = &mut *groups;
            let now = self.now();
            failures.retain(|name, _| document.model(name).is_some());
            for (name, rank) in own {
                rank.look(now);
                if let Some(why) = &rank.ended {
                    failures.insert(name.clone(), why.clone());
                }
                // A stopped rank is killed, because it would hold its memory.
                if rank.ended.is_some()
                    && let Some(process) = rank.process.take()
                {
                    unwanted.push((name.clone(), process));
                }
            }
            let me = self.0.id;
            let wanted = |name: &str, rank: &OwnRank| {
                let known = document.placement(name);
                let newer = known.is_some_and(|(stamp, _)| stamp > rank.placement);
                let mine = known.is_none_or(|(stamp, placement)| {
                    stamp != rank.placement || placement.nodes.contains(&me)
                });
                document.model(name).is_some() && document.member(&me).is_some() && !newer && mine
            };
            let names: Vec<String> = groups.own.keys().cloned().collect();
            for name in names {
                if groups.own.get(&name).is_some_and(|rank| !wanted(&name, rank)) {
                    let process = groups.own.remove(&name).and_then(|rank| rank.process);
                    unwanted.extend(process.map(|process| (name, process)));
                }
            }
        }
        for (name, process) in unwanted {
            self.end_process(name, process);
        }
    }

    /// Records which groups are serving now.
    fn note_serving(&self, document: &Document) {
        let ready =
            document.models().filter_map(|(name, _)| Some((name.to_owned(), self.ready_now(name)?.1)));
        let ready: Vec<(String, Stamp)> = ready.collect();
        let mut groups = self.groups();
        groups.failures.retain(|failed, _| !ready.iter().any(|(name, _)| name == failed));
        groups.served.extend(ready);
    }

    /// Decides where models run, if this node is responsible for it.
    fn place(&self, document: &Document) {
        let now = self.now();
        let state = self.lock();
        // A node that has just started has not heard from the others, and would take over their
        // models.
        if now < HEAR_FIRST && state.membership.reachable().len() < document.members().count() {
            return;
        }
        let mut groups = self.groups();
        let mut decided: Vec<(String, Placement)> = Vec::new();
        let members = document.member_ids();
        for (name, wish) in document.models() {
            // Where the model's other replicas run, or will run in a moment.
            let model = wish.value.as_ref().and_then(|wish| wish.replica_of.as_deref()).unwrap_or(name);
            let others = document.groups_of(model).filter(|(other, _)| *other != name);
            let taken: BTreeSet<NodeId> = others
                .filter_map(|(other, wish)| {
                    let new = decided.iter().find(|(decided, _)| decided == other);
                    let old = document.placement(other).filter(|(stamp, _)| *stamp > wish.stamp);
                    Some(
                        new.map(|(_, placement)| placement)
                            .or(old.map(|(_, placement)| placement))?
                            .nodes
                            .clone(),
                    )
                })
                .flatten()
                .collect();
            let membership = &state.membership;
            let peers: BTreeMap<NodeId, _> = membership.peers().collect();
            let candidate = |id: NodeId| {
                let drained = document.member(&id).is_some_and(|member| member.drained);
                let report =
                    if id == self.0.id { membership.report() } else { peers.get(&id)?.report.as_ref() };
                Some((id, Candidate { drained, report: report.map(|report| &**report) }))
            };
            let reachable = membership.reachable().into_iter().filter_map(candidate).collect();
            let current = document.placement(name);
            let decision = decide(self.0.id, name, wish, current, &reachable, &members, &taken);
            let failed = document.placement(name).map(|(stamp, _)| stamp);
            let has_served = failed.is_some() && groups.served.get(name).copied() == failed;
            if !matches!(decision, Decision::Return { .. }) {
                groups.returning.remove(name);
            }
            let placement = match decision {
                Decision::Place { placement, after_failure } => {
                    (!after_failure || groups.may_try_again(name, has_served, now)).then_some(placement)
                }
                Decision::Return { placement, is_busy } if groups.may_return(name, is_busy, now) => {
                    self.0.log.add(format!("{name} goes back to the nodes that it ran on before"));
                    Some(placement)
                }
                _ => None,
            };
            decided.extend(placement.map(|placement| (name.to_owned(), placement)));
        }
        drop(groups);
        drop(state);
        decided.into_iter().for_each(|(name, placement)| self.set_placement(&name, placement));
    }

    /// Unloads models that have their head here and were idle for as long as their wish allows.
    fn put_to_sleep(&self, document: &Document) {
        let idle: Vec<(String, Stamp)> = {
            let groups = self.groups();
            let is_idle = |(name, rank): (&String, &OwnRank)| {
                let limit = Duration::from_secs(document.model(name)?.idle_unload_s?);
                (rank.idle_for()? >= limit).then(|| (name.clone(), rank.placement))
            };
            groups.own.iter().filter_map(is_idle).collect()
        };
        for (name, stamp) in idle {
            let Some((_, placement)) = document.placement(&name).filter(|(known, _)| *known == stamp) else {
                continue;
            };
            self.0.log.add(format!("{name} is unloaded until the next request: it was idle"));
            let asleep = Placement::without_nodes(placement.generation, true);
            self.set_placement(&name, asleep);
        }
    }

    /// Makes a sleeping model load again.
    pub(super) fn wake(&self, group: &str) {
        let document = self.lock().membership.document().clone();
        let sleeping = document.placement(group).filter(|(_, placement)| placement.asleep);
        if let Some((_, placement)) = sleeping {
            self.0.log.add(format!("{group} is loaded again for a request"));
            self.set_placement(group, Placement::without_nodes(placement.generation, false));
        }
    }

    fn set_placement(&self, name: &str, placement: Placement) {
        let (me, mut state) = (self.0.id, self.lock());
        let change = state.membership.change(|document| document.set_placement(me, name, Some(placement)));
        if let Err(error) = change {
            tracing::error!("{name} cannot be placed: {error}");
        }
        self.settle(&mut state);
    }

    /// Starts the groups that have their head on this node.
    fn start_own_groups(&self, document: &Document) {
        let mut groups = self.groups();
        if groups.closing {
            return;
        }
        for (name, wish) in document.models() {
            let Some((stamp, placement)) = document.placement(name) else { continue };
            let Some(wanted) = wish.value.as_ref().filter(|_| stamp > wish.stamp) else { continue };
            let is_head = placement.nodes.first() == Some(&self.0.id);
            let runs = groups.own.get(name).is_some_and(|rank| rank.placement == stamp);
            if !is_head || runs || !groups.starting.insert((name.to_owned(), stamp)) {
                continue;
            }
            let start = StartRank {
                name: name.to_owned(),
                model: wanted.model.clone(),
                arguments: arguments_of(wanted, placement),
                placement: stamp,
                rank: 0,
                ranks: placement.nodes.len() as u32,
                port: 0,
                secret: String::new(),
            };
            tokio::spawn(self.clone().start_group(start, placement.clone()));
        }
    }

    /// Starts a group: this node's rank, and those of the others.
    async fn start_group(self, mut start: StartRank, placement: Placement) {
        let prepared = free_port(self.0.address.ip()).and_then(|port| Ok((port, random_text()?)));
        let outcome = match prepared {
            Ok((port, secret)) => {
                (start.port, start.secret) = (port, secret);
                self.start_everywhere(&start, &placement).await
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = outcome {
            self.0.log.add(format!("{} did not start: {why}", start.name));
            self.note_rank(&start, None, String::new(), Some(why));
        }
        self.groups().starting.remove(&(start.name.clone(), start.placement));
        self.0.version.send_modify(|version| *version += 1);
    }

    async fn start_everywhere(&self, start: &StartRank, placement: &Placement) -> Result<(), String> {
        self.bring_parts(&start.model, &start.arguments, &placement.nodes).await?;
        if let Some(draft) = value_of(&start.arguments, "--draft") {
            // Only the head has the draft model.
            self.bring(draft, &placement.nodes[..placement.nodes.len().min(1)]).await?;
        }
        let coordinator = SocketAddr::new(self.0.address.ip(), start.port);
        self.start_rank(start, coordinator).await?;
        let mut calls = tokio::task::JoinSet::new();
        for (rank, node) in placement.nodes.iter().enumerate().skip(1) {
            let (agent, node) = (self.clone(), *node);
            let call = Call::StartRank(StartRank { rank: rank as u32, ..start.clone() });
            calls.spawn(async move { agent.call(node, &call).await.map(drop) });
        }
        while let Some(called) = calls.join_next().await {
            called.map_err(|error| error.to_string())??;
        }
        Ok(())
    }

    /// Starts a rank for the head `caller`, which has connected from `remote`.
    pub(super) fn start_follower(
        &self,
        caller: NodeId,
        remote: SocketAddr,
        start: StartRank,
    ) -> Result<(), String> {
        // The follower reaches the head at the address from which the head has connected.
        let coordinator = reached_at(remote, start.port);
        if start.rank == 0 || start.rank >= start.ranks {
            return Err(format!("rank {} of {} cannot be started by another node", start.rank, start.ranks));
        }
        let known = self.lock().membership.document().placement(&start.name).map(|(stamp, _)| stamp);
        if known.is_some_and(|known| known > start.placement) {
            return Err(format!("{} was placed anew meanwhile", start.name));
        }
        self.0.log.add(format!("rank {} of {} starts for {}", start.rank, start.name, caller.short()));
        // The caller does not wait for the end of an earlier rank.
        let agent = self.clone();
        tokio::spawn(async move {
            if let Err(why) = agent.start_rank(&start, coordinator).await {
                agent.note_rank(&start, None, String::new(), Some(why));
                agent.0.version.send_modify(|version| *version += 1);
            }
        });
        Ok(())
    }
}

/// Where a rank of the node that has connected from `remote` listens.
pub(super) fn reached_at(remote: SocketAddr, port: u16) -> SocketAddr {
    let mut address = remote;
    address.set_ip(remote.ip().to_canonical());
    if let (SocketAddr::V6(from), SocketAddr::V6(to)) = (remote, &mut address) {
        to.set_scope_id(from.scope_id());
    }
    address.set_port(port);
    address
}

impl Groups {
    /// Whether a failed group may be formed again now: at once the first time, then after
    /// increasing pauses.
    fn may_try_again(&mut self, name: &str, has_served: bool, now: Duration) -> bool {
        let longest = if has_served { LONGEST_PAUSE_OF_SERVING } else { LONGEST_PAUSE };
        let known = self.pauses.get(name).copied();
        let recent = known.filter(|known| now.saturating_sub(known.failed_at) < RAN_WELL);
        let pause = recent.map_or(Duration::ZERO, |known| known.pause.min(longest));
        if recent.is_some_and(|known| now < known.failed_at + pause) {
            return false;
        }
        let next = (pause * 2).clamp(Duration::from_secs(1), longest);
        self.pauses.insert(name.to_owned(), Pause { failed_at: now, pause: next });
        true
    }

    /// Whether a model may return to its former nodes: when they have been back for a while and the
    /// model has no request, or after some minutes.
    fn may_return(&mut self, name: &str, is_busy: bool, now: Duration) -> bool {
        let since = *self.returning.entry(name.to_owned()).or_insert(now);
        now.saturating_sub(since) >= if is_busy { RETURN_WITHIN } else { RETURN_AFTER }
    }
}

/// The arguments of `thunder serve` for a group: those of the wish, and the nodes' shares.
fn arguments_of(wish: &ModelWish, placement: &Placement) -> Vec<String> {
    let mut arguments = wish.arguments.clone();
    let planned = wish.layouts.iter().find(|layout| layout.nodes == placement.nodes);
    if let Some(layout) = planned.filter(|layout| layout.nodes.len() > 1) {
        arguments.extend(layout.arguments.iter().cloned());
        if layout.weights.len() == layout.nodes.len() {
            let weights: Vec<String> = layout.weights.iter().map(u32::to_string).collect();
            arguments.extend(["--split".to_owned(), weights.join(",")]);
        }
        return arguments;
    }
    if !wish.weights.is_empty() && placement.nodes.len() > 1 {
        let weight = |node: &NodeId| wish.weights.get(node).copied().unwrap_or(1).to_string();
        let weights: Vec<String> = placement.nodes.iter().map(weight).collect();
        arguments.extend(["--split".to_owned(), weights.join(",")]);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_returns_when_its_nodes_have_stayed_and_it_is_idle_or_after_minutes() {
        let mut groups = Groups::default();
        let mut returns = |seconds, is_busy| groups.may_return("m", is_busy, Duration::from_secs(seconds));
        assert!(!returns(100, false) && !returns(114, false) && !returns(120, true) && !returns(399, true));
        assert!(returns(120, false) && returns(400, true));
    }

    #[test]
    fn a_group_that_keeps_failing_is_tried_ever_more_rarely() {
        let mut groups = Groups::default();
        let mut tries = |seconds: std::ops::Range<u64>, has_served: bool| -> Vec<u64> {
            let at = Duration::from_secs;
            seconds.filter(|second| groups.may_try_again("m", has_served, at(*second))).collect()
        };
        assert_eq!(tries(0..200, false), [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181]);
        assert_eq!(tries(400..401, false), [400]);
        // A group that serves in between, and then loses a rank, does not wait because of its
        // history.
        assert_eq!(tries(401..432, false), [401, 403, 407, 415, 431]);
        assert_eq!(tries(432..440, true), [433, 435, 437, 439]);
    }

    #[test]
    fn the_value_of_an_option_is_found() {
        let value = |words: &str| {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            value_of(&words, "--draft").map(str::to_owned)
        };
        assert_eq!(value("--kv int8 --draft org/small"), Some("org/small".to_owned()));
        assert_eq!(value("--draft=org/small --kv int8"), Some("org/small".to_owned()));
        assert_eq!(value("--draft"), None);
        assert_eq!(value("--drafts x --kv --draft-like"), None);
    }
}
