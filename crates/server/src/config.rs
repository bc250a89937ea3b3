//! The server's limits and keys, and the checks before it starts.

use std::net::SocketAddr;
use std::time::Duration;

/// Keys, limits and timeouts of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// A client must send one of these keys to use `/v1`. When empty, no key is needed, which is
    /// allowed on loopback only ([`check_binding`]).
    pub api_keys: Vec<String>,
    /// Larger request bodies are refused. Parsing takes about ten bytes of memory per byte of body.
    pub body_limit_bytes: usize,
    /// Time to receive a request's head, again for its body, and until an idle connection is
    /// closed. Raise it for slow links; lower it to free connections of idle clients sooner.
    pub read_timeout: Duration,
    /// Time that completions in flight have after a shutdown begins; then they end with an error.
    /// Longer loses fewer completions, shorter restarts sooner.
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

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address is not loopback and there are no keys: any machine could use the engine.
    #[error("refusing to listen on {0} without an API key: give a key, or listen on 127.0.0.1")]
    OpenToAll(SocketAddr),
    /// A key that no client can send in a header. Holds its position, from 1.
    #[error(
        "API key number {0} is empty, or has spaces or non-ASCII characters: use printable ASCII characters only"
    )]
    BadKey(usize),
}

/// Checks that other machines cannot use the server without a key, and that clients can send the
/// keys.
///
/// # Errors
/// When `address` is not loopback and there are no keys, or when a key has characters other than
/// printable ASCII.
pub fn check_binding(address: SocketAddr, keys: &[String]) -> Result<(), ServerError> {
    check_keys(keys)?;
    // An IPv4-mapped IPv6 address (::ffff:127.0.0.1) is loopback if the IPv4 address is.
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
