//! The speed of this machine: measured once by `thunder bench machine`, kept on the disk, and sent
//! to other nodes in the report. [`together`] makes the nodes of one machine measure it at the same
//! time.

pub(super) mod together;

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_cluster::watched::{quiet_drivers, reason};

use super::Agent;
use super::calls::Call;
use crate::id::NodeId;
use crate::report::{NodeReport, SpeedReport, TogetherReport};
use crate::storage::DataFolder;

/// The file in the data folder.
const FILE: &str = "machine.json";
/// Time for all nodes to measure, on busy machines.
const LIMIT: Duration = Duration::from_secs(45);
/// The longest output of the measurement.
const LONGEST_OUTPUT_BYTES: usize = 64 << 10;

/// What is known about this machine's speed.
#[derive(Debug, Default)]
pub(super) struct Speed {
    measured: Option<SpeedReport>,
    /// This node's share while the other nodes of the machine compute too.
    together: Option<TogetherReport>,
    /// Held during a common measurement, so that there is only one.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// A measurement is running.
    measures: bool,
    /// Why the last measurement failed.
    failed: Option<String>,
}

/// What is kept on the disk.
#[derive(Serialize, Deserialize)]
struct Kept {
    /// The measured version: for another version or machine, the measurement is repeated.
    version: String,
    system: String,
    cores: u32,
    /// The device that ranks use according to the agent's environment.
    #[serde(default)]
    device: String,
    speed: SpeedReport,
}

impl Speed {
    /// Earlier figures of this machine and version.
    pub fn read(folder: &DataFolder) -> Self {
        // If the file cannot be read, the machine is measured again.
        let bytes = folder.read(FILE).ok().flatten().unwrap_or_default();
        let here = NodeReport::of_this_machine();
        let kept = serde_json::from_slice::<Kept>(&bytes).ok().filter(|kept| {
            (&kept.version, &kept.system, kept.cores) == (&here.version, &here.system, here.cores)
                && kept.device == device()
                // Earlier versions did not report these.
                && kept.speed.attention_flops > 0
                && kept.speed.gpu.as_ref().is_none_or(|gpu| gpu.largest_buffer > 0)
        });
        Self { measured: kept.map(|kept| kept.speed), ..Self::default() }
    }
}

/// The device that ranks use by default. They inherit it.
fn device() -> String {
    std::env::var("THUNDER_DEVICE").unwrap_or_default()
}

impl Agent {
    fn known_speed(&self) -> std::sync::MutexGuard<'_, Speed> {
        self.0.speed.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The speed of this machine, if it was measured.
    pub(super) fn speed(&self) -> Option<SpeedReport> {
        self.known_speed().measured.clone()
    }

    /// The speed of this machine for this node while other nodes on it compute, if it was measured.
    pub(super) fn speed_together(&self) -> Option<TogetherReport> {
        self.known_speed().together.clone()
    }

    /// Measures this machine, unless a measurement is running, or was done and `again` is false.
    pub(super) async fn measure_machine(self, again: bool) {
        {
            let mut speed = self.known_speed();
            if speed.measures || (speed.measured.is_some() && !again) {
                return;
            }
            (speed.measures, speed.failed) = (true, None);
        }
        // Running ranks use the memory bandwidth, so a measurement at the same time is not kept.
        let is_quiet = self.groups().own.is_empty();
        let measured = self.bench_machine(Vec::new()).await;
        match &measured {
            Ok(measured) if is_quiet => self.keep_speed(measured.clone()),
            Ok(_) => {}
            Err(why) => self.0.log.add(format!("this machine cannot be measured: {why}")),
        }
        {
            let mut speed = self.known_speed();
            speed.measures = false;
            speed.measured = measured.as_ref().ok().cloned();
            speed.failed = measured.err();
        }
        self.tell_speed();
    }

    /// Runs `thunder bench machine` with additional options.
    async fn bench_machine(&self, options: Vec<String>) -> Result<SpeedReport, String> {
        let program = self.0.options.program.clone();
        let measuring = tokio::task::spawn_blocking(move || {
            let mut command = Command::new(&program);
            command.args(["bench", "machine", "--json"]).args(options).stdin(Stdio::null());
            quiet_drivers(&mut command);
            let output = command.output().map_err(|error| format!("{}: {error}", program.display()))?;
            let text = output.stdout.get(..LONGEST_OUTPUT_BYTES).unwrap_or(&output.stdout);
            serde_json::from_slice::<SpeedReport>(text).map_err(|error| {
                let said = String::from_utf8_lossy(&output.stderr);
                let said = reason(said.lines()).map_or_else(|| error.to_string(), str::to_owned);
                format!("`thunder bench machine` ended with {}: {said}", output.status)
            })
        });
        measuring.await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Writes the machine's speed to this node's report.
    fn tell_speed(&self) {
        let mut state = self.lock();
        self.report_ranks(&mut state, None);
        self.settle(&mut state);
        drop(state);
        self.0.version.send_modify(|version| *version += 1);
    }

    fn keep_speed(&self, speed: SpeedReport) {
        let here = NodeReport::of_this_machine();
        let kept =
            Kept { version: here.version, system: here.system, cores: here.cores, device: device(), speed };
        let written = serde_json::to_vec(&kept).map_err(|error| error.to_string());
        let written =
            written.and_then(|json| self.0.folder.write(FILE, &json).map_err(|error| error.to_string()));
        if let Err(why) = written {
            self.0.log.add(format!("this machine's speed is measured again after a restart: {why}"));
        }
    }

    /// The reports of the nodes that answer.
    fn reports(&self) -> BTreeMap<NodeId, Arc<NodeReport>> {
        let state = self.lock();
        let peers = state.membership.peers().filter(|(_, peer)| peer.up);
        let mut reports: BTreeMap<NodeId, Arc<NodeReport>> =
            peers.map(|(id, peer)| (id, peer.report.clone().unwrap_or_default())).collect();
        reports.insert(self.0.id, state.membership.report().cloned().unwrap_or_default());
        reports
    }

    /// The nodes that answer and have not measured their machine since the reports `before`.
    fn unmeasured(&self, before: &BTreeMap<NodeId, Arc<NodeReport>>) -> Vec<NodeId> {
        let old = |id: &NodeId| before.get(id).and_then(|report| report.speed.as_ref());
        let reports = self.reports();
        let unmeasured =
            reports.iter().filter(|(id, report)| report.speed.is_none() || report.speed.as_ref() == old(id));
        unmeasured.map(|(id, _)| *id).collect()
    }

    /// Makes every node that answers measure its machine, and nodes on the same machine measure it
    /// together. Nodes that have figures keep them, unless `again` is set.
    pub(super) async fn measure_machines(&self, again: bool) -> Result<(), String> {
        let before = if again { self.reports() } else { BTreeMap::new() };
        self.measure_alone(&before).await?;
        self.measure_shared(&before).await
    }

    /// Makes every node that answers measure its machine, and waits for the results.
    async fn measure_alone(&self, before: &BTreeMap<NodeId, Arc<NodeReport>>) -> Result<(), String> {
        let mut changes = self.changes();
        let mut asking = tokio::task::JoinSet::new();
        for node in self.unmeasured(before) {
            let (agent, again) = (self.clone(), before.contains_key(&node));
            asking.spawn(async move {
                if node == agent.0.id {
                    agent.measure_machine(again).await;
                    return Ok(());
                }
                let call = if again { Call::MeasureMachineAgain } else { Call::MeasureMachine };
                agent.call(node, &call).await.map(drop)
            });
        }
        let asked: Result<(), String> = asking.join_all().await.into_iter().collect();
        asked.map_err(|why| format!("{why}; it may be of a version that measures nothing"))?;
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            changes.mark_unchanged();
            let left = self.unmeasured(before);
            if left.is_empty() {
                return Ok(());
            }
            if let Some(why) = self.known_speed().failed.clone().filter(|_| left.contains(&self.0.id)) {
                return Err(format!("this machine cannot be measured: {why}"));
            }
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                let names: Vec<String> = left.iter().map(|node| self.name_of(node)).collect();
                return Err(format!(
                    "{} did not measure its machine within {} s; `thunder cluster logs NODE` may say why",
                    names.join(", "),
                    LIMIT.as_secs()
                ));
            }
        }
    }
}
