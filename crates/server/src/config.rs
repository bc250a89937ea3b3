//! What a server allows, and what it refuses to start with.

use std::net::SocketAddr;
use std::time::Duration;

/// What a server allows.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Keys of which a client must send one to use `/v1`. None: everybody may, which is for loopback only
    /// ([`check_binding`]).
    pub api_keys: Vec<String>,
    /// Larger bodies are refused. Each byte of a body costs about ten in memory while it is parsed.
    pub body_limit_bytes: usize,
    /// A client has this long to send a request's head, and again to send its body; a connection without requests is
    /// closed after it. Longer suits slow links, shorter frees what idle clients hold.
    pub read_timeout: Duration,
    /// After a shutdown begins, answers in flight have this long to end; then they end with an error. Longer loses fewer
    /// answers, shorter restarts sooner.
    pub grace: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            body_limit_bytes: 8 << 20,
            read_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(30),
        }
    }
}

/// Why a server cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Other machines could use the engine without a key.
    #[error("refusing to listen on {0} without an API key: give one, or listen on 127.0.0.1")]
    OpenToAll(SocketAddr),
    /// A key that nobody could send.
    #[error(
        "API key {0} is empty or has blanks or characters beyond ASCII: give keys of printable ASCII characters"
    )]
    BadKey(usize),
}

/// Refuses to serve other machines without keys, and keys that cannot be sent in a header.
///
/// # Errors
/// When `address` is not loopback and there are no keys, or a key is not made of printable ASCII characters.
pub fn check_binding(address: SocketAddr, keys: &[String]) -> Result<(), ServerError> {
    check_keys(keys)?;
    // An IPv4 address in an IPv6 socket's form is as local as the IPv4 address is.
    if keys.is_empty() && !address.ip().to_canonical().is_loopback() {
        return Err(ServerError::OpenToAll(address));
    }
    Ok(())
}

pub(crate) fn check_keys(keys: &[String]) -> Result<(), ServerError> {
    let sendable = |key: &String| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
    match keys.iter().position(|key| !sendable(key)) {
        Some(index) => Err(ServerError::BadKey(index + 1)),
        None => Ok(()),
    }
}
