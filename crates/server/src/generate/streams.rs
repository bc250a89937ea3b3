//! The engine's streams for one HTTP request, one per choice, merged in the order of events.

use std::task::Poll;

use thunder_engine::{Engine, Event, EventStream, Fault, Request};
use tokio::sync::watch;

use crate::error::ApiError;

/// The engine's streams, one per choice. Dropping them cancels the choices that still run.
#[derive(Debug)]
pub(crate) struct ChoiceStreams {
    /// `None` once a choice has ended.
    streams: Vec<Option<EventStream>>,
    /// The choice to poll first next time. It rotates, so that no choice starves the others.
    first: usize,
    engine: Engine,
    /// Becomes true when the server's grace time is over.
    closing: watch::Receiver<bool>,
}

impl ChoiceStreams {
    /// Submits all requests or none. `prompt` is the request field that the prompts came from.
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

    /// Cancels the running choices.
    pub fn cancel(&mut self) {
        self.streams.clear();
    }

    /// The next event of any choice, with the choice's index; `None` after all have ended. A choice
    /// fails if the engine drops it without an event, or if it is still running when the server
    /// closes.
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
            // An error means that the sender is gone, and with it the server.
            _ = closing.wait_for(|closing| *closing) => (0, Some(failed("the server is shutting down"))),
            event = event => event,
        };
        let event = event.unwrap_or_else(|| match engine.stopped() {
            Some(why) => failed(&format!("the engine has stopped: {why}")),
            None => failed("the engine dropped the request without an error: see its log"),
        });
        match &event {
            Event::Done { .. } => streams[index] = None,
            Event::Failed { .. } => streams.clear(),
            _ => {}
        }
        Some((index, event))
    }
}

fn failed(message: &str) -> Event {
    Event::Failed { message: message.to_owned(), fault: Fault::Engine }
}
