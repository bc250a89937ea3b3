//! The Unix socket on which the command line talks to the agent of its machine. Only the agent's
//! user can open it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_access::Actor;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

use super::calls::{Call, CallReply};
use super::desk::CableBench;
use super::host::unix_s;
use super::log::LogLine;
use super::measure;
use super::models::{ModelAnswer, ModelAsk};
use super::{Agent, AgentError, CONTROL_FILE, DOCUMENT_FILE, Status};
use crate::document::{Document, DocumentError, ModelWish, OnLoss, PlannedLayout};
use crate::gate::AcceptFailures;
use crate::id::NodeId;
use crate::identity::Identity;
use crate::joining::token::Token;
use crate::membership::ChangeId;
use crate::wire::{self, LONGEST_FRAME_BYTES, WireError};

/// Time that a change may take to reach another node.
const SPREAD_LIMIT: Duration = Duration::from_secs(3);
/// Time for the last messages to arrive at the other members, once they are written.
const FAREWELL: Duration = Duration::from_millis(300);
/// Time for a request to arrive.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Time for the longest request: approving waits for the network.
const REPLY_LIMIT: Duration = Duration::from_secs(60);
/// Time for measurements: 63 rounds for the links of 64 nodes, about 2 s each, more on busy
/// machines. Also for the headers of a model with many files.
const MEASURE_LIMIT: Duration = Duration::from_secs(600);

/// Time for the reply to a question that the agent answers from its memory: not less, because
/// measurements take all cores.
const QUERY_LIMIT: Duration = Duration::from_secs(10);
/// During longer work the agent is asked at this interval whether it still answers.
const ALIVE_EVERY: Duration = Duration::from_secs(2);
/// Time for that answer.
const ALIVE_LIMIT: Duration = QUERY_LIMIT;

/// Time for other nodes' reports to arrive after their measurements.
const HEARD_LIMIT: Duration = Duration::from_secs(2);

/// A request of the command line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Request {
    /// The cluster as this node sees it.
    Status,
    /// Admit the new node that shows this code.
    Approve(String),
    /// Issue a token that is valid for this many seconds.
    Token(u64),
    /// Remove the member with this name or id for good.
    Remove(String),
    /// Set whether a member gets new work.
    Drain {
        /// Name or id.
        node: String,
        /// False: it gets work again.
        drained: bool,
    },
    /// Serve a model.
    Load {
        /// An argument of `thunder serve`, and the model's name in the API.
        model: String,
        /// Names or ids of the nodes that may run it; empty: any.
        nodes: Vec<String>,
        /// Number of nodes that run it together; `None`: all that may run it.
        count: Option<u32>,
        /// More arguments for `thunder serve`.
        arguments: Vec<String>,
        /// Shares of the model, by the nodes' names or ids.
        #[serde(default)]
        weights: Vec<(String, u32)>,
        /// Planned layouts, best first, for each replica.
        #[serde(default)]
        layouts: Vec<Vec<PlannedLayout>>,
        /// Groups that serve the model.
        #[serde(default = "one")]
        replicas: u32,
        /// Seconds without a request after which the model is unloaded until the next request.
        #[serde(default)]
        idle_unload_s: Option<u64>,
        /// What to do with the model when a node of its group is lost.
        #[serde(default)]
        on_loss: OnLoss,
    },
    /// Stop serving a model.
    Unload(String),
    /// Measure the links between all nodes that answer, one at a time.
    MeasureLinks,
    /// Make every node that answers measure its speed, unless it has.
    MeasureMachines {
        /// Also nodes that have measured it.
        #[serde(default)]
        again: bool,
    },
    /// Recent events on a node.
    Logs {
        /// Name or id; `None`: this node.
        node: Option<String>,
        /// Maximum number of lines.
        lines: usize,
        /// Only lines after this number.
        after: u64,
    },
    /// The output of a machine's own commands about its ports and cables (`thunder mac check`).
    Look {
        /// Name or id; `None`: this node.
        node: Option<String>,
    },
    /// Measure a cable between two nodes.
    MeasureCable(CableBench),
    /// A question about the models on nodes' disks, or a job with one.
    Models {
        /// Names or ids; empty: all nodes that answer.
        nodes: Vec<String>,
        /// The question or job.
        ask: ModelAsk,
    },
    /// Fetch the parts of this model of the hub that a plan reads. The model is not on this
    /// machine.
    Headers(String),
    /// The counts of the models' heads, as in `GET /admin/models`.
    Served,
    /// Leave the cluster, and end the agent.
    Leave,
    /// End the agent.
    Stop,
}

fn one() -> u32 {
    1
}

/// The agent's reply.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The cluster.
    Status(Box<Status>),
    /// The name of the node that was admitted.
    Approved(String),
    /// A token.
    Token(String),
    /// A change was made. False: no other node holds it yet.
    Changed {
        /// Name of the affected node.
        name: String,
        /// Whether another node holds the change.
        spread: bool,
    },
    /// Recent events of a node, the oldest first.
    Logs(Vec<LogLine>),
    /// The commands' output, for `thunder_cables::Machine::read`.
    Looked(String),
    /// The output of rank 0 of `thunder bench comm`.
    CableMeasured(String),
    /// Each node's answer about its models.
    Models(Vec<(String, Result<ModelAnswer, String>)>),
    /// A folder or GGUF file that opens like the model's, with headers only.
    Headers(PathBuf),
    /// The models with the counts of their heads, as JSON text.
    Served(String),
    /// The number in [`Status::tasks`] of the task that has begun.
    Begun(u64),
    /// Done.
    Done,
    /// The request failed; a message for the user.
    Failed(String),
}

/// Why the agent of this machine did not answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No agent is running.
    #[error("no agent runs with the data folder {0}: start `thunder up`, or name the folder by --data")]
    NoAgent(String),
    /// The connection failed.
    #[error("the agent does not answer: {0}")]
    Wire(#[from] WireError),
    /// Its process accepts connections and does not reply: it is stopped, or hangs.
    #[error("the agent{} has not answered for {} s: {}", process(.pid), .limit.as_secs(), remedy(.pid))]
    Silent {
        /// Its process, if the system tells it.
        pid: Option<i32>,
        /// Time that it had.
        limit: Duration,
    },
    /// The agent refused.
    #[error("{0}")]
    Failed(String),
}

fn process(pid: &Option<i32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

fn remedy(pid: &Option<i32>) -> String {
    let pid = pid.map_or_else(|| "PID".to_owned(), |pid| pid.to_string());
    format!(
        "if it was stopped (Ctrl-Z, SIGSTOP), `kill -CONT {pid}` lets it go on; else `kill -KILL {pid}` ends it, and \
         `thunder up` starts it again"
    )
}

/// Sends a request to the agent with this data folder.
///
/// # Errors
/// If it is not running, does not answer, or refuses.
pub async fn ask(data: &Path, request: &Request) -> Result<Reply, ControlError> {
    let mut stream = connect(data).await?;
    let limit = match request {
        Request::MeasureLinks
        | Request::MeasureMachines { .. }
        | Request::Headers(_)
        // The headers of its model come first.
        | Request::Load { .. } => MEASURE_LIMIT,
        Request::Status => QUERY_LIMIT,
        _ => REPLY_LIMIT,
    };
    let pid = pid_of(&stream);
    let reply = wire::within(limit, exchange(&mut stream, request));
    let reply = match request {
        Request::Status => reply.await,
        _ => tokio::select! {
            reply = reply => reply,
            silent = until_silent(data) => return Err(silent),
        },
    };
    match reply {
        Ok(Reply::Failed(why)) => Err(ControlError::Failed(why)),
        Err(WireError::TimedOut(limit)) if limit == QUERY_LIMIT => Err(ControlError::Silent { pid, limit }),
        reply => Ok(reply?),
    }
}

async fn connect(data: &Path) -> Result<UnixStream, ControlError> {
    let stream = UnixStream::connect(data.join(CONTROL_FILE)).await;
    stream.map_err(|_| ControlError::NoAgent(data.display().to_string()))
}

/// The process at the other end.
fn pid_of(stream: &UnixStream) -> Option<i32> {
    stream.peer_cred().ok()?.pid()
}

async fn exchange(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    request: &Request,
) -> Result<Reply, WireError> {
    wire::send(stream, request).await?;
    wire::receive(stream, LONGEST_FRAME_BYTES).await
}

/// Ends when the agent is silent. A connection cannot tell a stopped process from one that works.
async fn until_silent(data: &Path) -> ControlError {
    loop {
        tokio::time::sleep(ALIVE_EVERY).await;
        // If it has ended, the request's own connection says so.
        let Ok(mut stream) = connect(data).await else { continue };
        let pid = pid_of(&stream);
        let alive = exchange(&mut stream, &Request::Status);
        if tokio::time::timeout(ALIVE_LIMIT, alive).await.is_err() {
            return ControlError::Silent { pid, limit: ALIVE_LIMIT };
        }
    }
}

/// Opens the socket. The data folder's lock guarantees that no other agent uses it.
pub(super) fn listen(agent: &Agent) -> Result<(), AgentError> {
    let path = agent.0.folder.file(CONTROL_FILE);
    let failed = |why| AgentError::Control { path: path.clone(), why };
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    // Only the owner can enter the folder, so nobody can connect before the mode is set.
    let listener = UnixListener::bind(&path).map_err(failed)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    let agent = agent.clone();
    tokio::spawn(async move {
        let mut failures = AcceptFailures::default();
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    tokio::spawn(serve(agent.clone(), stream));
                }
                Err(error) => failures.pause("commands", &error).await,
            }
        }
    });
    Ok(())
}

async fn serve(agent: Agent, mut stream: UnixStream) {
    let request = wire::receive(&mut stream, LONGEST_FRAME_BYTES);
    let Ok(request) = wire::within(REQUEST_LIMIT, request).await else { return };
    let ends = matches!(request, Request::Leave | Request::Stop);
    let (mut reader, mut writer) = stream.split();
    let reply = tokio::select! {
        reply = agent.answer(request) => reply.unwrap_or_else(Reply::Failed),
        // The command has ended, e.g. by Ctrl-C: nothing is admitted or measured for it.
        _ = reader.read_u8() => return,
    };
    let succeeded = !matches!(reply, Reply::Failed(_));
    let _ = wire::send(&mut writer, &reply).await;
    if ends && succeeded {
        agent.0.ending.send_replace(true);
    }
}

impl Agent {
    /// Carries out a request of the command line.
    ///
    /// # Errors
    /// A message for the user.
    pub async fn answer(&self, request: Request) -> Result<Reply, String> {
        self.answer_as(Actor::local(), request).await
    }

    /// Carries out a request, without an audit record.
    pub(super) async fn carry_out(&self, request: Request) -> Result<Reply, String> {
        match request {
            Request::Status => Ok(Reply::Status(Box::new(self.status()))),
            Request::Headers(model) => self.headers_of(model).await.map(Reply::Headers),
            Request::Served => Ok(Reply::Served(self.served_models().await.to_string())),
            Request::Approve(code) => self.approve(&code).await.map(Reply::Approved),
            Request::Token(life_s) => self.issue_token(life_s).map(Reply::Token),
            Request::Remove(node) => {
                let (id, name) = self.find_member(&node)?;
                if id == self.0.id {
                    return Err("this is the node itself: use `thunder cluster leave`".to_owned());
                }
                let spread = self.change(|document| document.remove_member(&id)).await?;
                Ok(Reply::Changed { name, spread })
            }
            Request::Drain { node, drained } => {
                let (id, name) = self.find_member(&node)?;
                let me = self.0.id;
                let change = |document: &mut Document| {
                    let member = document.member(&id).cloned().ok_or(DocumentError::NoMember(id))?;
                    document.set_member(me, id, crate::document::Member { drained, ..member })
                };
                let spread = self.change(change).await?;
                Ok(Reply::Changed { name, spread })
            }
            Request::Load {
                model,
                nodes,
                count,
                arguments,
                weights,
                layouts,
                replicas,
                idle_unload_s,
                on_loss,
            } => {
                let find = |node: &String| self.find_member(node).map(|(id, _)| id);
                let mut nodes = nodes.iter().map(find).collect::<Result<Vec<_>, _>>()?;
                let weigh = |(node, weight): &(String, u32)| find(node).map(|id| (id, *weight));
                let named = weights.iter().map(weigh).collect::<Result<Vec<_>, _>>()?;
                let weights: BTreeMap<NodeId, u32> = named.iter().copied().collect();
                if let Some((id, _)) = named.iter().find(|(id, _)| !nodes.is_empty() && !nodes.contains(id)) {
                    let node = self.name_of(id);
                    return Err(format!("{node} has a share, but is not among the nodes that run the model"));
                }
                if nodes.is_empty() {
                    // In the order of their names in the request, because stages are formed in this
                    // order.
                    nodes = named.iter().map(|(id, _)| *id).collect();
                    let mut seen = BTreeSet::new();
                    nodes.retain(|id| seen.insert(*id));
                }
                let wish = ModelWish {
                    model,
                    nodes,
                    count,
                    arguments,
                    weights,
                    idle_unload_s,
                    on_loss,
                    ..ModelWish::default()
                };
                let name = wish.model.clone();
                let spread = self.load(wish, layouts, replicas).await?;
                Ok(Reply::Changed { name, spread })
            }
            Request::Unload(name) => self.unload(name).await,
            Request::MeasureLinks => self.measure_all().await.map(|()| Reply::Done),
            Request::MeasureMachines { again } => self.measure_machines(again).await.map(|()| Reply::Done),
            Request::Logs { node, lines, after } => {
                let id = node.map_or(Ok(self.0.id), |node| self.find_member(&node).map(|(id, _)| id))?;
                if id == self.0.id {
                    return Ok(Reply::Logs(self.0.log.lines(lines, after)));
                }
                match self.call(id, &Call::Logs { lines, after }).await?.0 {
                    CallReply::Logs(lines) => Ok(Reply::Logs(lines)),
                    _ => Err(format!("{} is of a version without logs", self.name_of(&id))),
                }
            }
            Request::Look { node } => {
                let id = node.map_or(Ok(self.0.id), |node| self.find_member(&node).map(|(id, _)| id))?;
                self.look_at(id).await.map(Reply::Looked)
            }
            Request::MeasureCable(bench) => self.measure_cable(bench).await.map(Reply::CableMeasured),
            Request::Models { nodes, ask } => {
                let ids = if nodes.is_empty() {
                    self.lock().membership.reachable().into_iter().collect()
                } else {
                    let find = |node: &String| self.find_member(node).map(|(id, _)| id);
                    nodes.iter().map(find).collect::<Result<Vec<_>, _>>()?
                };
                self.models_on(ids, ask).await
            }
            Request::Leave => self.leave().await.map(|()| Reply::Done),
            Request::Stop => Ok(Reply::Done),
        }
    }

    /// Asks nodes about their models, or starts a job on them.
    async fn models_on(&self, nodes: Vec<NodeId>, ask: ModelAsk) -> Result<Reply, String> {
        if let ModelAsk::Begin { work, model, revision, .. } = ask {
            let named = if revision == "main" { model } else { format!("{model}@{revision}") };
            return Ok(Reply::Begun(self.begin_task(work, &named, nodes)));
        }
        let mut asking = tokio::task::JoinSet::new();
        for node in nodes {
            let (agent, ask) = (self.clone(), ask.clone());
            asking.spawn(async move { (agent.name_of(&node), agent.ask_models(node, ask).await) });
        }
        let mut answers = asking.join_all().await;
        answers.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(Reply::Models(answers))
    }

    /// Makes every node measure its links. In each round, every node sends to one node and receives
    /// from one.
    async fn measure_all(&self) -> Result<(), String> {
        let up: Vec<NodeId> = self.lock().membership.reachable().into_iter().collect();
        let (mut measured, mut failed) = (Vec::new(), Vec::new());
        for pairs in measure::rounds(up.len()) {
            let mut round = tokio::task::JoinSet::new();
            for (one, other) in pairs {
                let (agent, ends) = (self.clone(), [(up[one], up[other]), (up[other], up[one])]);
                round.spawn(async move {
                    let mut links = Vec::new();
                    for (from, to) in ends {
                        links.push(agent.measure_from(from, to).await.map(|link| (from, link)));
                    }
                    links
                });
            }
            // A failed link does not stop the others.
            for link in round.join_all().await.into_iter().flatten() {
                match link {
                    Ok(link) => measured.push(link),
                    Err(why) => failed.push(why),
                }
            }
        }
        // Does not wait for a node that was lost meanwhile.
        let _ = tokio::time::timeout(HEARD_LIMIT, self.until_heard(&measured)).await;
        if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
    }

    fn issue_token(&self, life_s: u64) -> Result<String, String> {
        let mut state = self.lock();
        let addresses = super::addresses::own(self.0.address);
        let life = Duration::from_secs(life_s);
        let token: Token =
            state.tokens.issue(self.0.id, addresses, unix_s(), life).map_err(|error| error.to_string())?;
        self.save_tokens(&state)?;
        Ok(token.to_string())
    }

    /// Changes the document. Returns true if another member holds the change, or there is none.
    pub(super) async fn change(
        &self,
        change: impl FnOnce(&mut Document) -> Result<(), DocumentError>,
    ) -> Result<bool, String> {
        let (waiter, spread) = oneshot::channel();
        if !self.begin_change(change, waiter)? {
            // No other node holds it, so it is done once it is on the disk.
            let _ = tokio::time::timeout(SPREAD_LIMIT, self.written()).await;
            return Ok(true);
        }
        Ok(tokio::time::timeout(SPREAD_LIMIT, spread).await.is_ok_and(|spread| spread.is_ok()))
    }

    /// Makes a change and passes `waiter` on, which is notified of its spreading. Returns false if
    /// there is no other member.
    fn begin_change(
        &self,
        change: impl FnOnce(&mut Document) -> Result<(), DocumentError>,
        waiter: oneshot::Sender<()>,
    ) -> Result<bool, String> {
        let mut state = self.lock();
        let id: ChangeId = state.membership.change(change).map_err(|error| error.to_string())?;
        let has_peers = state.membership.peers().next().is_some();
        state.spreading.insert(id, waiter);
        self.settle(&mut state);
        Ok(has_peers)
    }

    /// The member with this name, short name or id.
    pub(super) fn find_member(&self, text: &str) -> Result<(NodeId, String), String> {
        let state = self.lock();
        let document = state.membership.document();
        let fits = |id: &NodeId, name: &str| {
            name == text || id.short() == text.to_ascii_lowercase() || id.to_string() == text
        };
        let found: Vec<_> = document.members().filter(|(id, member)| fits(id, &member.name)).collect();
        match found[..] {
            [(id, member)] => Ok((id, member.name.clone())),
            [] => Err(format!("no member is named {text}: `thunder cluster status` lists them")),
            _ => {
                let ids: Vec<String> = found.iter().map(|(id, _)| id.short()).collect();
                Err(format!(
                    "{} members are named {text}: name one by its id, {}",
                    ids.len(),
                    ids.join(" or ")
                ))
            }
        }
    }

    /// Tells the other nodes that this node leaves, and deletes the cluster's document and the key.
    async fn leave(&self) -> Result<(), String> {
        let id = self.0.id;
        {
            let mut state = self.lock();
            if state.membership.document().member(&id).is_some() {
                let left = state.membership.change(|document| document.remove_member(&id));
                left.map_err(|error| error.to_string())?;
                self.settle(&mut state);
            }
        }
        // The links' last messages tell the other members. On a busy machine it may take longer
        // than the farewell until they are written.
        let mut open = self.0.open_links.subscribe();
        let _ = tokio::time::timeout(SPREAD_LIMIT, open.wait_for(|open| *open == 0)).await;
        tokio::time::sleep(FAREWELL).await;
        // The files must not be written again.
        let _ = tokio::time::timeout(SPREAD_LIMIT, self.written()).await;
        let folder = &self.0.folder;
        let forget = || {
            folder.remove(DOCUMENT_FILE)?;
            folder.remove(super::TOKENS_FILE)?;
            Identity::forget(folder)
        };
        forget().map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    /// A stopped agent: the system accepts connections for it. The clock jumps where all wait.
    #[test]
    fn a_stopped_agent_is_noticed_in_queries_and_in_long_requests() {
        let folder = tempfile::tempdir().unwrap();
        let _stopped = std::os::unix::net::UnixListener::bind(folder.path().join(CONTROL_FILE)).unwrap();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let limits = [(Request::Status, QUERY_LIMIT), (Request::MeasureLinks, ALIVE_EVERY + ALIVE_LIMIT)];
            for (request, limit) in limits {
                let began = tokio::time::Instant::now();
                let error = ask(folder.path(), &request).await.unwrap_err();
                assert!(matches!(error, ControlError::Silent { .. }), "{error}");
                assert!(began.elapsed() < limit + Duration::from_secs(1), "{request:?}");
                let remedy = format!("`kill -CONT {}`", std::process::id());
                assert!(error.to_string().contains(&remedy), "{error}");
            }
        });
    }
}
