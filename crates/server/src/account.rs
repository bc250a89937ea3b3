//! The account of one request: admitted by its caller's limits, queued fairly, and recorded at its
//! end, however it ends.

pub(crate) mod headers;
pub(crate) mod kept;
pub(crate) mod own;
mod trace;

use std::future::pending;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{OriginalUri, Request};
use axum::http::HeaderMap;
use thunder_access::{
    Access, Ask, Caller, Claimant, Gate, Gathering, Keeping, Now, Outcome, Policy, Recorded, Reservation,
    StartError, Turn, UsageRecord,
};
use thunder_engine::{RequestWork, Usage};
use thunder_traces::{TraceContext, Work};

use crate::access::{Peer, check_allowed, refused};
use crate::admission::Preparation;
use crate::app::App;
use crate::deadline::Deadline;
use crate::error::ApiError;
use crate::generate::choices::Tally;
use crate::generate::prepare::Prepared;
use crate::generate::{EndReason, What};
use crate::metrics::Counted;
use own::{Arrived, Moment, OwnTime, Part};

/// Tokens that the queue charges for a running answer without `max_tokens`.
const LIKELY_ANSWER_TOKENS: u64 = 256;

/// A request's account. If it is dropped before its answer has ended, the client has disconnected.
#[derive(Debug)]
pub(crate) struct Account {
    /// `None` once it is closed, and for a server without a store.
    open: Option<Open>,
    caller: Caller,
    /// Where the request comes from, if from the network.
    address: Option<IpAddr>,
    app: Arc<App>,
    deadline: Deadline,
    own: OwnTime,
    /// When its admission began, until it has ended.
    admitting: Option<Moment>,
    /// The engine has the request, or the request waits for its turn.
    is_submitted: bool,
    /// The usage record that is being written, and the time when that began.
    recording: Option<(Recorded, Moment)>,
    /// Texts, if a policy keeps them.
    kept: Option<Gathering>,
    /// A node of a cluster wants the ranks' work.
    tells_work: bool,
    /// The ranks' work, if it was requested.
    work: Option<Work>,
}

#[derive(Debug)]
struct Open {
    app: Arc<App>,
    /// `None`: only a trace is made, or a node keeps the account.
    access: Option<Access>,
    trace: Option<TraceContext>,
    path: String,
    began: Instant,
    /// When the prompt was ready.
    prepared: Option<Duration>,
    id: String,
    reservation: Option<Reservation>,
    turn: Option<Turn>,
    /// The request's caller, as named by a node.
    claimant: Option<Claimant>,
    /// When it was the request's turn.
    passed: Option<Duration>,
    first_token: Option<Duration>,
    prompt_tokens: u64,
    /// Answers that have not ended.
    left: usize,
    /// Parts of the answers that have not ended; each part is at least one token.
    parts: u64,
    used: Tally,
    outcome: Outcome,
}

impl Account {
    /// Opens the account of a request. Refuses it if its caller's limits would refuse it in any
    /// case.
    pub fn open(app: &Arc<App>, request: &Request) -> Result<Self, ApiError> {
        let arrived = request.extensions().get::<Arrived>().map_or_else(Moment::now, |arrived| arrived.0);
        let deadline = Deadline::of(request.headers(), app.config.request_timeout)?;
        let mut account = Self::begun(app, request, deadline)?;
        account.own.add(Part::Authorize, arrived.elapsed());
        Ok(account)
    }

    fn begun(app: &Arc<App>, request: &Request, deadline: Deadline) -> Result<Self, ApiError> {
        let caller = request.extensions().get::<Caller>().cloned().unwrap_or(Caller::Open);
        let access = app.config.access.clone();
        let trace = app.config.traces.as_ref().map(|_| trace::context(request.headers()));
        let claimant = headers::claimant(app, request.headers());
        if access.is_none() && trace.is_none() && claimant.is_none() {
            return Ok(Self::new(app, request, (None, caller), deadline));
        }
        let model = &app.engine.info().name;
        check_allowed(&caller, model)?;
        let original = request.extensions().get::<OriginalUri>().map(|uri| uri.0.path());
        let path = original.unwrap_or_else(|| request.uri().path()).to_owned();
        let checked = access.as_ref().map_or(Ok(()), |access| access.check(&caller, model, Now::read()));
        let open = Open { claimant, ..Open::new(app, access, trace, path) };
        let mut account = Self::new(app, request, (Some(open), caller), deadline);
        checked.map_err(|error| account.refuse_start(&error))?;
        Ok(account)
    }

    fn new(
        app: &Arc<App>,
        request: &Request,
        (open, caller): (Option<Open>, Caller),
        deadline: Deadline,
    ) -> Self {
        let address = match request.extensions().get::<Peer>() {
            Some(Peer::Network(address)) => Some(address.ip().to_canonical()),
            _ => None,
        };
        Self {
            open,
            caller,
            address,
            deadline,
            app: app.clone(),
            own: OwnTime::default(),
            admitting: None,
            is_submitted: false,
            recording: None,
            kept: None,
            tells_work: headers::tells_work(app, request.headers()),
            work: None,
        }
    }

    /// When the request has to be answered.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Whether a policy keeps the request's texts.
    pub fn keeping(&self) -> Option<Keeping> {
        let access = self.open.as_ref()?.access.as_ref()?;
        access.keeps(&self.caller, &self.app.engine.info().name)
    }

    /// Keeps the request's texts when it ends.
    pub fn keep(&mut self, kept: Option<Gathering>) {
        self.kept = kept;
    }

    /// Notes parts of an answer, if a policy keeps them.
    pub fn note_texts(&mut self, choice: usize, parts: &[What]) {
        if let Some(kept) = &mut self.kept {
            parts.iter().filter_map(|what| kept::part(choice, what)).for_each(|part| kept.note(part));
        }
    }

    /// Whether the ranks' work for the request is needed.
    pub fn wants_work(&self) -> bool {
        self.tells_work || self.is_traced()
    }

    /// Whether a trace of the request is sent.
    fn is_traced(&self) -> bool {
        self.open.as_ref().and_then(|open| open.trace).is_some_and(|trace| trace.is_sampled)
    }

    /// Notes the ranks' work for an answer. Times of several answers overlap, so only the answer
    /// with the most steps counts.
    pub fn note_work(&mut self, work: &RequestWork) {
        let queued = self.open.as_ref().and_then(|open| open.passed?.checked_sub(open.prepared?));
        let work = trace::work_of(work, queued.unwrap_or_default());
        let steps = |work: &Work| work.prefill.steps + work.decode.steps;
        if self.work.as_ref().is_none_or(|known| steps(known) < steps(&work)) {
            self.work = Some(work);
        }
    }

    /// The ranks' work for the answers that have ended, if a node wants it.
    pub fn told_work(&self) -> Option<&Work> {
        self.work.as_ref().filter(|_| self.tells_work)
    }

    /// Notes that the preparation is complete.
    pub fn note_admitted(&mut self) {
        if let Some(since) = self.admitting.take() {
            self.own.add(Part::Admit, since.elapsed());
        }
    }

    /// Notes the times of the parts of the request's preparation.
    pub fn note_preparation(&mut self, times: &Preparation) {
        self.own.add_wait(Part::Wait, times.wait);
        self.own.add_wait(Part::Switch, times.switch);
        self.own.add(Part::Prepare, times.work);
    }

    /// Notes that the request was handed over to the engine. The engine's time begins.
    pub fn note_submitted(&mut self) {
        self.is_submitted = true;
    }

    /// Waits until the usage record of an ended answer survives the end of the process. Before the
    /// answer's end it is ready at once. Cancelling the wait loses nothing.
    pub async fn recorded(&mut self) {
        if let Some((recorded, since)) = &mut self.recording {
            recorded.await;
            self.own.add_wait(Part::Record, since.elapsed().time);
            self.recording = None;
        }
    }

    /// The caller: the id of the request's key. Responses are kept for this caller only.
    pub fn owner(&self) -> Option<String> {
        self.caller.key().map(|key| key.id.clone())
    }

    /// Admits a request for text, and queues it.
    pub fn begin(&mut self, prepared: &Prepared, id: &str) -> Result<(), ApiError> {
        self.admitting = Some(Moment::now());
        let Some(open) = &self.open else { return Ok(()) };
        let answers = prepared.prompts.len() * prepared.options.n;
        let context = open.app.engine.info().context_length;
        let each = |prompt: &Vec<u32>, most: usize| most.min(context.saturating_sub(prompt.len())) as u64;
        let most = prepared.options.max_tokens.map(|most| {
            let prompts = prepared.prompts.iter().map(|prompt| each(prompt, most));
            prompts.sum::<u64>() * prepared.options.n as u64
        });
        self.admit(&prepared.prompts, (answers, most), answers, id)
    }

    /// Admits a request with one result for each prompt, and queues it. `at_once` of the prompts
    /// are computed in parallel.
    pub fn begin_results(&mut self, prompts: &[Vec<u32>], at_once: usize, id: &str) -> Result<(), ApiError> {
        self.admit(prompts, (prompts.len(), Some(0)), at_once.min(prompts.len()), id)
    }

    fn admit(
        &mut self,
        prompts: &[Vec<u32>],
        (answers, most): (usize, Option<u64>),
        at_once: usize,
        id: &str,
    ) -> Result<(), ApiError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        (open.left, open.id) = (answers, id.to_owned());
        let ask = Ask {
            prompt_tokens: open.prompt_tokens,
            answer_tokens: most,
            answers: answers as u64,
            ..Ask::default()
        };
        open.prepared = Some(open.began.elapsed());
        let Some(access) = open.access.clone() else {
            let (gate, claimant) = (open.app.config.gate.clone(), open.claimant.clone());
            let tokens = ask.prompt_tokens + ask.answer_tokens.unwrap_or(LIKELY_ANSWER_TOKENS * ask.answers);
            return match gate.zip(claimant) {
                Some((gate, claimant)) => self.enter(&gate, claimant, at_once, tokens),
                None => Ok(()),
            };
        };
        let admitted = access.begin(&self.caller, &open.app.engine.info().name, &ask, Now::read());
        let reservation = admitted.map_err(|error| self.refuse_start(&error))?;
        let Some(open) = &mut self.open else { return Ok(()) };
        let tokens = reservation.tokens();
        open.reservation = Some(reservation);
        match access.gate() {
            Some(gate) => self.enter(gate, self.claimant(&access.policy()), at_once, tokens),
            None => Ok(()),
        }
    }

    /// The claimant in the queue. Clients without keys are distinguished by their addresses.
    fn claimant(&self, policy: &Policy) -> Claimant {
        let mut claimant = self.caller.claimant(policy);
        if let (None, Some(address)) = (self.caller.key(), self.address) {
            claimant.key = address.to_string();
        }
        claimant
    }

    /// Joins the queue before the engine.
    fn enter(
        &mut self,
        gate: &Gate,
        claimant: Claimant,
        at_once: usize,
        tokens: u64,
    ) -> Result<(), ApiError> {
        let turn = gate.enter(claimant, at_once, tokens);
        let turn = turn.map_err(|full| self.refuse(&ApiError::busy(full.to_string())))?;
        if let Some(open) = &mut self.open {
            open.turn = Some(turn);
        }
        Ok(())
    }

    /// Waits until it is the request's turn. Cancelling the wait keeps its place.
    pub async fn turn(&mut self) {
        if let Some(open) = &mut self.open {
            if let Some(turn) = &mut open.turn {
                turn.pass().await;
            }
            open.passed.get_or_insert_with(|| open.began.elapsed());
        }
    }

    /// Headers with the remaining part of the limits, with OpenAI's names. Of several limits of the
    /// same kind, the one with the smallest rest.
    pub fn limit_headers(&self) -> HeaderMap {
        let access = self.open.as_ref().and_then(|open| Some((open, open.access.as_ref()?)));
        let Some((open, access)) = access else { return HeaderMap::new() };
        let model = &open.app.engine.info().name;
        headers::of_limits(&access.standings(&self.caller, Some(model), Now::read()))
    }

    /// Notes a part of an answer.
    pub fn note_part(&mut self) {
        if let Some(open) = &mut self.open {
            open.first_token.get_or_insert_with(|| open.began.elapsed());
            open.parts += 1;
        }
    }

    /// Notes the end of an answer. After the last one, [`Account::recorded`] waits for the record.
    pub fn note_end(&mut self, reason: EndReason, usage: &Usage) {
        let Some(open) = &mut self.open else { return };
        open.first_token.get_or_insert_with(|| open.began.elapsed());
        open.used.add(usage);
        open.outcome = reason.outcome();
        open.left = open.left.saturating_sub(1);
        if open.left == 0 {
            let (outcome, tokens) = (open.outcome, open.used.generated as u64);
            self.close(outcome, 200, tokens);
        }
    }

    /// Notes that the engine failed.
    pub fn note_failure(&mut self, status: u16) {
        if let Some(open) = &self.open {
            let tokens = open.seen();
            self.close(Outcome::Failed, status, tokens);
        }
    }

    /// Notes that the request has reached its deadline, for its requests of the engine too.
    pub fn end_late(&mut self, counted: &mut Counted, error: ApiError) -> ApiError {
        counted.note_late();
        self.note_failure(error.status.as_u16());
        error
    }

    /// Notes that the engine refused the request. Invalid requests are not recorded.
    pub fn note_rejection(&mut self, error: &ApiError) {
        if error.status.is_server_error() {
            self.note_failure(error.status.as_u16());
        } else if let Some(Open { reservation: Some(reservation), access: Some(access), .. }) =
            self.open.take()
        {
            access.cancel(reservation, Now::read());
        }
    }

    fn refuse_start(&mut self, error: &StartError) -> ApiError {
        if let (StartError::Limit(refusal), Some(open)) = (error, &self.open) {
            open.app.metrics.note_refusal(refusal.scope.name(), refusal.limit);
        }
        self.refuse(&refused(error))
    }

    fn refuse(&mut self, error: &ApiError) -> ApiError {
        if let Some(open) = &mut self.open {
            open.prompt_tokens = 0;
        }
        self.close(Outcome::Refused, error.status.as_u16(), 0);
        error.clone()
    }

    fn close(&mut self, outcome: Outcome, status: u16, answer_tokens: u64) {
        let Some(mut open) = self.open.take() else { return };
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let ended = Moment::now();
        let duration = open.began.elapsed();
        let cached = open.used.cached() as u64;
        let now = Now::read();
        let record = UsageRecord {
            number: 0,
            id: std::mem::take(&mut open.id),
            time: now.time,
            key: None,
            key_id: None,
            owner: None,
            team: None,
            model: open.app.engine.info().name.clone(),
            api: std::mem::take(&mut open.path),
            node: open.app.config.node.clone(),
            outcome,
            status,
            count: 1,
            prompt_tokens: open.prompt_tokens,
            cached_tokens: cached,
            completion_tokens: answer_tokens,
            cost_nanos: 0,
            queue_us: us(open.passed.unwrap_or(duration)),
            first_token_us: us(open.first_token.unwrap_or(duration)),
            duration_us: us(duration),
        };
        if let Some(turn) = &mut open.turn {
            turn.note_tokens(open.prompt_tokens.saturating_sub(cached) + answer_tokens);
        }
        trace::send(&open, &self.caller, &record, self.work.as_ref());
        if let Some(access) = &open.access {
            if let Some(kept) = self.kept.take() {
                kept.keep(access, &record, self.caller.key().map(AsRef::as_ref));
            }
            let recorded = access.finish(&self.caller, open.reservation.take(), record, now);
            self.recording = Some((recorded, ended));
            self.own.add_computed(Part::Record, ended.elapsed().computed);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let Some(open) = &self.open else {
            if self.is_submitted {
                self.app.metrics.note_own(&self.own);
            }
            return;
        };
        // A request that was never admitted was never counted: its body was invalid, or did not
        // arrive.
        if open.prepared.is_none() {
            return;
        }
        let tokens = open.seen();
        // A prompt that was still waiting used nothing.
        if open.passed.is_none()
            && let Some(open) = &mut self.open
        {
            open.prompt_tokens = 0;
        }
        // nginx's status for a client that has closed the connection.
        self.close(Outcome::Cancelled, 499, tokens);
    }
}

impl Open {
    fn new(app: &Arc<App>, access: Option<Access>, trace: Option<TraceContext>, path: String) -> Self {
        Self {
            app: app.clone(),
            access,
            trace,
            path,
            began: Instant::now(),
            prepared: None,
            id: String::new(),
            reservation: None,
            turn: None,
            claimant: None,
            passed: None,
            first_token: None,
            prompt_tokens: 0,
            left: 0,
            parts: 0,
            used: Tally::default(),
            outcome: Outcome::Stop,
        }
    }

    /// Tokens of an incomplete answer: all of its ended choices, and at least the seen ones of the
    /// others.
    fn seen(&self) -> u64 {
        (self.used.generated as u64).max(self.parts)
    }
}

/// The wait of [`Account::turn`], ended by the server's end.
pub(crate) async fn turn_or_end(
    account: &mut Account,
    closing: &mut tokio::sync::watch::Receiver<bool>,
) -> Result<(), &'static str> {
    let ends = async {
        if closing.wait_for(|closing| *closing).await.is_err() {
            pending::<()>().await;
        }
    };
    tokio::select! {
        biased;
        () = account.turn() => Ok(()),
        () = ends => Err("the server is shutting down"),
    }
}
