//! The endpoints: each API translates its requests to [`Generation`]s, and the generated text to
//! its responses.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{OriginalUri, Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use thunder_access::Gathering;
use thunder_engine::Sampling;

use crate::account::{Account, kept};
use crate::app::App;
use crate::error::ApiError;
use crate::generate::Generation;
use crate::generate::prepare::prepare;
use crate::generate::relay::{self, Relay};
use crate::generate::reply::{Presenter, reply};
use crate::request::json;
use crate::requests::Origin;

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
mod message_turns;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod ollama;
pub(crate) mod ollama_models;
mod ollama_options;
#[cfg(test)]
mod parse_tests;
pub(crate) mod rerank;
mod response_input;
pub(crate) mod response_items;
mod response_tools;
pub(crate) mod responses;
pub(crate) mod tokenize;

/// One way to ask for text.
pub(crate) trait Api: Presenter + Sized {
    /// Checks a body. Sampling fields that are absent come from the model's `defaults`.
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError>;

    /// The response to a request that asks for no text, for the served model's name.
    fn at_once(&self, _model: &str) -> Option<Value> {
        None
    }

    /// Completes a checked request with the server's stored data. `owner` is the key of the
    /// request.
    fn complete(
        &mut self,
        _generation: &mut Generation,
        _app: &App,
        _owner: Option<&str>,
    ) -> Result<(), ApiError> {
        Ok(())
    }
}

/// Handles a request of the API `A`.
pub(crate) async fn create<A: Api>(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let is_relayed = app.config.relay && request.headers().contains_key(relay::HEADER);
    let tells_texts = is_relayed && request.headers().contains_key(relay::TELLS_TEXTS);
    let mut account = Account::open(&app, &request)?;
    let (owner, keeping) = (account.owner(), account.keeping());
    // The whole path: a nested router sees only its own part of the URI.
    let whole = request.extensions().get::<OriginalUri>().map_or(request.uri(), |whole| &whole.0);
    let path = whole.path().to_owned();
    let body = app.receive(request).await?;
    let origin = Origin { path, began: Instant::now() };
    let shared = app.clone();
    let work = move |bytes: &[u8]| {
        let (relay, bytes) = match is_relayed {
            true => Relay::read(bytes, &shared, A::ID_PREFIX).map(|(relay, body)| (Some(relay), body))?,
            false => (None, bytes),
        };
        let (mut generation, mut api) =
            A::parse(json::parse(bytes)?, &shared.engine.info().default_sampling)?;
        generation.options.adapter = shared.check_model(&generation.options.model)?;
        if let Some(answer) = api.at_once(shared.model_name(generation.options.adapter)) {
            return Ok(Err(answer));
        }
        api.complete(&mut generation, &shared, owner.as_deref())?;
        let texts = || kept::texts(&generation.input, shared.engine.info());
        let kept = keeping.map(|keeping| {
            let mut kept = Gathering::new(keeping);
            kept.note_prompt(texts());
            kept
        });
        let told = tells_texts.then(texts);
        let prepared = prepare(generation, &shared.engine, &shared.format)?;
        let prepared = match relay {
            Some(mut relay) => {
                relay.told = told;
                relay.attach(prepared, &shared.engine)?
            }
            None => prepared,
        };
        Ok(Ok((prepared, api, kept)))
    };
    let (prepared, times) = app.admission.prepare(body, work).await?;
    account.note_preparation(&times);
    match prepared {
        Ok((prepared, api, kept)) => {
            account.keep(kept);
            reply(&app, prepared, api, account, &origin).await
        }
        Err(answer) => Ok(Json(answer).into_response()),
    }
}
