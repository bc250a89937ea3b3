//! The `Host` of a request: protects a server without keys from web pages.
//!
//! A page's own name can be made to resolve to this machine (DNS rebinding). The browser then
//! treats the server as part of the page's site, but still sends the page's name.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::error::ApiError;

/// Refuses requests that name another machine, if the server checks it.
pub(crate) async fn require_own_host(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let has_keys = app.config.access.as_ref().is_some_and(thunder_access::Access::has_keys);
    let checks_host = app.checks_host && !has_keys;
    let foreign = hosts.find(|host| checks_host && !is_own(host, &app.config.host_names));
    let Some(host) = foreign else { return next.run(request).await };
    let host: String = String::from_utf8_lossy(host.as_bytes()).chars().take(100).collect();
    let message = format!(
        "the request is for \"{host}\", but without an API key this server answers to localhost and to addresses \
         only: start it with --api-key, or with --host and this name"
    );
    ApiError::invalid(message).status(StatusCode::FORBIDDEN).code("host_not_allowed").into_response()
}

/// True for localhost, addresses, and these names.
fn is_own(host: &HeaderValue, names: &[String]) -> bool {
    let Some(authority) = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()) else {
        return false;
    };
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost"
        || name.ends_with(".localhost")
        || address.parse::<IpAddr>().is_ok()
        || names.iter().any(|own| own.eq_ignore_ascii_case(&name))
}
