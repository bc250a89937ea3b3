//! Administration over HTTP: keys, limits, usage, the audit log. Paths begin with `/admin`.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::from_fn;
use axum::routing::{get, post};
use serde::Deserializer;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use thunder_access::{Access, AccessError, Actor, BadKey, Caller};

use crate::access::{Peer, actor, require_admin};
use crate::app::check_content_type;
use crate::error::ApiError;

pub(crate) mod audit;
pub(crate) mod backup;
pub(crate) mod export;
pub(crate) mod keys;
pub(crate) mod limits;
pub(crate) mod me;
pub(crate) mod prompts;
pub(crate) mod usage;

/// Larger bodies are refused; the limits of a thousand teams need less.
const LARGEST_BODY_BYTES: usize = 1 << 20;
/// Maximum size of a response for another program: a million requests.
const LONGEST_ANSWER_BYTES: usize = 1 << 30;
/// Time for a body to arrive.
const BODY_LIMIT: Duration = Duration::from_secs(30);

/// The store that is administered, if the server has one.
#[derive(Debug, Clone)]
pub(crate) struct Admin(pub Option<Access>);

/// The paths below `/admin`. Callers are already authenticated.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>(store: Option<Access>) -> Router<S> {
    Router::new()
        .route("/keys", get(keys::list).post(keys::create))
        .route("/keys/{name}", get(keys::show).patch(keys::change))
        .route("/keys/{name}/rotate", post(keys::rotate))
        .route("/keys/{name}/revoke", post(keys::revoke))
        .route("/limits", get(limits::show).put(limits::set))
        .route("/audit", get(audit::list))
        .route("/audit/verify", get(audit::verify))
        .route("/prompts", get(prompts::list))
        .route("/prompts/policy", get(prompts::policy).put(prompts::set_policy))
        .route("/backup", post(backup::create))
        .layer(from_fn(require_admin))
        .route("/me", get(me::show))
        .route("/usage", get(usage::sums))
        .route("/usage/records", get(usage::records))
        .with_state(Admin(store))
}

/// Asks a store that no server has open, like the server's own user would ask a server. Returns the
/// status and the body, as over HTTP.
///
/// # Errors
/// When the answer cannot be read, because the disk failed in the middle of a list.
pub async fn ask_store(
    access: Access,
    method: Method,
    path: &str,
    body: String,
) -> Result<(StatusCode, Vec<u8>), axum::Error> {
    let asker = Asker { caller: Caller::Local, remote: None };
    let (status, _, body) = ask_store_as(access, asker, method, path, body.into()).await?;
    Ok((status, body))
}

/// The caller of a store that another program serves.
#[derive(Debug, Clone)]
pub struct Asker {
    /// What it may do.
    pub caller: Caller,
    /// Where it asks from; `None`: the server's user, on its machine.
    pub remote: Option<SocketAddr>,
}

/// Asks a store for a caller that the program has authenticated. Returns the status, the content
/// type and the body, as over HTTP.
///
/// # Errors
/// When the answer cannot be read, because the disk failed in the middle of a list, or it is too
/// long.
pub async fn ask_store_as(
    access: Access,
    asker: Asker,
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> Result<(StatusCode, String, Vec<u8>), axum::Error> {
    let request = Request::builder().method(method).uri(path.strip_prefix("/admin").unwrap_or(path));
    let json = HeaderValue::from_static("application/json");
    let length = HeaderValue::from(body.len());
    let request = request.header(header::CONTENT_TYPE, json).header(header::CONTENT_LENGTH, length);
    let mut request = request.body(Body::from(body)).map_err(axum::Error::new)?;
    request.extensions_mut().insert(asker.caller);
    request.extensions_mut().insert(asker.remote.map_or(Peer::Local, Peer::Network));
    let Ok(response) = tower::Service::call(&mut routes::<()>(Some(access)), request).await;
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or("application/json").to_owned();
    Ok((status, kind, to_bytes(response.into_body(), LONGEST_ANSWER_BYTES).await?.into()))
}

/// The server's store.
fn store(admin: &Admin) -> Result<Access, ApiError> {
    admin.0.clone().ok_or_else(|| {
        let message = "this server keeps no keys, limits and usage: start it with --store FOLDER";
        ApiError::invalid(message).status(StatusCode::NOT_FOUND).code("no_store")
    })
}

/// Runs work that waits for the disk on a thread without connections.
async fn blocking<T: Send + 'static>(
    admin: &Admin,
    work: impl FnOnce(Access) -> Result<T, AccessError> + Send + 'static,
) -> Result<T, ApiError> {
    let access = store(admin)?;
    let done = tokio::task::spawn_blocking(move || work(access)).await;
    done.map_err(|error| ApiError::engine_failed(error.to_string()))?.map_err(|error| failed(&error))
}

/// The caller, for the audit log.
fn asker(request: &Request) -> Actor {
    let caller = request.extensions().get::<Caller>().unwrap_or(&Caller::Open);
    actor(caller, request.extensions().get::<Peer>().copied())
}

/// A request's body.
async fn body<T: DeserializeOwned>(request: Request) -> Result<T, ApiError> {
    check_content_type(request.headers())?;
    let receiving = to_bytes(request.into_body(), LARGEST_BODY_BYTES);
    let received = tokio::time::timeout(BODY_LIMIT, receiving).await.map_err(|_| {
        let message = format!("the body did not arrive within {BODY_LIMIT:?}");
        ApiError::invalid(message).status(StatusCode::REQUEST_TIMEOUT)
    })?;
    let received = received.map_err(|_| ApiError::too_large(LARGEST_BODY_BYTES))?;
    let mut reader = serde_json::Deserializer::from_slice(&received);
    let read = read_as(&mut reader)?;
    let ended = reader.end().map_err(|error| ApiError::invalid(format!("after the body: {error}")));
    ended.map(|()| read)
}

/// Parses a body; an error names the field.
fn read_as<'a, T: DeserializeOwned>(body: impl Deserializer<'a>) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let field = error.path().to_string();
        let why = format!("the body is not as it must be: {field}: {}", error.inner());
        // A single dot means the whole body.
        if field == "." { ApiError::invalid(why.replacen(" .:", "", 1)) } else { ApiError::field(field, why) }
    })
}

/// A request's body, or the default of an empty one.
async fn body_or_default<T: DeserializeOwned + Default>(request: Request) -> Result<T, ApiError> {
    if request.body().is_end_stream() { Ok(T::default()) } else { body(request).await }
}

/// The parameters of a query, each once.
pub(crate) struct Query(Map<String, Value>);

impl Query {
    fn of(request: &Request) -> Result<Self, ApiError> {
        let mut fields = Map::new();
        for pair in request.uri().query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (name, value) = (decode(name)?, decode(value)?);
            if fields.insert(name.clone(), value.into()).is_some() {
                return Err(ApiError::field(name.clone(), format!("`{name}` is given twice")));
            }
        }
        Ok(Self(fields))
    }

    fn text(&mut self, name: &str) -> Option<String> {
        let value = self.0.remove(name)?;
        value.as_str().filter(|value| !value.is_empty()).map(str::to_owned)
    }

    fn parse<T: std::str::FromStr>(&mut self, name: &str, must_be: &str) -> Result<Option<T>, ApiError> {
        self.parse_by(name, must_be, |text| text.parse().ok())
    }

    fn parse_by<T>(
        &mut self,
        name: &str,
        must_be: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        parse(&text).map(Some).ok_or_else(|| {
            let shown: String = text.chars().take(60).collect();
            ApiError::field(name, format!("`{name}` is \"{shown}\", but must be {must_be}"))
        })
    }

    /// Refuses parameters that were not read.
    fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => {
                let name: String = name.chars().take(60).collect();
                Err(ApiError::field(name.clone(), format!("`{name}` is no parameter of this path")))
            }
        }
    }
}

/// Text of a query: `%20` and `+` are spaces.
fn decode(text: &str) -> Result<String, ApiError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code =
            after.get(..2).filter(|_| *first == b'%').and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(if *first == b'+' { b' ' } else { *first });
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).map_err(|_| ApiError::invalid("the query is not UTF-8"))
}

/// An error of the store as an answer.
fn failed(error: &AccessError) -> ApiError {
    let message = error.to_string();
    match error {
        AccessError::NoKey(_) => {
            ApiError::invalid(message).status(StatusCode::NOT_FOUND).code("key_not_found")
        }
        AccessError::KeyExists(_) => {
            ApiError::field("name", message).status(StatusCode::CONFLICT).code("key_exists")
        }
        AccessError::Revoked(_) => {
            ApiError::invalid(message).status(StatusCode::CONFLICT).code("key_revoked")
        }
        AccessError::LastAdmin(_) => {
            ApiError::invalid(message).status(StatusCode::CONFLICT).code("last_admin")
        }
        AccessError::PolicyChanged => {
            ApiError::field("version", message).status(StatusCode::PRECONDITION_FAILED).code("limits_changed")
        }
        AccessError::BadKey(bad) => ApiError::field(BadKey::field(bad), message),
        AccessError::BadLimit(_) | AccessError::BadKeepPolicy(_) => ApiError::invalid(message),
        AccessError::System { why, .. } if why.kind() == std::io::ErrorKind::AlreadyExists => {
            ApiError::invalid(message).status(StatusCode::CONFLICT)
        }
        _ => {
            tracing::error!("the store failed: {message}");
            ApiError::unavailable(message, "store_failed")
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use proptest::prelude::*;

    use super::*;

    fn query(text: &str) -> Result<Query, ApiError> {
        Query::of(&Request::get(format!("/x?{text}")).body(Body::empty()).unwrap())
    }

    #[test]
    fn parameters_are_decoded_and_unknown_ones_refused() {
        let mut given = query("key=a%20b+c&limit=5&team=%C3%A4").unwrap();
        assert_eq!(given.text("key").as_deref(), Some("a b c"));
        assert_eq!(given.parse::<usize>("limit", "a number").unwrap(), Some(5));
        assert_eq!(given.finish().unwrap_err().param.as_deref(), Some("team"));
        assert!(query("a=1&a=2").is_err() && query("a=%ff").is_err());
        assert!(query("limit=x").unwrap().parse::<usize>("limit", "a number").is_err());
    }

    proptest! {
        #[test]
        fn any_query_is_read_or_refused(text in "[ -~]{0,80}") {
            let _ = decode(&text);
        }
    }
}
