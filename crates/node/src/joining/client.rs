//! The connecting side of joining: a newcomer that knocks or presents a token, and a member that
//! pairs with a newcomer.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::code::Code;
use super::message::{JoinReply, JoinRequest, PairReply, PairResult};
use super::proof::{BINDING_LABEL, Exchange, Side};
use super::server::check_name;
use super::token::Token;
use crate::document::Document;
use crate::id::NodeId;
use crate::tls::{Protocol, Tls, peer_of, server_name};
use crate::wire::{self, LONGEST_FRAME_BYTES, LONGEST_JOIN_FRAME_BYTES, WireError};

/// Time to connect, including the handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time to wait for an address of this machine, and the pause between attempts.
const ADDRESS_LIMIT: Duration = Duration::from_secs(3);
const ADDRESS_PAUSE: Duration = Duration::from_millis(50);
/// Time for a reply.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

/// Why joining failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// No connection, or it ended.
    #[error("{address}: {why}")]
    Connection {
        /// Address of the other side.
        address: SocketAddr,
        /// What happened.
        why: WireError,
    },
    /// The other side refused; its message.
    #[error("{address} refuses: {why}")]
    Refused {
        /// Address of the other side.
        address: SocketAddr,
        /// Its message.
        why: String,
    },
    /// The other side does not know the code.
    #[error("{address} does not show this code: compare it with the new node's screen, and try again")]
    WrongCode {
        /// Address of the other side.
        address: SocketAddr,
    },
}

fn strange(address: SocketAddr) -> JoinError {
    JoinError::Refused { address, why: "a strange reply".into() }
}

/// A newcomer's description of itself.
#[derive(Debug, Clone)]
pub struct Introduction {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

impl From<String> for Introduction {
    /// A node with this program's version.
    fn from(name: String) -> Self {
        Self { name, version: crate::version::own().to_owned() }
    }
}

/// Connects. After an interface has come up, IPv6 checks for about a second whether its address is
/// unique; until then the system has no address to connect from.
async fn connect_tcp(address: SocketAddr) -> io::Result<TcpStream> {
    let began = Instant::now();
    loop {
        match TcpStream::connect(address).await {
            Err(error)
                if error.kind() == io::ErrorKind::AddrNotAvailable && began.elapsed() < ADDRESS_LIMIT =>
            {
                tokio::time::sleep(ADDRESS_PAUSE).await;
            }
            connected => return connected,
        }
    }
}

/// Connects to any node at `address`, or only to `expected`. Returns the node's key.
async fn connect(
    tls: &Tls,
    address: SocketAddr,
    expected: Option<NodeId>,
) -> Result<(TlsStream<TcpStream>, NodeId), WireError> {
    let config = match expected {
        Some(node) => tls.client(Protocol::Join, node),
        None => tls.client_of_anyone(),
    };
    let config = config.map_err(io::Error::other)?;
    wire::within(CONNECT_LIMIT, async {
        let stream = connect_tcp(address).await?;
        let _ = stream.set_nodelay(true);
        let stream = TlsConnector::from(config).connect(server_name(), stream).await?;
        let peer = peer_of(stream.get_ref().1);
        Ok((stream, peer.ok_or_else(|| io::Error::other("the other side has shown no key"))?))
    })
    .await
}

async fn ask(
    stream: &mut TlsStream<TcpStream>,
    request: &impl Serialize,
    limit: usize,
) -> Result<JoinReply, WireError> {
    wire::within(REPLY_LIMIT, async {
        wire::send(stream, request).await?;
        wire::receive(stream, limit).await
    })
    .await
}

/// Tells the node at `address` that this node, which listens on `port`, waits for approval. Returns
/// that node's key, which proves nothing yet.
///
/// # Errors
/// If it cannot be reached or refuses.
pub async fn knock(
    tls: &Tls,
    address: SocketAddr,
    newcomer: impl Into<Introduction>,
    port: u16,
) -> Result<NodeId, JoinError> {
    let Introduction { name, version } = newcomer.into();
    let failed = |why| JoinError::Connection { address, why };
    let (mut stream, peer) = connect(tls, address, None).await.map_err(failed)?;
    let request = JoinRequest::Knock { name, port, version };
    match ask(&mut stream, &request, LONGEST_JOIN_FRAME_BYTES).await.map_err(failed)? {
        JoinReply::Noted => Ok(peer),
        JoinReply::Refused(why) => Err(JoinError::Refused { address, why }),
        JoinReply::Welcome(_) | JoinReply::Removed => Err(strange(address)),
    }
}

/// Asks the member `member` at `address` whether this node was removed from the cluster. A member
/// that does not know this node yet refuses its connections too, but answers no.
///
/// # Errors
/// If the member cannot be reached, or is of a version that does not know the question.
pub async fn was_removed(tls: &Tls, member: NodeId, address: SocketAddr) -> Result<bool, JoinError> {
    let failed = |why| JoinError::Connection { address, why };
    let (mut stream, _) = connect(tls, address, Some(member)).await.map_err(failed)?;
    let reply = ask(&mut stream, &JoinRequest::AmIRemoved, LONGEST_JOIN_FRAME_BYTES);
    Ok(matches!(reply.await.map_err(failed)?, JoinReply::Removed))
}

/// Joins with a token at the issuer's `address`. Only the issuer can answer.
///
/// # Errors
/// When the issuer cannot be reached or refuses.
pub async fn join_with_token(
    tls: &Tls,
    token: &Token,
    address: SocketAddr,
    newcomer: impl Into<Introduction>,
) -> Result<Document, JoinError> {
    let Introduction { name, version } = newcomer.into();
    let failed = |why| JoinError::Connection { address, why };
    let (mut stream, _) = connect(tls, address, Some(token.issuer)).await.map_err(failed)?;
    let request = JoinRequest::Token { secret: token.secret.to_vec(), name, version };
    match ask(&mut stream, &request, LONGEST_FRAME_BYTES).await.map_err(failed)? {
        JoinReply::Welcome(document) => Ok(*document),
        JoinReply::Refused(why) => Err(JoinError::Refused { address, why }),
        JoinReply::Noted | JoinReply::Removed => Err(strange(address)),
    }
}

/// Pairs with the newcomer at `address`, as a member with a key and a version. After the newcomer
/// has proved that it knows the code, `admit` makes it a member under the name that it gives, and
/// returns the document for it.
///
/// # Errors
/// If the newcomer cannot be reached, does not know the code, or is not admitted.
pub async fn pair(
    tls: &Tls,
    (me, version): (NodeId, &str),
    code: &Code,
    newcomer: NodeId,
    address: SocketAddr,
    admit: impl FnOnce(String) -> Result<Document, String>,
) -> Result<(), JoinError> {
    let failed = |why| JoinError::Connection { address, why };
    let refused = |why| JoinError::Refused { address, why };
    let (mut stream, _) = connect(tls, address, Some(newcomer)).await.map_err(failed)?;
    let binding = stream.get_ref().1.export_keying_material([0; 32], BINDING_LABEL, None);
    let binding = binding.map_err(|error| failed(io::Error::other(error).into()))?;
    let (exchange, element) = Exchange::start(Side::Member, code, &me, &newcomer, &binding);
    let reply: PairReply = wire::within(REPLY_LIMIT, async {
        wire::send(&mut stream, &JoinRequest::Pair { element, version: version.to_owned() }).await?;
        wire::receive(&mut stream, LONGEST_JOIN_FRAME_BYTES).await
    })
    .await
    .map_err(failed)?;
    let (element, proof, name) = match reply {
        PairReply::Proof { element, proof, name } => (element, proof, name),
        PairReply::Refused(why) => return Err(refused(why)),
    };
    let proofs = exchange.finish(&element).ok_or(JoinError::WrongCode { address })?;
    let own = proofs.own().to_vec();
    let admitted = if proofs.accepts(&proof) {
        check_name(name).and_then(admit).map(Box::new)
    } else {
        // Without this side's proof, the newcomer learns nothing about the typed code.
        return Err(JoinError::WrongCode { address });
    };
    let result = match &admitted {
        Ok(document) => PairResult::Welcome { proof: own, document: document.clone() },
        Err(why) => PairResult::Refused(why.clone()),
    };
    let accepted: Result<(), String> = wire::within(REPLY_LIMIT, async {
        wire::send(&mut stream, &result).await?;
        wire::receive(&mut stream, LONGEST_JOIN_FRAME_BYTES).await
    })
    .await
    .map_err(failed)?;
    admitted.map(drop).and(accepted).map_err(refused)
}
