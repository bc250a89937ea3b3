//! Accounting of one request at this node's gateway: its key's limits over all nodes admit it, and
//! it is recorded here when it ends, however it ends.

use std::time::{Duration, Instant};

use serde::Deserialize;
use thunder_access::{
    Access, Ask, Caller, Gathering, KeptPart, KeptText, Limited, Limits, Now, Outcome, Recorded, Refusal,
    Reservation, Standing, StartError, UsageRecord, Used, rate_headers,
};
use thunder_traces::Work;

use super::question::{Question, is_generation};
use super::trace::Trace;
use crate::agent::Agent;
use crate::agent::counting::{Count, Counted};
use crate::http::HttpError;

/// A head's report about an answer that has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct AnswerUsage {
    pub prompt: u64,
    pub cached: u64,
    pub completion: u64,
    pub outcome: Option<Outcome>,
}

/// A request's account. If it is dropped before it is closed, the client has left.
pub(super) struct Account {
    open: Option<Open>,
    trace: Option<Trace>,
    headers: String,
    /// The gateway that counts the request, until it has ended.
    counted_by: Option<Agent>,
}

struct Open {
    agent: Agent,
    access: Access,
    caller: Caller,
    limited: Vec<Limited>,
    reservation: Reservation,
    /// The ticket of the counting node.
    ticket: Option<u64>,
    record: UsageRecord,
    began: Instant,
    passed: Option<Duration>,
    first_token: Option<Duration>,
    tokens: u64,
    /// Tokens of the prompt, after the head has counted them.
    prompt: Option<u64>,
    /// The texts, if a policy keeps them.
    kept: Option<Gathering>,
}

impl Account {
    /// Admits a request, and counts it.
    ///
    /// # Errors
    /// The limit that refuses it.
    pub async fn open(agent: &Agent, caller: &Caller, question: &Question) -> Result<Self, HttpError> {
        let trace = Trace::begin(agent, caller, question);
        let model = &question.model;
        let keeps = |access: &Access| access.keeps(caller, model).filter(|_| is_generation(&question.path));
        let keeping = agent.0.options.access.as_ref().and_then(keeps);
        // Without keys, users cannot be distinguished, and nothing limits requests.
        let is_counted = |access: &Access| access.has_keys() || keeping.is_some();
        let Some(access) = agent.0.options.access.clone().filter(is_counted) else {
            return Ok(Self::counted(agent, None, trace, String::new()));
        };
        if access.is_failing() {
            let folder = access.folder().display();
            let error = StartError::NoRecord(format!("{folder} cannot be written: see the node's log"));
            return Err(HttpError::new(503, "usage_not_recorded", &error.to_string()));
        }
        let record = new_record(question);
        let limited = access.limited(caller, model);
        let ask = access.estimate(&limited, model, &question.ask);
        let now = Now::read();
        let is_free = limited.iter().all(|limited| limited.limits == Limits::default());
        let counted = if is_free { None } else { Some(count(agent, &limited, ask).await) };
        let (reservation, ticket, standings) = match counted {
            None => (access.reserve(&limited, &ask, now), None, Vec::new()),
            Some(Ok(Counted::Admitted { ticket, standings })) => {
                (access.reserve(&limited, &ask, now), Some(ticket), standings)
            }
            Some(Ok(Counted::Refused(refusal))) => {
                return Err(refuse(agent, (&access, caller), record, &refusal));
            }
            // Counting by this node alone is better than no answer: see docs/access.md.
            _ => match access.begin(caller, model, &ask, now) {
                Ok(reservation) => (reservation, None, access.standings(caller, Some(model), now)),
                Err(StartError::Limit(refusal)) => {
                    return Err(refuse(agent, (&access, caller), record, &refusal));
                }
                Err(error) => return Err(HttpError::new(503, "usage_not_recorded", &error.to_string())),
            },
        };
        let open = Open {
            agent: agent.clone(),
            access,
            caller: caller.clone(),
            limited,
            reservation,
            ticket,
            record,
            began: Instant::now(),
            passed: None,
            first_token: None,
            tokens: 0,
            prompt: None,
            kept: keeping.map(Gathering::new),
        };
        Ok(Self::counted(agent, Some(open), trace, headers(&standings)))
    }

    fn counted(agent: &Agent, open: Option<Open>, trace: Option<Trace>, headers: String) -> Self {
        agent.0.gateway_counts.begin();
        Self { open, trace, headers, counted_by: Some(agent.clone()) }
    }

    /// The account of a request that is not counted.
    pub fn none() -> Self {
        Self { open: None, trace: None, headers: String::new(), counted_by: None }
    }

    /// Counts the end of the request, once; `None`: the request was wrong.
    fn count_end(&mut self, outcome: Option<Outcome>) {
        if let Some(agent) = self.counted_by.take() {
            agent.0.gateway_counts.end(outcome);
        }
    }

    /// Header lines with the remaining limits.
    pub fn headers(&self) -> &str {
        &self.headers
    }

    /// Whether a trace of the request is sent.
    pub fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Records the result of a request that generates nothing, and the ranks' work for it.
    pub fn note_result(&mut self, work: Option<Work>) {
        self.trace.iter_mut().for_each(Trace::note_tokens);
        self.note_work(work);
    }

    /// Records the ranks' work for an answer that has ended.
    pub fn note_work(&mut self, work: Option<Work>) {
        if let Some(trace) = &mut self.trace {
            trace.note_work(work);
        }
    }

    /// Records that a head has the request, in a group with ranks on `nodes`.
    pub fn note_head(&mut self, node: &str, nodes: impl Fn() -> Vec<String>) {
        self.trace.iter_mut().for_each(|trace| trace.note_head(node, nodes()));
        if let Some(open) = &mut self.open {
            open.record.node = Some(node.to_owned());
            open.passed.get_or_insert_with(|| open.began.elapsed());
        }
    }

    /// Records the head's report: the answer's id, and the prompt's tokens.
    pub fn note_begin(&mut self, id: &str, prompt: Option<u64>) {
        self.trace.iter_mut().for_each(|trace| trace.note_begin(id));
        if let Some(open) = &mut self.open {
            id.clone_into(&mut open.record.id);
            open.prompt = prompt;
        }
    }

    /// Whether a policy keeps the request's texts.
    pub fn keeps_texts(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.kept.is_some())
    }

    /// Records texts of the prompt and of the answer.
    pub fn note_texts(&mut self, asked: Option<Vec<KeptText>>, parts: Vec<KeptPart>) {
        if let Some(kept) = self.open.as_mut().and_then(|open| open.kept.as_mut()) {
            asked.into_iter().for_each(|asked| kept.note_prompt(asked));
            parts.into_iter().for_each(|part| kept.note(part));
        }
    }

    /// Records tokens that the client gets.
    pub fn note_tokens(&mut self, tokens: usize) {
        self.trace.iter_mut().filter(|_| tokens > 0).for_each(Trace::note_tokens);
        if let Some(open) = self.open.as_mut().filter(|_| tokens > 0) {
            open.first_token.get_or_insert_with(|| open.began.elapsed());
            open.tokens += tokens as u64;
        }
    }

    /// Closes the account of an answer. When this returns, its record survives a crash.
    pub async fn close(&mut self, usage: &AnswerUsage) {
        self.count_end(Some(usage.outcome.unwrap_or(Outcome::Stop)));
        if let Some(mut trace) = self.trace.take() {
            trace.end(usage.outcome.unwrap_or(Outcome::Stop), 200, usage);
        }
        if let Some(mut open) = self.open.take() {
            open.record.outcome = usage.outcome.unwrap_or(Outcome::Stop);
            (open.record.prompt_tokens, open.record.cached_tokens) = (usage.prompt, usage.cached);
            open.record.completion_tokens = usage.completion;
            settle(open.finish()).await;
        }
    }

    /// Closes the account of a request that could not be answered.
    pub async fn fail(&mut self, status: u16) {
        self.count_end(Some(Outcome::Failed));
        if let Some(mut trace) = self.trace.take() {
            trace.end(Outcome::Failed, status, &AnswerUsage::default());
        }
        if let Some(mut open) = self.open.take() {
            (open.record.outcome, open.record.status) = (Outcome::Failed, status);
            open.record.prompt_tokens = open.prompt.unwrap_or(0);
            open.record.completion_tokens = open.tokens;
            settle(open.finish()).await;
        }
    }

    /// Closes the account of a wrong request, which counts only as a request of its minute.
    pub async fn cancel(&mut self, status: u16) {
        self.count_end(None);
        if let Some(mut trace) = self.trace.take() {
            trace.end(Outcome::Failed, status, &AnswerUsage::default());
        }
        if let Some(open) = self.open.take() {
            let settling = open.settlement(Used::default());
            open.access.cancel(open.reservation, Now::read());
            settle((open.agent, settling, Recorded::default())).await;
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.count_end(Some(Outcome::Cancelled));
        let Some(mut open) = self.open.take() else { return };
        // nginx's status for a client that has closed the connection.
        (open.record.outcome, open.record.status) = (Outcome::Cancelled, 499);
        open.record.completion_tokens = open.tokens;
        // A prompt that no head got has cost nothing.
        open.record.prompt_tokens = open.prompt.filter(|_| open.passed.is_some()).unwrap_or(0);
        let settling = open.finish();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(settle(settling));
        }
    }
}

/// The message to the counting node; `None` if that node has not counted the request.
type Settlement = Option<Count>;

impl Open {
    fn settlement(&self, used: Used) -> Settlement {
        let scopes = self.limited.iter().map(|limited| limited.scope.clone()).collect();
        Some(Count::Settle { ticket: self.ticket?, scopes, held: self.reservation.held(), used })
    }

    /// Records the request, and stores its texts.
    fn finish(mut self) -> (Agent, Settlement, Recorded) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (now, duration) = (Now::read(), self.began.elapsed());
        let mut record = self.record.clone();
        record.time = now.time;
        record.queue_us = us(self.passed.unwrap_or(duration));
        record.first_token_us = us(self.first_token.unwrap_or(duration));
        record.duration_us = us(duration);
        let price = self.access.policy().model(&record.model).price.unwrap_or_default();
        let used = Used {
            prompt_tokens: record.prompt_tokens,
            answer_tokens: record.completion_tokens,
            nanos: price.nanos(record.prompt_tokens, record.cached_tokens, record.completion_tokens),
        };
        let settlement = self.settlement(used);
        if let Some(kept) = self.kept.take() {
            kept.keep(&self.access, &record, self.caller.key().map(AsRef::as_ref));
        }
        let recorded = self.access.finish(&self.caller, Some(self.reservation), record, now);
        (self.agent, settlement, recorded)
    }
}

/// Tells the counting node what a request used. When this returns, its limits are free again and
/// the usage record survives a crash.
async fn settle((agent, settlement, recorded): (Agent, Settlement, Recorded)) {
    recorded.await;
    if let Some(settlement) = settlement
        && let Err(why) = agent.count(&settlement).await
    {
        tracing::debug!("a request's use is not counted for all nodes: {why}");
    }
}

async fn count(agent: &Agent, limited: &[Limited], ask: Ask) -> Result<Counted, String> {
    let counted = agent.count(&Count::Admit { limited: limited.to_vec(), ask }).await;
    counted.inspect_err(|why| tracing::warn!("limits are counted by this node alone: {why}"))
}

fn new_record(question: &Question) -> UsageRecord {
    UsageRecord {
        number: 0,
        id: String::new(),
        time: Now::read().time,
        key: None,
        key_id: None,
        owner: None,
        team: None,
        model: question.model.clone(),
        api: question.path.clone(),
        node: None,
        outcome: Outcome::Stop,
        status: 200,
        count: 1,
        prompt_tokens: 0,
        cached_tokens: 0,
        completion_tokens: 0,
        cost_nanos: 0,
        queue_us: 0,
        first_token_us: 0,
        duration_us: 0,
    }
}

/// Records a refusal, and returns its answer.
fn refuse(
    agent: &Agent,
    (access, caller): (&Access, &Caller),
    mut record: UsageRecord,
    refusal: &Refusal,
) -> HttpError {
    agent.0.gateway_counts.refuse(refusal);
    (record.outcome, record.status) = (Outcome::Refused, 429);
    drop(access.finish(caller, None, record, Now::read()));
    HttpError::over_limit(refusal)
}

/// Header lines of these limits, as OpenAI's API has them.
fn headers(standings: &[Standing]) -> String {
    crate::http::header_lines(rate_headers(standings))
}
