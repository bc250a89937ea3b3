//! The ranks of this machine: started when a placement says so, watched, and ended when it does not
//! any more.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_cables::job::installed_cables;
use thunder_cluster::watched::WatchedRank;

use super::Agent;
use super::calls::Call;
use super::state::State;
use crate::document::{Document, Placement, Stamp};
use crate::id::NodeId;
use crate::placement::{Candidate, Decision, decide};
use crate::report::{NodeReport, RankReport, RankState};

/// Interval at which ranks are looked at, if nothing changes before.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The longest pause before a group that failed is formed again; the first is 1 s, after one
/// attempt at once.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A group that ran for this long has not failed at once.
const RAN_WELL: Duration = Duration::from_secs(60);
/// Variables that the user of the agent may have set, and that would mislead a rank.
const NOT_INHERITED: [&str; 9] = [
    "THUNDER_RANK",
    "THUNDER_WORLD_SIZE",
    "THUNDER_COORDINATOR",
    "THUNDER_SECRET",
    "THUNDER_TOKEN",
    "THUNDER_STORE",
    "THUNDER_CONFIG",
    "MLX_RANK",
    "MLX_HOSTFILE",
];

/// Variable: the networks of the cables, which ranks prefer.
const CABLES: &str = "THUNDER_CABLES";

/// What a rank of a group needs to start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StartRank {
    /// The model's name in the cluster.
    pub name: String,
    /// What `thunder serve` takes.
    pub model: String,
    /// More arguments for it.
    pub arguments: Vec<String>,
    /// The group.
    pub placement: Stamp,
    /// This rank.
    pub rank: u32,
    /// Ranks of the group.
    pub ranks: u32,
    /// The port on which the head's rank listens for the others.
    pub port: u16,
    /// The group's secret.
    pub secret: String,
}

/// What is known of a rank by reading what it prints.
#[derive(Debug, Default)]
struct Heard {
    api: Option<SocketAddr>,
}

/// A rank of this machine.
struct OwnRank {
    placement: Stamp,
    rank: u32,
    /// `None` if it could not be started, or has ended.
    process: Option<WatchedRank>,
    heard: Arc<Mutex<Heard>>,
    key: String,
    ended: Option<String>,
}

/// When a group that failed may be formed again.
#[derive(Debug, Clone, Copy)]
struct Pause {
    failed_at: Duration,
    pause: Duration,
}

/// The ranks of this machine, by model.
#[derive(Default)]
pub struct Groups {
    own: BTreeMap<String, OwnRank>,
    pauses: BTreeMap<String, Pause>,
    /// Groups that this node starts as their head.
    starting: BTreeSet<(String, Stamp)>,
    /// The agent ends: nothing starts any more.
    closing: bool,
}

impl OwnRank {
    fn state(&self) -> RankState {
        let api = self.heard.lock().unwrap_or_else(PoisonError::into_inner).api;
        match (&self.ended, api) {
            (Some(why), _) => RankState::Ended(why.clone()),
            (None, Some(_)) => RankState::Ready,
            (None, None) => RankState::Starting,
        }
    }
}

impl Agent {
    /// Keeps this machine's ranks as the document says.
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
            self.place(&document);
            self.start_own_groups(&document);
            let mut state = self.lock();
            self.report_ranks(&mut state, None);
            self.settle(&mut state);
        }
    }

    /// Notices which ranks have ended, and ends those that no placement wants.
    fn look_at_ranks(&self, document: &Document) {
        let mut unwanted = Vec::new();
        {
            let mut groups = self.groups();
            for rank in groups.own.values_mut() {
                if let Some(words) = rank.process.as_mut().and_then(WatchedRank::ended) {
                    rank.ended.get_or_insert(words);
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
                    unwanted.extend(groups.own.remove(&name).and_then(|rank| rank.process));
                }
            }
        }
        for process in unwanted {
            tokio::task::spawn_blocking(move || process.stop());
        }
    }

    /// Decides where models run, if that is this node's to decide.
    fn place(&self, document: &Document) {
        let now = self.now();
        let mut state = self.lock();
        let mut groups = self.groups();
        let mut decided = Vec::new();
        for (name, wish) in document.models() {
            let membership = &state.membership;
            let peers: BTreeMap<NodeId, _> = membership.peers().collect();
            let candidate = |id: NodeId| {
                let drained = document.member(&id).is_some_and(|member| member.drained);
                let report =
                    if id == self.0.id { membership.report() } else { peers.get(&id)?.report.as_ref() };
                Some((id, Candidate { drained, report: report.map(|report| &**report) }))
            };
            let reachable = membership.reachable().into_iter().filter_map(candidate).collect();
            let decision = decide(self.0.id, name, wish, document.placement(name), &reachable);
            if let Decision::Place { placement, after_failure } = decision
                && (!after_failure || groups.may_try_again(name, now))
            {
                decided.push((name.to_owned(), placement));
            }
        }
        drop(groups);
        for (name, placement) in decided {
            let me = self.0.id;
            let change =
                state.membership.change(|document| document.set_placement(me, &name, Some(placement)));
            if let Err(error) = change {
                tracing::error!("{name} cannot be placed: {error}");
            }
        }
        self.settle(&mut state);
    }

    /// Starts the groups whose head is this node.
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
                arguments: wanted.arguments.clone(),
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
            tracing::warn!("{} did not start: {why}", start.name);
            self.note_rank(&start, None, String::new(), Some(why));
        }
        self.groups().starting.remove(&(start.name.clone(), start.placement));
        self.0.version.send_modify(|version| *version += 1);
    }

    async fn start_everywhere(&self, start: &StartRank, placement: &Placement) -> Result<(), String> {
        let coordinator = SocketAddr::new(self.0.address.ip(), start.port);
        self.start_rank(start, coordinator)?;
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
        // The head is reached where it has connected from.
        let mut coordinator = remote;
        coordinator.set_ip(remote.ip().to_canonical());
        if let (SocketAddr::V6(from), SocketAddr::V6(to)) = (remote, &mut coordinator) {
            to.set_scope_id(from.scope_id());
        }
        coordinator.set_port(start.port);
        if start.rank == 0 || start.rank >= start.ranks {
            return Err(format!("rank {} of {} cannot be started by another node", start.rank, start.ranks));
        }
        let known = self.lock().membership.document().placement(&start.name).map(|(stamp, _)| stamp);
        if known.is_some_and(|known| known > start.placement) {
            return Err(format!("{} was placed anew meanwhile", start.name));
        }
        tracing::info!("rank {} of {} starts for {}", start.rank, start.name, caller.short());
        self.start_rank(&start, coordinator)
    }

    fn start_rank(&self, start: &StartRank, coordinator: SocketAddr) -> Result<(), String> {
        let key = random_text().map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.0.options.program);
        command
            .args(["serve", &start.model, "--host", "127.0.0.1", "--port", "0", "--no-store"])
            .args(&start.arguments);
        NOT_INHERITED.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.env("THUNDER_API_KEY", &key);
        if start.ranks > 1 {
            command
                .env("THUNDER_RANK", start.rank.to_string())
                .env("THUNDER_WORLD_SIZE", start.ranks.to_string())
                .env("THUNDER_COORDINATOR", coordinator.to_string())
                .env("THUNDER_SECRET", &start.secret);
            // What `thunder mac setup` has left here: the ranks then use the cables.
            if let Some(cables) = installed_cables().filter(|_| std::env::var_os(CABLES).is_none()) {
                command.env(CABLES, cables);
            }
        }
        let heard = Arc::new(Mutex::new(Heard::default()));
        let (hear, name, version) = (heard.clone(), start.name.clone(), self.0.version.clone());
        let on_line = move |line: &str| {
            tracing::info!("{name}: {line}");
            if let Some(api) = served_at(line) {
                hear.lock().unwrap_or_else(PoisonError::into_inner).api = Some(api);
            }
            version.send_modify(|version| *version += 1);
        };
        let process = WatchedRank::start(command, start.rank as usize, on_line);
        let process =
            process.map_err(|error| format!("cannot start {}: {error}", self.0.options.program.display()))?;
        self.note_rank(start, Some((process, heard)), key, None);
        Ok(())
    }

    /// Enters a rank in place of an earlier one of its model, which is ended.
    fn note_rank(
        &self,
        start: &StartRank,
        process: Option<(WatchedRank, Arc<Mutex<Heard>>)>,
        key: String,
        ended: Option<String>,
    ) {
        let (process, heard) = process.map_or((None, Arc::default()), |(p, heard)| (Some(p), heard));
        let rank = OwnRank { placement: start.placement, rank: start.rank, process, heard, key, ended };
        let mut groups = self.groups();
        // An older group may fail after a newer one has taken its place, or while the agent ends.
        let is_late = groups.closing
            || groups.own.get(&start.name).is_some_and(|newer| newer.placement > start.placement);
        let unwanted = if is_late { Some(rank) } else { groups.own.insert(start.name.clone(), rank) };
        drop(groups);
        if let Some(process) = unwanted.and_then(|rank| rank.process) {
            tokio::task::spawn_blocking(move || process.stop());
        }
    }

    /// Where the API of a group's head listens on this machine, and its key.
    pub(super) fn own_api(&self, model: &str, placement: Stamp) -> Option<(SocketAddr, String)> {
        let groups = self.groups();
        let rank =
            groups.own.get(model).filter(|rank| rank.placement == placement && rank.ended.is_none())?;
        let api = rank.heard.lock().unwrap_or_else(PoisonError::into_inner).api?;
        Some((api, rank.key.clone()))
    }

    /// Puts the ranks into this node's report; `machine` is a new look at the machine.
    pub(super) fn report_ranks(&self, state: &mut State, machine: Option<NodeReport>) {
        let known = state.membership.report().map(|report| (**report).clone());
        let mut report = machine.or(known).unwrap_or_default();
        report.api = self.0.api.map(|api| api.to_string());
        let report_of = |(model, rank): (&String, &OwnRank)| RankReport {
            model: model.clone(),
            placement: rank.placement,
            rank: rank.rank,
            state: rank.state(),
        };
        report.ranks = self.groups().own.iter().map(report_of).collect();
        state.membership.set_report(report);
    }

    /// Ends all ranks of this machine. Blocks until they have ended.
    pub fn end_ranks(&self) {
        let own = {
            let mut groups = self.groups();
            groups.closing = true;
            std::mem::take(&mut groups.own)
        };
        let stop = |rank: OwnRank| Some(std::thread::spawn(move || rank.process.map(WatchedRank::stop)));
        let stopping: Vec<_> = own.into_values().filter_map(stop).collect();
        stopping.into_iter().for_each(|thread| drop(thread.join()));
    }

    fn groups(&self) -> std::sync::MutexGuard<'_, Groups> {
        self.0.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Groups {
    /// Whether a group that has failed may be formed again now: at once for the first time, then
    /// after ever longer pauses.
    fn may_try_again(&mut self, name: &str, now: Duration) -> bool {
        let known = self.pauses.get(name).copied();
        let recent = known.filter(|known| now.saturating_sub(known.failed_at) < RAN_WELL);
        let pause = recent.map_or(Duration::ZERO, |known| known.pause);
        if recent.is_some_and(|known| now < known.failed_at + known.pause) {
            return false;
        }
        let next = (pause * 2).clamp(Duration::from_secs(1), LONGEST_PAUSE);
        self.pauses.insert(name.to_owned(), Pause { failed_at: now, pause: next });
        true
    }
}

/// The address in the line by which `thunder serve` says that it serves.
fn served_at(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.strip_prefix("serving ")?.split_once(" on http://")?;
    rest.split('/').next()?.parse().ok()
}

/// A port that is free now. Another program may take it before the rank does; the group is then
/// formed again with another.
fn free_port(ip: IpAddr) -> std::io::Result<u16> {
    Ok(TcpListener::bind((ip, 0))?.local_addr()?.port())
}

fn random_text() -> std::io::Result<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_server_that_is_ready_is_read() {
        let line = "serving builtin on http://127.0.0.1:40123/v1 (2 rank(s))";
        assert_eq!(served_at(line), "127.0.0.1:40123".parse().ok());
        for other in ["loading", "serving builtin", "serving x on http://nowhere/v1", ""] {
            assert_eq!(served_at(other), None, "{other}");
        }
    }

    #[test]
    fn a_group_that_keeps_failing_is_tried_ever_more_rarely() {
        let mut groups = Groups::default();
        let tried: Vec<u64> =
            (0..200).filter(|s| groups.may_try_again("m", Duration::from_secs(*s))).collect();
        assert_eq!(tried, [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181]);
        assert!(groups.may_try_again("m", Duration::from_secs(400)));
    }
}
