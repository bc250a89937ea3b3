//! An agent's view of its cluster.

use serde::{Deserialize, Serialize};

use super::Agent;
use super::models::TaskStatus;
use crate::document::{Document, OnLoss, Stamp};
use crate::id::NodeId;
use crate::report::{LinkKind, NodeReport, PathReport, RankReport, RankState, RanksLink, of_bytes};
use crate::version;

/// A cluster as one node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The node that was asked.
    pub me: NodeId,
    /// Its code, while it is in no cluster.
    pub code: Option<String>,
    /// True if it was removed from its cluster.
    pub removed: bool,
    /// Digest of its document. It is the same on nodes that agree.
    pub document: String,
    /// Why the document is not on the disk, if it is not.
    pub disk_error: Option<String>,
    /// All members, this node first.
    pub members: Vec<MemberStatus>,
    /// Visible nodes that wait for approval.
    pub newcomers: Vec<NewcomerStatus>,
    /// The models that the cluster serves.
    pub models: Vec<ModelStatus>,
    /// The measured links between nodes.
    #[serde(default)]
    pub links: Vec<LinkStatus>,
    /// Tasks with models that the asked node has begun, on one or several nodes.
    #[serde(default)]
    pub tasks: Vec<TaskStatus>,
    /// Bytes of models that the asked node has sent to others since it started.
    #[serde(default)]
    pub sent_bytes: u64,
}

impl Status {
    /// The cluster's problems, as messages for people.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.removed {
            problems.push("this node was removed from its cluster".to_owned());
        }
        problems
            .extend(self.disk_error.iter().map(|error| format!("the document is not on the disk: {error}")));
        for member in &self.members {
            let name = &member.name;
            match &member.refused {
                Some(version) => {
                    let own = self.members.iter().find(|member| member.id == self.me);
                    let own = own.and_then(|member| Some(member.report.as_ref()?.version.as_str()));
                    let why = version::refusal(version, own.unwrap_or_default());
                    problems.push(format!("{name} is refused: {why}"));
                }
                None if !member.up => problems.push(format!("{name} does not answer")),
                None => {}
            }
            for other in &member.cut_off_from {
                let other = self.members.iter().find(|member| member.id == *other);
                if let Some(other) = other.filter(|other| other.id != self.me) {
                    problems.push(format!("{name} does not reach {}", other.name));
                }
            }
        }
        for model in self.models.iter().filter(|model| !model.ready && !model.asleep) {
            problems.push(format!("{} is not ready: {}", model.name, model.in_words()));
        }
        let versions = self.members.iter().filter_map(|member| Some(&member.report.as_ref()?.version));
        let mut versions: Vec<&String> = versions.collect();
        versions.sort();
        versions.dedup();
        if versions.len() > 1 {
            problems.push(format!("the nodes run different versions: {versions:?}"));
        }
        problems
    }
}

/// A measured link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// Short name of the node that measured it.
    pub from: String,
    /// Short name of the other.
    pub to: String,
    /// Median round trip of 8 bytes.
    pub latency_us: u64,
    /// Bytes per second over one TLS connection.
    pub bytes_s: u64,
    /// The same over several connections at once, if measured.
    #[serde(default)]
    pub several_bytes_s: Option<u64>,
    /// The highest measured figure.
    #[serde(default)]
    pub most_bytes_s: u64,
    /// The figures of two ranks, if measured; the same in both directions.
    #[serde(default)]
    pub ranks: Option<RanksLink>,
    /// Name of the interface on the node that measured.
    pub interface: String,
    /// Kind of the interface.
    pub kind: LinkKind,
    /// Bits per second that the interface claims; `None` if it does not report this.
    pub claimed_bits_s: Option<u64>,
    /// True if the link is far slower than the interface claims.
    pub far_below: bool,
    /// All measured paths between the nodes. The first one is in use.
    #[serde(default)]
    pub paths: Vec<PathReport>,
}

/// A model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStatus {
    /// Its name in the API.
    pub name: String,
    /// Whether it answers requests.
    pub ready: bool,
    /// Number of groups that were formed for it so far.
    pub generation: u64,
    /// Its ranks, in order; empty until it is placed.
    pub ranks: Vec<RankStatus>,
    /// The model that this group is an additional replica of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_of: Option<String>,
    /// True if it was unloaded because it was idle, and is loaded again on the next request.
    #[serde(default)]
    pub asleep: bool,
    /// Number of requests that it is answering.
    #[serde(default)]
    pub active: u32,
    /// What happens when a node is lost.
    #[serde(default)]
    pub on_loss: OnLoss,
    /// Those of its nodes that do not answer.
    #[serde(default)]
    pub lost: Vec<String>,
    /// Why it does not answer, if a start of it has failed: `NODE: REASON`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl ModelStatus {
    /// Its state, as a message for people.
    pub fn in_words(&self) -> String {
        let state = match (self.ready, self.ranks.is_empty()) {
            _ if self.asleep => "unloaded until the next request",
            (true, _) => "ready",
            (false, true) => "waits for a node",
            (false, false) if self.on_loss == OnLoss::Wait && !self.lost.is_empty() => {
                return format!("waits for {}", self.lost.join(", "));
            }
            (false, false) => match &self.failed {
                Some(why) => return format!("starting again, because it failed on {why}"),
                None => "starting",
            },
        };
        state.to_owned()
    }
}

/// A rank of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Name of its node.
    pub node: String,
    /// Its state; `None` if its node has not reported it.
    pub state: Option<RankState>,
    /// The state, as a message for people.
    #[serde(default)]
    pub words: String,
}

/// A rank's state, as a message for people. Only the head's rank knows that the model answers.
fn words_of(rank: Option<&RankReport>, is_ready: bool) -> String {
    let state = match rank.map(|rank| &rank.state) {
        None => "not heard of".to_owned(),
        Some(RankState::Ready) => "ready".to_owned(),
        Some(RankState::Starting) if is_ready => "running".to_owned(),
        Some(RankState::Starting) => "starting".to_owned(),
        Some(RankState::Ended(why)) => format!("ended: {why}"),
    };
    match rank.and_then(|rank| rank.part) {
        Some((present, total)) => format!("{state}, part: {}", of_bytes(present, total)),
        None => state,
    }
}

/// A member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Its key.
    pub id: NodeId,
    /// Its short name.
    pub short: String,
    /// Its name.
    pub name: String,
    /// Whether the asked node reaches it.
    pub up: bool,
    /// Members that are up, but that this member does not reach.
    pub cut_off_from: Vec<NodeId>,
    /// Its version, if it does not work with that of the asked node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Whether it gets no new work.
    pub drained: bool,
    /// Addresses at which it is reached.
    pub addresses: Vec<String>,
    /// Its machine; `None` if the asked node has not heard from it since its start.
    pub report: Option<NodeReport>,
}

/// A node that waits for approval.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewcomerStatus {
    /// Its short name.
    pub short: String,
    /// Its name, by its own account.
    pub name: String,
    /// Where it was seen.
    pub addresses: Vec<String>,
}

/// Ranks measure both directions at once, and one of the two nodes reports it: gives both links the
/// figures.
fn both_ways(mut links: Vec<LinkStatus>) -> Vec<LinkStatus> {
    let measured: Vec<LinkStatus> = links.iter().filter(|link| link.ranks.is_some()).cloned().collect();
    for link in links.iter_mut().filter(|link| link.ranks.is_none()) {
        let back = measured.iter().find(|back| back.from == link.to && back.to == link.from);
        link.ranks = back.and_then(|back| back.ranks.clone());
    }
    links
}

impl Agent {
    /// The cluster as this node sees it.
    pub fn status(&self) -> Status {
        let state = self.lock();
        let (membership, me) = (&state.membership, self.0.id);
        let document = membership.document();
        let up: Vec<NodeId> = membership.reachable().into_iter().collect();
        let mut members: Vec<MemberStatus> = document
            .members()
            .map(|(id, member)| {
                let peer = membership.peers().find(|(peer, _)| *peer == id).map(|(_, peer)| peer);
                let reaches = |other: &NodeId| {
                    *other == id || peer.is_none_or(|peer| !peer.up || peer.reaches.contains(other))
                };
                let report =
                    if id == me { membership.report() } else { peer.and_then(|p| p.report.as_ref()) };
                MemberStatus {
                    id,
                    short: id.short(),
                    name: member.name.clone(),
                    up: membership.reaches(&id),
                    cut_off_from: up.iter().filter(|other| !reaches(other)).copied().collect(),
                    refused: peer.and_then(|peer| peer.refused.clone()),
                    drained: member.drained,
                    addresses: member.addresses.clone(),
                    report: report.map(|report| (**report).clone()),
                }
            })
            .collect();
        members.sort_by_key(|member| (member.id != me, member.name.clone(), member.id));
        let links = members.iter().flat_map(|member| {
            let links = member.report.as_ref().map(|report| &report.links[..]).unwrap_or_default();
            links.iter().map(|link| LinkStatus {
                from: member.short.clone(),
                to: link.to.short(),
                latency_us: link.latency_us,
                bytes_s: link.bytes_s,
                several_bytes_s: link.several_bytes_s,
                most_bytes_s: link.most_bytes_s(),
                ranks: link.ranks.clone(),
                interface: link.interface.clone(),
                kind: link.kind,
                claimed_bits_s: link.claimed_bits_s,
                far_below: link.far_below().is_some(),
                paths: link.paths.clone(),
            })
        });
        let links = both_ways(links.collect());
        let newcomers = state.seen.iter().filter(|(id, seen)| seen.alone && document.member(id).is_none());
        let newcomers = newcomers.map(|(id, seen)| NewcomerStatus {
            short: id.short(),
            name: seen.name.clone(),
            addresses: seen.addresses.iter().map(ToString::to_string).collect(),
        });
        let status = Status {
            me,
            code: state.is_alone().then(|| state.code.to_string()),
            removed: document.is_removed(&me),
            document: document.digest(),
            disk_error: state.disk_error.clone(),
            members,
            newcomers: newcomers.collect(),
            models: Vec::new(),
            links,
            tasks: self.0.tasks.all(),
            sent_bytes: self.0.serving.sent_bytes(),
        };
        drop(state);
        Status { models: self.models_status(), ..status }
    }

    fn models_status(&self) -> Vec<ModelStatus> {
        let document = self.lock().membership.document().clone();
        document.models().map(|(name, wish)| self.model_status(&document, name, wish.stamp)).collect()
    }

    /// `wished`: when the operator asked for the model as it is. A group from before may answer
    /// until a new one is placed, but is not what was asked for.
    fn model_status(&self, document: &Document, name: &str, wished: Stamp) -> ModelStatus {
        let status = ModelStatus {
            name: name.to_owned(),
            ready: self.ready_now(name).is_some_and(|(_, placed)| placed > wished),
            generation: 0,
            ranks: Vec::new(),
            replica_of: document.model(name).and_then(|wish| wish.replica_of.clone()),
            asleep: false,
            active: 0,
            on_loss: document.model(name).map(|wish| wish.on_loss).unwrap_or_default(),
            lost: Vec::new(),
            failed: None,
        };
        let placement = document.placement(name).filter(|(stamp, _)| *stamp > wished);
        let Some((stamp, placement)) = placement else { return status };
        let state = self.lock();
        let membership = &state.membership;
        let mut active = 0;
        let report_of = |node: &NodeId| {
            let peer =
                membership.peers().find(|(id, _)| id == node).and_then(|(_, peer)| peer.report.as_ref());
            if *node == self.0.id { membership.report() } else { peer }
        };
        let name_of =
            |node: &NodeId| document.member(node).map_or_else(|| node.short(), |member| member.name.clone());
        let rank = |node: &NodeId| {
            let report = report_of(node);
            let ranks = report.map(|report| &report.ranks[..]).unwrap_or_default();
            let rank = ranks.iter().find(|rank| rank.model == name && rank.placement == stamp);
            active += rank.map_or(0, |rank| rank.active);
            RankStatus {
                node: name_of(node),
                state: rank.map(|rank| rank.state.clone()),
                words: words_of(rank, status.ready),
            }
        };
        let ranks: Vec<RankStatus> = placement.nodes.iter().map(rank).collect();
        let is_lost =
            |(node, rank): (&NodeId, &RankStatus)| (!membership.reaches(node)).then(|| rank.node.clone());
        let lost = placement.nodes.iter().zip(&ranks).filter_map(is_lost).collect();
        let (generation, asleep) = (placement.generation, placement.asleep);
        // The head's reason first: other ranks end because of each other.
        let others = document.members().map(|(id, _)| id).filter(|id| !placement.nodes.contains(id));
        let mut nodes = placement.nodes.iter().copied().chain(others).filter(|_| !status.ready);
        let failed = nodes
            .find_map(|node| Some(format!("{}: {}", name_of(&node), report_of(&node)?.failures.get(name)?)));
        ModelStatus { generation, ranks, asleep, active, lost, failed, ..status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_two_ranks_are_of_both_directions() {
        let ranks = RanksLink { over: "tcp".into(), latency_ns: 5, bytes_s: 7 };
        let link = |from: &str, to: &str, ranks: Option<&RanksLink>| LinkStatus {
            from: from.into(),
            to: to.into(),
            latency_us: 30,
            bytes_s: 1,
            several_bytes_s: None,
            most_bytes_s: 1,
            ranks: ranks.cloned(),
            interface: "eth0".into(),
            kind: LinkKind::Ethernet,
            claimed_bits_s: None,
            far_below: false,
            paths: Vec::new(),
        };
        let links = both_ways(vec![link("a", "b", None), link("b", "a", Some(&ranks)), link("a", "c", None)]);
        let found: Vec<_> = links.iter().map(|link| link.ranks.as_ref()).collect();
        assert_eq!(found, [Some(&ranks), Some(&ranks), None]);
    }

    #[test]
    fn a_rank_that_runs_is_said_to_run_once_the_head_answers() {
        let words = |state: RankState, part, is_ready| {
            let placement = Stamp { counter: 1, author: NodeId([7; 32]) };
            let model = "m".to_owned();
            let rank = RankReport { model, placement, rank: 1, state, active: 0, part };
            words_of(Some(&rank), is_ready)
        };
        assert_eq!(words(RankState::Starting, None, false), "starting");
        assert_eq!(words(RankState::Starting, None, true), "running");
        let part = Some((1_230_000_000, 4_900_000_000));
        assert_eq!(words(RankState::Starting, part, true), "running, part: 1.1 of 4.6 GiB");
        assert_eq!(words(RankState::Ended("lost".into()), None, true), "ended: lost");
        assert_eq!(words_of(None, true), "not heard of");
    }
}
