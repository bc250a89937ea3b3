//! The listening side of joining: a member that accepts knocks and tokens, and a newcomer with
//! which a member pairs.

use std::net::SocketAddr;

use super::code::Code;
use super::message::{JoinReply, JoinRequest, PairReply, PairResult};
use super::proof::{BINDING_LABEL, Exchange, Side};
use crate::document::Document;
use crate::gate::Connection;
use crate::id::NodeId;
use crate::version;
use crate::wire::{self, LONGEST_FRAME_BYTES, LONGEST_JOIN_FRAME_BYTES, WireError};

/// The longest name of a node, in bytes.
pub const LONGEST_NAME_BYTES: usize = 64;

/// The agent's decisions about joining. Refusals are messages for the other side's user.
pub trait JoinHost: Send + Sync + 'static {
    /// This node.
    fn me(&self) -> NodeId;
    /// Its name.
    fn name(&self) -> String;
    /// Its version.
    fn version(&self) -> String {
        version::own().to_owned()
    }
    /// A newcomer wants to be approved here.
    ///
    /// # Errors
    /// The reason of a refusal.
    fn note_knock(&self, newcomer: NodeId, name: String, address: SocketAddr) -> Result<(), String>;
    /// Whether a key was removed from this node's cluster.
    fn was_removed(&self, node: NodeId) -> bool;
    /// Makes the holder of a token a member, and marks the token as used.
    ///
    /// # Errors
    /// The reason of a refusal.
    fn redeem(
        &self,
        secret: &[u8],
        newcomer: NodeId,
        name: String,
        remote: SocketAddr,
    ) -> Result<Document, String>;
    /// The code that this node shows, for one attempt.
    ///
    /// # Errors
    /// When this node is in a cluster already, or too many attempts were made.
    fn attempt(&self) -> Result<Code, String>;
    /// A member has proved that it knows the code: join its cluster.
    ///
    /// # Errors
    /// If this node has joined another cluster meanwhile.
    fn welcome(&self, member: NodeId, document: Document) -> Result<(), String>;
}

/// Serves one connection of [`Protocol::Join`](crate::tls::Protocol::Join).
pub async fn serve(mut connection: Connection, host: &impl JoinHost) {
    if let Err(error) = answer(&mut connection, host).await {
        tracing::debug!(from = %connection.remote, "joining failed: {error}");
    }
}

async fn answer(connection: &mut Connection, host: &impl JoinHost) -> Result<(), WireError> {
    let request: JoinRequest = wire::receive(&mut connection.stream, LONGEST_JOIN_FRAME_BYTES).await?;
    let (peer, remote) = (connection.peer, connection.remote);
    let fits = |theirs: &str| {
        let ours = host.version();
        if version::work_together(theirs, &ours) { Ok(()) } else { Err(version::refusal(theirs, &ours)) }
    };
    let reply = match request {
        JoinRequest::Pair { element, version } => {
            return match fits(&version) {
                Ok(()) => pair(connection, host, &element).await,
                Err(why) => wire::send(&mut connection.stream, &PairReply::Refused(why)).await,
            };
        }
        JoinRequest::AmIRemoved if host.was_removed(peer) => Ok(JoinReply::Removed),
        JoinRequest::AmIRemoved => Err("this key was not removed here".to_owned()),
        JoinRequest::Knock { name, port, version } => fits(&version)
            .and_then(|()| check_name(name))
            .and_then(|name| host.note_knock(peer, name, SocketAddr::new(remote.ip(), port)))
            .map(|()| JoinReply::Noted),
        JoinRequest::Token { secret, name, version } => fits(&version)
            .and_then(|()| check_name(name))
            .and_then(|name| host.redeem(&secret, peer, name, remote))
            .map(|document| JoinReply::Welcome(Box::new(document))),
    };
    wire::send(&mut connection.stream, &reply.unwrap_or_else(JoinReply::Refused)).await
}

async fn pair(connection: &mut Connection, host: &impl JoinHost, element: &[u8]) -> Result<(), WireError> {
    let (member, stream) = (connection.peer, &mut connection.stream);
    let code = match host.attempt() {
        Ok(code) => code,
        Err(why) => return wire::send(stream, &PairReply::Refused(why)).await,
    };
    let Ok(binding) = stream.get_ref().1.export_keying_material([0; 32], BINDING_LABEL, None) else {
        return Ok(());
    };
    let (exchange, own_element) = Exchange::start(Side::Newcomer, &code, &member, &host.me(), &binding);
    let Some(proofs) = exchange.finish(element) else {
        return wire::send(stream, &PairReply::Refused("that is no element of the exchange".into())).await;
    };
    let reply = PairReply::Proof { element: own_element, proof: proofs.own().to_vec(), name: host.name() };
    wire::send(stream, &reply).await?;
    let result: PairResult = wire::receive(stream, LONGEST_FRAME_BYTES).await?;
    let outcome = match result {
        PairResult::Welcome { proof, document } if proofs.accepts(&proof) => host.welcome(member, *document),
        PairResult::Welcome { .. } => Err("the member's proof is wrong".to_owned()),
        PairResult::Refused(why) => Err(why),
    };
    if let Err(why) = &outcome {
        tracing::warn!(from = %connection.remote, "an attempt to pair failed: {why}");
    }
    wire::send(&mut connection.stream, &outcome).await
}

/// Names are shown on terminals, so they are short and printable.
pub fn check_name(name: String) -> Result<String, String> {
    let is_good = !name.is_empty() && name.len() <= LONGEST_NAME_BYTES && !name.chars().any(char::is_control);
    if is_good { Ok(name) } else { Err(format!("a name has 1 to {LONGEST_NAME_BYTES} printable characters")) }
}
