//! The response to a relayed request: lines of JSON.
//!
//! - `{"state": …, "content_type": …, "prompt": …, "frames": …}`: the beginning, with the prompt's
//!   tokens; only of an answer that begins here.
//! - `{"choice": …, "tokens": […], "reports": […], "frames": …}`: tokens, and what the client gets
//!   for them. `reports` only with log-probabilities.
//! - `{"choice": …, "ended": true, "frames": …}`: the end of one of several choices.
//! - `{"over": true, "usage": …, "frames": …}`, or `"whole"` in place of `"frames"`: the end.
//! - `{"failed": …, "again": …, "frames": …}`: the answer cannot go on here; `again`: elsewhere it
//!   can. `wrong`: the status of an error that is the request's fault.
//!
//! If the node keeps the request's texts, the beginning has the prompt's texts as `asked`, and
//! lines with tokens or an end have the parts of the answer for their frames as `kept`. If the node
//! traces the request, the end has the ranks' work as `work`.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use futures_util::stream as futures_stream;
use serde_json::{Value, json};
use thunder_access::KeptPart;
use thunder_engine::AnsweredToken;

use super::choices::{Choices, Tally};
use super::frames::Frames;
use super::prepare::Prepared;
use super::relay::{RelayedChoice, Report};
use super::reply::{FIRST_EVENT_WAIT, Head, Presenter};
use super::updates::{Step, Updates};
use super::{Update, What};
use crate::account::kept;
use crate::error::ApiError;

/// One choice that is being sent to the client.
#[derive(Default)]
struct Passing {
    /// Tokens whose frames the client has.
    skip: usize,
    /// The client has the choice's end.
    has_end: bool,
    /// Frames whose tokens have not arrived yet.
    frames: String,
    /// Their texts, if the node keeps them.
    kept: Vec<KeptPart>,
}

struct Relaying<P> {
    head: Head,
    updates: Updates,
    presenter: P,
    frames: Frames,
    /// The choices of a response that is not a stream.
    whole: Option<Choices>,
    choices: Vec<Passing>,
    /// Choices that have not ended.
    running: usize,
    prompt_tokens: usize,
    /// The node keeps the texts.
    tells_texts: bool,
    used: Tally,
    lines: VecDeque<Bytes>,
    is_over: bool,
}

/// The HTTP response. Dropping its body cancels the choices.
///
/// # Errors
/// When the engine fails at once.
pub(crate) async fn respond<P: Presenter>(
    head: Head,
    mut updates: Updates,
    presenter: P,
    prepared: &Prepared,
) -> Result<Response, ApiError> {
    let running = updates.len();
    let relay = prepared.relay.as_ref();
    let passing = |choice: &RelayedChoice| Passing {
        skip: choice.answered.len(),
        has_end: choice.ended,
        ..Passing::default()
    };
    let mut choices: Vec<Passing> =
        relay.map(|relay| relay.choices.iter().map(passing).collect()).unwrap_or_default();
    choices.resize_with(running, Passing::default);
    let asked = relay.and_then(|relay| relay.told.as_ref());
    let begun = relay.filter(|relay| !relay.is_resumed).map(|relay| {
        let mut line = json!({ "state": relay.state });
        if let Some(asked) = asked {
            line["asked"] = json!(asked);
        }
        line
    });
    let whole = (!prepared.options.stream).then(|| Choices::new(running));
    let first = tokio::time::timeout(FIRST_EVENT_WAIT, updates.next_step()).await.ok().flatten();
    if let Some(Step::Update(Update { what: What::Failed(error), .. })) = first {
        return Err(error);
    }
    let frames = Frames::new(P::STREAM);
    let mut relaying = Relaying {
        head,
        updates,
        presenter,
        frames,
        whole,
        choices,
        running,
        prompt_tokens: prepared.prompts.iter().map(Vec::len).sum(),
        tells_texts: asked.is_some(),
        used: Tally::default(),
        lines: VecDeque::new(),
        is_over: false,
    };
    relaying.begin(begun);
    if let Some(step) = first {
        relaying.take(step);
    }
    let lines = futures_stream::unfold(relaying, async |mut relaying| {
        let line = relaying.next().await?;
        Some((Ok::<_, Infallible>(line), relaying))
    });
    let mut response = Response::new(Body::from_stream(lines));
    let kind = HeaderValue::from_static("application/x-thunder-relay");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

impl<P: Presenter> Relaying<P> {
    fn line(&mut self, value: &Value) {
        self.lines.push_back(format!("{value}\n").into());
    }

    /// The beginning of an answer, with a line if the client has nothing yet.
    fn begin(&mut self, line: Option<Value>) {
        let mut content_type = "application/json";
        if self.whole.is_none() {
            self.presenter.begin(&self.head, &mut self.frames);
            content_type = P::STREAM.content_type();
        }
        let frames = self.frames.take_text();
        if let Some(mut line) = line {
            line["content_type"] = content_type.into();
            line["prompt"] = self.prompt_tokens.into();
            line["frames"] = frames.into();
            self.line(&line);
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Update(Update { what: What::Failed(error), .. }) => self.fail(&error),
            Step::Update(update) => self.update(update),
            Step::Accepted(choice, tokens) => self.accept(choice, &tokens),
        }
    }

    fn update(&mut self, update: Update) {
        let (choice, mut end) = (update.choice, None);
        if let Some(part) = kept::part(choice, &update.what).filter(|_| self.tells_texts) {
            self.choices[choice].kept.push(part);
        }
        if let What::End { reason, usage } = &update.what {
            self.used.add(usage);
            end = Some(reason.outcome());
        }
        match &mut self.whole {
            Some(choices) => {
                // Never called for failures.
                let _ = choices.absorb(update);
            }
            None => self.presenter.update(&self.head, update, &mut self.frames),
        }
        let passing = &mut self.choices[choice];
        passing.frames.push_str(&self.frames.take_text());
        let Some(outcome) = end else { return };
        let (mut frames, mut kept) = (std::mem::take(&mut passing.frames), std::mem::take(&mut passing.kept));
        if passing.has_end {
            frames.clear();
            kept.clear();
        }
        self.running -= 1;
        if self.running > 0 {
            if !frames.is_empty() || !kept.is_empty() {
                self.line(&told(json!({ "choice": choice, "ended": true, "frames": frames }), &kept));
            }
            return;
        }
        self.is_over = true;
        let usage = json!({
            "prompt": self.prompt_tokens, "cached": self.used.cached(), "completion": self.used.generated,
            "outcome": outcome,
        });
        let mut line = told(json!({ "over": true, "usage": usage }), &kept);
        if let Some(work) = self.updates.told_work() {
            line["work"] = json!(work);
        }
        match self.whole.take() {
            Some(choices) => line["whole"] = self.presenter.whole(&self.head, choices).to_string().into(),
            None => {
                self.presenter.end(&self.head, &mut self.frames);
                frames.push_str(&self.frames.take_text());
                line["frames"] = frames.into();
            }
        }
        self.line(&line);
    }

    fn accept(&mut self, choice: usize, tokens: &[AnsweredToken]) {
        let passing = &mut self.choices[choice];
        let (frames, kept) = (std::mem::take(&mut passing.frames), std::mem::take(&mut passing.kept));
        if passing.skip > 0 || passing.has_end {
            passing.skip = passing.skip.saturating_sub(tokens.len());
            return;
        }
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let mut line = told(json!({ "choice": choice, "tokens": ids, "frames": frames }), &kept);
        if tokens.iter().any(|token| token.report.is_some()) {
            let reports: Vec<Report> =
                tokens.iter().filter_map(|token| token.report.as_ref()).map(Report::of).collect();
            line["reports"] = json!(reports);
        }
        self.line(&line);
    }

    fn fail(&mut self, error: &ApiError) {
        self.is_over = true;
        // On another server the request would have reached its deadline too.
        let is_wrong = error.status.is_client_error() || error.status == StatusCode::GATEWAY_TIMEOUT;
        let again = !is_wrong && self.head.app.is_ending();
        if self.whole.is_none() {
            self.presenter.failed(&self.head, error, &mut self.frames);
        }
        let frames = self.frames.take_text();
        let mut line = json!({ "failed": error.message, "again": again, "frames": frames });
        if is_wrong {
            line["wrong"] = error.status.as_u16().into();
        }
        self.line(&line);
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            if self.is_over {
                return None;
            }
            let step = self.updates.next_step().await?;
            self.take(step);
        }
    }
}

/// A line with its parts of the answer.
fn told(mut line: Value, kept: &[KeptPart]) -> Value {
    if !kept.is_empty() {
        line["kept"] = json!(kept);
    }
    line
}
