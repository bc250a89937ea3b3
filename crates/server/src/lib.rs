//! The OpenAI-compatible HTTP API in front of an engine.
//!
//! [`serve`] answers `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/health` on a listener until it is told
//! to stop. It knows HTTP and text, and nothing of how the engine makes its tokens; `examples/mock.rs` is a whole server
//! around an engine of a few lines.
//!
//! Rules that all paths keep:
//! - A field that is not supported is refused with 400 and its name, unless its value asks for what happens anyway.
//!   `null` counts as absent. Fields that by definition change no answer (`user`, `metadata`, …) are taken.
//! - A request names the served model by its name, the last component of its name, or `default`.
//! - What a request does not choose comes from the model's own defaults ([`thunder_engine::ModelInfo::default_sampling`]).
//! - `max_tokens` is a limit, not a demand: an answer that fills the context ends with `length`. A prompt that leaves no
//!   room for an answer is refused (`context_length_exceeded`).
//! - A stream that is complete ends with `data: [DONE]`. One that cannot go on ends with `data: {"error": …}` instead.
//! - A client that goes away cancels its answers.

mod answers;
mod chat;
mod completions;
mod connections;
mod error;
mod fields;
mod logprobs;
mod messages;
mod options;
#[cfg(test)]
mod parse_tests;
mod reply;
mod routes;
mod sse;
mod types;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use thunder_engine::Engine;
use tokio::net::TcpListener;

use crate::connections::Connections;
use crate::routes::App;

/// Time for the last error events to reach clients that read them, once the grace time is over.
const LAST_WORDS: Duration = Duration::from_secs(1);

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

fn check_keys(keys: &[String]) -> Result<(), ServerError> {
    let sendable = |key: &String| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
    match keys.iter().position(|key| !sendable(key)) {
        Some(index) => Err(ServerError::BadKey(index + 1)),
        None => Ok(()),
    }
}

/// The API as a service without a listener, for tests and for embedding in another server.
pub fn router(engine: Engine, config: ServerConfig) -> Router {
    routes::build(Arc::new(App::new(engine, config)))
}

/// Serves the API on `listener` until `shutdown` is ready. Then no connection is taken any more, answers in flight may
/// end within the grace time of `config`, and those that do not end with an error.
///
/// # Errors
/// When a key is malformed. Whether `listener` may be open to other machines is the caller's to
/// check before it binds ([`check_binding`]).
pub async fn serve(
    engine: Engine,
    listener: TcpListener,
    config: ServerConfig,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    check_keys(&config.api_keys)?;
    let (grace, head_timeout) = (config.grace, config.read_timeout);
    let app = Arc::new(App::new(engine, config));
    let mut open = Connections::accept(listener, routes::build(app.clone()), head_timeout, shutdown).await;
    open.close();
    if !open.closed(grace).await {
        app.closing.send_replace(true);
        // Clients that read nothing are left behind.
        open.closed(LAST_WORDS).await;
    }
    Ok(())
}
