//! The same job on several nodes, as one task that a person watches. A model that no node has is
//! downloaded by one of them; the others then take it from there.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::super::Agent;
use super::super::host::unix_s;
use super::{ModelAnswer, ModelAsk, Work, split_revision};
use crate::id::NodeId;
use crate::report::{JobReport, JobState};

/// Tasks that are remembered.
const MOST_KEPT: usize = 16;
/// Interval at which other nodes' reports are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A job that its node does not report for this long is lost.
const SILENCE: Duration = Duration::from_secs(10);

/// How a node's part of a task is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// It begins when another node has the model.
    Waiting,
    /// It runs.
    Running,
    /// It has ended well, in words.
    Done(String),
    /// It has failed, in words.
    Failed(String),
}

/// A node's part of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTask {
    /// Name of the node.
    pub node: String,
    /// How it is.
    pub state: TaskState,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all; 0 until that is known.
    pub total: u64,
    /// Who sends the bytes: nodes, or the hub's address.
    pub from: Vec<String>,
    /// Milliseconds that the node took.
    #[serde(default)]
    pub took_ms: u64,
}

/// A task that this node was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskStatus {
    /// Its number on this node.
    pub id: u64,
    /// What is done.
    pub work: Work,
    /// With which model.
    pub model: String,
    /// On which nodes.
    pub nodes: Vec<NodeTask>,
}

impl TaskStatus {
    /// Whether all nodes have ended.
    pub fn is_over(&self) -> bool {
        let is_over = |node: &NodeTask| matches!(node.state, TaskState::Done(_) | TaskState::Failed(_));
        self.nodes.iter().all(is_over)
    }

    /// The failures, in words.
    pub fn failures(&self) -> Vec<String> {
        let failed = |node: &NodeTask| match &node.state {
            TaskState::Failed(why) => Some(format!("{}: {why}", node.node)),
            _ => None,
        };
        self.nodes.iter().filter_map(failed).collect()
    }
}

/// The tasks that this node was asked for.
#[derive(Debug, Default)]
pub(in crate::agent) struct Tasks(Mutex<VecDeque<TaskStatus>>);

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, VecDeque<TaskStatus>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn all(&self) -> Vec<TaskStatus> {
        self.lock().iter().cloned().collect()
    }

    fn enter(&self, work: Work, model: &str, nodes: Vec<NodeTask>) -> u64 {
        let mut tasks = self.lock();
        if tasks.len() >= MOST_KEPT {
            let over = tasks.iter().position(TaskStatus::is_over).unwrap_or(0);
            tasks.remove(over);
        }
        let id = tasks.back().map_or(unix_s() << 10, |last| last.id + 1);
        tasks.push_back(TaskStatus { id, work, model: model.to_owned(), nodes });
        id
    }

    fn change(&self, id: u64, node: usize, change: impl FnOnce(&mut NodeTask)) {
        let mut tasks = self.lock();
        let task = tasks.iter_mut().find(|task| task.id == id);
        if let Some(node) = task.and_then(|task| task.nodes.get_mut(node)) {
            change(node);
        }
    }

    fn failures(&self, id: u64) -> Vec<String> {
        self.lock().iter().find(|task| task.id == id).map(TaskStatus::failures).unwrap_or_default()
    }
}

impl Agent {
    /// Begins a task and returns its number; [`Agent::status`] shows how it goes on.
    pub(in crate::agent) fn begin_task(&self, work: Work, model: &str, nodes: Vec<NodeId>) -> u64 {
        let (id, agent, model) = (self.enter_task(work, model, &nodes), self.clone(), model.to_owned());
        tokio::spawn(async move { agent.run_task(id, work, &model, &nodes).await });
        id
    }

    /// Has a model brought to all of these nodes that lack it, before ranks start there. Names of
    /// paths and of models that come with the program are left alone.
    pub(in crate::agent) async fn bring(&self, model: &str, nodes: &[NodeId]) -> Result<(), String> {
        if !thunder_hub::is_hub_name(model) {
            return Ok(());
        }
        let lacking = self.nodes_with(model, nodes, false).await;
        if lacking.is_empty() {
            return Ok(());
        }
        let id = self.enter_task(Work::Pull, model, &lacking);
        self.run_task(id, Work::Pull, model, &lacking).await;
        match self.0.tasks.failures(id) {
            failures if failures.is_empty() => Ok(()),
            failures => Err(failures.join("; ")),
        }
    }

    /// Those of the nodes that have a model, or that lack it. A node that does not say counts as
    /// neither.
    async fn nodes_with(&self, model: &str, nodes: &[NodeId], has: bool) -> Vec<NodeId> {
        let mut asking = JoinSet::new();
        for (index, node) in nodes.iter().enumerate() {
            let (agent, node, ask) = (self.clone(), *node, ModelAsk::Has(model.to_owned()));
            asking.spawn(async move { (index, node, agent.ask_models(node, ask).await) });
        }
        let mut found: Vec<(usize, NodeId)> = asking
            .join_all()
            .await
            .into_iter()
            .filter(|(_, _, answer)| *answer == Ok(ModelAnswer::Has(has)))
            .map(|(index, node, _)| (index, node))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, node)| node).collect()
    }

    fn enter_task(&self, work: Work, model: &str, nodes: &[NodeId]) -> u64 {
        let waiting = |node: &NodeId| NodeTask {
            node: self.name_of(node),
            state: TaskState::Waiting,
            done: 0,
            total: 0,
            from: Vec::new(),
            took_ms: 0,
        };
        self.0.tasks.enter(work, model, nodes.iter().map(waiting).collect())
    }

    async fn run_task(&self, id: u64, work: Work, model: &str, nodes: &[NodeId]) {
        let all: Vec<NodeId> = self.lock().membership.reachable().into_iter().collect();
        let is_alone = match work {
            // The newest comes from the hub, so one node asks for it first.
            Work::Update => true,
            Work::Pull => self.nodes_with(model, &all, true).await.is_empty(),
            Work::Verify => false,
        };
        let mut rest: Vec<(usize, NodeId)> = nodes.iter().copied().enumerate().collect();
        let mut commit = None;
        // A node that fails to download it leaves that to the next.
        while is_alone && !rest.is_empty() {
            let (index, node) = rest.remove(0);
            if let Some(job) = self.run_on(id, index, node, work, model, None).await {
                commit = self.job_of(node, job).and_then(|report| report.commit);
                break;
            }
        }
        let mut running = JoinSet::new();
        for (index, node) in rest {
            let (agent, model, commit) = (self.clone(), model.to_owned(), commit.clone());
            running.spawn(async move { agent.run_on(id, index, node, work, &model, commit).await });
        }
        running.join_all().await;
        self.0.version.send_modify(|version| *version += 1);
    }

    /// Runs a node's part to its end. Returns the number of its job there, if that has ended well.
    async fn run_on(
        &self,
        id: u64,
        index: usize,
        node: NodeId,
        work: Work,
        model: &str,
        commit: Option<String>,
    ) -> Option<u64> {
        let (name, revision) = split_revision(model);
        let ask = ModelAsk::Begin { work, model: name.to_owned(), revision: revision.to_owned(), commit };
        let set = |change: &dyn Fn(&mut NodeTask)| self.0.tasks.change(id, index, change);
        let mut number = None;
        let outcome = match self.ask_models(node, ask).await {
            Ok(ModelAnswer::Begun(job)) => {
                number = Some(job);
                set(&|part| part.state = TaskState::Running);
                self.follow(node, job, |report| {
                    set(&|part| {
                        (part.done, part.total, part.took_ms) = (report.done, report.total, report.took_ms);
                        part.from.clone_from(&report.from);
                    });
                })
                .await
            }
            Ok(_) => Err(format!("{} is of another version", self.name_of(&node))),
            Err(why) => Err(why),
        };
        number = number.filter(|_| outcome.is_ok());
        let state = outcome.map_or_else(TaskState::Failed, TaskState::Done);
        set(&|part| part.state = state.clone());
        self.0.version.send_modify(|version| *version += 1);
        number
    }

    /// Follows a node's job by its reports until it has ended.
    async fn follow(&self, node: NodeId, job: u64, show: impl Fn(&JobReport)) -> Result<String, String> {
        let mut heard_at = self.now();
        loop {
            let report = self.job_of(node, job);
            match &report {
                Some(report) => {
                    show(report);
                    heard_at = self.now();
                    match &report.state {
                        JobState::Running => {}
                        JobState::Done(words) => return Ok(words.clone()),
                        JobState::Failed(why) => return Err(why.clone()),
                    }
                }
                None if self.now().saturating_sub(heard_at) > SILENCE => {
                    return Err("the node does not report its job any more: is its agent down?".to_owned());
                }
                None => {}
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// What is known of a node's job; `None` if the node is down or does not know it.
    fn job_of(&self, node: NodeId, job: u64) -> Option<JobReport> {
        if node == self.0.id {
            return self.0.jobs.reports().into_iter().find(|report| report.id == job);
        }
        let state = self.lock();
        let (_, peer) = state.membership.peers().find(|(id, peer)| *id == node && peer.up)?;
        peer.report.as_ref()?.jobs.iter().find(|report| report.id == job).cloned()
    }
}
