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

mod api;
mod app;
mod config;
mod connections;
mod error;
mod request;
mod response;
mod routes;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use thunder_engine::Engine;
use tokio::net::TcpListener;

pub use crate::config::{ServerConfig, ServerError, check_binding};

use crate::app::App;
use crate::config::check_keys;
use crate::connections::Connections;

/// Time for the last error events to reach clients that read them, once the grace time is over.
const LAST_WORDS: Duration = Duration::from_secs(1);

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
