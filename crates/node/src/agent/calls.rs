//! Calls between members: one request and its reply; the connection then carries a model's API, or
//! ends.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_access::{Found, Wanted};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::Agent;
use super::desk::{BenchRank, CableBench};
use super::log::LogLine;
use super::machine::together::first_pause_ms;
use super::measure::paths::interface_at;
use super::measure::{self, ranks::MeetingPlace};
use super::models::{ModelAnswer, ModelAsk};
use super::ranks::StartRank;
use crate::canary::CanaryAnswer;
use crate::document::Stamp;
use crate::gate::Connection;
use crate::id::NodeId;
use crate::report::LinkReport;
use crate::tls::Protocol;
use crate::wire::{self, LONGEST_FRAME_BYTES, WireError};

/// Time for a request to arrive, and for its reply.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(5);

/// Maximum time for which a node agrees to load a model for the canary.
const MOST_CANARY: Duration = Duration::from_secs(60);

/// A request of a member to another.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Call {
    /// Start a rank of a group whose head is the caller.
    StartRank(StartRank),
    /// Connect to the API of a model that has its head here.
    Open {
        /// The model's name.
        model: String,
        /// Its group.
        placement: Stamp,
        /// True for requests that do not keep an idle model loaded, such as the dashboard's.
        #[serde(default)]
        looks: bool,
    },
    /// Take part in measuring the link between both nodes.
    Measure {
        /// Time of sending.
        sending_ms: u64,
        /// Answer with [`CallReply::MeasuringAt`]; earlier versions did not.
        #[serde(default)]
        tells_interface: bool,
    },
    /// Receive the data of one of several connections, and report its speed.
    MeasureBulk,
    /// Run the second of two ranks that measure the path between them.
    MeasureRanks(MeetingPlace),
    /// Measure the link to another node.
    MeasureLink(NodeId),
    /// Measure the speed of the machine. The report includes it later.
    MeasureMachine,
    /// The same, even if it was measured before.
    MeasureMachineAgain,
    /// Measure the machine at the same time as the other nodes on it.
    MeasureTogether {
        /// All these nodes, in order.
        nodes: Vec<NodeId>,
        /// When to begin, in milliseconds of Unix time. All nodes of the machine share its clock.
        begin_ms: u64,
        /// Time between two measurements, in milliseconds. Earlier versions took their own.
        #[serde(default = "first_pause_ms")]
        pause_ms: u64,
    },
    /// Load a group's model alone, and answer the canary.
    Canary {
        /// The request that started the group.
        start: StartRank,
        /// Time to load it.
        limit_s: u64,
    },
    /// Answer questions about limits.
    Count,
    /// Return this node's part of usage and acts.
    LookUp(Wanted),
    /// Return recent events.
    Logs {
        /// Maximum number of lines.
        lines: usize,
        /// Only lines after this number.
        after: u64,
    },
    /// Return the output of this machine's commands about its ports and cables.
    Look,
    /// Measure a cable that has its first end here.
    MeasureCable(CableBench),
    /// Run a rank of a cable's measurement.
    BenchRank(BenchRank),
    /// A question about the models on the node's disk.
    Models(ModelAsk),
    /// Serve the models of the node's disk. The connection continues with the hub's HTTP.
    Weights,
}

/// The reply.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum CallReply {
    /// The rank's process is running.
    Started,
    /// The connection continues with HTTP, with this API key.
    Opened(String),
    /// The measurement follows on this connection; that of a machine is in its next report.
    Measuring,
    /// The measurement of a path between both nodes follows.
    MeasuringAt {
        /// The interface at which the path ends.
        interface: String,
    },
    /// The model is being loaded; the answer to the canary or a refusal follows.
    Singing,
    /// The answer to the canary.
    Canary(CanaryAnswer),
    /// The result for the link.
    Measured(LinkReport),
    /// The machine is measured; the next report has it.
    MachineMeasured,
    /// Questions and answers about limits follow.
    Counting,
    /// What the node keeps.
    Found(Found),
    /// The JSON of [`Found`] follows, cut into this number of texts because it exceeds the maximum
    /// length of a message.
    FoundInParts(usize),
    /// Recent events, the oldest first.
    Logs(Vec<LogLine>),
    /// The output of the probe of `thunder mac`.
    Looked(String),
    /// The output of a rank of `thunder bench comm`.
    Benched(String),
    /// The answer about models on the disk.
    Models(ModelAnswer),
    /// HTTP in the hub's form follows.
    Weights,
    /// The call was refused; a message.
    Refused(String),
}

impl Agent {
    /// Serves one call.
    pub(super) async fn serve_call(self, mut connection: Connection) {
        let remote = connection.remote;
        let request = wire::receive(&mut connection.stream, LONGEST_FRAME_BYTES);
        let served = match wire::within(CALL_LIMIT, request).await {
            Ok(Call::Weights) => self.serve_weights(connection).await,
            Ok(Call::MeasureBulk) => self.receive_bulk(connection).await,
            Ok(call) => self.answer_call(&mut connection, call).await,
            Err(error) => Err(error),
        };
        if let Err(error) = served {
            tracing::debug!(from = %remote, "a call failed: {error}");
        }
    }

    async fn answer_call(&self, connection: &mut Connection, call: Call) -> Result<(), WireError> {
        match call {
            Call::StartRank(start) => {
                let started = self.start_follower(connection.peer, connection.remote, start);
                let reply = started.map_or_else(CallReply::Refused, |()| CallReply::Started);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::Measure { sending_ms, tells_interface } => {
                let reply = if tells_interface {
                    let near = connection.stream.get_ref().0.local_addr();
                    CallReply::MeasuringAt { interface: interface_at(near, connection.remote) }
                } else {
                    CallReply::Measuring
                };
                wire::send(&mut connection.stream, &reply).await?;
                Ok(measure::receive_and_time(&mut connection.stream, sending_ms).await?)
            }
            Call::MeasureLink(to) => {
                let measured = self.measure(to, measure::CLOSE_LOOK).await;
                let reply = measured.map_or_else(CallReply::Refused, CallReply::Measured);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::MeasureRanks(place) => {
                let ended = self.second_rank(connection.remote, place).await;
                let reply = ended.map_or_else(CallReply::Refused, CallReply::Benched);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::Canary { start, limit_s } => {
                wire::send(&mut connection.stream, &CallReply::Singing).await?;
                let limit = Duration::from_secs(limit_s).min(MOST_CANARY);
                let answer = self.answer_alone(&start, limit).await;
                let reply = answer.map_or_else(CallReply::Refused, CallReply::Canary);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::MeasureMachine => {
                tokio::spawn(self.clone().measure_machine(false));
                wire::send(&mut connection.stream, &CallReply::Measuring).await
            }
            Call::MeasureMachineAgain => {
                tokio::spawn(self.clone().measure_machine(true));
                wire::send(&mut connection.stream, &CallReply::Measuring).await
            }
            Call::MeasureTogether { nodes, begin_ms, pause_ms } => {
                let measured = self.measure_together(nodes, begin_ms, pause_ms).await;
                let reply = measured.map_or_else(CallReply::Refused, |()| CallReply::MachineMeasured);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::Count => self.serve_counts(connection).await,
            Call::LookUp(wanted) => self.send_found(&mut connection.stream, wanted).await,
            Call::Logs { lines, after } => {
                let lines = CallReply::Logs(self.0.log.lines(lines, after));
                wire::send(&mut connection.stream, &lines).await
            }
            Call::Models(ask) => {
                let answer = self.answer_models(ask).await;
                let reply = answer.map_or_else(CallReply::Refused, CallReply::Models);
                wire::send(&mut connection.stream, &reply).await
            }
            // These calls consume the connection.
            Call::Weights | Call::MeasureBulk => Ok(()),
            Call::Look => {
                let reply = self.look_here().await.map_or_else(CallReply::Refused, CallReply::Looked);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::MeasureCable(bench) => {
                let measured = self.measure_own_cable(bench).await;
                let reply = measured.map_or_else(CallReply::Refused, CallReply::Benched);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::BenchRank(rank) => {
                let ended = self.bench_rank(rank).await;
                let reply = ended.map_or_else(CallReply::Refused, CallReply::Benched);
                wire::send(&mut connection.stream, &reply).await
            }
            Call::Open { model, placement, looks } => {
                let opened = match self.own_api(&model, placement) {
                    Some((address, key)) => TcpStream::connect(address).await.map(|api| (api, key)).ok(),
                    None => None,
                };
                let Some((mut api, key)) = opened else {
                    let why = format!("{model} does not run here any more");
                    return wire::send(&mut connection.stream, &CallReply::Refused(why)).await;
                };
                wire::send(&mut connection.stream, &CallReply::Opened(key)).await?;
                // Ends when either side ends, or the other node is removed. The API limits how long
                // it waits for its client.
                let peer = connection.peer;
                let _use = (!looks).then(|| self.in_use(&model, placement));
                tokio::select! {
                    copied = copy_bidirectional(&mut connection.stream, &mut api) => copied.map(drop)?,
                    () = self.until_removed(peer) => {}
                }
                Ok(())
            }
        }
    }

    /// Waits until a node is no longer a member.
    pub(super) async fn until_removed(&self, node: NodeId) {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            let is_member = self.lock().membership.document().member(&node).is_some();
            if !is_member || changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Calls a member. Returns its reply and the connection.
    pub(super) async fn call(
        &self,
        node: NodeId,
        call: &Call,
    ) -> Result<(CallReply, TlsStream<TcpStream>), String> {
        self.call_within(node, call, CALL_LIMIT).await
    }

    /// [`Agent::call`] for work that takes up to `limit`.
    pub(super) async fn call_within(
        &self,
        node: NodeId,
        call: &Call,
        limit: Duration,
    ) -> Result<(CallReply, TlsStream<TcpStream>), String> {
        let (addresses, preferred) = (self.addresses_of(&self.lock(), &node), self.preferred_address(&node));
        let dialed = self.dial(node, Protocol::Call, preferred, addresses).await;
        let (mut stream, _) = dialed.ok_or_else(|| format!("{} cannot be reached", self.name_of(&node)))?;
        let reply = self.ask_over(node, &mut stream, call, limit).await?;
        Ok((reply, stream))
    }

    /// Sends a call over a connection with a member, and returns the reply.
    pub(super) async fn ask_over(
        &self,
        node: NodeId,
        stream: &mut TlsStream<TcpStream>,
        call: &Call,
        limit: Duration,
    ) -> Result<CallReply, String> {
        let reply = wire::within(limit, async {
            wire::send(stream, call).await?;
            wire::receive(stream, LONGEST_FRAME_BYTES).await
        });
        match reply.await {
            Ok(CallReply::Refused(why)) => Err(format!("{}: {why}", self.name_of(&node))),
            Ok(reply) => Ok(reply),
            Err(error) => Err(format!("{}: {error}", self.name_of(&node))),
        }
    }

    /// A member's name, for people.
    pub(super) fn name_of(&self, node: &NodeId) -> String {
        let state = self.lock();
        let member = state.membership.document().member(node);
        member.map_or_else(|| node.short(), |member| member.name.clone())
    }
}
