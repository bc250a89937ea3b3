//! Passes a request to the head of its model, and continues elsewhere if the head is lost.
//!
//! The head's server sends lines of JSON. Each has tokens of the answer and the bytes that the
//! client gets for them (`crates/server/src/generate/relaying.rs`). The client gets a line as a
//! whole or not at all. If the model's group is lost, its next head gets the request again, with
//! all tokens whose lines the client got, and sends only what follows.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thunder_access::{Caller, KeptPart, KeptText};
use thunder_traces::Work;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use super::account::{Account, AnswerUsage};
use super::client::{Client, Gone};
use super::question::{Question, is_generation, is_reading};
use super::{Agent, CallReply};
use crate::agent::calls::Call;
use crate::document::Stamp;
use crate::http::HttpError;
use crate::http_response::{ResponseHead, ResponseReader};
use crate::id::NodeId;

/// Time until a lost group is known to be lost.
const LOSS_LIMIT: Duration = Duration::from_secs(3);
/// Maximum consecutive groups that return no token before a request fails.
const MOST_ATTEMPTS: usize = 4;
/// A stream without an event for this long gets a comment.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Time for a head to begin its response, in which it reads the request and computes the first
/// token.
const RESPONSE_LIMIT: Duration = Duration::from_secs(60);

/// A connection to a head's API.
pub(super) trait Api: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Api for T {}

/// One choice of the answer, as far as the client has it.
#[derive(Debug, Default, Serialize)]
struct BegunChoice {
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reports: Vec<Value>,
    ended: bool,
}

/// The part of an answer that the client has.
#[derive(Debug, Default)]
struct Begun {
    /// Identity that the first head gave the answer; `None` before its beginning.
    state: Option<Value>,
    content_type: String,
    choices: Vec<BegunChoice>,
    /// Number of tokens of all choices.
    tokens: usize,
}

/// A line of a head's response.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Line {
    state: Option<Value>,
    content_type: String,
    prompt: Option<u64>,
    choice: usize,
    tokens: Vec<u32>,
    reports: Vec<Value>,
    ended: bool,
    frames: String,
    over: bool,
    whole: Option<String>,
    failed: Option<String>,
    again: bool,
    /// The status, if the request caused the failure.
    wrong: Option<u16>,
    usage: AnswerUsage,
    /// Texts of the prompt and parts of the answer, if a policy keeps them.
    asked: Option<Vec<KeptText>>,
    kept: Vec<KeptPart>,
    /// The ranks' work, if the request is traced.
    work: Option<Work>,
}

/// A request and its answer so far.
struct Answer<'a> {
    question: &'a Question,
    begun: &'a mut Begun,
    account: &'a mut Account,
}

/// How a group's part of an answer ended.
enum Part {
    /// The client has the whole response.
    Complete,
    /// Another group may continue.
    Lost(String),
    /// No group can continue.
    Failed(HttpError),
}

/// Maximum choices of an answer.
const MOST_CHOICES: usize = 128;

impl Begun {
    /// Adds a line's content.
    fn note(&mut self, line: &Line) {
        if let Some(state) = &line.state {
            self.state = Some(state.clone());
            self.content_type.clone_from(&line.content_type);
        }
        if line.choice >= MOST_CHOICES || (line.tokens.is_empty() && !line.ended) {
            return;
        }
        if self.choices.len() <= line.choice {
            self.choices.resize_with(line.choice + 1, BegunChoice::default);
        }
        let choice = &mut self.choices[line.choice];
        choice.tokens.extend_from_slice(&line.tokens);
        choice.reports.extend_from_slice(&line.reports);
        choice.ended |= line.ended;
        self.tokens += line.tokens.len();
    }

    /// The line before the request's body.
    fn to_line(&self) -> String {
        match &self.state {
            None => "null\n".to_owned(),
            Some(state) => format!("{}\n", json!({ "state": state, "choices": self.choices })),
        }
    }
}

impl Agent {
    /// Makes a model generate, and passes the answer on. Continues after the loss of a group.
    pub(super) async fn generate<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        client: &mut S,
        question: &Question,
        caller: &Caller,
    ) -> Result<(), HttpError> {
        let mut client = Client::new(client);
        let mut account = if is_generation(&question.path) || is_reading(&question.path) {
            Account::open(self, caller, question).await?
        } else {
            Account::none()
        };
        client.set_headers(account.headers());
        let answered = self.pass_answer(&mut client, question, &mut account).await;
        if let Ok(Err(error)) = &answered {
            account.fail(error.status()).await;
        }
        match answered {
            // If the client has left, this is not an error.
            Err(Gone) | Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if client.has_begun() => {
                let _ = client.send(&error.frame(&question.path)).await;
                let _ = client.end().await;
                Ok(())
            }
            Ok(Err(error)) => Err(error),
        }
    }

    async fn pass_answer<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        client: &mut Client<'_, S>,
        question: &Question,
        account: &mut Account,
    ) -> Result<Result<(), HttpError>, Gone> {
        let mut begun = Begun::default();
        let (mut attempts, mut why) = (0, String::new());
        while attempts < MOST_ATTEMPTS {
            let routed = match client.wait(self.ready_group(question), KEEP_ALIVE).await? {
                Ok(ready) => ready,
                Err(error) => return Ok(Err(error)),
            };
            let (head, placement) = (routed.head, routed.placement);
            let (tells_texts, tells_work) = (account.keeps_texts(), account.is_traced());
            let model = routed.group.clone();
            let asked = Question { model, tells_texts, tells_work, ..question.clone() };
            let before = begun.tokens;
            account.note_head(&self.name_of(&head), || self.nodes_of(&routed.group));
            let answer = Answer { question: &asked, begun: &mut begun, account };
            match self.part(client, answer, head, placement).await? {
                Part::Complete => return Ok(Ok(())),
                Part::Failed(error) => return Ok(Err(error)),
                Part::Lost(lost) => {
                    let (model, tokens) = (&question.model, begun.tokens);
                    self.0
                        .log
                        .add(format!("{model}: an answer of {tokens} tokens has to go on elsewhere: {lost}"));
                    why = lost;
                }
            }
            attempts = if begun.tokens > before { 1 } else { attempts + 1 };
            client.keep_alive(" the model is formed again, the answer goes on").await?;
            // The attempt may have noticed the loss before this node. A group that is still ready
            // gets the request again.
            let lost = tokio::time::timeout(LOSS_LIMIT, self.until_lost(&asked.model, placement));
            let _ = client.wait(lost, KEEP_ALIVE).await?;
        }
        let message = format!("{} failed {MOST_ATTEMPTS} times while answering: {why}", question.model);
        Ok(Err(HttpError::new(503, "model_failed", &message)))
    }

    /// Names of the nodes of a group's ranks, in their order.
    fn nodes_of(&self, group: &str) -> Vec<String> {
        let document = self.lock().membership.document().clone();
        let nodes = document.placement(group).map(|(_, placement)| placement.nodes.clone());
        nodes.unwrap_or_default().iter().map(|node| self.name_of(node)).collect()
    }

    /// One group's part of an answer.
    async fn part<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        client: &mut Client<'_, S>,
        answer: Answer<'_>,
        head: NodeId,
        placement: Stamp,
    ) -> Result<Part, Gone> {
        let Answer { question, begun, account } = answer;
        let _use = (head == self.0.id).then(|| self.in_use(&question.model, placement));
        let line = begun.to_line();
        let asked = self.ask_head(question, &line, head, placement);
        let lost = self.until_lost(&question.model, placement);
        tokio::pin!(lost);
        let asked = tokio::select! {
            asked = client.wait(tokio::time::timeout(RESPONSE_LIMIT, asked), KEEP_ALIVE) => asked?,
            // If a head's node is cut off, its connection is not closed.
            () = &mut lost => return Ok(Part::Lost("the head is lost".to_owned())),
        };
        let (response, mut reader) = match asked {
            Err(_) => return Ok(Part::Lost("the head does not answer".to_owned())),
            Ok(Err(error)) => return Ok(Part::Lost(error)),
            Ok(Ok(asked)) => asked,
        };
        if response.header("content-type") != Some("application/x-thunder-relay") {
            return self.other_response(client, (question, account), &response, &mut reader, placement).await;
        }
        loop {
            let line = tokio::select! {
                line = reader.line() => line,
                () = &mut lost => return Ok(Part::Lost("the head is lost".to_owned())),
                () = client.gone() => return Err(Gone),
                () = tokio::time::sleep(KEEP_ALIVE) => {
                    client.keep_alive("").await?;
                    continue;
                }
            };
            let line = match line {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(Part::Lost("the head ended before its response".to_owned())),
                Err(error) => return Ok(Part::Lost(error.to_string())),
            };
            let line: Line = match serde_json::from_slice(&line) {
                Ok(line) => line,
                Err(error) => return Ok(Part::Lost(format!("the head's response is malformed: {error}"))),
            };
            if let Some(part) = pass(client, begun, account, line).await? {
                return Ok(part);
            }
        }
    }

    /// Sends the request to a head, and reads the response's head.
    async fn ask_head(
        &self,
        question: &Question,
        begun: &str,
        head: NodeId,
        placement: Stamp,
    ) -> Result<(ResponseHead, ResponseReader<Box<dyn Api>>), String> {
        let (mut api, key) = self.open(question, head, placement).await?;
        let Question { method, path, body, .. } = question;
        let begun = if is_generation(path) { begun } else { "" };
        let is_relayed = !begun.is_empty();
        let relay: String = [
            ("x-thunder-relay", is_relayed),
            ("x-thunder-tell-texts", is_relayed && question.tells_texts),
            ("x-thunder-tell-work", question.tells_work),
        ]
        .into_iter()
        .filter(|(_, wanted)| *wanted)
        .map(|(header, _)| format!("{header}: 1\r\n"))
        .collect();
        let given: String = [
            // The head takes turns among these claimants, whichever node they use.
            ("x-thunder-claimant", &question.claimant),
            ("x-request-timeout", &question.timeout),
        ]
        .into_iter()
        .filter_map(|(header, value)| Some(format!("{header}: {}\r\n", value.as_ref()?)))
        .collect();
        // HTTP/1.0: the body ends with the connection and has no chunks.
        let request = format!(
            "{method} {path} HTTP/1.0\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: \
             application/json\r\ncontent-length: {}\r\n{relay}{given}\r\n{begun}{body}",
            begun.len() + body.len()
        );
        let exchange = async {
            api.write_all(request.as_bytes()).await?;
            api.flush().await?;
            let mut reader = ResponseReader::new(api);
            Ok((reader.head().await?, reader))
        };
        exchange.await.map_err(|error: std::io::Error| error.to_string())
    }

    /// The body of a head's response to a request that generates nothing.
    pub(super) async fn fetch(
        &self,
        question: &Question,
        head: NodeId,
        placement: Stamp,
    ) -> Result<Vec<u8>, String> {
        let (response, mut reader) = self.ask_head(question, "", head, placement).await?;
        let body = reader.rest().await.map_err(|error| error.to_string())?;
        if response.code == 200 { Ok(body) } else { Err(response.status) }
    }

    /// Passes on a response that is not a generated answer. If the group has failed, another may
    /// answer.
    async fn other_response<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        client: &mut Client<'_, S>,
        (question, account): (&Question, &mut Account),
        response: &ResponseHead,
        reader: &mut ResponseReader<Box<dyn Api>>,
        placement: Stamp,
    ) -> Result<Part, Gone> {
        let body = tokio::time::timeout(RESPONSE_LIMIT, reader.rest());
        let body = match client.wait(body, KEEP_ALIVE).await? {
            Ok(Ok(body)) => body,
            _ => return Ok(Part::Lost("the head ended within its response".to_owned())),
        };
        // 504: the request's own time limit has passed.
        if response.code >= 500 && response.code != 504 {
            let lost = tokio::time::timeout(LOSS_LIMIT, self.until_lost(&question.model, placement));
            if client.wait(lost, KEEP_ALIVE).await?.is_ok() {
                return Ok(Part::Lost("the model's group has failed".to_owned()));
            }
        }
        if client.has_begun() {
            let text = String::from_utf8_lossy(&body);
            let message = format!("the answer cannot go on: {}", text.chars().take(500).collect::<String>());
            return Ok(Part::Failed(HttpError::new(503, "model_failed", &message)));
        }
        let kept = ["content-type", "retry-after", "allow"];
        let headers: String =
            kept.iter().filter_map(|name| Some(format!("{name}: {}\r\n", response.header(name)?))).collect();
        // A wrong request is not recorded, because it has cost nothing.
        if response.code >= 500 {
            account.fail(response.code).await
        } else if response.code == 200 && is_reading(&question.path) {
            let work = response.header("x-thunder-work").and_then(|work| serde_json::from_str(work).ok());
            account.note_result(work);
            account.close(&read_usage(&body)).await
        } else {
            account.cancel(response.code).await
        }
        client.whole(&response.status, &headers, &body).await?;
        Ok(Part::Complete)
    }

    /// Connects to the API of a model's head.
    async fn open(
        &self,
        question: &Question,
        head: NodeId,
        placement: Stamp,
    ) -> Result<(Box<dyn Api>, String), String> {
        let model = &question.model;
        if head == self.0.id {
            let (address, key): (SocketAddr, String) =
                self.own_api(model, placement).ok_or("the model has ended")?;
            let api = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
            return Ok((Box::new(api), key));
        }
        let call = Call::Open { model: model.clone(), placement, looks: question.looks };
        match self.call(head, &call).await? {
            (CallReply::Opened(key), stream) => Ok((Box::new(stream), key)),
            _ => Err("a strange reply".to_owned()),
        }
    }
}

/// The usage that a response reports for reading texts, in OpenAI's or in Ollama's form.
fn read_usage(body: &[u8]) -> AnswerUsage {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let prompt = body["usage"]["prompt_tokens"].as_u64().or_else(|| body["prompt_eval_count"].as_u64());
    AnswerUsage { prompt: prompt.unwrap_or(0), ..AnswerUsage::default() }
}

/// Passes a line on. Returns how the part ends, if it does.
async fn pass<S: AsyncRead + AsyncWrite + Unpin>(
    client: &mut Client<'_, S>,
    begun: &mut Begun,
    account: &mut Account,
    line: Line,
) -> Result<Option<Part>, Gone> {
    if let Some(why) = line.failed {
        if line.again {
            return Ok(Some(Part::Lost(why)));
        }
        if !client.has_begun() {
            let (status, code) = match line.wrong {
                // The head's own codes for these.
                Some(504) => (504, "deadline_exceeded"),
                Some(status) => (status, "answer_failed"),
                None => (500, "engine_failed"),
            };
            return Ok(Some(Part::Failed(HttpError::new(status, code, &why))));
        }
        account.fail(line.wrong.unwrap_or(500)).await;
        client.send(&line.frames).await?;
        client.end().await?;
        return Ok(Some(Part::Complete));
    }
    begun.note(&line);
    if let Some(state) = &line.state {
        account.note_begin(state["id"].as_str().unwrap_or_default(), line.prompt);
    }
    account.note_tokens(line.tokens.len());
    account.note_texts(line.asked, line.kept);
    // The record is written before the client learns that its answer is complete.
    if line.over {
        account.note_work(line.work);
        account.close(&line.usage).await;
    }
    if let Some(whole) = line.whole {
        client.whole("200 OK", "content-type: application/json\r\n", whole.as_bytes()).await?;
        return Ok(Some(Part::Complete));
    }
    let streams = !begun.content_type.is_empty() && begun.content_type != "application/json";
    if streams && !client.has_begun() {
        client.begin(&begun.content_type.clone()).await?;
    }
    client.send(&line.frames).await?;
    if line.over {
        client.end().await?;
        return Ok(Some(Part::Complete));
    }
    Ok(None)
}
