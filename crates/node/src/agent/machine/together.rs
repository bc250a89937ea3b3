//! Common measurements. Nodes on one machine (containers, network namespaces, several agents) share
//! its memory and cores. They also measure it together, because their ranks compute at the same
//! time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::super::Agent;
use super::super::calls::Call;
use crate::id::NodeId;
use crate::report::{NodeReport, TogetherReport};

/// A try to measure together.
struct Try {
    /// Seconds for all nodes of the machine to get ready.
    set_up_s: u64,
    /// Milliseconds between two measurements, for the operands of the next.
    pause_ms: u64,
}

/// If a node was late, the next of these is tried: it gives a busy machine more time.
const TRIES: [Try; 5] = [
    Try { set_up_s: 3, pause_ms: 100 },
    Try { set_up_s: 3, pause_ms: 300 },
    Try { set_up_s: 8, pause_ms: 300 },
    Try { set_up_s: 8, pause_ms: 1000 },
    Try { set_up_s: 20, pause_ms: 1000 },
];
/// Time from the beginning of the measurement until a node has its result, without long pauses.
const LIMIT: Duration = Duration::from_secs(10);
/// At least the number of pauses of a measurement.
const PAUSES: u32 = 10;
/// Time for a report to reach this node.
const HEARD: Duration = Duration::from_secs(5);

/// The machines that have several nodes, with these nodes.
fn machines<'a>(nodes: impl Iterator<Item = (NodeId, &'a NodeReport)>) -> Vec<Vec<NodeId>> {
    let mut machines = BTreeMap::<&str, Vec<NodeId>>::new();
    for (node, report) in nodes {
        if let Some(boot) = &report.boot {
            machines.entry(boot).or_default().push(node);
        }
    }
    let mut shared: Vec<Vec<NodeId>> = machines.into_values().filter(|nodes| nodes.len() > 1).collect();
    shared.iter_mut().for_each(|nodes| nodes.sort_unstable());
    shared
}

/// The pause of the first try, and of nodes whose version sends none.
pub(in crate::agent) fn first_pause_ms() -> u64 {
    TRIES[0].pause_ms
}

impl Agent {
    /// The machines with several working nodes that have not measured together since the reports
    /// `before`.
    fn unmeasured_together(&self, before: &BTreeMap<NodeId, Arc<NodeReport>>) -> Vec<Vec<NodeId>> {
        let mut reports = self.reports();
        let state = self.lock();
        let is_drained =
            |id: &NodeId| state.membership.document().member(id).is_some_and(|member| member.drained);
        reports.retain(|id, _| !is_drained(id));
        drop(state);
        let mut machines = machines(reports.iter().map(|(id, report)| (*id, &**report)));
        let old = |id: &NodeId| before.get(id).and_then(|report| report.together.as_ref());
        let is_measured = |nodes: &Vec<NodeId>, id: &NodeId| {
            let together = reports[id].together.as_ref().filter(|together| Some(*together) != old(id));
            together.is_some_and(|together| together.nodes == *nodes)
        };
        machines.retain(|nodes| !nodes.iter().all(|id| is_measured(nodes, id)));
        machines
    }

    /// Makes the nodes of each machine measure it together, and waits for the results.
    pub(super) async fn measure_shared(
        &self,
        before: &BTreeMap<NodeId, Arc<NodeReport>>,
    ) -> Result<(), String> {
        let mut last = Ok(());
        for Try { set_up_s, pause_ms } in TRIES {
            let times = [Duration::from_secs(set_up_s), Duration::from_millis(pause_ms)];
            let machines = self.unmeasured_together(before);
            if machines.is_empty() {
                return Ok(());
            }
            let mut measuring = JoinSet::new();
            for nodes in machines {
                let (agent, before) = (self.clone(), before.clone());
                measuring.spawn(async move { agent.measure_one_shared(nodes, times, &before).await });
            }
            last = measuring.join_all().await.into_iter().collect();
            if last.is_ok() {
                return Ok(());
            }
        }
        last
    }

    async fn measure_one_shared(
        &self,
        nodes: Vec<NodeId>,
        [set_up, pause]: [Duration; 2],
        before: &BTreeMap<NodeId, Arc<NodeReport>>,
    ) -> Result<(), String> {
        let begin = SystemTime::now() + set_up;
        let begin_ms = begin.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let (pause_ms, limit) = (pause.as_millis() as u64, set_up + LIMIT + pause * PAUSES);
        let mut asking = JoinSet::new();
        for node in nodes.clone() {
            let (agent, nodes) = (self.clone(), nodes.clone());
            asking.spawn(async move {
                if node == agent.0.id {
                    return agent.measure_together(nodes, begin_ms, pause_ms).await;
                }
                let call = Call::MeasureTogether { nodes, begin_ms, pause_ms };
                agent.call_within(node, &call, limit).await.map(drop)
            });
        }
        asking.join_all().await.into_iter().collect::<Result<(), String>>()?;
        // Reports come over other connections than replies.
        let (mut changes, deadline) = (self.changes(), Instant::now() + HEARD);
        loop {
            changes.mark_unchanged();
            if !self.unmeasured_together(before).contains(&nodes) {
                return Ok(());
            }
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                let names: Vec<String> = nodes.iter().map(|node| self.name_of(node)).collect();
                let seconds = HEARD.as_secs();
                return Err(format!(
                    "{} share a machine and have measured it together, but their figures did not come within \
                     {seconds} s",
                    names.join(", ")
                ));
            }
        }
    }

    /// Measures this machine from a given time on, at the same time as the other nodes on it, with
    /// this pause between two measurements.
    pub(in crate::agent) async fn measure_together(
        &self,
        nodes: Vec<NodeId>,
        begin_ms: u64,
        pause_ms: u64,
    ) -> Result<(), String> {
        let turn = Arc::clone(&self.known_speed().turn);
        // Two nodes may request the same at once: the first measurement serves both.
        let _turn = match Arc::clone(&turn).try_lock_owned() {
            Ok(turn) => turn,
            Err(_) => {
                let turn = turn.lock_owned().await;
                if self.speed_together().is_some_and(|together| together.nodes == nodes) {
                    return Ok(());
                }
                turn
            }
        };
        let options = ["--together-at", &begin_ms.to_string(), "--pause", &pause_ms.to_string()];
        let speed = self.bench_machine(options.map(str::to_owned).to_vec()).await?;
        self.known_speed().together = Some(TogetherReport { nodes, speed });
        self.tell_speed();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_share_a_machine_if_they_say_the_same_boot() {
        let report =
            |boot: Option<&str>| NodeReport { boot: boot.map(str::to_owned), ..NodeReport::default() };
        let reports = [Some("b"), Some("a"), None, Some("b"), None].map(report);
        let id = |place: usize| NodeId([9 - place as u8; 32]);
        let nodes = reports.iter().enumerate().map(|(place, report)| (id(place), report));
        // Nodes that do not report a machine count as alone on theirs.
        assert_eq!(machines(nodes), [[id(3), id(0)]]);
    }
}
