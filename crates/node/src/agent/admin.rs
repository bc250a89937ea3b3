//! The dashboard's files and its administrative endpoints, on every node of a cluster.
//!
//! They use the same requests as the command line (`control.rs`). The JSON has the form of a single
//! server's (`crates/server/src/dashboard.rs`).

mod changes;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use thunder_access::{Actor, Caller};
use thunder_dashboard::{Answer, Ask};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

use super::Agent;
use super::control::{Reply, Request};
use super::models::{ModelAnswer, ModelAsk};
use crate::http::{Head, HttpError, read_body};
use changes::{CHANGES, ends, request_of};

/// Time for a head to report its counts.
pub(super) const HEAD_LIMIT: Duration = Duration::from_secs(2);
/// Maximum requests that are shown, of all models together.
const MOST_ROWS: usize = 400;
/// Default number of lines of a node's log.
const LOG_LINES: usize = 100;
/// Time for the last answer of a node to reach its client.
const LAST_ANSWER: Duration = Duration::from_millis(200);

/// Answers administrative requests for keys, limits, usage, acts and kept prompts.
pub trait Desk: Debug + Send + Sync {
    /// Answers a caller that the gateway has authenticated; `remote` is `None` for commands of this
    /// machine. `path` begins with `/admin` and includes the query.
    fn ask<'a>(
        &'a self,
        caller: Caller,
        remote: Option<SocketAddr>,
        method: &'a str,
        path: &'a str,
        body: Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = DeskAnswer> + Send + 'a>>;
}

/// A response of a [`Desk`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeskAnswer {
    /// The HTTP status.
    pub status: u16,
    /// The content type.
    pub kind: String,
    /// The body.
    pub body: Vec<u8>,
}

/// Prefixes of the desk's paths.
const OF_THE_DESK: [&str; 7] = [
    "/admin/keys",
    "/admin/limits",
    "/admin/usage",
    "/admin/audit",
    "/admin/prompts",
    "/admin/me",
    "/admin/backup",
];

/// Whether the desk answers a path.
pub(super) fn is_of_the_desk(path: &str) -> bool {
    let of =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    OF_THE_DESK.into_iter().any(of)
}

/// The response with a file of the dashboard, if the request is for one. Files contain no data, so
/// they need no key.
pub(super) fn page(head: &Head) -> Option<Vec<u8>> {
    if !matches!(head.method.as_str(), "GET" | "HEAD") {
        return None;
    }
    let path = head.path.split('?').next().unwrap_or_default();
    let given = |name| head.header(name).unwrap_or_default();
    let page = thunder_dashboard::page(path, given("accept-encoding"), given("if-none-match"))?;
    let reason = if page.status == 304 { "Not Modified" } else { "OK" };
    let mut response = format!("HTTP/1.1 {} {reason}\r\nconnection: close\r\n", page.status);
    for (name, value) in &page.headers {
        response += &format!("{name}: {value}\r\n");
    }
    response += &format!("content-length: {}\r\n\r\n", page.body.len());
    let mut response = response.into_bytes();
    if head.method == "GET" {
        response.extend_from_slice(page.body);
    }
    Some(response)
}

/// Sends a whole response. If the client has left, this is not an error.
pub(super) async fn write(client: &mut (impl AsyncWrite + Unpin), response: &[u8]) -> Result<(), HttpError> {
    let _ = client.write_all(response).await;
    Ok(())
}

async fn write_answer(client: &mut (impl AsyncWrite + Unpin), answer: &Answer) -> Result<(), HttpError> {
    let (status, body) = (answer.status, answer.body.to_string());
    let retry = answer.retry_after_s.map(|seconds| format!("retry-after: {seconds}\r\n")).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{retry}connection: \
         close\r\n\r\n",
        body.len()
    );
    write(client, (head + &body).as_bytes()).await
}

impl Agent {
    /// Answers a request for a path below `/admin`.
    pub(super) async fn administer<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        client: &mut S,
        head: &Head,
        asker: super::gateway::Asker,
        path: &str,
        rest: Vec<u8>,
    ) -> Result<(), HttpError> {
        let is_empty = head.header("content-length").is_none_or(|length| length == "0");
        let body = match head.method.as_str() {
            "GET" => Vec::new(),
            // Revoking a key and reloading the settings need no body.
            "POST" if is_empty && (is_of_the_desk(path) || path == "/admin/config/reload") => Vec::new(),
            _ => {
                head.check_json()?;
                read_body(client, head, rest, &self.api_settings().limits).await?
            }
        };
        if let Some(desk) = self.0.options.desk.clone().filter(|_| is_of_the_desk(path)) {
            let answer = desk.ask(asker.caller, asker.remote, &head.method, &head.path, body).await;
            let DeskAnswer { status, kind, body } = answer;
            let head = format!(
                "HTTP/1.1 {status} Status\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            return write(client, &[head.as_bytes(), &body].concat()).await;
        }
        let actor = asker.caller.actor(asker.remote.map(|remote| remote.ip()));
        let answer = match (head.method.as_str(), path) {
            ("GET", "/admin/cluster") => Answer::ok(self.cluster_status()),
            ("GET", "/admin/models") => Answer::ok(self.served_models().await),
            ("GET", "/admin/energy") => self.energy().await,
            ("GET", "/admin/requests") => Answer::ok(self.all_requests().await),
            ("GET", "/admin/cluster/logs") => self.log_of(&head.path).await,
            ("GET", "/admin/models/stored") => self.stored_models().await,
            ("POST", path) if CHANGES.contains(&path) => self.change_by(actor, path, &body).await,
            (method, path) => {
                let mut answer = self.extended(method, path, body).await;
                if let Some(act) = answer.act.take() {
                    self.note_act(actor, act).await;
                }
                answer
            }
        };
        write_answer(client, &answer).await
    }

    /// Answers with the response of the program around the agent.
    pub(super) async fn answer_extended(
        &self,
        client: &mut (impl AsyncWrite + Unpin),
        method: &str,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(), HttpError> {
        write_answer(client, &self.extended(method, path, body).await).await
    }

    fn cluster_status(&self) -> Value {
        let own = self.status();
        let mut status = serde_json::to_value(&own).unwrap_or_default();
        status["cluster"] = true.into();
        status["problems"] = own.problems().into();
        status
    }

    /// The models, with the counts of their heads.
    pub(super) async fn served_models(&self) -> Value {
        let models = self.status().models;
        let loads = self.of_heads(models.iter().map(|model| model.name.clone()), "/admin/models").await;
        let models = models.into_iter().zip(loads).map(|(model, reply)| {
            let mut load = reply.map(|mut reply| reply["models"][0]["load"].take()).unwrap_or_default();
            // The head knows the ranks' shares, the cluster knows their nodes.
            if let Some(shards) = load["shards"].as_array_mut() {
                for (shard, rank) in shards.iter_mut().zip(&model.ranks) {
                    shard["node"] = rank.node.clone().into();
                }
            }
            let mut shown = serde_json::to_value(&model).unwrap_or_default();
            shown["load"] = load;
            shown
        });
        json!({ "cannot_change": null, "models": models.collect::<Vec<_>>() })
    }

    /// The requests of all models, each model's latest first.
    async fn all_requests(&self) -> Value {
        let names: Vec<String> = self.status().models.into_iter().map(|model| model.name).collect();
        let replies = self.of_heads(names.iter().cloned(), "/admin/requests").await;
        let (mut rows, mut kept) = (Vec::new(), 0);
        for (name, reply) in names.iter().zip(replies) {
            let Some(mut reply) = reply else { continue };
            kept += reply["kept"].as_u64().unwrap_or(0);
            let Value::Array(own) = reply["requests"].take() else { continue };
            rows.extend(own.into_iter().map(|mut row| {
                row["model"] = name.as_str().into();
                row
            }));
        }
        rows.sort_by(|a, b| {
            let began = |row: &Value| row["began"].as_f64().unwrap_or(0.0);
            began(b).total_cmp(&began(a))
        });
        rows.truncate(MOST_ROWS);
        json!({ "requests": rows, "kept": kept })
    }

    /// The replies of models' heads to a GET; `None` for a model that is not ready or does not
    /// reply.
    async fn of_heads(&self, models: impl Iterator<Item = String>, path: &'static str) -> Vec<Option<Value>> {
        let asking: Vec<_> = models
            .map(|model| {
                let agent = self.clone();
                let ask = async move { agent.ask_model(&model, path).await };
                tokio::spawn(async move { tokio::time::timeout(HEAD_LIMIT, ask).await.ok().flatten() })
            })
            .collect();
        let mut replies = Vec::new();
        for reply in asking {
            replies.push(reply.await.ok().flatten());
        }
        replies
    }

    /// Changes what the operator wants, as the command line does.
    async fn change_by(&self, actor: Actor, path: &str, body: &[u8]) -> Answer {
        let mut request = match request_of(path, body) {
            Ok(request) => request,
            Err(error) => return Answer::error(400, "invalid_request", &error.to_string()),
        };
        let why = match self.plan_load(&mut request).await {
            Ok(why) => why,
            Err(refusal) => return refusal,
        };
        match self.answer_as(actor, request).await {
            Ok(Reply::Approved(name)) => Answer::ok(json!({ "name": name })),
            Ok(Reply::Changed { name, spread }) => {
                Answer::ok(json!({ "name": name, "spread": spread, "why": why }))
            }
            Ok(Reply::Token(token)) => Answer::ok(json!({ "token": token })),
            Ok(Reply::Begun(task)) => Answer::ok(json!({ "task": task })),
            Ok(Reply::Models(answers)) => removed(answers),
            Ok(_) => {
                if ends(path) {
                    let agent = self.clone();
                    tokio::spawn(async move {
                        tokio::time::sleep(LAST_ANSWER).await;
                        agent.0.ending.send_replace(true);
                    });
                }
                Answer::ok(json!({}))
            }
            Err(why) => Answer::error(409, "refused", &why),
        }
    }

    /// Recent events on a node, as in `thunder cluster logs`.
    async fn log_of(&self, path: &str) -> Answer {
        let (mut node, mut lines, mut after) = (None, LOG_LINES, 0);
        for (name, value) in query(path) {
            let number = value.parse::<u64>();
            match (name.as_str(), number) {
                ("node", _) => node = Some(value),
                ("lines", Ok(number)) => lines = usize::try_from(number).unwrap_or(usize::MAX),
                ("after", Ok(number)) => after = number,
                _ => {
                    let why = format!("`{name}={value}`: the path takes node, lines=NUMBER and after=NUMBER");
                    return Answer::error(400, "invalid_request", &why);
                }
            }
        }
        match self.answer(Request::Logs { node, lines, after }).await {
            Ok(Reply::Logs(lines)) => Answer::ok(json!({ "lines": lines })),
            Ok(_) => Answer::error(500, "failed", "the node has no log"),
            Err(why) => Answer::error(409, "refused", &why),
        }
    }

    /// The models on the nodes' disks, as in `thunder model list --nodes all`.
    async fn stored_models(&self) -> Answer {
        let asked = self.answer(Request::Models { nodes: Vec::new(), ask: ModelAsk::List }).await;
        let Ok(Reply::Models(answers)) = asked else {
            return Answer::error(503, "failed", "the nodes do not tell their models");
        };
        let node = |(node, answer)| match answer {
            Ok(ModelAnswer::Models(models)) => json!({ "node": node, "models": models, "error": null }),
            Ok(_) => json!({ "node": node, "models": [], "error": "it is of another version" }),
            Err(why) => json!({ "node": node, "models": [], "error": why }),
        };
        Answer::ok(json!({ "nodes": answers.into_iter().map(node).collect::<Vec<_>>() }))
    }

    /// If a load leaves the layout open, sets the layout that the program's plan picks, and returns
    /// the reason. Without a plan the model runs on all nodes, as with the command line.
    async fn plan_load(&self, request: &mut Request) -> Result<Option<String>, Answer> {
        let Request::Load { model, nodes, count, arguments, weights, layouts, replicas, .. } = request else {
            return Ok(None);
        };
        if !(nodes.is_empty() && count.is_none() && weights.is_empty() && layouts.is_empty()) {
            return Ok(None);
        }
        let body = json!({ "model": model, "replicas": replicas, "arguments": arguments }).to_string();
        let Answer { status, body: mut plan, .. } =
            self.extended("POST", "/admin/models/plan", body.into_bytes()).await;
        if status != 200 {
            let why = plan["error"]["message"].as_str().unwrap_or("no plan can be made");
            return Ok(Some(format!("not planned, so it runs on all nodes: {why}")));
        }
        let (pick, why) = (plan["pick"]["index"].as_u64(), plan["pick"]["why"].as_str().map(str::to_owned));
        let Some(pick) = pick else {
            let why = format!("{model} fits on no set of nodes: the layouts of /admin/models/plan say why");
            return Err(Answer::error(409, "refused", &why));
        };
        let picked = plan["layouts"][pick as usize]["load"]["layouts"].take();
        *layouts = serde_json::from_value(picked)
            .map_err(|error| Answer::error(500, "failed", &format!("the plan is malformed: {error}")))?;
        Ok(why)
    }

    /// The response of the program around the agent.
    pub(super) async fn extended(&self, method: &str, path: &str, body: Vec<u8>) -> Answer {
        let extension = self.api_settings().extension.clone();
        let (method, path) = (method.to_owned(), path.to_owned());
        let answering = tokio::task::spawn_blocking(move || {
            let ask = Ask { method: &method, path: &path, body: &body };
            let known = extension.and_then(|extension| extension.answer(&ask));
            known.unwrap_or_else(|| Answer::unknown(&ask))
        });
        answering.await.unwrap_or_else(|error| Answer::error(500, "failed", &error.to_string()))
    }
}

/// The nodes' replies to the deletion of a model: freed bytes, or the reason of a failure.
fn removed(answers: Vec<(String, Result<ModelAnswer, String>)>) -> Answer {
    let (mut removed, mut failed) = (serde_json::Map::new(), serde_json::Map::new());
    for (node, answer) in answers {
        match answer {
            Ok(ModelAnswer::Removed(bytes)) => removed.insert(node, bytes.into()),
            Ok(_) => failed.insert(node, "it is of another version".into()),
            Err(why) => failed.insert(node, why.into()),
        };
    }
    if removed.is_empty() {
        let why = |(node, why): (&String, &Value)| format!("{node}: {}", why.as_str().unwrap_or_default());
        let failed: Vec<String> = failed.iter().map(why).collect();
        return Answer::error(409, "refused", &failed.join("; "));
    }
    Answer::ok(json!({ "removed": removed, "failed": failed }))
}

/// Names and values of a path's query.
fn query(path: &str) -> Vec<(String, String)> {
    let text = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let pairs = path.split_once('?').map(|(_, query)| query).unwrap_or_default().split('&');
    let pairs = pairs.filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.map(|(name, value)| (text(name), text(value))).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_file_is_a_whole_response() {
        let head = |text: &str| Head::parse(text.as_bytes()).unwrap().unwrap().0;
        let get = page(&head("GET /app.js?x HTTP/1.1\r\naccept-encoding: gzip\r\n\r\n")).unwrap();
        let end = get.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let text = String::from_utf8(get[..end].to_vec()).unwrap();
        assert!(text.contains("content-encoding: gzip") && text.contains("default-src 'none'"), "{text}");
        assert!(text.contains(&format!("content-length: {}", get.len() - end - 4)));
        let only_head = page(&head("HEAD / HTTP/1.1\r\n\r\n")).unwrap();
        assert!(only_head.ends_with(b"\r\n\r\n"));
        for other in
            ["POST / HTTP/1.1\r\n\r\n", "GET /admin/cluster HTTP/1.1\r\n\r\n", "GET /.. HTTP/1.1\r\n\r\n"]
        {
            assert_eq!(page(&head(other)), None, "{other}");
        }
    }
}
