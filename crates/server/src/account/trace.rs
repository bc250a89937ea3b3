//! An account as a trace: the request, and where its time went.

use std::time::{Duration, SystemTime};

use axum::http::HeaderMap;
use thunder_access::{Caller, Outcome, UsageRecord};
use thunder_traces::{Attribute, RequestTrace, Stage, TraceContext};

use super::Open;

/// The trace that a request says it belongs to, or a new one.
pub(super) fn context(headers: &HeaderMap) -> TraceContext {
    let given = headers.get("traceparent").and_then(|value| value.to_str().ok());
    given.and_then(TraceContext::parse).unwrap_or_default()
}

/// Sends the trace of an account that is closed, if its caller wants it kept.
pub(super) fn send(open: &Open, caller: &Caller, record: &UsageRecord) {
    let Some((traces, context)) = open.app.config.traces.as_ref().zip(open.trace) else { return };
    if !context.is_sampled {
        return;
    }
    let duration = Duration::from_micros(record.duration_us);
    let mut stages = Vec::new();
    let mut from = Duration::ZERO;
    for (name, end) in [
        ("gateway", open.prepared),
        ("queue", open.passed),
        ("prefill", open.first_token),
        ("decode", open.first_token.map(|_| duration)),
    ] {
        let Some(end) = end else { break };
        stages.push(Stage { name, begin: from, end });
        from = end;
    }
    // Names of OpenTelemetry's conventions for HTTP and for generative models.
    let mut attributes = vec![
        Attribute::Text("http.request.method", "POST".to_owned()),
        Attribute::Text("http.route", record.api.clone()),
        Attribute::Integer("http.response.status_code", record.status.into()),
        Attribute::Text("gen_ai.operation.name", "chat".to_owned()),
        Attribute::Text("gen_ai.request.model", record.model.clone()),
        Attribute::Text("gen_ai.response.id", record.id.clone()),
        Attribute::Text("gen_ai.response.finish_reasons", record.outcome.name().to_owned()),
        Attribute::Integer("gen_ai.usage.input_tokens", record.prompt_tokens),
        Attribute::Integer("gen_ai.usage.output_tokens", record.completion_tokens),
        Attribute::Integer("thunder.cached_tokens", record.cached_tokens),
        Attribute::Integer("thunder.ranks", open.app.engine.info().ranks as u64),
    ];
    if let Some(key) = caller.key() {
        attributes.push(Attribute::Text("thunder.key", key.name.clone()));
        attributes.extend(key.team.clone().map(|team| Attribute::Text("thunder.team", team)));
    }
    let failure = (record.outcome == Outcome::Failed).then(|| "the engine failed".to_owned());
    let began = SystemTime::now().checked_sub(duration).unwrap_or(SystemTime::UNIX_EPOCH);
    let name = format!("POST {}", record.api);
    traces.send(RequestTrace { context, name, began, duration, stages, attributes, failure });
}
