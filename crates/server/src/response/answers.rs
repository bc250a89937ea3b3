//! The answers to one HTTP request: several streams of the engine, taken as they come.

use std::task::Poll;

use thunder_engine::{Engine, Event, EventStream, Request};
use tokio::sync::watch;

use crate::error::ApiError;

/// Streams of the engine, one for each choice. Dropping them cancels what still runs.
#[derive(Debug)]
pub(crate) struct Answers {
    /// `None` once a choice has ended.
    streams: Vec<Option<EventStream>>,
    /// Where the next look for an event begins, so that no choice starves the others.
    first: usize,
    engine: Engine,
    /// Becomes true when the server can wait no longer.
    closing: watch::Receiver<bool>,
}

impl Answers {
    /// Submits all or none of the requests; `prompt` is the field that the prompts came from.
    pub fn submit(
        engine: &Engine,
        closing: watch::Receiver<bool>,
        requests: impl Iterator<Item = Request>,
        prompt: &str,
    ) -> Result<Self, ApiError> {
        let streams = requests
            .map(|request| engine.submit(request).map(Some))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| ApiError::refused(&error, prompt))?;
        Ok(Self { streams, first: 0, engine: engine.clone(), closing })
    }

    /// How many there are, ended ones included.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Cancels what still runs.
    pub fn cancel(&mut self) {
        self.streams.clear();
    }

    /// The next event of any choice, with the choice's index; `None` when all have ended. A choice that the engine
    /// dropped without a word fails, and so does one that is still running when the server closes.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        let Self { streams, first, engine, closing } = self;
        if streams.iter().all(Option::is_none) {
            return None;
        }
        let event = std::future::poll_fn(|context| {
            let count = streams.len();
            for step in 0..count {
                let index = (*first + step) % count;
                let Some(stream) = &mut streams[index] else { continue };
                if let Poll::Ready(event) = stream.poll_next(context) {
                    *first = index + 1;
                    return Poll::Ready((index, event));
                }
            }
            Poll::Pending
        });
        let (index, event) = tokio::select! {
            biased;
            // The sender lives as long as the server; should it be gone, the server is.
            _ = closing.wait_for(|closing| *closing) => (0, Some(failed("the server is shutting down"))),
            event = event => event,
        };
        let event = event.unwrap_or_else(|| match engine.stopped() {
            Some(why) => failed(&format!("the engine has stopped: {why}")),
            None => failed("the engine ended the answer without a word: see its log"),
        });
        match &event {
            Event::Delta { .. } => {}
            Event::Done { .. } => streams[index] = None,
            Event::Failed { .. } => streams.clear(),
        }
        Some((index, event))
    }
}

fn failed(message: &str) -> Event {
    Event::Failed { message: message.to_owned() }
}
