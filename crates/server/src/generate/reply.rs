//! Submits a prepared request, then collects or streams the response in the form of its API.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::response::{IntoResponse, Response};

use super::choices::Choices;
use super::frames::{Frames, StreamKind};
use super::prepare::Prepared;
use super::updates::Updates;
use super::{Update, What};
use crate::account::Account;
use crate::app::App;
use crate::error::ApiError;
use crate::requests::Origin;
use serde_json::Value;

/// Wait for the engine's first event, so that an early failure still gets an error status. After
/// it, the response begins, and a stream is kept alive during a long prefill.
pub(super) const FIRST_EVENT_WAIT: Duration = Duration::from_secs(5);

/// Common data of all bodies of a response.
#[derive(Debug)]
pub(crate) struct Head {
    pub app: Arc<App>,
    pub id: String,
    /// The adapter of the request.
    pub adapter: Option<usize>,
    /// The arrival time of the request, in seconds since the epoch.
    pub created: u64,
    /// Tokens of all prompts. A prompt counts once, with any number of completions.
    pub prompt_tokens: usize,
    /// Key of the request: the response is stored for this key only.
    pub owner: Option<String>,
}

impl Head {
    /// The name of the served model, or of the adapter.
    pub fn model(&self) -> &str {
        self.app.model_name(self.adapter)
    }
}

/// Writes generated text in the form of an API.
pub(crate) trait Presenter: Send + 'static {
    /// The prefix of a response's id.
    const ID_PREFIX: &'static str;
    /// How a stream is framed.
    const STREAM: StreamKind;

    /// The body of a whole response.
    fn whole(&mut self, head: &Head, choices: Choices) -> Value;
    /// The beginning of a stream.
    fn begin(&mut self, head: &Head, out: &mut Frames);
    /// The frames of an update. Never called for `Failed`.
    fn update(&mut self, head: &Head, update: Update, out: &mut Frames);
    /// The end of a stream whose choices are complete.
    fn end(&mut self, head: &Head, out: &mut Frames);
    /// The end of a stream that cannot continue.
    fn failed(&mut self, head: &Head, error: &ApiError, out: &mut Frames);
}

/// Submits the request and returns a stream or a whole response, as `stream` says.
pub(crate) async fn reply<P: Presenter>(
    app: &Arc<App>,
    prepared: Prepared,
    mut presenter: P,
    mut account: Account,
    origin: &Origin,
) -> Result<Response, ApiError> {
    let created = unix_s();
    let prompt_tokens = prepared.prompts.iter().map(Vec::len).sum();
    let owner = account.owner();
    let (app_of, adapter) = (app.clone(), prepared.options.adapter);
    let mut head = Head { app: app_of, id: String::new(), adapter, created, prompt_tokens, owner };
    if let Some(relay) = &prepared.relay {
        (head.id, head.created) = (relay.state.id.clone(), relay.state.created);
        account.begin(&prepared, &head.id)?;
        let updates = Updates::submit(app, &prepared, &head, origin, account).await?;
        return super::relaying::respond(head, updates, presenter, &prepared).await;
    }
    head.id = app.next_id(P::ID_PREFIX);
    account.begin(&prepared, &head.id)?;
    let limits = account.limit_headers();
    let mut updates = Updates::submit(app, &prepared, &head, origin, account).await?;
    let is_stream = prepared.options.stream;
    drop(prepared);
    if !is_stream {
        let mut choices = Choices::new(updates.len());
        while let Some(update) = updates.next().await {
            choices.absorb(update)?;
        }
        return Ok((limits, Json(presenter.whole(&head, choices))).into_response());
    }
    let first = tokio::time::timeout(FIRST_EVENT_WAIT, updates.next()).await.ok().flatten();
    if let Some(Update { what: What::Failed(error), .. }) = first {
        return Err(error);
    }
    let mut response = super::frames::stream(head, updates, presenter, first);
    response.headers_mut().extend(limits);
    Ok(response)
}

/// Seconds since the epoch.
pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
