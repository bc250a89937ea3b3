//! The state of an agent, and how its decisions become messages, files and events.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::{Agent, DOCUMENT_FILE};
use crate::document::{Document, Register};
use crate::id::NodeId;
use crate::joining::code::{Attempts, Code};
use crate::joining::token::IssuedTokens;
use crate::membership::{ChangeId, Event, Membership, Message, Output};
use crate::{version, wire};

/// Maximum nodes that are remembered because they were found or have knocked. Strangers can fill
/// this.
const MOST_SEEN: usize = 256;
/// Maximum nodes that wait for confirmation that a document is on the disk.
const MOST_HELD: usize = 256;
/// Maximum addresses of a remembered node.
const MOST_ADDRESSES: usize = 16;
/// A node that was not seen for this long is dropped.
const SEEN_FOR: Duration = Duration::from_secs(180);

/// A connection to a peer.
pub struct Link {
    pub number: u64,
    pub frames: mpsc::Sender<Arc<Vec<u8>>>,
}

/// A node that was found, or has knocked.
#[derive(Debug, Clone)]
pub struct Seen {
    pub name: String,
    pub alone: bool,
    pub addresses: Vec<SocketAddr>,
    pub at: Duration,
    /// The node has proved that it holds its key. Nodes found by multicast have not.
    pub proved: bool,
}

/// The state of an agent.
pub struct State {
    pub membership: Membership,
    pub links: BTreeMap<NodeId, Vec<Link>>,
    pub seen: BTreeMap<NodeId, Seen>,
    pub code: Code,
    pub attempts: Attempts,
    pub tokens: IssuedTokens,
    /// Waiters for the spreading of changes.
    pub spreading: BTreeMap<ChangeId, oneshot::Sender<()>>,
    /// Why the document could not be written; cleared when it can be.
    pub disk_error: Option<String>,
    /// The document to be written; `None` if the last one was written, or could not be.
    unwritten: Option<Arc<Document>>,
    /// A document is being written to disk.
    is_writing: bool,
    /// Messages that confirm to other nodes that this node holds a document, sent once it is on the
    /// disk.
    held: Vec<(NodeId, Message)>,
    /// Entries of keys and limits in this node's store.
    pub followed: Option<BTreeMap<String, Register<String>>>,
    /// The store's own keys are in the document; from now on the store follows the document.
    pub shares_store: bool,
}

impl State {
    pub fn new(membership: Membership, code: Code, tokens: IssuedTokens) -> Self {
        Self {
            membership,
            links: BTreeMap::new(),
            seen: BTreeMap::new(),
            code,
            attempts: Attempts::default(),
            tokens,
            spreading: BTreeMap::new(),
            disk_error: None,
            unwritten: None,
            is_writing: false,
            held: Vec::new(),
            followed: None,
            shares_store: false,
        }
    }

    /// Whether the document is still to be written to disk.
    pub fn is_unwritten(&self) -> bool {
        self.is_writing || self.unwritten.is_some()
    }

    /// Whether this node is in no cluster: it is its only member, and was not removed.
    pub fn is_alone(&self) -> bool {
        let (document, me) = (self.membership.document(), self.membership.me());
        !document.is_removed(&me) && document.members().all(|(id, _)| id == me)
    }

    /// Records a node that was found or has knocked. If there is no space, the node that was unseen
    /// for longest is dropped among those that have proved nothing. Members are never dropped, and
    /// a node that has proved its key is never dropped for one that has not.
    pub fn note(&mut self, id: NodeId, seen: Seen) {
        if let Some(known) = self.seen.get_mut(&id).filter(|known| known.proved && !seen.proved) {
            // Anybody can announce a key, so its owner's own data takes precedence.
            known.at = seen.at;
            let new = seen.addresses.into_iter().filter(|address| !known.addresses.contains(address));
            let new: Vec<SocketAddr> =
                new.take(MOST_ADDRESSES.saturating_sub(known.addresses.len())).collect();
            known.addresses.extend(new);
            return;
        }
        if !self.seen.contains_key(&id) && self.seen.len() >= MOST_SEEN {
            let document = self.membership.document();
            let strangers = self.seen.iter().filter(|(id, _)| document.member(id).is_none());
            let first = strangers.min_by_key(|(_, seen)| (seen.proved, seen.at));
            match first.map(|(id, known)| (*id, known.proved)) {
                Some((first, proved)) if !proved || seen.proved => self.seen.remove(&first),
                _ => return,
            };
        }
        self.seen.insert(id, seen);
    }

    pub fn forget_old(&mut self, now: Duration) {
        let document = self.membership.document().clone();
        // Members' addresses stay useful.
        self.seen.retain(|id, seen| now.saturating_sub(seen.at) < SEEN_FOR || document.member(id).is_some());
        self.spreading.retain(|_, waiter| !waiter.is_closed());
    }
}

impl Agent {
    /// Carries out the membership's decisions. Call this after each use, under the same lock.
    pub(super) fn settle(&self, state: &mut State) {
        let mut changed = false;
        while let Some(output) = state.membership.poll() {
            match output {
                Output::Persist(document) => {
                    state.unwritten = Some(document);
                    state.membership.set_volatile(true);
                    self.0.wake_writer.notify_one();
                }
                // This would promise a document that is not on the disk yet.
                Output::Send(to, message @ Message::Held(_)) if state.is_unwritten() => {
                    if state.held.len() < MOST_HELD {
                        state.held.push((to, message));
                    }
                }
                Output::Send(_, Message::Held(_)) if state.disk_error.is_some() => {}
                Output::Send(to, message) => send(state, &to, &message),
                Output::Event(event) => {
                    changed = true;
                    self.note_event(state, event);
                }
            }
        }
        if changed {
            self.0.version.send_modify(|version| *version += 1);
        }
    }

    /// Writes documents to the disk, which may be slow; nothing else waits for it.
    pub(super) async fn keep_written(self) {
        loop {
            self.0.wake_writer.notified().await;
            while let Some(document) = self.begin_write() {
                let agent = self.clone();
                let write = move || {
                    let json = serde_json::to_vec(&*document).unwrap_or_default();
                    agent.0.folder.write(DOCUMENT_FILE, &json).map_err(|error| error.to_string())
                };
                let written = tokio::task::spawn_blocking(write).await;
                self.end_write(written.unwrap_or_else(|error| Err(error.to_string())));
            }
        }
    }

    fn begin_write(&self) -> Option<Arc<Document>> {
        let mut state = self.lock();
        let document = state.unwritten.take()?;
        state.is_writing = true;
        Some(document)
    }

    fn end_write(&self, written: Result<(), String>) {
        let mut state = self.lock();
        state.is_writing = false;
        state.disk_error = written.err();
        if let Some(error) = &state.disk_error {
            tracing::error!("the cluster's document is only in memory: {error}");
        }
        if state.unwritten.is_none() {
            let is_on_disk = state.disk_error.is_none();
            state.membership.set_volatile(!is_on_disk);
            let held = std::mem::take(&mut state.held);
            held.iter().filter(|_| is_on_disk).for_each(|(to, message)| send(&state, to, message));
        }
        drop(state);
        self.0.version.send_modify(|version| *version += 1);
    }

    /// Waits until the document is on the disk, or cannot be written.
    pub(super) async fn written(&self) {
        let mut changes = self.changes();
        while self.lock().is_unwritten() {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Tries again to write a document after a failure.
    pub(super) fn write_again(&self, state: &mut State) {
        if state.disk_error.is_some() && !state.is_unwritten() {
            state.unwritten = Some(state.membership.document().clone());
            self.0.wake_writer.notify_one();
        }
    }

    /// Limits are counted over the nodes that answer, with the document's keys.
    fn note_for_limits(&self, state: &mut State, event: &Event) {
        match event {
            Event::Up(_) | Event::Down(_) | Event::Restarted(_) | Event::Refused(_) => self.recount(),
            Event::DocumentChanged => self.follow_keys(state),
            Event::Reported(_) | Event::Spread(_) => {}
        }
    }

    fn note_event(&self, state: &mut State, event: Event) {
        self.note_for_limits(state, &event);
        let name = |state: &State, id: &NodeId| {
            let member = state.membership.document().member(id);
            member.map_or_else(|| id.short(), |member| format!("{} ({})", member.name, id.short()))
        };
        match event {
            Event::Up(id) => self.0.log.add(format!("{} is up", name(state, &id))),
            Event::Down(id) => self.0.log.add(format!("{} is down", name(state, &id))),
            Event::Restarted(id) => self.0.log.add(format!("{} was restarted", name(state, &id))),
            Event::Refused(id) => {
                let theirs = state.membership.peers().find(|(peer, _)| *peer == id);
                let theirs = theirs.and_then(|(_, peer)| peer.refused.clone()).unwrap_or_default();
                let why = version::refusal(&theirs, self.own_version());
                self.0.log.add(format!("{} is refused: {why}", name(state, &id)));
            }
            Event::Reported(_) => {}
            Event::DocumentChanged => self.trust_members(state),
            Event::Spread(change) => {
                if let Some(waiter) = state.spreading.remove(&change) {
                    // The waiter may have given up.
                    let _ = waiter.send(());
                }
            }
        }
        if let Event::DocumentChanged = event {
            let document = state.membership.document().clone();
            let me = self.0.id;
            // Dropping a link closes it after the document, its last message, was written.
            state.links.retain(|id, _| document.member(id).is_some() && !document.is_removed(&me));
            self.0.wake_links.notify_one();
        }
    }

    /// Allows connections from the document's members only.
    pub(super) fn trust_members(&self, state: &State) {
        let document = state.membership.document();
        let mut members = document.member_ids();
        members.remove(&self.0.id);
        if document.is_removed(&self.0.id) {
            members.clear();
        }
        self.0.trusted.set(members);
    }
}

/// Queues a message on all connections of a peer, because each needs signs of life; a message may
/// arrive twice. If there is no connection, or its queue is full, the message is lost, and later
/// heartbeats show what is missing.
fn send(state: &State, to: &NodeId, message: &Message) {
    let Some(links) = state.links.get(to).filter(|links| !links.is_empty()) else { return };
    match wire::encode(message) {
        Ok(frame) => {
            let frame = Arc::new(frame);
            for link in links {
                let _ = link.frames.try_send(frame.clone());
            }
        }
        Err(error) => tracing::error!("a message cannot be sent: {error}"),
    }
}
