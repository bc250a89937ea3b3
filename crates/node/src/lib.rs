//! The node agent: what one machine of a cluster runs.
//!
//! - [`identity`], [`tls`]: a node is its Ed25519 key; nodes speak TLS 1.3 with pinned keys.
//! - [`joining`]: how a node becomes a member.
//! - [`document`], [`membership`]: what the operator wants, and who is there. No sockets, no clock.
//! - [`gate`]: the listening port, bounded against strangers; [`discovery`]: finding nodes.
//! - [`agent`]: all of it together, as `thunder up` runs it.
//!
//! This crate knows no models, and no engine: ranks are processes of the `thunder` command.

pub mod agent;
mod base32;
pub mod canary;
pub mod discovery;
pub mod document;
pub mod gate;
mod http;
mod http_response;
pub mod id;
pub mod identity;
pub mod joining;
pub mod membership;
pub mod placement;
pub mod report;
pub mod storage;
mod temperature;
pub mod tls;
pub mod version;
pub mod wire;
