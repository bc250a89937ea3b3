//! Requests whose results are numbers, not text.

use thunder_engine::{Event, Output, Request};

use super::EndReason;
use super::streams::ChoiceStreams;
use crate::account::{Account, turn_or_end};
use crate::app::App;
use crate::error::ApiError;

/// Requests of one body that are computed together, so that one body does not fill the queue.
const AT_ONCE: usize = 16;

/// What the engine reports of each prompt with an adapter, in their order, and the response's id,
/// which begins with `prefix`. `field` is the request field that they came from.
pub(crate) async fn compute(
    app: &App,
    mut account: Account,
    prompts: &[Vec<u32>],
    (output, adapter): (&Output, Option<usize>),
    (field, prefix): (&str, &str),
) -> Result<(Vec<Vec<f32>>, String), ApiError> {
    let id = app.next_id(prefix);
    account.begin_results(prompts, AT_ONCE, &id)?;
    let turn = turn_or_end(&mut account, &mut app.closing.subscribe()).await;
    turn.map_err(|why| ApiError::unavailable(why, "shutting_down"))?;
    let reports_work = account.is_traced();
    let mut all = Vec::with_capacity(prompts.len());
    for group in prompts.chunks(AT_ONCE) {
        let requests = group.iter().map(|prompt| Request {
            prompt: prompt.clone(),
            output: output.clone(),
            adapter,
            reports_work,
            ..Request::default()
        });
        let streams = ChoiceStreams::submit(&app.engine, app.closing.subscribe(), requests, field);
        let mut streams = streams.inspect_err(|error| account.note_rejection(error))?;
        let mut of_group = vec![Vec::new(); group.len()];
        while let Some((index, event)) = streams.next().await {
            app.metrics.note(&event);
            match event {
                Event::Hidden { values } => of_group[index] = values,
                Event::Likelihoods { logprobs } => of_group[index] = logprobs,
                Event::Work(work) => account.note_work(&work),
                Event::Done { usage, .. } => account.note_end(EndReason::Stop, &usage),
                Event::Failed { message } => {
                    account.note_failure(500);
                    return Err(ApiError::engine_failed(message));
                }
                Event::Delta { .. } | Event::Mark { .. } | Event::Accepted { .. } => {}
            }
        }
        if of_group.iter().any(Vec::is_empty) {
            account.note_failure(500);
            return Err(ApiError::engine_failed("the engine ended a request without its numbers"));
        }
        all.append(&mut of_group);
    }
    account.recorded().await;
    Ok((all, id))
}
