//! The same job on several nodes, as one task that a person watches. A model that no node has is
//! downloaded by one of them; the others then take it from there.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::super::Agent;
use super::super::host::unix_s;
use super::{ModelAnswer, ModelAsk, RankPart, Work, split_revision};
use crate::id::NodeId;
use crate::report::{JobReport, JobState};

/// Tasks that are remembered.
const MOST_KEPT: usize = 16;
/// Interval at which other nodes' reports are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A job that its node does not report for this long is lost.
const SILENCE: Duration = Duration::from_secs(10);
/// After this long without a report a node is asked for its job again: an agent that was started
/// anew knows nothing of it.
const ASK_AGAIN: Duration = Duration::from_secs(2);

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
        let nodes = nodes.into_iter().map(|node| (node, None)).collect::<Vec<_>>();
        let (id, agent, model) = (self.enter_task(work, model, &nodes), self.clone(), model.to_owned());
        tokio::spawn(async move { agent.run_task(id, work, &model, nodes).await });
        id
    }

    /// Has a model brought to all of these nodes that lack it, before ranks start there. Names of
    /// paths and of models that come with the program are left alone.
    pub(in crate::agent) async fn bring(&self, model: &str, nodes: &[NodeId]) -> Result<(), String> {
        if !thunder_hub::is_hub_name(model) {
            return Ok(());
        }
        let lacking = self.nodes_with(model, nodes, false).await;
        self.bring_to(model, lacking.into_iter().map(|node| (node, None)).collect()).await
    }

    /// Has brought to each node of a group what its rank reads of the model. Nodes that have the
    /// whole model, or their part, are left alone.
    pub(in crate::agent) async fn bring_parts(
        &self,
        model: &str,
        arguments: &[String],
        nodes: &[NodeId],
    ) -> Result<(), String> {
        if nodes.len() < 2 || !thunder_hub::is_hub_name(model) {
            return self.bring(model, nodes).await;
        }
        let mut asking = JoinSet::new();
        for node in self.nodes_with(model, nodes, false).await {
            let rank = nodes.iter().position(|known| *known == node).unwrap_or(0) as u32;
            let part = RankPart { rank, ranks: nodes.len() as u32, arguments: arguments.to_owned() };
            let (agent, model) = (self.clone(), model.to_owned());
            asking.spawn(async move {
                let ask = ModelAsk::HasPart { model, part: part.clone() };
                let has = agent.ask_models(node, ask).await == Ok(ModelAnswer::Has(true));
                (!has).then_some((node, part))
            });
        }
        let mut lacking: Vec<(NodeId, RankPart)> = asking.join_all().await.into_iter().flatten().collect();
        lacking.sort_by_key(|(_, part)| part.rank);
        self.bring_to(model, lacking.into_iter().map(|(node, part)| (node, Some(part))).collect()).await
    }

    async fn bring_to(&self, model: &str, lacking: Vec<(NodeId, Option<RankPart>)>) -> Result<(), String> {
        if lacking.is_empty() {
            return Ok(());
        }
        let id = self.enter_task(Work::Pull, model, &lacking);
        self.run_task(id, Work::Pull, model, lacking).await;
        match self.0.tasks.failures(id) {
            failures if failures.is_empty() => Ok(()),
            failures => Err(failures.join("; ")),
        }
    }

    /// Those of the nodes that have a model, or that lack it. A node that does not say counts as
    /// neither.
    pub(in crate::agent) async fn nodes_with(&self, model: &str, nodes: &[NodeId], has: bool) -> Vec<NodeId> {
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

    fn enter_task(&self, work: Work, model: &str, nodes: &[(NodeId, Option<RankPart>)]) -> u64 {
        let waiting = |(node, _): &(NodeId, Option<RankPart>)| NodeTask {
            node: self.name_of(node),
            state: TaskState::Waiting,
            done: 0,
            total: 0,
            from: Vec::new(),
            took_ms: 0,
        };
        self.0.tasks.enter(work, model, nodes.iter().map(waiting).collect())
    }

    async fn run_task(&self, id: u64, work: Work, model: &str, nodes: Vec<(NodeId, Option<RankPart>)>) {
        let all: Vec<NodeId> = self.lock().membership.reachable().into_iter().collect();
        let is_alone = match work {
            // The newest comes from the hub, so one node asks for it first.
            Work::Update => true,
            Work::Pull => self.nodes_with(model, &all, true).await.is_empty(),
            Work::Verify => false,
        };
        let mut rest: Vec<(usize, (NodeId, Option<RankPart>))> = nodes.into_iter().enumerate().collect();
        let (mut commit, mut failed) = (None, Vec::new());
        // A node that fails to download all of it leaves that to the next, and gets its own part
        // afterwards: its disk may have no room for more.
        while is_alone && !rest.is_empty() {
            let (index, (node, part)) = rest.remove(0);
            if let Some(job) = self.run_on(id, (index, node), (work, model), None, None).await {
                commit = self.job_of(node, job).and_then(|report| report.commit);
                break;
            }
            failed.extend(part.map(|part| (index, (node, Some(part)))));
        }
        let mut running = JoinSet::new();
        for (index, (node, part)) in rest.into_iter().chain(failed) {
            let (agent, model, commit) = (self.clone(), model.to_owned(), commit.clone());
            running.spawn(async move { agent.run_on(id, (index, node), (work, &model), commit, part).await });
        }
        running.join_all().await;
        self.0.version.send_modify(|version| *version += 1);
    }

    /// Runs a node's part to its end. Returns the number of its job there, if that has ended well.
    async fn run_on(
        &self,
        id: u64,
        (index, node): (usize, NodeId),
        (work, model): (Work, &str),
        commit: Option<String>,
        part: Option<RankPart>,
    ) -> Option<u64> {
        let (name, revision) = split_revision(model);
        let ask =
            ModelAsk::Begin { work, model: name.to_owned(), revision: revision.to_owned(), commit, part };
        let set = |change: &dyn Fn(&mut NodeTask)| self.0.tasks.change(id, index, change);
        let (mut number, mut heard_at) = (None, self.now());
        let outcome = loop {
            match self.ask_models(node, ask.clone()).await {
                Ok(ModelAnswer::Begun(job)) => {
                    number = Some(job);
                    set(&|part| part.state = TaskState::Running);
                    let show = |report: &JobReport| {
                        set(&|part| {
                            (part.done, part.total, part.took_ms) =
                                (report.done, report.total, report.took_ms);
                            part.from.clone_from(&report.from);
                        });
                    };
                    if let Some(outcome) = self.follow(node, job, &mut heard_at, show).await {
                        break outcome;
                    }
                    if self.now().saturating_sub(heard_at) > SILENCE {
                        break Err("the node answers, but does not report its job".to_owned());
                    }
                }
                Ok(_) => break Err(format!("{} is of another version", self.name_of(&node))),
                Err(why) if number.is_none() || self.now().saturating_sub(heard_at) > SILENCE => {
                    break Err(why);
                }
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        };
        number = number.filter(|_| outcome.is_ok());
        let state = outcome.map_or_else(TaskState::Failed, TaskState::Done);
        set(&|part| part.state = state.clone());
        self.0.version.send_modify(|version| *version += 1);
        number
    }

    /// Follows a node's job by its reports until it has ended; `None` if the node has not reported
    /// it for a while.
    async fn follow(
        &self,
        node: NodeId,
        job: u64,
        heard_at: &mut Duration,
        show: impl Fn(&JobReport),
    ) -> Option<Result<String, String>> {
        let began = self.now();
        loop {
            if let Some(report) = self.job_of(node, job) {
                show(&report);
                *heard_at = self.now();
                match report.state {
                    JobState::Running => {}
                    JobState::Done(words) => return Some(Ok(words)),
                    JobState::Failed(why) => return Some(Err(why)),
                }
            }
            if self.now().saturating_sub(began.max(*heard_at)) > ASK_AGAIN {
                return None;
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
