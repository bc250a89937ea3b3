//! The membership's inputs and outputs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::document::{Digest, Document};
use crate::id::NodeId;
use crate::report::NodeReport;

/// Times that determine how fast a loss is noticed, and at what cost.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Interval of heartbeats. A shorter interval notices losses sooner and costs messages.
    pub heartbeat: Duration,
    /// A peer that was silent for this long is down. A longer time tolerates slow machines, a
    /// shorter one restarts models sooner.
    pub silence: Duration,
    /// A peer whose last connection was lost is down after this time, if it does not connect again.
    pub disconnected: Duration,
    /// Minimum interval at which the same document is sent to the same peer.
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

/// The messages between nodes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Message {
    /// Shows that the sender is up.
    Heartbeat {
        /// Number of this run of the agent, different after each start.
        boot: u64,
        /// Digest of the sender's document.
        digest: Digest,
        /// Number of the sender's last report; 0 if there is none.
        report: u64,
        /// The members that the sender reaches.
        reaches: BTreeSet<NodeId>,
        /// The sender's document is not on its disk, and would be lost in a power failure.
        #[serde(default)]
        volatile: bool,
        /// Version of the sender's program; empty in messages of early versions.
        #[serde(default)]
        version: String,
    },
    /// The sender's document.
    Document(#[serde(with = "shared")] Arc<Document>),
    /// The sender has merged the document with this digest, and has it on its disk.
    Held(Digest),
    /// The sender's machine and ranks, with the sender's run and the report's number.
    Report((u64, u64), #[serde(with = "shared")] Arc<NodeReport>),
    /// The receiver's report did not arrive: send it again.
    ReportWanted,
}

/// Serializes a shared value as the value.
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
    /// Send a message. It may be lost.
    Send(NodeId, Message),
    /// Write the document to the disk, before any following output is carried out.
    Persist(Arc<Document>),
    /// Information for the rest of the node.
    Event(Event),
}

/// Events for the rest of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A peer answers.
    Up(NodeId),
    /// A peer no longer answers.
    Down(NodeId),
    /// A peer's agent was restarted, without having been down long enough for [`Event::Down`].
    Restarted(NodeId),
    /// A peer's version does not work with this node's.
    Refused(NodeId),
    /// A peer's report changed.
    Reported(NodeId),
    /// The document changed.
    DocumentChanged,
    /// Another node holds this change, so it survives the loss of this node.
    Spread(ChangeId),
}

/// Identifies a change made on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChangeId(pub(super) u64);
