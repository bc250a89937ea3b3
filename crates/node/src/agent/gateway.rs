//! The API on every node: when a request's key is known and its limits allow it, the request is
//! passed to the head of its model on any node.
//!
//! A connection carries one request; the head's own server parses it. The loss of a head costs the
//! client only time: the answer continues where the model is formed again (`relay.rs`).

mod account;
mod callers;
mod client;
mod metrics;
mod origins;
mod question;
mod relay;
mod router;
mod trace;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use thunder_access::Caller;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_io_timeout::TimeoutWriter;
use tokio_rustls::TlsAcceptor;

use super::calls::CallReply;
use super::{Agent, AgentError};
use crate::document::{Document, ModelWish, Register, Stamp};
use crate::gate::{AcceptFailures, Unproven};
use crate::http::{Head, HttpError, read_body, read_head};
use crate::id::NodeId;
use crate::report::RankState;
pub(super) use callers::Asker;
pub(super) use metrics::GatewayCounts;
use origins::WithHeaders;
use question::{Question, is_generation, is_reading};
use relay::Api;
pub(super) use router::Router;

/// Time for a TLS handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Time until a model that is being formed is ready.
const READY_LIMIT: Duration = Duration::from_secs(120);
/// A sleeping replica is woken when each of the others answers this many requests.
const BUSY_REQUESTS: u32 = 4;
/// How much is still read of a request after its refusal, and for how long.
const MOST_UNREAD_BYTES: u64 = 64 << 20;
const UNREAD_LIMIT: Duration = Duration::from_secs(1);
/// Time for all models to describe themselves.
const LIST_LIMIT: Duration = Duration::from_secs(5);

impl Agent {
    /// Serves the API on `listener`.
    pub(super) async fn serve_api(self, listener: TcpListener) {
        let slots = Slots::default();
        // Clients that have not yet sent a request with a key hold no slot.
        let mut unproven = Unproven::default();
        let mut failures = AcceptFailures::default();
        loop {
            let accepted = tokio::select! {
                _ = unproven.tasks.join_next(), if !unproven.tasks.is_empty() => continue,
                accepted = listener.accept() => accepted,
            };
            let (client, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    failures.pause("the API", &error).await;
                    continue;
                }
            };
            let _ = client.set_nodelay(true);
            let (agent, slots) = (self.clone(), slots.clone());
            unproven.add(async move {
                let Some(client) = agent.handshake(client).await else { return };
                agent.meet(client, Some(peer), slots).await;
            });
        }
    }

    /// The connection's plain bytes; `None` if the client does not complete the handshake in time.
    async fn handshake(&self, client: TcpStream) -> Option<Box<dyn Api>> {
        let Some(tls) = self.api_settings().tls.clone() else { return Some(Box::new(client)) };
        // The client's fault: it does not use TLS, or does not trust the certificate.
        let tls = TlsAcceptor::from(tls);
        let stream = tokio::time::timeout(HANDSHAKE_LIMIT, tls.accept(client)).await.ok()?.ok()?;
        Some(Box::new(stream))
    }

    /// Reads a request's head, and serves it if its sender is known.
    async fn meet(self, client: Box<dyn Api>, peer: Option<SocketAddr>, slots: Slots) {
        let settings = self.api_settings();
        let mut client = Box::pin(TimeoutWriter::new(client));
        client.as_mut().set_timeout_pinned(Some(settings.limits.write_timeout));
        let mut client: Box<dyn Api> = Box::new(client);
        let read = read_head(&mut client, settings.limits.read_timeout).await;
        if let Ok((head, _)) = &read {
            let allowed = &settings.allowed_origins;
            let lines = origins::header_lines(allowed, head);
            if !lines.is_empty() {
                client = Box::new(WithHeaders::new(client, lines));
            }
            if let Some(answer) = origins::preflight(allowed, head) {
                let _ = client.write_all(&answer).await;
                let _ = client.shutdown().await;
                return;
            }
        }
        if let Some(page) = read.as_ref().ok().and_then(|(head, _)| super::admin::page(head)) {
            let _ = super::admin::write(&mut client, &page).await;
            let _ = client.shutdown().await;
            return;
        }
        let read = read.and_then(|(head, rest)| {
            let caller = self.caller(&head, peer)?;
            self.check_administration(&head, &caller, peer)?;
            Ok((head, rest, Asker { caller, remote: peer }))
        });
        tokio::spawn(self.serve_client(client, read, slots));
    }

    /// Opens the socket for commands of this machine's user.
    pub(super) fn open_local_door(&self) -> Result<(), AgentError> {
        let Some(path) = &self.0.options.local_socket else { return Ok(()) };
        let failed = |why| AgentError::Control { path: path.clone(), why };
        // The store's lock guarantees that no other agent uses the folder.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let agent = self.clone();
        tokio::spawn(async move {
            let slots = Slots::default();
            let mut failures = AcceptFailures::default();
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        tokio::spawn(agent.clone().meet(Box::new(stream), None, slots.clone()));
                    }
                    Err(error) => failures.pause("this machine's user", &error).await,
                }
            }
        });
        Ok(())
    }

    async fn serve_client<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        mut client: S,
        read: Result<(Head, Vec<u8>, Asker), HttpError>,
        slots: Slots,
    ) {
        let slot = slots.take(self.api_settings().limits.connections);
        let refusal = HttpError::new(503, "busy", "too many requests at once: try again later");
        let outcome = match (read, &slot) {
            (Ok((head, rest, asker)), Some(_)) => {
                let path = head.path.clone();
                let answered = self.answer_http(&mut client, head, rest, asker).await;
                answered.map_err(|error| error.response_of(&path))
            }
            (Err(error), _) => Err(error.response()),
            (_, None) => Err(refusal.response()),
        };
        let Err(response) = outcome else {
            let _ = client.shutdown().await;
            return;
        };
        drop(slot);
        let _ = client.write_all(&response).await;
        let _ = client.shutdown().await;
        // Closing a connection with unread bytes resets it, and the client would lose the answer.
        let mut rest = client.take(MOST_UNREAD_BYTES);
        let _ = tokio::time::timeout(UNREAD_LIMIT, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
    }

    async fn answer_http<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        client: &mut S,
        head: Head,
        rest: Vec<u8>,
        asker: Asker,
    ) -> Result<(), HttpError> {
        let path = head.path.split('?').next().unwrap_or_default().to_owned();
        match (head.method.as_str(), path.as_str()) {
            ("GET", "/health/live") => reply(client, &json!({ "status": "ok" })).await,
            ("GET", "/health" | "/health/ready") => {
                self.check_ready()?;
                reply(client, &json!({ "status": "ok" })).await
            }
            ("GET", "/metrics") => {
                self.answer_metrics(client).await;
                Ok(())
            }
            ("GET", "/openapi.json") => self.answer_extended(client, "GET", &path, Vec::new()).await,
            ("GET", "/api/version") => reply(client, &json!({ "version": env!("CARGO_PKG_VERSION") })).await,
            ("GET", "/v1/models") => reply(client, &self.models(&asker.caller)).await,
            ("GET", "/api/tags" | "/api/ps") => {
                let models = self.lists(&path, &asker.caller).await;
                reply(client, &json!({ "models": models })).await
            }
            ("POST", path) if is_generation(path) || is_reading(path) || NAMES_A_MODEL.contains(&path) => {
                head.check_json()?;
                let limits = self.api_settings().limits;
                let body = read_body(client, &head, rest, &limits).await?;
                let traceparent = head.header("traceparent").map(str::to_owned);
                let claimant = self.claimant(&asker.caller);
                let timeout = question::timeout(head.header("x-request-timeout"), limits.request_timeout);
                let question =
                    Question { traceparent, timeout, claimant, ..self.question(path, &body, &asker.caller)? };
                check_model(&asker.caller, &question.model)?;
                self.generate(client, &question, &asker.caller).await
            }
            ("GET" | "DELETE", path) if is_of_a_model(path) => {
                let named = path.strip_prefix("/v1/models/");
                // Clients write the slash of ORG/NAME as %2F.
                let name = percent_decode_str(named.unwrap_or("default")).decode_utf8_lossy();
                let model = self.find_model(&name, &asker.caller)?;
                check_model(&asker.caller, &model)?;
                // The head serves one model, under the name of its folder.
                let path = named.map_or(path, |_| "/v1/models/default");
                let (method, path) = (head.method.clone(), path.to_owned());
                let question = Question::without_body(method, path, model);
                self.generate(client, &question, &asker.caller).await
            }
            (_, path) if path.starts_with("/admin/") || callers::is_sign_in(path) => {
                self.administer(client, &head, asker, path, rest).await
            }
            (method, path) => {
                let message =
                    format!("no endpoint {method} {path}: GET /openapi.json lists what this node has");
                Err(HttpError::new(404, "unknown_url", &message))
            }
        }
    }

    /// Refuses while no model can be reached through this node.
    fn check_ready(&self) -> Result<(), HttpError> {
        let document = self.lock().membership.document().clone();
        let (mut waits, mut answers) = (Vec::new(), false);
        for (name, _) in document.models() {
            // A request wakes a sleeping model.
            let asleep = document.placement(name).is_some_and(|(_, placement)| placement.asleep);
            answers |= asleep || self.ready_now(name).is_some();
            waits.push(name);
        }
        if answers {
            return Ok(());
        }
        let why = match waits.as_slice() {
            [] => "no model is loaded: `thunder model load MODEL` loads one".to_owned(),
            // The client may have no key, and only holders of a key may learn the models' names.
            waits => format!("none of {} models is ready: `thunder cluster status` says why", waits.len()),
        };
        Err(HttpError::new(503, "not_ready", &why))
    }

    fn models(&self, caller: &Caller) -> Value {
        let document = self.lock().membership.document().clone();
        let model =
            |name: &str| json!({ "id": name, "object": "model", "created": 0, "owned_by": "thunderhead" });
        json!({ "object": "list", "data": allowed(&document, caller).map(model).collect::<Vec<_>>() })
    }

    /// A request with a body, for the model that its body names.
    fn question(&self, path: &str, body: &[u8], caller: &Caller) -> Result<Question, HttpError> {
        let bad = |message: &str| HttpError::new(400, "invalid_request", message);
        let mut body: Value =
            serde_json::from_slice(body).map_err(|error| bad(&format!("the body is not JSON: {error}")))?;
        let named = body.get("model").and_then(Value::as_str).map(str::to_owned);
        let asked = match named {
            Some(name) => name,
            None if NAMES_A_MODEL.contains(&path) || is_reading(path) => "default".to_owned(),
            None => return Err(bad("\"model\" is missing")),
        };
        let model = self.find_model(&asked, caller)?;
        // The head serves one model, under the name of its folder.
        if let Some(fields) = body.as_object_mut() {
            fields.insert("model".into(), "default".into());
        }
        Ok(Question::with_body(path, model, &body))
    }

    /// The response of a model's head to a GET; `None` if it is not ready or does not reply.
    pub(super) async fn ask_model(&self, model: &str, path: &str) -> Option<Value> {
        let (head, placement) = self.ready_now(model)?;
        let (method, path) = ("GET".to_owned(), path.to_owned());
        let question = Question { looks: true, ..Question::without_body(method, path, model.to_owned()) };
        serde_json::from_slice(&self.fetch(&question, head, placement).await.ok()?).ok()
    }

    /// Descriptions of the ready models, in Ollama's form.
    async fn lists(&self, path: &str, caller: &Caller) -> Vec<Value> {
        let names: Vec<String> = {
            let document = self.lock().membership.document().clone();
            let ready = |name| document.groups_of(name).find(|(group, _)| self.ready_now(group).is_some());
            allowed(&document, caller).filter_map(ready).map(|(group, _)| group.to_owned()).collect()
        };
        let mut asked = tokio::task::JoinSet::new();
        for model in names {
            let (agent, path) = (self.clone(), path.to_owned());
            asked.spawn(async move {
                let body = tokio::time::timeout(LIST_LIMIT, agent.ask_model(&model, &path)).await;
                body.ok()??["models"].as_array().cloned()
            });
        }
        asked.join_all().await.into_iter().flatten().flatten().collect()
    }

    /// The cluster's name of the requested model: the full name, its last part, or `default` if
    /// there is one model.
    fn find_model(&self, asked: &str, caller: &Caller) -> Result<String, HttpError> {
        let document = self.lock().membership.document().clone();
        let names: Vec<&str> = names_of(&document).collect();
        // Ollama's clients add a tag to each name.
        let asked = asked.strip_suffix(":latest").unwrap_or(asked);
        let fits = |name: &&&str| **name == asked || name.rsplit('/').next() == Some(asked);
        let only = (names.len() == 1 && asked == "default").then(|| names[0]);
        match only.or_else(|| names.iter().find(fits).copied()) {
            Some(name) => Ok(name.to_owned()),
            None => {
                let own: Vec<&str> = allowed(&document, caller).collect();
                let message = match (names.as_slice(), own.as_slice()) {
                    ([], _) => format!(
                        "no model \"{asked}\": this cluster has none; `thunder model load NAME` loads one"
                    ),
                    (_, []) => {
                        format!("no model \"{asked}\", and this cluster has none that the key may use")
                    }
                    (_, own) => format!("no model \"{asked}\": this cluster has {}", own.join(", ")),
                };
                Err(HttpError::new(404, "model_not_found", &message))
            }
        }
    }

    /// Waits until a group of a model is ready, and chooses one for a request. Wakes a sleeping
    /// group if there is no other, or all others are busy.
    async fn ready_group(&self, question: &Question) -> Result<Routed, HttpError> {
        let model = &question.model;
        let mut changes = self.changes();
        let deadline = tokio::time::Instant::now() + READY_LIMIT;
        loop {
            changes.mark_unchanged();
            let (ready, busy) = self.ready_groups(model);
            self.wake_one(model, &ready, busy);
            if let Some(routed) = self.route(question, ready) {
                return Ok(routed);
            }
            self.find_model(model, &Caller::Local)?;
            if tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
                let message = format!("{model} is not ready; `thunder cluster status` says why");
                return Err(HttpError::new(503, "model_not_ready", &message));
            }
        }
    }

    /// The ready groups of a model with the requests that they are answering, and whether each
    /// answers several.
    fn ready_groups(&self, model: &str) -> (Vec<(String, u32, NodeId, Stamp)>, bool) {
        let document = self.lock().membership.document().clone();
        let ready = document.groups_of(model).filter_map(|(group, _)| {
            let (head, stamp) = self.ready_now(group)?;
            Some((group.to_owned(), self.active_of(group, head, stamp), head, stamp))
        });
        let ready: Vec<_> = ready.collect();
        let busy = ready.iter().all(|(_, active, ..)| *active >= BUSY_REQUESTS);
        (ready, busy)
    }

    /// Requests that a group's head reports.
    fn active_of(&self, group: &str, head: NodeId, stamp: Stamp) -> u32 {
        let state = self.lock();
        let peer = state.membership.peers().find(|(id, _)| *id == head).map(|(_, peer)| peer);
        let report =
            if head == self.0.id { state.membership.report() } else { peer.and_then(|p| p.report.as_ref()) };
        let ranks = report.map(|report| &report.ranks[..]).unwrap_or_default();
        let rank = ranks.iter().find(|rank| rank.model == group && rank.placement == stamp && rank.rank == 0);
        rank.map_or(0, |rank| rank.active)
    }

    /// Wakes a sleeping group, if no other is ready, starting or free.
    fn wake_one(&self, model: &str, ready: &[(String, u32, NodeId, Stamp)], busy: bool) {
        let document = self.lock().membership.document().clone();
        let placements: Vec<_> = document
            .groups_of(model)
            .map(|(group, _)| (group, document.placement(group).map(|(_, placement)| placement)))
            .collect();
        let starts = |(group, placement): &(&str, Option<&crate::document::Placement>)| {
            placement.is_none_or(|placement| !placement.asleep)
                && !ready.iter().any(|(name, ..)| name == group)
        };
        if (!ready.is_empty() && !busy) || placements.iter().any(starts) {
            return;
        }
        let asleep =
            placements.iter().find(|(_, placement)| placement.is_some_and(|placement| placement.asleep));
        if let Some((group, _)) = asleep {
            self.wake(group);
        }
    }

    /// Chooses one of the ready groups.
    fn route(&self, question: &Question, ready: Vec<(String, u32, NodeId, Stamp)>) -> Option<Routed> {
        let groups: Vec<(String, u32)> =
            ready.iter().map(|(name, active, ..)| (name.clone(), *active)).collect();
        let place = self.router().begin(&question.prefix, &groups)?;
        let (group, _, head, placement) = ready.into_iter().nth(place)?;
        Some(Routed { agent: self.clone(), group, head, placement })
    }

    fn router(&self) -> std::sync::MutexGuard<'_, Router> {
        self.0.router.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// A model's head and group, if this node knows them to be ready.
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

    /// Waits until this node knows that a group is no longer ready.
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

/// The group chosen for a request. The request counts as in flight until this is dropped.
struct Routed {
    agent: Agent,
    group: String,
    head: NodeId,
    placement: Stamp,
}

impl Drop for Routed {
    fn drop(&mut self) {
        self.agent.router().end(&self.group);
    }
}

/// The names of the models, without additional replicas.
fn names_of(document: &Document) -> impl Iterator<Item = &str> {
    let is_model = |(_, wish): &(&str, &Register<ModelWish>)| {
        wish.value.as_ref().is_some_and(|wish| wish.replica_of.is_none())
    };
    document.models().filter(is_model).map(|(name, _)| name)
}

/// POST paths that are about a model, but generate nothing.
const NAMES_A_MODEL: [&str; 4] = ["/v1/messages/count_tokens", "/tokenize", "/detokenize", "/api/show"];

/// Whether a model's server answers a path without a body.
fn is_of_a_model(path: &str) -> bool {
    ["/v1/models/", "/v1/responses/"].iter().any(|begin| path.starts_with(begin))
}

/// Names of the models that a caller's key may use.
fn allowed<'a>(document: &'a Document, caller: &'a Caller) -> impl Iterator<Item = &'a str> {
    names_of(document).filter(|name| check_model(caller, name).is_ok())
}

/// Refuses a model that the caller's key does not name.
fn check_model(caller: &Caller, model: &str) -> Result<(), HttpError> {
    let checked = caller.key().map_or(Ok(()), |key| key.check_model(model));
    checked.map_err(|message| HttpError::new(403, "model_not_allowed", &message))
}

async fn reply(client: &mut (impl AsyncWrite + Unpin), body: &Value) -> Result<(), HttpError> {
    let body = body.to_string();
    let response = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    // If the client has left, this is not an error.
    let _ = client.write_all(response.as_bytes()).await;
    Ok(())
}

/// Requests that are being answered.
#[derive(Debug, Clone, Default)]
struct Slots(Arc<AtomicUsize>);

/// A request's place among them, which is freed on drop.
struct Slot(Slots);

impl Slots {
    /// A place, if fewer than `most` are taken.
    fn take(&self, most: usize) -> Option<Slot> {
        let taken = |taken| (taken < most).then_some(taken + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).ok().map(|_| Slot(self.clone()))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// True if the API may be served at this address: it is on loopback, or a key protects it.
pub(super) fn check_binding(address: SocketAddr, keys: &[String]) -> bool {
    !keys.is_empty() || address.ip().to_canonical().is_loopback()
}

/// True if clients can send all keys, and no key is empty.
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
