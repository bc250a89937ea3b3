//! The endpoints: each API translates its requests to [`Generation`]s, and what is generated to its
//! responses.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::Value;
use thunder_engine::Sampling;

use crate::account::Account;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::Generation;
use crate::generate::prepare::prepare;
use crate::generate::reply::{Presenter, reply};
use crate::request::json;

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod ollama;
pub(crate) mod ollama_models;
#[cfg(test)]
mod parse_tests;
pub(crate) mod response_items;
pub(crate) mod responses;
pub(crate) mod tokenize;

/// One way to ask for text.
pub(crate) trait Api: Presenter + Sized {
    /// Checks a body. Sampling fields that are absent come from the model's `defaults`.
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError>;

    /// Completes a checked request with what the server keeps.
    /// `owner` is the key that the request came with.
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
    let account = Account::open(&app, &request)?;
    let owner = account.owner();
    let body = app.receive(request).await?;
    let shared = app.clone();
    let work = move |bytes: &[u8]| {
        let (mut generation, mut api) =
            A::parse(json::parse(bytes)?, &shared.engine.info().default_sampling)?;
        shared.check_model(&generation.options.model)?;
        api.complete(&mut generation, &shared, owner.as_deref())?;
        Ok((prepare(generation, &shared.engine, &shared.format)?, api))
    };
    let (prepared, api) = app.admission.prepare(body, work).await?;
    reply(&app, prepared, api, account).await
}
