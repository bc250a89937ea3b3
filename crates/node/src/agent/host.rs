//! The agent's decisions about joining, on the side that accepts the connection.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use thunder_access::Actor;

use super::acts::joined;
use super::state::{Seen, State};
use super::{Agent, TOKENS_FILE};
use crate::discovery::Found;
use crate::document::{Document, Member};
use crate::id::NodeId;
use crate::joining::code::Code;
use crate::joining::server::JoinHost;

impl JoinHost for Agent {
    fn me(&self) -> NodeId {
        self.0.id
    }

    fn name(&self) -> String {
        self.0.options.name.clone()
    }

    fn version(&self) -> String {
        self.own_version().to_owned()
    }

    fn note_knock(&self, newcomer: NodeId, name: String, address: SocketAddr) -> Result<(), String> {
        let mut state = self.lock();
        let document = state.membership.document();
        if document.is_removed(&newcomer) {
            return Err("this node's key was removed from the cluster: run `thunder cluster leave` on it, \
                        which draws a new key, and approve it anew"
                .to_owned());
        }
        let at = self.now();
        state.note(newcomer, Seen { name, alone: true, addresses: vec![address], at, proved: true });
        drop(state);
        self.0.version.send_modify(|version| *version += 1);
        Ok(())
    }

    fn was_removed(&self, node: NodeId) -> bool {
        self.lock().membership.document().is_removed(&node)
    }

    fn redeem(
        &self,
        secret: &[u8],
        newcomer: NodeId,
        name: String,
        remote: SocketAddr,
    ) -> Result<Document, String> {
        let mut state = self.lock();
        state.tokens.redeem(secret, newcomer, unix_s()).map_err(|refusal| refusal.to_string())?;
        // Written to disk before the reply, so that a restart does not make the token valid again.
        self.save_tokens(&state)?;
        tracing::info!("{name} ({}) joins with a token from {remote}", newcomer.short());
        let act = joined(&name, newcomer);
        let document = self.admit(&mut state, newcomer, name, Vec::new())?;
        let actor = Actor { name: "token".to_owned(), remote: Some(remote.to_string()) };
        let agent = self.clone();
        tokio::spawn(async move { agent.note_act(actor, act).await });
        Ok(document)
    }

    fn attempt(&self) -> Result<Code, String> {
        let mut state = self.lock();
        if !state.is_alone() {
            return Err("this node is in a cluster already".to_owned());
        }
        if !state.attempts.take(self.now()) {
            return Err("too many attempts: try again in a few seconds".to_owned());
        }
        Ok(state.code.clone())
    }

    fn welcome(&self, member: NodeId, document: Document) -> Result<(), String> {
        let mut state = self.lock();
        if !state.is_alone() {
            return Err("this node has joined a cluster meanwhile".to_owned());
        }
        if document.member(&self.0.id).is_none() || document.member(&member).is_none() {
            return Err("the cluster's document does not have both nodes".to_owned());
        }
        state.attempts.give_back();
        self.adopt(&mut state, document);
        Ok(())
    }
}

impl Agent {
    /// Adopts the document of a cluster that has admitted this node.
    pub(super) fn adopt(&self, state: &mut State, document: Document) {
        state.membership.adopt(document);
        self.settle(state);
        let names: Vec<&str> =
            state.membership.document().members().map(|(_, member)| member.name.as_str()).collect();
        tracing::info!("joined the cluster of {}", names.join(", "));
        // The other nodes call this node at the addresses in its own entry.
        let agent = self.clone();
        tokio::spawn(async move { agent.describe_myself() });
    }

    /// Makes a node a member. Returns the document for it.
    pub(super) fn admit(
        &self,
        state: &mut State,
        newcomer: NodeId,
        name: String,
        addresses: Vec<String>,
    ) -> Result<Document, String> {
        let member = Member { name, addresses, ..Member::default() };
        let me = self.0.id;
        let changed = state.membership.change(|document| document.set_member(me, newcomer, member));
        self.settle(state);
        changed.map_err(|error| error.to_string())?;
        Ok((**state.membership.document()).clone())
    }

    pub(super) fn save_tokens(&self, state: &State) -> Result<(), String> {
        let json = serde_json::to_vec(&state.tokens).map_err(|error| error.to_string())?;
        self.0.folder.write(TOKENS_FILE, &json).map_err(|error| error.to_string())
    }

    /// Records a node that was found by multicast.
    pub(super) fn note_found(&self, found: Found) {
        let at = self.now();
        let Found { id, name, alone, addresses } = found;
        let mut state = self.lock();
        let is_member = state.membership.document().member(&id).is_some();
        state.note(id, Seen { name, alone, addresses, at, proved: false });
        drop(state);
        self.0.version.send_modify(|version| *version += 1);
        if is_member {
            self.0.wake_links.notify_one();
        }
    }
}

/// Seconds since 1970.
pub(super) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
