//! Sends this node's models to members, and connects to theirs.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use thunder_hub::{Peer, PeerStream, Served};
use tokio::runtime::Handle;

use super::super::Agent;
use super::super::bulk::{self, ClientStream};
use super::super::calls::{Call, CallReply};
use crate::gate::Connection;
use crate::id::NodeId;
use crate::wire::{self, WireError};

/// Members' connections that are served at a time. A pull opens up to eight, and does with fewer.
const MOST_SERVED: usize = 128;
/// A connection without a request for this long is closed.
const IDLE_LIMIT: Duration = Duration::from_secs(30);
/// A connection that takes nothing for this long is closed.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// What this node sends now, and has sent.
#[derive(Debug, Default)]
pub(in crate::agent) struct Serving {
    connections: AtomicUsize,
    sent: AtomicU64,
}

impl Serving {
    /// Bytes of models that were sent since the agent started.
    pub fn sent_bytes(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Served for Serving {
    fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Counts a connection for as long as it lives.
struct Counted(Agent);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.serving.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Agent {
    /// Serves a member's requests for weights until it closes the connection, or is removed.
    pub(in crate::agent) async fn serve_weights(&self, mut connection: Connection) -> Result<(), WireError> {
        let others = self.0.serving.connections.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.clone());
        if others >= MOST_SERVED {
            let why = format!("it sends models to {MOST_SERVED} connections already");
            return wire::send(&mut connection.stream, &CallReply::Refused(why)).await;
        }
        wire::send(&mut connection.stream, &CallReply::Weights).await?;
        let (agent, remote) = (self.clone(), connection.remote);
        let served = self.serve_blocking(connection, move |stream| {
            let _counted = counted;
            stream.sock.set_limits(Some(IDLE_LIMIT), Some(WRITE_LIMIT))?;
            thunder_hub::serve(stream, &agent.0.options.models.cache, &agent.0.serving)
        });
        if let Err(error) = served.await {
            tracing::debug!(from = %remote, "weights: {error}");
        }
        Ok(())
    }

    /// The members that may have a model: those that answer, in an order of this node's own, so
    /// that several nodes begin at several.
    pub(in crate::agent) fn weight_peers(&self) -> Vec<Arc<dyn Peer>> {
        let me = self.0.id;
        let mut ids: Vec<NodeId> = {
            let state = self.lock();
            state.membership.peers().filter(|(_, peer)| peer.up).map(|(id, _)| id).collect()
        };
        let first = ids.partition_point(|id| *id < me);
        ids.rotate_left(first);
        let runtime = Handle::current();
        let peer = |id| -> Arc<dyn Peer> {
            Arc::new(Member { agent: self.clone(), id, name: self.name_of(&id), runtime: runtime.clone() })
        };
        ids.into_iter().map(peer).collect()
    }
}

/// A member that may have a model.
struct Member {
    agent: Agent,
    id: NodeId,
    name: String,
    runtime: Handle,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.name).finish()
    }
}

impl Peer for Member {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn open(&self) -> io::Result<Box<dyn PeerStream>> {
        let called = self.runtime.block_on(self.agent.call(self.id, &Call::Weights));
        let (reply, stream) = called.map_err(io::Error::other)?;
        if !matches!(reply, CallReply::Weights) {
            return Err(io::Error::other(format!("{} is of a version that sends no models", self.name)));
        }
        Ok(Box::new(Channel(bulk::client(stream)?)))
    }
}

/// A connection to a member, with blocking calls.
#[derive(Debug)]
struct Channel(ClientStream);

impl Read for Channel {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl PeerStream for Channel {
    fn set_timeout(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.0.sock.set_limits(limit, limit)
    }
}
