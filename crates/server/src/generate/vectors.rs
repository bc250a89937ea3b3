//! Requests whose results are numbers, not text.

use thunder_engine::{Event, Output, Request};

use super::streams::ChoiceStreams;
use crate::app::App;
use crate::error::ApiError;

/// Requests of one body that are computed together, so that one body does not fill the queue.
const AT_ONCE: usize = 16;

/// What the engine reports of each prompt, in their order. `field` is the request field that they
/// came from.
pub(crate) async fn compute(
    app: &App,
    prompts: &[Vec<u32>],
    output: &Output,
    field: &str,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut all = Vec::with_capacity(prompts.len());
    for group in prompts.chunks(AT_ONCE) {
        let requests = group.iter().map(|prompt| Request {
            prompt: prompt.clone(),
            output: output.clone(),
            ..Request::default()
        });
        let mut streams = ChoiceStreams::submit(&app.engine, app.closing.subscribe(), requests, field)?;
        let mut of_group = vec![Vec::new(); group.len()];
        while let Some((index, event)) = streams.next().await {
            app.metrics.note(&event);
            match event {
                Event::Hidden { values } => of_group[index] = values,
                Event::Likelihoods { logprobs } => of_group[index] = logprobs,
                Event::Failed { message } => return Err(ApiError::engine_failed(message)),
                Event::Delta { .. } | Event::Mark { .. } | Event::Accepted { .. } | Event::Done { .. } => {}
            }
        }
        all.append(&mut of_group);
    }
    Ok(all)
}
