//! Limits over all nodes. Among the nodes that reach each other, the one with the lowest id counts
//! for all. The others ask it before a request begins, and report what the request used.
//!
//! Every node also counts its own clients' requests. When nodes come or go, or limits change, the
//! counting node drops its sum and asks all nodes for theirs. A node that cannot reach the counting
//! node decides by its own counts.

use std::collections::{BTreeMap, HashMap};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_access::{
    Access, Ask, Found, Held, Limited, Meter, Now, Refusal, Reservation, Scope, Share, Standing, Used, Wanted,
};
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::Agent;
use super::calls::{Call, CallReply};
use crate::gate::Connection;
use crate::id::NodeId;
use crate::wire::{self, LONGEST_FRAME_BYTES, WireError};

/// Time for the counting node to answer. After this, the node counts by itself.
const COUNT_LIMIT: Duration = Duration::from_millis(500);
/// Time for a node to return its part of usage.
const LOOK_LIMIT: Duration = Duration::from_secs(20);
/// Maximum part of a long answer. As JSON within JSON it may be twice as long, which fits in a
/// frame.
const PART_BYTES: usize = LONGEST_FRAME_BYTES / 4;
/// Maximum length of an answer: 8 MiB of kept texts, for which JSON may need six bytes each.
const LONGEST_FOUND_BYTES: usize = 64 << 20;
/// Maximum open requests of one node at the counting node.
const MOST_HELD: usize = 65_536;

/// A question to the node that counts for all.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Count {
    /// Whether a request may begin.
    Admit { limited: Vec<Limited>, ask: Ask },
    /// A request has ended.
    Settle { ticket: u64, scopes: Vec<Scope>, held: Held, used: Used },
    /// The state of limits.
    Standings { limited: Vec<Limited> },
    /// What the asked node's own clients use.
    Shares,
}

/// The answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Counted {
    /// The request may begin, and is counted until it is settled.
    Admitted { ticket: u64, standings: Vec<Standing> },
    /// The request may not begin.
    Refused(Box<Refusal>),
    /// The request is settled.
    Settled,
    /// The limits' state.
    Standings(Vec<Standing>),
    /// What the node's own clients use.
    Shares(Vec<(Scope, Share)>),
}

/// The counts of all nodes, on the node that counts.
#[derive(Default)]
struct Sum {
    meter: Meter,
    held: BTreeMap<NodeId, HashMap<u64, Reservation>>,
    tickets: u64,
}

/// A connection to the counting node.
type Line = Option<(NodeId, TlsStream<TcpStream>)>;

/// This node's part of counting.
#[derive(Default)]
pub(super) struct Counting {
    /// `None`: all nodes must be asked before it is used.
    sum: std::sync::Mutex<Option<Sum>>,
    /// Held while other nodes are asked for the sum.
    learning: tokio::sync::Mutex<()>,
    /// Taken for each exchange, so an interrupted exchange leaves no connection behind.
    line: tokio::sync::Mutex<Line>,
}

impl Counting {
    fn sum(&self) -> MutexGuard<'_, Option<Sum>> {
        self.sum.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sum {
    fn of(shares: Vec<Vec<(Scope, Share)>>, now: Now) -> Self {
        let mut sum = Self::default();
        for (scope, share) in shares.into_iter().flatten() {
            sum.meter.import(scope, &share, now);
        }
        sum
    }

    /// Answers a node; `None` if the question is not about the sum.
    fn answer(&mut self, from: NodeId, question: Count, now: Now) -> Option<Counted> {
        Some(match question {
            Count::Admit { limited, ask } => match self.meter.admit(&limited, &ask, now) {
                Err(refusal) => Counted::Refused(Box::new(refusal)),
                Ok(reservation) => {
                    self.tickets += 1;
                    let held = self.held.entry(from).or_default();
                    if held.len() < MOST_HELD {
                        held.insert(self.tickets, reservation);
                    }
                    let standings = self.meter.standings(&limited, now);
                    Counted::Admitted { ticket: self.tickets, standings }
                }
            },
            Count::Settle { ticket, scopes, held, used } => {
                match self.held.get_mut(&from).and_then(|tickets| tickets.remove(&ticket)) {
                    Some(reservation) => self.meter.settle(reservation, &used, now),
                    // The request was admitted before this sum began, which includes it in its
                    // node's share.
                    None => self.meter.settle_imported(scopes, held, &used, now),
                }
                Counted::Settled
            }
            Count::Standings { limited } => Counted::Standings(self.meter.standings(&limited, now)),
            Count::Shares => return None,
        })
    }
}

impl Agent {
    /// Drops the sum of all nodes, because nodes or limits have changed.
    pub(super) fn recount(&self) {
        *self.0.counting.sum() = None;
    }

    /// Asks the counting node.
    ///
    /// # Errors
    /// If it does not answer in time.
    pub(super) async fn count(&self, question: &Count) -> Result<Counted, String> {
        let counter = self.lock().membership.reachable().into_iter().next();
        match counter {
            Some(counter) if counter != self.0.id => {
                let asked = tokio::time::timeout(COUNT_LIMIT, self.count_at(counter, question)).await;
                asked.unwrap_or_else(|_| Err(format!("{} does not answer", self.name_of(&counter))))
            }
            _ => self.count_here(self.0.id, question.clone()).await,
        }
    }

    async fn count_at(&self, counter: NodeId, question: &Count) -> Result<Counted, String> {
        let mut line = self.0.counting.line.lock().await;
        if let Some((_, mut stream)) = line.take_if(|(at, _)| *at == counter)
            && let Ok(answer) = exchange(&mut stream, question).await
        {
            *line = Some((counter, stream));
            return Ok(answer);
        }
        // This is the first question, or the other node has closed the connection since the last
        // one.
        let (CallReply::Counting, mut stream) = self.call(counter, &Call::Count).await? else {
            return Err(format!("{} is of a version that does not count", self.name_of(&counter)));
        };
        let answer = exchange(&mut stream, question).await.map_err(|error| error.to_string())?;
        *line = Some((counter, stream));
        Ok(answer)
    }

    async fn count_here(&self, from: NodeId, question: Count) -> Result<Counted, String> {
        let Some(access) = &self.0.options.access else { return Err("this node keeps no store".to_owned()) };
        if let Count::Shares = question {
            return Ok(Counted::Shares(access.shares(Now::read())));
        }
        if self.0.counting.sum().is_none() {
            self.learn(access).await;
        }
        let mut sum = self.0.counting.sum();
        // The sum may have been dropped in between; the next question asks all nodes again.
        let sum = sum.get_or_insert_with(|| Sum::of(vec![access.shares(Now::read())], Now::read()));
        sum.answer(from, question, Now::read()).ok_or_else(|| "a strange question".to_owned())
    }

    /// Asks all nodes for their clients' counts.
    async fn learn(&self, access: &Access) {
        let _learning = self.0.counting.learning.lock().await;
        if self.0.counting.sum().is_some() {
            return;
        }
        let others = self.lock().membership.reachable();
        let mut asking = tokio::task::JoinSet::new();
        for node in others.into_iter().filter(|node| *node != self.0.id) {
            let agent = self.clone();
            asking.spawn(async move {
                let asked = async {
                    let (_, mut stream) = agent.call(node, &Call::Count).await?;
                    exchange(&mut stream, &Count::Shares).await.map_err(|error| error.to_string())
                };
                match tokio::time::timeout(COUNT_LIMIT, asked).await {
                    Ok(Ok(Counted::Shares(shares))) => shares,
                    _ => {
                        let name = agent.name_of(&node);
                        agent.0.log.add(format!("limits are counted without what {name} has admitted"));
                        Vec::new()
                    }
                }
            });
        }
        let mut shares = asking.join_all().await;
        shares.push(access.shares(Now::read()));
        *self.0.counting.sum() = Some(Sum::of(shares, Now::read()));
    }

    /// Answers another node's questions until it closes the connection.
    pub(super) async fn serve_counts(&self, connection: &mut Connection) -> Result<(), WireError> {
        wire::send(&mut connection.stream, &CallReply::Counting).await?;
        let peer = connection.peer;
        let answer = async {
            loop {
                let question: Count = wire::receive(&mut connection.stream, LONGEST_FRAME_BYTES).await?;
                let Ok(answer) = self.count_here(peer, question).await else { return Ok(()) };
                wire::send(&mut connection.stream, &answer).await?;
            }
        };
        tokio::select! {
            ended = answer => ended,
            () = self.until_removed(peer) => Ok(()),
        }
    }

    /// The state of limits over all nodes.
    pub(super) async fn standings(&self, limited: &[Limited]) -> Option<Vec<Standing>> {
        match self.count(&Count::Standings { limited: limited.to_vec() }).await {
            Ok(Counted::Standings(standings)) => Some(standings),
            _ => None,
        }
    }

    /// Asks all other members for their parts.
    pub(super) async fn look_at_others(&self, wanted: &Wanted) -> Vec<(String, Result<Found, String>)> {
        let members = self.lock().membership.document().member_ids();
        let mut asking = tokio::task::JoinSet::new();
        for node in members.into_iter().filter(|node| *node != self.0.id) {
            let (agent, call) = (self.clone(), Call::LookUp(wanted.clone()));
            asking.spawn(async move {
                let found = tokio::time::timeout(LOOK_LIMIT, agent.look_up_at(node, &call)).await;
                let name = agent.name_of(&node);
                let late = |_| Err(format!("{name}: no answer within {LOOK_LIMIT:?}"));
                let found = found.unwrap_or_else(late);
                (name, found)
            });
        }
        asking.join_all().await
    }

    async fn look_up_at(&self, node: NodeId, call: &Call) -> Result<Found, String> {
        let strange = |why: &dyn std::fmt::Display| format!("{}: {why}", self.name_of(&node));
        match self.call_within(node, call, LOOK_LIMIT).await? {
            (CallReply::Found(found), _) => Ok(found),
            (CallReply::FoundInParts(count), mut stream) => {
                let mut text = String::new();
                for _ in 0..count {
                    let part: String =
                        wire::receive(&mut stream, LONGEST_FRAME_BYTES).await.map_err(|why| strange(&why))?;
                    text.push_str(&part);
                    if text.len() > LONGEST_FOUND_BYTES {
                        return Err(strange(&format!(
                            "it keeps more than {LONGEST_FOUND_BYTES} bytes of this"
                        )));
                    }
                }
                serde_json::from_str(&text).map_err(|why| strange(&why))
            }
            _ => Err(strange(&"a strange reply")),
        }
    }

    /// Sends this node's part to another node.
    pub(super) async fn send_found(
        &self,
        stream: &mut (impl AsyncWrite + Unpin),
        wanted: Wanted,
    ) -> Result<(), WireError> {
        let reply = self.look_up_here(wanted).await;
        let sent = wire::send(stream, &reply).await;
        let (Err(WireError::TooLong { .. }), CallReply::Found(found)) = (&sent, reply) else { return sent };
        let text = serde_json::to_string(&found)?;
        if text.len() > LONGEST_FOUND_BYTES {
            let why =
                format!("{} bytes are too many: ask for a shorter time, or fewer divisions", text.len());
            return wire::send(stream, &CallReply::Refused(why)).await;
        }
        let parts = parts_of(&text);
        wire::send(stream, &CallReply::FoundInParts(parts.len())).await?;
        for part in parts {
            wire::send(stream, &part).await?;
        }
        Ok(())
    }

    /// This node's part, for another node.
    async fn look_up_here(&self, wanted: Wanted) -> CallReply {
        let Some(access) = self.0.options.access.clone() else {
            return CallReply::Refused("it keeps no store".to_owned());
        };
        match tokio::task::spawn_blocking(move || access.look(&wanted)).await {
            Ok(Ok(found)) => CallReply::Found(found),
            Ok(Err(error)) => CallReply::Refused(error.to_string()),
            Err(error) => CallReply::Refused(error.to_string()),
        }
    }
}

/// Cuts a text into pieces that fit in a frame.
fn parts_of(mut text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    while !text.is_empty() {
        let (part, rest) = text.split_at(text.floor_char_boundary(PART_BYTES));
        parts.push(part);
        text = rest;
    }
    parts
}

async fn exchange(stream: &mut TlsStream<TcpStream>, question: &Count) -> Result<Counted, WireError> {
    wire::send(stream, question).await?;
    wire::receive(stream, LONGEST_FRAME_BYTES).await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use thunder_access::{Limits, Time};

    use super::*;

    fn limited(requests_per_minute: Option<u64>, parallel_requests: Option<u64>) -> Vec<Limited> {
        let limits = Limits { requests_per_minute, parallel_requests, ..Limits::default() };
        vec![Limited { scope: Scope::Key("k".into()), label: "ci".into(), limits }]
    }

    fn admit(sum: &mut Sum, from: u8, limited: &[Limited], now: Now) -> Option<u64> {
        let ask = Ask { prompt_tokens: 10, answer_tokens: Some(5), answers: 1, ..Ask::default() };
        let question = Count::Admit { limited: limited.to_vec(), ask };
        match sum.answer(NodeId([from; 32]), question, now).unwrap() {
            Counted::Admitted { ticket, .. } => Some(ticket),
            _ => None,
        }
    }

    #[test]
    fn a_limit_holds_over_all_nodes_and_over_a_change_of_the_counting_node() {
        let now = Now { steady_ms: 70_000, time: Time(1_795_392_000_000) };
        let limited = limited(Some(5), Some(4));
        let ask = Ask { prompt_tokens: 10, answer_tokens: Some(5), answers: 1, ..Ask::default() };
        // Two nodes with meters of their own, and the sum on a third.
        let mut own = [Meter::default(), Meter::default()];
        let mut sum = Sum::default();
        let mut open = Vec::new();
        for nth in 0..3 {
            let ticket = admit(&mut sum, nth % 2, &limited, now).unwrap();
            open.push((ticket, own[usize::from(nth % 2)].reserve(&limited, &ask, now)));
        }
        // The counting node is lost. Another node, with another clock, asks both for their shares.
        let later = Now { steady_ms: 1_000_000, time: Time(now.time.0 + 1000) };
        let shares = own.iter_mut().map(|meter| meter.export(now)).collect();
        let mut sum = Sum::of(shares, later);
        assert!(admit(&mut sum, 0, &limited, later).is_some());
        assert!(admit(&mut sum, 1, &limited, later).is_none(), "4 at a time");
        // A request that the lost node had admitted ends.
        let (ticket, reservation) = open.remove(0);
        let (held, used) = (reservation.held(), Used { prompt_tokens: 10, answer_tokens: 2, nanos: 0 });
        let scopes = vec![Scope::Key("k".into())];
        let settle = Count::Settle { ticket: ticket + 100, scopes, held, used };
        sum.answer(NodeId([0; 32]), settle, later);
        assert!(admit(&mut sum, 1, &limited, later).is_some());
        assert!(admit(&mut sum, 1, &limited, later).is_none(), "5 a minute, whatever is open");
        let minute = Now { steady_ms: later.steady_ms + 60_500, ..later };
        let (key, limits) =
            (limited[0].scope.clone(), Limits { parallel_requests: None, ..limited[0].limits });
        let only_rate = vec![Limited { scope: key, label: "ci".into(), limits }];
        assert!(admit(&mut sum, 1, &only_rate, minute).is_some());
    }

    #[test]
    fn long_answers_are_cut_into_parts_that_fit_a_frame_whatever_is_in_them() {
        for text in ["\"\\".repeat(PART_BYTES), "ä\u{1}".repeat(PART_BYTES), "x".repeat(PART_BYTES + 1)] {
            let text = serde_json::to_string(&text).unwrap();
            let parts = parts_of(&text);
            assert!(parts.len() > 1);
            parts.iter().for_each(|part| drop(wire::encode(part).unwrap()));
            assert_eq!(parts.concat(), text);
        }
    }
}
