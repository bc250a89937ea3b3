//! The HTTP APIs in front of an engine: OpenAI's, Anthropic's and Ollama's.
//!
//! [`serve`] handles them on a listener until shutdown; `src/api/openapi.json` lists the endpoints.
//! Each API translates its requests to one internal form, and the generated text back to its own
//! form. This crate handles HTTP and text; the engine generates the tokens. `examples/mock.rs` is a
//! complete server with a small engine that needs no model.
//!
//! ```no_run
//! use thunder_server::{ServerConfig, check_binding, serve};
//!
//! # async fn run(engine: thunder_engine::Engine) -> Result<(), Box<dyn std::error::Error>> {
//! let address: std::net::SocketAddr = "127.0.0.1:8000".parse()?;
//! let config = ServerConfig { api_keys: vec!["a-secret".into()], ..ServerConfig::default() };
//! check_binding(address, &config.api_keys, None)?;
//! let listener = tokio::net::TcpListener::bind(address).await?;
//! // The sender changes the settings of the running server.
//! let (_sender, configs) = tokio::sync::watch::channel(config);
//! // Runs until the future is ready.
//! serve(engine, listener, configs, std::future::pending()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! Rules of all endpoints:
//! - An unsupported field is refused with status 400 and the field's name, unless its value asks
//!   for the default behaviour. `null` counts as absent. Fields that change nothing here (`user`,
//!   `keep_alive`, `tools: []`, …) are accepted. Errors have the form of the API that was asked.
//! - A request names the served model by its full name, by the last component of that name, or as
//!   `default`.
//! - Sampling parameters that a request does not set come from the model's own defaults
//!   ([`thunder_engine::ModelInfo::default_sampling`]).
//! - Memory is bounded: a prompt that cannot fit is refused before it is tokenized, few bodies are
//!   prepared at once, and a client that reads nothing is disconnected.
//! - `max_tokens` is an upper limit: a completion that fills the context ends with `length`. A
//!   prompt that leaves no room for a completion is refused (`context_length_exceeded`).
//! - A complete stream ends with `data: [DONE]`. A stream that fails ends with `data: {"error":
//!   …}`.
//! - When a client disconnects, its completions are cancelled. A client that only ends its sending
//!   side gets its answer.
//! - Special tokens in messages are ordinary text: only the chat template makes them. The prompt of
//!   `/v1/completions` is all the caller's, as with llama.cpp and vLLM, so special tokens in it are
//!   special.
//! - Without keys on loopback, a request must be for localhost, an address, or one of
//!   [`ServerConfig::host_names`].

mod access;
mod account;
mod administer;
mod admission;
mod api;
mod app;
mod client;
mod config;
mod connections;
mod dashboard;
mod deadline;
mod error;
mod generate;
mod host;
mod metrics;
mod request;
mod requests;
mod response;
mod routes;
mod stored;
mod tls;

use std::fs::Permissions;
use std::future::Future;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use thunder_engine::Engine;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

pub use crate::administer::{Asker, ask_store, ask_store_as};
pub use crate::api::models::document as openapi;
pub use crate::config::{ServerConfig, ServerError, ShardMemory, check_binding, check_origins};
pub use crate::tls::{Certificate, TlsError};

use crate::app::App;
use crate::config::check_keys;
use crate::connections::{ConnectionLimits, Connections, Doors};

/// After the grace time, the time for final error events to reach clients that still read.
const FINAL_ERROR_WAIT: Duration = Duration::from_secs(1);

/// The API as a service without a listener, for tests and for embedding in another server.
/// It does not check keys, the address or a request's `Host`; see [`check_binding`].
pub fn router(engine: Engine, config: ServerConfig) -> Router {
    routes::build(Arc::new(App::new(engine, config, false)))
}

/// Serves the API on `listener` until `shutdown` is ready. Then it accepts no more connections.
/// Running completions get the grace time of the configuration; those that still run after it end
/// with an error.
///
/// `configs` may change meanwhile, except for its store, its local socket and its data about the
/// model. Running requests end with the settings with which they began. The next requests have the
/// new settings, also on open connections. A connection keeps its encryption and its times.
///
/// # Errors
/// When a key or an origin is malformed. The caller must check, before it binds or changes
/// `configs`, that `listener` may be open to other machines ([`check_binding`]).
pub async fn serve(
    engine: Engine,
    listener: TcpListener,
    mut configs: watch::Receiver<ServerConfig>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    let config = configs.borrow_and_update().clone();
    check_keys(&config.api_keys)?;
    check_origins(&config.allowed_origins)?;
    // With a key, a web page needs more than a name that resolves to this machine; and a proxy may
    // be in front.
    let is_loopback = listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback());
    let checks_host = |config: &ServerConfig| is_loopback && config.api_keys.is_empty();
    let local = config.local_socket.as_deref().map(open_local).transpose()?;
    let doors = Doors { network: listener, local };
    let is_checked = checks_host(&config);
    let mut app = Arc::new(App::new(engine, config, is_checked));
    let routers = watch::Sender::new(routes::build(app.clone()));
    let (latest, mut shutdown) = (routers.subscribe(), pin!(shutdown));
    let mut open = Connections::default();
    loop {
        let tls = app.config.certificate.as_ref().map(Certificate::acceptor);
        let limits = ConnectionLimits::of(&app.config);
        let until = async {
            tokio::select! {
                biased;
                // A shutdown may use the new grace time.
                config = next(&mut configs) => Some(config),
                () = &mut shutdown => None,
            }
        };
        let Some(config) = open.accept(&doors, tls, &latest, limits, until).await else { break };
        let is_checked = checks_host(&config);
        app = Arc::new(app.renewed(config, is_checked));
        drop(routers.send_replace(routes::build(app.clone())));
    }
    open.close();
    if !open.closed(app.config.grace).await {
        app.closing.send_replace(true);
        // After this time, clients that do not read are disconnected.
        open.closed(FINAL_ERROR_WAIT).await;
    }
    Ok(())
}

/// The next configuration; waits forever if there will be none.
async fn next(configs: &mut watch::Receiver<ServerConfig>) -> ServerConfig {
    match configs.changed().await {
        Ok(()) => configs.borrow_and_update().clone(),
        Err(_) => std::future::pending().await,
    }
}

/// Opens the socket for commands of the server's own user.
fn open_local(path: &Path) -> Result<UnixListener, ServerError> {
    let failed = |why| ServerError::LocalSocket { path: path.to_owned(), why };
    // The store's lock shows that no other server uses the folder.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}
