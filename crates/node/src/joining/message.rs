//! The messages between a node that wants to join and a member. Strangers send these, so all are
//! small.

use serde::{Deserialize, Serialize};

use crate::document::Document;

/// The first message of a connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum JoinRequest {
    /// A newcomer tells a member where it listens, so that a person can approve its code there.
    Knock {
        /// Its name.
        name: String,
        /// Its port.
        port: u16,
        /// Its version; empty in messages of early versions.
        #[serde(default)]
        version: String,
    },
    /// A newcomer presents a token.
    Token {
        /// The token's secret.
        secret: Vec<u8>,
        /// Its name.
        name: String,
        /// Its version.
        #[serde(default)]
        version: String,
    },
    /// A node whose connection a member has ended asks whether its key was removed.
    AmIRemoved,
    /// A member begins the exchange for the code that the newcomer shows.
    Pair {
        /// The member's element.
        element: Vec<u8>,
        /// The member's version.
        #[serde(default)]
        version: String,
    },
}

/// The reply to a knock, a token, or the question of a removed node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum JoinReply {
    /// Wait for a person's approval.
    Noted,
    /// The newcomer is a member now; the cluster's document follows.
    Welcome(Box<Document>),
    /// The asking node's key was removed from the cluster.
    Removed,
    /// Refused; a message for people.
    Refused(String),
}

/// The newcomer's reply to [`JoinRequest::Pair`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum PairReply {
    /// Its element and its proof.
    Proof {
        /// The element.
        element: Vec<u8>,
        /// The proof.
        proof: Vec<u8>,
        /// Its name.
        name: String,
    },
    /// Refused; a message for people.
    Refused(String),
}

/// The member's last message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum PairResult {
    /// The member's proof, and the document with the newcomer as a member.
    Welcome {
        /// The proof.
        proof: Vec<u8>,
        /// The document.
        document: Box<Document>,
    },
    /// The newcomer's proof was wrong, or it cannot be admitted.
    Refused(String),
}
