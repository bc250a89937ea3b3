//! Submits a checked request, then collects or streams the response.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::response::{IntoResponse, Response};
use thunder_engine::{Event, TokenLogprob};

use super::envelope::ResponseHead;
use super::format::ChoiceFormat;
use super::sse;
use super::streams::ChoiceStreams;
use crate::app::App;
use crate::error::ApiError;
use crate::request::options::Options;

/// Wait for the engine's first event, so that an early failure still gets an error status. After
/// it, the response begins, and SSE comments keep the connection alive during a long prefill.
const FIRST_EVENT_WAIT: Duration = Duration::from_secs(5);

/// A request of either API, checked and tokenized.
#[derive(Debug)]
pub(crate) struct PreparedRequest {
    pub options: Options,
    pub prompts: Vec<Vec<u32>>,
    /// The request field that the prompts came from.
    pub field: &'static str,
    /// Alternatives to report per token; `None` for no logprobs.
    pub logprobs: Option<usize>,
}

/// Submits the request and returns a stream or a whole response, as `options.stream` says.
pub(crate) async fn reply<S: ChoiceFormat>(
    app: &Arc<App>,
    request: PreparedRequest,
    format: S,
) -> Result<Response, ApiError> {
    let PreparedRequest { options, prompts, field, logprobs } = request;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let head = ResponseHead {
        app: app.clone(),
        id: app.next_id(S::ID_PREFIX),
        created,
        prompt_tokens: prompts.iter().map(Vec::len).sum(),
    };
    let requests = prompts.iter().flat_map(|prompt| {
        let options = &options;
        (0..options.n).map(move |nth| options.request(prompt.clone(), nth, logprobs))
    });
    let mut streams = ChoiceStreams::submit(&app.engine, app.closing.subscribe(), requests, field)?;
    if !options.stream {
        return collect(&head, streams, format).await;
    }
    let first = tokio::time::timeout(FIRST_EVENT_WAIT, streams.next()).await.ok().flatten();
    if let Some((_, Event::Failed { message })) = first {
        return Err(ApiError::engine_failed(message));
    }
    let mut chunks = sse::Chunks::new(head, streams, format, options.include_usage);
    if let Some((index, event)) = first {
        chunks.absorb(index, event);
    }
    Ok(chunks.into_response())
}

/// A choice that is not complete yet.
#[derive(Default)]
struct PartialChoice {
    text: String,
    logprobs: Vec<TokenLogprob>,
}

/// Waits for all choices and returns one body.
async fn collect<S: ChoiceFormat>(
    head: &ResponseHead,
    mut streams: ChoiceStreams,
    mut format: S,
) -> Result<Response, ApiError> {
    let mut partials: Vec<PartialChoice> =
        std::iter::repeat_with(PartialChoice::default).take(streams.len()).collect();
    let mut choices: Vec<Option<S::Choice>> = partials.iter().map(|_| None).collect();
    let mut generated = 0;
    while let Some((index, event)) = streams.next().await {
        let partial = &mut partials[index];
        match event {
            Event::Delta { text, logprobs } => {
                partial.text.push_str(&text);
                partial.logprobs.extend(logprobs);
            }
            Event::Done { reason, usage } => {
                generated += usage.completion_tokens;
                let PartialChoice { text, logprobs } = std::mem::take(partial);
                choices[index] = Some(format.choice(index, text, &logprobs, reason));
            }
            Event::Failed { message } => return Err(ApiError::engine_failed(message)),
        }
    }
    let choices: Vec<_> = choices.into_iter().flatten().collect();
    let body = head.envelope(S::OBJECT, choices, Some(Some(head.usage(generated))));
    Ok(Json(body).into_response())
}
