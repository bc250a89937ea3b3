//! From a checked request to its response: submit, then gather or stream.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::response::{IntoResponse, Response};
use thunder_engine::{Event, TokenLogprob};

use super::answers::Answers;
use super::envelope::Head;
use super::sse;
use super::types::Shape;
use crate::app::App;
use crate::error::ApiError;
use crate::request::options::Options;

/// How long a stream waits for the engine's first word, so that an early failure still gets a status of its own.
/// After that the response begins, and comments keep the connection alive while the prompt is worked on.
const FIRST_EVENT_WAIT: Duration = Duration::from_secs(5);

/// A request of either API, checked and tokenized.
#[derive(Debug)]
pub(crate) struct Asked {
    pub options: Options,
    pub prompts: Vec<Vec<u32>>,
    /// The field that the prompts came from.
    pub field: &'static str,
    /// How many alternatives to report for each token, if logprobs are wanted.
    pub logprobs: Option<usize>,
}

/// Submits what is asked and answers in the form that is asked for.
pub(crate) async fn reply<S: Shape>(app: &Arc<App>, asked: Asked, shape: S) -> Result<Response, ApiError> {
    let Asked { options, prompts, field, logprobs } = asked;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let head = Head {
        app: app.clone(),
        id: app.next_id(S::ID_PREFIX),
        created,
        prompt_tokens: prompts.iter().map(Vec::len).sum(),
    };
    let requests = prompts.iter().flat_map(|prompt| {
        let options = &options;
        (0..options.n).map(move |nth| options.request(prompt.clone(), nth, logprobs))
    });
    let mut answers = Answers::submit(&app.engine, app.closing.subscribe(), requests, field)?;
    if !options.stream {
        return gather(&head, answers, shape).await;
    }
    let first = tokio::time::timeout(FIRST_EVENT_WAIT, answers.next()).await.ok().flatten();
    if let Some((_, Event::Failed { message })) = first {
        return Err(ApiError::engine_failed(message));
    }
    let mut chunks = sse::Chunks::new(head, answers, shape, options.include_usage);
    if let Some((index, event)) = first {
        chunks.absorb(index, event);
    }
    Ok(chunks.into_response())
}

/// A choice in the making.
#[derive(Default)]
struct Whole {
    text: String,
    logprobs: Vec<TokenLogprob>,
}

async fn gather<S: Shape>(head: &Head, mut answers: Answers, mut shape: S) -> Result<Response, ApiError> {
    let mut wholes: Vec<Whole> = std::iter::repeat_with(Whole::default).take(answers.len()).collect();
    let mut choices: Vec<Option<S::Choice>> = wholes.iter().map(|_| None).collect();
    let mut generated = 0;
    while let Some((index, event)) = answers.next().await {
        let whole = &mut wholes[index];
        match event {
            Event::Delta { text, logprobs } => {
                whole.text.push_str(&text);
                whole.logprobs.extend(logprobs);
            }
            Event::Done { reason, usage } => {
                generated += usage.completion_tokens;
                let Whole { text, logprobs } = std::mem::take(whole);
                choices[index] = Some(shape.choice(index, text, &logprobs, reason));
            }
            Event::Failed { message } => return Err(ApiError::engine_failed(message)),
        }
    }
    let choices: Vec<_> = choices.into_iter().flatten().collect();
    let body = head.envelope(S::WHOLE, choices, Some(Some(head.usage(generated))));
    Ok(Json(body).into_response())
}
