//! Requests whose results are numbers, not text.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::json;
use thunder_engine::{Event, Output, Request};

use super::streams::ChoiceStreams;
use super::{EndReason, relay};
use crate::account::{Account, turn_or_end};
use crate::app::App;
use crate::error::ApiError;
use crate::metrics::Counted;

/// Number of requests of one body that are computed together, so that one body does not fill the
/// queue.
const AT_ONCE: usize = 16;

/// What was computed.
pub(crate) struct Computed {
    /// The engine's result for each prompt, in order.
    pub vectors: Vec<Vec<f32>>,
    /// The response's id.
    pub id: String,
    /// Headers of the response.
    pub headers: HeaderMap,
}

/// Computes the engine's result for each prompt with an adapter. The response's id begins with
/// `prefix`; `field` is the request's field with the prompts.
pub(crate) async fn compute(
    app: &App,
    mut account: Account,
    prompts: &[Vec<u32>],
    (output, adapter): (&Output, Option<usize>),
    (field, prefix): (&str, &str),
) -> Result<Computed, ApiError> {
    let id = app.next_id(prefix);
    account.begin_results(prompts, AT_ONCE, &id)?;
    let mut headers = account.limit_headers();
    let mut counted = Counted::new(&app.metrics, prompts.len());
    let (deadline, mut closing) = (account.deadline(), app.closing.subscribe());
    let turn = tokio::select! {
        biased;
        turn = turn_or_end(&mut account, &mut closing) => turn,
        error = deadline.passed() => return Err(account.end_late(&mut counted, error)),
    };
    turn.map_err(|why| ApiError::unavailable(why, "shutting_down"))?;
    let reports_work = account.wants_work();
    let mut vectors = Vec::with_capacity(prompts.len());
    for group in prompts.chunks(AT_ONCE) {
        let requests = group.iter().map(|prompt| Request {
            prompt: prompt.clone(),
            output: output.clone(),
            adapter,
            reports_work,
            ..Request::default()
        });
        let streams = ChoiceStreams::submit(&app.engine, app.closing.subscribe(), requests, field);
        let mut streams = streams.inspect_err(|error| {
            counted.forget();
            account.note_rejection(error);
        })?;
        let mut of_group = vec![Vec::new(); group.len()];
        loop {
            let next = tokio::select! {
                biased;
                next = streams.next() => next,
                error = deadline.passed() => return Err(account.end_late(&mut counted, error)),
            };
            let Some((index, event)) = next else { break };
            counted.note(&event);
            match event {
                Event::Hidden { values } => of_group[index] = values,
                Event::Likelihoods { logprobs } => of_group[index] = logprobs,
                Event::Work(work) => account.note_work(&work),
                Event::Done { usage, .. } => account.note_end(EndReason::Stop, &usage),
                Event::Failed { message, fault } => {
                    let error = ApiError::failed(message, fault);
                    account.note_failure(error.status.as_u16());
                    return Err(error);
                }
                Event::Delta { .. } | Event::Mark { .. } | Event::Accepted { .. } => {}
            }
        }
        if of_group.iter().any(Vec::is_empty) {
            account.note_failure(500);
            return Err(ApiError::engine_failed("the engine ended a request without its numbers"));
        }
        vectors.append(&mut of_group);
    }
    account.recorded().await;
    let work = account.told_work().map(|work| HeaderValue::try_from(json!(work).to_string()));
    headers.extend(work.and_then(Result::ok).map(|work| (HeaderName::from_static(relay::WORK), work)));
    Ok(Computed { vectors, id, headers })
}
