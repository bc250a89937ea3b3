//! Decides which nodes are up and what the operator wants: the part of a node without sockets and
//! without a clock.
//!
//! The caller passes in events and the time, and carries out the [`Output`]s. Therefore whole
//! clusters can run in a test, with lost, late and repeated messages (`tests/simulation.rs`).
//!
//! Every node sends a heartbeat to every other node in each [`Timing::heartbeat`]. With at most 64
//! members that is 130 small messages a second for each node. In return, a node knows within a
//! fixed time whether it reaches another node itself, which is what a group of ranks needs. Gossip
//! protocols (SWIM, as in the `foca` library) send less, but answer another question: whether
//! anybody reaches it.
//!
//! A heartbeat carries the digest of the sender's document. If it differs from the receiver's, both
//! send their documents and both merge, until all are equal.
//!
//! **Partition.** Each side continues with the nodes that it reaches: it accepts changes, and
//! serves every model that it can. When the sides meet again, their documents merge. The later of
//! two changes to the same entry wins, and a removal always wins. If a model has two groups, the
//! one whose placement was written later stays, and the other side ends its group. No majority is
//! needed, because a cluster of two must continue when one node is lost.

mod message;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::document::{Digest, Document, DocumentError};
use crate::id::NodeId;
use crate::report::NodeReport;
use crate::version;

pub use message::{ChangeId, Event, Message, Output, Timing};

/// Maximum changes whose spreading is watched at the same time.
const MOST_WATCHED_CHANGES: usize = 64;
/// Maximum digests of this node's own document that peers may still report.
const REMEMBERED_DIGESTS: usize = 32;

/// A node's knowledge of a peer.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// Whether it answers.
    pub up: bool,
    /// The members that it reaches, by its own account.
    pub reaches: BTreeSet<NodeId>,
    /// Its version, if it does not work with this node's. All its other messages are ignored then.
    pub refused: Option<String>,
    /// Its last report.
    pub report: Option<Arc<NodeReport>>,
    /// Run and number of the report. The number alone could repeat after a restart.
    report_id: (u64, u64),
    boot: Option<u64>,
    heard_at: Option<Duration>,
    connections: usize,
    disconnected_at: Option<Duration>,
    /// The document that was last sent to it, and when.
    sent: Option<(Digest, Duration)>,
}

/// A change, and the digests of this node's document since: a node that holds one of these holds
/// the change.
#[derive(Debug)]
struct Watched {
    change: ChangeId,
    digests: Vec<Digest>,
}

/// The membership and the document of one node.
#[derive(Debug)]
pub struct Membership {
    me: NodeId,
    boot: u64,
    timing: Timing,
    version: String,
    document: Arc<Document>,
    digest: Digest,
    report: Option<Arc<NodeReport>>,
    report_number: u64,
    peers: BTreeMap<NodeId, Peer>,
    /// The document is not on the disk.
    volatile: bool,
    heartbeat_at: Duration,
    changes: u64,
    watched: VecDeque<Watched>,
    outputs: VecDeque<Output>,
}

impl Membership {
    /// A node that has just started with its stored document. `boot` is a number that it never had
    /// before.
    pub fn new(me: NodeId, boot: u64, document: Document, timing: Timing) -> Self {
        let digest = document.digest();
        let mut node = Self {
            me,
            boot,
            timing,
            version: version::own().to_owned(),
            document: Arc::new(document),
            digest,
            report: None,
            report_number: 0,
            peers: BTreeMap::new(),
            volatile: false,
            heartbeat_at: Duration::ZERO,
            changes: 0,
            watched: VecDeque::new(),
            outputs: VecDeque::new(),
        };
        node.follow_members();
        node
    }

    /// Reports another version than this program's, to test how versions work together.
    #[must_use]
    pub fn with_version(self, version: String) -> Self {
        Self { version, ..self }
    }

    /// This node.
    pub fn me(&self) -> NodeId {
        self.me
    }

    /// The document now.
    pub fn document(&self) -> &Arc<Document> {
        &self.document
    }

    /// The other members.
    pub fn peers(&self) -> impl Iterator<Item = (NodeId, &Peer)> {
        self.peers.iter().map(|(id, peer)| (*id, peer))
    }

    /// This node's own report.
    pub fn report(&self) -> Option<&Arc<NodeReport>> {
        self.report.as_ref()
    }

    /// Whether this node reaches a member. It always reaches itself.
    pub fn reaches(&self, id: &NodeId) -> bool {
        *id == self.me || self.peers.get(id).is_some_and(|peer| peer.up)
    }

    /// The members that this node reaches, including itself.
    pub fn reachable(&self) -> BTreeSet<NodeId> {
        self.document.member_ids().into_iter().filter(|id| self.reaches(id)).collect()
    }

    /// The next output. Call this until it returns `None` after each of the other functions.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// A connection to a peer is open.
    pub fn connected(&mut self, id: NodeId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.connections += 1;
        peer.disconnected_at = None;
        // The last message may have been lost with an earlier connection.
        peer.sent = None;
        self.send(id, self.heartbeat());
        self.send_report(id);
    }

    /// A connection to a peer has ended.
    pub fn disconnected(&mut self, id: NodeId, now: Duration) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.connections = peer.connections.saturating_sub(1);
        if peer.connections == 0 {
            peer.disconnected_at = Some(now);
        }
    }

    /// This node itself was held up for a while, so it has not yet read what came meanwhile: no
    /// peer counts as silent for that time.
    pub fn held_up(&mut self, time: Duration, now: Duration) {
        for peer in self.peers.values_mut() {
            for at in [&mut peer.heard_at, &mut peer.disconnected_at].into_iter().flatten() {
                *at = (*at + time).min(now);
            }
        }
    }

    /// Does what is due. Call this several times in each of [`Timing`]'s intervals.
    pub fn tick(&mut self, now: Duration) {
        let silent = |peer: &Peer| {
            let silence = peer.heard_at.is_none_or(|heard| now.saturating_sub(heard) >= self.timing.silence);
            let lost = peer.disconnected_at;
            silence || lost.is_some_and(|lost| now.saturating_sub(lost) >= self.timing.disconnected)
        };
        let gone = |(id, peer): (&NodeId, &Peer)| (peer.up && silent(peer)).then_some(*id);
        let gone: Vec<NodeId> = self.peers.iter().filter_map(gone).collect();
        for id in gone {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.up = false;
                peer.reaches.clear();
            }
            self.event(Event::Down(id));
            // The other nodes should learn at once which nodes this node reaches.
            self.heartbeat_at = now;
        }
        if now >= self.heartbeat_at {
            self.heartbeat_at = now + self.timing.heartbeat;
            let heartbeat = self.heartbeat();
            let peers: Vec<NodeId> = self.peers.keys().copied().collect();
            peers.into_iter().for_each(|id| self.send(id, heartbeat.clone()));
        }
    }

    /// A peer's message has arrived. Messages of nodes that are not members change nothing.
    pub fn receive(&mut self, from: NodeId, message: Message, now: Duration) {
        if !self.peers.contains_key(&from) {
            return;
        }
        if self.refuses(from, &message) {
            return;
        }
        match message {
            Message::Heartbeat { boot, digest, report, reaches, volatile, .. } => {
                self.heard(from, boot, reaches, now);
                let known = self.peers.get(&from).map(|peer| peer.report_id);
                if report > 0 && known != Some((boot, report)) {
                    self.send(from, Message::ReportWanted);
                }
                if digest == self.digest {
                    if !volatile {
                        self.held(&digest);
                    }
                } else {
                    self.offer(from, now);
                }
            }
            Message::Document(theirs) => {
                let held = theirs.digest();
                let mut merged = (*self.document).clone();
                if merged.merge(&theirs) {
                    self.replace(merged);
                }
                // Sent after the order to persist: a document that a node claims to hold is on its
                // disk.
                self.send(from, Message::Held(held.clone()));
                if self.digest != held {
                    self.offer(from, now);
                }
            }
            Message::Held(digest) => self.held(&digest),
            Message::ReportWanted => self.send_report(from),
            Message::Report(id, report) => {
                if let Some(peer) = self.peers.get_mut(&from) {
                    (peer.report_id, peer.report) = (id, Some(report));
                    self.event(Event::Reported(from));
                }
            }
        }
    }

    /// Changes the document. [`Event::Spread`] follows when another node holds the change.
    ///
    /// # Errors
    /// Those of `change`; the document is then unchanged.
    pub fn change(
        &mut self,
        change: impl FnOnce(&mut Document) -> Result<(), DocumentError>,
    ) -> Result<ChangeId, DocumentError> {
        let mut changed = (*self.document).clone();
        change(&mut changed)?;
        changed.check_size(&self.document)?;
        self.changes += 1;
        let id = ChangeId(self.changes);
        if self.watched.len() == MOST_WATCHED_CHANGES {
            self.watched.pop_front();
        }
        self.watched.push_back(Watched { change: id, digests: Vec::new() });
        if changed == *self.document {
            // The change has no effect, so a node that holds this document holds the change.
            self.remember_digest();
        } else {
            self.replace(changed);
        }
        let peers: Vec<NodeId> = self.peers.iter().filter(|(_, peer)| peer.up).map(|(id, _)| *id).collect();
        peers.into_iter().for_each(|peer| self.send(peer, Message::Document(self.document.clone())));
        Ok(id)
    }

    /// Replaces the whole document, because this node has joined a cluster.
    pub fn adopt(&mut self, document: Document) {
        self.watched.clear();
        self.replace(document);
    }

    /// Sets this node's report; peers get it if it has changed.
    pub fn set_report(&mut self, report: NodeReport) {
        if self.report.as_deref() == Some(&report) {
            return;
        }
        self.report = Some(Arc::new(report));
        self.report_number += 1;
        let peers: Vec<NodeId> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|id| self.send_report(id));
    }

    /// Sets whether the document is not on the disk. Other nodes count this node as holding it only
    /// if it is.
    pub fn set_volatile(&mut self, volatile: bool) {
        self.volatile = volatile;
    }

    fn send_report(&mut self, to: NodeId) {
        if let Some(report) = self.report.clone() {
            self.send(to, Message::Report((self.boot, self.report_number), report));
        }
    }

    /// Whether a peer's version does not work with this node's, according to its last heartbeat.
    fn refuses(&mut self, from: NodeId, message: &Message) -> bool {
        let Some(peer) = self.peers.get_mut(&from) else { return true };
        if let Message::Heartbeat { version, .. } = message {
            let refused = (!version::work_together(&self.version, version)).then(|| version.clone());
            if refused.is_some() && peer.refused != refused {
                self.outputs.push_back(Output::Event(Event::Refused(from)));
            }
            peer.refused = refused;
        }
        peer.refused.is_some()
    }

    fn heard(&mut self, from: NodeId, boot: u64, reaches: BTreeSet<NodeId>, now: Duration) {
        let known = &self.document;
        let reaches = reaches.into_iter().filter(|id| known.member(id).is_some()).collect();
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let restarted = peer.up && peer.boot.is_some_and(|known| known != boot);
        let was_up = std::mem::replace(&mut peer.up, true);
        peer.boot = Some(boot);
        peer.heard_at = Some(now);
        if peer.connections == 0 {
            // The peer was heard although its connection ended: the message was on its way.
            peer.disconnected_at.get_or_insert(now);
        }
        peer.reaches = reaches;
        if peer.report_id.0 != boot {
            // Clears the number, so that the report is requested again if this heartbeat was an old
            // one.
            (peer.report_id, peer.report) = ((0, 0), None);
        }
        if restarted {
            peer.sent = None;
            self.event(Event::Restarted(from));
        } else if !was_up {
            self.heartbeat_at = now;
            self.event(Event::Up(from));
        }
    }

    /// Sends the document to a peer whose document differs, unless it was sent just before.
    fn offer(&mut self, to: NodeId, now: Duration) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        let just_sent = peer.sent.as_ref().is_some_and(|(digest, at)| {
            *digest == self.digest && now.saturating_sub(*at) < self.timing.document
        });
        if !just_sent {
            peer.sent = Some((self.digest.clone(), now));
            self.send(to, Message::Document(self.document.clone()));
        }
    }

    fn held(&mut self, digest: &Digest) {
        let spread: Vec<ChangeId> = self
            .watched
            .iter()
            .filter(|watched| watched.digests.contains(digest))
            .map(|watched| watched.change)
            .collect();
        self.watched.retain(|watched| !spread.contains(&watched.change));
        spread.into_iter().for_each(|change| self.event(Event::Spread(change)));
    }

    fn replace(&mut self, document: Document) {
        self.document = Arc::new(document);
        self.digest = self.document.digest();
        self.remember_digest();
        self.outputs.push_back(Output::Persist(self.document.clone()));
        self.tell_departing();
        self.follow_members();
        self.event(Event::DocumentChanged);
    }

    fn remember_digest(&mut self) {
        for watched in &mut self.watched {
            if watched.digests.len() == REMEMBERED_DIGESTS {
                watched.digests.remove(0);
            }
            watched.digests.push(self.digest.clone());
        }
    }

    /// Sends the document to peers that it removes, so that they learn why nobody answers any more.
    fn tell_departing(&mut self) {
        let leaving = self.document.is_removed(&self.me);
        let departing = |id: &NodeId| leaving || self.document.member(id).is_none();
        let told: Vec<NodeId> =
            self.peers.iter().filter(|(id, peer)| peer.up && departing(id)).map(|(id, _)| *id).collect();
        told.into_iter().for_each(|id| self.send(id, Message::Document(self.document.clone())));
    }

    /// Makes the peers equal to the document's members.
    fn follow_members(&mut self) {
        let mut members = self.document.member_ids();
        let removed_me = self.document.is_removed(&self.me);
        members.remove(&self.me);
        if removed_me {
            // Nobody talks to this node any more.
            members.clear();
        }
        let gone: Vec<NodeId> =
            self.peers.iter().filter(|(id, _)| !members.contains(id)).map(|(id, _)| *id).collect();
        for id in gone {
            if self.peers.remove(&id).is_some_and(|peer| peer.up) {
                self.event(Event::Down(id));
            }
        }
        members.into_iter().for_each(|id| {
            self.peers.entry(id).or_default();
        });
    }

    fn heartbeat(&self) -> Message {
        let reaches = self.peers.iter().filter(|(_, peer)| peer.up).map(|(id, _)| *id).collect();
        Message::Heartbeat {
            boot: self.boot,
            digest: self.digest.clone(),
            report: self.report_number,
            reaches,
            volatile: self.volatile,
            version: self.version.clone(),
        }
    }

    fn send(&mut self, to: NodeId, message: Message) {
        self.outputs.push_back(Output::Send(to, message));
    }

    fn event(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
