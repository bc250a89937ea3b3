//! The OpenAI API on every node: a request is passed to the head of its model, wherever that is.
//!
//! One request a connection, passed on as bytes: the head's own server parses it. While nothing of
//! a response has reached the client, a lost head costs the client nothing but time: the request is
//! sent again to the group that is formed in its place.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::Agent;
use super::calls::{Call, CallReply};
use crate::document::Stamp;
use crate::http::{Head, HttpError, read_body, read_head};
use crate::id::NodeId;
use crate::report::RankState;

/// Requests at a time; more are refused.
const MOST_CONNECTIONS: usize = 512;
/// A client that takes nothing for this long is disconnected.
const WRITE_LIMIT: Duration = Duration::from_secs(60);
/// Time for a model that is being formed to be ready.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// Time until a lost group is known to be lost.
const LOSS_LIMIT: Duration = Duration::from_secs(3);
/// Groups that a request is sent to before it fails.
const MOST_ATTEMPTS: usize = 4;
/// Bytes passed on at once.
const PIECE_BYTES: usize = 16 << 10;

/// A connection to a head's API.
pub(super) trait Api: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Api for T {}

impl Agent {
    /// Serves the API on `listener`.
    pub(super) async fn serve_api(self, listener: TcpListener) {
        let slots = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        loop {
            let Ok((mut client, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let _ = client.set_nodelay(true);
            let (agent, slot) = (self.clone(), slots.clone().try_acquire_owned());
            tokio::spawn(async move {
                let refusal = HttpError::new(503, "busy", "too many requests at once: try again later");
                let outcome = if slot.is_ok() { agent.answer_http(&mut client).await } else { Err(refusal) };
                if let Err(error) = outcome {
                    let _ = tokio::time::timeout(WRITE_LIMIT, client.write_all(&error.response())).await;
                }
                let _ = client.shutdown().await;
                drop(slot);
            });
        }
    }

    async fn answer_http(&self, client: &mut TcpStream) -> Result<(), HttpError> {
        let (head, rest) = read_head(client).await?;
        if let Some(response) = super::admin::page(&head) {
            return super::admin::write(client, &response).await;
        }
        self.check_key(&head)?;
        let path = head.path.split('?').next().unwrap_or_default().to_owned();
        match (head.method.as_str(), path.as_str()) {
            ("GET", "/health") => reply(client, &json!({ "status": "ok" })).await,
            ("GET", "/v1/models") => reply(client, &self.models()).await,
            ("POST", "/v1/chat/completions" | "/v1/completions") => {
                head.check_json()?;
                let body = read_body(client, &head, rest).await?;
                self.complete(client, &path, &body).await
            }
            (_, path) if path.starts_with("/admin/") => self.administer(client, &head, path, rest).await,
            (method, path) => {
                let message = format!(
                    "no endpoint {method} {path}: this node has POST /v1/chat/completions, POST /v1/completions, \
                     GET /v1/models and GET /health"
                );
                Err(HttpError::new(404, "unknown_url", &message))
            }
        }
    }

    /// Without keys only this machine can connect, and only requests for it are answered: a web
    /// page could lead a browser here by a name of its own.
    fn check_key(&self, head: &Head) -> Result<(), HttpError> {
        let keys = &self.0.options.api_keys;
        if keys.is_empty() {
            return head.check_host();
        }
        let given = head.bearer().unwrap_or_default().as_bytes();
        // Load balancers ask without a key.
        if (head.method.as_str(), head.path.as_str()) == ("GET", "/health") {
            return Ok(());
        }
        let known =
            keys.iter().fold(subtle::Choice::from(0), |known, key| known | key.as_bytes().ct_eq(given));
        if bool::from(known) {
            Ok(())
        } else {
            Err(HttpError::new(
                401,
                "invalid_api_key",
                "send the header \"Authorization: Bearer KEY\" with a valid key",
            ))
        }
    }

    fn models(&self) -> Value {
        let document = self.lock().membership.document().clone();
        let model =
            |(name, _)| json!({ "id": name, "object": "model", "created": 0, "owned_by": "thunderhead" });
        json!({ "object": "list", "data": document.models().map(model).collect::<Vec<_>>() })
    }

    async fn complete(&self, client: &mut TcpStream, path: &str, body: &[u8]) -> Result<(), HttpError> {
        let bad = |message: &str| HttpError::new(400, "invalid_request", message);
        let mut body: Value =
            serde_json::from_slice(body).map_err(|error| bad(&format!("the body is not JSON: {error}")))?;
        let asked = body.get("model").and_then(Value::as_str).ok_or_else(|| bad("\"model\" is missing"))?;
        let name = self.find_model(asked)?;
        // The head serves one model, under the name that its folder has.
        body["model"] = "default".into();
        let body = body.to_string();
        let mut why = String::new();
        for _ in 0..MOST_ATTEMPTS {
            let (head, placement) = self.ready_head(&name).await?;
            match self.attempt(client, path, &body, &name, head, placement).await {
                Ok(()) => return Ok(()),
                Err(Lost(lost)) => why = lost,
            }
            // This node may notice the loss later than the attempt did. A group that is there after
            // all is asked again.
            let _ = tokio::time::timeout(LOSS_LIMIT, self.until_lost(&name, placement)).await;
        }
        let message = format!("{name} failed {MOST_ATTEMPTS} times while answering: {why}");
        Err(HttpError::new(503, "model_failed", &message))
    }

    /// Sends the request to one group. Once a part of the response was passed on, there is no other
    /// attempt.
    async fn attempt(
        &self,
        client: &mut TcpStream,
        path: &str,
        body: &str,
        model: &str,
        head: NodeId,
        placement: Stamp,
    ) -> Result<(), Lost> {
        let (mut api, key) = self.open(model, head, placement).await.map_err(Lost)?;
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: \
             application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        let lost = |error: std::io::Error| Lost(error.to_string());
        api.write_all(request.as_bytes()).await.map_err(lost)?;
        api.flush().await.map_err(lost)?;
        let mut piece = vec![0; PIECE_BYTES];
        let mut passed = false;
        loop {
            let read = tokio::select! {
                read = api.read(&mut piece) => read,
                // A head that was cut off closes no connection.
                () = self.until_lost(model, placement) => Err(std::io::ErrorKind::ConnectionAborted.into()),
            };
            let count = match read {
                Ok(count) => count,
                Err(error) if !passed => return Err(Lost(error.to_string())),
                // The client sees an unfinished response, and knows that it is not complete.
                Err(_) => return Ok(()),
            };
            if count == 0 {
                let nothing = || Lost("the head ended without a response".to_owned());
                return if passed { Ok(()) } else { Err(nothing()) };
            }
            if !passed && is_server_error(&piece[..count]) {
                return Err(Lost("the model's group has failed".to_owned()));
            }
            passed = true;
            let written = tokio::time::timeout(WRITE_LIMIT, client.write_all(&piece[..count])).await;
            if !matches!(written, Ok(Ok(()))) {
                // The client is gone. Dropping the connection cancels its request.
                return Ok(());
            }
        }
    }

    /// Connects to the API of a model's head.
    pub(super) async fn open(
        &self,
        model: &str,
        head: NodeId,
        placement: Stamp,
    ) -> Result<(Box<dyn Api>, String), String> {
        if head == self.0.id {
            let (address, key) = self.own_api(model, placement).ok_or("the model has ended")?;
            let api = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
            return Ok((Box::new(api), key));
        }
        let call = Call::Open { model: model.to_owned(), placement };
        match self.call(head, &call).await? {
            (CallReply::Opened(key), stream) => Ok((Box::new(stream), key)),
            _ => Err("a strange reply".to_owned()),
        }
    }

    /// The cluster's name of the model that a request names: its own, its last part, or `default`
    /// if there is one model.
    fn find_model(&self, asked: &str) -> Result<String, HttpError> {
        let document = self.lock().membership.document().clone();
        let names: Vec<&str> = document.models().map(|(name, _)| name).collect();
        let fits = |name: &&&str| **name == asked || name.rsplit('/').next() == Some(asked);
        let only = (names.len() == 1 && asked == "default").then(|| names[0]);
        match only.or_else(|| names.iter().find(fits).copied()) {
            Some(name) => Ok(name.to_owned()),
            None => {
                let message = format!("no model \"{asked}\": this cluster has {}", names.join(", "));
                Err(HttpError::new(404, "model_not_found", &message))
            }
        }
    }

    /// Waits until a model is ready; returns its head and its group.
    async fn ready_head(&self, model: &str) -> Result<(NodeId, Stamp), HttpError> {
        let mut changes = self.changes();
        let deadline = tokio::time::Instant::now() + READY_LIMIT;
        loop {
            changes.mark_unchanged();
            if let Some(ready) = self.ready_now(model) {
                return Ok(ready);
            }
            self.find_model(model)?;
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                let message = format!("{model} is not ready; `thunder cluster status` says why");
                return Err(HttpError::new(503, "model_not_ready", &message));
            }
        }
    }

    /// A model's head and group, if they are ready as far as this node knows.
    pub(super) fn ready_now(&self, model: &str) -> Option<(NodeId, Stamp)> {
        let state = self.lock();
        let document = state.membership.document().clone();
        let (stamp, placement) = document.placement(model)?;
        let head = *placement.nodes.first()?;
        if head == self.0.id {
            drop(state);
            return self.own_api(model, stamp).map(|_| (head, stamp));
        }
        let (_, peer) = state.membership.peers().find(|(id, peer)| *id == head && peer.up)?;
        let ranks = &peer.report.as_ref()?.ranks;
        let ready = |rank: &&crate::report::RankReport| {
            rank.model == model && rank.placement == stamp && rank.state == RankState::Ready
        };
        ranks.iter().find(ready).map(|_| (head, stamp))
    }

    /// Waits until a group is not ready any more, as far as this node knows.
    async fn until_lost(&self, model: &str, placement: Stamp) {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            let is_there = self.ready_now(model).is_some_and(|(_, stamp)| stamp == placement);
            if !is_there || changes.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Why a group has not answered: another may.
struct Lost(String);

/// Whether a response begins with a status of 500 or above: the group has failed, or is ending.
fn is_server_error(response: &[u8]) -> bool {
    response.strip_prefix(b"HTTP/1.1 ").is_some_and(|status| status.first() == Some(&b'5'))
}

async fn reply(client: &mut TcpStream, body: &Value) -> Result<(), HttpError> {
    let body = body.to_string();
    let response = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    // A client that is gone needs no error.
    let _ = tokio::time::timeout(WRITE_LIMIT, client.write_all(response.as_bytes())).await;
    Ok(())
}

/// Refuses an address that other machines reach, if no key protects it.
pub(super) fn check_binding(address: SocketAddr, keys: &[String]) -> bool {
    !keys.is_empty() || address.ip().to_canonical().is_loopback()
}

/// Refuses keys that a client cannot send, or sends without knowing it: empty ones.
pub(super) fn check_keys(keys: &[String]) -> bool {
    keys.iter().all(|key| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_key_opens_nothing() {
        let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
        assert!(check_keys(&keys(&["secret"])) && check_keys(&[]));
        for bad in [&[""][..], &["secret", ""], &["with space"], &["schlüssel"]] {
            assert!(!check_keys(&keys(bad)), "{bad:?}");
        }
    }
}
