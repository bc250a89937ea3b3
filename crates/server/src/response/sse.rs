//! A response as a stream of server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use thunder_engine::Event;

use super::envelope::ResponseHead;
use super::format::ChoiceFormat;
use super::streams::ChoiceStreams;
use crate::error::ApiError;

/// A comment is sent after this time without an event, because proxies drop silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The last event of a complete stream. A failed stream does not have it.
const DONE: &str = "[DONE]";

/// The chunks of a response, made from the engine's events as they arrive.
#[derive(Debug)]
pub(crate) struct Chunks<S> {
    head: ResponseHead,
    streams: ChoiceStreams,
    format: S,
    include_usage: bool,
    /// Choices whose first chunk was made.
    opened: Vec<bool>,
    /// Number of choices that still run.
    running: usize,
    /// Tokens that the ended choices generated.
    generated: usize,
    /// Data of the events to send next.
    ready: VecDeque<String>,
}

impl<S: ChoiceFormat> Chunks<S> {
    pub fn new(head: ResponseHead, streams: ChoiceStreams, format: S, include_usage: bool) -> Self {
        let running = streams.len();
        let opened = vec![false; running];
        Self { head, streams, format, include_usage, opened, running, generated: 0, ready: VecDeque::new() }
    }

    /// Makes the chunks of one engine event.
    pub fn absorb(&mut self, index: usize, event: Event) {
        if !matches!(event, Event::Failed { .. }) && !std::mem::replace(&mut self.opened[index], true) {
            let first = self.format.first_chunk(index);
            self.send(first);
        }
        match event {
            Event::Delta { text, logprobs } => {
                if !text.is_empty() || !logprobs.is_empty() {
                    let choice = self.format.text_chunk(index, text, &logprobs);
                    self.send(Some(choice));
                }
            }
            Event::Done { reason, usage } => {
                let last = self.format.last_chunk(index, reason);
                self.send(Some(last));
                self.generated += usage.completion_tokens;
                self.running -= 1;
                if self.running == 0 {
                    self.finish();
                }
            }
            Event::Failed { message } => {
                self.streams.cancel();
                self.ready.push_back(ApiError::engine_failed(message).body().to_string());
            }
        }
    }

    fn send(&mut self, choice: Option<S::ChunkChoice>) {
        let Some(choice) = choice else { return };
        let usage = self.include_usage.then_some(None);
        let chunk = self.head.envelope(S::CHUNK_OBJECT, vec![choice], usage);
        self.ready.push_back(json(&chunk));
    }

    fn finish(&mut self) {
        if self.include_usage {
            let usage = self.head.usage(self.generated);
            let chunk = self.head.envelope::<S::ChunkChoice>(S::CHUNK_OBJECT, Vec::new(), Some(Some(usage)));
            self.ready.push_back(json(&chunk));
        }
        self.ready.push_back(DONE.to_owned());
    }

    /// The next event's data; `None` after the last.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Some(data);
            }
            let (index, event) = self.streams.next().await?;
            self.absorb(index, event);
        }
    }

    /// The HTTP response. Dropping its body cancels the choices.
    pub fn into_response(self) -> Response {
        let events = stream::unfold(self, async |mut chunks| {
            let data = chunks.next().await?;
            Some((Ok::<_, Infallible>(SseEvent::default().data(data)), chunks))
        });
        // nginx buffers responses unless this header says no.
        let unbuffered = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
        let body = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
        ([unbuffered], body).into_response()
    }
}

/// Serializes a chunk. Structs of strings and numbers always serialize; if one does not, the client
/// gets an error event.
fn json(chunk: &impl serde::Serialize) -> String {
    serde_json::to_string(chunk)
        .unwrap_or_else(|error| ApiError::engine_failed(error.to_string()).body().to_string())
}
