//! What an agent knows, and how decisions become messages, files and events.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::{Agent, DOCUMENT_FILE};
use crate::id::NodeId;
use crate::joining::code::{Attempts, Code};
use crate::joining::token::IssuedTokens;
use crate::membership::{ChangeId, Event, Membership, Message, Output};
use crate::wire;

/// Nodes that are remembered because they were found or have knocked. Strangers can fill this.
const MOST_SEEN: usize = 256;
/// A node that was not seen for this long is forgotten.
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
}

/// What an agent knows.
pub struct State {
    pub membership: Membership,
    pub links: BTreeMap<NodeId, Vec<Link>>,
    pub seen: BTreeMap<NodeId, Seen>,
    pub code: Code,
    pub attempts: Attempts,
    pub tokens: IssuedTokens,
    /// Who waits until a change has spread.
    pub spreading: BTreeMap<ChangeId, oneshot::Sender<()>>,
    /// Why the document could not be written, until it can.
    pub disk_error: Option<String>,
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
        }
    }

    /// Whether this node is in no cluster: it is its only member, and was not removed.
    pub fn is_alone(&self) -> bool {
        let (document, me) = (self.membership.document(), self.membership.me());
        !document.is_removed(&me) && document.members().all(|(id, _)| id == me)
    }

    /// Notes a node that was found or has knocked. When there is no room, the one that was not seen
    /// for longest is forgotten.
    pub fn note(&mut self, id: NodeId, seen: Seen) {
        if !self.seen.contains_key(&id) && self.seen.len() >= MOST_SEEN {
            let oldest = self.seen.iter().min_by_key(|(_, seen)| seen.at).map(|(id, _)| *id);
            oldest.and_then(|id| self.seen.remove(&id));
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
    /// Carries out what the membership has decided. Call it after each use, under the same lock.
    pub(super) fn settle(&self, state: &mut State) {
        let mut changed = false;
        let mut is_on_disk = true;
        while let Some(output) = state.membership.poll() {
            match output {
                Output::Persist(document) => {
                    let json = serde_json::to_vec(&*document).unwrap_or_default();
                    let written = self.0.folder.write(DOCUMENT_FILE, &json);
                    is_on_disk = written.is_ok();
                    state.disk_error = written.err().map(|error| error.to_string());
                    if let Some(error) = &state.disk_error {
                        tracing::error!("the cluster's document is only in memory: {error}");
                    }
                }
                // It would promise what the disk does not hold.
                Output::Send(_, Message::Held(_)) if !is_on_disk => {}
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

    fn note_event(&self, state: &mut State, event: Event) {
        let name = |state: &State, id: &NodeId| {
            let member = state.membership.document().member(id);
            member.map_or_else(|| id.short(), |member| format!("{} ({})", member.name, id.short()))
        };
        match event {
            Event::Up(id) => tracing::info!("{} is up", name(state, &id)),
            Event::Down(id) => tracing::warn!("{} is down", name(state, &id)),
            Event::Restarted(id) => tracing::info!("{} was restarted", name(state, &id)),
            Event::Reported(_) => {}
            Event::DocumentChanged => self.trust_members(state),
            Event::Spread(change) => {
                if let Some(waiter) = state.spreading.remove(&change) {
                    // Whoever waited may have given up.
                    let _ = waiter.send(());
                }
            }
        }
        if let Event::DocumentChanged = event {
            let document = state.membership.document().clone();
            let me = self.0.id;
            // Dropping a link closes it once the document, its last message, is written.
            state.links.retain(|id, _| document.member(id).is_some() && !document.is_removed(&me));
            self.0.wake_links.notify_one();
        }
    }

    /// Makes the document's members, and nobody else, able to connect.
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

/// Queues a message on all connections of a peer, each of which needs signs of life; a message may
/// come twice. Where none is or the queue is full, it is lost, and heartbeats show later what is
/// missing.
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
