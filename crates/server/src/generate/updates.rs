//! The engine's events as updates: text split into parts, calls with ids, log-probabilities with
//! their text.

use std::collections::VecDeque;
use std::sync::Arc;

use thunder_engine::{AnsweredToken, Engine, Event, Fault, FinishReason, Request, TokenLogprob};
use thunder_model::chat::{AnswerParser, AnswerPart, Ending};
use thunder_traces::Work;

use super::prepare::{Parsing, Prepared};
use super::reply::Head;
use super::streams::ChoiceStreams;
use super::{EndReason, Update, What, relay};
use crate::account::{Account, turn_or_end};
use crate::app::App;
use crate::error::ApiError;
use crate::metrics::Counted;
use crate::requests::{Origin, Ticket};

/// The updates of all choices of one request, in the order of events.
#[derive(Debug)]
pub(crate) struct Updates {
    app: Arc<App>,
    account: Account,
    counted: Counted,
    state: State,
    splitters: Vec<Splitter>,
    ready: VecDeque<Step>,
    /// Makes the ids of calls, if another server may compute the answer again.
    salt: Option<u64>,
    ticket: Ticket,
}

/// An update, or the tokens of the updates before it.
#[derive(Debug)]
pub(crate) enum Step {
    Update(Update),
    /// The choice, and its tokens since the last such step.
    Accepted(usize, Vec<AnsweredToken>),
}

/// Where a request is.
#[derive(Debug)]
enum State {
    /// It waits for its turn.
    Queued(Queued),
    /// The engine has it.
    Running(ChoiceStreams),
}

/// Requests to submit when their turn comes.
#[derive(Debug)]
struct Queued {
    requests: Vec<Request>,
    prompt_field: &'static str,
    closing: tokio::sync::watch::Receiver<bool>,
}

impl Queued {
    /// Submits all engine requests or none.
    fn submit(&mut self, engine: &Engine) -> Result<ChoiceStreams, ApiError> {
        let requests = std::mem::take(&mut self.requests).into_iter();
        ChoiceStreams::submit(engine, self.closing.clone(), requests, self.prompt_field)
    }
}

impl Updates {
    /// Submits all engine requests or none, at once or when it is their turn.
    pub async fn submit(
        app: &Arc<App>,
        prepared: &Prepared,
        head: &Head,
        origin: &Origin,
        mut account: Account,
    ) -> Result<Self, ApiError> {
        let reports_work = account.wants_work();
        let requests: Vec<Request> =
            prepared.requests().map(|request| Request { reports_work, ..request }).collect();
        let ticket = app.requests.begin(&head.id, origin, head.prompt_tokens, requests.len());
        let splitters: Vec<_> = requests.iter().map(|_| Splitter::new(&prepared.parsing)).collect();
        let prompt_field = prepared.prompt_field;
        let checked = requests.iter().try_for_each(|request| request.check(app.engine.info()));
        let mut queued = Queued { requests, prompt_field, closing: app.closing.subscribe() };
        let is_first = futures_util::FutureExt::now_or_never(account.turn()).is_some();
        // Submitting wakes the engine, which may then run on this core.
        account.note_admitted();
        // A request that the engine would refuse does not wait first.
        let started = match checked {
            Err(error) => Err(ApiError::refused(&error, prompt_field)),
            Ok(()) if is_first => queued.submit(&app.engine).map(State::Running),
            Ok(()) => Ok(State::Queued(queued)),
        };
        let state = started.inspect_err(|error| account.note_rejection(error))?;
        account.note_submitted();
        let salt = prepared.relay.as_ref().map(|relay| relay.state.salt);
        let counted = Counted::new(&app.metrics, splitters.len());
        let (app, ready) = (app.clone(), VecDeque::new());
        Ok(Self { app, account, counted, state, splitters, ready, salt, ticket })
    }

    /// The ranks' work for the choices that have ended, if a node wants it.
    pub fn told_work(&self) -> Option<&Work> {
        self.account.told_work()
    }

    /// Number of choices, including ended ones.
    pub fn len(&self) -> usize {
        self.splitters.len()
    }

    /// The streams, when it is the request's turn.
    async fn streams(&mut self) -> Result<&mut ChoiceStreams, ApiError> {
        if let State::Queued(queued) = &mut self.state {
            let turn = turn_or_end(&mut self.account, &mut queued.closing).await;
            turn.map_err(|why| ApiError::unavailable(why, "shutting_down"))?;
            self.state = State::Running(queued.submit(&self.app.engine)?);
        }
        match &mut self.state {
            State::Running(streams) => Ok(streams),
            State::Queued(_) => Err(ApiError::engine_failed("the request was not submitted")),
        }
    }

    /// The next update; `None` when all choices have ended.
    pub async fn next(&mut self) -> Option<Update> {
        loop {
            if let Step::Update(update) = self.next_step().await? {
                return Some(update);
            }
        }
    }

    /// Ends all choices, whose time is over.
    fn end_late(&mut self, error: ApiError) -> Step {
        if let State::Running(streams) = &mut self.state {
            streams.cancel();
        }
        let error = self.account.end_late(&mut self.counted, error);
        Step::Update(Update { choice: 0, what: What::Failed(error) })
    }

    /// The next step; `None` when all choices have ended.
    pub async fn next_step(&mut self) -> Option<Step> {
        loop {
            // The end of an answer that a client has was already counted.
            self.account.recorded().await;
            if let Some(step) = self.ready.pop_front() {
                if matches!(&step, Step::Update(Update { what: What::Failed(_), .. })) {
                    if let State::Running(streams) = &mut self.state {
                        streams.cancel();
                    }
                    self.ready.clear();
                }
                return Some(step);
            }
            let deadline = self.account.deadline();
            let next = async {
                match self.streams().await {
                    Ok(streams) => streams.next().await,
                    Err(error) => Some((0, Event::Failed { message: error.message, fault: Fault::Engine })),
                }
            };
            let (choice, event) = tokio::select! {
                biased;
                next = next => next?,
                error = deadline.passed() => return Some(self.end_late(error)),
            };
            match event {
                Event::Accepted { tokens } => return Some(Step::Accepted(choice, tokens)),
                Event::Work(work) => {
                    self.account.note_work(&work);
                    continue;
                }
                _ => {}
            }
            self.counted.note(&event);
            self.ticket.note(&event);
            if matches!(event, Event::Delta { .. } | Event::Mark { .. }) {
                self.account.note_part();
            }
            let (app, splitter, salt) = (&self.app, &mut self.splitters[choice], self.salt);
            let new_id = |call| match salt {
                Some(salt) => relay::call_id(salt, choice, call),
                None => app.next_id("call_"),
            };
            let parts = splitter.split(event, &app.engine, new_id);
            self.account.note_texts(choice, &parts);
            for part in &parts {
                match part {
                    What::End { reason, usage } => self.account.note_end(*reason, usage),
                    What::Failed(error) => self.account.note_failure(error.status.as_u16()),
                    _ => {}
                }
            }
            // Before the next wait, which may be cancelled.
            self.ready.extend(parts.into_iter().map(|what| Step::Update(Update { choice, what })));
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
    /// Reports of tokens whose text is not complete yet, and the start of that text.
    reports: VecDeque<(usize, TokenLogprob)>,
}

impl Splitter {
    fn new(parsing: &Parsing) -> Self {
        let parser = parsing.parser();
        Self { parser, one_call: parsing.one_call, calls: 0, place: 0, reports: VecDeque::new() }
    }

    fn split(&mut self, event: Event, engine: &Engine, new_id: impl Fn(usize) -> String) -> Vec<What> {
        let Some(parser) = &mut self.parser else { return passed_on(event) };
        let end = match event {
            Event::Delta { text, logprobs } => {
                let mut at = self.place;
                self.place += text.len();
                for token in logprobs {
                    let next = at + token.bytes.len();
                    // Bytes that are not UTF-8 are shorter than their replacement.
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
                let in_call = parser.is_in_call();
                parser.finish(match reason {
                    FinishReason::Stop => Ending::Complete,
                    FinishReason::StopText(_) => Ending::StopText,
                    FinishReason::Length => Ending::CutOff,
                });
                Some((reason, usage, in_call))
            }
            Event::Failed { message, fault } => return vec![What::Failed(ApiError::failed(message, fault))],
            event @ (Event::Hidden { .. } | Event::Likelihoods { .. }) => return passed_on(event),
            // They come here no more.
            Event::Accepted { .. } | Event::Work(_) => return Vec::new(),
        };
        let parts = parser.take();
        let mut out: Vec<What> = parts.into_iter().filter_map(|part| self.update(part, &new_id)).collect();
        if let Some((reason, usage, in_call)) = end {
            let reason = EndReason::of(reason, self.calls > 0, in_call);
            out.push(What::End { reason, usage });
        }
        out
    }

    fn update(&mut self, part: AnswerPart, new_id: &impl Fn(usize) -> String) -> Option<What> {
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
                Some(What::CallBegin { id: id.unwrap_or_else(|| new_id(self.calls)), name })
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
        // What was not asked for.
        Event::Mark { .. }
        | Event::Accepted { .. }
        | Event::Work(_)
        | Event::Hidden { .. }
        | Event::Likelihoods { .. } => Vec::new(),
        Event::Done { reason, usage } => {
            vec![What::End { reason: EndReason::of(reason, false, false), usage }]
        }
        Event::Failed { message, fault } => vec![What::Failed(ApiError::failed(message, fault))],
    }
}
