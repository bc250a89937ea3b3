//! What goes into and comes out of the membership.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::document::{Digest, Document};
use crate::id::NodeId;
use crate::report::NodeReport;

/// Times that decide how fast a loss is noticed, and what that costs.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Interval of heartbeats. Shorter notices losses sooner and costs messages.
    pub heartbeat: Duration,
    /// A peer that was silent for this long is down. Longer forgives slow machines, shorter
    /// restarts models sooner.
    pub silence: Duration,
    /// A peer whose last connection was lost is down after this, if it does not connect again.
    pub disconnected: Duration,
    /// The same document is sent to the same peer at most this often.
    pub document: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(300),
            silence: Duration::from_millis(1500),
            disconnected: Duration::from_millis(500),
            document: Duration::from_millis(600),
        }
    }
}

/// What nodes tell each other.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Message {
    /// "I am here."
    Heartbeat {
        /// Number of this run of the agent; a new one after each start.
        boot: u64,
        /// Digest of the sender's document.
        digest: Digest,
        /// Number of the sender's last report; 0 if it has made none.
        report: u64,
        /// The members that the sender reaches.
        reaches: BTreeSet<NodeId>,
        /// The sender's document is not on its disk: it is lost with the sender's power.
        #[serde(default)]
        volatile: bool,
        /// Version of the sender's program; empty from before it was told.
        #[serde(default)]
        version: String,
    },
    /// The sender's document.
    Document(#[serde(with = "shared")] Arc<Document>),
    /// The sender has merged, and keeps on its disk, the document of this digest.
    Held(Digest),
    /// The sender's machine and ranks, with the sender's run and the report's number.
    Report((u64, u64), #[serde(with = "shared")] Arc<NodeReport>),
    /// The receiver's report did not arrive; send it again.
    ReportWanted,
}

/// A shared value is written as the value.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<T: Serialize, S: Serializer>(value: &Arc<T>, to: S) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(to)
    }

    pub fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Arc<T>, D::Error> {
        T::deserialize(from).map(Arc::new)
    }
}

/// What the caller has to do.
#[derive(Debug, Clone)]
pub enum Output {
    /// Send a message; it may be lost.
    Send(NodeId, Message),
    /// Write the document to the disk, before anything that follows is carried out.
    Persist(Arc<Document>),
    /// Something to know.
    Event(Event),
}

/// What the rest of the node has to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A peer answers.
    Up(NodeId),
    /// A peer does not answer any more.
    Down(NodeId),
    /// A peer's agent was started anew, without having been down long enough for [`Event::Down`].
    Restarted(NodeId),
    /// A peer's version does not work with this node's.
    Refused(NodeId),
    /// A peer's report changed.
    Reported(NodeId),
    /// The document changed.
    DocumentChanged,
    /// Another node holds this change: it outlives this one.
    Spread(ChangeId),
}

/// Names a change made on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangeId(pub(super) u64);
