//! The trace of a request at this node's gateway: where time was spent until the answer was sent.

use std::time::{Duration, Instant, SystemTime};

use thunder_access::{Caller, Outcome};
use thunder_traces::{Attribute, RequestTrace, Stage, TraceContext, Traces, Work};

use super::account::AnswerUsage;
use super::question::Question;
use crate::agent::Agent;

/// A trace that has begun. If it is dropped before it is ended, the client has left.
pub(super) struct Trace {
    traces: Traces,
    context: TraceContext,
    path: String,
    model: String,
    key: Option<(String, Option<String>)>,
    began: Instant,
    passed: Option<Duration>,
    first_token: Option<Duration>,
    node: Option<String>,
    /// The nodes of the ranks.
    nodes: Vec<String>,
    work: Option<Work>,
    id: String,
    is_over: bool,
}

impl Trace {
    /// Begins a trace, if there is a collector and the request should be traced.
    pub fn begin(agent: &Agent, caller: &Caller, question: &Question) -> Option<Self> {
        let traces = agent.api_settings().traces.clone()?;
        let given = question.traceparent.as_deref().and_then(TraceContext::parse);
        let context = given.unwrap_or_default();
        context.is_sampled.then(|| Self {
            traces,
            context,
            path: question.path.clone(),
            model: question.model.clone(),
            key: caller.key().map(|key| (key.name.clone(), key.team.clone())),
            began: Instant::now(),
            passed: None,
            first_token: None,
            node: None,
            nodes: Vec::new(),
            work: None,
            id: String::new(),
            is_over: false,
        })
    }

    /// Records that a head has the request, in a group with ranks on `nodes`.
    pub fn note_head(&mut self, node: &str, nodes: Vec<String>) {
        self.node = Some(node.to_owned());
        self.nodes = nodes;
        self.passed.get_or_insert_with(|| self.began.elapsed());
    }

    /// Records the ranks' work.
    pub fn note_work(&mut self, work: Option<Work>) {
        self.work = work;
    }

    /// Records the answer's id.
    pub fn note_begin(&mut self, id: &str) {
        id.clone_into(&mut self.id);
    }

    /// Records that the client gets tokens.
    pub fn note_tokens(&mut self) {
        self.first_token.get_or_insert_with(|| self.began.elapsed());
    }

    /// Sends the trace.
    pub fn end(&mut self, outcome: Outcome, status: u16, usage: &AnswerUsage) {
        self.is_over = true;
        let duration = self.began.elapsed();
        let (mut stages, mut from) = (Vec::new(), Duration::ZERO);
        let queued = self.work.as_ref().map_or(Duration::ZERO, |work| Duration::from_micros(work.queued_us));
        let ends = [
            ("gateway", self.passed),
            ("queue", self.passed.map(|passed| (passed + queued).min(self.first_token.unwrap_or(duration)))),
            ("prefill", self.first_token),
            ("decode", self.first_token.map(|_| duration)),
        ];
        for (name, end) in ends {
            let Some(end) = end else { break };
            stages.push(Stage::new(name, from, end));
            from = end;
        }
        if let Some(work) = &self.work {
            let computed = usage.prompt.saturating_sub(usage.cached);
            work.add_to(&mut stages, [computed, usage.completion], &self.nodes);
        }
        // Names from OpenTelemetry's conventions for HTTP and for generative models.
        let mut attributes = vec![
            Attribute::Text("http.request.method", "POST".to_owned()),
            Attribute::Text("http.route", self.path.clone()),
            Attribute::Integer("http.response.status_code", status.into()),
            Attribute::Text("gen_ai.request.model", self.model.clone()),
            Attribute::Text("gen_ai.response.id", self.id.clone()),
            Attribute::Text("gen_ai.response.finish_reasons", outcome.name().to_owned()),
            Attribute::Integer("gen_ai.usage.input_tokens", usage.prompt),
            Attribute::Integer("gen_ai.usage.output_tokens", usage.completion),
            Attribute::Integer("thunder.cached_tokens", usage.cached),
        ];
        attributes.extend(self.node.clone().map(|node| Attribute::Text("thunder.node", node)));
        if let Some((key, team)) = &self.key {
            attributes.push(Attribute::Text("thunder.key", key.clone()));
            attributes.extend(team.clone().map(|team| Attribute::Text("thunder.team", team)));
        }
        let failure = (outcome == Outcome::Failed).then(|| "the request failed".to_owned());
        let began = SystemTime::now().checked_sub(duration).unwrap_or(SystemTime::UNIX_EPOCH);
        let name = format!("POST {}", self.path);
        let context = self.context;
        self.traces.send(RequestTrace { context, name, began, duration, stages, attributes, failure });
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if !self.is_over {
            // nginx's status for a client that has closed the connection.
            self.end(Outcome::Cancelled, 499, &AnswerUsage::default());
        }
    }
}
