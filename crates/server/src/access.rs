//! Authentication: the caller of a request, and its permissions.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;
use thunder_access::{Access, Actor, AuthError, Caller, Now, Role, StartError};

use crate::app::App;
use crate::error::ApiError;

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A client on the network.
    Network(SocketAddr),
    /// A client on the socket that only the server's user can open.
    Local,
}

/// Identifies the caller of a request; refuses unknown callers.
pub(crate) async fn require_key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>().copied();
    match caller(&app, request.headers(), peer) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

/// Refuses callers that may not administer the server. Runs after [`require_key`].
pub(crate) async fn require_admin(request: Request, next: Next) -> Response {
    let caller = request.extensions().get::<Caller>();
    if caller.is_some_and(|caller| caller.role() == Role::Admin) {
        return next.run(request).await;
    }
    let message = "this needs a key with the role admin: on the server's machine, \
                   `thunder keys create NAME --role admin` makes one";
    ApiError::invalid(message).status(StatusCode::FORBIDDEN).code("admin_key_required").into_response()
}

/// The caller with these headers. Keys of `--api-key` are users' keys.
fn caller(app: &App, headers: &HeaderMap, peer: Option<Peer>) -> Result<Caller, ApiError> {
    if peer == Some(Peer::Local) {
        return Ok(Caller::Local);
    }
    let store = app.config.access.as_ref();
    let fixed = &app.config.api_keys;
    if fixed.is_empty() && !store.is_some_and(Access::has_keys) {
        return Ok(Caller::Open);
    }
    let Some(token) = token(headers) else {
        let message = "an API key is required: send the header \"Authorization: Bearer KEY\"";
        return Err(ApiError::unauthorized(message, "invalid_api_key"));
    };
    // All keys are compared, each in constant time, so that timing reveals nothing about near
    // misses.
    let known = fixed.iter().fold(subtle::Choice::from(0), |known, key| known | key.as_bytes().ct_eq(token));
    if bool::from(known) {
        // Without a store there are no other keys, so every caller with a key may administer. A
        // server below a node has no store either: the node has already checked permissions.
        if store.is_none() {
            return Ok(Caller::Local);
        }
        return Ok(Caller::Fixed);
    }
    let found = match (store, std::str::from_utf8(token)) {
        (Some(store), Ok(secret)) => store.authenticate(secret, Now::read().time),
        _ => Err(AuthError::Unknown),
    };
    found.map_err(|error| {
        let code = match &error {
            AuthError::Unknown => "invalid_api_key",
            AuthError::Expired { .. } => "expired_api_key",
            AuthError::Revoked { .. } => "revoked_api_key",
        };
        ApiError::unauthorized(&error.to_string(), code)
    })
}

/// The key of a request, in the header of OpenAI's or of Anthropic's clients.
fn token(headers: &HeaderMap) -> Option<&[u8]> {
    let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
    let own = headers.get("x-api-key").map(|value| value.as_bytes()).unwrap_or_default();
    let token = match given.split_at_checked(b"bearer ".len()) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => token,
        _ => own,
    };
    (!token.is_empty()).then_some(token)
}

/// Refuses a model that the caller's key may not use.
pub(crate) fn check_allowed(caller: &Caller, model: &str) -> Result<(), ApiError> {
    let refused = |message: String| {
        ApiError::field("model", message).status(StatusCode::FORBIDDEN).code("model_not_allowed")
    };
    caller.key().map_or(Ok(()), |key| key.check_model(model).map_err(refused))
}

/// The caller's name in the audit log.
pub(crate) fn actor(caller: &Caller, peer: Option<Peer>) -> Actor {
    caller.actor(match peer {
        Some(Peer::Network(address)) => Some(address.ip()),
        _ => None,
    })
}

/// The response to a request that a limit refused.
pub(crate) fn refused(error: &StartError) -> ApiError {
    match error {
        StartError::Limit(refusal) => ApiError::over_limit(error.to_string(), refusal),
        StartError::NoRecord(_) => ApiError::unavailable(error.to_string(), "usage_not_recorded"),
    }
}
