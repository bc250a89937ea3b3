//! A response as a stream: server-sent events, or lines of JSON.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::stream as futures_stream;
use serde_json::Value;

use super::reply::{Head, Presenter};
use super::updates::Updates;
use super::{Update, What};
use crate::error::ApiError;

/// A stream without an event for this long gets a comment, because proxies drop silent connections.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How a stream is framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// Server-sent events.
    Events,
    /// A JSON object in each line.
    Lines,
}

impl StreamKind {
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Events => "text/event-stream",
            Self::Lines => "application/x-ndjson",
        }
    }
}

/// The frames to send next.
#[derive(Debug)]
pub(crate) struct Frames {
    kind: StreamKind,
    ready: VecDeque<Bytes>,
}

impl Frames {
    /// No frames yet.
    pub fn new(kind: StreamKind) -> Self {
        Self { kind, ready: VecDeque::new() }
    }

    /// Takes the frames, as text.
    pub fn take_text(&mut self) -> String {
        self.ready.drain(..).map(|frame| String::from_utf8_lossy(&frame).into_owned()).collect()
    }

    /// Sends JSON.
    pub fn json(&mut self, value: &Value) {
        self.text(&value.to_string());
    }

    /// Sends a serializable body. Structs of strings and numbers always serialize; if one does not,
    /// the client gets an error.
    pub fn body(&mut self, body: &impl serde::Serialize) {
        let text = serde_json::to_string(body)
            .unwrap_or_else(|error| ApiError::engine_failed(error.to_string()).body().to_string());
        self.text(&text);
    }

    /// Sends a line of text, which has no line break itself.
    pub fn text(&mut self, text: &str) {
        let frame = match self.kind {
            StreamKind::Events => format!("data: {text}\n\n"),
            StreamKind::Lines => format!("{text}\n"),
        };
        self.ready.push_back(frame.into());
    }

    /// Sends a named event.
    pub fn event(&mut self, name: &str, value: &Value) {
        self.ready.push_back(format!("event: {name}\ndata: {value}\n\n").into());
    }
}

struct Stream<P> {
    head: Head,
    updates: Updates,
    presenter: P,
    frames: Frames,
    /// Choices that have not ended.
    running: usize,
    is_over: bool,
}

impl<P: Presenter> Stream<P> {
    fn absorb(&mut self, update: Update) {
        let Self { head, presenter, frames, .. } = self;
        if let What::Failed(error) = update.what {
            presenter.failed(head, &error, frames);
            self.is_over = true;
            return;
        }
        let ends = matches!(update.what, What::End { .. });
        presenter.update(head, update, frames);
        self.running -= usize::from(ends);
        if self.running == 0 {
            presenter.end(head, frames);
            self.is_over = true;
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.frames.ready.pop_front() {
                return Some(frame);
            }
            if self.is_over {
                return None;
            }
            match tokio::time::timeout(KEEP_ALIVE, self.updates.next()).await {
                Ok(update) => self.absorb(update?),
                Err(_) if self.frames.kind == StreamKind::Events => {
                    return Some(Bytes::from_static(b":\n\n"));
                }
                // Lines of JSON have no comments.
                Err(_) => {}
            }
        }
    }
}

/// The HTTP response. Dropping its body cancels the choices.
pub(crate) fn stream<P: Presenter>(
    head: Head,
    updates: Updates,
    presenter: P,
    first: Option<Update>,
) -> Response {
    let running = updates.len();
    let frames = Frames::new(P::STREAM);
    let mut stream = Stream { head, updates, presenter, frames, running, is_over: false };
    stream.presenter.begin(&stream.head, &mut stream.frames);
    if let Some(update) = first {
        stream.absorb(update);
    }
    let frames = futures_stream::unfold(stream, async |mut stream| {
        let frame = stream.next().await?;
        Some((Ok::<_, Infallible>(frame), stream))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(P::STREAM.content_type()));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx buffers responses unless this header says no.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
