//! The endpoints: each parses its requests and formats its responses.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::Value;
use thunder_engine::{Engine, Sampling};

use crate::app::App;
use crate::error::ApiError;
use crate::request::json;
use crate::request::options::Options;
use crate::response::format::ChoiceFormat;
use crate::response::reply::{PreparedRequest, reply};

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod models;
#[cfg(test)]
mod parse_tests;

/// A checked body of one of the two APIs that generate text.
pub(crate) trait GenerateRequest: Sized + Send + 'static {
    type Format: ChoiceFormat;

    /// Checks a body. Sampling fields that are absent come from the model's `defaults`.
    fn parse(body: Value, defaults: &Sampling) -> Result<Self, ApiError>;

    fn options(&self) -> &Options;

    /// Tokenizes the prompts.
    fn prepare(self, engine: &Engine) -> Result<(PreparedRequest, Self::Format), ApiError>;
}

/// Handles a request of type `R`.
pub(crate) async fn create<R: GenerateRequest>(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = app.receive(request).await?;
    let shared = app.clone();
    let prepare = move |bytes: &[u8]| {
        let request = R::parse(json::parse(bytes)?, &shared.engine.info().default_sampling)?;
        shared.check_model(&request.options().model)?;
        request.prepare(&shared.engine)
    };
    let (request, format) = app.admission.prepare(body, prepare).await?;
    reply(&app, request, format).await
}
