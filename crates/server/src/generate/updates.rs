//! The engine's events as updates: text split into parts, calls with ids, log-probabilities with
//! the text that they belong to.

use std::collections::VecDeque;
use std::sync::Arc;

use thunder_engine::{Engine, Event, TokenLogprob};
use thunder_model::chat::{AnswerParser, AnswerPart};

use super::prepare::{Parsing, Prepared};
use super::reply::Head;
use super::streams::ChoiceStreams;
use super::{EndReason, Update, What};
use crate::app::App;
use crate::error::ApiError;
use crate::requests::{Origin, Ticket};

/// The updates of all choices of one request, in the order of events.
#[derive(Debug)]
pub(crate) struct Updates {
    app: Arc<App>,
    streams: ChoiceStreams,
    splitters: Vec<Splitter>,
    ready: VecDeque<Update>,
    ticket: Ticket,
}

impl Updates {
    /// Submits all engine requests or none.
    pub fn submit(
        app: &Arc<App>,
        prepared: &Prepared,
        head: &Head,
        origin: &Origin,
    ) -> Result<Self, ApiError> {
        let closing = app.closing.subscribe();
        let streams =
            ChoiceStreams::submit(&app.engine, closing, prepared.requests(), prepared.prompt_field)?;
        let splitters = (0..streams.len()).map(|_| Splitter::new(&prepared.parsing)).collect();
        let ticket = app.requests.begin(&head.id, origin, head.prompt_tokens, streams.len());
        Ok(Self { app: app.clone(), streams, splitters, ready: VecDeque::new(), ticket })
    }

    /// Number of choices, including ended ones.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// The next update; `None` when all choices have ended.
    pub async fn next(&mut self) -> Option<Update> {
        loop {
            if let Some(update) = self.ready.pop_front() {
                if matches!(update.what, What::Failed(_)) {
                    self.streams.cancel();
                    self.ready.clear();
                }
                return Some(update);
            }
            let (choice, event) = self.streams.next().await?;
            self.app.metrics.note(&event);
            self.ticket.note(&event);
            let (app, splitter) = (&self.app, &mut self.splitters[choice]);
            let parts = splitter.split(event, &app.engine, || app.next_id("call_"));
            self.ready.extend(parts.into_iter().map(|what| Update { choice, what }));
        }
    }
}

/// Splits the events of one choice.
#[derive(Debug)]
struct Splitter {
    parser: Option<AnswerParser>,
    one_call: bool,
    calls: usize,
    /// Bytes of the answer so far.
    place: usize,
    /// Reports of tokens that wait for their text, and where it begins.
    reports: VecDeque<(usize, TokenLogprob)>,
}

impl Splitter {
    fn new(parsing: &Parsing) -> Self {
        let parser = parsing.parser();
        Self { parser, one_call: parsing.one_call, calls: 0, place: 0, reports: VecDeque::new() }
    }

    fn split(&mut self, event: Event, engine: &Engine, new_id: impl Fn() -> String) -> Vec<What> {
        let Some(parser) = &mut self.parser else { return passed_on(event) };
        let end = match event {
            Event::Delta { text, logprobs } => {
                let mut at = self.place;
                self.place += text.len();
                for token in logprobs {
                    let next = at + token.bytes.len();
                    // Characters that are no UTF-8 are shorter than what stands for them.
                    self.reports.push_back((at.min(self.place.saturating_sub(1)), token));
                    at = next;
                }
                parser.push(&text);
                None
            }
            Event::Mark { id } => {
                let name = engine.info().tokenizer.decode(&[id], false);
                self.place += name.len();
                parser.push_special(&name);
                None
            }
            Event::Done { reason, usage } => {
                parser.finish();
                Some((reason, usage))
            }
            Event::Failed { message } => return vec![What::Failed(message)],
        };
        let parts = parser.take();
        let mut out: Vec<What> = parts.into_iter().filter_map(|part| self.update(part, &new_id)).collect();
        if let Some((reason, usage)) = end {
            let reason = EndReason::of(reason, self.calls > 0);
            out.push(What::End { reason, usage });
        }
        out
    }

    fn update(&mut self, part: AnswerPart, new_id: &impl Fn() -> String) -> Option<What> {
        if matches!(part, AnswerPart::CallBegin { .. }) {
            self.calls += 1;
        }
        let is_extra =
            self.one_call && (self.calls > 1 || self.calls == 1 && matches!(part, AnswerPart::Text { .. }));
        match part {
            _ if is_extra => None,
            AnswerPart::Text { text, at } => {
                let logprobs = self.reports_of(at, at + text.len());
                Some(What::Text { text, logprobs })
            }
            AnswerPart::Reasoning(text) => Some(What::Reasoning(text)),
            AnswerPart::CallBegin { name, id } => {
                Some(What::CallBegin { id: id.unwrap_or_else(new_id), name })
            }
            AnswerPart::Arguments(text) => Some(What::Arguments(text)),
            AnswerPart::CallEnd => Some(What::CallEnd),
        }
    }

    /// The reports of tokens whose text begins in this part of the answer. Those before it belong
    /// to thinking or to calls.
    fn reports_of(&mut self, from: usize, to: usize) -> Vec<TokenLogprob> {
        let mut reports = Vec::new();
        while let Some((at, report)) = self.reports.pop_front_if(|(at, _)| *at < to) {
            if at >= from {
                reports.push(report);
            }
        }
        reports
    }
}

/// The update of an event whose text needs no parsing.
fn passed_on(event: Event) -> Vec<What> {
    match event {
        Event::Delta { text, logprobs } if text.is_empty() && logprobs.is_empty() => Vec::new(),
        Event::Delta { text, logprobs } => vec![What::Text { text, logprobs }],
        Event::Mark { .. } => Vec::new(),
        Event::Done { reason, usage } => vec![What::End { reason: EndReason::of(reason, false), usage }],
        Event::Failed { message } => vec![What::Failed(message)],
    }
}
