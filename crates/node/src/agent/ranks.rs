//! The rank processes of this machine: how they start, their state, and how they end.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thunder_cables::Network;
use thunder_cables::job::installed_cables;
use thunder_cables::lan::{self, Kinds};
use thunder_cluster::watched::WatchedRank;

use super::Agent;
use super::canary::Check;
use super::groups::Groups;
use super::state::State;
use crate::document::Stamp;
use crate::report::{NodeReport, RankReport, RankState};

/// Variables that the agent's user may have set and that would mislead a rank.
pub(super) const NOT_INHERITED: [&str; 11] = [
    "THUNDER_RANK",
    "THUNDER_WORLD_SIZE",
    "THUNDER_COORDINATOR",
    "THUNDER_SECRET",
    "THUNDER_TOKEN",
    "THUNDER_STORE",
    "THUNDER_CONFIG",
    // The agent reads its ranks' lines and writes them to its own log.
    "THUNDER_LOG_FORMAT",
    // The gateway sends the traces of its requests.
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "MLX_RANK",
    "MLX_HOSTFILE",
];

/// Variable: whether ranks encrypt data over TCP.
pub(super) const ENCRYPT: &str = "THUNDER_ENCRYPT";

/// Variable: the networks of the cables, which ranks prefer.
pub(super) const CABLES: &str = "THUNDER_CABLES";

/// Time for a model's earlier rank to end: TERM, then KILL, and the system frees its memory.
const END_LIMIT: Duration = Duration::from_secs(20);
/// If a rank's process is stopped for this long, it is ended and treated as dead.
const STOPPED_LIMIT: Duration = Duration::from_secs(1);

/// Prefix of the line with which a rank reports the loss of another rank.
const LOST_RANK: &str = "error: rank ";
/// Time until all nodes know that a model was unloaded.
const UNLOAD_SPREADS: Duration = Duration::from_millis(500);

/// What a rank of a group needs to start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StartRank {
    /// The model's name in the cluster.
    pub name: String,
    /// The model argument of `thunder serve`.
    pub model: String,
    /// Additional arguments.
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

/// What a rank's output says about its state.
#[derive(Debug, Default)]
pub(super) struct Heard {
    api: Option<SocketAddr>,
}

/// Whether a head has answered the canary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Canary {
    /// It is not serving yet.
    Waits,
    /// It was asked.
    Asked,
    /// Its answer is correct.
    Right,
}

/// A rank of this machine.
pub(super) struct OwnRank {
    pub placement: Stamp,
    rank: u32,
    /// The request with which it was started.
    start: StartRank,
    started_at: Instant,
    canary: Canary,
    /// Number of requests that it is answering.
    active: u32,
    /// When it was last used.
    used_at: Instant,
    /// `None` if it could not be started, or has ended.
    pub process: Option<WatchedRank>,
    heard: Arc<Mutex<Heard>>,
    key: String,
    pub ended: Option<String>,
    /// When the process was first seen stopped.
    stopped_at: Option<Duration>,
    /// Present bytes and total bytes of the model's files, if some are missing.
    part: Option<(u64, u64)>,
}

impl OwnRank {
    fn state(&self) -> RankState {
        let api = self.heard.lock().unwrap_or_else(PoisonError::into_inner).api;
        match (&self.ended, api) {
            (Some(why), _) => RankState::Ended(why.clone()),
            (None, Some(_)) if self.canary == Canary::Right => RankState::Ready,
            (None, _) => RankState::Starting,
        }
    }

    /// How long a serving head has had no request.
    pub fn idle_for(&self) -> Option<Duration> {
        let is_idle = self.rank == 0 && self.active == 0 && self.state() == RankState::Ready;
        is_idle.then(|| self.used_at.elapsed())
    }

    /// What to check, if the rank is a head that has just begun to serve.
    pub fn begin_check(&mut self) -> Option<Check> {
        if self.rank != 0 || self.canary != Canary::Waits || self.ended.is_some() {
            return None;
        }
        let api = self.heard.lock().unwrap_or_else(PoisonError::into_inner).api?;
        self.canary = Canary::Asked;
        let (start, key) = (self.start.clone(), self.key.clone());
        Some(Check { start, api, key, loading: self.started_at.elapsed() })
    }

    /// Notices that the process has ended, or was stopped for too long.
    pub fn look(&mut self, now: Duration) {
        let Some(process) = &mut self.process else { return };
        if let Some(words) = process.ended() {
            self.ended.get_or_insert(words);
        } else if !process.is_stopped() {
            self.stopped_at = None;
        } else if now.saturating_sub(*self.stopped_at.get_or_insert(now)) >= STOPPED_LIMIT {
            self.ended.get_or_insert("its process was stopped (SIGSTOP), so it was ended".to_owned());
        }
    }
}

impl Agent {
    /// Starts a rank after the model's earlier rank has ended, because memory may not suffice for
    /// both.
    pub(super) async fn start_rank(&self, start: &StartRank, coordinator: SocketAddr) -> Result<(), String> {
        self.end_earlier(start).await?;
        let known = self.lock().membership.document().placement(&start.name).map(|(stamp, _)| stamp);
        if known.is_some_and(|known| known > start.placement) {
            return Err(format!("{} was placed anew meanwhile", start.name));
        }
        let key = random_text().map_err(|error| error.to_string())?;
        let mut command = self.serve_command(&start.model, &start.arguments, &key);
        if start.ranks > 1 {
            command
                .env("THUNDER_RANK", start.rank.to_string())
                .env("THUNDER_WORLD_SIZE", start.ranks.to_string())
                .env("THUNDER_COORDINATOR", coordinator.to_string())
                .env("THUNDER_SECRET", &start.secret);
            // The operator may disable encryption on a network that nobody else uses.
            if std::env::var_os(ENCRYPT).is_none() {
                command.env(ENCRYPT, "1");
            }
            // The file that `thunder mac setup` has left here makes the ranks use the cables.
            let measured = self.measured_interfaces();
            if std::env::var_os(CABLES).is_none()
                && let Ok(Some(networks)) =
                    tokio::task::spawn_blocking(move || preferred_networks(&measured)).await
            {
                command.env(CABLES, networks);
            }
        }
        let heard = Arc::new(Mutex::new(Heard::default()));
        let (hear, name, version) = (heard.clone(), start.name.clone(), self.0.version.clone());
        let (agent, runtime, placement) = (self.clone(), tokio::runtime::Handle::current(), start.placement);
        let on_line = move |line: &str| {
            let text = format!("{name}: {line}");
            if line.starts_with(LOST_RANK) {
                // If a rank of an unloaded model ends before the others know of it, this is not a
                // failure.
                runtime.spawn(agent.clone().log_loss(name.clone(), placement, text));
            } else {
                agent.0.log.add(text);
            }
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

    /// Logs that a rank has lost another, unless the model was being unloaded.
    async fn log_loss(self, name: String, placement: Stamp, text: String) {
        tokio::time::sleep(UNLOAD_SPREADS).await;
        let document = self.lock().membership.document().clone();
        let wanted = document.models().find(|(known, _)| *known == name).map(|(_, wish)| wish.stamp);
        let sleeps = document.placement(&name).is_some_and(|(_, placement)| placement.asleep);
        if wanted.is_some_and(|wish| wish < placement) && !sleeps {
            self.0.log.add(text);
        }
    }

    /// `thunder serve` on loopback, with a key.
    pub(super) fn serve_command(&self, model: impl AsRef<OsStr>, arguments: &[String], key: &str) -> Command {
        let mut command = Command::new(&self.0.options.program);
        command.arg("serve").arg(model);
        command.args(["--host", "127.0.0.1", "--port", "0", "--no-store", "--relay"]);
        command.args(arguments);
        NOT_INHERITED.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.env("THUNDER_API_KEY", key);
        command
    }

    /// Adds a rank in place of an earlier rank of its model, which is ended.
    pub(super) fn note_rank(
        &self,
        start: &StartRank,
        process: Option<(WatchedRank, Arc<Mutex<Heard>>)>,
        key: String,
        ended: Option<String>,
    ) {
        let (process, heard) = process.map_or((None, Arc::default()), |(p, heard)| (Some(p), heard));
        let rank = OwnRank {
            placement: start.placement,
            rank: start.rank,
            start: start.clone(),
            started_at: Instant::now(),
            canary: Canary::Waits,
            active: 0,
            used_at: Instant::now(),
            process,
            heard,
            key,
            ended,
            stopped_at: None,
            part: self.part_of(&start.model),
        };
        let mut groups = self.groups();
        // An older group may fail after a newer one has taken its place, or while the agent is
        // ending.
        let is_late = groups.closing
            || groups.own.get(&start.name).is_some_and(|newer| newer.placement > start.placement);
        let unwanted = if is_late { Some(rank) } else { groups.own.insert(start.name.clone(), rank) };
        drop(groups);
        if let Some(process) = unwanted.and_then(|rank| rank.process) {
            self.end_process(start.name.clone(), process);
        }
    }

    /// Present bytes and total bytes of a model's files, if this node has a part of it.
    fn part_of(&self, model: &str) -> Option<(u64, u64)> {
        let cache = &self.0.options.models.cache;
        let is_part = thunder_hub::is_hub_name(model) && thunder_hub::locate_in(model, cache).is_err();
        let part = is_part.then(|| thunder_hub::part_in(model, cache)).flatten()?;
        Some((part.present, part.total))
    }

    /// Ends the model's earlier rank, and waits until no rank of the model is left.
    async fn end_earlier(&self, start: &StartRank) -> Result<(), String> {
        let earlier = {
            let mut groups = self.groups();
            let is_earlier = groups.own.get(&start.name).is_some_and(|rank| rank.placement < start.placement);
            if is_earlier { groups.own.remove(&start.name) } else { None }
        };
        if let Some(process) = earlier.and_then(|rank| rank.process) {
            self.end_process(start.name.clone(), process);
        }
        let mut changes = self.changes();
        let ended = async {
            while self.groups().is_ending(&start.name) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let limit = END_LIMIT.as_secs();
        let late = |_| format!("the earlier rank of {} did not end within {limit} s", start.name);
        tokio::time::timeout(END_LIMIT, ended).await.map_err(late)
    }

    /// Ends a process, which counts as ending until it has ended.
    pub(super) fn end_process(&self, name: String, process: WatchedRank) {
        *self.groups().ending.entry(name.clone()).or_default() += 1;
        let agent = self.clone();
        tokio::task::spawn_blocking(move || {
            process.stop();
            agent.groups().note_end(&name);
            agent.0.version.send_modify(|version| *version += 1);
        });
    }

    /// The address of the API of a group's head on this machine, and its key.
    pub(super) fn own_api(&self, model: &str, placement: Stamp) -> Option<(SocketAddr, String)> {
        let groups = self.groups();
        let serves = |rank: &&OwnRank| {
            rank.placement == placement && rank.ended.is_none() && rank.canary == Canary::Right
        };
        let rank = groups.own.get(model).filter(serves)?;
        let api = rank.heard.lock().unwrap_or_else(PoisonError::into_inner).api?;
        Some((api, rank.key.clone()))
    }

    /// Writes the ranks to this node's report; `machine` is the machine's new state.
    pub(super) fn report_ranks(&self, state: &mut State, machine: Option<NodeReport>) {
        let known = state.membership.report().map(|report| (**report).clone());
        let mut report = machine.or(known).unwrap_or_default();
        report.links = self.measured_links();
        report.speed = self.speed();
        report.together = self.speed_together();
        self.own_version().clone_into(&mut report.version);
        report.jobs = self.0.jobs.reports();
        // With TLS, the address includes the scheme.
        let scheme = if self.api_settings().tls.is_some() { "https://" } else { "" };
        report.api = self.0.api.map(|api| format!("{scheme}{api}"));
        let report_of = |(model, rank): (&String, &OwnRank)| RankReport {
            model: model.clone(),
            placement: rank.placement,
            rank: rank.rank,
            state: rank.state(),
            active: rank.active,
            part: rank.part,
        };
        let groups = self.groups();
        report.ranks = groups.own.iter().map(report_of).collect();
        report.failures.clone_from(&groups.failures);
        drop(groups);
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

    pub(super) fn groups(&self) -> std::sync::MutexGuard<'_, Groups> {
        self.0.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that a head of this node is answering.
pub(super) struct InUse {
    agent: Agent,
    model: String,
    placement: Stamp,
}

impl Agent {
    /// Counts a request to a head of this node until the guard is dropped.
    pub(super) fn in_use(&self, model: &str, placement: Stamp) -> InUse {
        self.groups().count_use(model, placement, 1);
        InUse { agent: self.clone(), model: model.to_owned(), placement }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.agent.groups().count_use(&self.model, self.placement, -1);
    }
}

impl Groups {
    fn count_use(&mut self, model: &str, placement: Stamp, change: i32) {
        if let Some(rank) = self.own.get_mut(model).filter(|rank| rank.placement == placement) {
            rank.active = rank.active.saturating_add_signed(change);
            rank.used_at = Instant::now();
        }
    }

    /// Whether this node's rank of a group is running.
    pub(super) fn is_alive(&self, start: &StartRank) -> bool {
        let rank = self.own.get(&start.name).filter(|rank| rank.placement == start.placement);
        rank.is_some_and(|rank| rank.ended.is_none() && rank.process.is_some())
    }

    /// Records whether a group answered the canary correctly. If not, the group is ended.
    pub(super) fn end_check(&mut self, start: &StartRank, outcome: Result<(), String>) {
        let rank = self.own.get_mut(&start.name).filter(|rank| rank.placement == start.placement);
        let Some(rank) = rank else { return };
        match outcome {
            Ok(()) => {
                rank.canary = Canary::Right;
                rank.used_at = Instant::now();
            }
            Err(why) => {
                rank.ended.get_or_insert(why);
            }
        }
    }

    fn is_ending(&self, name: &str) -> bool {
        self.ending.contains_key(name)
    }

    fn note_end(&mut self, name: &str) {
        let left: &mut BTreeMap<String, usize> = &mut self.ending;
        if let Some(count) = left.get_mut(name) {
            *count -= 1;
            if *count == 0 {
                left.remove(name);
            }
        }
    }
}

/// The networks that ranks of this machine prefer: cables, networks of the interfaces over which
/// other nodes were reached (the fastest first), then other Ethernet, then Wi-Fi.
pub(super) fn preferred_networks(measured: &[String]) -> Option<String> {
    let kinds = Kinds::read();
    let own = if_addrs::get_if_addrs().unwrap_or_default().into_iter().filter_map(|interface| {
        let if_addrs::IfAddr::V4(address) = &interface.addr else { return None };
        let network = Network::new(address.ip, address.netmask.to_bits().leading_ones() as u8)?;
        let place = measured.iter().position(|name| *name == interface.name);
        Some((place, kinds.of(&interface.name), network))
    });
    lan::preferred(installed_cables().as_deref(), own)
}

/// The address in the line with which `thunder serve` reports that it serves.
pub(super) fn served_at(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.strip_prefix("serving ")?.split_once(" on http://")?;
    rest.split('/').next()?.parse().ok()
}

/// A port that is free now. If another program takes it before the rank does, the group is formed
/// again with another port.
pub(super) fn free_port(ip: IpAddr) -> std::io::Result<u16> {
    Ok(TcpListener::bind((ip, 0))?.local_addr()?.port())
}

pub(super) fn random_text() -> std::io::Result<String> {
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
}
