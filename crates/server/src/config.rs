//! The server's limits and keys, and the checks before it starts.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thunder_access::{Access, Gate};
use thunder_dashboard::Extension;
use thunder_traces::Traces;

pub use crate::dashboard::ShardMemory;
use crate::tls::Certificate;

/// Keys, limits and timeouts of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Keys, one of which a client must send for everything except `/health` and `/openapi.json`.
    /// If empty, no key is needed, which is allowed on loopback only ([`check_binding`]).
    pub api_keys: Vec<String>,
    /// Keys, limits, usage and the audit log. With a store, `api_keys` are additional keys of
    /// users; without one, nothing is limited or recorded.
    pub access: Option<Access>,
    /// Destination of the traces of requests.
    pub traces: Option<Traces>,
    /// This node's name, for usage records.
    pub node: Option<String>,
    /// The certificate to serve HTTPS with; `None` serves HTTP.
    pub certificate: Option<Certificate>,
    /// A Unix socket for commands of the server's own user, which need no key.
    pub local_socket: Option<PathBuf>,
    /// More names of the served model; `*` accepts every name that is not an adapter's.
    pub aliases: Vec<String>,
    /// Origins (`https://chat.example`) whose web pages may use the server; `*` allows all. None by
    /// default.
    pub allowed_origins: Vec<String>,
    /// Names that `Host` may have where it is checked (on loopback without keys), in addition to
    /// localhost and addresses.
    pub host_names: Vec<String>,
    /// Accept requests that a node of a cluster relays (`generate/relay.rs`). Only where all
    /// clients are nodes.
    pub relay: bool,
    /// With `relay`: orders requests fairly by the callers that nodes name.
    pub gate: Option<Gate>,
    /// Maximum number of requests that wait for the engine; more are refused. `None`: the limits of
    /// the engine and the gate.
    pub max_waiting: Option<usize>,
    /// Maximum number of connections. More are answered with 503 and closed.
    pub max_connections: usize,
    /// Larger request bodies are refused. Tokenizing takes about 180 bytes of memory per byte of
    /// text.
    pub body_limit_bytes: usize,
    /// Memory for responses that `previous_response_id` may continue; the oldest are deleted. Raise
    /// it for long conversations of many users; 0 keeps none.
    pub stored_responses_bytes: usize,
    /// Time to receive a request's head, time to receive its body, and time until an idle
    /// connection is closed. Raise it for slow links; lower it to free connections of idle clients
    /// sooner.
    pub read_timeout: Duration,
    /// Time that a request may take from its head to its answer's end. After this time the engine
    /// stops computing it. Clients may set a shorter time. `None`: no limit.
    pub request_timeout: Option<Duration>,
    /// A client that reads nothing of its answer for this long is disconnected. Raise it for
    /// clients that pause; lower it to free the memory of stalled clients sooner.
    pub write_timeout: Duration,
    /// Time that an answer may take after an HTTP/1.0 client has closed its sending side. The
    /// connections of other clients are tested, and streams end as soon as sending fails.
    pub half_closed_limit: Duration,
    /// Time that running completions have after a shutdown begins; then they end with an error. A
    /// longer time loses fewer completions, a shorter one restarts sooner.
    pub grace: Duration,
    /// Name of this machine, for the dashboard.
    pub node_name: String,
    /// Memory of this machine, for the dashboard; `None` if it is not known.
    pub memory_total_bytes: Option<u64>,
    /// Memory of each rank's shard, for the dashboard.
    pub shards: Vec<ShardMemory>,
    /// Answers administrative requests outside this crate: downloads, the planner.
    pub extension: Option<Arc<dyn Extension>>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            access: None,
            traces: None,
            node: None,
            certificate: None,
            local_socket: None,
            aliases: Vec::new(),
            allowed_origins: Vec::new(),
            host_names: Vec::new(),
            relay: false,
            gate: None,
            max_waiting: None,
            max_connections: 10_000,
            body_limit_bytes: 8 << 20,
            stored_responses_bytes: 64 << 20,
            read_timeout: Duration::from_secs(60),
            request_timeout: None,
            write_timeout: Duration::from_secs(60),
            half_closed_limit: Duration::from_secs(10),
            grace: Duration::from_secs(30),
            node_name: "this machine".to_owned(),
            memory_total_bytes: None,
            shards: Vec::new(),
            extension: None,
        }
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address is not loopback and there are no keys: any machine could use the engine.
    #[error(
        "refusing to listen on {0} without an API key: make one with `thunder keys create NAME`, give one by --api-key, \
         or listen on 127.0.0.1"
    )]
    OpenToAll(SocketAddr),
    /// A key that cannot be sent in a header. Contains its position, from 1.
    #[error(
        "API key number {0} is empty, or has spaces or non-ASCII characters: use printable ASCII characters only"
    )]
    BadKey(usize),
    /// An origin that no browser sends.
    #[error("allowed origin \"{0}\": an origin is SCHEME://HOST or SCHEME://HOST:PORT without a path, or *")]
    BadOrigin(String),
    /// The socket for local commands cannot be created.
    #[error("cannot listen on the socket {path}: {why}")]
    LocalSocket {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        why: std::io::Error,
    },
}

/// Checks that other machines cannot use the server without a key, and that the keys can be sent in
/// headers.
///
/// # Errors
/// When `address` is not loopback and there are no keys, or when a key has characters other than
/// printable ASCII.
pub fn check_binding(
    address: SocketAddr,
    keys: &[String],
    access: Option<&Access>,
) -> Result<(), ServerError> {
    check_keys(keys)?;
    // An IPv4-mapped IPv6 address (::ffff:127.0.0.1) is loopback if the IPv4 address is.
    let has_keys = !keys.is_empty() || access.is_some_and(Access::has_keys);
    if !has_keys && !address.ip().to_canonical().is_loopback() {
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

/// Checks that browsers send origins of this form.
///
/// # Errors
/// When an origin is neither `*` nor a scheme and a host.
pub fn check_origins(origins: &[String]) -> Result<(), ServerError> {
    let is_origin = |origin: &str| {
        let host = origin.split_once("://").filter(|(scheme, _)| !scheme.is_empty()).map(|(_, host)| host);
        host.is_some_and(|host| !host.is_empty() && !host.contains(['/', '?', '#', '@']))
            && origin.bytes().all(|byte| byte.is_ascii_graphic())
    };
    match origins.iter().find(|origin| *origin != "*" && !is_origin(origin)) {
        Some(origin) => Err(ServerError::BadOrigin(origin.clone())),
        None => Ok(()),
    }
}
