//! What a node that asks to join and a member say to each other. Strangers send these, so all are
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
        /// Its version; empty from before it was told.
        #[serde(default)]
        version: String,
    },
    /// A newcomer shows a token.
    Token {
        /// The token's secret.
        secret: Vec<u8>,
        /// Its name.
        name: String,
        /// Its version.
        #[serde(default)]
        version: String,
    },
    /// A member begins the exchange over the code that the newcomer shows.
    Pair {
        /// The member's element.
        element: Vec<u8>,
        /// The member's version.
        #[serde(default)]
        version: String,
    },
}

/// The reply to a knock, or to a token.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum JoinReply {
    /// Wait for a person to approve.
    Noted,
    /// The newcomer is a member now; the cluster's document follows.
    Welcome(Box<Document>),
    /// Refused, with words for people.
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
    /// Refused, with words for people.
    Refused(String),
}

/// The member's last word.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum PairResult {
    /// The member's proof, and the document that has the newcomer as a member.
    Welcome {
        /// The proof.
        proof: Vec<u8>,
        /// The document.
        document: Box<Document>,
    },
    /// The newcomer's proof was wrong, or the member cannot take it.
    Refused(String),
}
