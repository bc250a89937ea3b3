//! Connections to the other members, opened from either side. Each is read and written by a task.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Agent;
use super::state::Link;
use crate::id::NodeId;
use crate::joining::client::was_removed;
use crate::membership::Message;
use crate::tls::{Protocol, server_name};
use crate::wire::{self, LONGEST_FRAME_BYTES, WireError};

/// Messages that wait for a slow connection. Heartbeats come every 300 ms, so this is seconds.
const FRAMES_WAITING: usize = 64;
/// A connection that receives nothing for this long is closed. Longer than the silence after which
/// the peer counts as down.
const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// A connection that accepts no data for this long is closed.
const WRITE_LIMIT: Duration = Duration::from_secs(2);
/// Time for one address to answer, including the handshake.
const DIAL_LIMIT: Duration = Duration::from_secs(3);
/// Time that the best path has before the other addresses are tried. They answer first if the path
/// no longer works.
const HEAD_START: Duration = Duration::from_millis(200);
/// Pauses between attempts to reach a member: the first, and the maximum.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(3));
/// Interval at which missing connections are checked, if nothing wakes the task before.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Maximum addresses of a member that are tried at once.
const MOST_ADDRESSES: usize = 24;

static LINKS: AtomicU64 = AtomicU64::new(0);

/// When to try a member again.
#[derive(Debug, Clone, Copy)]
struct Backoff {
    again_at: Duration,
    pause: Duration,
}

/// Connects from the address that this node listens on, if it is a single one. A rank of a group
/// reaches the head at the address from which the head's agent has called, and the head listens on
/// no other.
async fn connect_from(own: IpAddr, address: &str) -> std::io::Result<TcpStream> {
    let mut failure = std::io::Error::from(std::io::ErrorKind::NotFound);
    for to in tokio::net::lookup_host(address).await? {
        let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        let fits = own.is_ipv4() == to.is_ipv4() && own.is_loopback() == to.ip().is_loopback();
        if fits && !own.is_unspecified() {
            socket.bind(SocketAddr::new(own, 0))?;
        }
        match socket.connect(to).await {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

impl Agent {
    /// Keeps a connection to every member.
    pub(super) async fn keep_links(self) {
        let mut dialing: JoinSet<NodeId> = JoinSet::new();
        let (mut busy, mut waits) = (BTreeSet::new(), BTreeMap::<NodeId, Backoff>::new());
        loop {
            tokio::select! {
                () = self.0.wake_links.notified() => {}
                Some(Ok(id)) = dialing.join_next() => {
                    busy.remove(&id);
                }
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            let now = self.now();
            let missing = self.missing_links();
            waits.retain(|id, _| missing.iter().any(|(missing, _)| missing == id));
            for (id, addresses) in missing {
                let wait = waits.get(&id).copied();
                if busy.contains(&id) || wait.is_some_and(|wait| wait.again_at > now) {
                    continue;
                }
                let pause = wait.map_or(PAUSES.0, |wait| (wait.pause * 2).min(PAUSES.1));
                waits.insert(id, Backoff { again_at: now + pause, pause });
                busy.insert(id);
                let agent = self.clone();
                dialing.spawn(async move {
                    if let Some((stream, remote)) = agent.dial(id, Protocol::Peer, None, addresses).await {
                        tokio::spawn(async move {
                            if !agent.clone().run_link(id, remote, stream).await {
                                agent.ask_whether_removed(id, remote).await;
                            }
                        });
                    }
                    id
                });
            }
        }
    }

    /// The members without a connection, with addresses to try.
    fn missing_links(&self) -> Vec<(NodeId, Vec<String>)> {
        let state = self.lock();
        let peers = state.membership.peers().map(|(id, _)| id);
        let missing = peers.filter(|id| state.links.get(id).is_none_or(Vec::is_empty));
        missing.map(|id| (id, self.addresses_of(&state, &id))).collect()
    }

    /// Addresses of a node: where it was found, then where it was before, then those that the user
    /// gave.
    pub(super) fn addresses_of(&self, state: &super::State, id: &NodeId) -> Vec<String> {
        let seen = state.seen.get(id).map(|seen| &seen.addresses[..]).unwrap_or_default();
        let member = state.membership.document().member(id);
        let known = member.map(|member| &member.addresses[..]).unwrap_or_default();
        let mut addresses: Vec<String> = Vec::new();
        let all = seen.iter().map(SocketAddr::to_string).chain(known.iter().cloned());
        for address in all.chain(self.0.options.join.iter().cloned()) {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses.truncate(MOST_ADDRESSES);
        addresses
    }

    /// Connects to a node at the address that answers first, with a head start for one of them.
    /// Only the holder of the node's key can answer, so other listeners at an address do no harm.
    pub(super) async fn dial(
        &self,
        id: NodeId,
        protocol: Protocol,
        preferred: Option<String>,
        addresses: Vec<String>,
    ) -> Option<(TlsStream<TcpStream>, SocketAddr)> {
        let config = self.0.tls.client(protocol, id).ok()?;
        let (mut attempts, own) = (JoinSet::new(), self.0.address.ip());
        for address in addresses {
            let connector = TlsConnector::from(config.clone());
            let waits = preferred.as_ref().is_some_and(|preferred| *preferred != address);
            attempts.spawn(async move {
                if waits {
                    tokio::time::sleep(HEAD_START).await;
                }
                let attempt = async {
                    let stream = connect_from(own, &address).await?;
                    let _ = stream.set_nodelay(true);
                    let remote = stream.peer_addr()?;
                    Ok::<_, std::io::Error>((connector.connect(server_name(), stream).await?, remote))
                };
                tokio::time::timeout(DIAL_LIMIT, attempt).await.ok()?.ok()
            });
        }
        // Dropping the set ends the other attempts.
        while let Some(attempt) = attempts.join_next().await {
            if let Ok(Some(connected)) = attempt {
                return Some(connected);
            }
        }
        None
    }

    /// This node may have been off when it was removed, and nobody calls a removed node.
    async fn ask_whether_removed(self, member: NodeId, address: SocketAddr) {
        if !matches!(was_removed(&self.0.tls, member, address).await, Ok(true)) {
            return;
        }
        let me = self.0.id;
        let mut state = self.lock();
        // Another member may have told it meanwhile.
        if state.membership.change(|document| document.remove_member(&me)).is_ok() {
            tracing::warn!("this node was removed from its cluster, says {address}");
        }
        self.settle(&mut state);
    }

    /// Carries messages over a connection with a member until it fails. Returns whether any came:
    /// in TLS 1.3 a client has connected before the server has checked its key.
    pub(super) async fn run_link<S>(self, peer: NodeId, remote: SocketAddr, stream: S) -> bool
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let (frames, mut waiting) = mpsc::channel::<Arc<Vec<u8>>>(FRAMES_WAITING);
        let number = LINKS.fetch_add(1, Ordering::Relaxed);
        let agent = self.clone();
        let task = tokio::spawn(async move {
            let write = async {
                while let Some(frame) = waiting.recv().await {
                    let written = async {
                        writer.write_all(&frame).await?;
                        writer.flush().await
                    };
                    match tokio::time::timeout(WRITE_LIMIT, written).await {
                        Ok(Ok(())) => {}
                        _ => return,
                    }
                }
            };
            let mut heard = false;
            tokio::select! {
                () = write => {}
                error = agent.read_link(peer, &mut reader, &mut heard) => tracing::debug!("{remote}: {error}"),
            }
            heard
        });
        let link = Link { number, frames };
        {
            let mut state = self.lock();
            if state.membership.document().member(&peer).is_none() {
                // The member was removed while it connected.
                task.abort();
                return true;
            }
            state.links.entry(peer).or_default().push(link);
            self.0.open_links.send_modify(|open| *open += 1);
            state.membership.connected(peer);
            self.settle(&mut state);
        }
        let heard = task.await.unwrap_or(true);
        self.0.open_links.send_modify(|open| *open -= 1);
        let mut state = self.lock();
        if let Some(links) = state.links.get_mut(&peer) {
            links.retain(|link| link.number != number);
        }
        state.membership.disconnected(peer, self.now());
        self.settle(&mut state);
        drop(state);
        self.0.wake_links.notify_one();
        heard
    }

    async fn read_link(
        &self,
        peer: NodeId,
        reader: &mut (impl AsyncRead + Unpin),
        heard: &mut bool,
    ) -> WireError {
        loop {
            let message = wire::within(IDLE_LIMIT, wire::receive::<Message>(reader, LONGEST_FRAME_BYTES));
            match message.await {
                Ok(message) => {
                    *heard = true;
                    let mut state = self.lock();
                    state.membership.receive(peer, message, self.now());
                    self.settle(&mut state);
                }
                Err(error) => return error,
            }
        }
    }
}

// Other systems have only one loopback address.
#[cfg(all(test, target_os = "linux"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn calls_leave_from_the_address_that_the_node_listens_on() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let called_from = async |own: &str| {
                let calls = connect_from(own.parse().unwrap(), &address);
                let (accepted, called) = tokio::join!(listener.accept(), calls);
                called.unwrap();
                accepted.unwrap().1.ip().to_string()
            };
            assert_eq!(called_from("127.0.0.2").await, "127.0.0.2");
            // This node listens on all addresses, or on one from which the other node cannot be
            // reached: the system chooses.
            for own in ["0.0.0.0", "::", "10.255.255.1", "fd00::1"] {
                assert_eq!(called_from(own).await, "127.0.0.1", "{own}");
            }
            assert!(connect_from("127.0.0.1".parse().unwrap(), "127.0.0.1:1").await.is_err());
        });
    }
}
